"""Tools of a real MCP server, started by the test, over both transports."""

import json
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import cache
from pathlib import Path

import pytest

from tests.ui_server import free_port
from toolformer_dag.settings.tool_settings import ToolLimits
from toolformer_dag.texts.arguments import find_schema_fault
from toolformer_dag.texts.document import Document
from toolformer_dag.tools.mcp_options import McpOptions
from toolformer_dag.tools.mcp_session import fetch_server_tools, open_session
from toolformer_dag.tools.prompts import ToolError
from toolformer_dag.tools.registry import load_tool
from toolformer_dag.tools.runner import run_calls
from toolformer_dag.tools.tool import RetryableError, Tool, ToolCall, ToolDown

SERVER = Path(__file__).with_name("mcp_server.py")
COMMAND = [sys.executable, str(SERVER)]
PLAIN = [sys.executable, str(Path(__file__).with_name("plain_mcp_server.py"))]
LIMITS = ToolLimits(retries=1, backoff_s=0.05)
CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
EXAMPLES = {"city": "Rome", "a": 1, "b": 2, "kind": "texts", "x": "1", "y": "2"}
Make = Callable[..., Tool]


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """The address of an HTTP server that lives as long as this module's tests."""
    with served() as (address, _):
        yield address


@cache
def listed() -> Mapping[str, Mapping[str, object]]:
    """The schemas of the server's tools, by name."""
    options = McpOptions(server="office", tool="", command=tuple(COMMAND))
    return {tool.name: tool.input_schema for tool in fetch_server_tools(options)}


@pytest.fixture
def make(url: str) -> Iterator[Make]:
    """Loads an MCP tool as the settings do, and closes its connection afterwards."""
    with ExitStack() as stack:

        def load(**options: object) -> Tool:
            own = options.get("command") == COMMAND or options.get("url") == url
            schema = listed().get(str(options.get("tool", "weather")), CITY) if own else CITY
            names = ", ".join(f"{name}={json.dumps(EXAMPLES[name])}" for name in schema.get("required", ()))
            section = {"use": "mcp", "server": "office", "name": "Weather", "tool": "weather", "input_schema": schema}
            tool = load_tool("weather", {"examples": [f"It is [Weather({names})] sunny."] * 2, **section, **options})
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


def await_port(port: int) -> None:
    for _ in range(400):
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.05)
    raise AssertionError("the test's MCP server did not start")


PLAIN_OPTIONS = McpOptions(server="office", tool="weather", input_schema=CITY, command=tuple(PLAIN))


def outcomes(tool: Tool, *cities: str, limits: ToolLimits = LIMITS) -> list[str | None]:
    """What calls give; a city stands for its argument, and a text with `=` for itself."""
    inputs = [
        text if "=" in text or not tool.arguments_schema.get("required") else f"city={json.dumps(text)}"
        for text in cities
    ]
    results = run_calls(tool, [ToolCall(text) for text in inputs], limits)
    return [result.result if result.reason is None else result.reason for result in results]


