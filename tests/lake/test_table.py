"""Parts of tables: published whole, read whole, reported where they are damaged."""

import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from toolformer_dag.files import SEAL_FIELD, ReadError, decode_file_name, encode_file_name, seal_record, unseal_record
from toolformer_dag.lake.manifest import Pointer
from toolformer_dag.lake.parquet import ContentHash
from toolformer_dag.lake.session import enter_session
from toolformer_dag.lake.table import DamagedPart, Lake, MissingPart, Table

SCHEMA = {"digest": pl.String, "position": pl.Int32, "delta": pl.Float64, "seconds": pl.Float64}


def frame(*rows: tuple[str, int, float, float]) -> pl.DataFrame:
    return pl.DataFrame(list(rows), schema=SCHEMA, orient="row")


def publish(
    table: Table,
    part: str,
    frames: Sequence[pl.DataFrame],
    record: Mapping[str, object] | None = None,
    volatile: Collection[str] = (),
) -> Pointer:
    return table.publish(part, frames, lambda: record or {}, volatile)


@pytest.fixture
def table(tmp_path: Path) -> Table:
    return Lake(tmp_path).get_table("calculator/loss_deltas")


def test_a_part_reads_as_it_was_published(table: Table) -> None:
    rows = [frame(("a", 1, 0.5, 0.1)), frame(), frame(("b", 2, -0.5, 0.2), ("a", 3, 0.0, 0.0))]
    published = publish(table, "shard 0/0.json", rows, {"settings": {"k": 3}})
    assert table.read_part("shard 0/0.json").equals(pl.concat(rows))
    assert table.scan_parts().collect().equals(pl.concat(rows))
    assert (published.row_count, table.list_part_names()) == (3, ["shard 0/0.json"])
    assert table.read_record("shard 0/0.json") == {"settings": {"k": 3}}


def test_an_empty_part_keeps_its_columns(table: Table) -> None:
    publish(table, "s", [frame()])
    assert table.read_part("s").schema == pl.Schema(SCHEMA)


def test_publishing_nothing_at_all_is_refused(table: Table) -> None:
    with pytest.raises(ValueError, match="at least one frame"):
        publish(table, "s", [])


def test_files_are_cut_by_size_and_the_data_version_does_not_notice(
    table: Table, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [frame((str(i), i, i / 3, 0.0)) for i in range(20)]
    whole = publish(table, "s", rows)
    monkeypatch.setattr("toolformer_dag.lake.parquet.pieces", lambda frames: frames)
    in_twenty = publish(table, "s", rows)
    assert len(table.list_part_files("s")) == 20
    assert whole.data_version == in_twenty.data_version
    assert pl.concat(table.iter_frames("s")).equals(pl.concat(rows))


def test_volatile_columns_do_not_count_and_all_others_do(table: Table) -> None:
    versions = [
        publish(table, "s", [rows], volatile=("seconds",)).data_version
        for rows in (frame(("a", 1, 0.5, 0.1)), frame(("a", 1, 0.5, 9.9)), frame(("a", 1, 0.6, 0.1)))
    ]
    assert versions[0] == versions[1] != versions[2]


@settings(deadline=None)
@given(st.lists(st.tuples(st.text(), st.integers(-9, 9), st.floats(allow_nan=False))), st.integers(0, 9))
def test_content_hash_depends_on_rows_alone(rows: list[tuple[str, int, float]], cut: int) -> None:
    schema = {"a": pl.String, "b": pl.Int32, "c": pl.Float64}
    whole = ContentHash()
    halves = ContentHash()
    changed = ContentHash()
    frame = pl.DataFrame(rows, schema=schema, orient="row")
    whole.update(frame)
    halves.update(frame[:cut])
    halves.update(frame[cut:])
    changed.update(frame.with_columns(pl.col("b") + 1))
    assert whole.hexdigest() == halves.hexdigest()
    assert (whole.hexdigest() == changed.hexdigest()) == (not rows)


@pytest.mark.parametrize("kind", [pl.String, pl.Binary])
def test_what_stood_in_place_of_a_null_before_does_not_count(kind: type[pl.DataType]) -> None:
    plain = pl.DataFrame({"a": ["x", None, "z"]}, schema={"a": pl.String})
    former = pl.DataFrame({"a": ["x", "secret", "z"]})
    emptied = former.with_columns(a=pl.when(pl.col("a") != "secret").then("a"))
    assert emptied.equals(plain)
    hashes = []
    for frame in (plain, emptied, former):
        content = ContentHash()
        content.update(frame.cast(kind))
        hashes.append(content.hexdigest())
    assert hashes[0] == hashes[1] != hashes[2]


CALLS = st.lists(st.none() | st.fixed_dictionaries({"tool": st.text(), "result": st.none() | st.text()}))


@settings(deadline=None)
@given(st.lists(CALLS), st.integers(0, 9))
def test_content_hash_reads_lists_of_structs(rows: list[Any], cut: int) -> None:
    schema = {"calls": pl.List(pl.Struct({"tool": pl.String, "result": pl.String}))}
    whole = ContentHash()
    halves = ContentHash()
    changed = ContentHash()
    frame = pl.DataFrame({"calls": rows}, schema=schema)
    whole.update(frame)
    halves.update(frame[:cut])
    halves.update(frame[cut:])
    changed.update(pl.DataFrame({"calls": [*rows, [{"tool": "", "result": None}]]}, schema=schema))
    assert whole.hexdigest() == halves.hexdigest() != changed.hexdigest()


def test_a_part_has_one_schema() -> None:
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
    assert decode_file_name(encode_file_name(name)) == name
    assert "/" not in encode_file_name(name) and not encode_file_name(name).startswith(".")


def test_letters_of_any_script_take_no_more_bytes_in_a_file_name() -> None:
    assert encode_file_name("ab_корпус-語料.01") == "ab_корпус-語料.01"
    assert encode_file_name("a/b\n%.") == "a%2Fb%0A%25."


def test_a_lake_that_is_a_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "lake").touch()
    with pytest.raises(ReadError, match=r"cannot read .*lake.table-manifests.t\.jsonl: Not a directory"):
        Lake(tmp_path / "lake").get_table("t").read_pointer("s")


