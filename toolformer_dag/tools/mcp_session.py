"""A session with an MCP server: opening it, listing its tools, calling one."""

import logging
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from toolformer_dag.tools.mcp_options import McpOptions
from toolformer_dag.tools.mcp_transport import (
    TOO_LONG,
    ToolSchemas,
    build_connection_error,
    open_mended_streams,
    transport,
)
from toolformer_dag.tools.tool import NoResult, RetryableError, ToolDown

if TYPE_CHECKING:
    from anyio.from_thread import BlockingPortal
    from mcp import Client, MCPError, StdioServerParameters
    from mcp.client import Transport
    from mcp.types import CallToolResult, Tool

_log = logging.getLogger(__name__)
CALL_SECONDS = 3600.0
"""The limit of a request to call a tool. The lane's timeout_s limits the call; this ends requests that timed-out calls
left open."""


class SessionLost(RetryableError):
    """The server has ended, or does not know the session any more: it has to be opened anew."""


@dataclass(frozen=True, slots=True, eq=False)
class McpSession:
    """A connection to a server, in an event loop that runs in a thread of its own. Safe for several threads."""

    options: McpOptions
    stack: ExitStack  # closes the client, then the event loop
    portal: "BlockingPortal"  # runs coroutines in the event loop
    client: "Client"
    schemas: dict[str, ToolSchemas]  # of the server's tools, by name, as the server declares them
    tools: "dict[str, Tool]"  # by name, with the input schema from `schemas`

    def call(self, arguments: dict[str, Any]) -> "CallToolResult":
        """Call the tool `options.tool` of the server.

        Returns:
            The server's answer, which may report an error of the tool.

        Raises:
            SessionLost: The session has to be opened again.
            RetryableError: No answer came.
            NoResult: The server refused the call (`refused`), or its answer has a wrong form (`malformed_response`).
        """
        from mcp import MCPError

        try:
            answer: CallToolResult = self.portal.call(_call_tool, self.client, self.options.tool, arguments)
        except MCPError as error:
            raise self._to_call_error(error) from error  # SessionLost, RetryableError or NoResult
        except RuntimeError as error:  # another call's timeout closed the session, or the server deferred too often
            raise RetryableError(f"MCP server: {self.options.public(error)}") from error

        if not self._fits_schema(answer):
            raise NoResult("malformed_response")
        return answer

    def _to_call_error(self, error: "MCPError") -> NoResult | RetryableError:
        """Convert an error of the MCP SDK to the exception to raise.

        Returns:
            SessionLost if the call may be repeated in a new session, RetryableError if it may be repeated in this one,
            and otherwise NoResult.
        """
        from mcp.types import (
            CONNECTION_CLOSED,
            INTERNAL_ERROR,
            INVALID_REQUEST,
            METHOD_NOT_FOUND,
            PARSE_ERROR,
            REQUEST_TIMEOUT,
        )

        message = f"MCP server: {self.options.public(error)}"
        if TOO_LONG in str(error):  # the error that `bounded_output.py` sends in place of a long answer
            return NoResult("malformed_response")
        # A server that was started anew knows neither the session nor its requests, and answers with these.
        if error.code in (CONNECTION_CLOSED, INVALID_REQUEST, METHOD_NOT_FOUND, PARSE_ERROR):
            return SessionLost(message)
        if error.code in (INTERNAL_ERROR, REQUEST_TIMEOUT):
            return RetryableError(message)
        return NoResult("refused")

    def _fits_schema(self, answer: "CallToolResult") -> bool:
        """Check whether the object in an answer fits the tool's output schema. It does if either of them is missing."""
        content = answer.structured_content
        if answer.is_error or content is None:
            return True

        schemas = self.schemas.get(self.options.tool)
        if schemas is None or schemas.output is None:
            return True

        return _is_valid(content, schemas.output)

    def close(self) -> None:
        """Close the session and end a command. Errors of a lost session are ignored."""
        with suppress(ExceptionGroup, OSError):
            self.stack.close()


def _is_valid(content: Any, schema: Any) -> bool:
    """Check whether a JSON value fits a JSON schema. An invalid schema fits nothing."""
    from jsonschema.validators import Draft202012Validator, validator_for
    from referencing import Registry

    try:
        validator_class = validator_for(schema, Draft202012Validator)
        validator = validator_class(schema, registry=Registry())  # fetches no schema from elsewhere
        return bool(validator.is_valid(content))
    except Exception:  # noqa: BLE001 - what the server declares is no schema
        return False


def open_session(key: str, options: McpOptions) -> McpSession:
    """Connect to the MCP server of a tool, and start its command if it has one.

    Args:
        key: The key of the tool's section, for messages.
        options: The settings of the server.

    Raises:
        ToolDown: There is no connection, or the server does not have the tool, or has it with other arguments.
    """
    session = _connect_to_server(key, options)
    tool = session.tools.get(options.tool)
    if tool is not None and tool.input_schema == options.input_schema:
        return session

    session.close()
    change = "is no longer there" if tool is None else "takes other arguments than are listed"
    raise ToolDown(
        f"[tools.{key}]: the tool {options.tool!r} of the server {options.server!r} {change}; run "
        "`toolformer-dag servers`, which shows what changed"
    )


