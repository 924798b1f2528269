"""Tools of a real MCP server, started by the test, over both transports."""

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from anyio.from_thread import start_blocking_portal
from mcp import Client
from mcp.types import Tool as ListedTool

from toolformer_dag.settings.tool_settings import ToolLimits
from toolformer_dag.texts.document import Document
from toolformer_dag.tools.built_in.mcp import Connection
from toolformer_dag.tools.mcp_session import McpOptions, Session
from toolformer_dag.tools.registry import ToolError, load_tool
from toolformer_dag.tools.runner import run_calls
from toolformer_dag.tools.tool import RetryableError, Tool, ToolCall, ToolDown

SERVER = Path(__file__).with_name("mcp_server.py")
COMMAND = [sys.executable, str(SERVER)]
PLAIN = [sys.executable, str(Path(__file__).with_name("plain_mcp_server.py"))]
TELLS_ITS_ID = ["sh", "-c", 'echo $$ > "$0"; exec "$@"']
SLOW_START = ["sh", "-c", 'sleep 1; exec "$0" "$1"', *PLAIN]
LIMITS = ToolLimits(retries=1, backoff_s=0.05)
PROMPT = """Add calls to a weather service. Write "[Weather(city)]".
Input: It is sunny in Rome.
Output: It is [Weather(Rome)] sunny in Rome.
"""
Make = Callable[..., Tool]


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """The address of an HTTP server that lives as long as this module's tests."""
    with served() as (address, _):
        yield address


@pytest.fixture(scope="module")
def prompt(tmp_path_factory: pytest.TempPathFactory) -> str:
    file = tmp_path_factory.mktemp("prompts") / "weather.txt"
    file.write_text(PROMPT)
    return str(file)


@pytest.fixture
def make(prompt: str) -> Iterator[Make]:
    """Loads an MCP tool as the settings do, and closes its connection afterwards."""
    with ExitStack() as stack:

        def load(**options: object) -> Tool:
            section = {"use": "mcp", "name": "Weather", "tool": "weather", "prompt": prompt} | options
            tool = load_tool("weather", section)
            stack.callback(tool.close)
            return tool

        yield load


@contextmanager
def served() -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    port = free_port()
    with started(*COMMAND, str(port)) as process:
        await_port(port)
        yield f"http://127.0.0.1:{port}/mcp", process


@contextmanager
def started(*command: str) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def await_port(port: int) -> None:
    for _ in range(400):
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.05)
    raise AssertionError("the test's MCP server did not start")


def plain_connection() -> Connection:
    return Connection("weather", McpOptions(prompt="p", name="Weather", tool="weather", command=tuple(PLAIN)))


def outcomes(tool: Tool, *inputs: str, limits: ToolLimits = LIMITS) -> list[str | None]:
    results = run_calls(tool, [ToolCall(text) for text in inputs], limits)
    return [result.result if result.reason is None else result.reason for result in results]


@pytest.mark.parametrize("transport", ["stdio", "http"])
def test_a_tool_answers_over_either_transport(make: Make, url: str, transport: str) -> None:
    tool = make(command=COMMAND) if transport == "stdio" else make(url=url)
    assert outcomes(tool, "Rome", '"Paris"', "Atlantis") == [
        "Rome) → sunny in 0 days.",
        "Paris) → sunny in 0 days.",
        "tool_error",
    ]


def test_calls_run_at_once_over_one_connection(make: Make, url: str) -> None:
    calls = [ToolCall(f"City {number}") for number in range(20)]
    results = run_calls(make(url=url), calls, ToolLimits(concurrency=4))
    assert [result.result for result in results] == [f"City {number}) → sunny in 0 days." for number in range(20)]


def test_an_input_is_split_into_several_arguments_of_the_schema_s_types(make: Make, url: str) -> None:
    tool = make(
        url=url, tool="add", fields=r"(?P<a>.+) and (?P<b>.+)", arguments={"a": "{a}", "b": "{b}", "negative": True}
    )
    assert outcomes(tool, "1.5 and 2", "1 plus 2", "one and two", "nan and 1") == [
        "-3.5",
        "does_not_match_fields",
        "bad_argument",
        "bad_argument",
    ]


