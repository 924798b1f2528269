"""`[servers.NAME]` makes a lane per tool, from what `toolformer-dag servers` listed of a real server."""

import json
import re
import sys
from pathlib import Path

import mcp.client.stdio
import pytest

from tests.command_line import cli
from toolformer_dag.settings.servers import LISTING_FILE_NAME, build_lane_key, read_tool_listing
from toolformer_dag.settings.setting_types import SettingsError
from toolformer_dag.settings.settings_file import load_settings
from toolformer_dag.tools.registry import load_enabled_tools

STDERR = mcp.client.stdio  # bound at import to the standard error of then, which has to be a file
COMMAND = [sys.executable, str(Path(__file__).with_name("mcp_server.py"))]
OFFICE = f"[servers.office]\ncommand = {json.dumps(COMMAND)}\n"
ADD = """[tools.add]\nexamples = ['It is [Add(a=1, b=2)] 3.', 'Two and two is [Add(a=2, b=2)] 4.']\n"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """Settings with one server, two of whose tools are wanted; they are listed."""
    path = tmp_path / "toolformer.toml"
    path.write_text(f'{OFFICE}tools = ["a*"]\n{ADD}')
    done = cli("servers", "--config", str(path))
    assert done.returncode == 0, done.stderr
    assert "office: 6 tools" in done.stdout and "  add: add(a, b, negative)  new" in done.stdout
    return path


def test_a_listed_tool_is_a_lane_that_needs_no_server(file: Path) -> None:
    settings = load_settings(file)
    assert list(settings.tools) == ["add"]
    [tool] = load_enabled_tools(settings).values()
    listed = {listed["name"]: listed["input_schema"] for listed in read_tool_listing(file.parent)["office"]}
    assert (tool.name, tool.arguments_schema) == ("Add", listed["add"])
    assert "[Add(a, b, negative)]" in tool.prompt
    assert "Input: It is 3.\nOutput: It is [Add(a=1, b=2)] 3.\n" in tool.prompt
    assert cli("tool", "add", "--prompt", "--config", str(file)).stdout == tool.prompt
    assert cli("tool", "add", "b=2, a=1", "--config", str(file)).stdout == "3\n"
    assert "bad_arguments: a is no number" in cli("tool", "add", 'a="x", b=2', "--config", str(file)).stderr


def test_what_changed_is_told_and_changes_no_other_lane(file: Path) -> None:
    assert cli("servers", "--config", str(file)).stdout.count("as before") == 6
    listing = file.parent / LISTING_FILE_NAME
    listed = json.loads(listing.read_text())
    before = load_settings(file).tools
    changed = {tool["name"]: tool for tool in listed["office"]}
    changed["add"]["description"] = "Adds."
    changed["bare"]["input_schema"] = {}
    changed["old"] = {"name": "old", "description": "", "input_schema": {}}
    listing.write_text(json.dumps({"office": [tool for name, tool in changed.items() if name != "show"]}))
    assert load_settings(file).tools.keys() == before.keys()
    told = cli("servers", "--config", str(file)).stdout
    for line in (
        "add: add(a, b, negative)  described otherwise",
        "bare: bare(x, y)  changed",
        "show(kind)  new",
        "old  gone",
    ):
        assert line in told
    assert load_settings(file).tools == before


def test_a_section_gives_a_lane_its_own_key_and_values(tmp_path: Path) -> None:
    tools = [{"name": name, "description": "", "input_schema": {}} for name in ("getSky", "sea")]
    (tmp_path / LISTING_FILE_NAME).write_text(json.dumps({"one": tools, "two": tools[:1]}))
    file = tmp_path / "toolformer.toml"
    servers = '[servers.one]\nurl = "http://localhost/one"\n[servers.two]\nurl = "http://localhost/two"\n'
    own = '[tools.heaven]\nserver = "one"\ntool = "getSky"\ntau_f = 0.5\n[tools.sea]\nenabled = false\n'
    file.write_text(f"{servers}{own}[tools.get_sky]\n")
    lanes = load_settings(file).tools
    assert list(lanes) == ["heaven", "sea", "get_sky"]
    assert (lanes["heaven"].tau_f, lanes["sea"].enabled) == (0.5, False)
    assert [lanes[key].get_tool_options()["url"] for key in lanes] == [
        f"http://localhost/{name}" for name in ("one", "one", "two")
    ]
    file.write_text(servers.replace("\n[", '\ntools = ["getSky", "sea"]\n[') + 'tools = ["getSky"]\n')
    assert list(load_settings(file).tools) == ["get_sky", "sea", "two_get_sky"]
    file.write_text(servers + '[tools.x]\nserver = "one"\ntool = "moon"\n')
    with pytest.raises(SettingsError, match=r"tools\.x\] tool: the server 'one' lists no 'moon' \(getSky, sea\)"):
        load_settings(file)


def test_a_tool_that_can_have_no_lane_is_left_out_of_a_pattern_by_name_and_refused_where_it_is_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    names = ("good", "getSky", "get-sky", "天気", "training")
    tools = [{"name": name, "description": "", "input_schema": {}} for name in names]
    (tmp_path / LISTING_FILE_NAME).write_text(
        json.dumps({"one": [*tools, {**tools[0], "name": "odd", "fault": "it is odd"}]})
    )
    file = tmp_path / "toolformer.toml"
    server = '[servers.one]\nurl = "http://localhost/one"\nexamples = ["one", "two"]\n'
    file.write_text(server)
    assert list(load_settings(file).tools) == ["good", "get_sky"]
    for named in ("'get-sky' would share a lane", "'天気' has a name", "'training' has a name", "'odd': 'it is odd'"):
        assert sum(named in told for told in caplog.messages) == 1
    for name, message in (("get-sky", "share a lane"), ("天気", "no lane's"), ("odd", "'odd': 'it is odd'")):
        file.write_text(f'{server}tools = ["*", "{name}"]\n')
        with pytest.raises(SettingsError, match=message):
            load_settings(file)


def test_a_tool_that_a_pattern_asks_for_without_examples_stops_no_other(
    file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file.write_text(OFFICE + ADD)
    settings = load_settings(file)
    assert list(settings.tools) == ["add"] == list(load_enabled_tools(settings))
    [told] = [told for told in caplog.messages if "no examples" in told]
    assert told.startswith("[servers.office]: no examples for 'bare', 'later', ") and "[tools.KEY]" in told


def test_a_server_that_does_not_answer_is_named_and_keeps_its_tools(tmp_path: Path) -> None:
    lost = '[servers.lost]\ncommand = ["/no/such/program"]\n'
    (tmp_path / "toolformer.toml").write_text(lost + OFFICE)
    (tmp_path / LISTING_FILE_NAME).write_text(
        json.dumps({"lost": [{"name": "old", "description": "", "input_schema": {}}]})
    )
    done = cli("servers", "--config", str(tmp_path / "toolformer.toml"))
    assert done.returncode == 1 and "/no/such/program does not start" in done.stderr
    assert "office: 6 tools" in done.stdout
    assert {name: len(tools) for name, tools in read_tool_listing(tmp_path).items()} == {"lost": 1, "office": 6}


@pytest.mark.parametrize(
    ("listing", "message"),
    [
        (None, "not listed yet; run `toolformer-dag servers`"),
        ("{", "cannot be read"),
        ('{"office": [{"description": "x"}]}', "cannot be read"),
        ('{"office": 3}', "cannot be read"),
    ],
)
def test_a_list_that_is_missing_or_broken_has_its_remedy(tmp_path: Path, listing: str | None, message: str) -> None:
    (tmp_path / "toolformer.toml").write_text(OFFICE)
    if listing is not None:
        (tmp_path / LISTING_FILE_NAME).write_text(listing)
    with pytest.raises(SettingsError, match=message):
        load_settings(tmp_path / "toolformer.toml")


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ("", r"no \[servers\.NAME\]"),
        ("[servers.office]\n", r"\[servers.office\].*either command"),
        ("[servers.office]\nurl = 'localhost'\n", r"\[servers.office\] url: .*none of http"),
        ("[servers.office]\ncomand = ['x']\n", r"\[servers.office\] comand: .*did you mean 'command'"),
        ("servers = 3\n", "servers"),
    ],
)
def test_a_server_that_cannot_be_asked_is_named(tmp_path: Path, table: str, message: str) -> None:
    (tmp_path / "toolformer.toml").write_text(table)
    done = cli("servers", "--config", str(tmp_path / "toolformer.toml"))
    assert done.returncode == 1
    assert re.search(message, done.stderr), done.stderr


@pytest.mark.parametrize(
    ("tool", "key"),
    [("getWeather", "get_weather"), ("get-weather", "get_weather"), ("Weather.v2", "weather_v2"), ("天気", "")],
)
def test_keys_of_lanes_are_words(tool: str, key: str) -> None:
    assert build_lane_key(tool) == key


def test_a_lane_without_examples_is_answered_with_the_lines_to_paste_which_load(tmp_path: Path) -> None:
    file = tmp_path / "toolformer.toml"
    file.write_text(f'{OFFICE}tools = ["add", "show"]\n{ADD}')
    told = cli("servers", "--config", str(file))
    assert told.returncode == 0 and "[tools.add]" not in told.stdout
    wanted = "[tools.show] (server office) has no examples: paste these lines"
    assert wanted in told.stdout
    for command in (["run"], ["stale"], ["tool", "show", "--prompt"]):
        refused = cli(*command, "--config", str(file))
        assert refused.returncode == 1 and wanted in refused.stderr and "Errno" not in refused.stderr
    lines = refused.stderr[refused.stderr.index("[tools.show]\n") :]
    with file.open("a") as settings:
        settings.write(lines)
    assert cli("tool", "show", "--prompt", "--config", str(file)).stdout.count("\nOutput: ... [Show(kind=") == 2
    assert "has no examples" not in cli("servers", "--config", str(file)).stdout
