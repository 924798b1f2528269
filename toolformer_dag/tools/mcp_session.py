"""Options of an MCP tool, and a session with its server."""

import os
import re
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import Field, ValidationError, model_validator

from toolformer_dag.tools.mcp_arguments import placeholders
from toolformer_dag.tools.options import OptionPath, ToolOptions
from toolformer_dag.tools.tool import ToolDown

if TYPE_CHECKING:
    from anyio.from_thread import BlockingPortal
    from mcp import Client, StdioServerParameters
    from mcp.client import Transport
    from mcp.types import CallToolResult, Tool


class McpOptions(ToolOptions):
    """The server, its tool, and how the input of a call becomes the tool's arguments.

        [tools.weather]
        use = "mcp"
        name = "Weather"
        prompt = "prompts/weather.txt"
        command = ["python", "weather_server.py"]        # or url = "http://localhost:8000/mcp"
        tool = "get_weather"
        fields = "(?P<city>.+), (?P<day>.+)"              # [Weather(Rome, Monday)]
        arguments = { city = "{city}", day = "{day}", units = "metric" }

    - name: the tool's name in the text. tool: the server's name for it.
    - command: program and arguments of a stdio server, started in `cwd`. url: the address of a streamable HTTP server.
    - arguments: argument -> value, where `{input}` stands for the input of the call and `{group}` for a named group of
      the regular expression `fields`, which the whole input must match. By default, the tool's only argument, or its
      only required argument, gets the input.
    - wants: a regular expression that a text must contain; by default every text is annotated.
    - env: names of environment variables passed to the command. token_env: the variable that holds a bearer token for
      the url. Values of variables never enter settings or fingerprints.
    - start_timeout_s: the limit for each request of the handshake after the first, to which the SDK gives 10 s. It
      includes the start of a command. Listing the tools counts as a single request. The section's timeout_s limits
      calls only.
    - version: change it when the server's answers change, so that calls are executed again.
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
            raise ValueError("an MCP server needs either command = [...] (stdio) or url = ... (HTTP), not both")
        return self

    @model_validator(mode="after")
    def _known_placeholders(self) -> "McpOptions":
        known = {"input", *(self.fields.groupindex if self.fields else ())}
        if unknown := placeholders(self.arguments or {}) - known:
            raise ValueError(
                f"arguments hold {{{min(unknown)}}}, neither {{input}} nor a named group (?P<name>...) of fields"
            )
        return self


def transport(key: str, options: McpOptions) -> "Transport | StdioServerParameters | str":
    """Return the target for `mcp.Client`: a command with its environment, a url, or a url with a bearer token.

    A command gets the variables that the SDK passes on (PATH, HOME, ...) and those in `env`. Raises ToolDown for a
    variable that is not set.
    """
    if options.command is not None:
        from mcp import StdioServerParameters

        program, *arguments = options.command
        environment = {name: _variable(key, name) for name in options.env}
        return StdioServerParameters(command=program, args=arguments, env=environment, cwd=options.cwd)
    url = options.url or ""
    return url if options.token_env is None else _with_token(url, _variable(key, options.token_env))


def _with_token(url: str, token: str) -> "Transport":
    import httpx2
    from mcp.client.streamable_http import streamable_http_client

    client = httpx2.AsyncClient(headers={"Authorization": f"Bearer {token}"}, timeout=httpx2.Timeout(30.0, read=300.0))
    return streamable_http_client(url, http_client=client)


def _variable(key: str, name: str) -> str:
    value = os.environ.get(name)
    if value is None:
        raise ToolDown(
            f"[tools.{key}]: the environment variable {name} is not set; export it, or remove it from the section"
        )
    return value


CALL_SECONDS = 3600.0  # the lane's timeout_s limits a call; this limit ends requests that timed-out calls left open
MESSAGE_CHARACTERS = 300  # a breach of the protocol is told at length, with the whole of what was sent


class MalformedAnswer(Exception):
    """The answer violates the protocol or the tool's output schema; retrying does not help."""