def test_a_template_goes_round_the_input(make: Make, url: str) -> None:
    assert outcomes(make(url=url, arguments={"city": "{input}, Italy", "days": 2}), "Rome {input}") == [
        "Rome {input}, Italy) → sunny in 2 days."
    ]


@pytest.mark.parametrize(
    ("kind", "outcome"),
    [
        ("picture", "no_text"),
        ("texts", "one two"),
        ("resource", "a note"),
        ("structured", '{"zürich": 21}'),
        ("nothing", "empty_result"),
    ],
)
def test_what_a_server_sends_becomes_a_line_or_a_reason(make: Make, url: str, kind: str, outcome: str) -> None:
    assert outcomes(make(url=url, tool="show"), kind) == [outcome]


@pytest.mark.parametrize(
    ("name", "cities", "outcome"),
    [
        ("weather", ["Atlantis", "Babel", "Cibola"], "malformed_response"),
        ("forecast", ["Rome", "Dilmun"], "malformed_response"),
        ("forecast", ["Thule"], '{"degrees": -5}'),
    ],
)
def test_an_answer_against_the_protocol_or_its_schema_is_final(
    make: Make, name: str, cities: list[str], outcome: str
) -> None:
    assert outcomes(make(command=PLAIN, tool=name), *cities) == [outcome] * len(cities)


