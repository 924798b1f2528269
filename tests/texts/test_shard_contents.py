"""The readers agree with the obvious way to read: json line by line, pyarrow row by row; damage is named."""

import gzip
import json
import random
from datetime import date, datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.texts.reading import read_documents
from toolformer_dag.texts.columns import Rejection
from toolformer_dag.texts.document import Document
from toolformer_dag.texts.formats import FormatChoice
from toolformer_dag.texts.readers import json_lines
from toolformer_dag.texts.shard_faults import ShardFault
from toolformer_dag.texts.shard_reader import iter_shard_batches

CHOICE = FormatChoice("fineweb")
OWN = FormatChoice("plain", (("text", "t.x"), ("id", "i"), ("language", "l.0")))
texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=6) | st.sampled_from(
    ["a", "\n", "\u2028", "\x1c", "é😀"]
)
values = st.one_of(
    st.none(), texts, st.integers(-3, 3), st.booleans(), st.floats(allow_nan=True), st.lists(texts, max_size=2)
)
records = st.fixed_dictionaries(
    {},
    optional={
        "text": texts | values,
        "id": texts | values,
        "url": texts | st.none(),
        "language": texts | values,
        "z": values,
    },
)
ODD_LINES = [
    *(b"", b" ", b"{", b"}", b"{}", b"[]", b"1", b'{"text": "a"}{"text": "b"}', b'{"text": "\xff"}'),
    *(b'{"z": "\xff", "text": "b"}', b'{"text": "x",', b'"id": "y"}', b'{"text": "a", "text": "b"}'),
    *(b'\xef\xbb\xbf{"text": "c"}', b'{"text": "\\ud800"}', b'  {"text": "d"}  ', b'{"text": "e"}\r'),
    *(b'{"text": "f"}\r\r', b'{"text": "g", "z": NaN}', b'{"text": "h"},', b'{"z": {"text": 1}, "text": "i"}'),
    b'{"z": [}{], "text": "j"}',
]
json_lines_of = st.lists(
    st.one_of(
        records.map(lambda one: json.dumps(one).encode()),
        records.map(lambda one: json.dumps(one, ensure_ascii=False).encode("utf-8", "surrogatepass")),
        st.sampled_from(ODD_LINES),
    ),
    min_size=1,
    max_size=8,
)  # fmt: skip


def obviously(content: bytes) -> tuple[list[tuple[str, str]], dict[int, str]]:
    """Read lines by json alone: (digest or nothing, text), and reasons by line. Without the checks of duplicates."""
    found = []
    refused = {}
    for number, line in enumerate(content.removesuffix(b"\n").split(b"\n"), 1):
        try:
            if not line.decode("utf-8-sig", "replace").strip(" \r"):
                continue
            record = json.loads(line.decode("utf-8-sig"))
            halved = json.dumps(record, ensure_ascii=False)  # half a surrogate pair is U+FFFD
            record = json.loads("".join("\ufffd" if "\ud800" <= one <= "\udfff" else one for one in halved))
        except UnicodeDecodeError:
            refused[number] = "not_utf8"
            continue
        except ValueError:
            refused[number] = "not_json"
            continue
        if not isinstance(record, dict):
            refused[number] = "wrong_type" if not isinstance(record, float) or record == record else "not_json"
        elif "text" not in record:
            refused[number] = "missing_field"
        elif type(record["text"]) is not str:
            refused[number] = "wrong_type"
        elif not record["text"] or record["text"].isspace():
            refused[number] = "empty_text"
        else:
            id = record["id"] if type(record.get("id")) in (str, int) else None
            found.append(("" if id is None else str(id), record["text"]))
    return found, refused


def read(path: Path, choice: FormatChoice = CHOICE) -> tuple[list[Document], dict[int, str]]:
    items = list(read_documents(path, "s", choice))
    rejected = {item.line_number: item.reason for item in items if isinstance(item, Rejection)}
    return [item for item in items if isinstance(item, Document)], rejected


@settings(max_examples=400, deadline=None)
@given(json_lines_of, st.sampled_from([b"\n", b"\r\n"]), st.booleans())
@example([b'{"text":"a","z":' + b"[" * 5 + b"]" * 5 + b"}", b'{"text":"b"}'], b"\n", True)
def test_lines_are_read_as_json_reads_them(tmp_path_factory: pytest.TempPathFactory, lines, ending, last) -> None:
    path = tmp_path_factory.getbasetemp() / "lines.jsonl"
    content = ending.join(lines) + (ending if last else b"")
    path.write_bytes(content or b"\n")
    documents, refused = read(path)
    if not any(
        isinstance(one := json_lines._parse_json_line(line), dict) and "text" in one for line in content.split(b"\n")
    ):
        assert not documents  # the whole shard, or every line, is refused
        return
    expected, reasons = obviously(content.removeprefix(b"\xef\xbb\xbf"))
    twice = {line for line, reason in refused.items() if reason == "duplicate_digest"}
    assert {line: reason for line, reason in refused.items() if line not in twice} == reasons
    found = [(document.digest, document.text) for document in documents]
    assert len(found) + len(twice) == len(expected)
    kept: dict[str, tuple[str, str]] = {}
    for id, text in expected:
        kept.setdefault(id or f"text {text}", (id, text))
    assert [text for _, text in found] == [text for _, text in kept.values()]
    assert all(digest == id for (digest, _), (id, _) in zip(found, kept.values(), strict=True) if id)


