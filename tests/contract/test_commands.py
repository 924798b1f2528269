"""The command line, SQL and Dagster over one run, and what is refused in a sentence: exit code 1, no traceback."""

import json
import re
from pathlib import Path

import dagster as dg
import pytest

from tests.command_line import Done
from tests.contract.conftest import IGNORED, REPOSITORY, World


@pytest.fixture
def here(tmp_path: Path) -> World:
    """A folder with the settings that come with the package."""
    (tmp_path / "toolformer.toml").write_text((REPOSITORY / "toolformer.toml").read_text())
    return World(tmp_path)


def test_a_tool_answers(here):
    assert here.ok("tool", "calculator", "400 / 1400") == "0.29\n"
    assert here.ok("tool", "Calculator", "--", "-5 + 3") == "-2\n"
    assert here.ok("tool", "calendar", "--context", "2023-01-30") == "Today is Monday, January 30, 2023.\n"


def test_a_tool_of_ones_own_answers(fresh):
    assert fresh.ok("tool", "sums", "1 and 41") == "42\n"
    assert fresh.ok("tool", "Search", "1 and 41", "--set", "tools.sums.edition=2") == "84\n"


def test_a_tool_answers_line_by_line(here):
    answers = [json.loads(line) for line in here.ok("tool", "calculator", "-", stdin="1+1\nwords\n").splitlines()]
    assert [answer["result"] for answer in answers] == ["2", None]
    assert answers[0]["input"] == "1+1" and answers[1]["reason"]


def test_generate_takes_the_finetuned_checkpoint(made):
    text = "1 and 2 make"
    assert made.ok("generate", text, "--disabled").startswith(text)


def listed(done: Done) -> tuple[int, int]:
    """(files, bytes) of the last line of `clean`."""
    assert done.returncode == 0, done.stderr
    files, size = re.findall(r"([\d,]+) files, ([\d,]+) bytes", done.stdout)[0]
    return int(files.replace(",", "")), int(size.replace(",", ""))


@pytest.mark.long
def test_clean_says_what_would_go_and_removes_it_only_when_told(world):
    world.mend("--set", "tools.calculator.tau_f=0.3")
    before = world.tables()
    would = listed(world.cli("clean", "--dry-run", "--grace-hours", "0"))
    assert would[0] > 0
    assert listed(world.cli("clean", "--dry-run", "--grace-hours", "0")) == would
    assert listed(world.cli("clean")) == (0, 0)  # a day of grace
    assert listed(world.cli("clean", "--grace-hours", "0"))[0] > 0
    assert listed(world.cli("clean", "--grace-hours", "0")) == (0, 0)
    assert all(table.equals(world.tables()[name]) for name, table in before.items())
    assert "calculator/filtered_calls" not in world.stale("--set", "tools.calculator.tau_f=0.3")


def test_the_settings_file_that_is_named_holds_and_set_wins_over_it(world):
    changed = "[tools.calculator.limits]\nmax_result_characters = 1\n"
    other = world.folder / "other.toml"
    other.write_text((world.folder / "toolformer.toml").read_text() + changed)
    assert "calculator/tool_results" in world.stale("--config", str(other))
    key = "tools.calculator.limits.max_result_characters=400"
    assert world.stale("--config", str(other), "--set", key) == set()


def assert_refused(done: Done, *words: str) -> None:
    assert done.returncode == 1, done
    assert "Traceback" not in done.stdout + done.stderr
    for word in words:
        assert word in done.stderr, done.stderr


