"""Rows that are computed once, found by key, and found again after damage."""

import errno
import os
import shutil
from collections.abc import Iterator, Sequence
from datetime import date
from pathlib import Path
from unittest.mock import Mock

import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from toolformer_dag.files import NotPlain, ReadError
from toolformer_dag.lake import row_store
from toolformer_dag.lake.row_store import MERGE_AT, RowStore
from toolformer_dag.lake.storage import Storage
from toolformer_dag.lake.table import Lake
from toolformer_dag.lake.verification import iter_checked_files

SCHEMA = pl.Schema({"text": pl.String, "position": pl.Int32, "value": pl.List(pl.Float32)})
KEY = ("text", "position")


def store_at(root: Path, **identity: object) -> RowStore:
    return Lake(root).open_row_store("calculator/samples", identity, KEY, SCHEMA)


def rows(*keys: tuple[str, int], value: float = 0.0) -> pl.DataFrame:
    return pl.DataFrame([(t, p, [p / 2, value]) for t, p in keys], schema=SCHEMA, orient="row")


def keys(*wanted: tuple[str, int]) -> pl.DataFrame:
    return pl.DataFrame(list(wanted), schema={"text": pl.String, "position": pl.Int32}, orient="row")


def as_set(frame: pl.DataFrame) -> set[tuple[str, int]]:
    return set(frame.select(KEY).rows())


def small_runs(patch: pytest.MonkeyPatch) -> None:
    """Merge after few chunks, into files of a few hundred bytes."""
    patch.setattr(row_store, "MERGE_AT", 3)


@pytest.mark.parametrize("merging", [False, True])
@settings(max_examples=30, deadline=None)
@given(st.lists(st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 5)), max_size=6), max_size=12), st.data())
def test_stored_and_missing_agree_with_a_dictionary(
    tmp_path_factory: pytest.TempPathFactory,
    merging: bool,
    chunks: Sequence[list[tuple[str, int]]],
    data: st.DataObject,
) -> None:
    store = store_at(tmp_path_factory.mktemp("lake"))
    model: dict[tuple[str, int], float] = {}
    with pytest.MonkeyPatch.context() as patch:
        if merging:
            small_runs(patch)
        for number, chunk in enumerate(chunks):
            store.append_rows(rows(*chunk, value=float(number)))
            for key in chunk:
                model.setdefault(key, float(number))
    wanted = data.draw(st.lists(st.tuples(st.sampled_from("abcd"), st.integers(0, 6))))
    found = store.read_stored_rows(keys(*wanted))
    assert {(t, p): value[1] for t, p, value in found.rows()} == {key: model[key] for key in wanted if key in model}
    assert store.find_missing_keys(keys(*wanted)).rows() == [key for key in dict.fromkeys(wanted) if key not in model]


def test_another_identity_shares_nothing_and_the_same_one_shares_all(tmp_path: Path) -> None:
    store_at(tmp_path, model="a", prompt="p").append_rows(rows(("x", 1)))
    assert store_at(tmp_path, prompt="p", model="a").read_stored_rows(keys(("x", 1))).height == 1
    assert store_at(tmp_path, prompt="q", model="a").read_stored_rows(keys(("x", 1))).is_empty()


def test_a_file_that_a_restore_put_into_another_identitys_folder_is_not_used(tmp_path: Path) -> None:
    own = store_at(tmp_path, dtype="float32")
    other = store_at(tmp_path, dtype="bfloat16")
    other.append_rows(rows(("x", 1)))
    [file] = other.list_files()
    copy = Path(shutil.copy(other.folder / file.name, own.folder))
    assert [one.path for one in iter_checked_files(Lake(tmp_path)) if one.reason] == [copy]
    assert (
        own.read_stored_rows(keys(("x", 1))).is_empty() and "was written for calculator/samples/" in own.damage_notes[0]
    )
    assert other.read_stored_rows(keys(("x", 1))).height == 1


def test_a_store_without_its_identity_is_verified_all_the_same(tmp_path: Path) -> None:
    store = store_at(tmp_path)
    store.append_rows(rows(("x", 1)))
    (store.folder / "identity.json").unlink()
    file = store.folder / store.list_files()[0].name
    file.write_bytes(b"other rows")
    assert {one.path.name for one in iter_checked_files(Lake(tmp_path)) if one.reason} == {file.name}


def test_the_first_of_two_writers_counts(tmp_path: Path) -> None:
    one = store_at(tmp_path)
    other = store_at(tmp_path)
    one.append_rows(rows(("x", 1), value=1.0))
    other.append_rows(rows(("x", 1), ("x", 2), value=2.0))
    assert sorted(store_at(tmp_path).read_stored_rows(keys(("x", 1), ("x", 2)))["value"].to_list()) == [
        [0.5, 1.0],
        [1.0, 2.0],
    ]


def test_many_chunks_become_few_files_and_no_row_is_lost(tmp_path: Path) -> None:
    writer = store_at(tmp_path)
    reader = store_at(tmp_path)
    wanted = [(f"text {i}", i) for i in range(3 * MERGE_AT + 5)]
    for number, key in enumerate(wanted):
        writer.append_rows(rows(key, wanted[0]))
        if number % 50 == 0:
            assert as_set(reader.read_stored_rows(keys(*wanted))) == set(wanted[: number + 1])
    files = list(writer.folder.glob("*.parquet"))
    assert len(files) == 3 + 5
    for store in (writer, reader, store_at(tmp_path)):
        assert as_set(store.read_stored_rows(keys(*wanted))) == set(wanted)


