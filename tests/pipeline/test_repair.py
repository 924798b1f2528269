"""Stages that were killed, parts that were damaged, calls that were lost: the tables of an undisturbed run again."""

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import polars as pl
import pytest

from tests.pipeline.conftest import Lane, Line, NewLine, computed, cost, tokens
from toolformer_dag.lake.manifest import MANIFESTS_FOLDER
from toolformer_dag.lake.row_store import RowStore
from toolformer_dag.lake.table import DamagedPart, MissingPart
from toolformer_dag.pipeline.tool_results import RESULT_KEY_COLUMNS, RESULT_SCHEMA, collect_result_settings
from toolformer_dag.settings.tool_settings import ToolLimits
from toolformer_dag.tools.built_in.calculator import Calculator
from toolformer_dag.tools.tool import LOST_REASON_PREFIX, ToolCall, ToolResult

BEFORE = ("raw_shards", "heuristic_subset", "scored_candidates")


def withdrawn(line: Line, stage: str) -> None:
    """Take a part away, so that it is made anew from stored rows."""
    line.output(stage).table.withdraw_part("one")


@pytest.mark.parametrize(
    ("stage", "rows", "kind"),
    [
        ("scored_candidates", "samples", "samples"),
        ("tool_results", "results", "calls"),
        ("loss_deltas", "losses", "losses"),
    ],
)
def test_stored_rows_that_are_cut_short_are_reported_and_computed_again(
    finished: NewLine, stage: str, rows: str, kind: str
) -> None:
    line = finished("one")
    before = line.output(stage).table.read_pointer("one")
    withdrawn(line, stage)
    total = sum(cost(line.update(stage), kind))
    cut = min((line.folder / "lake" / "calculator" / rows).rglob("*.parquet"))
    cut.write_bytes(cut.read_bytes()[:100])
    withdrawn(line, stage)
    report = line.update(stage)[stage]
    [damaged] = report.work.damage_messages
    assert cut.name in damaged and "set aside" in damaged
    again, reused = cost({stage: report}, kind)
    assert again > 0 and reused > 0 and again + reused == total
    assert report.row_count_by_part["one"] == before.row_count
    withdrawn(line, stage)
    third = line.update(stage)[stage]
    assert (third.computed_row_count, third.work.damage_messages, third.data_version) == (0, (), report.data_version)


def test_tables_without_manifests_are_made_again_at_no_token(finished: NewLine) -> None:
    line = finished("one", "two")
    before = line.tables()
    shutil.rmtree(line.lake.root / MANIFESTS_FOLDER)
    reports = line.update()
    assert (tokens(reports), line.engines) == (0, 0)
    after = line.tables()
    assert after.keys() == before.keys()
    assert all(after[name].equals(before[name]) for name in before)


class Raced(Calculator):
    """Loses the first call that it gets, to which another process has the answer by then."""

    others: RowStore
    lost: ToolCall | None = None

    def run(self, calls: Sequence[ToolCall]) -> list[ToolResult]:
        if self.lost is None:
            self.lost = calls[0]
            self.others.append_rows(
                pl.DataFrame([(calls[0].input, "", "42", None, 0.0, None)], RESULT_SCHEMA, orient="row")
            )
        if self.lost in calls:
            raise OSError
        return super().run(calls)


def test_a_call_that_is_lost_here_and_answered_by_another_process_has_one_row(new_line: NewLine) -> None:
    line = new_line("one")
    line.update(*BEFORE)
    raced: list[Raced] = []

    def with_race(lane: Lane) -> Lane:
        tool = Raced(lane.tool.key, lane.tool.options, lane.tool.prompt)
        tool.others = line.lake.open_row_store(
            "calculator/results", collect_result_settings(replace(lane, tool=tool)), RESULT_KEY_COLUMNS, RESULT_SCHEMA
        )
        raced.append(tool)
        return replace(lane, tool=tool, limits=lane.limits.model_copy(update={"backoff_s": 0.0}))

    line.adapt = with_race
    report = line.update("tool_results")["tool_results"]
    [lost] = [tool.lost for tool in raced if tool.lost]
    rows = line.read("tool_results")
    assert rows.select(RESULT_KEY_COLUMNS).is_unique().all()
    assert rows.filter(input=lost.input)["result"].to_list() == ["42"]
    assert not [reason for reason in report.rejections_by_reason if reason.startswith(LOST_REASON_PREFIX)]


class Failing(Calculator):
    """Fails at its first call, and never again."""

    batch_size = 1
    failed = False

    def run(self, calls: Sequence[ToolCall]) -> list[ToolResult]:
        if not Failing.failed:
            Failing.failed = True
            raise RuntimeError("the backend fell over")
        return super().run(calls)


