"""Records of files: what stands in them comes out, in whatever container; what is damaged or none is named."""

import gzip
import json
from pathlib import Path
from typing import Any

import polars as pl
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from toolformer_dag.texts import record_files
from toolformer_dag.texts.columns import Rejection
from toolformer_dag.texts.record_files import NumberedRecord, iter_file_records
from toolformer_dag.texts.shard_faults import ShardError, ShardFault

TEXT = st.text(st.characters(exclude_categories=("Cs",)), max_size=20)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | TEXT,
    lambda values: st.lists(values, max_size=3) | st.dictionaries(TEXT, values, max_size=3),
    max_leaves=8,
)
RECORDS = st.lists(st.dictionaries(TEXT, VALUES, min_size=1, max_size=3), min_size=1, max_size=5)


def values(file: Path) -> list[Any]:
    """The values of the records of a file, which holds nothing else."""
    records = list(iter_file_records(file))
    assert all(isinstance(record, NumberedRecord) for record in records)
    assert [record.number for record in records if isinstance(record, NumberedRecord)] == [*range(1, len(records) + 1)]
    return [record.value for record in records if isinstance(record, NumberedRecord)]


@given(RECORDS, st.sampled_from(["", ".gz", ".zst"]), st.sampled_from(["lines", "list", "indented"]))
def test_records_come_out_of_every_container_as_they_were_written(
    tmp_path_factory: pytest.TempPathFactory, records: list[Any], packed: str, form: str
) -> None:
    file = tmp_path_factory.mktemp("records") / f"a.jsonl{packed}"
    if form == "lines":
        content = "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records).encode()
    else:
        content = json.dumps(records, indent=1 if form == "indented" else None).encode()
    pack = {"": bytes, ".gz": gzip.compress, ".zst": zstandard.compress}[packed]
    file.write_bytes(pack(content))
    assert values(file) == records


def test_rows_of_parquet_are_records(tmp_path: Path) -> None:
    rows = [{"id": n, "messages": [{"role": "user", "content": f"say {n}"}]} for n in range(5)]
    pl.DataFrame(rows).write_parquet(tmp_path / "a.parquet")
    assert values(tmp_path / "a.parquet") == rows


def test_one_record_in_many_lines_is_a_document(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(json.dumps({"messages": [{"role": "user"}]}, indent=2))
    assert values(tmp_path / "a.json") == [{"messages": [{"role": "user"}]}]


def test_nothing_that_json_or_python_writes_is_lost(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(
        b'\xef\xbb\xbf{"a": 12345678901234567890123}\n\n{"a": NaN}\n'
        b'{"a": "\\ud83d"}\n{"a": "\\ud83d\\ude00"}\r\nnull\n[1]\n'
    )
    read = [record for record in iter_file_records(tmp_path / "a.jsonl") if isinstance(record, NumberedRecord)]
    assert [record.number for record in read] == [1, 3, 4, 5, 6, 7]
    first, not_a_number, half, whole, nothing, listed = (record.value for record in read)
    assert first["a"] == 12345678901234567890123
    assert not_a_number["a"] != not_a_number["a"]
    assert (half["a"], whole["a"], nothing, listed) == ("\ufffd", "\U0001f600", None, [1])


def test_a_line_that_is_no_json_is_named_and_the_others_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(record_files, "MAX_LINE_BYTES", 100)
    lines = [b'{"a": 1}', b"{broken", b"\xff\xff", b'{"a": "' + b"7" * 200 + b'"}', b"[" * 90, b'{"a": 2}']
    (tmp_path / "a.jsonl").write_bytes(b"\n".join(lines))
    read = list(iter_file_records(tmp_path / "a.jsonl"))
    rejected = [(one.line_number, one.reason) for one in read if isinstance(one, Rejection)]
    assert rejected == [(2, "not_json"), (3, "not_utf8"), (4, "line_too_long"), (5, "not_json")]
    assert [one.number for one in read if isinstance(one, NumberedRecord)] == [1, 6]


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("a.jsonl", '{"a": 1}\n'.encode("utf-16"), "not_json_lines"),
        ("a.jsonl.gz", gzip.compress(b'{"a": 1}\n' * 1000, mtime=0)[:-20], "truncated_gzip"),
        ("a.jsonl.zst", zstandard.compress(b'{"a": 1}\n' * 1000)[:-3], "truncated_zstd"),
        ("a.jsonl.gz", b"no gzip", "not_gzip"),
        ("a.parquet", b"no parquet", "not_parquet"),
        ("a.parquet", b"PAR1 cut short", "truncated_parquet"),
        ("a.jsonl", b"<html>not found</html>", "not_json_lines"),
        ("a.jsonl", b"version https://git-lfs.github.com/spec/v1\n", "not_json_lines"),
    ],
)
def test_a_file_of_which_nothing_may_be_used_says_why(tmp_path: Path, name: str, content: bytes, reason: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ShardFault) as fault:
        list(iter_file_records(tmp_path / name))
    assert fault.value.reason == reason


def test_a_document_that_is_too_large_is_refused_and_lines_are_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(record_files, "MAX_DOCUMENT_BYTES", 1000)
    monkeypatch.setattr("toolformer_dag.texts.compression.BLOCK_BYTES", 500)
    (tmp_path / "a.json").write_text(json.dumps([{"a": n} for n in range(1000)], indent=1))
    with pytest.raises(ShardFault, match="record per line"):
        list(iter_file_records(tmp_path / "a.json"))
    (tmp_path / "a.jsonl").write_text("".join(f'{{"a": {n}}}\n' for n in range(1000)))
    assert values(tmp_path / "a.jsonl") == [{"a": n} for n in range(1000)]


def test_a_file_that_cannot_be_read_may_be_another_time(tmp_path: Path) -> None:
    for path in (tmp_path / "missing.jsonl", tmp_path):
        with pytest.raises(ShardError):
            list(iter_file_records(path))
