"""Stored rows that were damaged, and two processes at the same shard."""

import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import duckdb
import polars as pl
import pytest

from toolformer_dag.stages.tool_results import KEY, RESULTS, settings
from toolformer_dag.storage.errors import DamagedPartition
from toolformer_dag.storage.rows import RowStore
from toolformer_dag.tools.built_in.calculator import Calculator
from toolformer_dag.tools.tool import LOST, ToolCall, ToolResult

if TYPE_CHECKING:
    from conftest import Line

CHILD = Path(__file__).with_name("kill_child.py")


@pytest.mark.parametrize(
    ("stage", "rows", "kind"),
    [
        ("scored_candidates", "samples", "samples"),
        ("tool_results", "results", "calls"),
        ("loss_deltas", "losses", "losses"),
    ],
)
def test_stored_rows_that_are_cut_short_are_reported_and_computed_again(
    new_line: "Callable[..., Line]", stage: str, rows: str, kind: str
) -> None:
    line = new_line(["one"])
    before = line.run()[f"{stage}/one"]
    cut = min((line.folder / "lake" / "calculator" / rows).rglob("*.parquet"))
    cut.write_bytes(cut.read_bytes()[:100])
    report = line.stage(stage, "one")
    assert len(report.damaged) == 1 and cut.name in report.damaged[0]
    computed, reused = report.work[kind]
    assert computed > 0 and reused > 0 and computed + reused == sum(before.work[kind])
    assert report.rows == before.rows
    again = line.stage(stage, "one")
    assert (again.computed, again.damaged, again.data_version) == (0, (), report.data_version)


def test_results_whose_pages_are_damaged_are_run_again_and_none_is_missing(new_line: "Callable[..., Line]") -> None:
    line = new_line(["one"])
    before = line.run()["tool_results/one"]
    part = min((line.folder / "lake/calculator/results").rglob("*.parquet"))
    flip(part, "result")
    report = line.stage("tool_results", "one")
    assert len(report.damaged) == 1 and part.name in report.damaged[0]
    assert (report.rows, report.data_version) == (before.rows, before.data_version)
    assert 0 < report.computed < before.rows
    assert line.stage("loss_deltas", "one").computed == 0


def flip(part: Path, column: str) -> None:
    """Turns every bit of a column's pages; the keys and the footer stay readable."""
    metadata = duckdb.from_query("SELECT * FROM parquet_metadata(?)", params=[str(part)])
    where = f"path_in_schema = '{column}'"
    found = metadata.filter(where).select("least(data_page_offset, dictionary_page_offset), total_compressed_size")
    [(begin, size)] = found.fetchall()
    content = bytearray(part.read_bytes())
    content[begin : begin + size] = bytes(byte ^ 0xFF for byte in content[begin : begin + size])
    part.write_bytes(content)


class Raced(Calculator):
    """Loses the first call that it gets, to which another process has the answer by then."""

    others: RowStore
    lost: ToolCall | None = None

    def run(self, calls: Sequence[ToolCall]) -> list[ToolResult]:
        if self.lost is None:
            self.lost = calls[0]
            self.others.append(pl.DataFrame([(calls[0].input, "", "42", None, 0.0, None)], RESULTS, orient="row"))
        if self.lost in calls:
            raise OSError
        return super().run(calls)


def test_a_call_that_is_lost_here_and_answered_by_another_process_has_one_row(new_line: "Callable[..., Line]") -> None:
    line = new_line(["one"])
    for stage in ("raw_shards", "heuristic_subset", "scored_candidates"):
        line.stage(stage, "one")
    tool = Raced(line.lane.tool.key, line.lane.tool.options, line.lane.tool.prompt)
    line.lane = replace(line.lane, tool=tool)
    tool.others = line.lake.rows("calculator/results", settings(line.lane), KEY, RESULTS)
    report = line.stage("tool_results", "one")
    rows = line.lake.table("calculator/tool_results").read("one")
    assert tool.lost and rows.select(KEY).is_unique().all()
    assert rows.filter(input=tool.lost.input)["result"].to_list() == ["42"]
    assert not [reason for reason in report.rejections if reason.startswith(LOST)]


def test_a_damaged_partition_stops_the_next_stage_and_is_repaired_for_nothing(new_line: "Callable[..., Line]") -> None:
    line = new_line(["one"])
    before = line.run()["scored_candidates/one"]
    cut = Path(line.lake.table("calculator/scored_candidates").files("one")[0])
    cut.write_bytes(cut.read_bytes()[:-1])
    with pytest.raises(DamagedPartition, match=r"materialize calculator/scored_candidates for 'one' again"):
        line.stage("tool_results", "one")
    repaired = line.stage("scored_candidates", "one")
    assert (repaired.computed, repaired.data_version) == (0, before.data_version)
    assert line.stage("tool_results", "one").computed == 0


def test_two_processes_at_the_same_shard_give_what_one_gives(new_line: "Callable[..., Line]") -> None:
    line, alone = new_line(["one"]), new_line(["one"])
    line.chunk_texts = alone.chunk_texts = 2
    expected = alone.run()["scored_candidates/one"]
    for stage in ("raw_shards", "heuristic_subset"):
        line.stage(stage, "one")
    command = [sys.executable, str(CHILD), str(line.folder), str(line.model_folder), "scored_candidates", "one"]
    children = [subprocess.Popen(command, stdout=subprocess.DEVNULL) for _ in range(2)]
    assert [child.wait() for child in children] == [0, 0]
    report = line.stage("scored_candidates", "one")
    assert (report.computed, report.data_version) == (0, expected.data_version)
