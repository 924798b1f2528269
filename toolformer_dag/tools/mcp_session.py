"""A session with an MCP server: opening it, listing its tools, calling one."""

import logging
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from toolformer_dag.tools.mcp_options import McpOptions
from toolformer_dag.tools.mcp_transport import (
    TOO_LONG_MESSAGE,
    ToolSchemas,
    build_connection_error,
    build_transport,
    open_mended_streams,
)
from toolformer_dag.tools.tool import NoResult, RetryableError, ToolDown

if TYPE_CHECKING:
    from anyio.from_thread import BlockingPortal
    from mcp import Client, MCPError, StdioServerParameters
    from mcp.client import Transport
    from mcp.types import CallToolResult, Tool

_log = logging.getLogger(__name__)
MAX_CALL_SECONDS = 3600.0
"""The limit of a request to call a tool. The lane's timeout_s limits the call; this ends requests that timed-out calls
left open."""


class SessionLost(RetryableError):
    """The server has ended, or does not know the session any more: it has to be opened anew."""


@dataclass(frozen=True, slots=True, eq=False)
class McpSession:
    """A connection to an MCP server, in an event loop that runs in a thread of its own. Safe for several threads.

    Attributes:
        options: The settings of the server and of one of its tools.
        exit_stack: Closes the client and then the event loop.
        blocking_portal: Runs coroutines in the event loop, and waits for them.
        client: The SDK's client of the server.
        schemas_by_tool: The schemas of the server's tools, by name, as the server declares them.
        tools_by_name: The server's tools by name, with the input schemas of `schemas_by_tool`.
    """

    options: McpOptions
    exit_stack: ExitStack
    blocking_portal: "BlockingPortal"
    client: "Client"
    schemas_by_tool: dict[str, ToolSchemas]
    tools_by_name: "dict[str, Tool]"

    def call_tool(self, arguments: dict[str, Any]) -> "CallToolResult":
        """Call the tool `options.tool` of the server, and wait for the answer.

        Args:
            arguments: The named arguments of the call.

        Returns:
            The server's answer, which may report an error of the tool.

        Raises:
            SessionLost: The session has to be opened again.
            RetryableError: No answer came.
            NoResult: The server refused the call (`refused`), or its answer has a wrong form (`malformed_response`).
        """
        from mcp import MCPError

        try:
            answer: CallToolResult = self.blocking_portal.call(_call_tool, self.client, self.options.tool, arguments)
        except MCPError as error:
            raise self._to_call_error(error) from error  # SessionLost, RetryableError or NoResult
        except RuntimeError as error:  # another call's timeout closed the session, or the server deferred too often
            raise RetryableError(f"MCP server: {self.options.format_masked_error(error)}") from error

        if not self._fits_output_schema(answer):
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

        message = f"MCP server: {self.options.format_masked_error(error)}"

        # `bounded_output.py` sends this error in place of a long answer.
        if TOO_LONG_MESSAGE in str(error):
            return NoResult("malformed_response")

        # A server that was started anew knows neither the session nor its requests, and answers with these.
        lost_session_codes = (CONNECTION_CLOSED, INVALID_REQUEST, METHOD_NOT_FOUND, PARSE_ERROR)
        if error.code in lost_session_codes:
            return SessionLost(message)

        if error.code in (INTERNAL_ERROR, REQUEST_TIMEOUT):
            return RetryableError(message)

        return NoResult("refused")

    def _fits_output_schema(self, answer: "CallToolResult") -> bool:
        """Check whether the JSON object in an answer fits the output schema of the tool.

        It does if there is no object or no schema, and also if the answer reports an error.
        """
        content = answer.structured_content
        if answer.is_error or content is None:
            return True

        schemas = self.schemas_by_tool.get(self.options.tool)
        if schemas is None or schemas.output_schema is None:
            return True

        return _matches_json_schema(content, schemas.output_schema)

    def close(self) -> None:
        """Close the session, and end the command of the server if it has one. Errors of a lost session are ignored."""
        with suppress(ExceptionGroup, OSError):
            self.exit_stack.close()


def _matches_json_schema(json_value: Any, json_schema: Any) -> bool:
    """Check whether a JSON value fits a JSON schema. An invalid schema fits nothing."""
    from jsonschema.validators import Draft202012Validator, validator_for
    from referencing import Registry

    try:
        validator_class = validator_for(json_schema, Draft202012Validator)
        # An empty registry fetches no schema from elsewhere.
        validator = validator_class(json_schema, registry=Registry())
        return bool(validator.is_valid(json_value))
    except Exception:  # noqa: BLE001 - what the server declares is no schema
        return False


def open_session(tool_key: str, options: McpOptions) -> McpSession:
    """Connect to the MCP server of a tool, and start its command if it has one.

    Args:
        tool_key: The key of the tool's section, for messages.
        options: The settings of the server.

    Raises:
        ToolDown: There is no connection, or the server does not have the tool, or has it with other arguments.
    """
    session = _connect_to_server(tool_key, options)
    tool = session.tools_by_name.get(options.tool)
    is_as_listed = tool is not None and tool.input_schema == options.input_schema
    if is_as_listed:
        return session

    session.close()
    change = "is no longer there" if tool is None else "takes other arguments than are listed"
    raise ToolDown(
        f"[tools.{tool_key}]: the tool {options.tool!r} of the server {options.server!r} {change}; run "
        "`toolformer-dag servers`, which shows what changed"
    )


def fetch_server_tools(options: McpOptions) -> "list[Tool]":
    """Connect to an MCP server only to list its tools.

    Args:
        options: The settings of the server.

    Raises:
        ToolDown: The server cannot be reached.
    """
    session = _connect_to_server(options.server, options)
    session.close()
    return list(session.tools_by_name.values())


