"""The filter and the views agree with plain loops over the rows."""

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.pipeline.conftest import TableOutput, TableReport, Worker, hand_made, publish, update_one, warehouse
from toolformer_dag.computing.stage import ByParts
from toolformer_dag.lake.table import DamagedPart
from toolformer_dag.lake.warehouse import query
from toolformer_dag.pipeline import filtered_calls

SHARDS = ("one", "two")
SHARD_OF = {"a": "one", "b": "two", "c": "one"}
Row = dict[str, Any]

calls = st.fixed_dictionaries(
    {
        "digest": st.sampled_from(sorted(SHARD_OF)),
        "segment": st.integers(0, 1),
        "position": st.integers(0, 2),
        "sample": st.integers(0, 2),
        "delta": st.one_of(st.none(), st.sampled_from([-1.0, 0.0, 0.5, 0.75, 1.0, 2.5])),
        "reason": st.sampled_from([None, None, None, "tool_keeps_out"]),
    }
).map(lambda row: {**row, "shard": SHARD_OF[row["digest"]]})


def unique(rows: Sequence[Row]) -> list[Row]:
    """One row per key; a call without losses has a reason."""
    found = {(r["shard"], r["digest"], r["segment"], r["position"], r["sample"]): r for r in rows}
    return [{**r, "reason": r["reason"] or ("does_not_fit" if r["delta"] is None else None)} for r in found.values()]


SCORED = "calculator/loss_deltas"
KEPT = "calculator/filtered_calls"
LANES = ("calculator", "calendar", "machine_translation", "question_answering", "wiki_search")
Outputs = dict[str, TableOutput]


def tables(folder: Path, tau_f: Mapping[str, float], examples: int = 1000, shards: Sequence[str] = SHARDS) -> Outputs:
    sections = {
        "training": {"examples_per_tool": examples},
        "tools": {lane: {"tau_f": at} for lane, at in tau_f.items()},
    }
    return hand_made(folder, shards=shards, sections=sections)


def lane(folder: Path, tau_f: float, examples: int = 1000, shards: Sequence[str] = SHARDS) -> Outputs:
    return tables(folder, {"calculator": tau_f}, examples, shards)


def scored(folder: Path, rows: Sequence[Row], tau_f: float, examples: int = 1000) -> Outputs:
    outputs = lane(folder, tau_f, examples)
    publish_calls(outputs, "calculator", rows)
    return outputs


def publish_calls(outputs: Outputs, lane: str, rows: Sequence[Row], shards: Sequence[str] = SHARDS) -> None:
    """Publish scored calls and their texts; two documents have one text where their digests differ in case alone."""
    for shard in shards:
        made = [{**row, "tool": lane, "input": "1", "result": "1"} for row in rows if row["shard"] == shard]
        places = sorted({(row["digest"], row["segment"]) for row in made})
        texts = [
            {"tool": lane, "shard": shard, "digest": a, "segment": b, "text_digest": f"{a.lower()}{b}"}
            for a, b in places
        ]
        publish(outputs[f"{lane}/heuristic_subset"], shard, texts)
        publish(outputs[f"{lane}/loss_deltas"], shard, made)


def filtered(outputs: Outputs, lane: str = "calculator") -> TableReport:
    return update_one(outputs, f"{lane}/filtered_calls")


def kept_rows(outputs: Outputs, lane: str = "calculator") -> pl.DataFrame:
    """Return the kept calls of all shards."""
    return outputs[f"{lane}/filtered_calls"].table.scan_parts().collect()


def kept_slowly(rows: Sequence[Row], tau_f: float) -> list[Row]:
    """The rules one after the other; without the limit on examples."""
    good = [r for r in rows if r["reason"] is None and r["delta"] >= tau_f]
    good.sort(key=lambda r: (r["digest"], r["segment"], r["position"], -r["delta"], r["sample"]))
    return [next(group) for _, group in groupby(good, key=lambda r: (r["digest"], r["segment"], r["position"]))]


def keys(rows: Sequence[Row]) -> list[tuple[Any, ...]]:
    return [tuple(r[name] for name in ("shard", "digest", "segment", "position", "sample", "delta")) for r in rows]


drawn = st.tuples(st.lists(calls, max_size=30).map(unique), st.sampled_from([-2.0, 0.0, 0.6, 1.0]))