def column(kind: pa.DataType, values: list[Any]) -> pa.Array:
    if pa.types.is_dictionary(kind):
        return pa.array(values, kind.value_type).dictionary_encode()
    return pa.array(
        [v.encode() if pa.types.is_binary(kind) or pa.types.is_large_binary(kind) else v for v in values], kind
    )


@pytest.mark.parametrize(
    "kind",
    [
        pa.string(),
        pa.large_string(),
        pa.string_view(),
        pa.binary(),
        pa.large_binary(),
        pa.dictionary(pa.int32(), pa.string()),
    ],
    ids=str,
)
@pytest.mark.parametrize("compression", ["snappy", "zstd", "gzip", "none"])
def test_text_of_any_column_type_is_read(tmp_path: Path, kind: pa.DataType, compression: str) -> None:
    rows = [f"text {i} é😀" * (i % 3 + 1) for i in range(50)]
    table = pa.table({"text": column(kind, rows), "id": pa.array(range(50), pa.int64()), "extra": [[1]] * 50})
    pq.write_table(table, tmp_path / "x.parquet", compression=compression, row_group_size=7)
    documents, refused = read(tmp_path / "x.parquet")
    assert [(one.digest, one.text) for one in documents] == [
        (str(i), row) for i, row in enumerate(rows)
    ] and not refused


cells = st.one_of(st.none(), texts)
parquet_rows = st.lists(
    st.fixed_dictionaries(
        {
            "t": st.one_of(st.none(), st.fixed_dictionaries({"x": cells, "y": st.integers(0, 9)})),
            "i": st.one_of(st.none(), st.integers(-5, 2**40)),
            "l": st.one_of(st.none(), st.lists(cells, max_size=2)),
            "u": cells,
        }
    ),
    min_size=1,
    max_size=12,
)
SCHEMA = pa.schema(
    {"t": pa.struct({"x": pa.string(), "y": pa.int32()}), "i": pa.int64(), "l": pa.list_(pa.string()), "u": pa.string()}
)


@settings(max_examples=60, deadline=None)
@given(parquet_rows, st.integers(1, 5))
def test_rows_are_read_as_pyarrow_reads_them(tmp_path_factory: pytest.TempPathFactory, rows, group) -> None:
    path = tmp_path_factory.getbasetemp() / "rows.parquet"
    pq.write_table(pa.Table.from_pylist(rows, schema=SCHEMA), path, row_group_size=group)
    documents, refused = read(path, OWN)
    expected = []
    seen = set()
    for number, row in enumerate(pq.read_table(path).to_pylist(), 1):
        text = row["t"] and row["t"]["x"]
        language = row["l"][0] if row["l"] else None
        if text is None:
            assert refused.pop(number) == "wrong_type"
        elif not text or text.isspace():
            assert refused.pop(number) == "empty_text"
        elif (key := f"text {text}" if row["i"] is None else str(row["i"])) in seen:
            assert refused.pop(number) == "duplicate_digest"
        else:
            seen.add(key)
            expected.append((text, language))
    assert not refused and [(one.text, one.language) for one in documents] == expected


def test_bytes_that_are_not_utf_8_are_counted_row_by_row(tmp_path: Path) -> None:
    for name, kind in (("declared", pa.string()), ("plain", pa.binary())):
        cells = pa.array([b"one", b"\xff", b"three"], pa.binary())
        text = pa.Array.from_buffers(kind, 3, cells.buffers())
        pq.write_table(pa.table({"text": text}), tmp_path / f"{name}.parquet", store_schema=False)
        documents, refused = read(tmp_path / f"{name}.parquet")
        assert ([one.text for one in documents], refused) == (["one", "three"], {2: "not_utf8"})


