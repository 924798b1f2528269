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
from toolformer_dag.tools.mcp_options import McpOptions
from toolformer_dag.tools.mcp_session import McpSession, SessionLost, open_session
from toolformer_dag.tools.options import occurs
from toolformer_dag.tools.tool import NoResult, Tool, ToolCall, ToolDefaults, ToolResult

if TYPE_CHECKING:
    from mcp.types import CallToolResult


_log = logging.getLogger(__name__)
CLOSE_SECONDS = 10.0
"""How long closing a session is waited for; a command that does not end by itself is killed well before."""


def text_of(answer: "CallToolResult") -> str | None:
    """Extract the text of an MCP server's answer: its text blocks and embedded text resources, one per line.

    Returns:
        The text. Without any, the structured content as compact JSON, or None if there is none either (but for example
        images or audio).
    """
    texts = []
    for block in answer.content:
        text_holder = getattr(block, "resource", block)  # an embedded resource holds its text one level below
        text = getattr(text_holder, "text", None)
        if isinstance(text, str):
            texts.append(text)

    if texts:
        return "\n".join(texts)
    if answer.structured_content is None:
        return None
    return to_compact_json(answer.structured_content)


def to_compact_json(value: Any) -> str:
    """Return a value as JSON without white space; a text as it is."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, separators=(",", ":"))


_FIELD = re.compile(r"\{(\w+(?:\.\w+)*)\}")
"""A field of a template: `{temperature}`, or `{wind.speed}` for a field of the object `wind`."""


def fill_result_template(template: str, answer: "CallToolResult") -> str:
    """Fill a template, such as `{temperature} °C, wind {wind.speed}`, with fields of the object in an answer.

    Raises:
        NoResult: The answer holds no object (`no_object`), or lacks a field (`no_field: wind.speed`).
    """
    content = _parse_answer_object(answer)
    return _FIELD.sub(lambda field: to_compact_json(_get_field(content, field[1])), template)


def _parse_answer_object(answer: "CallToolResult") -> Mapping[str, Any]:
    """Find the JSON object in an answer: its structured content, or else its text parsed as JSON.

    Raises:
        NoResult: Neither is an object ("no_object").
    """
    content: Any = answer.structured_content
    if content is None:
        content = _parsed(text_of(answer) or "")

    if not isinstance(content, Mapping):
        raise NoResult("no_object")
    return content


def _parsed(text: str) -> Any:
    """Return the value of a text in JSON; None for any other text."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _get_field(content: Mapping[str, Any], path: str) -> Any:
    """Return the value at a path such as `wind.speed`, below an object. Raises NoResult(f"no_field: {path}")."""
    value: Any = content
    for name in path.split("."):
        if not isinstance(value, Mapping) or name not in value:
            raise NoResult(f"no_field: {path}")
        value = value[name]
    return value


def _to_camel_case(words: Sequence[str]) -> str:
    """Return "GetWeather" for the words "get" and "weather"."""
    return "".join(word.capitalize() for word in words)


