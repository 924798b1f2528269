"""The forecast of `judge --estimate` beside what `judge` then spends."""

from pathlib import Path

import pytest

from benchmarks.made_traces import records
from tests.command_line import cli
from tests.traces.conftest import settings_at, write_lines
from toolformer_dag.settings.sections import Settings
from toolformer_dag.traces.judgement import build_conversation_plan, judge_traces, traces_database
from toolformer_dag.traces.judging_forecast import JudgingForecast, forecast_judging


def forecast(settings: Settings, sources: list[str], seed: int) -> JudgingForecast:
    plan = build_conversation_plan(settings, sources)
    return forecast_judging(plan, lambda table, done, total: None, seed)


def test_a_forecast_is_within_15_percent_of_what_judge_spends_and_its_sample_is_reused(tmp_path: Path) -> None:
    settings = settings_at(tmp_path)
    sources = [
        write_lines(tmp_path / "some.jsonl", records(40, seed=1)),
        write_lines(tmp_path / "others.jsonl", records(40, "needless", seed=2)),
    ]
    found = forecast(settings, sources, seed=1)
    assert (found.conversations, found.calls, found.to_judge) == (80, 120, 120)
    assert found.sampled == 1 + 4 * 6 and found.spent > 0
    assert not traces_database(settings).exists()
    again = forecast(settings, sources, seed=2)
    assert again.to_judge == 120 - found.sampled

    spent = judge_traces(settings, sources, traces_database(settings))
    assert again.losses.value == pytest.approx(spent.losses["computed"], rel=0.15)
    assert again.tokens.value == pytest.approx(spent.tokens, rel=0.15)
    assert again.tokens.low < again.tokens.value < again.tokens.high
    assert again.seconds.value > 0
    assert forecast(settings, sources, seed=3) == JudgingForecast(conversations=80, calls=120, to_judge=0)


def test_of_few_calls_none_is_judged_for_a_forecast(tmp_path: Path) -> None:
    settings = settings_at(tmp_path)
    found = forecast(settings, [write_lines(tmp_path / "few.jsonl", records(12))], seed=1)
    assert found == JudgingForecast(conversations=12, calls=12, to_judge=12)


def test_the_command_forecasts_and_judges_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    settings_at(tmp_path)
    write_lines(tmp_path / "traces.jsonl", records(40))
    first = cli("judge", "traces.jsonl", "--estimate")
    assert first.returncode == 0, first.stderr
    said = first.stdout.splitlines()
    assert said[0] == "40 conversations, 40 calls, 40 of them to judge; 9 were judged for this forecast."
    assert said[1].startswith("Losses still to compute: 155 (155 - 155)")
    assert [line.split(" ")[0] for line in said[2:]] == ["Tokens", "Time", "The"]
    assert not list(tmp_path.rglob("traces.duckdb"))
    assert "; 155 losses computed" in cli("judge", "traces.jsonl").stderr
    assert "Nothing is left to judge" in cli("judge", "traces.jsonl", "--estimate").stdout