def _connect_to_server(tool_key: str, options: McpOptions) -> McpSession:
    """Connect to an MCP server and list its tools. The caller has to close the session.

    Args:
        tool_key: The key of the tool's section, for messages.
        options: The settings of the server.

    Raises:
        ToolDown: The server cannot be reached. No command is left running then.
        ImportError: The SDK is not installed.
    """
    logging.getLogger("mcp.client.stdio").addFilter(_shorten_traceback)

    connection_target = build_transport(tool_key, options)
    exit_stack = ExitStack()
    try:
        return _start_session(exit_stack, connection_target, options)
    except ImportError:  # of the SDK, which is no fault of the server
        raise
    except Exception as error:  # the SDK raises many kinds; none may leave a server running
        with suppress(ExceptionGroup, OSError):
            exit_stack.close()
        raise build_connection_error(tool_key, options, error) from error


def _start_session(
    exit_stack: ExitStack, connection_target: "Transport | StdioServerParameters", options: McpOptions
) -> McpSession:
    """Start an event loop in a thread, and connect a client to the server in it.

    Args:
        exit_stack: Gets what has to be closed, the client and the event loop.
        connection_target: The command that starts the server, or the connection to its URL.
        options: The settings of the server.

    Raises:
        Exception: Whatever the SDK raises.
    """
    from anyio.from_thread import start_blocking_portal
    from mcp import Client

    # The streams fill this dictionary while the client reads the list of tools.
    schemas_by_tool: dict[str, ToolSchemas] = {}
    streams = open_mended_streams(connection_target, schemas_by_tool)

    portal = exit_stack.enter_context(start_blocking_portal())
    unopened_client = Client(streams, read_timeout_seconds=options.start_timeout_s)
    client = exit_stack.enter_context(portal.wrap_async_context_manager(unopened_client))

    listed_tools = portal.call(_fetch_tools, client, options)
    tools_by_name = _apply_input_schemas(listed_tools, schemas_by_tool)

    return McpSession(options, exit_stack, portal, client, schemas_by_tool, tools_by_name)


def _apply_input_schemas(listed_tools: "list[Tool]", schemas_by_tool: dict[str, ToolSchemas]) -> "dict[str, Tool]":
    """Return tools by name, with the input schemas that the server declares in place of those that the SDK read."""
    tools_by_name = {}
    for tool in listed_tools:
        input_schema = schemas_by_tool[tool.name].input_schema
        tools_by_name[tool.name] = tool.model_copy(update={"input_schema": input_schema})
    return tools_by_name


def _shorten_traceback(record: logging.LogRecord) -> bool:
    """Replace the traceback of a log record by the message of its exception, on the record's own line.

    The SDK logs a traceback for each line of a server that is no message.

    Returns:
        True, so that the logger keeps the record.
    """
    if record.exc_info:
        error = record.exc_info[1]
        reason = " ".join(str(error).split())
        # The messages that `mcp.client.stdio` logs with a traceback have no placeholders, and so no arguments.
        record.msg = f"{record.msg} ({reason:.200})"
        record.args = ()
        record.exc_info = None
    return True


async def _call_tool(client: "Client", tool_name: str, arguments: dict[str, Any]) -> "CallToolResult":
    """Call a tool of a server.

    Args:
        client: The SDK's client of the server.
        tool_name: The name of the tool.
        arguments: The named arguments of the call.

    Raises:
        NoResult: The answer breaks the protocol ("malformed_response").
        MCPError: The server reports an error.
        RuntimeError: The client is closed, or the server deferred its answer too often.
    """
    from mcp import InputRequiredRoundsExceededError

    _ = client.session  # raises the RuntimeError of a closed client here, before it looks like a malformed answer

    try:
        return await client.call_tool(tool_name, arguments, MAX_CALL_SECONDS)
    except InputRequiredRoundsExceededError:  # a RuntimeError too, but no malformed answer
        raise
    except (ValidationError, RuntimeError) as error:  # violations of the protocol or of the output schema
        raise NoResult("malformed_response") from error


async def _fetch_tools(client: "Client", options: McpOptions) -> "list[Tool]":
    """Fetch the list of a server's tools.

    Raises:
        TimeoutError: It takes longer than `options.start_timeout_s`.
    """
    from anyio import move_on_after

    timeout_s = options.start_timeout_s
    with move_on_after(timeout_s):  # leaves the block when the time is up
        return await _fetch_all_pages(client, options)
    raise TimeoutError(f"its list of tools did not end within {timeout_s:g} s")


async def _fetch_all_pages(client: "Client", options: McpOptions) -> "list[Tool]":
    """Fetch the tools on all pages of a server's list. A tool that is on two pages is listed twice.

    If a cursor (the name of the next page) occurs again, the list ends there with a warning.
    """
    page = await client.list_tools()
    tools = list(page.tools)

    seen_cursors: set[str] = set()
    while page.next_cursor:
        cursor = page.next_cursor
        if cursor in seen_cursors:  # the list would go on for ever
            _warn_of_repeated_cursor(options, cursor, tools)
            break

        seen_cursors.add(cursor)
        page = await client.list_tools(cursor=cursor)
        tools.extend(page.tools)

    return tools


def _warn_of_repeated_cursor(options: McpOptions, cursor: str, tools: "list[Tool]") -> None:
    """Log a warning that the list of a server's tools names a page twice; `tools` are those that were read so far."""
    names = {tool.name for tool in tools}
    _log.warning(
        "[servers.%s]: its list of tools names the page %.100r twice and would not end; the tools read so far (%d) are "
        "taken as all. Correct the server's nextCursor if tools are missing",
        options.server,
        cursor,
        len(names),
    )
