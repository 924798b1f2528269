"""The forecast of `judge --estimate` beside what `judge` then spends."""

from pathlib import Path

import pytest

from benchmarks.made_traces import records
from tests.command_line import cli
from tests.traces.conftest import settings_at, write_lines
from toolformer_dag.settings.sections import Settings
from toolformer_dag.traces.judgement import build_conversation_plan, get_traces_database_path, judge_traces
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
    assert (found.conversation_count, found.call_count, found.unjudged_call_count) == (80, 120, 120)
    assert found.sampled_call_count == 1 + 4 * 6 and found.sample_token_count > 0
    assert not get_traces_database_path(settings).exists()
    again = forecast(settings, sources, seed=2)
    assert again.unjudged_call_count == 120 - found.sampled_call_count

    spent = judge_traces(settings, sources, get_traces_database_path(settings))
    assert again.loss_count_range.value == pytest.approx(spent.loss_counts["computed"], rel=0.15)
    assert again.token_count_range.value == pytest.approx(spent.model_token_count, rel=0.15)
    assert again.token_count_range.low < again.token_count_range.value < again.token_count_range.high
    assert again.seconds_range.value > 0
    assert forecast(settings, sources, seed=3) == JudgingForecast(
        conversation_count=80, call_count=120, unjudged_call_count=0
    )


def test_of_few_calls_none_is_judged_for_a_forecast(tmp_path: Path) -> None:
    settings = settings_at(tmp_path)
    found = forecast(settings, [write_lines(tmp_path / "few.jsonl", records(12))], seed=1)
    assert found == JudgingForecast(conversation_count=12, call_count=12, unjudged_call_count=12)


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
