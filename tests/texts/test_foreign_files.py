"""Files as other people's programs write them: a fault is the file's own, and what is not read is counted."""

import gzip
import importlib
import io
import json
import random
import tarfile
from collections.abc import Iterator
from datetime import date, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from tests.texts.reading import read_documents
from toolformer_dag.evaluation.benchmark_files import read_wikitext_articles
from toolformer_dag.evaluation.catalogue import read_benchmark
from toolformer_dag.files import UserError
from toolformer_dag.pipeline.removed_documents import read_question_texts
from toolformer_dag.texts.columns import Rejection
from toolformer_dag.texts.document import Document
from toolformer_dag.texts.formats import AUTO_FORMAT, FormatChoice
from toolformer_dag.texts.guarded_batches import guard_from_library_errors
from toolformer_dag.texts.shard_faults import ShardError, ShardFault
from toolformer_dag.texts.shard_reader import iter_shard_batches
from toolformer_dag.tools.passages import iter_passages
from toolformer_dag.tools.registry import load_tool

URL = "https://a.org/2019/03/04/page"


def read(path: Path, **fields: str) -> tuple[list[Document], list[Rejection]]:
    items = list(read_documents(path, "s", FormatChoice(AUTO_FORMAT, tuple(fields.items()))))
    refused = [item for item in items if isinstance(item, Rejection)]
    return [item for item in items if isinstance(item, Document)], refused


def json_lines(path: Path, *records: object) -> Path:
    path.write_text("".join(json.dumps(one) + "\n" for one in records))
    return path


@pytest.mark.parametrize("twice", ["text", "url"])
def test_a_column_that_is_there_twice_refuses_its_file_by_name(tmp_path: Path, twice: str) -> None:
    columns = [("text", ["a", "b"]), ("id", ["1", "2"]), ("url", [URL, URL]), (twice, ["c", "d"])]
    arrays = [pa.array(values) for _, values in columns]
    pq.write_table(pa.Table.from_arrays(arrays, [name for name, _ in columns]), tmp_path / "joined.parquet")
    documents, [refused] = read(tmp_path / "joined.parquet")
    assert (documents, refused.line_number, refused.reason) == ([], 0, "unreadable_data")
    assert f'"{twice}" exists 2 times' in refused.detail


def test_a_field_that_is_twice_in_a_struct_refuses_its_file(tmp_path: Path) -> None:
    metadata = pa.StructArray.from_arrays([pa.array([URL]), pa.array([URL])], names=["url", "url"])
    pq.write_table(pa.table({"text": ["a"], "id": ["1"], "metadata": metadata}), tmp_path / "x.parquet")
    documents, [refused] = read(tmp_path / "x.parquet")
    assert (documents, refused.reason) == ([], "unreadable_data") and "url" in refused.detail


def test_a_package_that_is_lacking_refuses_a_shard_for_now_and_not_as_damaged() -> None:
    def reader() -> Iterator[object]:
        yield importlib.import_module("a_package_that_is_not_installed")

    with pytest.raises(ShardError, match="No module named 'a_package_that_is_not_installed'; install"):
        list(guard_from_library_errors(reader()))


