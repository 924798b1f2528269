"""Partitions: published whole, read whole, damaged ones told."""

import threading
from pathlib import Path

import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from upath import UPath

from toolformer_dag.storage.content import ContentHash
from toolformer_dag.storage.errors import DamagedPartition, MissingPartition, ReadError
from toolformer_dag.storage.files import file_name, plain_name
from toolformer_dag.storage.lake import Lake
from toolformer_dag.storage.table import Table

SCHEMA = {"digest": pl.String, "position": pl.Int32, "delta": pl.Float64, "seconds": pl.Float64}


def frame(*rows: tuple[str, int, float, float]) -> pl.DataFrame:
    return pl.DataFrame(list(rows), schema=SCHEMA, orient="row")


@pytest.fixture
def table(tmp_path: Path) -> Table:
    return Lake(tmp_path).table("calculator/loss_deltas")


def test_a_partition_reads_as_it_was_published(table: Table) -> None:
    rows = [frame(("a", 1, 0.5, 0.1)), frame(), frame(("b", 2, -0.5, 0.2), ("a", 3, 0.0, 0.0))]
    published = table.publish("shard 0/0.json", rows, {"settings": {"k": 3}})
    assert table.read("shard 0/0.json").equals(pl.concat(rows))
    assert table.scan().collect().equals(pl.concat(rows))
    assert (published.rows, table.partitions()) == (3, ["shard 0/0.json"])
    assert table.record("shard 0/0.json") == {"settings": {"k": 3}}


def test_an_empty_partition_keeps_its_columns(table: Table) -> None:
    table.publish("s", [frame()], {})
    assert table.read("s").schema == pl.Schema(SCHEMA)


def test_publishing_nothing_at_all_is_refused(table: Table) -> None:
    with pytest.raises(ValueError, match="at least one frame"):
        table.publish("s", [], {})


def test_parts_are_cut_by_size_and_the_data_version_does_not_notice(
    table: Table, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [frame((str(i), i, i / 3, 0.0)) for i in range(20)]
    whole = table.publish("s", rows, {})
    monkeypatch.setattr("toolformer_dag.storage.parquet.pieces", lambda frames: frames)
    in_twenty = table.publish("s", rows, {})
    assert len(table.files("s")) == 20
    assert whole.data_version == in_twenty.data_version
    assert pl.concat(table.batches("s")).equals(pl.concat(rows))


def test_volatile_columns_do_not_count_and_all_others_do(table: Table) -> None:
    versions = [
        table.publish("s", [rows], {}, volatile=("seconds",)).data_version
        for rows in (frame(("a", 1, 0.5, 0.1)), frame(("a", 1, 0.5, 9.9)), frame(("a", 1, 0.6, 0.1)))
    ]
    assert versions[0] == versions[1] != versions[2]


@settings(deadline=None)
@given(st.lists(st.tuples(st.text(), st.integers(-9, 9), st.floats(allow_nan=False))), st.integers(0, 9))
def test_content_hash_depends_on_rows_alone(rows: list[tuple[str, int, float]], cut: int) -> None:
    schema = {"a": pl.String, "b": pl.Int32, "c": pl.Float64}
    whole, halves, changed = ContentHash(), ContentHash(), ContentHash()
    frame = pl.DataFrame(rows, schema=schema, orient="row")
    whole.update(frame)
    halves.update(frame[:cut])
    halves.update(frame[cut:])
    changed.update(frame.with_columns(pl.col("b") + 1))
    assert whole.hexdigest() == halves.hexdigest()
    assert (whole.hexdigest() == changed.hexdigest()) == (not rows)


def test_one_partition_has_one_schema() -> None:
    content = ContentHash()
    content.update(pl.DataFrame({"a": [1]}))
    with pytest.raises(ValueError, match="one schema"):
        content.update(pl.DataFrame({"b": [1]}))


@settings(deadline=None)
@given(st.text(min_size=1))
def test_every_name_is_a_file_name(name: str) -> None:
    try:
        name.encode()
    except UnicodeEncodeError:
        return
    assert plain_name(file_name(name)) == name
    assert "/" not in file_name(name) and not file_name(name).startswith(".")


def test_letters_of_any_script_take_no_more_bytes_in_a_file_name() -> None:
    assert file_name("ab_корпус-語料.01") == "ab_корпус-語料.01"
    assert file_name("a/b\n%.") == "a%2Fb%0A%25."


def test_a_lake_that_is_a_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "lake").touch()
    with pytest.raises(ReadError, match=r"cannot read .*lake.t.s\.json: Not a directory"):
        Lake(tmp_path / "lake").table("t").pointer("s")


