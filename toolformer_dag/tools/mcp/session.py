"""An open connection to an MCP server."""

from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from toolformer_dag.tools.mcp.options import McpOptions
from toolformer_dag.tools.mcp.server import transport
from toolformer_dag.tools.tool import ToolDown

if TYPE_CHECKING:
    from anyio.from_thread import BlockingPortal
    from mcp import Client
    from mcp.types import CallToolResult, Tool

CALL_SECONDS = 3600.0  # the lane's timeout_s limits a call; this one ends what it left behind
MESSAGE_CHARACTERS = 300  # a breach of the protocol is told at length, with the whole of what was sent


class MalformedAnswer(Exception):
    """An answer against the protocol or against the tool's own output schema; another try gives no better one."""


@dataclass(frozen=True, slots=True)
class Session:
    """The event loop in its thread, the client in it, and the tool as the server lists it. Usable from any thread."""

    stack: ExitStack
    portal: "BlockingPortal"
    client: "Client"
    tool: "Tool"

    def call(self, arguments: dict[str, Any]) -> "CallToolResult":
        """What the tool returned; raises mcp.MCPError, MalformedAnswer, or RuntimeError where none was given."""
        return self.portal.call(partial(_answered, self.client, self.tool.name, arguments))

    def close(self) -> None:
        """Say goodbye; a command is ended. A session that was lost is closed quietly: its loss is known."""
        with suppress(ExceptionGroup, OSError):
            self.stack.close()


def open_session(key: str, options: McpOptions) -> Session:
    """Start or reach the server and find the tool. Raises ToolDown where that cannot be."""
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
    except Exception as error:  # the SDK's and its libraries' are many, and none may leave a server running
        with suppress(ExceptionGroup, OSError):
            stack.close()
        raise _no_session(key, options, error) from error
    found = {tool.name: tool for tool in tools}.get(options.tool)
    if found is None:
        stack.close()
        raise ToolDown(
            f"[tools.{key}]: the server has no tool {options.tool!r}; set tool = to one of its own: "
            f"{', '.join(sorted(tool.name for tool in tools))}"
        )
    return Session(stack, portal, client, found)


async def _answered(client: "Client", name: str, arguments: dict[str, Any]) -> "CallToolResult":
    from mcp import InputRequiredRoundsExceededError

    _ = client.session  # its RuntimeError, of a client that was closed meanwhile, says nothing of an answer
    try:
        return await client.call_tool(name, arguments, CALL_SECONDS)
    except InputRequiredRoundsExceededError:  # the server said "later" again and again, which is no answer
        raise
    except (ValidationError, RuntimeError) as error:  # of the protocol, of the output schema
        raise MalformedAnswer(_one_line(error)) from error


async def _listed(client: "Client", seconds: float) -> "list[Tool]":
    """The tools of all pages. Raises TimeoutError: a server may give a next page for ever."""
    from anyio import move_on_after

    with move_on_after(seconds):
        page = await client.list_tools()
        tools = list(page.tools)
        while page.next_cursor:
            page = await client.list_tools(cursor=page.next_cursor)
            tools.extend(page.tools)
        return tools
    raise TimeoutError(f"its list of tools has no end after {seconds:g} s")


def _no_session(key: str, options: McpOptions, error: BaseException) -> ToolDown:
    while isinstance(error, BaseExceptionGroup):  # task groups wrap the one error that matters
        error = error.exceptions[0]
    if isinstance(error, ValidationError):
        return ToolDown(
            f"[tools.{key}]: what the MCP server {' '.join(options.command or ()) or options.url!r} says of itself or "
            f"its tools breaks the protocol ({_one_line(error)}); mend the server, or take another version of it"
        )
    return _unreachable(key, options, error)


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:MESSAGE_CHARACTERS]


def _unreachable(key: str, options: McpOptions, error: BaseException) -> ToolDown:
    patience = f"start_timeout_s above {options.start_timeout_s:g}"
    if options.command is not None:
        return ToolDown(
            f"[tools.{key}]: the MCP server {' '.join(options.command)!r} does not start in {options.cwd} ({error}); "
            f"run the command by hand to see what it says, or raise {patience}"
        )
    return ToolDown(
        f"[tools.{key}]: no MCP server answers at {options.url} ({error}); start it, correct the url, "
        f"or raise {patience}"
    )
