"""Six tools of a real MCP server, each with another type of argument, go the whole way from shards to a checkpoint."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.command_line import cli
from tests.conftest import Once
from tests.runs.conftest import World, by_machine, free
from tests.runs.served_world import HOSTILE, SIX, lay_out_served, tool_name
from tests.tools import typed_server
from tests.worlds import copy_world
from toolformer_dag.settings.servers import read_tool_listing
from toolformer_dag.texts.arguments import parse_arguments
from toolformer_dag.texts.calls import parse_placed_calls, remove_calls

pytestmark = pytest.mark.long
STAGES = ("heuristic_subset", "scored_candidates", "tool_results", "loss_deltas", "swapped_results", "filtered_calls")


@pytest.fixture(scope="module")
def six(once: Once) -> World:
    """Calls of a file and sampled ones. Not to be changed."""

    def run_once(folder: Path) -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("DAGSTER_HOME", str(folder / ".dagster"))
            World(lay_out_served(folder)).run(training=True)

    return World(once("served-six", run_once))


def given(world: World, key: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (world.folder / f"{key}.jsonl").read_text().splitlines()]


def result_of(key: str, arguments: dict[str, Any]) -> str:
    """Return what the server answers."""
    if key == "travel":
        return typed_server.travel(typed_server.Trip(**arguments["trip"]))
    [tool] = [tool for tool in typed_server.SIX if tool.__name__ == key]
    return str(tool(**arguments))


def as_shown(result: str) -> str:
    """Return a result as it stands in a text, without what would end the call."""
    return result.replace("]", ")").replace("->", "→")


def read_back(world: World) -> dict[tuple[str, str], list[tuple[dict[str, Any], str]]]:
    """Return the calls of C*, by document and tool: arguments and result; each is of its tool's schema."""
    schemas = {tool_name(one["name"]): one["input_schema"] for one in read_tool_listing(world.folder)["typed"]}
    found: dict[tuple[str, str], list[tuple[dict[str, Any], str]]] = {}
    rows = world.sql("select digest, text_with_calls, text from augmented_corpus where calls > 0")
    for digest, written, plain in rows:
        assert remove_calls(str(written), schemas) == plain
        for placed in parse_placed_calls(str(written), schemas):
            arguments = parse_arguments(placed.call.input, schemas[placed.call.tool])
            found.setdefault((str(digest), placed.call.tool), []).append((arguments, placed.result))
    return found


def test_every_tool_has_its_calls_in_the_corpus_as_the_file_has_them_with_the_server_s_results(six: World) -> None:
    found = read_back(six)
    hostile = 0
    for key in SIX:
        for call in given(six, key):
            arguments = dict(arguments_of(call["input"]))
            assert (arguments, as_shown(result_of(key, arguments))) in found[call["digest"], tool_name(key)]
            hostile += HOSTILE in str(arguments)
    assert hostile > 2


def arguments_of(text: str) -> list[tuple[str, Any]]:
    """Read what the test wrote, by evaluating nothing: a name, an equals sign, JSON."""
    decoder = json.JSONDecoder()
    found = []
    at = 0
    while at < len(text):
        name, _, _ = text[at:].partition("=")
        value, at = decoder.raw_decode(text, at + len(name) + 1)
        found.append((name, value))
        at += len(", ")
    return found


def test_sql_asks_for_arguments_of_every_type(six: World) -> None:
    asked = {
        "population": "arguments->>'town'",
        "total": "(arguments->>'count')::int * (arguments->>'price')::int",
        "distance": "arguments->>'unit'",
        "mean": "list_avg((arguments->'numbers')::int[])",
        "travel": "arguments->'trip'->>'start'",
        "rounded": "coalesce((arguments->>'up')::bool, false)",
    }
    by_hand = {
        "population": lambda a: a["town"],
        "total": lambda a: a["count"] * a["price"],
        "distance": lambda a: a["unit"],
        "mean": lambda a: sum(a["numbers"]) / 3,
        "travel": lambda a: a["trip"]["start"],
        "rounded": lambda a: a.get("up", False),
    }
    for key, expression in asked.items():
        rows = six.sql(f"select {expression} from calls where tool = '{key}' and source <> 'model'")
        expected = [by_hand[key](dict(arguments_of(call["input"]))) for call in given(six, key)]
        assert sorted(map(str, (value for (value,) in rows))) == sorted(map(str, expected))


def test_each_lane_counts_its_texts_calls_and_why_samples_were_left_out(six: World) -> None:
    assert [tool for (tool,) in six.sql("select tool from lanes order by tool")] == sorted(SIX)
    routed = six.sql("select max(n), min(n) from (select count(*) n from texts group by digest, segment)")
    assert routed[0][0] == 5 and routed[0][1] in range(1, 6)
    assert six.sql("select count(*) from texts where not wanted similar to 'fits [0-9.]+'") == [(0,)]
    for key in SIX:
        steps = six.sql(f"select stage, what, count from funnel where tool = '{key}' order by step")
        counts = {(str(stage), str(what)): int(str(count)) for stage, what, count in steps}
        assert counts["heuristic_subset", "texts"] >= 4
        assert counts["scored_candidates", "samples"] > counts["scored_candidates", "calls"] >= 4
        assert counts["tool_results", "calls with a result"] == counts["scored_candidates", "calls"]
        assert counts["augmented_corpus", "texts"] >= 4
    reasons = {str(reason).partition(":")[0] for (reason,) in six.sql("select distinct reason from rejections")}
    assert {"fits_other_tools", "other_tool", "bad_arguments", "unknown"} <= reasons


def test_a_changed_schema_makes_its_lane_stale_and_no_other(
    six: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DAGSTER_HOME", str(tmp_path / "world" / ".dagster"))
    world = World(copy_world(six.folder, tmp_path / "world"))
    assert world.stale() == []
    assert (world.folder / "lake/training/finetuned_checkpoint/model/model.safetensors").exists()
    report = world.project().run_rounds(includes_training=True)
    assert report.made_assets == [] and free(report)
    (world.folder / "digits").touch()
    told = cli("servers", "--config", str(world.folder / "toolformer.toml")).stdout
    assert "rounded(value, up, digits)  changed" in told and told.count("as before") == 5
    stale = by_machine(world.stale())
    assert {name.partition("/")[0] for name in stale} == {"rounded"}
    assert set(stale) <= {f"rounded/{stage}" for stage in STAGES}
    before = world.sql("select * from loss_deltas where tool <> 'rounded' order by all")
    ran = {name.partition("/")[0] for name in world.run().made_assets}
    assert ran <= {"rounded", "training", "warehouse", "tables"}
    assert world.sql("select * from loss_deltas where tool <> 'rounded' order by all") == before