def test_a_removed_part_is_missing_and_says_what_to_do(table: Table) -> None:
    publish(table, "s", [frame(("a", 1, 0.5, 0.1))])
    table.withdraw_part("s")
    assert table.list_part_names() == []
    with pytest.raises(MissingPart, match=r"has no rows of shard 's'; run .toolformer-dag stale --run"):
        table.read_part("s")


def file_of(table: Table) -> Path:
    return Path(table.list_part_files("s")[0])


def zeros(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-100] + bytes(100))


@pytest.mark.parametrize(
    ("damage", "told"),
    [
        (lambda file: file.write_bytes(b""), "has 0 bytes"),
        (lambda file: file.write_bytes(file.read_bytes()[:-1]), "bytes, not the"),
        (zeros, "footer"),
        (Path.unlink, "No such file"),
    ],
    ids=["empty", "cut", "zeros", "gone"],
)
def test_a_damaged_file_is_reported_and_publishing_again_repairs(
    table: Table, damage: Callable[[Path], object], told: str
) -> None:
    rows = frame(("a", 1, 0.5, 0.1))
    for use in (
        table.read_part,
        table.list_part_files,
        lambda p: list(table.iter_frames(p)),
        lambda p: table.scan_parts([p]).collect(),
    ):
        publish(table, "s", [rows])
        damage(file_of(table))
        with pytest.raises(DamagedPart, match=rf"shard 's': .*{told}.*stale --run"):
            use("s")
        assert table.list_part_names() == []
    publish(table, "s", [rows])
    assert table.read_part("s").equals(rows)


