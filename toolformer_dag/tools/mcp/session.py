"""An open connection to an MCP server."""

from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from toolformer_dag.tools.mcp.options import McpOptions
from toolformer_dag.tools.mcp.server import transport
from toolformer_dag.tools.tool import ToolDown

if TYPE_CHECKING:
    from anyio.from_thread import BlockingPortal
    from mcp import Client
    from mcp.types import CallToolResult, Tool

CALL_SECONDS = 3600.0  # the lane's timeout_s limits a call; this one ends what it left behind


@dataclass(frozen=True, slots=True)
class Session:
    """The event loop in its thread, the client in it, and the tool as the server lists it. Usable from any thread."""

    stack: ExitStack
    portal: "BlockingPortal"
    client: "Client"
    tool: "Tool"

    def call(self, arguments: dict[str, Any]) -> "CallToolResult":
        """What the tool returned; raises mcp.MCPError."""
        return self.portal.call(partial(self.client.call_tool, self.tool.name, arguments, CALL_SECONDS))

    def close(self) -> None:
        """Say goodbye; a command is ended. A session that was lost is closed quietly: its loss is known."""
        with suppress(ExceptionGroup, OSError):
            self.stack.close()


def open_session(key: str, options: McpOptions) -> Session:
    """Start or reach the server and find the tool. Raises ToolDown where that cannot be."""
    from anyio.from_thread import start_blocking_portal
    from mcp import Client, MCPError

    target = transport(key, options)
    stack = ExitStack()
    try:
        portal = stack.enter_context(start_blocking_portal())
        client = stack.enter_context(
            portal.wrap_async_context_manager(Client(target, read_timeout_seconds=options.start_timeout_s))
        )
        tools = portal.call(_listed, client)
    except (ExceptionGroup, OSError, MCPError) as error:
        with suppress(ExceptionGroup, OSError):
            stack.close()
        raise _unreachable(key, options, error) from error
    found = {tool.name: tool for tool in tools}.get(options.tool)
    if found is None:
        stack.close()
        raise ToolDown(
            f"[tools.{key}]: the server has no tool {options.tool!r}; set tool = to one of its own: "
            f"{', '.join(sorted(tool.name for tool in tools))}"
        )
    return Session(stack, portal, client, found)


async def _listed(client: "Client") -> "list[Tool]":
    page = await client.list_tools()
    tools = list(page.tools)
    while page.next_cursor:
        page = await client.list_tools(cursor=page.next_cursor)
        tools.extend(page.tools)
    return tools


def _unreachable(key: str, options: McpOptions, error: BaseException) -> ToolDown:
    while isinstance(error, BaseExceptionGroup):  # task groups wrap the one error that matters
        error = error.exceptions[0]
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
