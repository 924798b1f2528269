"""What cannot be is refused in a sentence: exit code 1, no traceback, and the key or file that is wrong."""

import pytest

from tests.command_line import Done


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
