"""A tool that an MCP server offers."""

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from toolformer_dag.texts.document import Document
from toolformer_dag.tools.mcp.arguments import BadArgument, argument_names, fill, only_argument, split_fields
from toolformer_dag.tools.mcp.connection import Connection
from toolformer_dag.tools.mcp.content import result_of, text_of
from toolformer_dag.tools.mcp.options import McpOptions
from toolformer_dag.tools.mcp.session import MalformedAnswer
from toolformer_dag.tools.tool import Tool, ToolCall, ToolDefaults, ToolDown, ToolResult
from toolformer_dag.tools.unquote import unquote

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
