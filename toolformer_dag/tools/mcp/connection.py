"""The connection of one tool: opened when first needed, opened anew when it was lost."""

import atexit
import threading
from typing import TYPE_CHECKING, Any

from toolformer_dag.tools.mcp.options import McpOptions
from toolformer_dag.tools.mcp.session import Session, open_session
from toolformer_dag.tools.tool import RetryableError

if TYPE_CHECKING:
    from mcp.types import CallToolResult

CLOSE_SECONDS = 10.0  # a command that does not end by itself is killed well before


class Connection:
    """At most one session at a time, closed when the process ends.

    Not covered: servers that ask back while they answer (sampling, elicitation, roots).
    """

    def __init__(self, key: str, options: McpOptions) -> None:
        self._key = key
        self._options = options
        self._session: Session | None = None
        self._lock = threading.Lock()

    def session(self) -> Session:
        """The open session or a new one. Raises ToolDown where there cannot be one."""
        with self._lock:
            if self._session is None:
                self._session = open_session(self._key, self._options)
                atexit.register(self._session.close)
            return self._session

    def call(self, session: Session, arguments: dict[str, Any]) -> "CallToolResult":
        """What the tool returned. Raises RetryableError where the session was lost (it is dropped) or the server
        failed inside, MalformedAnswer, and mcp.MCPError for any other refusal of this call."""
        from mcp import MCPError
        from mcp.types import INTERNAL_ERROR, REQUEST_TIMEOUT

        try:
            return session.call(arguments)
        except RuntimeError as error:  # another call's time limit closed the session, or the server puts this one off
            raise RetryableError(f"MCP server: {error}") from error
        except MCPError as error:
            if lost := error.code in _session_lost():
                self.close(session)
            if lost or error.code in (INTERNAL_ERROR, REQUEST_TIMEOUT):
                raise RetryableError(f"MCP server: {error}") from error
            raise

    def close(self, session: Session | None = None) -> None:
        """Close the open session; with `session`, only where that one is still in use."""
        with self._lock:
            if self._session is not None and session in (None, self._session):
                atexit.unregister(self._session.close)
                _close(self._session)
                self._session = None


def _session_lost() -> tuple[int, ...]:
    """Errors that are none of the call's: a server that started anew knows neither the session nor its requests."""
    from mcp.types import CONNECTION_CLOSED, INVALID_REQUEST, METHOD_NOT_FOUND, PARSE_ERROR

    return CONNECTION_CLOSED, INVALID_REQUEST, METHOD_NOT_FOUND, PARSE_ERROR


def _close(session: Session) -> None:
    """In a thread of its own: a server that hangs keeps the goodbye over HTTP waiting for minutes."""
    closing = threading.Thread(target=session.close, daemon=True)
    closing.start()
    closing.join(CLOSE_SECONDS)
