"""A shard that comes, changes or goes leaves the tables that all shards decide on as if they were made from nothing."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from polars.testing import assert_frame_equal

from tests.pipeline.conftest import (
    TableOutput,
    TableReport,
    find_differences,
    hand_made,
    publish,
    update_one,
    warehouse,
)
from toolformer_dag.lake.warehouse import query
from toolformer_dag.pipeline.augmented_corpus import iter_corpus_batches, scan_corpus_rows
from toolformer_dag.pipeline.merging import compute_order_hash

LANES = ("calculator", "calendar")
RAW = "ccnet/raw_shards"
CORPUS = "training/augmented_corpus"
JUDGED = (*(f"{lane}/filtered_calls" for lane in LANES), CORPUS)
WORDS = "It is Friday and two and two are four."
Call = dict[str, Any]
Shard = tuple[str, list[Call]]
"""What all its documents end with, and its scored calls."""

calls = st.fixed_dictionaries(
    {
        "lane": st.sampled_from(LANES),
        "digest": st.sampled_from("abcd"),
        "word": st.sampled_from(["Friday", "two", "four"]),
        "sample": st.integers(0, 1),
        "delta": st.sampled_from([-1.0, 0.5, 0.75, 1.0]),
    }
)
shards = st.tuples(st.sampled_from(["", " Indeed."]), st.lists(calls, max_size=8))
changes = st.tuples(
    st.sampled_from(["one", "two", "three"]),
    st.one_of(st.none(), shards),
    st.sampled_from([0.0, 0.6, 2.0]),
    st.sampled_from([1, 2, 1000]),
)
"""A shard, what it holds from now on (None: it goes), tau_f and the limit on examples."""


def lake(
    folder: Path, model: Path, held: dict[str, Shard], tau_f: object = 0.6, examples: int = 1000
) -> dict[str, TableOutput]:
    """Return the tables over these shards; publishes those of their inputs that differ."""
    sections = {"training": {"examples_per_tool": examples}}
    outputs = hand_made(folder, *LANES, shards=sorted(held), model=model, sections=sections, tau_f=tau_f)
    inputs = [RAW, *(f"{lane}/{name}" for lane in LANES for name in ("heuristic_subset", "loss_deltas"))]
    for table in (outputs[name].table for name in inputs):
        for gone in set(table.list_part_names()) - set(held):
            table.withdraw_part(gone)
    for shard, (ending, scored) in held.items():
        texts = {digest: f"{digest.upper()}: {WORDS}{ending}" for digest in "abcd"}
        _publish(outputs[RAW], shard, [{"digest": digest, "text": text} for digest, text in texts.items()])
        for lane in LANES:
            own = {(c["digest"], c["word"], c["sample"]): c for c in scored if c["lane"] == lane}
            found = sorted({digest for digest, *_ in own})
            subset = [{"digest": one, "segment": 0, "text_digest": f"{one}{ending}"} for one in found]
            _publish(outputs[f"{lane}/heuristic_subset"], shard, subset)
            rows = [_scored(call, texts[call["digest"]]) for call in own.values()]
            _publish(outputs[f"{lane}/loss_deltas"], shard, rows)
            swapped = [{**row, "delta": row["delta"] - 0.6, "swap": 0} for row in rows if row["delta"] > 0]
            _publish(outputs[f"{lane}/swapped_results"], shard, swapped)
    return outputs


def _scored(call: Call, text: str) -> Call:
    place = {"tool": call["lane"], "digest": call["digest"], "segment": 0, "sample": call["sample"]}
    offset = text.index(call["word"])
    return {**place, "position": offset, "char_offset": offset, "input": "1", "result": "1", "delta": call["delta"]}


def _publish(output: TableOutput, shard: str, rows: Sequence[Call]) -> None:
    publish(output, shard, [{**row, "shard": shard} for row in rows])


def judged(outputs: dict[str, TableOutput]) -> dict[str, TableReport]:
    """Bring filtered_calls of both lanes and C* up to date; nothing is out of date after that."""
    reports = {name: update_one(outputs, name) for name in JUDGED}
    assert not any(find_differences(outputs[name]) for name in JUDGED)
    return reports


def assert_equal(outputs: dict[str, TableOutput], fresh: dict[str, TableOutput]) -> None:
    for name in JUDGED:
        one = outputs[name].table.read_pointers_by_part()
        other = fresh[name].table.read_pointers_by_part()
        assert {part: pointer.data_version for part, pointer in one.items()} == {
            part: pointer.data_version for part, pointer in other.items()
        }
        told = ("inputs", "settings", "rejections", "violations")
        assert [[p.record[key] for key in told] for p in one.values()] == [
            [p.record[key] for key in told] for p in other.values()
        ]


@pytest.mark.long
@settings(max_examples=8, deadline=None)
@given(st.lists(changes, min_size=2, max_size=4))
def test_whatever_came_and_went_the_rows_are_those_of_a_lake_made_from_nothing(
    tmp_path_factory: pytest.TempPathFactory, model: Path, steps: list[tuple[str, Shard | None, float, int]]
) -> None:
    folder = tmp_path_factory.mktemp("lake")
    held = dict[str, Shard]()
    for number, (shard, holds, tau_f, examples) in enumerate(steps):
        held = {name: one for name, one in {**held, shard: holds}.items() if one is not None} or {"none": ("", [])}
        outputs = lake(folder, model, held, tau_f, examples)
        reports = judged(outputs)
        fresh = lake(folder / f"fresh {number}", model, held, tau_f, examples)
        judged(fresh)
        assert_equal(outputs, fresh)
        assert not any(count for report in reports.values() for count in report.violations_by_check.values())


def call(lane: str, digest: str, word: str, delta: float = 1.0) -> Call:
    return {"lane": lane, "digest": digest, "word": word, "sample": 0, "delta": delta}


def updated(reports: dict[str, TableReport]) -> dict[str, tuple[str, ...]]:
    return {name: report.updated_parts for name, report in reports.items() if report.updated_parts}


def test_a_shard_that_takes_a_place_among_the_examples_changes_the_one_that_lost_it(
    tmp_path: Path, model: Path
) -> None:
    held: dict[str, Shard] = {
        "one": ("", [call("calculator", "a", "two")]),
        "two": ("", [call("calculator", "d", "two")]),
    }
    judged(lake(tmp_path, model, held, examples=2))
    held["three"] = ("", [call("calculator", "b", "two")])
    reports = judged(lake(tmp_path, model, held, examples=2))
    assert set(reports["calculator/filtered_calls"].updated_parts) == {"two", "three"}
    assert reports["calculator/filtered_calls"].rejections_by_reason == {"beyond_examples": 1}


def test_a_threshold_by_chance_that_stays_judges_the_added_shard_alone(tmp_path: Path, model: Path) -> None:
    by_chance = {"by_chance": 0.05, "fallback": 0.6}  # no control: the fallback is taken
    held: dict[str, Shard] = {}
    for shard, digest in (("one", "a"), ("two", "b")):
        held[shard] = ("", [call("calculator", digest, "two")])
        outputs = lake(tmp_path, model, held, by_chance)
        for each in held:
            outputs["calculator/swapped_results"].table.withdraw_part(each)
            publish(outputs["calculator/swapped_results"], each, [])
        report = update_one(outputs, "calculator/filtered_calls")
        assert report.updated_parts == (shard,)
    inputs = outputs["calculator/filtered_calls"].table.read_record("two")["inputs"]
    assert inputs["threshold"] == {"tau_f": 0.6, "by_chance": 0.05, "verdict": "not measured"}


def test_c_star_is_read_in_the_order_of_its_texts_hashes_whatever_shard_they_lie_in(
    tmp_path: Path, model: Path
) -> None:
    held: dict[str, Shard] = {"one": ("", [call("calculator", one, "two") for one in "ad"])}
    held["two"] = (" Indeed.", [call("calculator", one, "two") for one in "bc"])
    outputs = lake(tmp_path, model, held)
    judged(outputs)
    found = scan_corpus_rows(outputs[CORPUS].plan.lake, ["text", "digest"]).collect()
    assert found["digest"].sort().to_list() == list("abcd")
    assert found["text"].to_list() == sorted(
        found["text"].to_list(), key=compute_order_hash
    )  # a text is a document here
    whole = scan_corpus_rows(outputs[CORPUS].plan.lake, outputs[CORPUS].stage.schema.names()).collect()
    batches = list(iter_corpus_batches(outputs[CORPUS].plan.lake))
    assert len(batches) == 2
    assert_frame_equal(batches[0].vstack(batches[1]), whole, check_row_order=False)


KEPT_IN_PLACE = "SELECT table_name FROM duckdb_tables() ORDER BY ALL"
ASKED = (
    "SELECT * EXCLUDE (document) FROM decisions ORDER BY ALL",
    "SELECT d.digest, d.shard, o.digest, o.shard FROM decisions AS d LEFT JOIN documents AS o ON o.rowid = document "
    "ORDER BY ALL",
    *(f"FROM {view} ORDER BY ALL" for view in ("calls", "funnel", "filter_statistics", "swapped_statistics")),
    *(f"FROM {view} ORDER BY ALL" for view in ("curve_statistics", "chance_thresholds", "kept_at(0.6)", "eligible")),
    "SELECT table_name, column_name, comment FROM duckdb_columns() WHERE NOT internal ORDER BY ALL",
    "SELECT view_name, comment FROM duckdb_views() WHERE NOT internal ORDER BY ALL",
)


def assert_same_file(one: Path, other: Path) -> None:
    names = [name for [name] in query(other, KEPT_IN_PLACE).iter_rows() if name != "decisions"]
    for sql in (*ASKED, *(f'FROM "{name}" ORDER BY ALL' for name in names)):
        assert_frame_equal(query(one, sql), query(other, sql))


@pytest.mark.long
@settings(max_examples=3, deadline=None)
@given(st.lists(shards, min_size=4, max_size=4), st.lists(changes, min_size=2, max_size=3))
def test_a_warehouse_that_took_in_changes_answers_as_one_built_from_nothing(
    tmp_path_factory: pytest.TempPathFactory,
    model: Path,
    first: list[Shard],
    steps: list[tuple[str, Shard | None, float, int]],
) -> None:
    folder = tmp_path_factory.mktemp("lake")
    held = dict(zip(("four", "five", "six", "seven"), first, strict=True))
    for number, (shard, holds, tau_f, examples) in enumerate([("one", None, 0.6, 1000), *steps]):
        held = {name: one for name, one in {**held, shard: holds}.items() if one is not None}
        outputs = lake(folder, model, held, tau_f, examples)
        judged(outputs)
        database = warehouse(outputs)
        assert_same_file(database, warehouse(outputs, f"{number}"))


def in_order(database: Path) -> list[str]:
    """Return the shards of the decisions in the order in which their rows lie in the file."""
    return query(database, "SELECT shard FROM decisions ORDER BY rowid")["shard"].to_list()


def test_a_warehouse_replaces_the_rows_of_the_shard_that_changed_and_leaves_the_others_where_they_are(
    tmp_path: Path, model: Path
) -> None:
    held: dict[str, Shard] = {
        shard: ("", [call("calculator", digest, "two", delta)])
        for shard, digest, delta in (("one", "a", 1.0), ("two", "b", 0.75), ("three", "c", 0.5), ("four", "d", 1.0))
    }
    outputs = lake(tmp_path, model, held)
    judged(outputs)
    before = in_order(warehouse(outputs))
    held["one"][1].append(call("calculator", "a", "four", -1.0))
    outputs = lake(tmp_path, model, held)
    judged(outputs)
    database = warehouse(outputs)
    assert in_order(database) == [*(shard for shard in before if shard != "one"), "one", "one"]
    assert query(database, "SELECT count(*) FROM decisions WHERE delta = -1").item() == 1


def test_another_threshold_judges_the_shards_with_calls_anew_in_the_warehouse(tmp_path: Path, model: Path) -> None:
    held: dict[str, Shard] = {"one": ("", [call("calculator", "a", "two", 0.7)]), "two": ("", []), "three": ("", [])}
    for tau_f, kept in ((0.6, 1), (0.8, 0)):
        outputs = lake(tmp_path, model, held, tau_f, 1000)
        judged(outputs)
        database = warehouse(outputs)
        assert query(database, "SELECT count(*) FROM filtered_calls").item() == kept
    assert_same_file(database, warehouse(outputs, "other"))
