"""Stored rows that were damaged, and two processes at the same shard."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from toolformer_dag.storage.errors import DamagedPartition

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
