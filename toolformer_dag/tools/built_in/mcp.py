"""A tool on an MCP server: the connection, and results from its content."""

import atexit
import json
import logging
import re
import threading
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from toolformer_dag.identity import fingerprint
from toolformer_dag.settings.servers import lane_key
from toolformer_dag.settings.setting_types import determining
from toolformer_dag.texts.arguments import Schema
from toolformer_dag.texts.document import Document
from toolformer_dag.tools.mcp_session import McpOptions, Session, SessionLost, open_session
from toolformer_dag.tools.options import occurs
from toolformer_dag.tools.tool import NoResult, Tool, ToolCall, ToolDefaults, ToolResult

if TYPE_CHECKING:
    from mcp.types import CallToolResult


def text_of(answer: "CallToolResult") -> str | None:
    """Join all text blocks and embedded text resources, a line each; without any, the object as compact JSON."""
    blocks = [getattr(getattr(block, "resource", block), "text", None) for block in answer.content]
    texts = [text for text in blocks if isinstance(text, str)]
    if texts or answer.structured_content is None:
        return "\n".join(texts) if texts else None
    return compact(answer.structured_content)


def compact(value: Any) -> str:
    """Return a value as JSON without white space; a text as it is."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, separators=(",", ":"))


_FIELD = re.compile(r"\{(\w+(?:\.\w+)*)\}")


def filled(template: str, answer: "CallToolResult") -> str:
    """Fill `{temperature} °C` with the fields of an object, `{wind.speed}` with those below.

    Raises NoResult: `no_object`, or `no_field: NAME`.
    """
    value: Any = answer.structured_content
    if value is None:
        try:
            value = json.loads(text_of(answer) or "")
        except (ValueError, RecursionError):
            value = None
    if not isinstance(value, Mapping):
        raise NoResult("no_object")

    def field(match: re.Match[str]) -> str:
        below: Any = value
        for name in match[1].split("."):
            if not isinstance(below, Mapping) or name not in below:
                raise NoResult(f"no_field: {match[1]}")
            below = below[name]
        return compact(below)

    return _FIELD.sub(field, template)


CLOSE_SECONDS = 10.0  # a command that does not end by itself is killed well before
_log = logging.getLogger(__name__)


class McpTool(Tool):
    """A tool of an MCP server; see McpOptions for its keys. The default thresholds are the paper's for QA.

    Its named arguments are those that the server lists. Reasons: those of `Session.call` and `filled`, `tool_error`
    where the server reports an error, and `no_text` where it sent only images or audio.

    It has one session at a time, which ends with the process. Not covered: servers that send requests while they answer
    (sampling, elicitation, roots).
    """

    defaults = ToolDefaults(tau_s=0.05, k=5, m=5, tau_f=1.0)
    Options = McpOptions
    batch_size = 1
    options: McpOptions

    def __init__(self, key: str, options: McpOptions, prompt: str) -> None:
        super().__init__(key, options, prompt)
        self.name = options.name or "".join(word.capitalize() for word in lane_key(options.tool).split("_"))
        self.description = options.description or lane_key(options.tool).replace("_", " ")
        self.version = options.version
        self.routed, self.server = options.wants is None, options.server
        self._session: Session | None = None
        self._lock = threading.Lock()

    @property
    def schema(self) -> Schema:
        """Return the arguments as the server lists them."""
        return self.options.input_schema

    def wants(self, text: str, document: Document) -> str | None:
        if self.options.wants is None:
            return "every_text"
        return "matches" if occurs(self.options.wants, text) else None

    def connect(self) -> None:
        """Connect to the server, starting a command. Raises ToolDown."""
        self._opened()

    def timed_out(self) -> None:
        """Close the connection: a server that hangs on an input answers no other; `connect` restarts it."""
        self.close()

    def run(self, calls: Sequence[ToolCall]) -> list[ToolResult]:
        return [self._answer(call) for call in calls]

    def identity(self) -> Mapping[str, object]:
        """Return the server's address or command, its tool and its arguments; no secret, no folder."""
        shown = "url" if self.options.command is None else "command"
        kept = determining(self.options, "tool", "result")
        schema = fingerprint(self.options.input_schema)
        return {"command": None, "url": None, **kept, "arguments": schema, shown: self.options.shown}

    def selection(self) -> Mapping[str, object]:
        """Return only the regular expression: changing it selects other texts but keeps stored results."""
        return determining(self.options, "wants")

    def close(self, session: Session | None = None) -> None:
        """Close the open session, with `session` only where it is that; the next call opens another."""
        with self._lock:
            if self._session is not None and session in (None, self._session):
                atexit.unregister(self._session.close)
                closing = threading.Thread(target=self._session.close, daemon=True)
                closing.start()  # apart: a server that hangs delays closing over HTTP for minutes
                closing.join(CLOSE_SECONDS)
                self._session = None

    def _opened(self) -> Session:
        with self._lock:
            if self._session is None:
                self._session = open_session(self.key, self.options)
                atexit.register(self._session.close)
            return self._session

    def _answer(self, call: ToolCall) -> ToolResult:
        session = self._opened()
        try:
            answer = session.call(call.arguments)
            if answer.is_error:
                _log.info("%s(%.80s): %.500s", self.name, call.input, text_of(answer))
                return ToolResult(None, "tool_error")
            text = text_of(answer) if self.options.result is None else filled(self.options.result, answer)
        except SessionLost:
            self.close(session)
            raise
        except NoResult as error:
            if cause := error.__cause__:
                message = self.options.public(cause)
                _log.warning("%s(%.80s): %s; MCP client: %s", self.name, call.input, error.reason, message)
            return ToolResult(None, error.reason)
        return ToolResult(None, "no_text") if text is None else ToolResult(text)