def test_a_file_whose_rows_stay_is_kept_and_one_with_a_flipped_byte_is_written_again(
    table: Table, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("toolformer_dag.lake.parquet.pieces", lambda frames: frames)  # a file per frame
    first, second, third = (frame((name, 1, 0.5, 0.1)) for name in "abc")
    names = [Path(file).name for file in publish_all(table, first, second)]
    kept, new = publish_all(table, first, third)
    assert kept.name == names[0] and new.name not in names
    content = kept.read_bytes()
    kept.write_bytes(bytes([content[0], content[1], content[2] ^ 1]) + content[3:])
    again, same = publish_all(table, first, third)
    assert again.name != kept.name and again.read_bytes() == content and same == new
    assert table.read_part("s").equals(pl.concat([first, third]))


def publish_all(table: Table, *frames: pl.DataFrame) -> list[Path]:
    """Publish frames as files of one part; return the paths, whose content nobody has compared with its hash yet."""
    return [table.get_file_path("s", file) for file in publish(table, "s", frames).files]


def spoil(table: Table, part: str, place: int = -9) -> None:
    """Flip a bit in the line of a part."""
    lines = table.manifest_path.read_bytes().split(b"\n")
    number = next(number for number, line in enumerate(lines) if f'"part": "{part}"'.encode() in line)
    changed = bytearray(lines[number])
    changed[place] ^= 1
    table.manifest_path.write_bytes(b"\n".join([*lines[:number], bytes(changed), *lines[number + 1 :]]))


def test_a_line_that_cannot_be_read_is_reported_and_costs_one_part(table: Table) -> None:
    rows = frame(("a", 1, 0.5, 0.1))
    for part in ("r", "s", "t"):
        publish(table, part, [rows])
    spoil(table, "s")
    with pytest.raises(DamagedPart, match=r"loss_deltas\.jsonl"):
        table.read_part("s")
    assert table.find_manifest_damage() and table.read_part("r").equals(rows) and table.read_part("t").equals(rows)
    table.repair_manifest()
    assert table.find_manifest_damage() is None and table.list_part_names() == ["r", "t"]


@pytest.mark.parametrize("kept", [0, 1, 40, 300, -1])
def test_a_manifest_cut_short_is_reported_and_keeps_whole_lines(table: Table, kept: int) -> None:
    rows = frame(("a", 1, 0.5, 0.1))
    for part in ("r", "s"):
        publish(table, part, [rows])
    table.manifest_path.write_bytes(table.manifest_path.read_bytes()[:kept])
    assert table.find_manifest_damage()
    assert set(table.list_part_names()) <= {"r", "s"}
    publish(table, "s", [rows])
    assert table.read_part("s").equals(rows)


def test_readers_see_one_version_or_another_while_it_is_published_again(table: Table) -> None:
    versions = [frame(*[(str(i), v, 0.0, 0.0) for i in range(50)]) for v in range(2)]
    publish(table, "s", [versions[0]])
    done = threading.Event()
    seen: list[pl.DataFrame] = []

    def look() -> None:
        while not done.is_set():
            seen.append(table.read_part("s"))

    reader = threading.Thread(target=look)
    reader.start()
    for number in range(100):
        publish(table, "s", [versions[number % 2]])
    done.set()
    reader.join()
    assert seen and all(any(rows.equals(version) for version in versions) for rows in seen)


def test_brackets_in_the_folder_are_no_pattern(tmp_path: Path) -> None:
    table = Lake(tmp_path / "br[1]").get_table("calculator/loss_deltas")
    rows = frame(("a", 1, 0.5, 0.1))
    publish(table, "s", [rows])
    assert table.scan_parts().collect().equals(rows)


def test_a_table_has_another_version_when_a_part_comes_goes_or_changes(table: Table) -> None:
    assert table.find_version() is None
    publish(table, "s", [frame(("a", 1, 0.5, 0.1))])
    alone = table.find_version()
    publish(table, "t", [frame(("b", 1, 0.5, 0.1))])
    both = table.find_version()
    publish(table, "t", [frame(("b", 2, 0.5, 0.1))])
    changed = table.find_version()
    assert len({alone, both, changed}) == 3
    table.withdraw_part("t")
    assert table.find_version() == alone
    spoil(table, "s")
    assert table.find_version() is None


def test_a_pointer_is_whole_only_while_its_files_are(table: Table) -> None:
    assert table.find_checked_pointer("s") is None
    published = publish(table, "s", [frame(("a", 1, 0.5, 0.1))])
    assert table.find_checked_pointer("s") == published == table.read_pointer("s")
    file_of(table).write_bytes(b"")
    assert table.find_checked_pointer("s") is None and table.has_part("s")


def test_the_record_is_asked_for_after_the_last_frame(table: Table) -> None:
    counted: list[int] = []

    def frames() -> Iterator[pl.DataFrame]:
        for number in range(3):
            counted.append(number)
            yield frame((str(number), number, 0.0, 0.0))

    table.publish("s", frames(), lambda: {"frames": len(counted)})
    assert table.read_record("s") == {"frames": 3}


@given(content=st.dictionaries(st.text(), st.text() | st.integers() | st.floats(allow_nan=False), min_size=1))
def test_a_sealed_record_is_read_as_it_was_written_and_no_changed_byte_is_believed(content: dict[str, object]) -> None:
    content.pop(SEAL_FIELD, None)
    written = seal_record("a record", {"layout": 1, **content})
    assert unseal_record(written) == {"layout": 1, **content}
    for place in range(len(written)):
        changed = bytearray(written)
        changed[place] ^= 1
        with pytest.raises(ValueError):
            unseal_record(bytes(changed))


def test_within_a_glance_a_part_is_looked_at_once_and_after_it_anew(table: Table) -> None:
    publish(table, "one", [frame(("a", 1, 0.5, 0.1))])
    with enter_session():
        before = table.find_part_version("one"), table.find_version()
        other = threading.Thread(target=publish, args=(table, "one", [frame(("a", 2, 0.5, 0.1))]))
        other.start()
        other.join()
        assert (table.find_part_version("one"), table.find_version()) == before
    after = table.find_part_version("one"), table.find_version()
    assert None not in after and not set(after) & set(before)


def test_writers_of_one_table_keep_the_parts_of_each(tmp_path: Path) -> None:
    def write(writer: int) -> None:
        lake = Lake(tmp_path)
        with lake.batch_publications():
            for number in range(10):
                publish(lake.get_table("t"), f"{writer} {number}", [frame(("a", writer, 0.5, 0.1))])
                lake.flush_manifests()

    threads = [threading.Thread(target=write, args=(writer,)) for writer in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (
        len(Lake(tmp_path).get_table("t").list_part_names()) == 40
        and Lake(tmp_path).get_table("t").find_manifest_damage() is None
    )


def test_a_batch_is_seen_by_its_own_session_at_once_and_by_others_when_it_is_written(tmp_path: Path) -> None:
    mine = Lake(tmp_path)
    table = Lake(tmp_path).get_table("t")
    others: list[list[str]] = []

    def look() -> None:
        others.append(Lake(tmp_path).get_table("t").list_part_names())

    def ask() -> None:
        thread = threading.Thread(target=look)
        thread.start()
        thread.join()

    with pytest.raises(RuntimeError), mine.batch_publications():
        publish(table, "s", [frame(("a", 1, 0.5, 0.1))])
        assert table.list_part_names() == ["s"]
        ask()
        raise RuntimeError
    ask()
    assert others == [[], ["s"]], "what was made before an error is kept"
    assert table.read_part("s").height == 1
