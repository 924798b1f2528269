"""A tool that stands on an MCP server: one connection, and its content as a result."""

import atexit
import json
import logging
import threading
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from toolformer_dag.texts.document import Document
from toolformer_dag.tools.mcp_arguments import BadArgument, argument_names, fill, only_argument, split_fields
from toolformer_dag.tools.mcp_session import MalformedAnswer, McpOptions, Session, open_session
from toolformer_dag.tools.tool import RetryableError, Tool, ToolCall, ToolDefaults, ToolDown, ToolResult, unquote

if TYPE_CHECKING:
    from mcp.types import CallToolResult


def result_of(answer: "CallToolResult") -> ToolResult:
    """The answer's texts, a line each, or its structured content as JSON.

    Reasons: `tool_error` where the server says so, `no_text` where it sent pictures or sounds alone.
    """
    if answer.is_error:
        return ToolResult(None, "tool_error")
    text = text_of(answer)
    return ToolResult(None, "no_text") if text is None else ToolResult(text)


def text_of(answer: "CallToolResult") -> str | None:
    """All text blocks and embedded text resources; the structured content only where there are none."""
    texts = [text for text in map(_block_text, answer.content) if text is not None]
    if texts or answer.structured_content is None:
        return "\n".join(texts) if texts else None
    return json.dumps(answer.structured_content, ensure_ascii=False)


def _block_text(block: Any) -> str | None:
    text = getattr(getattr(block, "resource", block), "text", None)
    return text if isinstance(text, str) else None


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


_log = logging.getLogger(__name__)


class McpTool(Tool):
    """One tool of one MCP server; see McpOptions for its keys. Thresholds default to those of QA in the paper."""

    defaults = ToolDefaults(tau_s=0.05, k=5, m=5, tau_f=1.0)
    Options = McpOptions
    batch_size = 1
    options: McpOptions

    def __init__(self, key: str, options: McpOptions, prompt: str) -> None:
        super().__init__(key, options, prompt)
        self.name = options.name
        self.version = options.version
        self._connection = Connection(key, options)

    def wants(self, text: str, document: Document) -> str | None:
        if self.options.wants is None:
            return "every_text"
        return "matches" if self.options.wants.search(text) else None

    def connect(self) -> None:
        """Start or reach the server. Raises ToolDown where that cannot be."""
        self._connection.session()

    def timed_out(self) -> None:
        """End the connection: a server that hangs on one input answers no other; `connect` starts it anew."""
        self._connection.close()

    def run(self, calls: Sequence[ToolCall]) -> list[ToolResult]:
        return [self._answer(call.input) for call in calls]

    def identity(self) -> Mapping[str, object]:
        """The server's address or command, its tool, and how arguments are made; no secret, no folder."""
        kept = {"command", "url", "tool", "arguments", "fields"}
        return self.options.model_dump(mode="json", include=kept)

    def selection(self) -> Mapping[str, object]:
        """The regular expression alone: another one chooses other texts, and stored results stay."""
        return self.options.model_dump(mode="json", include={"wants"})

    def close(self) -> None:
        """End the connection now, not only when the process ends; the next call opens another."""
        self._connection.close()

    def _answer(self, text: str) -> ToolResult:
        from mcp import MCPError

        session = self._connection.session()
        schema = session.tool.input_schema
        try:
            values = split_fields(unquote(text), self.options.fields)
            answer = self._connection.call(session, fill(self._template(schema), values, schema))
        except BadArgument as error:
            return ToolResult(None, error.reason)
        except MCPError as error:
            return self._no_result(text, "refused", error)
        except MalformedAnswer as error:
            return self._no_result(text, "malformed_response", error)
        if answer.is_error:
            _log.info("%s(%.80s): %.500s", self.name, text, text_of(answer))
        return result_of(answer)

    def _no_result(self, text: str, reason: str, error: Exception) -> ToolResult:
        _log.warning("%s(%.80s): %s, says the MCP client: %s", self.name, text, reason, error)
        return ToolResult(None, reason)

    def _template(self, schema: Mapping[str, Any]) -> Mapping[str, Any]:
        template = self.options.arguments if self.options.arguments is not None else only_argument(schema)
        missing = set(schema.get("required") or ()) - set(template or ())
        if template is None or missing:
            names = argument_names(schema)
            raise ToolDown(
                f"[tools.{self.key}]: the tool {self.options.tool!r} takes {', '.join(names)}; "
                f'say where the input goes: arguments = {{ {min(missing, default=names[0])} = "{{input}}" }}'
            )
        return template
