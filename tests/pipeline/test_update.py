"""What an update computes when shard files come, go and change, and what it says is out of date."""

import gzip
import json

import pytest
import transformers

from tests.pipeline.conftest import (
    NewLine,
    Reports,
    assert_same,
    computed,
    cost,
    find_differences,
    tokens,
    withdraw_shard,
)
from tests.worlds import write_shard

SHARDED = (
    "raw_shards",
    "screened_documents",
    "heldout_texts",
    "heuristic_subset",
    "scored_candidates",
    "tool_results",
    "loss_deltas",
    "swapped_results",
    "filtered_calls",
    "augmented_corpus",
)


def updated(reports: Reports) -> dict[str, tuple[str, ...]]:
    """Return the parts that were computed, by stage, without stages that were up to date and those of one part."""
    return {
        name: report.updated_parts for name, report in reports.items() if not report.is_unchanged and name in SHARDED
    }


def test_a_new_shard_file_computes_that_shard_alone_in_every_table(finished: NewLine) -> None:
    line = finished("one")
    before = {stage: line.output(stage).table.read_pointer("one") for stage in SHARDED}
    write_shard(line.web, "two")
    assert all(find_differences(line.output(stage)).lines == ("without rows: two",) for stage in SHARDED)
    reports = line.update()
    assert updated(reports) == dict.fromkeys(SHARDED, ("two",))
    assert {stage: line.output(stage).table.read_pointer("one") for stage in SHARDED} == before
    assert_same(line, finished("one", "two"))


def test_a_removed_file_s_parts_leave_every_table_and_come_back_with_it_without_the_model(finished: NewLine) -> None:
    line = finished("one", "two")
    content = (line.web / "two.json.gz").read_bytes()
    (line.web / "two.json.gz").unlink()
    assert find_differences(line.output("loss_deltas")).lines == ("removed: two",)
    reports = line.update()
    assert all(set(reports[stage].row_count_by_part) == {"one"} for stage in SHARDED)
    assert updated(reports) == dict.fromkeys(SHARDED, ())
    assert (computed(reports), tokens(reports)) == (0, 0)
    assert line.lake.get_table("ccnet/rejected_lines").list_part_names() == ["one"]
    assert set(line.read("filtered_calls")["shard"]) == {"one"}
    assert updated(line.update()) == {}
    (line.web / "two.json.gz").write_bytes(content)
    reports = line.update()
    assert reports["loss_deltas"].updated_parts == ("two",)
    assert (computed(reports), line.engines) == (0, 0)


def test_equal_texts_in_two_shards_are_computed_once(new_line: NewLine) -> None:
    line = new_line("one")
    alone = new_line("one")
    copies = map(json.loads, gzip.decompress((line.web / "one.json.gz").read_bytes()).splitlines())
    written = [json.dumps({**record, "digest": f"{record['digest']} again"}) for record in copies]
    (line.web / "two.json.gz").write_bytes(gzip.compress("\n".join(written).encode()))
    once = alone.update()
    both = line.update()
    for kind in ("texts", "samples", "calls"):
        assert cost(both, kind)[0] == cost(once, kind)[0]
    assert both["loss_deltas"].computed_row_count == once["loss_deltas"].computed_row_count
    assert both["scored_candidates"].work.tokens_by_kind == once["scored_candidates"].work.tokens_by_kind
    one, two = (line.output("loss_deltas").table.read_part(part).drop("shard", "digest") for part in ("one", "two"))
    assert one.equals(two)


def test_the_first_shards_are_taken_and_the_next_update_goes_on_with_the_rest(
    new_line: NewLine, finished: NewLine
) -> None:
    line = new_line("one", "two")
    line.set(corpus__first=1)
    first = line.update()
    assert all(set(first[stage].row_count_by_part) == {"one"} for stage in SHARDED)
    del line.values["corpus.first"]
    rest = line.update()
    assert all(rest[stage].updated_parts == ("two",) for stage in SHARDED)
    assert_same(line, finished("one", "two"))
    line.set(corpus__first=1)
    assert updated(line.update()) == {}  # shards that were read before stay


def test_a_withdrawn_shard_is_made_anew_from_stored_rows(finished: NewLine) -> None:
    line = finished("one", "two")
    outputs = list(line.outputs().values())
    before = line.tables()
    withdraw_shard(outputs, "two")
    withdraw_shard(outputs, "two")  # what is out already is nothing to do
    assert not any(output.table.has_part("two") for output in outputs if output.stage.is_sharded)
    reports = line.update()
    assert updated(reports) == dict.fromkeys(SHARDED, ("two",))  # the same rows again: nothing after them changes
    assert (computed(reports), line.engines) == (0, 0)
    assert {name: frame.equals(before[name]) for name, frame in line.tables().items()} == dict.fromkeys(before, True)


def test_a_changed_setting_is_named_once_for_all_shards(finished: NewLine) -> None:
    line = finished("one", "two")
    line.set(k=2)
    found = find_differences(line.output("scored_candidates"))
    assert list(found.reasons_by_part) == ["one", "two"]
    assert found.lines == ("settings.k: 3 -> 2",) and found.format_setting_changes() == ["k 3 -> 2"]
    assert not find_differences(line.output("heuristic_subset")) and not find_differences(line.output("loss_deltas"))


def test_many_shards_are_named_in_few_words(new_line: NewLine) -> None:
    line = new_line(*(f"s{number}" for number in range(7)))
    assert find_differences(line.output("raw_shards")).lines == ("without rows: s0, s1, s2, s3, s4 and 2 more",)


@pytest.mark.parametrize(("stage", "units"), [("scored_candidates", 12), ("raw_shards", 1), ("loss_deltas", 12)])
def test_progress_is_reported_after_every_chunk_and_ends_at_the_whole(
    new_line: NewLine, stage: str, units: int
) -> None:
    line = new_line("one")
    for before in SHARDED[: SHARDED.index(stage)]:
        line.update(before)
    told: list[tuple[int, int]] = []
    line.update(stage, progress=lambda done, total: told.append((done, total)))
    assert [done for done, _ in told] == sorted({done for done, _ in told})
    assert told[-1][0] == told[-1][1] and 0 < told[-1][1] <= units


def test_a_table_that_grows_while_it_is_read_is_out_of_date_afterwards(finished: NewLine) -> None:
    """The versions of inputs are noted before the first row is read."""
    line = finished("one")
    line.set(k=2)
    outputs = line.outputs()
    line.update("scored_candidates")
    subset = outputs["heuristic_subset"].table
    subset.publish("one", [subset.read_part("one").head(3)], lambda: subset.read_record("one"))
    [told] = find_differences(outputs["scored_candidates"]).lines
    assert told.startswith("inputs.heuristic_subset: ")


def test_every_table_keeps_its_promises_and_its_record_says_what_computed_the_rows(finished: NewLine) -> None:
    line = finished("one", "two")
    reports = line.update()
    assert all(not any(report.violations_by_check.values()) for report in reports.values())
    assert all("unique_keys" in report.violations_by_check for report in reports.values())
    for stage in ("scored_candidates", "loss_deltas"):
        backends = {line.output(stage).table.read_pointer(part).record["backends"][0] for part in ("one", "two")}
        assert backends == {f"transformers {transformers.__version__}, float32"}