def test_variables_reach_the_command_only_when_named(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TEST_SECRET", "s3")
    assert outcomes(make(command=COMMAND, tool="secret"), "") == ["none"]
    assert outcomes(make(command=COMMAND, tool="secret", env=["TEST_SECRET"]), "") == ["s3"]


def test_an_answer_over_http_has_a_longest_size(make: Make) -> None:
    port = free_port()
    with started(*PLAIN, str(port)):
        await_port(port)
        tool = make(url=f"http://127.0.0.1:{port}/mcp")
        assert outcomes(tool, "El Dorado", "Rome") == ["malformed_response", "sunny in Rome"]


def test_no_secret_of_a_command_or_a_url_is_told(
    make: Make, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("TEST_SECRET", "variable-secret")
    fails = "import sys; sys.exit('argument-secret')"
    tools = [
        make(
            command=[sys.executable, "-c", fails, "--token", "argument-secret"], env=["TEST_SECRET"], start_timeout_s=5
        ),
        make(url="http://me:user-secret@127.0.0.1:9/s/0path-secret/mcp?key=query-secret", token_env="TEST_SECRET"),
    ]
    told = []
    for tool in tools:
        with pytest.raises(ToolDown) as down:
            outcomes(tool, "Rome")
        told += [str(down.value), json.dumps(tool.identity())]
    keyed = make(url="http://127.0.0.1:9/mcp", arguments={"city": "{input}", "api_key": "argument-secret"})
    told += [json.dumps(keyed.identity()), caplog.text]
    assert "-secret" not in " ".join(told)
    assert sys.executable in told[0] and "http://127.0.0.1:9" in told[2]
    others = [
        make(command=[sys.executable, "-c", fails, "--token", "another"]),
        make(url="http://me:user-secret@127.0.0.1:9/s/0path-secret/mcp?key=another"),
    ]
    assert all(tool.identity() != other.identity() for tool, other in zip(tools, others, strict=True))
    assert make(url="http://localhost:8000/mcp").identity()["url"] == "http://localhost:8000/mcp"


def test_a_missing_variable_stops_the_lane(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TEST_SECRET", raising=False)
    with pytest.raises(ToolDown, match="TEST_SECRET is not set"):
        outcomes(make(command=COMMAND, env=["TEST_SECRET"]), "Rome")


def test_a_server_that_falls_over_at_one_input_is_started_again(make: Make) -> None:
    assert outcomes(make(command=COMMAND), "Rome", "Pompeii", "Oslo") == [
        "Rome) → sunny in 0 days.",
        "lost:unavailable",
        "Oslo) → sunny in 0 days.",
    ]


@pytest.mark.parametrize("words", [[], ["silent"]])
def test_a_server_that_started_anew_gets_a_new_session(make: Make, words: list[str]) -> None:
    port = free_port()
    tool = make(url=f"http://127.0.0.1:{port}/mcp")
    for _ in range(2):
        with started(*PLAIN, str(port), *words):
            await_port(port)
            assert outcomes(tool, "Rome", "Oslo") == ["sunny in Rome", "sunny in Oslo"]


@pytest.mark.parametrize(
    ("code", "outcome"),
    [
        (-32602, "refused"),  # INVALID_PARAMS
        (-32042, "refused"),
        (-32600, "lost:unavailable"),  # INVALID_REQUEST
        (-32601, "lost:unavailable"),  # METHOD_NOT_FOUND
        (-32700, "lost:unavailable"),  # PARSE_ERROR
        (-32603, "lost:unavailable"),  # INTERNAL_ERROR
    ],
)
def test_only_a_refusal_of_the_call_is_final(make: Make, code: int, outcome: str) -> None:
    assert outcomes(make(command=PLAIN), str(code), "Rome") == [outcome, "sunny in Rome"]


def test_a_server_that_hangs_at_one_input_is_started_again(make: Make) -> None:
    cities = [f"City {number}" for number in range(12)]
    found = outcomes(make(command=PLAIN), "Pompeii", *cities, limits=ToolLimits(timeout_s=1))
    assert found == ["lost:timeout", *(f"sunny in {city}" for city in cities)]


def test_calls_under_way_beside_one_that_hangs_are_asked_again(make: Make) -> None:
    port = free_port()
    inputs = ["Oslo", "Pompeii", *(f"Ys{' ' * number}" for number in range(4))]
    with started(*PLAIN, str(port)):
        await_port(port)
        limits = ToolLimits(timeout_s=1.5, concurrency=3, backoff_s=0.05)
        found = outcomes(make(url=f"http://127.0.0.1:{port}/mcp"), *inputs, limits=limits)
    assert found == ["sunny in Oslo", "lost:timeout", *["sunny in Ys"] * 4]


def test_a_call_that_the_server_puts_off_is_lost(make: Make) -> None:
    assert outcomes(make(command=COMMAND, tool="later"), "", limits=ToolLimits(retries=0)) == ["lost:unavailable"]


def test_a_call_on_a_connection_that_was_closed_is_asked_again() -> None:
    connection = plain_connection()
    session = connection.session()
    connection.close()
    with pytest.raises(RetryableError):
        connection.call(session, {"city": "Rome"})


def test_a_call_in_the_midst_of_closing_is_asked_again() -> None:
    with start_blocking_portal() as portal:  # still runs, while the client is closed
        session = Session(ExitStack(), portal, Client("http://x/mcp"), ListedTool(name="weather", input_schema={}))
        with pytest.raises(RetryableError):
            plain_connection().call(session, {"city": "Rome"})


def test_starting_a_server_takes_nothing_from_a_call_s_time(make: Make) -> None:
    found = outcomes(make(command=SLOW_START), "Rome", "Pompeii", "Oslo", limits=ToolLimits(timeout_s=0.7))
    assert found == ["sunny in Rome", "lost:timeout", "sunny in Oslo"]


def test_a_server_may_take_only_so_long_to_start(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mcp.client.session.DISCOVER_TIMEOUT_SECONDS", 0.1)
    with pytest.raises(ToolDown, match=r"does not start.*raise start_timeout_s above 0\.2"):
        outcomes(make(command=["sleep", "60"], start_timeout_s=0.2), "Rome")


def test_a_server_that_went_away_stops_the_lane(make: Make) -> None:
    with served() as (address, process):
        tool = make(url=address)
        assert outcomes(tool, "Rome") == ["Rome) → sunny in 0 days."]
        process.kill()
        process.wait()
        with pytest.raises(ToolDown, match=r"no MCP server answers at http://127.*start it"):
            outcomes(tool, "Oslo")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"command": ["/no/such/program"]}, "server /no/such/program does not start.*run the command by hand"),
        ({"command": [sys.executable, "-c", "pass"]}, "does not start.*Connection closed"),
        ({"command": COMMAND, "tool": "forecast"}, "no tool 'forecast'.*add, bare, later, secret, show, weather"),
        ({"command": [*PLAIN, "endless"], "start_timeout_s": 2}, "tools did not end.*raise start_timeout_s above 2"),
        ({"command": COMMAND, "tool": "bare"}, r"takes x, y; .*arguments = \{ x = \"\{input\}\" \}"),
        ({"command": COMMAND, "tool": "add"}, r"takes a, b, negative; .*arguments = \{ a = \"\{input\}\" \}"),
    ],
)
def test_a_server_that_cannot_serve_stops_the_lane(make: Make, options: dict[str, object], message: str) -> None:
    with pytest.raises(ToolDown, match=message):
        outcomes(make(**options), "Rome")


