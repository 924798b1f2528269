"""Reading shards: what is a document, what is not and why, and how much memory it takes."""

import bz2
import gzip
import json
import lzma
import math
import random
import tracemalloc
from codecs import BOM_UTF8
from collections.abc import Callable, Iterable
from datetime import date
from pathlib import Path

import pyarrow as pa
import pytest

from tests.texts.reading import read_documents
from toolformer_dag.texts.columns import Rejection
from toolformer_dag.texts.compression import BLOCK_BYTES
from toolformer_dag.texts.document import Document
from toolformer_dag.texts.readers.json_lines import MAX_LINE_BYTES
from toolformer_dag.texts.shard_reader import ShardError


def record(number: int, **changes: object) -> bytes:
    fields = {
        "url": f"https://example.org/2017/03/09/page-{number}/",
        "date_download": "2019-01-01T00:00:00Z",
        "digest": f"sha1:{number}",
        "source_domain": "example.org",
        "title": "",
        "raw_content": f"Text {number}.\nSecond line.",
        "language": "en",
        "perplexity": None,
        "line_ids": [0, 1],
    } | changes
    return json.dumps({name: value for name, value in fields.items() if value is not ...}).encode()


def write(path: Path, lines: Iterable[bytes]) -> Path:
    content = b"".join(line + b"\n" for line in lines)
    path.write_bytes(gzip.compress(content, 1) if path.suffix == ".gz" else content)
    return path


def read(path: Path | str) -> tuple[list[Document], list[tuple[int, str]]]:
    items = list(read_documents(path, "a"))
    rejected = [(item.line_number, item.reason) for item in items if isinstance(item, Rejection)]
    return [item for item in items if isinstance(item, Document)], rejected


@pytest.mark.parametrize("name", ["shard.json.gz", "shard.json", "shard.jsonl"])
def test_documents_carry_what_the_record_holds(tmp_path: Path, name: str) -> None:
    documents, rejected = read(
        write(tmp_path / name, [record(1, title="A title"), record(2, url="https://example.org/")])
    )
    assert rejected == []
    assert documents[0] == Document(
        "a", "sha1:1", "https://example.org/2017/03/09/page-1/", "example.org", "A title", date(2017, 3, 9), "en",
        "Text 1.\nSecond line.",
    )  # fmt: skip
    assert documents[1].date is None and documents[1].digest == "sha1:2"


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b"{", "not_json"), (b"\x00", "not_json"), (b'{"url": "\\ud800"}', "missing_field"),
        (b"NaN", "not_json"), (b'{"url": "\xff"}', "not_utf8"), (b"\xff\xfe{}", "not_utf8"), (b"[]", "wrong_type"),
        (b"1", "wrong_type"), (b"null", "wrong_type"), (b"{}", "missing_field"),
        (record(1, raw_content=...), "missing_field"), (record(1, digest=...), "missing_field"),
        (record(1, url=...), "missing_field"), (record(1, url=7), "wrong_type"),
        (record(1, raw_content=None), "wrong_type"), (record(1, digest=["x"]), "wrong_type"),
        (record(1, raw_content=" \n"), "empty_text"),
        (record(0), "duplicate_digest"), (b"[" * 100_000, "not_json"),
        (b" " * (MAX_LINE_BYTES + 1), "line_too_long"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)  # fmt: skip
def test_a_bad_line_is_named_and_the_rest_goes_through(tmp_path: Path, line: bytes, reason: str) -> None:
    documents, rejected = read(write(tmp_path / "shard.json.gz", [record(0), line, record(2)]))
    assert [document.digest for document in documents] == ["sha1:0", "sha1:2"]
    assert rejected == [(2, reason)]


ONE = ("sha1:1", "Text 1.")
TWO = ("sha1:2", "Text 2.")
THREE = ("sha1:3", "Text 3.")
OTHER = [*(bz2.compress(b"{}", level) for level in (1, 9)), lzma.compress(b"{}"), b"PK\x03\x04..."]
CONTENTS: dict[str, tuple[str, bytes, list[tuple[str, str]], list[tuple[int, str]]]] = {
    "bad and blank first lines": (
        "x.jsonl",
        b"\n \r\n" * 200 + b"{\n" + record(1) + b"\n\n",
        [ONE],
        [(401, "not_json")],
    ),
    "a rejected record is no duplicate": (
        "x.json",
        record(1, raw_content="") + b"\n" + record(1),
        [ONE],
        [(1, "empty_text")],
    ),
    "no newline at the end": ("x.json", record(1) + b"\r\n" + record(2), [ONE, TWO], []),
    "byte order mark": ("x.json", BOM_UTF8 + record(1) + b"\n" + record(2), [ONE, TWO], []),
    "what nothing is decided by": (
        "x.json",
        b"\n".join(
            [record(1, title=None, language=...), record(2, perplexity=math.nan), record(3, perplexity=-math.inf)]
        ),
        [ONE, TWO, THREE],
        [],
    ),
    "a plain file named gz": ("x.json.gz", record(1), [], [(0, "not_gzip")]),
    "a gzip file named json": ("x.json", gzip.compress(record(1)), [ONE], []),
    "gzip members and padding": (
        "x.json.gz",
        b"".join(gzip.compress(record(n) + b"\n") for n in (1, 2)) + bytes(512),
        [ONE, TWO],
        [],
    ),
    **{
        f"empty {name} {len(content)}": (name, content, [], [(0, "empty_shard")])
        for name, content in (("x.json.gz", b""), ("x.json.gz", gzip.compress(b"")), ("x.json", b""))
    },
    **{
        f"another compression {number} in {name}": (name, content, [], [(0, "unsupported_compression")])
        for name in ("x.zst", "x.json.gz", "x.json")
        for number, content in enumerate(OTHER)
    },
}