@settings(max_examples=3)
@given(st.fixed_dictionaries(dict.fromkeys(LANES, drawn)))
def test_the_filter_and_the_views_agree_with_plain_loops(
    tmp_path_factory: pytest.TempPathFactory, drawn: dict[str, tuple[list[Row], float]]
) -> None:
    outputs = tables(tmp_path_factory.mktemp("lake"), {lane: tau_f for lane, (_, tau_f) in drawn.items()})
    for lane, (rows, tau_f) in drawn.items():
        publish_calls(outputs, lane, rows)
        report = filtered(outputs, lane)
        kept = kept_rows(outputs, lane)
        assert keys(kept.sort("digest", "segment", "position").to_dicts()) == keys(kept_slowly(rows, tau_f))
        assert kept.height + sum(report.rejections_by_reason.values()) == len(rows)
        assert not any(report.violations_by_check.values())
    database = warehouse(outputs)
    statistics = query(database, "FROM filter_statistics")
    for lane, (rows, tau_f) in drawn.items():
        at = query(database, f"FROM kept_at({tau_f}) WHERE tool = '{lane}' ORDER BY digest, segment, position")
        assert keys(at.to_dicts()) == keys(kept_slowly(rows, tau_f))
        for _, threshold, count, texts in statistics.filter(tool=lane).iter_rows():
            wanted = kept_slowly(rows, threshold)
            assert (count, texts) == (len(wanted), len({(r["digest"], r["segment"]) for r in wanted}))


def call_of_each_reason() -> dict[str | None, Row]:
    """A call for each reason at tau_f = 0.5 where one example is taken; None is the one that stays."""
    place = {"shard": "one", "digest": "a", "segment": 0, "sample": 0, "reason": None}
    return {
        None: {**place, "position": 0, "delta": 1.0},
        "not_best_at_position": {**place, "position": 0, "sample": 1, "delta": 0.9},
        "below_tau_f": {**place, "position": 1, "delta": 0.1},
        "does_not_fit": {**place, "position": 2, "delta": None, "reason": "does_not_fit"},
        "tool_keeps_out": {**place, "position": 3, "delta": 3.0, "reason": "tool_keeps_out"},
        "beyond_examples": {**place, "segment": 1, "position": 0, "delta": 1.0},
    }


def reasons_in(rows: pl.DataFrame) -> dict[tuple[Any, ...], str | None]:
    """By key of the call its reason."""
    return {row[:-1]: row[-1] for row in rows.select("segment", "position", "sample", "reason").iter_rows()}


def test_every_call_that_goes_has_a_reason_which_the_filter_stores_and_the_warehouse_shows(tmp_path: Path) -> None:
    calls = call_of_each_reason()
    outputs = scored(tmp_path, list(calls.values()), 0.5, examples=1)
    report = filtered(outputs)
    assert report.rejections_by_reason == Counter(reason for reason in calls if reason)
    assert report.row_count_by_part == {"one": 1, "two": 0}
    expected = {(row["segment"], row["position"], row["sample"]): reason for reason, row in calls.items()}
    [decided] = outputs[KEPT].sibling_tables
    assert reasons_in(decided.scan_parts().collect()) == expected
    shown = query(warehouse(outputs), "FROM decisions")
    assert reasons_in(shown) == expected
    assert shown.filter("kept")["reason"].to_list() == [None]


