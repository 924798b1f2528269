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
from toolformer_dag.tools.bounded_output import mended
from toolformer_dag.tools.mcp_options import McpOptions
from toolformer_dag.tools.tool import ToolDown

if TYPE_CHECKING:
    from mcp import StdioServerParameters
    from mcp.client import Transport

_log = logging.getLogger(__name__)
MAX_ANSWER_BYTES = 4 << 20
"""The longest answer, and the longest message of a stream of answers."""
TOO_LONG = f"the answer is longer than {MAX_ANSWER_BYTES} bytes"
BOUNDED_OUTPUT = str(Path(__file__).with_name("bounded_output.py"))
"""The program that starts the command of a server and bounds the lines that it prints."""
CONNECT_SECONDS = 30.0
"""The limit for connecting to a URL and for sending to it."""
READ_SECONDS = 300.0
"""The limit between two pieces of an answer over HTTP, which may be a stream of events."""


def transport(key: str, options: McpOptions) -> "Transport | StdioServerParameters":
    """Build what `mcp.Client` needs to reach an MCP server.

    The options name either a command that starts the server, or its URL.

    Args:
        key: The key of the tool's section, for messages.
        options: The settings of the server.

    Returns:
        The command with its environment variables, or the URL with the bearer token if one is set.

    Raises:
        ToolDown: The program does not exist, or an environment variable is not set.
    """
    if options.command is not None:
        return _build_command(key, options, options.command)

    token = None if options.token_env is None else _require_variable(key, options.token_env)
    return _build_http_transport(options.url or "", token)


def _build_command(key: str, options: McpOptions, command: tuple[str, ...]) -> "StdioServerParameters":
    """Build the command that starts a server through `bounded_output.py`, which limits the length of its lines.

    Args:
        key: The key of the tool's section, for messages.
        options: The settings of the server.
        command: The program and its arguments.

    Raises:
        ToolDown: The program does not exist, or an environment variable is not set.
    """
    from mcp import StdioServerParameters

    environment = {name: _require_variable(key, name) for name in options.env}
    program = _require_program(key, options, command[0])
    bounded = ["-I", BOUNDED_OUTPUT, str(MAX_ANSWER_BYTES), TOO_LONG, program, *command[1:]]
    return StdioServerParameters(command=sys.executable, args=bounded, env=environment, cwd=options.cwd)


def _require_program(key: str, options: McpOptions, program: str) -> str:
    """Expand a leading `~` in the path of a program, and check that the program exists.

    Raises:
        ToolDown: It is neither found on PATH nor a file below `cwd`.
    """
    if program.startswith("~"):
        program = str(expand_home(Path(program)))

    is_there = shutil.which(program) or (options.cwd / program).is_file()
    if not is_there:
        raise build_connection_error(key, options, FileNotFoundError(f"there is no program {program!r}"))

    return program


def _require_variable(key: str, name: str) -> str:
    """Read an environment variable.

    Raises:
        ToolDown: The variable is not set.
    """
    value = os.environ.get(name)
    if value is None:
        raise ToolDown(
            f"[tools.{key}]: the environment variable {name} is not set; export it, or remove it from the section"
        )
    return value


def _build_http_transport(url: str, token: str | None) -> "Transport":
    """Connect the MCP SDK to a server behind a URL, with a limit on the length of answers.

    The SDK alone would read an answer of any length and decompress it. One megabyte of gzip can hold a gigabyte.

    Args:
        url: The URL.
        token: A bearer token, or None.
    """
    import httpx2
    from mcp.client.streamable_http import streamable_http_client

    headers = {"Accept-Encoding": "identity"}  # no compression
    if token is not None:
        headers["Authorization"] = f"Bearer {token}"

    timeout = httpx2.Timeout(CONNECT_SECONDS, read=READ_SECONDS)
    client = httpx2.AsyncClient(headers=headers, timeout=timeout, event_hooks={"response": [_limit_length]})
    return streamable_http_client(url, http_client=client, max_sse_event_size=MAX_ANSWER_BYTES)


async def _limit_length(response: Any) -> None:
    """Replace the body of an HTTP response by one that raises an error beyond MAX_ANSWER_BYTES.

    The HTTP client calls this after it has read the headers. A compressed body is not decompressed.
    """
    response.headers.pop("content-encoding", None)  # without it the client does not decompress

    content_type = response.headers.get("content-type", "")
    is_event_stream = content_type.startswith("text/event-stream")
    response.stream = _build_bounded_stream(response.stream, is_event_stream=is_event_stream)


def _build_bounded_stream(body: Any, *, is_event_stream: bool) -> Any:
    """Wrap the body of an HTTP response so that it comes in whole lines of limited length."""
    import httpx2  # slow, and only servers behind a URL need it

    class BoundedStream(httpx2.AsyncByteStream):
        def __aiter__(self) -> AsyncIterator[bytes]:
            return _iter_complete_lines(body, is_event_stream=is_event_stream)

        async def aclose(self) -> None:
            await body.aclose()

    return BoundedStream()


