"""Options of an MCP tool, and a session with its server."""

import logging
import os
import shutil
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import ExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import Field, ValidationError, model_validator

from toolformer_dag.identity import fingerprint
from toolformer_dag.settings.setting_types import expanded
from toolformer_dag.tools.bounded_output import mended
from toolformer_dag.tools.options import (
    MAX_SECONDS,
    LinearPattern,
    OptionPath,
    ToolOptions,
    WebAddress,
    shown_url,
    url_secrets,
    without,
)
from toolformer_dag.tools.tool import NoResult, RetryableError, ToolDown

if TYPE_CHECKING:
    from anyio.from_thread import BlockingPortal
    from mcp import Client, StdioServerParameters
    from mcp.client import Transport
    from mcp.types import CallToolResult, Tool


class McpOptions(ToolOptions):
    """A tool of a server of `[servers.NAME]`, whose keys these are too.

        [servers.office]
        command = ["python", "weather_server.py"]        # or url = "http://localhost:8000/mcp"

        [tools.get_weather]                              # as the server calls it
        name = "Weather"
        examples = ['It is [Weather(city="Rome")] sunny in Rome.', 'Oslo is at [Weather(city="Oslo", days=2)] -3 °C.']

    - tool: the server's name for it. name: the name in the text; by default get_weather is GetWeather.
    - input_schema, description: as the server lists them; a description here replaces its own.
    - command: program and arguments of a stdio server, started in `cwd`. url: the address of a streamable HTTP server.
    - result: how a result that is an object is shown, as in "{temperature} °C"; by default as compact JSON.
    - wants: a regular expression that a text must contain; by default every text is annotated. It is matched in linear
      time, so it has no look-around and no backreferences.
    - env: names of environment variables passed to the command. token_env: the variable that holds a bearer token for
      the url. Values of variables never enter settings or fingerprints. Of `command` and `url`, records and messages
      show the program and the plain address; the rest is replaced by its hash.
    - start_timeout_s: the limit for each request of the handshake after the first, to which the SDK gives 10 s. It
      includes the start of a command. Listing the tools counts as a single request. The section's timeout_s limits
      calls only.
    - version: change it when the server's answers change, so that calls are executed again.
    """

    server: str
    tool: str
    name: str = Field("", pattern=r"^([^\W\d]\w*)?$")
    input_schema: Mapping[str, Any] = Field(default_factory=dict)
    command: tuple[str, ...] | None = Field(None, min_length=1)
    cwd: OptionPath = Field(Path(), validate_default=True)
    url: WebAddress | None = None
    result: str | None = None
    wants: LinearPattern | None = None
    env: tuple[str, ...] = ()
    token_env: str | None = None
    start_timeout_s: float = Field(20.0, gt=0, le=MAX_SECONDS)
    version: str = "1"

    @model_validator(mode="after")
    def _one_connection(self) -> "McpOptions":
        if (self.command is None) == (self.url is None):
            raise ValueError(
                f"[servers.{self.server}] needs either command = [...] (stdio) or url = ... (HTTP), not both"
            )
        return self

    @property
    def shown(self) -> str:
        """The server for records and messages: arguments, which may be secrets, are replaced by their hash."""
        if self.command is None:
            return shown_url(self.url or "")
        program, *arguments = self.command
        return f"{program} (its arguments are {fingerprint(arguments)})" if arguments else program

    def public(self, error: BaseException) -> str:
        """Return the message of an error in a line, without arguments of the command, parts of the url, variables."""
        variables = [os.environ.get(name, "") for name in (*self.env, *filter(None, [self.token_env]))]
        secrets = [*(self.command or ())[1:], *url_secrets(self.url or ""), *variables]
        return " ".join(without(secrets, str(error)).split())[:300]  # a breach of the protocol is described at length


def transport(key: str, options: McpOptions) -> "Transport | StdioServerParameters":
    """Return the target for `mcp.Client`: a command with its environment, or a url, with a bearer token or without.

    A command gets the variables that the SDK passes on (PATH, HOME, ...) and those in `env`. Raises ToolDown for a
    variable that is not set.
    """
    if options.command is not None:
        from mcp import StdioServerParameters

        program, *arguments = options.command
        program = str(expanded(Path(program))) if program.startswith("~") else program
        environment = {name: _variable(key, name) for name in options.env}
        if not (shutil.which(program) or (options.cwd / program).is_file()):
            raise _no_session(key, options, FileNotFoundError(f"there is no program {program!r}"))
        bounded = ["-I", BOUNDED_OUTPUT, str(MAX_ANSWER_BYTES), TOO_LONG, program, *arguments]
        return StdioServerParameters(command=sys.executable, args=bounded, env=environment, cwd=options.cwd)
    token = None if options.token_env is None else _variable(key, options.token_env)
    return _bounded(options.url or "", token)