class Odd:
    """A seeded writer of Parquet that no one expects."""

    leaves = (
        *(pa.string(), pa.large_string(), pa.binary(), pa.binary(3), pa.bool_(), pa.null(), pa.int8(), pa.uint64()),
        *(pa.float16(), pa.float64(), pa.decimal128(20, 3), pa.decimal256(50, 9), pa.date32(), pa.date64()),
        *(pa.time32("ms"), pa.time64("ns"), pa.timestamp("ns"), pa.timestamp("s", "Asia/Kolkata"), pa.duration("us")),
        *(pa.dictionary(pa.int8(), pa.string()), pa.timestamp("us", "Mars/Olympus")),
    )
    names = ("text", "id", "url", "metadata", "raw_content", "title", "language", "a.b", "", "date", "é")

    def __init__(self, seed: int) -> None:
        self.dice = random.Random(seed)

    def kind(self, depth: int = 0) -> pa.DataType:
        match self.dice.choice(("leaf",) * 4 + (() if depth > 2 else ("list", "fixed", "map", "struct", "struct"))):
            case "list":
                return self.dice.choice((pa.list_, pa.large_list))(self.kind(depth + 1))
            case "fixed":
                return pa.list_(self.kind(depth + 1), 2)
            case "map":
                return pa.map_(pa.string(), self.kind(depth + 1))
            case "struct":
                return pa.struct([pa.field(self.dice.choice(self.names), self.kind(depth + 1)) for _ in range(3)])
        return self.dice.choice(self.leaves)

    def values(self, kind: pa.DataType, rows: int) -> pa.Array:
        """Return values; of structs by their arrays, since a dict has no name twice."""
        if pa.types.is_struct(kind) and rows:
            return pa.StructArray.from_arrays([self.values(one.type, rows) for one in kind], fields=list(kind))
        return pa.array([self.value(kind) for _ in range(rows)], kind)

    def value(self, kind: pa.DataType) -> Any:
        dice = self.dice
        if dice.random() < 0.2 or pa.types.is_null(kind) or "Mars" in str(kind):
            return None
        if pa.types.is_map(kind):
            return [(dice.choice("ab"), self.value(kind.item_type)) for _ in range(2)]
        if pa.types.is_fixed_size_list(kind) or pa.types.is_list(kind) or pa.types.is_large_list(kind):
            return [self.value(kind.value_type) for _ in range(2)]
        if pa.types.is_struct(kind):
            return None
        if pa.types.is_dictionary(kind) or pa.types.is_string(kind) or pa.types.is_large_string(kind):
            return dice.choice(
                (f"a {dice.random()}", "", "{}", "[1", json.dumps({"url": URL}), '{"url": {"url": 1}}', "x" * 300)
            )
        if pa.types.is_binary(kind) or pa.types.is_fixed_size_binary(kind):
            return dice.choice((b"\xff\x00\x01", b"abc", b"\xed\xa0\xbd"))
        if pa.types.is_boolean(kind):
            return dice.random() < 0.5
        if pa.types.is_decimal(kind):
            return Decimal("1.234")
        if pa.types.is_date(kind):
            return date(1, 1, 1) + timedelta(dice.randrange(3_000_000))
        if pa.types.is_timestamp(kind) or pa.types.is_duration(kind) or pa.types.is_time(kind):
            return dice.randrange(1000)
        return 0.5 if pa.types.is_floating(kind) else dice.randrange(100)

    def write(self, path: Path) -> None:
        dice = self.dice
        names = [*dice.choices(self.names, k=dice.randrange(1, 6)), *(["text"] if dice.random() < 0.8 else [])]
        types = [pa.string() if name == "text" and dice.random() < 0.7 else self.kind() for name in names]
        schema = pa.schema([pa.field(name, kind) for name, kind in zip(names, types, strict=True)])
        with pq.ParquetWriter(path, schema, compression=dice.choice(("none", "snappy", "zstd"))) as writer:
            for _ in range(dice.randrange(4)):
                rows = dice.choice((0, 1, 7))  # row groups without rows too
                writer.write_table(pa.Table.from_arrays([self.values(kind, rows) for kind in types], schema=schema))


@pytest.mark.parametrize("damaged", [False, True])
def test_of_odd_parquet_come_documents_and_rejections_alone(tmp_path: Path, damaged: bool) -> None:
    """Half of them have bytes changed: null counts, sizes and statistics that lie, pages that do not decode."""
    reasons = set()
    documents = 0
    for seed in range(150):
        odd = Odd(seed)
        path = tmp_path / f"{seed}.parquet"
        odd.write(path)
        if damaged:
            content = bytearray(path.read_bytes())
            for place in odd.dice.sample(range(4, len(content) - 8), 3):
                content[place] ^= 1 << odd.dice.randrange(8)
            path.write_bytes(content)
        for fields in ({}, {"url": "metadata.url"}, {"text": "metadata.a"}, {"date": "date", "id": "id"}):
            found, refused = read(path, **fields)
            documents += len(found)
            reasons |= {one.reason for one in refused}
    assert documents > (5 if damaged else 50)
    assert {"unreadable_data", "missing_field", "wrong_type"} | ({"corrupt_parquet"} if damaged else set()) <= reasons


METADATA: dict[str, Any] = {
    "struct": pa.array([{"url": URL, "language": "en"}]),
    "text": [json.dumps({"url": URL, "language": "en"})],
    "map": pa.array([[("url", URL), ("language", "en")]], pa.map_(pa.string(), pa.string())),
    "bytes of JSON": pa.array([json.dumps({"url": URL, "language": "en"}).encode()], pa.binary()),
    "categories": pa.array([json.dumps({"url": URL, "language": "en"})]).dictionary_encode(),
}


@pytest.mark.parametrize("form", METADATA)
@pytest.mark.parametrize("fields", [{}, {"url": "metadata.url"}])
def test_metadata_is_read_as_a_struct_a_text_of_json_and_a_map(tmp_path: Path, form: str, fields: Any) -> None:
    pq.write_table(pa.table({"text": ["a"], "id": ["1"], "metadata": METADATA[form]}), tmp_path / "x.parquet")
    [document], refused = read(tmp_path / "x.parquet", **fields)
    assert (document.url, document.date, document.language, refused) == (URL, date(2019, 3, 4), "en", [])