async def _iter_complete_lines(blocks: Any, *, is_event_stream: bool) -> AsyncIterator[bytes]:
    """Read the body of an HTTP answer in whole lines, with U+FFFD for halves of surrogate pairs.

    Args:
        blocks: The body as it is received, an asynchronous iterable of bytes.
        is_event_stream: Whether the body is a stream of events, which may be endless.

    Raises:
        StreamError: The body has more than MAX_ANSWER_BYTES. For an event stream: a single line has more.
    """
    import httpx2

    unfinished = b""  # the beginning of a line whose end has not come yet
    total_bytes = 0
    async for block in blocks:
        total_bytes += len(block)
        unfinished += block

        bounded_bytes = len(unfinished) if is_event_stream else total_bytes
        if bounded_bytes > MAX_ANSWER_BYTES:
            raise httpx2.StreamError(TOO_LONG)

        whole_lines, last_line_end, next_line = unfinished.rpartition(b"\n")
        if last_line_end:
            yield mended(whole_lines + last_line_end)
            unfinished = next_line

    yield mended(unfinished)


class ToolSchemas(NamedTuple):
    """The JSON schemas of a tool as its server declares them; `output` may be anything, or None."""

    input: dict[str, Any]
    output: Any


@asynccontextmanager
async def open_mended_streams(
    target: "Transport | StdioServerParameters", schemas: dict[str, ToolSchemas]
) -> AsyncIterator[tuple[Any, Any]]:
    """Connect to a server and open the two streams from it and to it that `mcp.Client` needs.

    Args:
        target: How to reach the server.
        schemas: Gets the schemas of each tool of the server, by name, as soon as the list of tools was read.
    """
    from mcp import StdioServerParameters
    from mcp.client.stdio import stdio_client

    plain = stdio_client(target) if isinstance(target, StdioServerParameters) else target
    async with plain as (from_server, to_server):
        yield MendedMessages(from_server, schemas), to_server


class MendedMessages:
    """The stream of a server's messages, in which lists of tools are mended before the SDK reads them.

    - A tool that breaks the protocol is left out, with a warning; the SDK would refuse the whole list.
    - The tools' schemas are moved from the list to `schemas`, by the tool's name. The SDK refuses a list with an
      invalid schema. It also refuses an answer in text alone from a tool with an output schema, as many servers give
      it.
    """

    def __init__(self, stream: Any, schemas: dict[str, ToolSchemas]) -> None:
        self._stream = stream
        self._schemas = schemas

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    async def __aenter__(self) -> "MendedMessages":
        await self._stream.__aenter__()
        return self

    async def __aexit__(self, *raised: Any) -> Any:
        return await self._stream.__aexit__(*raised)

    async def __aiter__(self) -> AsyncIterator[Any]:
        async for item in self._stream:
            message = getattr(item, "message", None)
            result = getattr(message, "result", None)
            if isinstance(result, dict) and isinstance(result.get("tools"), list):
                mended_tools = [self._mend_tool(tool) for tool in result["tools"]]
                result["tools"] = [tool for tool in mended_tools if tool is not None]
            yield item

    def _mend_tool(self, tool: Any) -> dict[str, Any] | None:
        """Change a listed tool so that the SDK accepts it. Its schemas are moved to `self._schemas`.

        Returns:
            The tool, or None (with a warning) if it breaks the protocol.
        """
        fields = tool if isinstance(tool, dict) else {}
        name = fields.get("name")
        input_schema = fields.get("inputSchema")

        if not isinstance(name, str) or not isinstance(input_schema, dict):
            _log.warning("the tool %.100r breaks the protocol (name, inputSchema) and is left out", name)
            return None

        output_schema = fields.get("outputSchema")
        self._schemas[name] = ToolSchemas(_mend_schema(input_schema), output_schema)
        return _without_schemas(name, fields.get("description"))


def _without_schemas(name: str, description: object) -> dict[str, Any]:
    """Return a listed tool with a schema that the SDK accepts; a description that is not a text becomes ""."""
    return {
        "name": name,
        "description": description if isinstance(description, str) else "",
        "inputSchema": {"type": "object"},
    }


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


def build_connection_error(key: str, options: McpOptions, error: BaseException) -> ToolDown:
    """Build the error for a server that cannot be reached. Its message has the reason and a remedy, but no secrets.

    Args:
        key: The key of the tool's section.
        options: The settings of the server.
        error: What was raised while connecting.
    """
    cause = _find_first_cause(error)
    failure = _explain_failure(options, cause)

    patience = f"or raise start_timeout_s above {options.start_timeout_s:g}"
    return ToolDown(f"[tools.{key}]: {failure.problem} ({options.public(cause)}); {failure.remedy}, {patience}")


def _find_first_cause(error: BaseException) -> BaseException:
    """Return the actual error in the groups that task groups wrap around it: the first where there are several."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


class _ConnectionFailure(NamedTuple):
    """What is wrong with a connection, and what the user can do."""

    problem: str
    remedy: str


def _explain_failure(options: McpOptions, cause: BaseException) -> _ConnectionFailure:
    """Find out what an error of a connection means: a breach of the protocol, a failed command, or a silent URL."""
    if isinstance(cause, ValidationError):
        problem = f"a description from the MCP server {options.shown} breaks the protocol"
        return _ConnectionFailure(problem, remedy="fix the server, use another version of it")

    if options.command is not None:
        problem = f"the MCP server {options.shown} does not start in {options.cwd}"
        return _ConnectionFailure(problem, remedy="run the command by hand to see its output")

    problem = f"no MCP server answers at {options.shown}"
    return _ConnectionFailure(problem, remedy="start it, correct the url")