MAX_ANSWER_BYTES = 4 << 20
"""The longest message."""
BOUNDED_OUTPUT = str(Path(__file__).with_name("bounded_output.py"))
TOO_LONG = f"the answer is longer than {MAX_ANSWER_BYTES} bytes"


def _bounded(url: str, token: str | None) -> "Transport":
    """Return the transport to a url whose answers are uncompressed and bounded; of a stream each line is."""
    import httpx2
    from mcp.client.streamable_http import streamable_http_client

    class BoundedStream(httpx2.AsyncByteStream):
        def __init__(self, stream: Any, events: bool) -> None:
            self._stream, self._events = stream, events

        async def __aiter__(self) -> AsyncIterator[bytes]:
            total, line = 0, b""
            async for block in self._stream:
                *lines, rest = block.split(b"\n")
                total = len(block) + (len(line) if self._events else total)
                if total > MAX_ANSWER_BYTES:
                    raise httpx2.StreamError(TOO_LONG)
                if lines:
                    yield mended(line + block[: -len(rest) or None])
                line = rest if lines else line + rest
            yield mended(line)

        async def aclose(self) -> None:
            await self._stream.aclose()

    async def bound(response: Any) -> None:
        response.headers.pop("content-encoding", None)  # what is compressed all the same stays so, and does not parse
        events = response.headers.get("content-type", "").startswith("text/event-stream")
        response.stream = BoundedStream(response.stream, events)

    headers = {"Accept-Encoding": "identity"} | ({} if token is None else {"Authorization": f"Bearer {token}"})
    timeout = httpx2.Timeout(30.0, read=300.0)
    client = httpx2.AsyncClient(headers=headers, timeout=timeout, event_hooks={"response": [bound]})
    return streamable_http_client(url, http_client=client, max_sse_event_size=MAX_ANSWER_BYTES)


class _Sifted:
    """The messages of a server, without what breaks the protocol in a list of tools: one bad tool hides no other.

    `schemas`: by tool its schemas, which are left out: the SDK refuses the whole list for one that is none, and what
    answers in text alone where an output schema is declared, as many do.
    """

    def __init__(self, stream: Any, schemas: dict[str, Any]) -> None:
        self._stream, self._schemas = stream, schemas

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    async def __aenter__(self) -> "_Sifted":
        await self._stream.__aenter__()
        return self

    async def __aexit__(self, *raised: Any) -> Any:
        return await self._stream.__aexit__(*raised)

    async def __aiter__(self) -> AsyncIterator[Any]:
        async for item in self._stream:
            result = getattr(getattr(item, "message", None), "result", None)
            if isinstance(result, dict) and isinstance(result.get("tools"), list):
                result["tools"] = [kept for tool in result["tools"] if (kept := self._kept(tool))]
            yield item

    def _kept(self, tool: Any) -> dict[str, Any] | None:
        fields = tool if isinstance(tool, dict) else {}
        name, description, schema = fields.get("name"), fields.get("description"), fields.get("inputSchema")
        if not isinstance(name, str) or not isinstance(schema, dict):
            _log.warning("the tool %.100r breaks the protocol (name, inputSchema) and is left out", name)
            return None
        given = {
            key: value for key, value in schema.items() if value is not None and (key, value) != ("properties", [])
        }
        self._schemas[name] = {"type": "object", **given}, fields.get("outputSchema")  # PHP writes {} as []
        return {
            "name": name,
            "description": description if isinstance(description, str) else "",
            "inputSchema": {"type": "object"},
        }


def _fits(content: Any, schema: Any) -> bool:
    from jsonschema.validators import Draft202012Validator, validator_for
    from referencing import Registry

    try:
        return bool(validator_for(schema, Draft202012Validator)(schema, registry=Registry()).is_valid(content))
    except Exception:  # noqa: BLE001 - what the server declares is no schema
        return False


def _variable(key: str, name: str) -> str:
    value = os.environ.get(name)
    if value is None:
        raise ToolDown(
            f"[tools.{key}]: the environment variable {name} is not set; export it, or remove it from the section"
        )
    return value


_log = logging.getLogger(__name__)
CALL_SECONDS = 3600.0  # the lane's timeout_s limits a call; this limit ends requests that timed-out calls left open


class SessionLost(RetryableError):
    """The server ended or knows the session no more: it has to be opened anew."""


