"""The study of filters: which calls are right, what can be resumed, and what its tables say."""

import json
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st

from embedded_model.filter_report import accuracy_table, difference_table, kept_table
from embedded_model.filter_study import (
    RESULTS,
    RULES,
    FilterResult,
    FilterStudy,
    annotate,
    append_result,
    judged_calls,
    results,
)
from embedded_model.offset_study import (
    BEFORE,
    DELTA,
    average_precision,
    remedy_table,
    shortened,
    with_shorter_texts,
)
from toolformer_dag.model.engine import load_engine
from toolformer_dag.model.requests import LossRequest
from toolformer_dag.pipeline.plan import Plan, lanes
from toolformer_dag.settings.sections import ModelSettings
from toolformer_dag.settings.settings_file import load_settings
from toolformer_dag.synthetic import SMALL_MODEL
from toolformer_dag.synthetic.web import explained_records, records

TOOLS = ("calculator", "calendar", "wiki_search", "question_answering", "machine_translation")


def result(rule: str, seed: int, right: int) -> FilterResult:
    answers = tuple((f"{tool} ({wordings})", 10, right, 10) for wordings in ("seen", "unseen") for tool in TOOLS)
    return FilterResult(rule, seed, 800, 4, 10, [], "abc", 475, 240, answers, {"synthetic pages": 4.0 + seed}, 60.0)


def test_the_pages_of_the_replayed_generator_are_those_of_the_web() -> None:
    explained = list(explained_records(1, "corpus", 40))
    assert [record for record, _ in explained] == list(records(1, "corpus", 40))
    for record, found in explained:
        assert all(one.text in record["raw_content"] and one.after.startswith(f" {one.answer}") for one in found)
    assert sum(len(found) for _, found in explained) > 20


def test_results_are_read_again_without_a_line_that_was_cut_short(tmp_path: Path) -> None:
    lines = [json.dumps(asdict(result(RULES[0].name, seed, 5))) for seed in range(2)]
    (tmp_path / RESULTS).write_text(f"{lines[0]}\n{lines[1][:40]}\n{lines[1]}\n")
    study = FilterStudy(tmp_path, questions=10)
    assert results(study) == [result(RULES[0].name, 0, 5), result(RULES[0].name, 1, 5)]
    assert results(replace(study, folder=tmp_path / "nothing")) == []


def test_a_line_that_was_cut_short_costs_only_itself(tmp_path: Path) -> None:
    (tmp_path / RESULTS).write_text(json.dumps(asdict(result(RULES[0].name, 0, 5)))[:40])
    for seed in (0, 1):
        append_result(tmp_path, result(RULES[0].name, seed, 5))
    assert [one.seed for one in results(FilterStudy(tmp_path, questions=10))] == [0, 1]


def test_results_of_other_studies_in_the_same_folder_are_not_pooled(tmp_path: Path) -> None:
    mine, page = result(RULES[0].name, 0, 5), str(tmp_path / "page.json.gz")
    with_pages = replace(mine, real_text=[page], perplexity={"synthetic pages": 4.0, "real": 20.0})
    for one in (mine, with_pages, replace(mine, swaps=1), replace(mine, documents=60), replace(mine, questions=11)):
        append_result(tmp_path, one)
    study = FilterStudy(tmp_path, questions=10)
    assert results(study) == [mine]
    with_text = results(replace(study, real_text=(Path(page),)))
    assert with_text == [with_pages]
    assert difference_table(with_text)["perplexity, real"].to_list() == [20.0]


def test_rules_are_compared_on_the_same_seeds() -> None:
    found = [result(RULES[0].name, 0, 5), result(RULES[0].name, 1, 7), result(RULES[2].name, 1, 8)]
    rows = {row["rule"]: row for row in difference_table(found).to_dicts()}
    assert rows[RULES[0].name]["seen, %"] == 60.0 and rows[RULES[0].name]["seen, against the paper's"] == ""
    assert rows[RULES[2].name]["seen, against the paper's"] == "+10.0"
    cells = accuracy_table(found).filter(rule=RULES[0].name, wordings="seen").row(0, named=True)
    assert cells["calculator"].startswith("60.0 (") and cells["all"].startswith("60.0 (")


scored = st.lists(st.tuples(st.sampled_from([-1.0, 0.0, 0.5, 2.0]), st.booleans()), max_size=12, unique=True)


