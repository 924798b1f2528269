"""Connections of a server: how many there may be, and how long one may take to ask for something."""

import resource
from asyncio import Transport

from uvicorn.protocols.http.h11_impl import H11Protocol

HEAD_SECONDS = 10.0
"""How long a connection may take to send the head of a request; its body has once to twice as long."""
MOST = 1000
"""Connections at once, where fewer do not use half of the files that may be open."""


class BoundedConnection(H11Protocol):
    """A connection that ends when its client does not ask, or when half of the files that may be open are connections.

    Unlike httptools, h11 bounds the bytes of a head, with `h11_max_incomplete_event_size`.
    """

    def connection_made(self, transport: Transport) -> None:  # type: ignore[override]
        """Take a connection, or end it."""
        super().connection_made(transport)
        if len(self.connections) > _most_connections():
            transport.abort()
        else:
            self.loop.call_later(HEAD_SECONDS, self._look, None)

    def _look(self, before: object) -> None:
        """End the connection if nothing was asked since it was looked at `before`, or what was asked has not ended."""
        is_same = self.cycle is before  # the request of a connection is its cycle; None before the first
        if is_same and (before is None or self.cycle.response_complete or self.cycle.more_body):
            self.transport.abort()
        elif not self.transport.is_closing():
            self.loop.call_later(HEAD_SECONDS, self._look, self.cycle)


def _most_connections() -> int:
    """Return how many connections there may be at once."""
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return MOST if files == resource.RLIM_INFINITY else min(MOST, files // 2)
