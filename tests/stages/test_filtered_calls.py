"""The filter and the views agree with plain loops over the rows."""

from collections import Counter
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from toolformer_dag.lane import Lane
from toolformer_dag.stages.filtered_calls import filtered_calls
from toolformer_dag.stages.schema import columns
from toolformer_dag.storage.errors import DamagedPartition, MissingPartition
from toolformer_dag.storage.lake import Lake
from toolformer_dag.storage.warehouse import build, query
from toolformer_dag.tools.registry import load_tool
from toolformer_dag.tools.runner import ToolLimits

SHARDS = ("one", "two")
Row = dict[str, Any]

calls = st.fixed_dictionaries(
    {
        "shard": st.sampled_from(SHARDS),
        "digest": st.sampled_from("abc"),
        "segment": st.integers(0, 1),
        "position": st.integers(0, 2),
        "sample": st.integers(0, 2),
        "delta": st.one_of(st.none(), st.sampled_from([-1.0, 0.0, 0.5, 0.75, 1.0, 2.5])),
        "reason": st.sampled_from([None, None, None, "tool_keeps_out"]),
    }
)


def unique(rows: Sequence[Row]) -> list[Row]:
    """One row per key; a call without losses has a reason."""
    found = {(r["shard"], r["digest"], r["segment"], r["position"], r["sample"]): r for r in rows}
    return [{**r, "reason": r["reason"] or ("does_not_fit" if r["delta"] is None else None)} for r in found.values()]


def lane(tau_f: float) -> Lane:
    return Lane(load_tool("calculator", {}), tau_s=0.0, k=1, m=1, tau_f=tau_f, limits=ToolLimits())


def lake_with(folder: Path, rows: Sequence[Row]) -> Lake:
    lake = Lake(folder)
    for shard in SHARDS:
        made = [{**row, "tool": "calculator", "input": "1", "result": "1"} for row in rows if row["shard"] == shard]
        lake.table("calculator/loss_deltas").publish(shard, [pl.DataFrame(made, schema=columns("loss_deltas"))], {})
    return lake


def kept_slowly(rows: Sequence[Row], tau_f: float) -> list[Row]:
    """The rules one after the other; without the limit on examples."""
    home = {row["digest"]: min(r["shard"] for r in rows if r["digest"] == row["digest"]) for row in rows}
    good = [r for r in rows if r["shard"] == home[r["digest"]] and r["reason"] is None and r["delta"] >= tau_f]
    good.sort(key=lambda r: (r["digest"], r["segment"], r["position"], -r["delta"], r["sample"]))
    return [next(group) for _, group in groupby(good, key=lambda r: (r["digest"], r["segment"], r["position"]))]


def keys(rows: Sequence[Row]) -> list[tuple[Any, ...]]:
    return [tuple(r[name] for name in ("shard", "digest", "segment", "position", "sample", "delta")) for r in rows]


@settings(max_examples=12, deadline=None)
@given(st.lists(calls, max_size=30).map(unique), st.sampled_from([-2.0, 0.0, 0.6, 1.0]))
def test_the_filter_and_the_views_agree_with_plain_loops(
    tmp_path_factory: pytest.TempPathFactory, rows: list[Row], tau_f: float
) -> None:
    folder = tmp_path_factory.mktemp("lake")
    lake, expected = lake_with(folder, rows), kept_slowly(rows, tau_f)
    report = filtered_calls(lake, lane(tau_f), SHARDS, examples_per_tool=1000)
    kept = lake.table("calculator/filtered_calls").read("all")
    assert keys(kept.to_dicts()) == keys(expected)
    assert kept.height + sum(report.rejections.values()) == len(rows)
    build(lake, ["calculator"], SHARDS, folder / "w.duckdb")
    at = query(folder / "w.duckdb", f"FROM kept_at({tau_f}) ORDER BY digest, segment, position")
    assert keys(at.to_dicts()) == keys(expected)
    for _, threshold, count, texts in query(folder / "w.duckdb", "FROM filter_statistics").iter_rows():
        wanted = kept_slowly(rows, threshold)
        assert (count, texts) == (len(wanted), len({(r["digest"], r["segment"]) for r in wanted}))


def test_every_call_that_goes_has_a_reason(tmp_path: Path) -> None:
    place = {"shard": "one", "digest": "a", "segment": 0, "reason": None}
    rows = [
        {**place, "position": 0, "sample": 0, "delta": 1.0},
        {**place, "position": 0, "sample": 1, "delta": 0.9},
        {**place, "position": 1, "sample": 0, "delta": 0.1},
        {**place, "position": 2, "sample": 0, "delta": None, "reason": "does_not_fit"},
        {**place, "position": 3, "sample": 0, "delta": 3.0, "reason": "tool_keeps_out"},
        {**place, "shard": "two", "position": 0, "sample": 0, "delta": 1.0},
        {**place, "segment": 1, "position": 0, "sample": 0, "delta": 1.0},
    ]
    report = filtered_calls(lake_with(tmp_path, rows), lane(0.5), SHARDS, examples_per_tool=1)
    reasons = ("not_best_at_position", "below_tau_f", "does_not_fit", "tool_keeps_out", "duplicate_document")
    assert report.rejections == Counter([*reasons, "beyond_examples"])
    assert report.rows == 1


def test_a_shard_s_name_is_no_column(tmp_path: Path) -> None:
    place = {"shard": "segment=7", "digest": "a", "position": 0, "sample": 0, "delta": 1.0, "reason": None}
    rows = [{**place, "segment": segment, "tool": "calculator", "input": "1", "result": "1"} for segment in (0, 1)]
    lake = Lake(tmp_path)
    lake.table("calculator/loss_deltas").publish("segment=7", [pl.DataFrame(rows, schema=columns("loss_deltas"))], {})
    filtered_calls(lake, lane(0.5), ["segment=7"], examples_per_tool=9)
    assert lake.table("calculator/filtered_calls").read("all")["segment"].to_list() == [0, 1]
    build(lake, ["calculator"], ["segment=7"], tmp_path / "w.duckdb")
    assert query(tmp_path / "w.duckdb", "SELECT segment FROM loss_deltas ORDER BY 1").rows() == [(0,), (1,)]


def test_a_threshold_that_keeps_the_same_calls_gives_the_same_data_version(tmp_path: Path) -> None:
    row = {"shard": "one", "digest": "a", "segment": 0, "position": 0, "sample": 0, "delta": 1.0, "reason": None}
    lake = lake_with(tmp_path, [row])
    versions = [filtered_calls(lake, lane(tau), SHARDS, examples_per_tool=9).data_version for tau in (0.5, 0.75, 1.5)]
    assert versions[0] == versions[1] != versions[2]
    assert lake.table("calculator/filtered_calls").record("all")["settings"]["tau_f"] == 1.5


def test_a_lane_without_shards_keeps_nothing(tmp_path: Path) -> None:
    assert filtered_calls(Lake(tmp_path), lane(0.5), [], examples_per_tool=9).rows == 0


def test_a_missing_or_damaged_partition_is_named(tmp_path: Path) -> None:
    lake = lake_with(tmp_path, [])
    with pytest.raises(MissingPartition, match="'three'"):
        filtered_calls(lake, lane(0.5), ["one", "three"], examples_per_tool=9)
    Path(lake.table("calculator/loss_deltas").files("two")[0]).write_bytes(b"PAR1")
    with pytest.raises(DamagedPartition, match="'two'"):
        filtered_calls(lake, lane(0.5), SHARDS, examples_per_tool=9)
