"""Nothing is paid for twice, and what is reused equals what would be computed anew."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from shutil import copytree
from typing import TYPE_CHECKING

import polars as pl
import pytest
from polars.testing import assert_frame_equal

from toolformer_dag.stages.errors import StaleInput

if TYPE_CHECKING:
    from conftest import Line

TABLES = ("heuristic_subset", "scored_candidates", "tool_results", "loss_deltas", "filtered_calls")
NewLine = Callable[..., "Line"]


def tables(line: "Line") -> dict[str, pl.DataFrame]:
    """Everything that was published, without what measures time."""
    found = {f"calculator/{name}": line.lake.table(f"calculator/{name}") for name in TABLES}
    found["training/augmented_corpus"] = line.lake.table("training/augmented_corpus")
    return {
        f"{name}/{partition}": table.read(partition).drop("seconds", strict=False)
        for name, table in found.items()
        for partition in table.partitions()
    }


def assert_same(one: "Line", other: "Line") -> None:
    """Row for row; a loss may differ in its last bits, because it went through the model in another batch."""
    rows, others = tables(one), tables(other)
    assert rows.keys() == others.keys()
    for name, frame in rows.items():
        assert_frame_equal(frame, others[name], abs_tol=1e-5)


def set_lane(line: "Line", **changes: object) -> None:
    line.lane = replace(line.lane, **changes)


def tokens(reports: dict[str, object]) -> int:
    return sum(sum(report.tokens.values()) for report in reports.values())  # type: ignore[attr-defined]


def test_a_second_run_computes_nothing_and_loads_no_model(new_line: NewLine) -> None:
    line = new_line()
    first = line.run()
    assert line.work(first, "samples")[0] > 50 and line.work(first, "losses")[0] > 20
    before = line.engines
    second = line.run()
    assert line.engines == before
    assert (tokens(second), sum(report.computed for report in second.values())) == (0, 0)
    assert {k: r.data_version for k, r in first.items()} == {k: r.data_version for k, r in second.items()}


def test_a_threshold_of_the_filter_costs_no_token_and_no_call(new_line: NewLine) -> None:
    line = new_line()
    line.run()
    set_lane(line, tau_f=0.1)
    reports = line.run()
    assert (tokens(reports), sum(report.computed for report in reports.values())) == (0, 0)
    fresh = new_line()
    set_lane(fresh, tau_f=0.1)
    fresh.run()
    assert_same(line, fresh)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ({"m": 2}, {"m": 5}),
        ({"k": 1}, {"k": 4}),
        ({"tau_s": 0.4, "k": 6}, {"tau_s": 0.05, "k": 6}),
        ({"tau_s": 0.3, "k": 2, "m": 2}, {"tau_s": 0.1, "k": 3, "m": 3}),
    ],
)
def test_more_samples_cost_exactly_the_difference(
    new_line: NewLine, old: dict[str, float], new: dict[str, float]
) -> None:
    line, fresh = new_line(), new_line()
    set_lane(line, **old)
    stored = line.work(line.run(), "samples")
    set_lane(line, **new)
    reports = line.run()
    set_lane(fresh, **new)
    whole = fresh.run()
    total = sum(fresh.work(whole, "samples"))
    computed, reused = line.work(reports, "samples")
    assert computed + reused == total
    assert line.work(reports, "texts")[0] == 0 and reports["scored_candidates/one"].tokens["positions"] == 0
    assert reused == total - computed >= sum(stored)
    assert computed + stored[0] == fresh.work(whole, "samples")[0]
    assert_same(line, fresh)


@pytest.mark.parametrize("fewer", [{"m": 1}, {"k": 1}, {"tau_s": 0.5}])
def test_fewer_samples_cost_nothing(new_line: NewLine, fewer: dict[str, float]) -> None:
    line, fresh = new_line(), new_line()
    line.run()
    before = line.engines
    set_lane(line, **fewer)
    reports = line.run()
    assert (line.engines, sum(report.computed for report in reports.values())) == (before, 0)
    set_lane(fresh, **fewer)
    fresh.run()
    assert_same(line, fresh)


def test_another_chunk_size_or_path_of_the_same_model_computes_nothing(new_line: NewLine, tmp_path: Path) -> None:
    line = new_line()
    line.run()
    line.model_folder = copytree(line.model_folder, tmp_path / "moved")
    line.chunk_texts = 1
    assert sum(report.computed for report in line.run().values()) == 0


@pytest.mark.parametrize("what", ["model", "dtype"])
def test_another_model_shares_no_row(new_line: NewLine, other_model_folder: Path, what: str) -> None:
    line, fresh = new_line(["one"]), new_line(["one"])
    line.run()
    for changed in (line, fresh):
        changed.model_folder = other_model_folder if what == "model" else changed.model_folder
        changed.dtype = "bfloat16" if what == "dtype" else changed.dtype
    reports, whole = line.run(), fresh.run()
    for kind in ("texts", "samples", "losses"):
        assert line.work(reports, kind) == fresh.work(whole, kind) and line.work(reports, kind)[1] == 0
    assert_same(line, fresh)


def test_another_prompt_samples_anew_but_losses_of_the_same_calls_stay(new_line: NewLine) -> None:
    line = new_line(["one"])
    line.run()
    line.lane.tool.prompt = "Say.\n"
    reports = line.run()
    assert line.work(reports, "texts")[1] == 0 and line.work(reports, "samples")[1] == 0
    assert line.work(reports, "losses")[1] > 0
    fresh = new_line(["one"])
    fresh.lane.tool.prompt = "Say.\n"
    fresh.run()
    assert_same(line, fresh)


def test_another_version_of_the_tool_runs_its_calls_again_and_nothing_else(new_line: NewLine) -> None:
    line = new_line(["one"])
    first = line.run()
    line.lane.tool.version = "another"
    reports = line.run()
    assert line.work(reports, "calls") == line.work(first, "calls")
    assert tokens(reports) == 0


def test_another_way_of_sampling_keeps_the_positions(new_line: NewLine) -> None:
    line = new_line(["one"])
    line.run()
    line.sampling = replace(line.sampling, seed=1)
    reports = line.run()
    assert line.work(reports, "texts")[0] == 0
    assert line.work(reports, "samples")[1] == 0


def test_shards_and_calls_of_other_shards_are_shared(new_line: NewLine) -> None:
    line = new_line(["one"])
    line.run()
    line.shards["copy"] = line.shards["one"]
    reports = line.run()
    assert sum(report.computed for report in reports.values()) == 0
    assert reports["filtered_calls"].rejections["duplicate_document"] == reports["loss_deltas/copy"].rows
    assert reports["augmented_corpus"].rows > 0


def test_a_larger_cap_adds_texts_and_keeps_those_there(new_line: NewLine) -> None:
    line, fresh = new_line(["one"]), new_line(["one"])
    line.texts_per_shard = 4
    capped = line.run()
    assert capped["heuristic_subset/one"].rows == 4
    assert capped["heuristic_subset/one"].rejections["not_sampled"] == 8
    line.texts_per_shard = 9
    assert line.work(line.run(), "texts") == (5, 4)
    fresh.texts_per_shard = 9
    fresh.run()
    assert_same(line, fresh)


def test_calls_of_texts_that_were_cut_anew_are_refused(new_line: NewLine) -> None:
    """The same segment numbers then hold other texts, and positions in them mean nothing."""
    line = new_line(["one"])
    line.run()
    line.max_tokens = 20
    line.stage("heuristic_subset", "one")
    for stage in ("tool_results", "loss_deltas", "swapped_results"):
        with pytest.raises(StaleInput, match="texts that are gone; materialize calculator"):
            line.stage(stage, "one")
    line.run()
    assert line.stage("swapped_results", "one").rows > 0
