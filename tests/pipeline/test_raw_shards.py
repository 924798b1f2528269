"""Reading shard files: what is left out is counted and described, and one bad file stops no other."""

import gzip
import json
from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.pipeline.conftest import Line, NewLine

RAW = "raw_shards"


def record(digest: str, text: str) -> bytes:
    fields = {"url": "https://a.org/2020/02/03/x", "source_domain": "a.org", "title": "t", "language": "en"}
    return json.dumps({**fields, "digest": digest, "raw_content": text}).encode() + b"\n"


@pytest.fixture
def line(new_line: NewLine) -> Line:
    """Make a line over one good shard."""
    return new_line("good")


def write(line: Line, name: str, lines: Sequence[bytes]) -> Path:
    path = line.web / f"{name}.json.gz"
    path.write_bytes(gzip.compress(b"".join(lines)))
    return path


def test_malformed_lines_are_counted_and_described_and_the_rest_goes_through(line: Line) -> None:
    lines = [record("a", "one"), b"{\n", b"\xff\xfe\n", b'{"digest": "b"}\n', record("a", "two"), record("c", "x")]
    write(line, "one", lines)
    report = line.update(RAW)[RAW]
    assert line.output(RAW).table.read("one")["digest"].to_list() == ["a", "c"]
    assert sum(report.rejections.values()) == 4 and report.rejections["duplicate_digest"] == 1
    described = line.lake.table("ccnet/rejected_lines")
    assert described.read("one")["line"].to_list() == [2, 3, 4, 5] and described.read("good").is_empty()
    counts = line.output(RAW).table.record("one")["rejections"]
    assert {(c["shard"], c["reason"]): c["count"] for c in counts} == {
        ("one", reason): count for reason, count in report.rejections.items()
    }


def test_a_shard_without_a_document_is_warned_of(line: Line, caplog: pytest.LogCaptureFixture) -> None:
    line.set(corpus__shards='["web/*.json", "web/*.zst"]')
    for name, content in (
        ("a.json", b'{"text": 1}\n[]\n{"text": 2}\n'),
        ("b.json.zst", b"\x28\xb5\x2f\xfd"),
        ("c.json", record("c", "x")),
    ):
        (line.web / name).write_bytes(content)
    line.update(RAW)
    assert [one.message for one in caplog.records] == [
        f"{line.web / 'a.json'} holds no document: wrong_type 3 (text: expected text, found int)",
        f"{line.web / 'b.json.zst'} holds no document: truncated_zstd 1 (the checksum or the end of the compressed "
        "data is wrong: no document of it is used)",
    ]


def test_optional_fields_without_text_are_told_once_per_shard(line: Line, caplog: pytest.LogCaptureFixture) -> None:
    line.set(corpus__shards='["web/odd*"]')
    write(line, "odd", [b'{"text": "a", "language": ["en"]}\n', b'{"text": "b", "language": ["en"]}\n'])
    assert line.update(RAW)[RAW].rows == {"odd": 2}
    assert [one.message for one in caplog.records] == [
        f"{line.web / 'odd.json.gz'}: what counts as empty: language: expected text, found list (2 times)"
    ]


def test_what_a_library_cannot_read_is_one_rejection_and_stops_no_other(line: Line) -> None:
    line.set(corpus__shards='["web/*"]')
    joined = pa.Table.from_arrays([pa.array(["a"]), pa.array(["b"])], ["text", "text"])
    pq.write_table(joined, line.web / "joined.parquet")
    report = line.update(RAW)[RAW]
    assert report.rows == {"good": 6, "joined": 0} and report.rejections == {"unreadable_data": 1}
    [described] = line.lake.table("ccnet/rejected_lines").read("joined").to_dicts()
    assert described["line"] == 0 and '"text" exists 2 times' in described["detail"]


@pytest.mark.parametrize(
    ("target", "reason"), [("late.json", "No such file"), ("/proc/self/mem", "Input/output error")]
)
def test_a_file_that_cannot_be_read_is_one_rejection_stops_no_other_and_is_tried_again(
    line: Line, target: str, reason: str
) -> None:
    (line.web / "link").symlink_to(line.folder / target)
    line.set(corpus__shards='["web/*"]')
    [bad] = line.plan().shards.keys() - {"good"}
    report = line.update(RAW, "heuristic_subset")[RAW]
    assert report.rows == {"good": 6, bad: 0} and report.rejections == {"unreadable": 1}
    assert line.output("heuristic_subset").table.read("good").height == 12
    [described] = line.lake.table("ccnet/rejected_lines").read(bad).to_dicts()
    assert (described["line"], described["reason"]) == (0, "unreadable") and reason in described["detail"]
    again = line.update(RAW)[RAW]
    assert again.updated == (bad,) and again.differences.retry_only and not again.unchanged
    assert again.data_version == report.data_version
    [note] = again.differences.lines
    assert note.startswith(f"{bad} could not be read: ")


def test_a_shard_that_can_be_read_again_is_read_and_nothing_else_is(line: Line) -> None:
    (line.web / "link").symlink_to(line.folder / "late.json")
    line.set(corpus__shards='["web/*"]')
    line.update(RAW)
    (line.folder / "late.json").write_bytes(record("a", "one"))
    report = line.update(RAW)[RAW]
    assert (report.updated, report.rows, report.rejections) == (("link",), {"good": 6, "link": 1}, {})
    assert line.update(RAW)[RAW].unchanged


def test_documents_before_a_fault_leave_no_file_and_no_other_rejection(
    line: Line, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("toolformer_dag.lake.parquet.pieces.__defaults__", (1,))
    monkeypatch.setattr("toolformer_dag.texts.compression.BLOCK_BYTES", 1000)
    lines = [record(str(number), f"{number} {'x' * 50}") for number in range(50)]
    path = write(line, "bad", [b"{\n", *lines])
    path.write_bytes(path.read_bytes()[:-8] + b"checksum")
    report = line.update(RAW)[RAW]
    assert report.rows == {"good": 6, "bad": 0} and report.rejections == {"corrupt_gzip": 1}
    table = line.output(RAW).table
    named = {file.name for file in table.pointer("bad").files}
    assert {file.name for file in (table.folder / "files" / "bad").iterdir()} == named
    assert table.read("bad").is_empty()
    assert line.lake.table("ccnet/rejected_lines").read("bad")["reason"].to_list() == ["corrupt_gzip"]


def test_the_language_is_identified_for_a_tool_that_asks_for_it(line: Line, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str | None] = []
    tool = type(line.plan().lanes[0].tool)
    monkeypatch.setattr(tool, "wants_document", lambda self, document: told.append(document.language))
    german = json.dumps({"text": "Das ist ein Satz in deutscher Sprache, und er ist lang genug."}).encode() + b"\n"
    known = json.dumps({"text": "This one says its language itself.", "language": "xx"}).encode() + b"\n"
    line.set(corpus__shards='["web/plain*"]')
    write(line, "plain", [german, known])
    line.update(RAW, "heuristic_subset")
    assert line.read(RAW)["language"].to_list() == [None, "xx"] and told == [None, "xx"]
    monkeypatch.setattr(tool, "asks_language", True)
    told.clear()
    assert not line.update("heuristic_subset")["heuristic_subset"].unchanged
    assert told == ["de", "xx"]


def test_the_small_web_is_written_where_no_shards_are_named(line: Line) -> None:
    line.set(corpus__shards="[]", corpus__small_web__documents=9, corpus__small_web__shards=2)
    assert sum(line.update(RAW)[RAW].rows.values()) == 9
    assert line.update(RAW)[RAW].unchanged