def test_a_removed_partition_is_missing_and_says_what_to_do(table: Table) -> None:
    table.publish("s", [frame(("a", 1, 0.5, 0.1))], {})
    table.remove("s")
    assert table.partitions() == []
    with pytest.raises(MissingPartition, match=r"materialize calculator/loss_deltas for 's' first"):
        table.read("s")


def part(table: Table) -> UPath:
    return UPath(table.files("s")[0])


@pytest.mark.parametrize("kept", [0, 3, 12, -1])
def test_a_part_cut_short_is_told_and_publishing_again_repairs(table: Table, kept: int) -> None:
    rows = frame(("a", 1, 0.5, 0.1))
    table.publish("s", [rows], {})
    damaged = part(table)
    damaged.write_bytes(damaged.read_bytes()[:kept])
    for use in (table.read, table.files, lambda p: list(table.batches(p)), lambda p: table.scan([p]).collect()):
        with pytest.raises(DamagedPartition, match=r"materialize .* again"):
            use("s")
    table.publish("s", [rows], {})
    assert table.read("s").equals(rows)


def test_a_part_whose_tail_is_zeros_is_told(table: Table) -> None:
    table.publish("s", [frame(("a", 1, 0.5, 0.1))], {})
    damaged = part(table)
    content = damaged.read_bytes()
    damaged.write_bytes(content[:-100] + bytes(100))
    with pytest.raises(DamagedPartition, match="footer"):
        table.files("s")


def test_a_part_that_is_gone_is_told(table: Table) -> None:
    table.publish("s", [frame(("a", 1, 0.5, 0.1))], {})
    part(table).unlink()
    with pytest.raises(DamagedPartition, match="No such file"):
        table.read("s")


@pytest.mark.parametrize("content", [b"", b"{", b"{}", b'{"format": 99}', b"[]"])
def test_a_pointer_that_is_none_is_told(table: Table, content: bytes) -> None:
    table.publish("s", [frame(("a", 1, 0.5, 0.1))], {})
    (table.folder / "s.json").write_bytes(content)
    with pytest.raises(DamagedPartition, match=r"s\.json"):
        table.read("s")


def test_readers_see_one_version_or_another_while_it_is_published_again(table: Table) -> None:
    versions = [frame(*[(str(i), v, 0.0, 0.0) for i in range(50)]) for v in range(2)]
    table.publish("s", [versions[0]], {})
    done = threading.Event()
    seen: list[pl.DataFrame] = []

    def look() -> None:
        while not done.is_set():
            seen.append(table.read("s"))

    reader = threading.Thread(target=look)
    reader.start()
    for number in range(100):
        table.publish("s", [versions[number % 2]], {})
    done.set()
    reader.join()
    assert seen and all(any(rows.equals(version) for version in versions) for rows in seen)


def test_brackets_in_the_folder_are_no_pattern(tmp_path: Path) -> None:
    table = Lake(tmp_path / "br[1]").table("calculator/loss_deltas")
    rows = frame(("a", 1, 0.5, 0.1))
    table.publish("s", [rows], {})
    assert table.scan().collect().equals(rows)


def test_other_file_systems_work_through_fsspec() -> None:
    table = Lake(UPath("memory://lake")).table("ccnet/raw_shards")
    table.publish("s", [frame(("a", 1, 0.5, 0.1))], {})
    assert table.read("s").height == 1
    assert table.partitions() == ["s"]