REFUSED = {
    "unknown key": (("stale", "--set", "tools.calculator.limits.retrys=1"), ("retrys", "retries")),
    "unknown section": (("stale", "--set", "sampler.seed=1"), ("sampler",)),
    "unknown option of a tool": (("stale", "--set", "tools.sums.editon=1"), ("editon", "edition")),
    "value of the wrong type": (("stale", "--set", "sampling.seed=many"), ("sampling.seed", "integer")),
    "value out of range": (("stale", "--set", "tools.calculator.k=0"), ("tools.calculator.k",)),
    "unknown profile": (("stale", "--profile", "nope"), ("nope", "gptj")),
    "malformed --set": (("stale", "--set", "tools.calculator.tau_f"), ("--set", "tools.calculator.tau_f")),
    "shards that match nothing": (("stale", "--shards", "nowhere/*.json.gz"), ("nowhere", "corpus.shards")),
    "missing settings file": (("stale", "--config", "elsewhere.toml"), ("elsewhere.toml",)),
    "tool class that does not exist": (
        ("stale", "--set", "tools.sums.use='sums_tool:Nothing'"),
        ("tools.sums", "Nothing"),
    ),
    "tool module that does not exist": (("stale", "--set", "tools.sums.use='missing:Sums'"), ("tools.sums", "missing")),
    "built-in tool that does not exist": (("stale", "--set", "tools.weather.enabled=true"), ("weather",)),
    "missing prompt": (("stale", "--set", "tools.sums.prompt='gone.txt'"), ("tools.sums", "gone.txt")),
    "tool that is not there": (("tool", "weather", "Rome"), ("weather", "calculator")),
    "tool without a result": (("tool", "calculator", "1/0"), ("no result",)),
    "negative hours": (("clean", "--grace-hours", "-5"), ("--grace-hours",)),
    "warehouse before any run": (("sql", "from funnel"), ("toolformer.duckdb", "run")),
    "missing lines to score": (("score", "gone.jsonl"), ("gone.jsonl",)),
    "missing folder of a model": (("run", "--set", "model.name='no_model_here'"), ("no_model_here",)),
    "no lane": (
        ("run", "--set", "tools.calculator.enabled=false", "--set", "tools.sums.enabled=false"),
        ("tools", "enabled"),
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_is_refused_with_its_name(fresh, name):
    arguments, words = REFUSED[name]
    assert_refused(fresh.cli(*arguments), *words)


@pytest.mark.parametrize(
    ("file", "old", "new", "words"),
    [
        ("toolformer.toml", "tau_s = 0.1", "tauf = 0.1", ("tauf", "tau_f")),
        ("toolformer.toml", "[corpus]", "[corpus", ("toolformer.toml", "TOML")),
        ("sums.txt", "(1+2)]", "(1+2", ("tools.sums", "sums.txt")),
    ],
)
def test_a_file_that_cannot_be_read_is_named_with_what_is_wrong(fresh, file, old, new, words):
    fresh.edit(old, new, file)
    assert_refused(fresh.cli("stale"), *words)


def test_another_threshold_is_asked_without_a_run(made):
    printed = made.ok("sql", "select count(*) as n from kept_at(-1000)", "--format", "csv")
    [(positions,)] = made.sql("select count(*) from (select distinct tool, digest, segment, position from eligible)")
    assert printed == f"n\n{positions}\n"


def test_all_rows_belong_to_shards_and_lanes_that_there_are(made):
    for table in ("texts", "candidates", "loss_deltas", "filtered_calls", "swapped_results"):
        assert set(made.sql(f"select distinct tool, shard from {table}")) <= {
            (tool, shard) for tool in ("calculator", "sums") for shard in ("one", "two")
        }
        assert made.sql(f"select count(*) from {table} anti join documents using (digest)") == [(0,)]


@pytest.fixture(scope="module")
def specs() -> dict[str, dg.AssetSpec]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TOOLFORMER_CONFIG", str(REPOSITORY / "toolformer.toml"))
        from toolformer_dag.definitions import defs

        loaded = defs() if callable(defs) else defs
        found = {spec.key.to_user_string(): spec for spec in loaded.resolve_all_asset_specs()}
    return {name: spec for name, spec in found.items() if name != IGNORED}


def test_every_asset_tells_what_it_is(specs):
    for name, spec in specs.items():
        assert spec.description, name
        assert spec.owners, name
        assert spec.kinds, name
        assert spec.code_version, name


def test_a_lane_of_ones_own_is_a_lane_like_the_others(made: World):
    landed = made.materialized()
    assert {name.partition("/")[2] for name in landed if name.startswith("sums/")} == {
        name.partition("/")[2] for name in landed if name.startswith("calculator/")
    }


def test_materializations_tell_rows_tokens_and_calls(made: World):
    with made.instance() as instance:
        event = instance.get_latest_materialization_event(dg.AssetKey(["sums", "loss_deltas"]))
    told = event.asset_materialization.metadata
    for name in ("dagster/row_count", "tokens through the model", "tool calls", "seconds", "computed"):
        assert name in told
