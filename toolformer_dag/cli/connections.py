"""Limits on a server's HTTP connections: how many are open, and how long a client may take to send and to read."""

import resource
from asyncio import Transport
from collections.abc import Sequence
from typing import Any

from uvicorn import Config
from uvicorn.protocols.http.h11_impl import H11Protocol

HEAD_SECONDS = 10.0
"""Seconds between checks of a connection: it may take so long to send the head of a request."""
PIPELINE_SECONDS = 1.0
"""Delay of a pipelined request (sent before the previous one was answered), which no client needs to send."""
MOST_EARLY = 4
"""Pipelined requests in a row before the connection is closed."""
MOST = 1000
"""Open connections, at most half of the files that the process may open; half as many from one address."""
READ_BYTES = 8192
"""Bytes read from a connection before another has its turn: 1,365 parts of a body of one byte each."""


class BoundedConnection(H11Protocol):
    """An HTTP connection that is closed when its client stalls, or when too many connections are open.

    It is checked every HEAD_SECONDS until it is lost: even a closing connection holds its file while the client reads
    nothing. Unlike httptools, h11 bounds the bytes of a head, with `h11_max_incomplete_event_size`.
    """

    def connection_made(self, transport: Transport) -> None:  # type: ignore[override]
        """Accept a connection, and close one if too many are open."""
        super().connection_made(transport)
        self._is_lost = False
        self._pipelined_requests = 0  # in a row
        transport.max_size = READ_BYTES  # type: ignore[attr-defined] # asyncio reads as many bytes at once
        self.loop.call_later(HEAD_SECONDS, self._check_progress, None, 0)
        self._close_one_of_too_many()

    def _close_one_of_too_many(self) -> None:
        """Close a connection if too many are open in all, or from this client's address."""
        most = _compute_connection_limit()
        same_address = self._list_connections_of_client()
        if len(same_address) > most // 2:
            self._close_idle(same_address)
        elif len(self.connections) > most:
            self._close_idle([other for other in self.connections if isinstance(other, BoundedConnection)])

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the connection."""
        self._is_lost = True
        super().connection_lost(exc)

    def on_response_complete(self) -> None:
        """Go on with the next request; a pipelined one waits PIPELINE_SECONDS, and nothing is read meanwhile.

        A request is pipelined if it was sent before this response. The connection is closed after MOST_EARLY in a row.
        """
        pipelined_bytes, _ = self.conn.trailing_data  # what was received after the request that is answered now
        if pipelined_bytes:
            self._pipelined_requests += 1
        else:
            self._pipelined_requests = 0
        if self._pipelined_requests > MOST_EARLY:
            self.transport.close()
        if not pipelined_bytes or self.transport.is_closing():
            super().on_response_complete()
            return
        self.flow.pause_reading()
        self.loop.call_later(PIPELINE_SECONDS, super().on_response_complete)  # which resumes reading

    def _list_connections_of_client(self) -> list["BoundedConnection"]:
        """Return the open connections from this client's address, this one included."""
        return [
            other
            for other in self.connections
            if isinstance(other, BoundedConnection) and other._address == self._address
        ]

    @property
    def _address(self) -> object:
        """The client's address without its port; None if unknown."""
        return self.client[0] if self.client else None

    def _close_idle(self, others: Sequence["BoundedConnection"]) -> None:
        """Close the first other connection that is idle or sends pipelined requests; without any, close this one."""
        for other in others:
            if other is not self and (other._pipelined_requests or other._is_idle):
                other.transport.abort()
                return
        self.transport.abort()

    @property
    def _is_idle(self) -> bool:
        """Whether no request is being answered."""
        return self.cycle is None or self.cycle.response_complete

    def _check_progress(self, cycle_before: object, unread_before: int) -> None:
        """Close the connection if its client stalls: it has not read, or not sent, what was due since the last check.

        - cycle_before: the request at the last check, None at the first.
        - unread_before: how many bytes waited for the client to read them then.
        """
        if self._is_lost:
            return
        unread = self.transport.get_write_buffer_size()
        reads_nothing = 0 < unread_before <= unread  # bytes waited, and have not become fewer
        if reads_nothing or self._sends_nothing_since(cycle_before):
            self.transport.abort()
        else:
            self.loop.call_later(HEAD_SECONDS, self._check_progress, self.cycle, unread)  # the next check

    def _sends_nothing_since(self, cycle_before: object) -> bool:
        """Return whether the request is still the same and the server waits for the client to send more."""
        if self.cycle is not cycle_before:
            return False
        return cycle_before is None or self.cycle.response_complete or self.cycle.more_body


def build_bounded_config(app: Any, **options: Any) -> Config:
    """Return a server configuration with bounded connections. `options`: other arguments of `uvicorn.Config`."""
    # asyncio's own loop: its transports can be told how much they read at once.
    return Config(app, http=BoundedConnection, loop="asyncio", log_level="warning", **options)


def _compute_connection_limit() -> int:
    """Return how many connections may be open at once."""
    open_files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return MOST if open_files == resource.RLIM_INFINITY else min(MOST, open_files // 2)
