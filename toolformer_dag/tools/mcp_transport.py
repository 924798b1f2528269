"""The way to an MCP server: a command or a URL, with answers of bounded length and mended lists of tools."""

import logging
import os
import shutil
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from pydantic import ValidationError

from toolformer_dag.settings.setting_types import expand_home
from toolformer_dag.tools.bounded_output import replace_lone_surrogates
from toolformer_dag.tools.mcp_options import McpOptions
from toolformer_dag.tools.tool import ToolDown

if TYPE_CHECKING:
    from mcp import StdioServerParameters
    from mcp.client import Transport

_log = logging.getLogger(__name__)
MAX_ANSWER_BYTES = 4 << 20
"""The longest answer, and the longest message of a stream of answers."""
TOO_LONG_MESSAGE = f"the answer is longer than {MAX_ANSWER_BYTES} bytes"
BOUNDED_OUTPUT_PROGRAM = str(Path(__file__).with_name("bounded_output.py"))
"""The program that starts the command of a server and bounds the lines that it prints."""
CONNECT_SECONDS = 30.0
"""The limit for connecting to a URL and for sending to it."""
READ_SECONDS = 300.0
"""The limit between two pieces of an answer over HTTP, which may be a stream of events."""


def build_transport(tool_key: str, options: McpOptions) -> "Transport | StdioServerParameters":
    """Build what `mcp.Client` needs to reach an MCP server, a program that offers tools to models.

    The options name either a command that starts the server, or its URL.

    Args:
        tool_key: The key of the tool's section, for messages.
        options: The settings of the server.

    Returns:
        The command with its environment variables, or the URL with the bearer token if one is set.

    Raises:
        ToolDown: The program does not exist, or an environment variable is not set.
    """
    if options.command is not None:
        return _build_stdio_parameters(tool_key, options, options.command)

    token = None if options.token_env is None else _read_required_variable(tool_key, options.token_env)
    return _build_http_transport(options.url or "", token)


def _build_stdio_parameters(tool_key: str, options: McpOptions, command: tuple[str, ...]) -> "StdioServerParameters":
    """Build the command that starts a server through `bounded_output.py`, which limits the length of its lines.

    Args:
        tool_key: The key of the tool's section, for messages.
        options: The settings of the server.
        command: The program and its arguments.

    Raises:
        ToolDown: The program does not exist, or an environment variable is not set.
    """
    from mcp import StdioServerParameters

    environment = {name: _read_required_variable(tool_key, name) for name in options.env}
    program_name, *program_arguments = command
    program = _resolve_program(tool_key, options, program_name)

    # The interpreter runs `bounded_output.py`, which starts the program.
    python_arguments = [
        "-I",
        BOUNDED_OUTPUT_PROGRAM,
        str(MAX_ANSWER_BYTES),
        TOO_LONG_MESSAGE,
        program,
        *program_arguments,
    ]
    return StdioServerParameters(command=sys.executable, args=python_arguments, env=environment, cwd=options.cwd)


def _resolve_program(tool_key: str, options: McpOptions, program: str) -> str:
    """Expand a leading `~` in the path of a program, and check that the program exists.

    Args:
        tool_key: The key of the tool's section, for messages.
        options: The settings of the server, with the folder `cwd` in which the program is started.
        program: A program on PATH, or a path.

    Raises:
        ToolDown: The program is neither found on PATH nor a file relative to `cwd`.
    """
    if program.startswith("~"):
        program = str(expand_home(Path(program)))

    exists = shutil.which(program) or (options.cwd / program).is_file()
    if not exists:
        error = FileNotFoundError(f"there is no program {program!r}")
        raise build_connection_error(tool_key, options, error)

    return program


def _read_required_variable(tool_key: str, variable_name: str) -> str:
    """Read an environment variable.

    Args:
        tool_key: The key of the tool's section, for messages.
        variable_name: The name of the variable.

    Raises:
        ToolDown: The variable is not set.
    """
    value = os.environ.get(variable_name)
    if value is None:
        raise ToolDown(
            f"[tools.{tool_key}]: the environment variable {variable_name} is not set; "
            "export it, or remove it from the section"
        )
    return value


def _build_http_transport(url: str, bearer_token: str | None) -> "Transport":
    """Connect the MCP SDK to a server behind a URL, with a limit on the length of answers.

    The SDK alone would read an answer of any length and decompress it. One megabyte of gzip can hold a gigabyte.

    Args:
        url: The URL.
        bearer_token: The token that each request sends to authenticate itself, or None.
    """
    import httpx2
    from mcp.client.streamable_http import streamable_http_client

    headers = {"Accept-Encoding": "identity"}  # no compression
    if bearer_token is not None:
        headers["Authorization"] = f"Bearer {bearer_token}"

    timeout = httpx2.Timeout(CONNECT_SECONDS, read=READ_SECONDS)
    client = httpx2.AsyncClient(headers=headers, timeout=timeout, event_hooks={"response": [_limit_response_length]})
    return streamable_http_client(url, http_client=client, max_sse_event_size=MAX_ANSWER_BYTES)


