"""A run computes what is stale and skips the rest, whoever starts it."""

import gzip
import json
import re
from pathlib import Path

import polars as pl
import pytest
from dagster import AssetKey

from benchmarks.made_traces import records
from tests.command_line import cli
from tests.runs.conftest import BY_HAND, free
from tests.traces.conftest import write_lines
from toolformer_dag.assets import COMPUTING_JOB, list_outputs
from toolformer_dag.assets.declaration import build_asset_key
from toolformer_dag.assets.metadata import TOKENS_LABEL, UNCHANGED_LABEL
from toolformer_dag.assets.running import CHANGED_TAG, COMPUTED_TAG, SKIPPED_TAG
from toolformer_dag.definitions import build_definitions
from toolformer_dag.files import unseal_record
from toolformer_dag.lake.warehouse import query
from toolformer_dag.model.weights import get_checkpoint_folder
from toolformer_dag.pipeline import filtered_calls
from toolformer_dag.pipeline.chance import explain_lanes_without_calls
from toolformer_dag.traces.judgement import get_traces_database_path
from toolformer_dag.traces.trace_stages import STAGES
from toolformer_dag.training.training_report import RECORD_FILE_NAME

OURS = "toolformer/"
"""Tags that this project writes; Dagster's own begin with dagster/ or a dot."""


def test_everything_is_fresh_after_a_run_and_a_second_one_starts_nothing(world):
    assert world.stale() == []
    assert world.sql("select count(*) from documents") == [(12,)]
    assert world.sql("select count(*) from filtered_calls where delta < tau_f") == [(0,)]
    scored = dict(world.sql("select tool, count(*) from loss_deltas group by tool"))
    assert scored["calculator"] > 10 and scored["sums"] > 3
    assert {name for (name,) in world.sql("select distinct tool from funnel")} == {"calculator", "sums"}
    assert (world.folder / "lake/training/finetuned_checkpoint/model/model.safetensors").exists()
    project = world.project()
    before = project.dagster_instance.get_runs_count()
    report = project.run_rounds(includes_training=True)
    assert report.made_assets == [] and free(report)
    assert project.dagster_instance.get_runs_count() == before


def test_a_run_started_from_dagster_tells_in_its_tag_what_changed(world, monkeypatch):
    [(middle,)] = world.sql("select round(median(delta), 3) from filtered_calls where tool = 'calculator'")
    monkeypatch.setattr(filtered_calls, "SQL", filtered_calls.SQL + "\n-- another text\n")
    project = world.project(f"tools.calculator.tau_f={middle}")
    job = build_definitions(project.plan).resolve_job_def(COMPUTING_JOB)
    assert not {key.to_user_string() for key in job.asset_layer.selected_asset_keys} & set(BY_HAND)
    chosen = ("calculator/filtered_calls", "sums/filtered_calls", "warehouse/toolformer_duckdb")
    keys = [build_asset_key(name) for name in (*chosen, "calculator/loss_deltas")]
    assert job.execute_in_process(instance=project.dagster_instance, asset_selection=keys).success
    [run] = project.dagster_instance.get_runs(limit=1)
    assert all(name.startswith((OURS, "dagster/", ".dagster/")) for name in run.tags)
    told = {name: set(value.split("; ")) for name, value in run.tags.items() if name.startswith(OURS)}
    assert told == {
        CHANGED_TAG: {f"calculator.tau_f 0.0 -> {middle}", "calculator.sql changed", "sums.sql changed"},
        COMPUTED_TAG: set(chosen),
        SKIPPED_TAG: {"1"},
    }
    assert world.figures("calculator/filtered_calls")[TOKENS_LABEL].value == 0
    assert world.sql("select min(delta) >= tau_f from filtered_calls where tool = 'calculator' group by tau_f") == [
        (True,)
    ]


KEEPING = """
from sums_tool import Sums, SumsOptions


class KeepingOptions(SumsOptions):
    shortest: int = 0


class Keeping(Sums):
    Options = KeepingOptions

    def keeps(self, text, offset, input):
        return len(input) >= self.options.shortest
"""
KEPT_OUT = """
from sums_tool import Sums


class Marking(Sums):
    kept_out_version = "1"

    def kept_out(self, text, offset, input):
        return "no_operation" if len(input) % 2 else None
"""
DATED = """
from sums_tool import Sums
from toolformer_dag.tools.tool import ToolResult


class Dated(Sums):
    def context(self, document):
        return document.title

    def run(self, calls):
        return [ToolResult(call.context) for call in calls]
"""