def test_a_merge_that_was_killed_before_it_removed_anything_loses_and_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small_runs(monkeypatch)
    store = store_at(tmp_path)
    wanted = [(f"text {number}", number) for number in range(40)]
    for at in (0, 10):
        store.append_rows(rows(*wanted[at : at + 10]))
    with monkeypatch.context() as killed, pytest.raises(KeyboardInterrupt):
        killed.setattr(Storage, "remove", Mock(side_effect=KeyboardInterrupt))
        store.append_rows(rows(*wanted[20:]))
    assert len(list(store.folder.glob("*.parquet"))) == 3 + 1
    assert as_set(store_at(tmp_path).read_stored_rows(keys(*wanted))) == set(wanted)
    store.append_rows(rows(("more", 1)))
    assert as_set(store.read_stored_rows(keys(*wanted))) == set(wanted)
    assert store.read_stored_rows(keys(*wanted)).height == len(wanted)


def test_a_flipped_bit_anywhere_in_a_run_gives_no_other_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A damaged footer that pyarrow reads can end the process."""
    monkeypatch.setattr(row_store, "MERGE_AT", 3)
    store = store_at(tmp_path)
    wanted = [(f"text {number}", number) for number in range(9)]
    for at in range(0, 9, 3):
        store.append_rows(rows(*wanted[at : at + 3]))
    [run] = store.folder.glob("*.parquet")
    content = run.read_bytes()
    stored = sorted(store.read_stored_rows(keys(*wanted)).rows())
    for place in range(0, len(content), 3):
        flipped = bytearray(content)
        flipped[place] ^= 1 << place % 8
        run.write_bytes(flipped)
        found = store_at(tmp_path).read_stored_rows(keys(*wanted))
        missing = store_at(tmp_path).find_missing_keys(keys(*wanted))
        assert sorted(found.rows()) in ([], stored) and found.height + missing.height == len(wanted)


def test_a_merge_that_ends_while_a_folder_is_listed_hides_no_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small_runs(monkeypatch)
    store = store_at(tmp_path)
    listing = Path.iterdir
    for number in range(2):
        store.append_rows(rows((f"text {number}", number)))

    def torn(folder: Path) -> Iterator[Path]:
        listed = list(listing(folder))
        monkeypatch.setattr(Path, "iterdir", listing)
        store_at(tmp_path).append_rows(rows(("text 2", 2)))
        yield from (path for path in listed if path.exists())

    monkeypatch.setattr(Path, "iterdir", torn)
    assert store.find_missing_keys(keys(("text 0", 0), ("text 1", 1))).is_empty()
    assert len(list(store.folder.glob("*.parquet"))) == 1


@pytest.mark.parametrize("kept", [0, 5, -1])
def test_a_file_cut_short_is_set_aside_and_its_rows_are_missing(tmp_path: Path, kept: int) -> None:
    store_at(tmp_path).append_rows(rows(("x", 1)))
    store = store_at(tmp_path)
    store.append_rows(rows(("y", 2)))
    cut = min(store.folder.glob("*.parquet"))
    cut.write_bytes(cut.read_bytes()[:kept])
    reopened = store_at(tmp_path)
    assert as_set(reopened.find_missing_keys(keys(("x", 1), ("y", 2)))) == {("x", 1)}
    assert len(reopened.damage_notes) == 1 and "set aside" in reopened.damage_notes[0]
    reopened.append_rows(rows(("x", 1)))
    assert store_at(tmp_path).find_missing_keys(keys(("x", 1), ("y", 2))).is_empty()
    assert store_at(tmp_path).damage_notes == []


def test_a_damaged_chunk_does_not_stop_merging(tmp_path: Path) -> None:
    store = store_at(tmp_path)
    wanted = [("t", i) for i in range(MERGE_AT + 1)]
    for key in wanted[:10]:
        store.append_rows(rows(key))
    cut = min(store.folder.glob("*.parquet"))
    cut.write_bytes(b"")
    for key in wanted[10:]:
        store.append_rows(rows(key))
    assert len(store.damage_notes) == 1
    assert as_set(store.read_stored_rows(keys(*wanted))) == set(wanted) - {("t", 0)}
    assert len(list(store.folder.glob("*.parquet"))) <= MERGE_AT


@pytest.mark.parametrize("asked", ["open", "stat"])
def test_a_file_that_cannot_be_read_this_time_stays_and_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asked: str
) -> None:
    store_at(tmp_path).append_rows(rows(("x", 1)))
    store = store_at(tmp_path)
    [part] = store.folder.glob("*.parquet")
    works = getattr(os, asked)

    def failing(path: Path | str, *arguments: int, **options: bool) -> object:
        if str(path) == str(part):
            raise OSError(errno.EIO, "Input/output error")
        return works(path, *arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr(os, asked, failing)
        with pytest.raises(ReadError, match=f"{part.name}: Input/output error"):
            store.read_stored_rows(keys(("x", 1)))
    assert store_at(tmp_path).read_stored_rows(keys(("x", 1))).height == 1


@pytest.mark.parametrize("value", [date(2020, 1, 1), {"x"}, b"x"])
def test_an_identity_that_cannot_be_written_down_is_named(tmp_path: Path, value: object) -> None:
    with pytest.raises(NotPlain, match=rf"calculator/samples/.*type {type(value).__name__} .*identity\(\)"):
        store_at(tmp_path, tool=value)
    with pytest.raises(NotPlain, match="calculator/tool_results: "):
        Lake(tmp_path).get_table("calculator/tool_results").publish(
            "one", [rows(("x", 1))], lambda: {"settings": {"tool": value}}
        )