@dataclass(frozen=True, slots=True)
class Session:
    """A client in the event loop of its own thread; thread-safe."""

    options: McpOptions
    stack: ExitStack
    portal: "BlockingPortal"
    client: "Client"
    schemas: dict[str, Any] = field(default_factory=dict)

    def call(self, arguments: dict[str, Any]) -> "CallToolResult":
        """Call the tool. Of the SDK's errors it raises no others than these.

        RetryableError where no answer came, SessionLost, and NoResult: `malformed_response` breaks the protocol or the
        tool's output schema or is too long, `refused` is any other rejection of the call.
        """
        from mcp import MCPError
        from mcp.types import (
            CONNECTION_CLOSED,
            INTERNAL_ERROR,
            INVALID_REQUEST,
            METHOD_NOT_FOUND,
            PARSE_ERROR,
            REQUEST_TIMEOUT,
        )

        try:
            answer = self.portal.call(partial(_answered, self.client, self.options.tool, arguments))
        except MCPError as error:
            message = f"MCP server: {self.options.public(error)}"
            if TOO_LONG in str(error):
                raise NoResult("malformed_response") from error
            if error.code in (CONNECTION_CLOSED, INVALID_REQUEST, METHOD_NOT_FOUND, PARSE_ERROR):
                raise SessionLost(message) from error  # a restarted server knows neither the session nor its requests
            if error.code in (INTERNAL_ERROR, REQUEST_TIMEOUT):
                raise RetryableError(message) from error
            raise NoResult("refused") from error
        except RuntimeError as error:  # another call's timeout closed the session, or the server deferred too often
            raise RetryableError(f"MCP server: {self.options.public(error)}") from error
        content, (_, schema) = answer.structured_content, self.schemas.get(self.options.tool, (None, None))
        if not (answer.is_error or content is None or schema is None or _fits(content, schema)):
            raise NoResult("malformed_response")
        return answer

    def close(self) -> None:
        """Close the session and end a command. Errors of a lost session are ignored."""
        with suppress(ExceptionGroup, OSError):
            self.stack.close()


def open_session(key: str, options: McpOptions) -> Session:
    """Connect to the server, starting a command, and find the tool. Raises ToolDown."""
    session, tools = _connected(key, options)
    tool = tools.get(options.tool)
    if tool is not None and tool.input_schema == options.input_schema:
        return session
    session.close()
    what = "is no longer there" if tool is None else "takes other arguments than are listed"
    raise ToolDown(
        f"[tools.{key}]: the tool {options.tool!r} of the server {options.server!r} {what}; run "
        "`toolformer-dag servers`, which shows what changed"
    )


def list_tools(options: McpOptions) -> "list[Tool]":
    """Connect to a server and return its tools. Raises ToolDown."""
    session, tools = _connected(options.server, options)
    session.close()
    return list(tools.values())


def _connected(key: str, options: McpOptions) -> "tuple[Session, dict[str, Tool]]":
    from anyio.from_thread import start_blocking_portal
    from mcp import Client, StdioServerParameters
    from mcp.client.stdio import stdio_client

    schemas: dict[str, Any] = {}

    @asynccontextmanager
    async def sifted() -> AsyncIterator[Any]:
        plain = stdio_client(target) if isinstance(target, StdioServerParameters) else target
        async with plain as (read, write):
            yield _Sifted(read, schemas), write

    logging.getLogger("mcp.client.stdio").addFilter(_without_traceback)
    target = transport(key, options)
    stack = ExitStack()
    try:
        portal = stack.enter_context(start_blocking_portal())
        client = stack.enter_context(
            portal.wrap_async_context_manager(Client(sifted(), read_timeout_seconds=options.start_timeout_s))
        )
        listed = portal.call(_listed, client, options.start_timeout_s)
        tools = {tool.name: tool.model_copy(update={"input_schema": schemas[tool.name][0]}) for tool in listed}
    except Exception as error:  # the SDK raises many kinds; none may leave a server running
        with suppress(ExceptionGroup, OSError):
            stack.close()
        raise _no_session(key, options, error) from error
    return Session(options, stack, portal, client, schemas), tools


def _without_traceback(record: logging.LogRecord) -> bool:
    """Let the SDK tell in a line what a server wrote that is no message."""
    if record.exc_info:
        reason = " ".join(str(record.exc_info[1]).split())
        record.msg, record.args, record.exc_info = f"{record.msg} ({reason:.200})", (), None
    return True


async def _answered(client: "Client", name: str, arguments: dict[str, Any]) -> "CallToolResult":
    from mcp import InputRequiredRoundsExceededError

    _ = client.session  # outside the try: the RuntimeError of a closed client is not a malformed answer
    try:
        return await client.call_tool(name, arguments, CALL_SECONDS)
    except InputRequiredRoundsExceededError:  # the server deferred its answer too often
        raise
    except (ValidationError, RuntimeError) as error:  # violations of the protocol or of the output schema
        raise NoResult("malformed_response") from error


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
    what, remedy = f"no MCP server answers at {options.shown}", "start it, correct the url"
    if options.command is not None:
        what = f"the MCP server {options.shown} does not start in {options.cwd}"
        remedy = "run the command by hand to see its output"
    if isinstance(error, ValidationError):
        what = f"a description from the MCP server {options.shown} breaks the protocol"
        remedy = "fix the server, use another version of it"
    patience = f"or raise start_timeout_s above {options.start_timeout_s:g}"
    return ToolDown(f"[tools.{key}]: {what} ({options.public(error)}); {remedy}, {patience}")