class McpTool(Tool):
    """A tool of an MCP server, with the named arguments that the server lists; see McpOptions for its keys.

    - Reasons: `malformed_response`, `refused`, `no_object` and `no_field: NAME`, `tool_error` if the server reports
      an error, and `no_text` if it sent only images or audio.
    - It has one session at a time. The first call or `connect` opens it; it ends with `close`, or with the process.
    - The default thresholds are the paper's for question answering.

    Not covered: servers that send requests while they answer (sampling, elicitation, roots).
    """

    defaults = ToolDefaults(tau_s=0.05, k=5, m=5, tau_f=1.0)
    Options = McpOptions
    batch_size = 1
    options: McpOptions

    def __init__(self, key: str, options: McpOptions, prompt: str) -> None:
        """Choose the tool's name and description, without opening a connection.

        They are taken from the options, or else from the tool's name on the server. `get_weather` and `getWeather` are
        both called GetWeather in texts.
        """
        super().__init__(key, options, prompt)
        words = lane_key(options.tool).split("_")  # ["get", "weather"] of `getWeather`
        self.name = options.name or _to_camel_case(words)
        self.description = options.description or " ".join(words)
        self.version = options.version
        self.server = options.server

        # Without the regular expression `wants`, the tool gets the texts that fit it better than most other tools.
        self.routed = options.wants is None
        self._session: McpSession | None = None
        self._lock = threading.Lock()  # held while the session is opened or closed

    @property
    def schema(self) -> Schema:
        """The arguments as the server lists them."""
        return self.options.input_schema

    def wants(self, text: str, document: Document) -> str | None:
        if self.options.wants is None:
            return "every_text"
        return "matches" if occurs(self.options.wants, text) else None

    def connect(self) -> None:
        """Connect to the server, starting a command. Raises ToolDown."""
        self._ensure_session()

    def timed_out(self) -> None:
        """Close the connection: a server that hangs on an input answers no other; `connect` restarts it."""
        self.close()

    def run(self, calls: Sequence[ToolCall]) -> list[ToolResult]:
        return [self._answer_call(call) for call in calls]

    def identity(self) -> Mapping[str, object]:
        """Return the server's address or command, its tool and its arguments; no secret, no folder."""
        is_command = self.options.command is not None
        return {
            "command": self.options.shown if is_command else None,
            "url": None if is_command else self.options.shown,
            **determining(self.options, "tool", "result"),
            "arguments": fingerprint(self.options.input_schema),
        }

    def selection(self) -> Mapping[str, object]:
        """Return only the regular expression: changing it selects other texts but keeps stored results."""
        return determining(self.options, "wants")

    def close(self, session: McpSession | None = None) -> None:
        """Close the session with the server, if one is open. The next call opens another one.

        Args:
            session: Close only this session, and not one with which another thread has replaced it.
        """
        with self._lock:
            if self._session is None:
                return
            if session is not None and session is not self._session:
                return
            atexit.unregister(self._session.close)

            # In a thread of its own: a server that hangs delays closing over HTTP for minutes.
            closing = threading.Thread(target=self._session.close, daemon=True)
            closing.start()
            closing.join(CLOSE_SECONDS)
            self._session = None

    def _ensure_session(self) -> McpSession:
        """Return the open session, or open one. Raises ToolDown."""
        with self._lock:
            if self._session is None:
                self._session = open_session(self.key, self.options)
                atexit.register(self._session.close)
            return self._session

    def _answer_call(self, call: ToolCall) -> ToolResult:
        """Call the server's tool.

        Returns:
            Its answer as a text, or the reason why there is none.

        Raises:
            SessionLost: The session has ended. The next try opens another one.
            RetryableError: No answer came.
            ToolDown: No session can be opened.
        """
        session = self._ensure_session()

        try:
            answer = session.call(call.arguments)
            return self._build_result(call, answer)
        except SessionLost:  # a RetryableError: the next try opens another session
            self.close(session)
            raise
        except NoResult as error:  # of the session, or of a result template that does not fit the answer
            self._warn_of_cause(call, error)
            return ToolResult(None, error.reason)

    def _build_result(self, call: ToolCall, answer: "CallToolResult") -> ToolResult:
        """Extract the text of a server's answer to a call.

        Returns:
            The text, or the reason why there is none.

        Raises:
            NoResult: The result template does not fit the answer.
        """
        if answer.is_error:
            _log.info("%s(%.80s): %.500s", self.name, call.input, text_of(answer))
            return ToolResult(None, "tool_error")

        text = text_of(answer) if self.options.result is None else fill_result_template(self.options.result, answer)
        if text is None:
            return ToolResult(None, "no_text")
        return ToolResult(text)

    def _warn_of_cause(self, call: ToolCall, error: NoResult) -> None:
        """Log the SDK's error that made a call have no result, where there is one."""
        if isinstance(error.__cause__, Exception):
            message = self.options.public(error.__cause__)
            _log.warning("%s(%.80s): %s; MCP client: %s", self.name, call.input, error.reason, message)