async def _limit_response_length(response: Any) -> None:
    """Replace the body of an HTTP response by one that raises an error beyond MAX_ANSWER_BYTES.

    In a stream of events, which may be endless, the limit applies to an unfinished line, not to the whole body.

    The HTTP client calls this after it has read the headers. A compressed body is not decompressed.
    """
    # Without this header the client does not decompress the body.
    response.headers.pop("content-encoding", None)

    content_type = response.headers.get("content-type", "")
    is_event_stream = content_type.startswith("text/event-stream")
    response.stream = _build_bounded_stream(response.stream, is_event_stream=is_event_stream)


def _build_bounded_stream(response_body: Any, *, is_event_stream: bool) -> Any:
    """Wrap the body of an HTTP response so that it comes in whole lines of limited length.

    Args:
        response_body: The body, an asynchronous stream of bytes.
        is_event_stream: Whether the body is a stream of events, which may be endless: only its lines are limited.
    """
    import httpx2  # slow, and only servers behind a URL need it

    class BoundedStream(httpx2.AsyncByteStream):
        """The wrapped body, which raises an error when it gets too long."""

        def __aiter__(self) -> AsyncIterator[bytes]:
            return _iter_complete_lines(response_body, is_event_stream=is_event_stream)

        async def aclose(self) -> None:
            await response_body.aclose()

    return BoundedStream()


async def _iter_complete_lines(body_blocks: Any, *, is_event_stream: bool) -> AsyncIterator[bytes]:
    """Read the body of an HTTP answer in whole lines, with U+FFFD for halves of surrogate pairs.

    A surrogate pair is two escapes that stand for one character, such as an emoji. A half alone is no character.

    Args:
        body_blocks: The body as it is received, an asynchronous iterable of bytes.
        is_event_stream: Whether the body is a stream of events, which may be endless.

    Yields:
        Bytes that end with a line, each of one or more lines, and at last the rest of the body.

    Raises:
        StreamError: The body has more than MAX_ANSWER_BYTES or, in an event stream, an unfinished line together with
            the block received next has.
    """
    import httpx2

    unyielded_bytes = b""  # between two blocks, the beginning of a line whose end has not come yet
    total_byte_count = 0
    async for block in body_blocks:
        total_byte_count += len(block)
        unyielded_bytes += block

        bounded_byte_count = len(unyielded_bytes) if is_event_stream else total_byte_count
        if bounded_byte_count > MAX_ANSWER_BYTES:
            raise httpx2.StreamError(TOO_LONG_MESSAGE)

        whole_lines, last_line_end, next_line = unyielded_bytes.rpartition(b"\n")
        if last_line_end:
            yield replace_lone_surrogates(whole_lines + last_line_end)
            unyielded_bytes = next_line

    yield replace_lone_surrogates(unyielded_bytes)


class ToolSchemas(NamedTuple):
    """The JSON schemas of a tool as its server declares them; `output_schema` may be anything, or None."""

    input_schema: dict[str, Any]
    output_schema: Any


@asynccontextmanager
async def open_mended_streams(
    connection_target: "Transport | StdioServerParameters", schemas_by_tool: dict[str, ToolSchemas]
) -> AsyncIterator[tuple[Any, Any]]:
    """Connect to a server and open the two streams from it and to it that `mcp.Client` needs.

    Common mistakes in the server's list of tools are corrected, because the SDK would refuse the whole list.

    Args:
        connection_target: The command that starts the server, or the connection to its URL (see `build_transport`).
        schemas_by_tool: Gets the schemas of each tool of the server, by name, as soon as the list of tools was read.

    Yields:
        The stream of messages from the server, and the one to it.
    """
    from mcp import StdioServerParameters
    from mcp.client.stdio import stdio_client

    transport: Any = connection_target
    if isinstance(connection_target, StdioServerParameters):
        transport = stdio_client(connection_target)

    async with transport as (from_server, to_server):
        yield MendedMessages(from_server, schemas_by_tool), to_server


