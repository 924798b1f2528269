"""Content decides identity: what changes the settings of a stage, and of which."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Any, get_args

import polars as pl
import pytest
from pydantic import BaseModel, create_model

from tests.pipeline.conftest import Column, Lane, Line, NewLine, Stage, TableOutput
from toolformer_dag.computing.lane_tables import LaneTable, get_call_tables
from toolformer_dag.computing.plan import Plan
from toolformer_dag.evaluation.measurements import ACCURACY_TABLE, PERPLEXITY_TABLE
from toolformer_dag.evaluation.measurements import SETTINGS_BUILDERS as MEASURED
from toolformer_dag.lake.record import ABSENT, list_record_changes
from toolformer_dag.pipeline import (
    augmented_corpus,
    controls,
    document_cuts,
    filtered_calls,
    heldout_texts,
    heuristic_subset,
    loss_deltas,
    losses,
    raw_shards,
    sample_store,
    scored_candidates,
    tool_results,
)
from toolformer_dag.pipeline.stages import list_lane_stages, list_table_outputs
from toolformer_dag.settings.sections import FilteringSettings
from toolformer_dag.settings.setting_types import AsBefore
from toolformer_dag.tools.registry import load_tools
from toolformer_dag.training.checkpoints import build_checkpoints_by_name

CONTROLS = {control.name for control in controls.CONTROLS}
LANE = {"heuristic_subset", "scored_candidates", "tool_results", "loss_deltas", *CONTROLS, "filtered_calls"}
STAGES = {"raw_shards", "heldout_texts", "augmented_corpus", *LANE}
LOSSES = {"loss_deltas", *CONTROLS}
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
    (document_cuts, "CUTTING_VERSION", 99, TEXTS),
    (sample_store, "METHOD", 99, SAMPLES),
    (scored_candidates, "PARSING", 99, SAMPLES),
    (losses, "METHOD", 99, LOSSES),
    (losses, "WINDOW_WEIGHTS", (1.0, 0.5), LOSSES),
    (controls, "CONTROLS", (replace(controls.CHANCE_CONTROL, version=99), *controls.CONTROLS[1:]), {"swapped_results"}),
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
        ({"control__swaps": 2}, CONTROLS),
        ({"tau_s": 0.9}, SAMPLES),
        ({"k": 9}, SAMPLES),
        ({"m": 9}, SAMPLES),
        ({"sampling__seed": 9}, SAMPLES),
        ({"sampling__temperature": 0.5}, SAMPLES),
        ({"sampling__max_call_tokens": 9}, {*SAMPLES, "heuristic_subset"}),
        ({"corpus__segment_tokens": 30}, TEXTS),
        ({"corpus__texts_per_shard": 9}, {"heuristic_subset"}),
        ({"evaluation__swapped_texts": 9}, CONTROLS),
        ({"training__examples_per_tool": 9}, {"filtered_calls"}),
        ({"tools__calculator__limits__max_result_characters": 9}, {"tool_results"}),
        ({"model__dtype": "bfloat16"}, MODEL),
        ({"model__markers__end": '"]]"'}, {*SAMPLES, *LOSSES, "augmented_corpus"}),
        ({"model__device": "auto", "model__token_budget": 999}, set()),
        ({"execution__workers": 3, "execution__chunk_texts": 1, "execution__chunk_calls": 1}, set()),
        ({"tools__calculator__limits__timeout_s": 1, "tools__calculator__limits__retries": 0}, set()),
        ({"paths__lake": "elsewhere"}, set()),
        ({"corpus__first": 1}, set()),
        ({"decoding__k": 1, "training__max_steps": 1}, set()),
        ({"training__heldout_texts": 1, "evaluation__perplexity_texts": 1}, set()),
        ({"model__markers__begin": '" ["', "model__markers__arrow": '" -> "'}, set()),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_setting_changes_the_stages_that_apply_it_and_how_work_is_done_changes_none(
    new_line: NewLine, values: dict[str, object], stages: set[str]
) -> None:
    line = new_line("one")
    before = versions(line)
    line.set(**values)
    assert changed(line, before) == stages


FILTERING = {
    "loss_floor": (-1.0, LOSSES),
    "keep_idle_first": ("true", LOSSES),
    "score": ('"loss_minus"', {"filtered_calls"}),
    "cost_weight": (0.5, {"filtered_calls"}),
}


@pytest.mark.parametrize("key", FILTERING)
def test_a_key_of_the_filter_changes_losses_only_where_it_concerns_them(new_line: NewLine, key: str) -> None:
    value, stages = FILTERING[key]
    line = new_line("one")
    before = versions(line)
    line.set(**{f"filtering__{key}": value})
    assert changed(line, before) == stages


def test_each_key_of_the_filter_is_in_that_test() -> None:
    assert FILTERING.keys() == FilteringSettings.model_fields.keys(), "which stages does the new key make stale?"


def later(table: BaseModel, key: str, before: object, value: object) -> BaseModel:
    """Return a table as a release has it in which `key` is new, and `before` stands for what was before it."""
    field = type(table).model_fields.get(key)
    kind: Any = Annotated[field.annotation if field else int, AsBefore(before)]
    with_key: type[BaseModel] = create_model("Later", __base__=type(table), **{key: (kind, before)})
    return with_key.model_construct(**{**dict(table), key: value})


def positions_identity(plan: Plan, lane: Lane) -> Mapping[str, Any]:
    """What determines p_i of single calls."""
    return sample_store.collect_positions_identity(plan, lane.tool.prompt)


def samples_identity(plan: Plan, lane: Lane) -> Mapping[str, Any]:
    """What determines samples of single calls."""
    return sample_store.collect_samples_identity(plan, lane.tool.prompt)


def records(plan: Plan) -> dict[str, Mapping[str, Any]]:
    """Return what determines every output of a plan and, under `rows`, the rows that are stored."""
    found: dict[str, Mapping[str, Any]] = {output.stage.name: output.settings for output in list_table_outputs(plan)}
    found |= {name: one.collect_settings(plan) for name, one in build_checkpoints_by_name(plan.settings).items()}
    found |= {name: settings(plan) for name, settings in MEASURED.items()}
    stored = (positions_identity, samples_identity, losses.collect_losses_identity)
    return found | {identity.__name__: identity(plan, plan.lanes[0]) for identity in stored}


def plan_with(plan: Plan, section: str, key: str, before: object, value: object) -> Plan:
    """Return the plan with a key that came later in a section."""
    if section == "options":
        (lane,) = plan.lanes
        options: Any = later(lane.tool.options, key, before, value)
        tool = type(lane.tool)(lane.key, options, lane.tool.prompt)
        return replace(plan, lanes=(replace(lane, tool=tool),))
    if section == "limits":
        limits: Any = later(plan.lanes[0].limits, key, before, value)
        return replace(plan, lanes=(replace(plan.lanes[0], limits=limits),))
    changed_section = later(getattr(plan.settings, section), key, before, value)
    return Plan.from_settings(plan.settings.model_copy(update={section: changed_section}))


STORED_SAMPLES = {"samples_identity"}
ASKED = {"positions_identity", "samples_identity"}
TRAINED = {"baseline_checkpoint", "finetuned_checkpoint"}
ANSWERS = {ACCURACY_TABLE}
NEW = "added_later"
LATER = [
    ("sampling", NEW, 0, 1, {*SAMPLES, *STORED_SAMPLES}),
    ("filtering", NEW, 0, 1, LOSSES),
    ("filtering", "loss_floor", None, -1.0, LOSSES),
    ("training", NEW, 0, 1, TRAINED),
    ("decoding", NEW, 0, 1, ANSWERS),
    ("control", NEW, 0, 1, CONTROLS),
    ("model", NEW, 0, 1, {*MODEL, *ASKED, "collect_losses_identity", *TRAINED, *ANSWERS, PERPLEXITY_TABLE}),
    ("options", NEW, 0, 1, {"heuristic_subset", "tool_results", "loss_deltas", *ANSWERS}),
    ("limits", NEW, 0, 1, {"tool_results", *ANSWERS}),
    ("corpus", "format", "auto", "plain", {"raw_shards"}),
    ("corpus", "segment_tokens", 36, 40, TEXTS),
    ("corpus", "texts_per_shard", None, 9, {"heuristic_subset"}),
    ("corpus", "documents_per_shard", None, 9, {"heuristic_subset"}),
    ("evaluation", "questions", 200, 9, ANSWERS),
    ("evaluation", "swapped_texts", 3, 9, CONTROLS),
    ("execution", NEW, 0, 1, set()),
    ("export", NEW, 0, 1, set()),
]


@pytest.mark.parametrize(
    ("section", "key", "before", "other", "stages"), LATER, ids=[f"{section}.{key}" for section, key, *_ in LATER]
)
def test_a_setting_that_came_later_makes_nothing_stale_at_the_value_that_stands_for_before(
    line: Line, section: str, key: str, before: object, other: object, stages: set[str]
) -> None:
    plan = line.plan()
    as_before = records(plan_with(plan, section, key, before, before))
    if key == NEW:
        assert as_before == records(plan)
    found = records(plan_with(plan, section, key, before, other))
    differing = {
        name: list_record_changes({"settings": as_before[name]}, {"settings": record}) for name, record in found.items()
    }
    assert {name for name, found_changes in differing.items() if found_changes} == stages
    for change in (change for found_changes in differing.values() for change in found_changes):
        assert (change.field_path.rpartition(".")[2], change.old_value, change.new_value) == (key, ABSENT, other)


@pytest.mark.parametrize(
    ("section", "key", "other"),
    [
        ({"use": "calendar"}, NEW, 1),
        ({"use": "wiki_search", "passages": "embedded"}, "snippet_characters", 9),
        ({"use": "question_answering", "passages": "embedded", "reader": "embedded"}, "passages_read", 9),
        ({"use": "machine_translation", "model": "some/model"}, "max_output_tokens", 9),
        (
            {"use": "mcp", "server": "s", "prompt": "mcp.txt", "tool": "ask", "url": "http://127.0.0.1:9"},
            "result",
            "{x}",
        ),
    ],
    ids=lambda value: value["use"] if isinstance(value, dict) else "",
)
def test_an_option_that_came_later_is_no_part_of_a_tool_s_identity_at_the_value_that_stands_for_before(
    line: Line, section: dict[str, object], key: str, other: object
) -> None:
    (line.folder / "mcp.txt").write_text("Ask.\nInput: 1 .\nOutput: [Ask()] 1 .\n")
    tool = load_tools({"lane": section}, root=line.folder)["lane"]
    before = getattr(tool.options, key, 0)

    def identity(value: object) -> dict[str, object]:
        options: Any = later(tool.options, key, before, value)
        return dict(type(tool)(tool.key, options, tool.prompt).identity())

    assert identity(before) == {name: value for name, value in tool.identity().items() if name != key}
    assert identity(other).keys() - identity(before).keys() == {key}


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
        version(**{name: replace(column, sql_expression="1")}),
    ]
    assert len({found.code_version, *others}) == 4


def test_settings_are_what_json_gives_back(line: Line) -> None:
    """Else a record that was read would differ from one that is made."""
    import json

    for output in line.outputs().values():
        assert json.loads(json.dumps(output.settings)) == output.settings


def test_a_lane_s_tables_have_the_names_of_its_stages(new_line: NewLine) -> None:
    line = new_line("one")
    line.set(tools__calculator__depth=3, tools__calculator__proposals='["model", "rule", "calls.jsonl"]')
    (line.folder / "calls.jsonl").write_text("")
    plan = line.plan()
    [lane] = plan.lanes
    stages = list_lane_stages(plan, lane)
    inner = [one for stage in stages for one in stage.inner_stages]
    beside = [name for stage in stages for name in stage.sibling_table_names]
    named = {*beside, *(stage.name for stage in (*inner, *stages))}
    of_controls = {name for control in controls.CONTROLS for name in control.list_table_names(lane)}
    assert named == {*get_args(LaneTable), *of_controls} - {"served_proposals"}
    for level in (1, 2, 3):
        assert {*get_call_tables(level)} <= {stage.name for stage in stages}


def test_a_stage_that_reads_a_table_which_no_stage_makes_is_named(
    new_line: NewLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = new_line("one").plan()
    mistyped = replace(tool_results.STAGE, reads=("heuristic_subset", "scored_candidate"))
    monkeypatch.setattr(tool_results, "STAGE", mistyped)
    with pytest.raises(ValueError, match="tool_results of calculator reads scored_candidate, which no stage before it"):
        list_table_outputs(plan)
