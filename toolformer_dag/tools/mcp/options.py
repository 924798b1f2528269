"""The keys of a section whose tool stands on an MCP server."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import Field, model_validator

from toolformer_dag.tools.mcp.arguments import placeholders
from toolformer_dag.tools.options import OptionPath, ToolOptions


class McpOptions(ToolOptions):
    """Which server, which of its tools, and how the input of a call becomes its arguments.

        [tools.weather]
        use = "mcp"
        name = "Weather"
        prompt = "prompts/weather.txt"
        command = ["python", "weather_server.py"]        # or url = "http://localhost:8000/mcp"
        tool = "get_weather"
        fields = "(?P<city>.+), (?P<day>.+)"              # [Weather(Rome, Monday)]
        arguments = { city = "{city}", day = "{day}", units = "metric" }

    name: as it stands in the text. tool: the server's name for it.
    command: the server as program and arguments, spoken to over stdio, started in `cwd`; or url: streamable HTTP.
    arguments: argument -> value, where `{input}` stands for the input of the call and `{group}` for a named group of
    the regular expression `fields`, which the whole input must match. Without it the tool's only argument, or its only
    required one, gets the input.
    wants: a regular expression that a text must hold; without it every text is annotated.
    env: names of variables passed on to the command. token_env: the variable that holds a bearer token for the url.
    Values of variables never enter settings or fingerprints.
    start_timeout_s: how long the server may take over each request of the handshake but the first, which the SDK gives
    10 s; the start of a command is included, and the list of its tools is one request, however many pages it has. The
    section's timeout_s limits a call alone.
    version: change it when the server's answers change; stored results are then left aside.
    """

    prompt: str
    name: str = Field(pattern=r"^[^\W\d]\w*$")
    tool: str
    command: tuple[str, ...] | None = Field(None, min_length=1)
    cwd: OptionPath = Field(Path(), validate_default=True)
    url: str | None = Field(None, pattern=r"^https?://")
    arguments: Mapping[str, Any] | None = None
    fields: re.Pattern[str] | None = None
    wants: re.Pattern[str] | None = None
    env: tuple[str, ...] = ()
    token_env: str | None = None
    start_timeout_s: float = Field(20.0, gt=0)
    version: str = "1"

    @model_validator(mode="after")
    def _one_server(self) -> "McpOptions":
        if (self.command is None) == (self.url is None):
            raise ValueError("an MCP server needs either command = [...] (stdio) or url = ... (HTTP)")
        return self

    @model_validator(mode="after")
    def _known_placeholders(self) -> "McpOptions":
        known = {"input", *(self.fields.groupindex if self.fields else ())}
        if unknown := placeholders(self.arguments or {}) - known:
            raise ValueError(
                f"arguments hold {{{min(unknown)}}}, neither {{input}} nor a named group (?P<name>...) of fields"
            )
        return self
