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
MAX_PIPELINED_REQUESTS = 4
"""Pipelined requests in a row before the connection is closed."""
MOST = 1000
"""Open connections, at most half of the files that the process may open; half as many from one address."""
MAX_READ_BYTES = 8192
"""Bytes read from a connection before another has its turn: 1,365 parts of a body of one byte each."""


class BoundedConnection(H11Protocol):
    """An HTTP connection that is closed when its client stalls, or when too many connections are open.

    It is checked every HEAD_SECONDS until it is lost. Even a connection that is being closed occupies an open file as
    long as its client reads nothing. The parser is h11 because it limits the bytes of a head, unlike httptools
    (`h11_max_incomplete_event_size`).
    """

    def connection_made(self, transport: Transport) -> None:  # type: ignore[override]
        """Accept a connection, begin to check it regularly, and close one if too many are open."""
        super().connection_made(transport)
        self._is_lost = False
        self._pipelined_request_count = 0  # how many came in a row
        transport.max_size = MAX_READ_BYTES  # type: ignore[attr-defined] # asyncio reads as many bytes at once

        first_cycle = None  # uvicorn's object for a request and its response: no request has come yet
        unread_bytes = 0  # of a response, sent to the client but not read by it yet
        self.loop.call_later(HEAD_SECONDS, self._check_progress, first_cycle, unread_bytes)
        self._enforce_connection_limit()

    def _enforce_connection_limit(self) -> None:
        """Close a connection if too many are open: more than the limit in all, or over half of it from this address.

        It is another one that nobody needs now, or this one if there is none.
        """
        limit = _compute_connection_limit()
        connections_from_address = self._list_connections_from_address()

        if len(connections_from_address) > limit // 2:
            self._close_idle_connection(connections_from_address)
        elif len(self.connections) > limit:
            candidates = [connection for connection in self.connections if isinstance(connection, BoundedConnection)]
            self._close_idle_connection(candidates)

    def connection_lost(self, exc: Exception | None) -> None:
        """Note that the connection is gone, so that it is not checked any more."""
        self._is_lost = True
        super().connection_lost(exc)

    def on_response_complete(self) -> None:
        """Go on with the next request after a response, but not at once if the request is pipelined.

        A request is pipelined if it was sent before this response, which no usual client does. It waits for
        PIPELINE_SECONDS, in which nothing is read. After more than MAX_PIPELINED_REQUESTS in a row, the connection is
        closed.
        """
        # What came after the request that has just been answered. Whether the client has ended its side is not needed.
        pipelined_bytes, _is_ended = self.conn.trailing_data
        if pipelined_bytes:
            self._pipelined_request_count += 1
        else:
            self._pipelined_request_count = 0

        if self._pipelined_request_count > MAX_PIPELINED_REQUESTS:
            self.transport.close()

        # On a closing connection uvicorn only counts the request, and begins no other one.
        if not pipelined_bytes or self.transport.is_closing():
            super().on_response_complete()
            return

        self.flow.pause_reading()
        self.loop.call_later(PIPELINE_SECONDS, super().on_response_complete)  # which reads on

    def _list_connections_from_address(self) -> list["BoundedConnection"]:
        """Return the open connections from the address of this client, this connection included."""
        same_address = []
        for connection in self.connections:
            if isinstance(connection, BoundedConnection) and connection._client_address == self._client_address:
                same_address.append(connection)
        return same_address

    @property
    def _client_address(self) -> object:
        """The client's address without its port, or None if it is unknown."""
        return self.client[0] if self.client else None

    def _close_idle_connection(self, candidates: Sequence["BoundedConnection"]) -> None:
        """Close the first other connection that nobody needs now, or this one if all others are busy.

        Nobody needs a connection on which no request is being answered, or whose client sends pipelined requests.
        """
        for connection in candidates:
            is_dispensable = connection._pipelined_request_count or connection._is_idle
            if connection is not self and is_dispensable:
                connection.transport.abort()
                return
        self.transport.abort()

    @property
    def _is_idle(self) -> bool:
        """Whether no request is being answered."""
        return self.cycle is None or self.cycle.response_complete

    def _check_progress(self, previous_cycle: object, previous_unread_bytes: int) -> None:
        """Close the connection if its client stalls, and otherwise check it again after HEAD_SECONDS.

        A client stalls if it has read nothing of what waited for it since the last check, or has not sent what the
        server waits for.

        Args:
            previous_cycle: The request and its response at the last check. None at the first check.
            previous_unread_bytes: How many bytes waited at the last check for the client to read them.
        """
        if self._is_lost:
            return

        unread_bytes = self.transport.get_write_buffer_size()
        reads_nothing = 0 < previous_unread_bytes <= unread_bytes  # bytes waited, and have not become fewer
        if reads_nothing or self._is_waiting_for_client(previous_cycle):
            self.transport.abort()
        else:
            self.loop.call_later(HEAD_SECONDS, self._check_progress, self.cycle, unread_bytes)

    def _is_waiting_for_client(self, previous_cycle: object) -> bool:
        """Return whether the server still waits for the same thing from the client: a new request, or the rest of one.

        Args:
            previous_cycle: The request and its response at the last check. None if no request had come then.
        """
        if self.cycle is not previous_cycle:
            return False
        awaits_new_request = previous_cycle is None or self.cycle.response_complete
        return awaits_new_request or self.cycle.more_body  # the rest of the request


def build_server_config(app: Any, **options: Any) -> Config:
    """Return the configuration of a server whose connections are BoundedConnections.

    Args:
        app: The ASGI application.
        options: Other arguments of `uvicorn.Config`.
    """
    # Only the transports of asyncio's own loop can be told how much they read at once.
    return Config(app, http=BoundedConnection, loop="asyncio", log_level="warning", **options)


def _compute_connection_limit() -> int:
    """Return how many connections may be open at once: at most half of the files that this process may open."""
    max_open_files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if max_open_files == resource.RLIM_INFINITY:
        return MOST
    return min(MOST, max_open_files // 2)
