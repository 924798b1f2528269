"""A tool on an MCP server: the connection, and results from its content."""

import atexit
import json
import logging
import re
import threading
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from toolformer_dag.identity import fingerprint
from toolformer_dag.settings.servers import build_lane_key
from toolformer_dag.settings.setting_types import select_determining_settings
from toolformer_dag.texts.arguments import Schema
from toolformer_dag.texts.document import Document
from toolformer_dag.tools.mcp_options import McpOptions
from toolformer_dag.tools.mcp_session import McpSession, SessionLost, open_session
from toolformer_dag.tools.options import has_match
from toolformer_dag.tools.tool import NoResult, Tool, ToolCall, ToolDefaults, ToolResult

if TYPE_CHECKING:
    from mcp.types import CallToolResult


_log = logging.getLogger(__name__)
CLOSE_TIMEOUT_SECONDS = 10.0
"""How long closing a session is waited for; a command that does not end by itself is killed well before."""


def extract_answer_text(answer: "CallToolResult") -> str | None:
    """Extract the text of an MCP server's answer: its text blocks and embedded text resources, one per line.

    Returns:
        The text. Without any, the structured content as compact JSON, or None if there is none either (but for example
        images or audio).
    """
    texts = []
    for block in answer.content:
        # An embedded resource holds its text one level below.
        text_holder = getattr(block, "resource", block)
        text = getattr(text_holder, "text", None)
        if isinstance(text, str):
            texts.append(text)

    if texts:
        return "\n".join(texts)
    if answer.structured_content is None:
        return None
    return to_compact_json(answer.structured_content)


def to_compact_json(value: Any) -> str:
    """Write a value as JSON without white space, but a text as it is, without quotation marks."""
    if isinstance(value, str):
        return value
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


_FIELD_PATTERN = re.compile(r"\{(\w+(?:\.\w+)*)\}")
"""A field of a template: `{temperature}`, or `{wind.speed}` for a field of the object `wind`."""


def fill_result_template(template: str, answer: "CallToolResult") -> str:
    """Fill a template, such as `{temperature} °C, wind {wind.speed}`, with fields of the object in an answer.

    Args:
        template: The template, in which `{wind.speed}` stands for the field `speed` of the object `wind`.
        answer: The server's answer to a call.

    Raises:
        NoResult: The answer holds no object (`no_object`), or lacks a field (`no_field: wind.speed`).
    """
    answer_object = _parse_answer_object(answer)

    def format_field(field_match: re.Match[str]) -> str:
        """Return the value of a field in the template, as text."""
        value = _get_field(answer_object, field_path=field_match[1])
        return to_compact_json(value)

    return _FIELD_PATTERN.sub(format_field, template)


def _parse_answer_object(answer: "CallToolResult") -> Mapping[str, Any]:
    """Find the JSON object in an answer: its structured content, or else its text parsed as JSON.

    Raises:
        NoResult: Neither is an object ("no_object").
    """
    content: Any = answer.structured_content
    if content is None:
        content = _parse_json(extract_answer_text(answer) or "")

    if not isinstance(content, Mapping):
        raise NoResult("no_object")
    return content


def _parse_json(text: str) -> Any:
    """Parse a text as JSON, or return None if it is not JSON."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _get_field(content: Mapping[str, Any], field_path: str) -> Any:
    """Return the value of a field in a JSON object.

    Args:
        content: The object.
        field_path: The name of the field, or a path such as `wind.speed` for a field of an object in the object.

    Raises:
        NoResult: There is no such field. The reason is `no_field: wind.speed`, for example.
    """
    value: Any = content
    for name in field_path.split("."):
        if not isinstance(value, Mapping) or name not in value:
            raise NoResult(f"no_field: {field_path}")
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

        words = build_lane_key(options.tool).split("_")  # ["get", "weather"] of `getWeather`
        self.name = options.name or _to_camel_case(words)
        self.description = options.description or " ".join(words)
        self.version = options.version
        self.server_name = options.server

        # The option `wants` is a pattern that chooses the tool's texts. Without it, the tool gets those that fit it
        # better than most other tools.
        self.is_routed = options.wants is None
        self._session: McpSession | None = None
        self._session_lock = threading.Lock()  # held while the session is opened or closed

    @property
    def arguments_schema(self) -> Schema:
        """The JSON schema of the arguments, as the server lists it."""
        return self.options.input_schema

    def wants(self, text: str, document: Document) -> str | None:
        if self.options.wants is None:
            return "every_text"
        return "matches" if has_match(self.options.wants, text) else None

    def connect(self) -> None:
        """Connect to the server if not connected, and start its command if it has one.

        Raises:
            ToolDown: The server cannot be reached, or does not have the tool as it was listed.
        """
        self._ensure_session()

    def timed_out(self) -> None:
        """Close the connection, because a server that hangs on an input answers no other. `connect` opens it again."""
        self.close()

    def run(self, calls: Sequence[ToolCall]) -> list[ToolResult]:
        return [self._answer_call(call) for call in calls]

    def identity(self) -> Mapping[str, object]:
        """Return what determines the results, for fingerprints: the server's command or address, the tool, its schema.

        There are no secrets and no folders in it.
        """
        connection = self.options.masked_connection
        is_command = self.options.command is not None
        return {
            "command": connection if is_command else None,
            "url": None if is_command else connection,
            **select_determining_settings(self.options, "tool", "result"),
            "arguments": fingerprint(self.options.input_schema),
        }

    def selection(self) -> Mapping[str, object]:
        """Return only the regular expression: changing it selects other texts but keeps stored results."""
        return select_determining_settings(self.options, "wants")

    def close(self, session: McpSession | None = None) -> None:
        """Close the session with the server, if one is open. The next call opens another one.

        Args:
            session: Close only this session, and not one with which another thread has replaced it.
        """
        with self._session_lock:
            if self._session is None:
                return
            is_replaced = session is not None and session is not self._session
            if is_replaced:
                return

            atexit.unregister(self._session.close)
            # It is closed in a thread of its own, because a server that hangs delays closing over HTTP for minutes.
            closing_thread = threading.Thread(target=self._session.close, daemon=True)
            closing_thread.start()
            closing_thread.join(CLOSE_TIMEOUT_SECONDS)
            self._session = None

    def _ensure_session(self) -> McpSession:
        """Return the open session with the server, or open one.

        Raises:
            ToolDown: The server cannot be reached, or does not have the tool as it was listed.
        """
        with self._session_lock:
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
            answer = session.call_tool(call.arguments)
            return self._build_result(call, answer)
        except SessionLost:  # a RetryableError, so that the call is tried again, in another session
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
            _log.info("%s(%.80s): %.500s", self.name, call.input, extract_answer_text(answer))
            return ToolResult(None, "tool_error")

        template = self.options.result
        text = extract_answer_text(answer) if template is None else fill_result_template(template, answer)
        if text is None:
            return ToolResult(None, "no_text")
        return ToolResult(text)

    def _warn_of_cause(self, call: ToolCall, error: NoResult) -> None:
        """Log the error of the MCP client because of which a call has no result, if there is one.

        Args:
            call: The call.
            error: The reason, which may have been raised from the client's error.
        """
        if isinstance(error.__cause__, Exception):
            message = self.options.format_masked_error(error.__cause__)
            _log.warning("%s(%.80s): %s; MCP client: %s", self.name, call.input, error.reason, message)