def test_a_call_that_was_lost_is_tried_again_and_the_others_are_not(new_line: NewLine) -> None:
    line = new_line("one")
    line.update(*BEFORE)

    def failing(lane: Lane) -> Lane:
        tool = Failing(lane.tool.key, lane.tool.options, lane.tool.prompt)
        return replace(lane, tool=tool, limits=ToolLimits(retries=0))

    line.adapt = failing
    first = line.update("tool_results")["tool_results"]
    assert [reason for reason in first.rejections_by_reason if reason.startswith(LOST_REASON_PREFIX)]
    second = line.update("tool_results")["tool_results"]
    assert second.reasons.is_retry_only
    assert "calls were lost" in second.reasons.lines[0]
    assert (second.work.computed_rows_by_kind["calls"], second.work.reused_rows_by_kind["calls"]) == (
        1,
        first.work.computed_rows_by_kind["calls"] - 1,
    )
    assert not [reason for reason in second.rejections_by_reason if reason.startswith(LOST_REASON_PREFIX)]
    assert line.update("tool_results")["tool_results"].is_unchanged


@pytest.mark.parametrize("damage", ["cut short", "gone", "no pointer"])
def test_a_damaged_part_is_made_again_from_stored_rows(finished: NewLine, damage: str) -> None:
    line = finished("one")
    table = line.output("scored_candidates").table
    before = table.read_pointer("one").data_version
    file = Path(table.list_part_files("one")[0])
    if damage == "cut short":
        file.write_bytes(file.read_bytes()[:-1])
    elif damage == "gone":
        file.unlink()
    else:
        content = bytearray(table.manifest_path.read_bytes())
        content[-9] ^= 1
        table.manifest_path.write_bytes(content)
    with pytest.raises(DamagedPart, match=r"calculator/scored_candidates, shard 'one': .*stale --run"):
        line.update("tool_results")
    reports = line.update()
    [reason] = reports["scored_candidates"].reasons.lines
    assert "one" in reason
    assert [name for name, report in reports.items() if not report.is_unchanged] == ["scored_candidates"]
    assert computed(reports) == 0 and table.read_pointer("one").data_version == before


def test_a_part_whose_input_was_never_made_names_it(new_line: NewLine) -> None:
    line = new_line("one")
    line.update("raw_shards")
    with pytest.raises(MissingPart, match="calculator/heuristic_subset has no rows of shard 'one'"):
        line.update("swapped_results")


ROOT = Path(__file__).parents[2]
STAGES = ("raw_shards", "heuristic_subset", "scored_candidates", "tool_results", "loss_deltas")
KINDS = {"scored_candidates": "samples", "tool_results": "calls", "loss_deltas": "losses"}
SMALL = {"execution__chunk_texts": 2, "execution__chunk_calls": 2}


def start(line: Line, stage: str) -> "subprocess.Popen[str]":
    """Start bringing a table up to date in another process, in chunks of two."""
    command = [sys.executable, "-m", "tests.pipeline.kill_child", str(line.folder), stage]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, cwd=ROOT)


def killed(line: Line, stage: str, chunks: int, wait: float) -> int:
    """Start the stage, kill it `wait` seconds after its chunk number `chunks`; return the exit status."""
    with start(line, stage) as child:
        assert child.stdout is not None
        for _ in range(chunks):
            child.stdout.readline()
        time.sleep(wait)
        os.kill(child.pid, signal.SIGKILL)
        return child.wait()


@pytest.fixture(scope="module")
def undisturbed(new_line: NewLine) -> Line:
    """Run a line in chunks of two."""
    line = new_line("one")
    line.set(**SMALL)
    line.update()
    return line


@pytest.mark.long
@pytest.mark.parametrize(
    ("stage", "chunks", "wait"), [("scored_candidates", 2, 0.01), ("tool_results", 1, 0.0), ("loss_deltas", 3, 0.02)]
)
def test_a_killed_stage_goes_on_where_it_was(
    new_line: NewLine, undisturbed: Line, stage: str, chunks: int, wait: float
) -> None:
    line = new_line("one")
    line.set(**SMALL)
    line.update(*STAGES[: STAGES.index(stage)])
    assert killed(line, stage, chunks, wait) == -signal.SIGKILL
    assert not line.output(stage).table.has_part("one")
    report = line.update(stage)[stage]
    made, reused = cost({stage: report}, KINDS[stage])
    assert reused >= chunks and made > 0
    line.update()
    rows = line.tables()
    others = undisturbed.tables()
    assert rows.keys() == others.keys()
    assert all(rows[name].equals(others[name]) for name in others)
