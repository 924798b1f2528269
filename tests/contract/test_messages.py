"""What cannot be is refused in a sentence: exit code 1, no traceback, and the key or file that is wrong."""

import gzip

import pytest

from tests.command_line import Done
from tests.contract.conftest import BY_HAND, World

BAD_LINE = '{"text": "The total is 117.", "offset": 12}'


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
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_is_refused_with_its_name(fresh, name):
    arguments, words = REFUSED[name]
    assert_refused(fresh.cli(*arguments), *words)


def test_an_unknown_key_of_the_file_is_named_with_the_file(fresh):
    fresh.edit("toolformer.toml", "tau_s = 0.1", "tauf = 0.1")
    assert_refused(fresh.cli("stale"), "tauf", "tau_f")


def test_a_file_that_is_no_toml_is_named(fresh):
    (fresh.folder / "toolformer.toml").write_text("[tools\n")
    assert_refused(fresh.cli("stale"), "toolformer.toml", "TOML")


def test_lanes_that_are_all_disabled_are_refused(fresh):
    off = ("--set", "tools.calculator.enabled=false", "--set", "tools.sums.enabled=false")
    assert_refused(fresh.cli("run", *off), "tools", "enabled")


def test_a_prompt_that_does_not_parse_is_named(fresh):
    (fresh.folder / "sums.txt").write_text("Call.\nInput: 1 and 2 make 3 .\nOutput: 1 and 2 make [Search(1+2 3 .\n")
    assert_refused(fresh.cli("stale"), "tools.sums", "sums.txt")


def test_a_model_folder_that_is_missing_is_named(fresh):
    done = fresh.cli("run", "--set", "model.name='no_model_here'")
    assert_refused(done, "no_model_here")
    assert not fresh.warehouse.exists() or fresh.sql("select count(*) from loss_deltas") == [(0,)]


def test_a_line_that_cannot_be_scored_is_named_and_the_others_are_scored(fresh):
    good = '{"text": "1 and 2 make 3 .", "offset": 7, "tool": "Search", "input": "1+2", "result": "3"}'
    done = fresh.cli("score", "-", stdin=f"{BAD_LINE}\n{good}\n{{\n")
    assert_refused(done, "line 1", "tool", "line 3", "JSON")
    assert len(done.stdout.splitlines()) == 1


@pytest.fixture
def cut_short(world: World) -> World:
    """A world whose warehouse ends after a third."""
    whole = world.warehouse.read_bytes()
    world.warehouse.write_bytes(whole[: len(whole) // 3])
    return world


def test_a_warehouse_cut_short_is_told(cut_short):
    assert_refused(cut_short.cli("sql", "select sum(delta) from loss_deltas"))
    assert cut_short.stale() == {"warehouse/toolformer_duckdb"}


@pytest.mark.long
def test_a_warehouse_cut_short_is_made_again(cut_short, made):
    assert cut_short.ok("run") == "1 assets ran; 0 tokens went through the model, 0 tool calls were made.\n"
    assert cut_short.stale() == set()
    count = "select count(*) from loss_deltas"
    assert cut_short.sql(count) == made.sql(count)


@pytest.mark.long
def test_a_malformed_line_is_counted_by_its_reason_and_the_rest_goes_through(world):
    shard = world.folder / "web" / "two.json.gz"
    bad = b'not json\n{"url": "https://example.org/", "digest": "sha1:x"}\n'
    shard.write_bytes(gzip.compress(bad + gzip.decompress(shard.read_bytes())))
    world.mend()
    counted = "select sum(count)::bigint from rejections where stage = 'raw_shards' and shard = 'two'"
    assert world.sql(counted) == [(2,)]
    assert world.sql(f"{counted} and reason = 'not_json'") == [(1,)]
    assert world.sql("select shard, count(*) from documents group by shard order by shard") == [("one", 6), ("two", 6)]
    assert world.stale() <= BY_HAND