@dataclass(frozen=True, slots=True)
class Session:
    """A client in the event loop of its own thread, and the tool as the server lists it; thread-safe."""

    stack: ExitStack
    portal: "BlockingPortal"
    client: "Client"
    tool: "Tool"

    def call(self, arguments: dict[str, Any]) -> "CallToolResult":
        """Call the tool. Raises mcp.MCPError, MalformedAnswer, and RuntimeError where no answer came."""
        return self.portal.call(partial(_answered, self.client, self.tool.name, arguments))

    def close(self) -> None:
        """Close the session and end a command. Errors of a lost session are ignored."""
        with suppress(ExceptionGroup, OSError):
            self.stack.close()


def open_session(key: str, options: McpOptions) -> Session:
    """Connect to the server, starting a command, and find the tool. Raises ToolDown."""
    from anyio.from_thread import start_blocking_portal
    from mcp import Client

    target = transport(key, options)
    stack = ExitStack()
    try:
        portal = stack.enter_context(start_blocking_portal())
        client = stack.enter_context(
            portal.wrap_async_context_manager(Client(target, read_timeout_seconds=options.start_timeout_s))
        )
        tools = portal.call(_listed, client, options.start_timeout_s)
    except Exception as error:  # the SDK raises many kinds; none may leave a server running
        with suppress(ExceptionGroup, OSError):
            stack.close()
        raise _no_session(key, options, error) from error
    found = {tool.name: tool for tool in tools}.get(options.tool)
    if found is None:
        stack.close()
        raise ToolDown(
            f"[tools.{key}]: the server has no tool {options.tool!r}; set tool = to a name of its tools: "
            f"{', '.join(sorted(tool.name for tool in tools))}"
        )
    return Session(stack, portal, client, found)


async def _answered(client: "Client", name: str, arguments: dict[str, Any]) -> "CallToolResult":
    from mcp import InputRequiredRoundsExceededError

    _ = client.session  # outside the try: the RuntimeError of a closed client is not a malformed answer
    try:
        return await client.call_tool(name, arguments, CALL_SECONDS)
    except InputRequiredRoundsExceededError:  # the server deferred its answer too often
        raise
    except (ValidationError, RuntimeError) as error:  # violations of the protocol or of the output schema
        raise MalformedAnswer(_one_line(error)) from error


async def _listed(client: "Client", seconds: float) -> "list[Tool]":
    """Return the tools of all pages. Raises TimeoutError where the pages do not end."""
    from anyio import move_on_after

    with move_on_after(seconds):
        page = await client.list_tools()
        tools = list(page.tools)
        while page.next_cursor:
            page = await client.list_tools(cursor=page.next_cursor)
            tools.extend(page.tools)
        return tools
    raise TimeoutError(f"its list of tools did not end within {seconds:g} s")


def _no_session(key: str, options: McpOptions, error: BaseException) -> ToolDown:
    while isinstance(error, BaseExceptionGroup):  # task groups wrap the actual error
        error = error.exceptions[0]
    if isinstance(error, ValidationError):
        return ToolDown(
            f"[tools.{key}]: a description from the MCP server {' '.join(options.command or ()) or options.url!r} "
            f"breaks the protocol ({_one_line(error)}); fix the server, or use another version of it"
        )
    return _unreachable(key, options, error)


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:MESSAGE_CHARACTERS]


def _unreachable(key: str, options: McpOptions, error: BaseException) -> ToolDown:
    patience = f"start_timeout_s above {options.start_timeout_s:g}"
    if options.command is not None:
        return ToolDown(
            f"[tools.{key}]: the MCP server {' '.join(options.command)!r} does not start in {options.cwd} ({error}); "
            f"run the command by hand to see its output, or raise {patience}"
        )
    return ToolDown(
        f"[tools.{key}]: no MCP server answers at {options.url} ({error}); start it, correct the url, "
        f"or raise {patience}"
    )