class MendedMessages:
    """The stream of a server's messages, in which lists of tools are mended before the SDK reads them.

    - A tool that breaks the protocol is left out, with a warning; the SDK would refuse the whole list.
    - The tools' schemas are moved from the list to `schemas_by_tool`. The SDK refuses a list with an invalid schema.
      It also refuses an answer in text alone from a tool with an output schema, as many servers give it.
    """

    def __init__(self, message_stream: Any, schemas_by_tool: dict[str, ToolSchemas]) -> None:
        self._message_stream = message_stream
        self._schemas_by_tool = schemas_by_tool

    def __getattr__(self, name: str) -> Any:
        return getattr(self._message_stream, name)

    async def __aenter__(self) -> "MendedMessages":
        await self._message_stream.__aenter__()
        return self

    async def __aexit__(self, *raised: Any) -> Any:
        return await self._message_stream.__aexit__(*raised)

    async def __aiter__(self) -> AsyncIterator[Any]:
        """Yield the server's messages in order, lists of tools mended and all others as they are."""
        async for item in self._message_stream:
            message = getattr(item, "message", None)
            result = getattr(message, "result", None)
            if isinstance(result, dict) and isinstance(result.get("tools"), list):
                mended_tools = [self._mend_tool(tool) for tool in result["tools"]]
                result["tools"] = [tool for tool in mended_tools if tool is not None]
            yield item

    def _mend_tool(self, listed_tool: Any) -> dict[str, Any] | None:
        """Change a listed tool so that the SDK accepts it. Its schemas are moved to `self._schemas_by_tool`.

        Returns:
            The tool, or None (with a warning) if it breaks the protocol.
        """
        fields = listed_tool if isinstance(listed_tool, dict) else {}
        name = fields.get("name")
        input_schema = fields.get("inputSchema")

        if not isinstance(name, str) or not isinstance(input_schema, dict):
            _log.warning("the tool %.100r breaks the protocol (name, inputSchema) and is left out", name)
            return None

        output_schema = fields.get("outputSchema")
        self._schemas_by_tool[name] = ToolSchemas(_mend_schema(input_schema), output_schema)
        return _build_accepted_tool(name, fields.get("description"))


def _build_accepted_tool(tool_name: str, description: object) -> dict[str, Any]:
    """Describe a tool as the SDK accepts it in a list of tools, with a schema that allows any arguments.

    Args:
        tool_name: The name of the tool.
        description: Its description. Anything but a text becomes "".
    """
    accepted_description = description if isinstance(description, str) else ""
    return {"name": tool_name, "description": accepted_description, "inputSchema": {"type": "object"}}


def _mend_schema(schema: dict[str, Any]) -> dict[str, Any]:
    """Correct common mistakes of servers in the JSON schema of a tool's arguments.

    Fields that are null are removed, and so is `"properties": []`, PHP's empty object. A missing type becomes "object".
    """
    mended_fields: dict[str, Any] = {"type": "object"}
    for field, value in schema.items():
        is_empty_object_of_php = field == "properties" and value == []
        if value is not None and not is_empty_object_of_php:
            mended_fields[field] = value
    return mended_fields


def build_connection_error(tool_key: str, options: McpOptions, error: BaseException) -> ToolDown:
    """Build the error for a server that cannot be reached. Its message has the reason and a remedy, but no secrets.

    Args:
        tool_key: The key of the tool's section.
        options: The settings of the server.
        error: What was raised while connecting.
    """
    cause = _find_first_cause(error)
    reason = options.format_masked_error(cause)
    failure = _explain_connection_failure(options, cause)

    return ToolDown(
        f"[tools.{tool_key}]: {failure.problem} ({reason}); {failure.remedy}, "
        f"or raise start_timeout_s above {options.start_timeout_s:g}"
    )


def _find_first_cause(error: BaseException) -> BaseException:
    """Return the first error in the groups of errors, possibly nested, that asynchronous tasks raise."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


class _ConnectionFailure(NamedTuple):
    """What is wrong with a connection, and what the user can do."""

    problem: str
    remedy: str


def _explain_connection_failure(options: McpOptions, cause: BaseException) -> _ConnectionFailure:
    """Find out what an error of a connection means: a breach of the protocol, a failed command, or a silent URL.

    Args:
        options: The settings of the server.
        cause: The error.

    Returns:
        The problem and what the user can do about it, in words.
    """
    if isinstance(cause, ValidationError):
        problem = f"a description from the MCP server {options.masked_connection} breaks the protocol"
        return _ConnectionFailure(problem, remedy="fix the server, use another version of it")

    if options.command is not None:
        problem = f"the MCP server {options.masked_connection} does not start in {options.cwd}"
        return _ConnectionFailure(problem, remedy="run the command by hand to see its output")

    problem = f"no MCP server answers at {options.masked_connection}"
    return _ConnectionFailure(problem, remedy="start it, correct the url")