ROME = "Rome) → sunny in 0 days."
SERVED = "the address of the server over HTTP"
CASES: dict[str, tuple[dict[str, object], list[str], list[str]]] = {
    "over stdio": (
        {"command": COMMAND},
        ["Rome", "Paris", "Atlantis", "Pompeii", "Oslo"],
        # at Pompeii the server falls over, and is started again
        [ROME, "Paris) → sunny in 0 days.", "tool_error", "lost:unavailable", "Oslo) → sunny in 0 days."],
    ),
    "over HTTP": ({"url": SERVED}, ["Rome", "Atlantis"], [ROME, "tool_error"]),
    "several arguments of the schema's types": (
        {"url": SERVED, "tool": "add"},
        ["a=1.5, b=2", "negative = true, b = 2, a = 1.5", "a=1", 'a="one", b=2', "a=1, b=2, c=3", "1 plus 2 = 3"],
        ["3.5", "-3.5", "missing: b", "bad_arguments: a is no number", "unknown: c", "bad_arguments"],
    ),
    "strings that hold what ends calls": (
        {"url": SERVED},
        ["Rome] -> (x)", 'a "quote"'],
        ["Rome) → (x)) → sunny in 0 days.", 'a "quote") → sunny in 0 days.'],
    ),
    "what a server sends": (
        {"url": SERVED, "tool": "show"},
        [f'kind="{kind}"' for kind in ("picture", "texts", "resource", "structured", "nothing")],
        ["no_text", "one two", "a note", '{"zürich":21}', "empty_result"],
    ),
    "objects in a form of one's own": (
        {"url": SERVED, "tool": "show", "result": "{zürich} °C"},
        ['kind="structured"', 'kind="texts"'],
        ["21 °C", "no_object"],
    ),
    "a field that is not there": (
        {"url": SERVED, "tool": "show", "result": "{zürich.low} °C"},
        ['kind="structured"'],
        ["no_field: zürich.low"],
    ),
    "answers against the protocol": ({"command": PLAIN}, ["Atlantis", "Babel", "Cibola"], ["malformed_response"] * 3),
    "answers against their schema": (
        {"command": PLAIN, "tool": "forecast"},
        ["Rome", "Dilmun", "Thule"],
        ["sunny in Rome", "malformed_response", '{"degrees":-5}'],
    ),
    "an answer that is put off": ({"command": COMMAND, "tool": "later"}, [""], ["lost:unavailable"]),
    # INVALID_PARAMS, another, and then INVALID_REQUEST, METHOD_NOT_FOUND, PARSE_ERROR and INTERNAL_ERROR
    "errors of the protocol": (
        {"command": PLAIN},
        ["-32602", "-32042", "-32600", "-32601", "-32700", "-32603", "Rome"],
        ["refused", "refused", *["lost:unavailable"] * 4, "sunny in Rome"],
    ),
    "lines that are no JSON before the answer": (
        {"command": PLAIN},
        ["Lethe", "Rome"],
        ["sunny in Lethe", "sunny in Rome"],
    ),
    "an answer that is too long, over stdio": (
        {"command": PLAIN},
        ["El Dorado", "Rome"],
        ["malformed_response", "sunny in Rome"],
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_an_input_becomes_arguments_and_an_answer_a_line_or_a_reason(make: Make, url: str, case: str) -> None:
    options, inputs, found = CASES[case]
    tool = make(**{**options, "url": url} if options.get("url") == SERVED else options)
    assert outcomes(tool, *inputs) == found


def test_calls_run_at_once_over_one_connection(make: Make, url: str) -> None:
    calls = [ToolCall(f'city="City {number}"') for number in range(20)]
    results = run_calls(make(url=url), calls, ToolLimits(concurrency=4))
    assert [result.result for result in results] == [f"City {number}) → sunny in 0 days." for number in range(20)]


def test_variables_reach_the_command_only_when_named(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TEST_SECRET", "s3")
    assert outcomes(make(command=COMMAND, tool="secret"), "") == ["none"]
    assert outcomes(make(command=COMMAND, tool="secret", env=["TEST_SECRET"]), "") == ["s3"]


def test_a_program_may_lie_below_the_home_folder(make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "server").write_text(f"#!/bin/sh\nexec {' '.join(PLAIN)}\n")
    (tmp_path / "server").chmod(0o755)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert outcomes(make(command=["~/server"]), "Rome") == ["sunny in Rome"]


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
    told.append(caplog.text)
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


@pytest.mark.parametrize("words", [[], ["silent"]])
def test_a_server_that_started_anew_gets_a_new_session(make: Make, words: list[str]) -> None:
    port = free_port()
    tool = make(url=f"http://127.0.0.1:{port}/mcp")
    for _ in range(2):
        with started(*PLAIN, str(port), *words):
            await_port(port)
            assert outcomes(tool, "Rome", "Oslo") == ["sunny in Rome", "sunny in Oslo"]


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


def test_a_call_on_a_session_that_was_closed_is_asked_again() -> None:
    session = open_session("weather", PLAIN_OPTIONS)
    session.close()
    with pytest.raises(RetryableError):
        session.call_tool({"city": "Rome"})


def test_a_server_may_take_only_so_long_to_start(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mcp.client.session.DISCOVER_TIMEOUT_SECONDS", 0.1)
    with pytest.raises(ToolDown, match=r"does not start.*raise start_timeout_s above 0\.2"):
        outcomes(make(command=["sleep", "60"], start_timeout_s=0.2), "Rome")


def test_a_server_that_went_away_stops_the_lane(make: Make) -> None:
    with served() as (address, process):
        tool = make(url=address, input_schema=listed()["weather"])
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
        (
            {"command": COMMAND, "tool": "forecast"},
            "'forecast' of the server 'office' is no longer there.*servers`",
        ),
        ({"command": [*PLAIN, "endless"], "start_timeout_s": 2}, "tools did not end.*raise start_timeout_s above 2"),
        ({"command": COMMAND, "input_schema": CITY}, "'weather' of the server 'office' takes other arguments than are"),
    ],
)
def test_a_server_that_cannot_serve_stops_the_lane(make: Make, options: dict[str, object], message: str) -> None:
    with pytest.raises(ToolDown, match=message):
        outcomes(make(**options), "Rome")


def test_a_tool_against_the_protocol_is_left_out_by_name_and_the_others_work(
    make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    command = [*PLAIN, "broken"]
    assert outcomes(make(command=command), "Rome") == outcomes(make(command=PLAIN), "Rome")
    for named in ("'broken'", "7", "None"):
        assert f"the tool {named} breaks the protocol (name, inputSchema) and is left out" in caplog.messages
    found = {
        tool.name: tool for tool in fetch_server_tools(McpOptions(server="office", tool="", command=tuple(command)))
    }
    faults = {name: find_schema_fault(tool.input_schema) for name, tool in found.items()}
    assert {name for name, fault in faults.items() if fault is None} == {"php", "cut", "weather", "forecast"}
    assert faults["listed"] == "its arguments are no object but array" and "required" in str(faults["required"])
    assert found["cut"].description == "Cut: \ufffd"


def test_a_list_whose_cursor_repeats_ends_there_and_its_tools_work(
    make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    assert outcomes(make(command=[*PLAIN, "circle"]), "Rome") == ["sunny in Rome"]
    [warning] = [message for message in caplog.messages if "would not end" in message]
    assert "[servers.office]: its list of tools names the page '0' twice" in warning and "read so far (2)" in warning


@pytest.mark.parametrize("words", [None, [], ["events"]])
def test_half_a_surrogate_pair_of_a_server_is_a_replacement_character(make: Make, words: list[str] | None) -> None:
    """None: over stdio."""
    port = free_port()
    with started(*PLAIN, str(port), *(words or ())):
        await_port(port)
        tool = make(command=PLAIN) if words is None else make(url=f"http://127.0.0.1:{port}/mcp")
        assert outcomes(tool, "Elis", "Rome") == ["sun \ufffd \U0001f600 \\ud83d \ufffd", "sunny in Rome"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "either command = .* or url"),
        ({"command": COMMAND, "url": "http://localhost/mcp"}, "either command = .* or url"),
        ({"url": "localhost"}, "url: .*none of http:// or https://"),
        ({"url": "http://localhost:99999/mcp"}, "url: Port out of range"),
        ({"url": "http://localhost", "wants": "(?=rain)"}, "wants: .*look-around.*syntax of Rust"),
        ({"url": "http://localhost", "wants": r"(a)\1"}, "wants: .*backreferences"),
        ({"url": "http://localhost", "start_timeout_s": 1e300}, "start_timeout_s: .*less than or equal to 86400"),
        ({"url": "http://localhost", "name": "two words"}, "name: String should match"),
        ({"url": "http://localhost", "wants": "("}, "wants: .*regular expression"),
        ({"url": "http://localhost", "tool": None}, r"\[tools.weather\] tool: .*valid string"),
        ({"url": "http://localhost", "example": "x"}, "did you mean 'examples'"),
        ({"url": "http://localhost", "prompt": "no/such.txt"}, "prompt and examples both"),
        (
            {"url": "http://localhost", "prompt": "no/such.txt", "examples": None},
            "no/such.txt: the prompt cannot be read",
        ),
        (
            {"url": "http://localhost", "examples": ["It is [Weather(Rome)] hot."] * 2},
            "bad_arguments; write city as",
        ),
        ({"url": "http://localhost", "examples": ["It is hot."] * 2}, "no example holds a call"),
        (
            {"url": "http://localhost", "input_schema": {"properties": {"a b": {}}}},
            "'a b' is not a word.*leave",
        ),
    ],
)
def test_sections_that_cannot_be_are_refused_before_anything_starts(
    make: Make, options: dict[str, object], message: str
) -> None:
    with pytest.raises(ToolError, match=message):
        make(**options)


def test_identity_tells_what_determines_answers_and_selection_the_rule_for_texts(make: Make) -> None:
    plain = make(url="http://localhost/mcp")
    rain = make(url="http://localhost/mcp", wants="rain", env=["A"], token_env="B", start_timeout_s=60)
    other = make(url="http://localhost/mcp", result="{a}", wants="(?i)rain")
    assert plain.identity() == rain.identity() != other.identity()
    assert rain.selection() == make(url="http://other/mcp", wants="rain", env=["A"]).selection()
    assert len({str(tool.selection()) for tool in (plain, rain, other)}) == 3
    assert make(url="http://localhost/mcp", version="2").version == "2"


@pytest.mark.parametrize(
    ("options", "text", "why"),
    [
        ({"wants": "(?i)rain"}, "No Rain today.", "matches"),
        ({"wants": "(?i)rain"}, "Dry.", None),
        ({}, "Dry.", "every_text"),
        ({"wants": "(a+)+$"}, "a" * 100_000 + "!", None),
    ],
)
def test_a_regular_expression_says_which_texts_are_wanted(
    make: Make, options: dict[str, object], text: str, why: str | None
) -> None:
    document = Document("0", "d", "https://x.org", "x.org", "", None, "en", "")
    assert make(url="http://localhost/mcp", **options).wants(text, document) == why
