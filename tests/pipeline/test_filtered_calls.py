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

from tests.pipeline.conftest import frame_of, hand_made, publish, update_one
from toolformer_dag.lake.table import DamagedPart
from toolformer_dag.lake.warehouse import build, query
from toolformer_dag.pipeline.stage import TableOutput
from toolformer_dag.pipeline.stages import warehouse_tables
from toolformer_dag.pipeline.update import TableReport

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


SCORED, KEPT = "calculator/loss_deltas", "calculator/filtered_calls"
Outputs = dict[str, TableOutput]


def lane(folder: Path, tau_f: float, examples: int = 1000, shards: Sequence[str] = SHARDS) -> Outputs:
    sections = {"training": {"examples_per_tool": examples}}
    return hand_made(folder, "calculator", shards=shards, tau_f=tau_f, sections=sections)


def scored(folder: Path, rows: Sequence[Row], tau_f: float, examples: int = 1000) -> Outputs:
    """Publish scored calls."""
    outputs = lane(folder, tau_f, examples)
    for shard in SHARDS:
        made = [{**row, "tool": "calculator", "input": "1", "result": "1"} for row in rows if row["shard"] == shard]
        publish_texts(outputs, shard, made)
        publish(outputs[SCORED], shard, made)
    return outputs


def publish_texts(outputs: Outputs, shard: str, rows: Sequence[Row]) -> None:
    """Publish the texts of scored calls; two documents have one text where their digests differ in case alone."""
    places = {(row["digest"], row["segment"]) for row in rows}
    made = [
        {"shard": shard, "digest": digest, "segment": segment, "text_digest": f"{digest.lower()}{segment}"}
        for digest, segment in sorted(places)
    ]
    publish(outputs["calculator/heuristic_subset"], shard, made)


def filtered(outputs: Outputs) -> TableReport:
    return update_one(outputs, KEPT)


def kept_rows(outputs: Outputs) -> pl.DataFrame:
    """Return the kept calls of all shards."""
    return outputs[KEPT].table.scan().collect()


def warehouse(outputs: Outputs, folder: Path) -> Path:
    build(
        outputs[SCORED].plan.lake,
        warehouse_tables(list(outputs.values())),
        {"calculator": "Calculator"},
        folder / "w.duckdb",
    )
    return folder / "w.duckdb"


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
    outputs, expected = scored(folder, rows, tau_f), kept_slowly(rows, tau_f)
    report = filtered(outputs)
    kept = kept_rows(outputs)
    assert keys(kept.sort("digest", "segment", "position").to_dicts()) == keys(expected)
    assert kept.height + sum(report.rejections.values()) == len(rows)
    assert not any(report.violations.values())
    database = warehouse(outputs, folder)
    at = query(database, f"FROM kept_at({tau_f}) ORDER BY digest, segment, position")
    assert keys(at.to_dicts()) == keys(expected)
    for _, threshold, count, texts in query(database, "FROM filter_statistics").iter_rows():
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
    report = filtered(scored(tmp_path, rows, 0.5, examples=1))
    reasons = ("not_best_at_position", "below_tau_f", "does_not_fit", "tool_keeps_out", "duplicate_document")
    assert report.rejections == Counter([*reasons, "beyond_examples"])
    assert report.rows == {"one": 1, "two": 0}


def test_equal_texts_fare_equally_and_count_once_towards_the_limit(tmp_path: Path) -> None:
    place = {"shard": "one", "segment": 0, "position": 0, "sample": 0, "delta": 1.0, "reason": None}
    for limit, kept in ((1, ["A", "a"]), (2, ["A", "B", "a"]), (3, ["A", "B", "a", "c"])):
        rows = [{**place, "digest": digest} for digest in "AacB"]
        outputs = scored(tmp_path / str(limit), rows, 0.5, examples=limit)
        filtered(outputs)
        assert kept_rows(outputs)["digest"].to_list() == kept


def test_a_shard_s_name_is_no_column(tmp_path: Path) -> None:
    place = {"shard": "segment=7", "digest": "a", "position": 0, "sample": 0, "delta": 1.0, "reason": None}
    rows = [{**place, "segment": segment, "tool": "calculator", "input": "1", "result": "1"} for segment in (0, 1)]
    outputs = lane(tmp_path, 0.5, shards=["segment=7"])
    publish_texts(outputs, "segment=7", rows)
    publish(outputs[SCORED], "segment=7", rows)
    filtered(outputs)
    assert kept_rows(outputs)["segment"].to_list() == [0, 1]
    found = query(warehouse(outputs, tmp_path), "SELECT segment FROM loss_deltas ORDER BY 1")
    assert found.rows() == [(0,), (1,)]


def test_a_threshold_that_keeps_the_same_calls_gives_the_same_data_version(tmp_path: Path) -> None:
    row = {"shard": "one", "digest": "a", "segment": 0, "position": 0, "sample": 0, "delta": 1.0, "reason": None}
    scored(tmp_path, [row], 0.5)
    reports = [filtered(lane(tmp_path, tau)) for tau in (0.5, 0.75, 1.5)]
    versions = [report.data_version for report in reports]
    assert versions[0] == versions[1] != versions[2]
    assert [report.unchanged for report in reports] == [False, False, False]
    assert reports[1].differences.lines() == ["settings.tau_f: 0.5 -> 0.75"]
    assert lane(tmp_path, 1.5)[KEPT].table.record("one")["settings"]["tau_f"] == 1.5


def test_a_lane_without_calls_keeps_nothing(tmp_path: Path) -> None:
    assert filtered(scored(tmp_path, [], 0.5)).rows == {"one": 0, "two": 0}


def test_a_damaged_shard_is_named_and_the_kept_calls_stay(tmp_path: Path) -> None:
    outputs = scored(tmp_path, [], 0.5)
    filtered(outputs)
    Path(outputs[SCORED].table.files("two")[0]).write_bytes(b"PAR1")
    with pytest.raises(DamagedPart, match="'two'"):
        filtered(lane(tmp_path, 0.6))
    assert kept_rows(outputs).height == 0


def test_a_kept_call_below_the_threshold_would_be_a_violation(tmp_path: Path) -> None:
    [check] = lane(tmp_path, 0.5)[KEPT].stage.checks.values()
    kept = frame_of(lane(tmp_path, 0.5)[KEPT], [{"delta": 0.5}, {"delta": 0.4}])
    assert check(kept, lane(tmp_path, 0.5)[KEPT]) == 1