def test_bytes_that_are_not_utf_8_inside_structs_and_lists_are_counted_too(tmp_path: Path) -> None:
    bad = pa.array([b"one", b"\xff", b"three"], pa.binary())
    text = pa.Array.from_buffers(pa.string(), 3, bad.buffers())
    metadata = pa.StructArray.from_arrays([text, pa.array([1, 2, 3])], ["url", "n"])
    links = pa.ListArray.from_arrays(pa.array([0, 1, 2, 3], pa.int32()), text)
    table = pa.table({"text": ["a", "b", "c"], "id": ["1", "2", "3"], "metadata": metadata, "links": links})
    pq.write_table(table, tmp_path / "x.parquet", store_schema=False)
    for fields in ((), (("url", "links.0"),)):
        [batch] = iter_shard_batches(tmp_path / "x.parquet", FormatChoice("datatrove", fields))
        assert batch.frame["url"].to_list() == ["one", "", "three"]
        assert any("not UTF-8" in told for told in batch.ignored_value_counts)
    for place in ("metadata.url", "links.0"):
        documents, refused = read(tmp_path / "x.parquet", FormatChoice("plain", (("text", place),)))
        assert ([one.text for one in documents], refused) == (["one", "three"], {2: "not_utf8"})


def bad_text() -> pa.Array:
    """Return three texts, of which the second is not UTF-8."""
    cells = pa.array([b"one", b"\xff", b"three"], pa.binary())
    return pa.Array.from_buffers(pa.string(), 3, cells.buffers())


def in_map(values: pa.Array) -> pa.Array:
    """Return three maps, with the key `url` alone."""
    return pa.MapArray.from_arrays(pa.array(range(4), pa.int32()), pa.array(["url"] * 3), values)


def categories() -> pa.Array:
    """Return texts as a dictionary, which holds the one that is not UTF-8."""
    return pa.DictionaryArray.from_arrays(pa.array(range(3), pa.int32()), bad_text())


URLS = {
    "map": in_map(bad_text()),
    "map of categories": in_map(categories()),
    "text": bad_text(),
    "categories": categories(),
    "large list": pa.LargeListArray.from_arrays(pa.array(range(4)), bad_text()),
    "list of one": pa.FixedSizeListArray.from_arrays(bad_text(), 1),
}


@pytest.mark.parametrize("form", URLS)
def test_a_value_that_is_not_utf_8_costs_its_field_in_one_row(tmp_path: Path, form: str) -> None:
    pq.write_table(pa.table({"text": ["a", "b", "c"], "u": URLS[form]}), tmp_path / "x.parquet")
    path = "u.url" if "map" in form else "u.0" if "list" in form else "u"
    [batch] = iter_shard_batches(tmp_path / "x.parquet", FormatChoice("auto", (("url", path),)))
    assert batch.frame["text"].to_list() == ["a", "b", "c"]
    assert [bool(url) for url in batch.frame["url"]] == [True, False, True]


def test_a_category_that_is_not_utf_8_costs_its_row(tmp_path: Path) -> None:
    pq.write_table(pa.table({"text": categories()}), tmp_path / "x.parquet")
    documents, refused = read(tmp_path / "x.parquet", FormatChoice())
    assert (len(documents), refused) == (2, {2: "not_utf8"})


@pytest.mark.parametrize("kind", [pa.date32(), pa.timestamp("us"), pa.timestamp("ms", "UTC")], ids=str)
def test_days_after_the_year_9999_cost_no_row(tmp_path: Path, kind: pa.DataType) -> None:
    days = pa.array([0, 4_000_000, 1], pa.int32()).cast(pa.date32()).cast(pa.timestamp("ms")).cast(kind)
    table = pa.table({"text": ["a", "b", "c"], "id": ["1", "2", "3"], "metadata": in_map(days)})
    pq.write_table(table.append_column("url", days), tmp_path / "x.parquet")
    [batch] = iter_shard_batches(tmp_path / "x.parquet", FormatChoice("auto", (("date", "url"),)))
    assert [day and day.year for day in batch.frame["date"]] == [1970, None, 1970]
    assert sum(batch.ignored_value_counts.values()) >= 3


def test_dates_of_any_column_type_are_read(tmp_path: Path) -> None:
    days = {"day": [date(2020, 1, 2)], "time": [datetime(2020, 1, 2, 23, 59)], "text_of": ["2020-01-02T01:02:03Z"]}
    pq.write_table(pa.table({"text": ["a"], **days, "number": [7]}), tmp_path / "x.parquet")
    for name in days:
        [one] = read(tmp_path / "x.parquet", FormatChoice("plain", (("date", name),)))[0]
        assert one.date == date(2020, 1, 2)
    assert read(tmp_path / "x.parquet", FormatChoice("plain", (("date", "number"),)))[0][0].date is None


def parquet(path: Path, rows: int = 3000) -> bytes:
    noise = random.Random(0)
    table = pa.table({"text": [noise.randbytes(40).hex() for _ in range(rows)]})
    pq.write_table(table, path, row_group_size=1000, compression="zstd", use_dictionary=False, write_page_checksum=True)
    return path.read_bytes()