@pytest.mark.parametrize("case", CONTENTS)
def test_a_shard_gives_its_documents_and_names_the_rest(tmp_path: Path, case: str) -> None:
    name, content, expected, reasons = CONTENTS[case]
    (tmp_path / name).write_bytes(content)
    documents, rejected = read(tmp_path / name)
    assert [(document.digest, document.text.partition("\n")[0]) for document in documents] == expected
    assert rejected == reasons


@pytest.mark.parametrize(
    ("content", "remedy"),
    [
        (b'[{"text": "a"}, {"text": "b"}]', "one JSON array"),
        (b'[\n  {"text": "a"},\n  {"text": "b"}\n]\n', "one JSON array"),
        (b'{\n  "text": "a"\n}\n', "jq -c ."),
        (b"a,b\n1,2\n", "write one object per line"),
    ],
)
def test_a_file_that_is_no_json_lines_is_one_fault_with_a_remedy(tmp_path: Path, content: bytes, remedy: str) -> None:
    (tmp_path / "x.json").write_bytes(content)
    [fault] = read_documents(tmp_path / "x.json", "a")
    assert isinstance(fault, Rejection) and (fault.line_number, fault.reason) == (0, "not_json_lines")
    assert remedy in fault.detail


def test_a_line_at_the_limit_is_read(tmp_path: Path) -> None:
    fits = record(1, raw_content="x" * (MAX_LINE_BYTES - len(record(1, raw_content="")) - 1))
    documents, rejected = read(write(tmp_path / "shard.json", [fits, record(2), fits[:-2] + b'x"}', record(3)]))
    assert [document.digest for document in documents] == ["sha1:1", "sha1:2", "sha1:3"]
    assert rejected == [(3, "line_too_long")]


def test_a_shard_that_cannot_be_opened_is_an_error_with_a_remedy(tmp_path: Path) -> None:
    for path in (tmp_path / "missing.json.gz", tmp_path, str(tmp_path / "missing.json")):
        with pytest.raises(ShardError, match=r"cannot be read .* correct its path"):
            list(read_documents(path, "a"))


@pytest.mark.parametrize(
    ("damage", "fault"),
    [
        *(
            (lambda packed, keep=keep: packed[: int(len(packed) * keep)], "truncated_gzip")
            for keep in (0.999, 0.5, 0.1)
        ),
        (lambda packed: packed[:-8] + b"checksum", "corrupt_gzip"),
        (lambda packed: packed + b"GARBAGE", "truncated_gzip"),
        (lambda packed: packed + b"GARBAGE" * 20, "corrupt_gzip"),
    ],
)
def test_no_document_of_a_damaged_gzip_shard_is_used(
    tmp_path: Path, damage: Callable[[bytes], bytes], fault: str
) -> None:
    noise = random.Random(0)
    path = write(tmp_path / "shard.json.gz", [record(n, raw_content=noise.randbytes(500).hex()) for n in range(1000)])
    path.write_bytes(damage(path.read_bytes()))
    assert read(path) == ([], [(0, fault)])


def test_memory_does_not_grow_with_a_line_or_with_the_shard(tmp_path: Path) -> None:
    path = tmp_path / "shard.json.gz"
    with gzip.open(path, "wb", compresslevel=1) as shard:
        shard.write(record(1) + b"\n")
        for _ in range(50):
            shard.write(b"x" * 1_000_000)
        shard.write(b"\n")
        for number in range(2, 3000):
            shard.write(record(number, raw_content="word " * 2000) + b"\n")
    pools = pa.default_memory_pool()
    tracemalloc.start()
    kinds = []
    columns = 0
    for item in read_documents(path, "a"):
        kinds.append(type(item))
        columns = max(columns, pools.bytes_allocated())
    peak = tracemalloc.get_traced_memory()[1] + columns
    tracemalloc.stop()
    assert kinds.count(Document) == 2999 and kinds.count(Rejection) == 1
    assert peak < 12 * BLOCK_BYTES


def test_the_real_shards(shared: Path) -> None:
    items = [
        item
        for path in sorted((shared / "data" / "ccnet").glob("en_head_*.json.gz"))
        for item in read_documents(path, path.name)
    ]
    assert len(items) == 4035 and all(isinstance(item, Document) for item in items)
