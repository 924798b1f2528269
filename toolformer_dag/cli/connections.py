"""Connections of a server: how many there may be, and how long one may take to ask, and to read its answers."""

import resource
from asyncio import Transport
from collections.abc import Sequence
from typing import Any

from uvicorn import Config
from uvicorn.protocols.http.h11_impl import H11Protocol

HEAD_SECONDS = 10.0
"""How long a connection may take to send the head of a request; a body, or reading an answer, once to twice as long."""
PIPELINE_SECONDS = 1.0
"""How long a request waits that came before the one before it was answered: few clients do that, and none has to."""
MOST_EARLY = 4
"""Requests of a connection that may come so, one after the other; it is closed then."""
MOST = 1000
"""Connections at once, where fewer do not use half of the files that may be open; half as many of one address."""
READ_BYTES = 8192
"""Bytes that are read from a connection before another has its turn: 1,365 parts of a body of one byte each."""


class BoundedConnection(H11Protocol):
    """A connection that ends when its client does not ask, does not read its answers, or too many are open.

    Every HEAD_SECONDS it is looked at, until it is lost: a connection that is closing still holds its file while the
    client reads nothing. Unlike httptools, h11 bounds the bytes of a head, with `h11_max_incomplete_event_size`.
    """

    def connection_made(self, transport: Transport) -> None:  # type: ignore[override]
        """Take a connection; of too many, end one that asks for nothing or asks too early, else this one."""
        super().connection_made(transport)
        self._is_lost = False
        self._early_requests = 0  # one after the other
        transport.max_size = READ_BYTES  # type: ignore[attr-defined] # asyncio reads as many bytes at once
        self.loop.call_later(HEAD_SECONDS, self._look, None, 0)
        most = _most_connections()
        same_address = self._of_same_address()
        if len(same_address) > most // 2:
            self._end_one_of(same_address)
        elif len(self.connections) > most:
            self._end_one_of([other for other in self.connections if isinstance(other, BoundedConnection)])

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the connection."""
        self._is_lost = True
        super().connection_lost(exc)

    def on_response_complete(self) -> None:
        """Go on with the next request; one that came too early has to wait, and nothing is read until then."""
        next_request, _ = self.conn.trailing_data
        self._early_requests = self._early_requests + 1 if next_request else 0
        if self._early_requests > MOST_EARLY:
            self.transport.close()
        if next_request and not self.transport.is_closing():
            self.flow.pause_reading()
            self.loop.call_later(PIPELINE_SECONDS, super().on_response_complete)
        else:
            super().on_response_complete()

    def _of_same_address(self) -> list["BoundedConnection"]:
        """Return the connections, this one too, of the address that this one comes from."""
        same = []
        for other in self.connections:
            if isinstance(other, BoundedConnection) and (other.client or "")[:1] == (self.client or "")[:1]:
                same.append(other)
        return same

    def _end_one_of(self, others: Sequence["BoundedConnection"]) -> None:
        """End one of these connections that has asked for nothing, or too early; this one where there is none."""
        for other in others:
            asks_nothing = other.cycle is None or other.cycle.response_complete
            if other is not self and (other._early_requests or asks_nothing):
                other.transport.abort()
                return
        self.transport.abort()

    def _look(self, cycle_before: object, unread_before: int) -> None:
        """End the connection if nothing has moved since it was looked at before.

        cycle_before: its request at that time; None before the first. unread_before: bytes of answers that the system
        had not taken at that time. Nothing has moved where all answers are sent, or a body is awaited, or the client
        has read nothing of what is unread.
        """
        if self._is_lost:
            return
        unread = self.transport.get_write_buffer_size()
        is_same = self.cycle is cycle_before
        waits_for_client = cycle_before is None or self.cycle.response_complete or self.cycle.more_body
        reads_nothing = 0 < unread_before <= unread
        if (is_same and waits_for_client) or reads_nothing:
            self.transport.abort()
        else:
            self.loop.call_later(HEAD_SECONDS, self._look, self.cycle, unread)


def bounded_config(app: Any, **options: Any) -> Config:
    """Return the configuration of a server whose connections are bounded. options: others of `uvicorn.Config`."""
    # asyncio's own loop: its transports can be told how much they read at once.
    return Config(app, http=BoundedConnection, loop="asyncio", log_level="warning", **options)


def _most_connections() -> int:
    """Return how many connections there may be at once."""
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return MOST if files == resource.RLIM_INFINITY else min(MOST, files // 2)