@pytest.mark.parametrize("keep", [0.999, 0.5, 0.01])
def test_no_row_of_a_truncated_parquet_file_is_used(tmp_path: Path, keep: float) -> None:
    content = parquet(tmp_path / "x.parquet")
    (tmp_path / "x.parquet").write_bytes(content[: int(len(content) * keep)])
    assert read(tmp_path / "x.parquet") == ([], {0: "truncated_parquet"})


@pytest.mark.parametrize("place", [0.2, 0.9])
def test_a_damaged_page_is_a_fault_after_the_rows_before_it(tmp_path: Path, place: float) -> None:
    content = bytearray(parquet(tmp_path / "x.parquet"))
    content[int(len(content) * place)] ^= 0xFF
    (tmp_path / "x.parquet").write_bytes(content)
    with pytest.raises(ShardFault) as told:
        list(iter_shard_batches(tmp_path / "x.parquet", CHOICE))
    assert told.value.reason == "corrupt_parquet"


def test_a_damaged_footer_and_other_files_named_parquet_are_named(tmp_path: Path) -> None:
    content = bytearray(parquet(tmp_path / "x.parquet"))
    content[-400:-12] = bytes(388)
    (tmp_path / "x.parquet").write_bytes(content)
    (tmp_path / "y.parquet").write_bytes(b'{"text": "a"}\n')
    (tmp_path / "z.parquet").write_bytes(b"")
    pq.write_table(pa.table({"text": pa.array([], pa.string())}), tmp_path / "w.parquet")
    found = [read(tmp_path / f"{name}.parquet") for name in "xyzw"]
    assert found == [([], {0: reason}) for reason in ("corrupt_parquet", "not_parquet", "empty_shard", "empty_shard")]


def plain(count: int = 2000) -> bytes:
    noise = random.Random(0)
    return b"".join(json.dumps({"text": noise.randbytes(60).hex()}).encode() + b"\n" for _ in range(count))


def test_frames_skippable_frames_and_long_windows_are_one_shard(tmp_path: Path) -> None:
    content = plain()
    cut = 100_001
    skippable = b"\x5e\x2a\x4d\x18" + (7).to_bytes(4, "little") + b"ignored"
    long = zstandard.ZstdCompressionParameters.from_level(3, window_log=28, enable_ldm=True)
    first = zstandard.ZstdCompressor(compression_params=long).compress(content[:cut])
    last = zstandard.ZstdCompressor(level=19, write_checksum=True, write_content_size=False).compress(content[cut:])
    empty = zstandard.ZstdCompressor().compress(b"")
    for number, packed in enumerate(
        (first + last, skippable + first + skippable + last + skippable, first + empty + last)
    ):
        (tmp_path / f"{number}.jsonl.zst").write_bytes(packed)
        documents, refused = read(tmp_path / f"{number}.jsonl.zst")
        assert len(documents) == 2000 and not refused


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda packed: packed[:-3], "truncated_zstd"),
        (lambda packed: packed[: len(packed) // 2], "truncated_zstd"),
        (lambda packed: packed[:-1] + bytes([packed[-1] ^ 1]), "corrupt_zstd"),
        (lambda packed: packed + b"garbage", "corrupt_zstd"),
    ],
)
def test_a_fault_of_zstd_is_named_and_ends_the_shard(tmp_path: Path, damage, reason: str) -> None:
    path = tmp_path / "x.jsonl.zst"
    path.write_bytes(damage(zstandard.ZstdCompressor(write_checksum=True).compress(plain())))
    with pytest.raises(ShardFault) as told:
        list(iter_shard_batches(path, CHOICE))
    assert told.value.reason == reason


@pytest.mark.parametrize("size", [1 << 17, 1 << 18, (1 << 18) + 1, 3 << 18])
def test_gzip_content_of_whole_steps_is_not_taken_for_truncated(tmp_path: Path, size: int) -> None:
    line = b'{"text": "' + b"x" * (size - 13) + b'"}\n'
    for content in (line, b'{"text": "' + random.Random(1).randbytes((size - 13) // 2).hex().encode() + b'"}\n'):
        (tmp_path / "x.json.gz").write_bytes(gzip.compress(content))
        documents, refused = read(tmp_path / "x.json.gz")
        assert len(documents) == 1 and not refused


def test_blocks_of_any_size_give_the_same_documents(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "x.json.gz").write_bytes(gzip.compress(plain(200)))
    whole = read(tmp_path / "x.json.gz")
    for size in (1, 7, 1000):
        monkeypatch.setattr("toolformer_dag.texts.compression.BLOCK_BYTES", size)
        assert read(tmp_path / "x.json.gz") == whole