def test_a_list_of_tools_against_the_protocol_stops_the_lane_and_the_server(make: Make, tmp_path: Path) -> None:
    file = tmp_path / "process_id"
    with pytest.raises(ToolDown, match=r"server sh \(its arguments are .* breaks the protocol.*inputSchema.*fix the"):
        outcomes(make(command=[*TELLS_ITS_ID, str(file), *PLAIN, "broken"]), "Rome", "Oslo")
    with pytest.raises(ProcessLookupError):
        os.kill(int(file.read_text()), 0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "either command = .* or url"),
        ({"command": COMMAND, "url": "http://localhost/mcp"}, "either command = .* or url"),
        ({"url": "localhost"}, "url: .*none of http:// or https://"),
        ({"url": "http://localhost:99999/mcp"}, "url: Port out of range"),
        ({"url": "http://localhost", "wants": "(?=rain)"}, "wants: .*look-around.*syntax of Rust"),
        ({"url": "http://localhost", "fields": r"(a)\1"}, "fields: .*backreferences"),
        ({"url": "http://localhost", "start_timeout_s": 1e300}, "start_timeout_s: .*less than or equal to 86400"),
        ({"url": "http://localhost", "name": "two words"}, "name: String should match"),
        ({"url": "http://localhost", "fields": "("}, "fields: .*regular expression"),
        ({"url": "http://localhost", "arguments": {"city": "{town}"}}, r"\{town\}.*named group"),
        ({"url": "http://localhost", "argument": "x"}, "did you mean 'arguments'"),
        ({"url": "http://localhost", "prompt": "no/such.txt"}, "no/such.txt: the prompt cannot be read"),
    ],
)
def test_sections_that_cannot_be_are_refused_before_anything_starts(
    make: Make, options: dict[str, object], message: str
) -> None:
    with pytest.raises(ToolError, match=message):
        make(**options)


def test_the_section_s_key_is_missing(prompt: str) -> None:
    with pytest.raises(ToolError, match=r"\[tools.weather\] tool: .*add it"):
        load_tool("weather", {"use": "mcp", "name": "Weather", "prompt": prompt, "url": "http://localhost"})


def test_only_what_determines_the_answers_is_in_the_identity(make: Make) -> None:
    plain = make(url="http://localhost/mcp")
    same = make(url="http://localhost/mcp", wants="rain", env=["A"], token_env="B", start_timeout_s=60)
    other = make(url="http://localhost/mcp", arguments={"city": "{input}"})
    assert plain.identity() == same.identity() != other.identity()
    assert make(url="http://localhost/mcp", version="2").version == "2"


def test_only_the_rule_for_texts_is_in_the_selection(make: Make) -> None:
    rain = make(url="http://localhost/mcp", wants="rain")
    assert rain.selection() == make(url="http://other/mcp", wants="rain", env=["A"]).selection()
    assert rain.selection() != make(url="http://localhost/mcp", wants="(?i)rain").selection()
    assert rain.selection() != make(url="http://localhost/mcp").selection()


def test_a_regular_expression_says_which_texts_are_wanted(make: Make) -> None:
    document = Document("0", "d", "https://x.org", "x.org", "", None, "en", "")
    rule = make(url="http://localhost/mcp", wants="(?i)rain")
    assert [rule.wants(text, document) for text in ("No Rain today.", "Dry.")] == ["matches", None]
    assert make(url="http://localhost/mcp").wants("Dry.", document) == "every_text"
    endless = make(url="http://localhost/mcp", wants="(a+)+$", fields="(a+)+b")
    assert endless.wants("a" * 100_000 + "!", document) is None
    assert outcomes(make(command=PLAIN, fields="(a+)+b"), "a" * 400) == ["does_not_match_fields"]