@given(scored)
def test_average_precision_agrees_with_a_plain_loop(calls: list[tuple[float, bool]]) -> None:
    ordered = sorted(calls, key=lambda call: -call[0])
    precisions = [
        sum(right for _, right in ordered[: number + 1]) / (number + 1)
        for number, (_, is_right) in enumerate(ordered)
        if is_right
    ]
    found = average_precision(np.array([s for s, _ in ordered]), np.array([r for _, r in ordered], bool))
    assert found == pytest.approx(sum(precisions) / len(precisions) if precisions else 0.0)


def test_a_score_that_ranks_every_right_place_first_keeps_them_all_at_no_more_wrong_ones() -> None:
    place = {"tool": "calculator", "segment": 0, "position": 0, "sample": 0, "place": 0}
    rows = [
        {
            **place,
            "digest": str(number),
            DELTA: 0.6 if number % 4 else 0.1,
            "right": number % 3 > 0,
            "place": number * 10,
        }
        for number in range(60)
    ]
    calls = pl.DataFrame(rows).with_columns(
        pl.when("right").then(2.0).otherwise(0.0).alias(shortened(before)) for before in BEFORE
    )
    table = {row["score"]: row for row in remedy_table(calls, {"calculator": 0.5}).to_dicts()}
    perfect, plain = table[shortened(BEFORE[0])], table[DELTA]
    assert perfect["right"] == perfect["of"] == 40 and perfect["average_precision"] == 1.0
    assert plain["right"] == 30 and plain["wrong"] == 15
    assert plain["gain_low"] == plain["gain_high"] == 0 and perfect["gain_low"] > 0


def test_a_call_is_scored_again_with_the_text_from_shortly_before_it() -> None:
    settings = load_settings(overrides=["model.name=embedded"], environment={})
    plan = Plan(settings, tuple(lanes(settings)), {}, settings.sampling)
    engine = load_engine(ModelSettings(name=str(SMALL_MODEL), dtype="float32"))
    long, short = "The old man walked home. " * 20, "Anna has 3 boxes with 4 pens, so Anna has"
    rows = [{"text": before + short + " 12 pens in all.", "place": len(before + short)} for before in ("", long)]
    calls = pl.DataFrame(rows).with_columns(
        *(
            pl.lit(value).alias(name)
            for name, value in {"tool": "calculator", "input": "3 * 4", "result": "12"}.items()
        ),
        reason=pl.lit(None, pl.String),
    )
    found = with_shorter_texts(plan, engine, calls).sort("place")
    whole = engine.losses(
        [LossRequest(rows[0]["text"], engine.position_at(rows[0]["text"], len(short)), "Calculator", "3 * 4", "12")]
    )[0].delta
    assert found[shortened(BEFORE[-1])][0] == pytest.approx(whole, abs=1e-5)
    cut = short[short.index(" ", len(short) - BEFORE[0]) + 1 :] if len(short) > BEFORE[0] else short
    near = engine.losses(
        [LossRequest(cut + " 12 pens in all.", engine.position_at(cut + " 12", len(cut)), "Calculator", "3 * 4", "12")]
    )[0].delta
    assert found[shortened(BEFORE[0])][0] == pytest.approx(near, abs=1e-5)
    assert found.height == 2 and found.select(map(shortened, BEFORE)).null_count().sum_horizontal()[0] == 0


@pytest.mark.long
def test_filters_decide_over_the_same_losses_of_a_small_web(tmp_path: Path) -> None:
    study, said = FilterStudy(tmp_path, documents=60, questions=1, swaps=1), list[str]()
    table = kept_table(study, said.append)
    assert table.select("rule", "tool").n_unique() == len(RULES) * len(TOOLS)
    assert ((table["right"] + table["wrong"]) == table["kept"]).all()
    assert (
        table.filter(rule=RULES[0].name)["looks ahead"].sum()
        == 0
        < table.filter(rule="look-ahead")["looks ahead"].sum()
    )
    assert table["rejected right"].sum() == 0
    annotate(study.synthetic(RULES[0]), said.append)
    calls = judged_calls(study.synthetic(RULES[0]))
    assert calls.filter("right").height > calls.height / 10
    assert calls.filter("kept", "right").height > calls.filter("kept", ~pl.col("right")).height