def write_twins(folder: Path, *titles: str) -> None:
    """Write a shard of documents with one text and a title each."""
    text = "\n".join(f"{number} and 2 make {number + 2} ." for number in range(6))
    record = {"url": "https://example.org/", "source_domain": "example.org", "raw_content": text, "language": "en"}
    lines = [json.dumps({**record, "digest": str(number), "title": title}) for number, title in enumerate(titles)]
    (folder / "one.json.gz").write_bytes(gzip.compress("\n".join(lines).encode()))


def test_an_option_that_keeps_alone_looks_at_marks_its_calls_anew_without_a_token(world):
    (world.folder / "keeping_tool.py").write_text(KEEPING)
    world.edit("sums_tool:Sums", "keeping_tool:Keeping")
    reports = world.update("tools.sums.shortest=1000")
    assert not any(sum(report.work.tokens_by_kind.values()) for report in reports.values())
    assert {name.partition("/")[0] for name in reports} == {"sums", "training"}
    calls = world.lake.get_table("sums/loss_deltas").scan_parts().collect()
    assert calls.filter(pl.col("ahead").is_null())["reason"].unique().to_list() == ["tool_keeps_out"]
    assert world.lake.get_table("sums/filtered_calls").scan_parts().collect().is_empty()


def test_calls_that_compute_nothing_are_marked_and_every_other_swap_stays_without_a_token(world):
    before = world.lake.get_table("sums/swapped_results").scan_parts().collect()
    (world.folder / "marking_tool.py").write_text(KEPT_OUT)
    world.edit("sums_tool:Sums", "marking_tool:Marking")
    reports = world.update()
    assert not any(sum(report.work.tokens_by_kind.values()) for report in reports.values())
    is_odd = pl.col("input").str.len_chars() % 2 == 1
    calls = world.lake.get_table("sums/loss_deltas").scan_parts().collect()
    reasons = calls.filter(pl.col("ahead").is_null()).group_by(is_odd.alias("odd")).agg(pl.col("reason").unique())
    assert dict(reasons.iter_rows()) == {True: ["no_operation"], False: [None]}
    swaps = world.lake.get_table("sums/swapped_results").scan_parts().collect()
    assert 0 < swaps.height < before.height and swaps.equals(before.filter(~is_odd))


def test_a_result_follows_the_context_of_its_document(fresh):
    """Ask in both contexts before and after: tool_results has the same rows."""
    (fresh.folder / "dated_tool.py").write_text(DATED)
    fresh.edit("sums_tool:Sums", "dated_tool:Dated")
    (fresh.folder / "web" / "two.json.gz").unlink()
    for titles in (("Monday", "Friday"), ("Friday", "Monday")):
        write_twins(fresh.folder / "web", *titles)
        reports = fresh.update("tools.calculator.enabled=false")
        told = fresh.lake.get_table("sums/loss_deltas").scan_parts().select("digest", "result").unique().sort("digest")
        assert told.collect().rows() == list(zip("01", titles, strict=True))
    assert "sums/loss_deltas" in reports


NAME = "traces/judged"
TRACES = [NAME, *(f"traces/{stage.name}" for stage in STAGES)]
SOURCE = "traces.source=['talks.jsonl']"


def test_recorded_conversations_are_judged_as_assets(fresh):
    assert NAME not in [one.name for one in list_outputs(fresh.project().plan)]
    write_lines(fresh.folder / "talks.jsonl", records(4))

    def made(*overrides):
        project = fresh.project(SOURCE, *overrides)
        assert NAME in project.list_stale_assets()
        job = build_definitions(project.plan).resolve_job_def(COMPUTING_JOB)
        selected = [build_asset_key(name) for name in TRACES]
        assert job.execute_in_process(instance=project.dagster_instance, asset_selection=selected).success
        assert not {*TRACES} & {*project.list_stale_assets()}
        return fresh.figures("traces/call_losses")[TOKENS_LABEL].value

    assert made() > 0
    assert query(get_traces_database_path(fresh.settings()), "SELECT count(*) FROM trace_calls").item() == 4
    assert made("traces.share=0.5") == 0
    write_lines(fresh.folder / "talks.jsonl", records(8))
    assert "traces/conversations" in fresh.stale(SOURCE, "traces.share=0.5")


FILTER = "calculator/filtered_calls"
CONTROL = "calculator/swapped_results"
BY_CHANCE = "tools.calculator.tau_f={ by_chance = 0.9 }"