def test_a_rule_that_the_filter_alone_has_gives_its_reason_to_the_warehouse(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(filtered_calls, "SQL", filtered_calls.SQL.replace("'beyond_examples'", "'another_rule'"))
    outputs = scored(tmp_path, list(call_of_each_reason().values()), 0.5, examples=1)
    assert filtered(outputs).rejections_by_reason["another_rule"] == 1
    shown = query(warehouse(outputs), "SELECT segment, position FROM decisions WHERE reason = 'another_rule'")
    assert shown.rows() == [(1, 0)]


def test_reasons_that_an_earlier_release_did_not_store_are_stored_without_other_kept_calls(tmp_path: Path) -> None:
    outputs = scored(tmp_path, list(call_of_each_reason().values()), 0.5, examples=1)
    before = filtered(outputs)
    [decided] = outputs[KEPT].sibling_tables
    for shard in SHARDS:
        decided.withdraw_part(shard)
    after = filtered(outputs)
    assert after.reasons.lines == ("calculator/decided_calls lacks it",)
    assert (after.data_version, after.rejections_by_reason, after.computed_row_count) == (
        before.data_version,
        before.rejections_by_reason,
        0,
    )
    assert decided.list_part_names() == sorted(before.row_count_by_part)
    assert filtered(outputs).is_unchanged


def test_calls_that_were_scored_since_the_filter_ran_are_shown_as_not_filtered(tmp_path: Path) -> None:
    calls = call_of_each_reason()
    outputs = scored(tmp_path, [calls[None]], 0.5)
    filtered(outputs)
    publish_calls(outputs, "calculator", [calls[None], calls["below_tau_f"], calls["beyond_examples"]])
    shown = query(warehouse(outputs), "SELECT segment, position, reason FROM decisions ORDER BY ALL")
    assert shown.rows() == [(0, 0, None), (0, 1, "below_tau_f"), (1, 0, "not_filtered")]


def test_equal_texts_fare_equally_and_count_once_towards_the_limit(tmp_path: Path) -> None:
    place = {"shard": "one", "segment": 0, "position": 0, "sample": 0, "delta": 1.0, "reason": None}
    for limit, kept in ((1, ["A", "a"]), (2, ["A", "B", "a"]), (3, ["A", "B", "a", "c"])):
        rows = [{**place, "digest": digest} for digest in "AacB"]
        outputs = scored(tmp_path / str(limit), rows, 0.5, examples=limit)
        filtered(outputs)
        assert kept_rows(outputs)["digest"].to_list() == kept


def test_a_shard_s_name_is_no_column(tmp_path: Path) -> None:
    place = {"shard": "segment=7", "digest": "a", "position": 0, "sample": 0, "delta": 1.0, "reason": None}
    outputs = lane(tmp_path, 0.5, shards=["segment=7"])
    publish_calls(outputs, "calculator", [{**place, "segment": segment} for segment in (0, 1)], ["segment=7"])
    filtered(outputs)
    assert kept_rows(outputs)["segment"].to_list() == [0, 1]
    found = query(warehouse(outputs), "SELECT segment FROM loss_deltas ORDER BY 1")
    assert found.rows() == [(0,), (1,)]


def test_a_threshold_that_keeps_the_same_calls_gives_the_same_data_version(tmp_path: Path) -> None:
    row = {"shard": "one", "digest": "a", "segment": 0, "position": 0, "sample": 0, "delta": 1.0, "reason": None}
    scored(tmp_path, [row], 0.5)
    reports = [filtered(lane(tmp_path, tau)) for tau in (0.5, 0.75, 1.5)]
    versions = [report.data_version for report in reports]
    assert versions[0] == versions[1] != versions[2]
    assert [report.is_unchanged for report in reports] == [False, False, False]
    assert reports[1].reasons.lines == ("settings.tau_f: 0.5 -> 0.75",)
    assert lane(tmp_path, 1.5)[KEPT].table.read_record("one")["settings"]["tau_f"] == 1.5


def test_shards_that_are_filtered_together_fare_as_each_alone(tmp_path: Path) -> None:
    shards = ("a", "b", "c")
    call = {"segment": 0, "position": 0, "reason": None}
    rows = [
        {**call, "shard": shard, "digest": shard, "sample": sample, "delta": sample + number / 3}
        for number, shard in enumerate(shards)
        for sample in (0, 1)
    ]
    outputs = lane(tmp_path, 0.5, shards=shards)
    publish_calls(outputs, "calculator", rows, shards)
    filtered(outputs)
    output = outputs[KEPT]

    def made(*parts: str) -> dict[str, tuple[list[Any], Any]]:
        assert isinstance(output.stage.row_maker, ByParts)
        found = output.stage.row_maker.make_rows(Worker(output.plan), output, parts)
        return {part: ([frame.rows() for frame in rows.frames], rows.rejection_counts) for part, rows in found.items()}

    alone = made("a") | made("b") | made("c")
    assert [len(rows) for rows, _ in alone.values()] == [1, 1, 1]
    assert alone["a"][1] == {("a", "below_tau_f"): 1} and alone["c"][1] == {("c", "not_best_at_position"): 1}
    for some in (("a", "b", "c"), ("a", "c"), ("b", "c")):
        assert made(*some) == {part: alone[part] for part in some}


def test_a_damaged_shard_is_named_and_the_kept_calls_stay(tmp_path: Path) -> None:
    outputs = scored(tmp_path, [], 0.5)
    filtered(outputs)
    Path(outputs[SCORED].table.list_part_files("two")[0]).write_bytes(b"PAR1")
    with pytest.raises(DamagedPart, match="'two'"):
        filtered(lane(tmp_path, 0.6))
    assert kept_rows(outputs).height == 0
