"""Reading shard files: what is left out is counted and described, and one bad file stops no other."""

import gzip
import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.pipeline.conftest import Line, NewLine
from tests.worlds import write_shard
from toolformer_dag.settings.sections import SettingsError

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
        ("a.json", b"{}\n[]\n{}\n"),
        ("b.json.zst", b"\x28\xb5\x2f\xfd"),
        ("c.json", record("c", "x")),
    ):
        (line.web / name).write_bytes(content)
    line.update(RAW)
    assert [one.message for one in caplog.records] == [
        f"{line.web / 'a.json'} holds no document: missing_field 2, wrong_type 1",
        f"{line.web / 'b.json.zst'} holds no document: unsupported_compression 1",
    ]


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
    [note] = again.differences.lines()
    assert note.startswith(f"{bad} could not be read: ")


def test_a_shard_that_can_be_read_again_is_read_and_nothing_else_is(line: Line) -> None:
    (line.web / "link").symlink_to(line.folder / "late.json")
    line.set(corpus__shards='["web/*"]')
    line.update(RAW)
    (line.folder / "late.json").write_bytes(record("a", "one"))
    report = line.update(RAW)[RAW]
    assert (report.updated, report.rows, report.rejections) == (("late",), {"good": 6, "late": 1}, {})
    assert line.update(RAW)[RAW].unchanged


def test_no_document_of_a_file_that_breaks_off_is_used(line: Line) -> None:
    path = write_shard(line.web, "short", documents=50)
    path.write_bytes(path.read_bytes()[:-200])
    report = line.update(RAW)[RAW]
    assert report.rows["short"] == 0 and report.rejections == {"truncated_gzip": 1}


def test_files_of_one_name_are_refused(line: Line) -> None:
    write_shard(line.folder / "other", "good")
    line.set(corpus__shards='["web/*", "other/*"]')
    with pytest.raises(SettingsError, match="share the name 'good'; rename one of them"):
        line.update(RAW)


def test_the_small_web_is_written_where_no_shards_are_named(line: Line) -> None:
    line.set(corpus__shards="[]", corpus__small_web__documents=9, corpus__small_web__shards=2)
    assert sum(line.update(RAW)[RAW].rows.values()) == 9
    assert line.update(RAW)[RAW].unchanged