def list_tools(options: McpOptions) -> "list[Tool]":
    """Connect to a server and return its tools. Raises ToolDown."""
    session = _connect_to_server(options.server, options)
    session.close()
    return list(session.tools.values())


def _connect_to_server(key: str, options: McpOptions) -> McpSession:
    """Connect to an MCP server and list its tools. The caller has to close the session.

    Raises:
        ToolDown: The server cannot be reached. No command is left running then.
    """
    logging.getLogger("mcp.client.stdio").addFilter(_shorten_traceback)

    target = transport(key, options)
    stack = ExitStack()
    try:
        return _start_session(stack, target, options)
    except ImportError:  # of the SDK, which is no fault of the server
        raise
    except Exception as error:  # the SDK raises many kinds; none may leave a server running
        with suppress(ExceptionGroup, OSError):
            stack.close()
        raise build_connection_error(key, options, error) from error


def _start_session(stack: ExitStack, target: "Transport | StdioServerParameters", options: McpOptions) -> McpSession:
    """Start an event loop in a thread, and connect a client to the server in it.

    Args:
        stack: Gets what has to be closed, the client and the event loop.
        target: How to reach the server.
        options: The settings of the server.

    Raises:
        Exception: Whatever the SDK raises.
    """
    from anyio.from_thread import start_blocking_portal
    from mcp import Client

    schemas: dict[str, ToolSchemas] = {}  # name of a tool -> its schemas as the server declares them
    streams = open_mended_streams(target, schemas)  # fills `schemas` while the list of tools is read

    portal = stack.enter_context(start_blocking_portal())
    unopened_client = Client(streams, read_timeout_seconds=options.start_timeout_s)
    client = stack.enter_context(portal.wrap_async_context_manager(unopened_client))

    listed_tools = portal.call(_fetch_tools, client, options)  # now `schemas` is complete
    tools = _with_input_schemas(listed_tools, schemas)

    return McpSession(options, stack, portal, client, schemas, tools)


def _with_input_schemas(tools: "list[Tool]", schemas: dict[str, ToolSchemas]) -> "dict[str, Tool]":
    """Return tools by name, with the input schemas that the server declares."""
    tools_by_name = {}
    for tool in tools:
        input_schema = schemas[tool.name].input
        tools_by_name[tool.name] = tool.model_copy(update={"input_schema": input_schema})
    return tools_by_name


def _shorten_traceback(record: logging.LogRecord) -> bool:
    """Replace the traceback of a log record by its reason, on the record's own line. Every record is kept."""
    # The SDK logs a traceback for each line of a server that is no message.
    if record.exc_info:
        reason = " ".join(str(record.exc_info[1]).split())
        record.msg = f"{record.msg} ({reason:.200})"
        record.args = ()
        record.exc_info = None
    return True


async def _call_tool(client: "Client", name: str, arguments: dict[str, Any]) -> "CallToolResult":
    """Call a tool of a server.

    Raises:
        NoResult: The answer breaks the protocol ("malformed_response").
        MCPError: The server reports an error.
        RuntimeError: The client is closed, or the server deferred its answer too often.
    """
    from mcp import InputRequiredRoundsExceededError

    _ = client.session  # raises the RuntimeError of a closed client here, before it looks like a malformed answer

    try:
        return await client.call_tool(name, arguments, CALL_SECONDS)
    except InputRequiredRoundsExceededError:  # a RuntimeError too, but no malformed answer
        raise
    except (ValidationError, RuntimeError) as error:  # violations of the protocol or of the output schema
        raise NoResult("malformed_response") from error


async def _fetch_tools(client: "Client", options: McpOptions) -> "list[Tool]":
    """Return the tools of a server. Raises TimeoutError if its list takes longer than `options.start_timeout_s`."""
    from anyio import move_on_after

    seconds = options.start_timeout_s
    with move_on_after(seconds):
        return await _fetch_all_pages(client, options)
    raise TimeoutError(f"its list of tools did not end within {seconds:g} s")


async def _fetch_all_pages(client: "Client", options: McpOptions) -> "list[Tool]":
    """List the tools on all pages of a server's list. A tool that is on two pages is listed twice.

    If a cursor (the name of the next page) occurs again, the list ends there with a warning.
    """
    page = await client.list_tools()
    tools = list(page.tools)

    cursors: set[str] = set()
    while page.next_cursor:
        cursor = page.next_cursor
        if cursor in cursors:  # the list would go on for ever
            _warn_of_repeated_cursor(options, cursor, tools)
            break

        cursors.add(cursor)
        page = await client.list_tools(cursor=cursor)
        tools.extend(page.tools)

    return tools


def _warn_of_repeated_cursor(options: McpOptions, cursor: str, tools: "list[Tool]") -> None:
    names = {tool.name for tool in tools}
    _log.warning(
        "[servers.%s]: its list of tools names the page %.100r twice and would not end; the tools read so far (%d) are "
        "taken as all. Correct the server's nextCursor if tools are missing",
        options.server,
        cursor,
        len(names),
    )