def test_metadata_below_a_struct_and_in_json_lines_is_read_as_text_too(tmp_path: Path) -> None:
    nested = pa.array([{"more": json.dumps({"links": [URL]})}])
    pq.write_table(pa.table({"text": ["a"], "metadata": nested}), tmp_path / "x.parquet")
    [document], _ = read(tmp_path / "x.parquet", url="metadata.more.links.0")
    assert document.url == URL
    path = json_lines(tmp_path / "x.jsonl", {"text": "a", "id": "1", "metadata": json.dumps({"url": URL})})
    assert [one.url for one in read(path)[0]] == [URL]


@pytest.mark.parametrize("form", ["jsonl", "parquet"])
@pytest.mark.parametrize("metadata", ["see the page", 7, ["a"]])
def test_metadata_in_a_form_that_is_not_read_is_counted_by_field(tmp_path: Path, form: str, metadata: Any) -> None:
    records = [{"text": f"{i}", "id": f"{i}", "metadata": metadata} for i in range(3)]
    path = tmp_path / f"x.{form}"
    json_lines(path, *records) if form == "jsonl" else pq.write_table(pa.Table.from_pylist(records), path)
    [batch] = iter_shard_batches(path)
    assert batch.frame["url"].to_list() == [""] * 3 and set(batch.ignored_value_counts.values()) == {3}
    assert any(told.startswith("metadata.url: expected text, found") for told in batch.ignored_value_counts)


def test_dates_of_its_own_that_are_no_dates_are_counted(tmp_path: Path) -> None:
    days = ["2019-03-04", "4 March 2019", 1551657600, None, "", "2050-01-01"]
    path = json_lines(tmp_path / "x.jsonl", *({"text": f"{i}", "day": day} for i, day in enumerate(days)))
    [batch] = iter_shard_batches(path, FormatChoice(AUTO_FORMAT, (("date", "day"),)))
    assert batch.frame["date"].to_list() == [date(2019, 3, 4), *[None] * 5]
    assert dict(batch.ignored_value_counts) == {"day: expected a date, YYYY-MM-DD until 2026-12-31": 3}


@pytest.mark.parametrize("field", ["text", "url", "title", "id", "unknown"])
def test_half_a_surrogate_pair_is_a_replacement_character_and_costs_no_record(tmp_path: Path, field: str) -> None:
    half = f'{{"text": "whole", "{field}": "a\\ud83d \\ude00\\ud83d\\ude00"}}'
    (tmp_path / "x.jsonl").write_text(half)
    [document], refused = read(tmp_path / "x.jsonl")
    assert refused == [] and "whole" in (document.text, "whole")
    if field in ("text", "url", "title"):
        assert getattr(document, field) == "a\ufffd \ufffd\U0001f600"
    (tmp_path / "y.jsonl").write_bytes(half.replace("\\ud83d ", "@ ").encode().replace(b"@", b"\xed\xa0\xbd"))
    assert read(tmp_path / "y.jsonl") == ([document], [])


def test_half_a_surrogate_pair_in_metadata_as_text_costs_no_record(tmp_path: Path) -> None:
    metadata = json.dumps({"url": URL + "\ud83d"})
    path = json_lines(tmp_path / "x.jsonl", {"text": "a", "id": "1", "metadata": metadata})
    assert [one.url for one in read(path)[0]] == [URL + "\ufffd"]


LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:abc\nsize 12\n"
LINE = b'{"text": "a"}\n'
UTF = {"16le": b"\xff\xfe", "16be": b"\xfe\xff", "32le": b"\xff\xfe\0\0", "32be": b"\0\0\xfe\xff"}


def tar(*contents: bytes) -> bytes:
    """Return an archive with a file of each content."""
    with tarfile.open(fileobj=(archive := io.BytesIO()), mode="w") as writing:
        for number, content in enumerate(contents):
            member = tarfile.TarInfo(f"{number}.jsonl")
            member.size = len(content)
            writing.addfile(member, io.BytesIO(content))
    return archive.getvalue()


