"""Content decides identity: what changes the settings of a stage, and of which."""

from dataclasses import replace

import polars as pl
import pytest

from tests.pipeline.conftest import Column, Line, NewLine, Stage, TableOutput
from toolformer_dag.pipeline import (
    augmented_corpus,
    document_cuts,
    filtered_calls,
    heldout_texts,
    heuristic_subset,
    loss_deltas,
    losses,
    raw_shards,
    scored_candidates,
    swapped_results,
)

LANE = {"heuristic_subset", "scored_candidates", "tool_results", "loss_deltas", "swapped_results", "filtered_calls"}
STAGES = {"raw_shards", "heldout_texts", "augmented_corpus", *LANE}
LOSSES = {"loss_deltas", "swapped_results"}
TEXTS = {"heldout_texts", "heuristic_subset", "augmented_corpus"}
SAMPLES = {"scored_candidates"}
MODEL = {*TEXTS, *SAMPLES, *LOSSES}


@pytest.fixture(scope="module")
def line(new_line: NewLine) -> Line:
    """Make a line in which nothing runs."""
    return new_line("one")


def versions(line: Line) -> dict[str, str]:
    return {name: output.code_version for name, output in line.outputs().items()}


def changed(line: Line, before: dict[str, str]) -> set[str]:
    return {name for name, version in versions(line).items() if version != before[name]}


CONSTANTS = [
    (raw_shards, "READER", 99, {"raw_shards"}),
    (document_cuts, "CUTTING", 99, TEXTS),
    (scored_candidates, "METHOD", 99, SAMPLES),
    (scored_candidates, "PARSING", 99, SAMPLES),
    (losses, "METHOD", 99, LOSSES),
    (losses, "WINDOW_WEIGHTS", (1.0, 0.5), LOSSES),
    (swapped_results, "METHOD", 99, {"swapped_results"}),
    (filtered_calls, "SQL", filtered_calls.SQL + "-- another rule", {"filtered_calls"}),
    (augmented_corpus, "MERGING", 99, {"augmented_corpus"}),
    (augmented_corpus, "HELDOUT_SHARE", 0.1, {"augmented_corpus"}),
    (heldout_texts, "HELDOUT_SHARE", 0.1, {"heldout_texts"}),
]


@pytest.mark.parametrize(
    ("module", "name", "value", "stages"),
    CONSTANTS,
    ids=[f"{m.__name__.rpartition('.')[2]}.{n}" for m, n, *_ in CONSTANTS],
)
def test_a_constant_of_the_method_changes_the_stages_that_apply_it(
    line: Line, monkeypatch: pytest.MonkeyPatch, module: object, name: str, value: object, stages: set[str]
) -> None:
    before = versions(line)
    monkeypatch.setattr(module, name, value)
    assert changed(line, before) == stages


@pytest.mark.parametrize(
    ("values", "stages"),
    [
        ({"tau_f": 0.9}, {"filtered_calls"}),
        ({"tau_f": "{by_chance=0.05}"}, {"filtered_calls"}),
        ({"look_ahead": "true"}, {"loss_deltas"}),
        ({"control__swaps": 2}, {"swapped_results"}),
        ({"tau_s": 0.9}, SAMPLES),
        ({"k": 9}, SAMPLES),
        ({"m": 9}, SAMPLES),
        ({"sampling__seed": 9}, SAMPLES),
        ({"sampling__temperature": 0.5}, SAMPLES),
        ({"sampling__max_call_tokens": 9}, {*SAMPLES, "heuristic_subset"}),
        ({"corpus__segment_tokens": 30}, TEXTS),
        ({"corpus__texts_per_shard": 9}, {"heuristic_subset"}),
        ({"evaluation__swapped_texts": 9}, {"swapped_results"}),
        ({"training__examples_per_tool": 9}, {"filtered_calls"}),
        ({"tools__calculator__limits__max_result_characters": 9}, {"tool_results"}),
        ({"model__dtype": "bfloat16"}, MODEL),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_setting_changes_the_stages_that_apply_it(
    new_line: NewLine, values: dict[str, object], stages: set[str]
) -> None:
    line = new_line("one")
    before = versions(line)
    line.set(**values)
    assert changed(line, before) == stages


@pytest.mark.parametrize(
    "values",
    [
        {"model__device": "auto", "model__token_budget": 999},
        {"execution__workers": 3, "execution__chunk_texts": 1, "execution__chunk_calls": 1},
        {"tools__calculator__limits__timeout_s": 1, "tools__calculator__limits__retries": 0},
        {"paths__lake": "elsewhere"},
        {"corpus__first": 1},
        {"decoding__k": 1, "training__max_steps": 1},
        {"training__heldout_texts": 1, "evaluation__perplexity_texts": 1},
    ],
)
def test_how_work_is_done_changes_no_stage(new_line: NewLine, values: dict[str, object]) -> None:
    line = new_line("one")
    before = versions(line)
    line.set(**values)
    assert changed(line, before) == set()


def test_a_prompt_changes_what_is_sampled_and_the_room_for_texts(new_line: NewLine) -> None:
    line = new_line("one")
    before = versions(line)
    prompt = line.folder / "calculator.txt"
    prompt.write_text(prompt.read_text().replace("Call.", "Say."))
    assert changed(line, before) == {"heuristic_subset", "scored_candidates"}


def test_a_model_s_files_change_every_stage_that_asks_it(new_line: NewLine) -> None:
    line = new_line("one")
    before = versions(line)
    config = line.folder / "model/config.json"
    config.write_text(config.read_text() + " ")
    assert changed(line, before) == MODEL


STAGE_LIST: list[Stage] = [raw_shards.STAGE, heuristic_subset.STAGE, loss_deltas.STAGE, augmented_corpus.STAGE]


@pytest.mark.parametrize("stage", STAGE_LIST, ids=[stage.name for stage in STAGE_LIST])
def test_another_column_type_or_formula_is_another_version_and_a_description_is_none(line: Line, stage: Stage) -> None:
    found = line.output(stage.name)
    name, column = next(iter(stage.columns.items()))

    def version(**changed_columns: Column) -> str:
        other = replace(stage, columns={**stage.columns, **changed_columns})
        return TableOutput(other, found.plan, found.lane_or_none).code_version

    assert version() == version(**{name: replace(column, description="another")}) == found.code_version
    others = [
        version(more=Column(pl.String(), "one more")),
        version(**{name: replace(column, dtype=pl.Binary())}),
        version(**{name: replace(column, sql="1")}),
    ]
    assert len({found.code_version, *others}) == 4


def test_settings_are_what_json_gives_back(line: Line) -> None:
    """Else a record that was read would differ from one that is made."""
    import json

    for output in line.outputs().values():
        assert json.loads(json.dumps(output.settings)) == output.settings