def test_the_filter_depends_on_the_control_only_with_a_threshold_by_chance(world):
    def upstream(*overrides):
        graph = build_definitions(world.project(*overrides).plan).resolve_asset_graph()
        return AssetKey(CONTROL.split("/")) in graph.get(AssetKey(FILTER.split("/"))).parent_keys

    assert upstream(BY_CHANCE) and not upstream()
    assert "settings.tau_f.by_chance: (absent) -> 0.9" in world.reasons(BY_CHANCE)[FILTER]


@pytest.mark.long
def test_a_run_says_what_it_chose_by_chance_and_why_a_lane_keeps_no_call_and_it_stands_in_tables_and_metadata(world):
    options = [part for change in (BY_CHANCE, "tools.sums.tau_f=50") for part in ("--set", change)]
    done = cli("stale", "--run", "--config", str(world.folder / "toolformer.toml"), *options)
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stderr.splitlines() if line.startswith(FILTER)]
    assert re.fullmatch(FILTER + r": [\d,]+ rows in [\d.]+ s", lines[0])
    [(rule, verdict, tau_f)] = world.sql(
        "select by_chance, verdict, tau_f from filter_rules join lanes using (tool) where tool = 'calculator'"
    )
    level = f"select tau_f, kept from chance_thresholds where tool = 'calculator' and by_chance = {rule}"
    [(threshold, kept)] = world.sql(level)
    assert (rule, tau_f) == (0.9, threshold)
    assert world.sql("select count(*) from filtered_calls where tool = 'calculator'") == [(kept,)]
    assert world.figures("tables/table_3")[UNCHANGED_LABEL].value is True  # and it shows what it showed
    assert world.figures("tables/table_3")["plot"].value.startswith("![plot]")
    assert world.figures("tables/table_2")[UNCHANGED_LABEL].value is False
    assert ("keeps" in world.figures(FILTER)["threshold"].value) == (verdict == "certified")
    [(places, best)] = world.sql("select count(*), max(delta) from places where tool = 'sums'")
    [by_chance] = world.sql(
        "select by_chance, by_chance_low, by_chance_high from swapped_statistics where tool = 'sums' and tau_f = 50"
    )
    assert f"sums: no call is kept at tau_f = 50. Of {places} places the best gains {best:.3f}" in done.stderr
    assert "0 at 50 (by chance {}, 95 %: {}-{})".format(*by_chance) in done.stderr


def test_a_threshold_that_is_reached_nowhere_keeps_nothing_and_says_so(world):
    unreached = "tools.calculator.tau_f={ by_chance = 0.000001 }"
    report = world.update(unreached, "tools.sums.tau_f=50")[FILTER]
    assert report.rejections_by_reason["no_threshold"] > 0 and sum(report.row_count_by_part.values()) == 0
    [calculator, sums, told] = explain_lanes_without_calls(world.project(unreached, "tools.sums.tau_f=50").plan)
    assert calculator.startswith("calculator: no call is kept. Of ") and sums.startswith("sums: no call is kept at")
    assert "nothing to finetune on. Lower tau_f" in told


def test_a_lane_without_a_judged_call_says_at_which_stage_its_calls_ended(world):
    change = "tools.calculator.tau_s=0.999999"
    world.update(change)
    [told] = explain_lanes_without_calls(world.project(change).plan)
    [(texts,)] = world.sql("select count(*) from texts where tool = 'calculator'")
    assert told.startswith(f"calculator: no call is kept, for no call was proposed for {texts} texts; lower tau_s (")
    assert f"no_position {texts})" in told and 'sql "from funnel"' in told


@pytest.mark.long
def test_further_seeds_are_checkpoints_that_are_asked_the_same_questions(world):
    project = world.project("training.more_seeds=[5]")
    report = project.run_rounds(includes_training=True)
    trained = {name for name in report.made_assets if "checkpoint" in name}
    assert trained == {"training/baseline_checkpoint_seed_5", "training/finetuned_checkpoint_seed_5"}
    assert project.list_stale_assets() == {}
    folder = get_checkpoint_folder(project.plan.settings, "finetuned_checkpoint_seed_5")
    assert unseal_record((folder / RECORD_FILE_NAME).read_bytes())["settings"]["seed"] == 5
    asked = "select condition, count(distinct question) from outcomes where k is not null group by all order by all"
    conditions = dict(world.sql(asked))
    assert {name for name in conditions if "seed" in name} == {
        "base + C (seed 5)",
        "Toolformer (seed 5)",
        "Toolformer (seed 5) (disabled)",
    }
    assert len(set(conditions.values())) == 1
    [(questions,)] = world.sql("select n from paired('Toolformer (seed 5)', 'Toolformer') where benchmark = 'All'")
    [(asked_of_both,)] = world.sql("select count(*) from outcomes where condition = 'Toolformer'")
    assert questions == asked_of_both