@pytest.mark.parametrize(
    ("name", "content", "told"),
    [
        ("x.jsonl", (LINE * 3).decode().encode("utf-16"), "UTF-16"),
        ("x.jsonl", (LINE * 3).decode().encode("utf-16-le"), "UTF-16"),
        ("x.jsonl", (LINE * 3).decode().encode("utf-16-be"), "UTF-16"),
        *(("x.jsonl", (LINE * 3).decode().encode(f"utf-{form}"), f"-f UTF-{form.upper()} ") for form in UTF),
        *(
            ("x.jsonl", bom + (LINE * 3).decode().encode(f"utf-{form}"), f"-f UTF-{form[:2]} ")
            for form, bom in UTF.items()
        ),
        (
            "x.jsonl.gz",
            gzip.compress(gzip.compress(LINE, mtime=0), mtime=0),
            "the content is gzip; unpack it or compress it once",
        ),
        ("x.jsonl.gz", gzip.compress(zstandard.compress(LINE), mtime=0), "the content is zstd"),
        ("x.jsonl", LFS, "Git LFS"),
        ("x.parquet", LFS, "is named .parquet but is a pointer of Git LFS"),
        ("x.jsonl.gz", LFS, "Git LFS"),
        ("x.jsonl.zst", LFS, "Git LFS"),
        ("x.jsonl", b'{"text": "a"},\n{"text": "b"},\n', "ends with a comma"),
        ("x.jsonl", b'{"text": "a",}\n{"text": "b",}\n', "trailing comma"),
        ("x.jsonl", b"<!DOCTYPE html><html>\n", "HTML"),
        ("x.jsonl", b"\n \r\n<html>\n", "HTML"),
        ("x.jsonl", b"{}\n{}\n", "holds a JSON object with fields; write"),
        ("x.json", tar(LINE * 3, LINE * 3), "an archive of tar; unpack it"),
        ("x.json.gz", gzip.compress(tar(LINE * 3, LINE * 3), mtime=0), "an archive of tar; unpack it"),
        ("x.json.zst", zstandard.compress(tar(LINE * 3)), "an archive of tar; unpack it"),
        ("x.json", b"\x00" * 257 + b"ustar" + b"\x00" * 200, "tar"),
        ("x.parquet", b"PARE" + b"\x00" * 20, "encrypted"),
        ("x.json.gz", gzip.compress(b"PAR1" + b"\x00" * 20, mtime=0), "Parquet"),
    ],
)
def test_a_file_is_named_for_what_it_is(tmp_path: Path, name: str, content: bytes, told: str) -> None:
    (tmp_path / name).write_bytes(content)
    documents, [refused] = read(tmp_path / name)
    assert (documents, refused.line_number) == ([], 0) and told in refused.detail


@pytest.mark.parametrize(("between", "told"), [(",\n", "the line ends with"), ("\n,", "the line begins with")])
def test_a_line_of_an_array_is_refused_for_its_comma(tmp_path: Path, between: str, told: str) -> None:
    (tmp_path / "x.jsonl").write_text(between.join(json.dumps({"text": f"{i}"}) for i in range(3)))
    documents, refused = read(tmp_path / "x.jsonl")
    assert len(documents) == 1 and [one.reason for one in refused] == ["not_json"] * 2
    assert all(one.detail.startswith(f"{told} a comma; take it off") for one in refused)


DICTIONARY = zstandard.train_dictionary(2000, [f"page {i} of a book".encode() * 3 for i in range(300)])


@pytest.mark.parametrize(
    ("content", "told"),
    [
        ('["a"]'.encode("utf-16"), "UTF-16"),
        ('["a"]'.encode("utf-16-le"), "UTF-16LE"),
        ("Input: a".encode("utf-16-be"), "UTF-16BE"),
        (LFS, "Git LFS"),
        (gzip.compress(gzip.compress(LINE, mtime=0), mtime=0), "gzip"),
        (zstandard.ZstdCompressor(dict_data=DICTIONARY).compress(LINE), "zstd"),
    ],
)
def test_a_benchmark_a_prompt_passages_and_texts_to_leave_out_are_named_for_what_they_are(
    tmp_path: Path, content: bytes, told: str
) -> None:
    file = tmp_path / "x.json"
    file.write_bytes(content)
    for read_one in (
        lambda: read_benchmark("svamp", file),
        lambda: read_wikitext_articles(file),
        lambda: load_tool("calculator", {"prompt": str(file)}),
        lambda: list(iter_passages(str(file))),
        lambda: read_question_texts(file),
    ):
        with pytest.raises(UserError, match=told) as refused:
            read_one()
        assert str(file) in str(refused.value)


def test_json_that_is_none_is_not_searched_for_as_text(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text('[{"question": "who",}]')
    with pytest.raises(UserError, match=r"x\.json is no readable JSON"):
        read_question_texts(tmp_path / "x.json")


def test_a_zstd_file_with_a_dictionary_is_named(tmp_path: Path) -> None:
    samples = [json.dumps({"text": f"page {i}", "url": f"https://a.org/{i}"}).encode() * 3 for i in range(300)]
    dictionary = zstandard.train_dictionary(2000, samples)
    (tmp_path / "x.jsonl.zst").write_bytes(zstandard.ZstdCompressor(dict_data=dictionary).compress(samples[0]))
    with pytest.raises(ShardFault, match="dictionary") as found:
        list(iter_shard_batches(tmp_path / "x.jsonl.zst"))
    assert found.value.reason == "unsupported_compression"
