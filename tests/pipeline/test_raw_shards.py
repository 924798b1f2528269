"""Reading shard files of any published form: the same tables, and what is left out is counted and stops nothing."""

import gzip
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from polars.testing import assert_frame_equal

from tests.pipeline.conftest import Line, NewLine
from toolformer_dag.files import UserError
from toolformer_dag.texts.formats import FormatChoice
from toolformer_dag.texts.readers.hub_datasets import iter_hub_batches, resolve_hub_split
from toolformer_dag.texts.shard_faults import ShardError

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
    assert line.output(RAW).table.read_part("one")["digest"].to_list() == ["a", "c"]
    assert sum(report.rejections_by_reason.values()) == 4 and report.rejections_by_reason["duplicate_digest"] == 1
    described = line.lake.get_table("ccnet/rejected_lines")
    assert described.read_part("one")["line"].to_list() == [2, 3, 4, 5] and described.read_part("good").is_empty()
    counts = line.output(RAW).table.read_record("one")["rejections"]
    assert {(c["shard"], c["reason"]): c["count"] for c in counts} == {
        ("one", reason): count for reason, count in report.rejections_by_reason.items()
    }


def test_a_file_whose_name_is_not_utf_8_is_read_and_refused_as_any_other(
    line: Line, caplog: pytest.LogCaptureFixture
) -> None:
    line.set(corpus__shards='["web"]')
    (line.web / "a\udcff.jsonl").write_bytes(record("a", "one"))
    (line.web / "\udcff").mkdir()
    pq.write_table(pa.table({"text": ["two"]}), line.web / "b.parquet")
    (line.web / "b.parquet").rename(line.web / "\udcff" / "b.parquet")
    (line.web / "lost\udcff.jsonl").symlink_to("nothing")
    line.update(RAW)
    documents = {
        name: line.output(RAW).table.read_part(name).height for name in line.output(RAW).table.list_part_names()
    }
    assert documents == {"a\\udcff": 1, "\\udcff/b": 1, "good": documents["good"], "lost\\udcff": 0}
    [described] = line.lake.get_table("ccnet/rejected_lines").read_part("lost\\udcff").to_dicts()
    assert described["reason"] == "unreadable" and "lost\\udcff.jsonl cannot be read" in described["detail"]
    assert "lost\\udcff.jsonl holds no document" in caplog.text


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
    assert line.update(RAW)[RAW].row_count_by_part == {"odd": 2}
    assert [one.message for one in caplog.records] == [
        f"{line.web / 'odd.json.gz'}: what counts as empty: language: expected text, found list (2 times)"
    ]


def test_what_a_library_cannot_read_is_one_rejection_and_stops_no_other(line: Line) -> None:
    line.set(corpus__shards='["web/*"]')
    joined = pa.Table.from_arrays([pa.array(["a"]), pa.array(["b"])], ["text", "text"])
    pq.write_table(joined, line.web / "joined.parquet")
    report = line.update(RAW)[RAW]
    assert report.row_count_by_part == {"good": 6, "joined": 0} and report.rejections_by_reason == {
        "unreadable_data": 1
    }
    [described] = line.lake.get_table("ccnet/rejected_lines").read_part("joined").to_dicts()
    assert described["line"] == 0 and '"text" exists 2 times' in described["detail"]


@pytest.mark.parametrize(
    ("target", "reason"), [("late.json", "No such file"), ("/proc/self/mem", "Input/output error")]
)
def test_a_file_that_cannot_be_read_is_one_rejection_stops_no_other_and_is_tried_again(
    line: Line, target: str, reason: str
) -> None:
    (line.web / "link").symlink_to(line.folder / target)
    line.set(corpus__shards='["web/*"]')
    [bad] = line.plan().shards_by_name.keys() - {"good"}
    report = line.update(RAW, "heuristic_subset")[RAW]
    assert report.row_count_by_part == {"good": 6, bad: 0} and report.rejections_by_reason == {"unreadable": 1}
    assert line.output("heuristic_subset").table.read_part("good").height == 12
    [described] = line.lake.get_table("ccnet/rejected_lines").read_part(bad).to_dicts()
    assert (described["line"], described["reason"]) == (0, "unreadable") and reason in described["detail"]
    again = line.update(RAW)[RAW]
    assert again.updated_parts == (bad,) and again.reasons.is_retry_only and not again.is_unchanged
    assert again.data_version == report.data_version
    [note] = again.reasons.lines
    assert note.startswith(f"{bad} could not be read: ")


def test_a_shard_that_can_be_read_again_is_read_and_nothing_else_is(line: Line) -> None:
    (line.web / "link").symlink_to(line.folder / "late.json")
    line.set(corpus__shards='["web/*"]')
    line.update(RAW)
    (line.folder / "late.json").write_bytes(record("a", "one"))
    report = line.update(RAW)[RAW]
    assert (report.updated_parts, report.row_count_by_part, report.rejections_by_reason) == (
        ("link",),
        {"good": 6, "link": 1},
        {},
    )
    assert line.update(RAW)[RAW].is_unchanged


def test_documents_before_a_fault_leave_no_file_and_no_other_rejection(
    line: Line, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("toolformer_dag.lake.parquet.pieces.__defaults__", (1,))
    monkeypatch.setattr("toolformer_dag.texts.compression.BLOCK_BYTES", 1000)
    lines = [record(str(number), f"{number} {'x' * 50}") for number in range(50)]
    path = write(line, "bad", [b"{\n", *lines])
    path.write_bytes(path.read_bytes()[:-8] + b"checksum")
    report = line.update(RAW)[RAW]
    assert report.row_count_by_part == {"good": 6, "bad": 0} and report.rejections_by_reason == {"corrupt_gzip": 1}
    table = line.output(RAW).table
    named = {file.name for file in table.read_pointer("bad").files}
    assert {file.name for file in (table.folder / "files" / "bad").iterdir()} == named
    assert table.read_part("bad").is_empty()
    assert line.lake.get_table("ccnet/rejected_lines").read_part("bad")["reason"].to_list() == ["corrupt_gzip"]


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
    assert not line.update("heuristic_subset")["heuristic_subset"].is_unchanged
    assert told == ["de", "xx"]


def test_the_small_web_is_written_where_no_shards_are_named(line: Line) -> None:
    line.set(corpus__shards="[]", corpus__small_web__documents=9, corpus__small_web__shards=2)
    assert sum(line.update(RAW)[RAW].row_count_by_part.values()) == 9
    assert line.update(RAW)[RAW].is_unchanged


Record = dict[str, Any]
HIDDEN = ("shard", "digest", "url")
"""The columns in which forms may differ, beside the documents themselves."""


def lines(records: list[Record]) -> bytes:
    return b"".join(json.dumps(record).encode() + b"\n" for record in records)


def pages(line: Line) -> list[Record]:
    """Return the records of the line's shards."""
    return [json.loads(one) for path in sorted(line.web.iterdir()) for one in gzip.open(path)]


def fineweb_rows(records: list[Record]) -> list[Record]:
    crawl = {"dump": "CC-MAIN-2023-06", "file_path": "s3://commoncrawl/x.warc.gz", "date": "2023-01-29T13:05:43Z"}
    more = {"language": "en", "language_score": 0.98, "token_count": 11}
    return [
        {"text": one["raw_content"], "id": f"<urn:uuid:{i}>", "url": one["url"], **crawl, **more}
        for i, one in enumerate(records)
    ]


def results(line: Line) -> dict[str, pl.DataFrame]:
    """Return all tables without what may differ, sorted by what is left."""
    found = {}
    for output in line.outputs().values():
        if output.stage.name != "raw_shards":
            frame = line.read(output.stage.name).drop(HIDDEN, strict=False)
            found[output.name] = frame.with_columns(pl.col(pl.List).list.join(",")).sort(pl.all())
    return found


def in_form(new_line: NewLine, records: list[Record], form: str) -> Line:
    line = new_line("unused")
    line.set(corpus__texts_per_shard=15, evaluation__swapped_texts=5, training__examples_per_tool=9, tau_f=-1.0)
    folder = line.folder / "dataset" / "data"
    folder.mkdir(parents=True)
    if form == "ccnet":
        (folder / "crawl.json.gz").write_bytes(gzip.compress(lines(records)))
    else:
        table = pa.Table.from_pylist(fineweb_rows(records))
        pq.write_table(table, folder / "train-00000-of-00001.parquet", row_group_size=7)
    if form == "hub":
        line.set(corpus__shards="[]", corpus__hub="dataset")
    else:
        line.set(corpus__shards='["dataset"]')
    return line


@pytest.fixture(scope="module")
def expected(new_line: NewLine) -> tuple[list[Record], dict[str, pl.DataFrame]]:
    """The records of a few shards, and the tables that they give as CCNet's lines."""
    records = pages(new_line("a", "b", "c", "d"))
    line = in_form(new_line, records, "ccnet")
    line.update()
    return records, results(line)


@pytest.mark.parametrize("form", ["fineweb", "hub"])
def test_the_same_texts_in_any_form_give_the_same_tables(
    new_line: NewLine, expected: tuple[list[Record], dict[str, pl.DataFrame]], form: str
) -> None:
    records, tables = expected
    line = in_form(new_line, records, form)
    line.update()
    found = results(line)
    assert found.keys() == tables.keys()
    for name, frame in found.items():
        assert_frame_equal(frame, tables[name], abs_tol=1e-5)
    assert tables["calculator/scored_candidates"].height and tables["training/augmented_corpus"].height


def hub_line(new_line: NewLine, rows: Mapping[str, list[Record]]) -> Line:
    """A line over a data set folder with one file of JSON lines per entry."""
    line = new_line("unused")
    for name, records in rows.items():
        path = line.folder / "dataset" / "data" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(lines(records))
    line.set(corpus__shards="[]", corpus__hub="dataset")
    return line


def test_a_data_file_of_the_hub_is_a_shard_and_its_revision_is_in_the_record(new_line: NewLine) -> None:
    rows = {
        f"train-{i}.jsonl": [{"text": f"{i} and {j} make {i + j} .", "id": f"{i}{j}"} for j in range(3)] for i in (0, 1)
    }
    line = hub_line(new_line, rows)
    assert line.update("raw_shards")["raw_shards"].row_count_by_part == {"data/train-0": 3, "data/train-1": 3}
    table = line.output("raw_shards").table
    records = [table.read_record(part) for part in table.list_part_names()]
    assert len({record["revision"] for record in records}) == 1 and records[0]["hub"].endswith("/dataset")
    assert records[0]["format"] == "plain"
    assert line.update("raw_shards")["raw_shards"].is_unchanged
    (line.folder / "dataset" / "data" / "train-1.jsonl").write_bytes(lines([{"text": "new .", "id": "x"}]))
    report = line.update("raw_shards")["raw_shards"]
    assert (report.updated_parts, report.row_count_by_part) == (
        ("data/train-1",),
        {"data/train-0": 3, "data/train-1": 1},
    )
    assert table.read_record("data/train-1")["revision"] != records[1]["revision"]


def test_a_data_file_that_datasets_cannot_read_stops_no_other(new_line: NewLine) -> None:
    line = hub_line(new_line, {"train-0.jsonl": [{"text": "a"}], "train-1.jsonl": [{"text": "b"}]})
    (line.folder / "dataset" / "data" / "train-1.jsonl").write_bytes(b'{"text": "c"}\n{"text": \n')
    report = line.update("raw_shards")["raw_shards"]
    assert report.row_count_by_part == {"data/train-0": 1, "data/train-1": 0} and report.rejections_by_reason == {
        "unreadable_data": 1
    }
    [described] = line.lake.get_table("ccnet/rejected_lines").read_part("data/train-1").to_dicts()
    assert described["detail"].endswith("; download the data set and name its files in corpus.shards")


def test_a_data_set_that_is_gone_when_a_shard_is_read_can_be_tried_again(new_line: NewLine) -> None:
    line = hub_line(new_line, {"train-0.jsonl": [{"text": "a"}]})
    data = line.folder / "dataset"
    split = resolve_hub_split(str(data), None, "train", None)
    (data / "data" / "train-0.jsonl").rename(data / "data" / "test-0.jsonl")
    with pytest.raises(ShardError, match="has no split 'train'"):
        list(iter_hub_batches(split, 0, FormatChoice()))


def test_a_split_or_data_set_that_is_not_there_is_named(new_line: NewLine) -> None:
    line = hub_line(new_line, {"train-0.jsonl": [{"text": "a"}]})
    line.set(corpus__split="test")
    with pytest.raises(UserError, match=r"corpus.split: .* has no split 'test'; it has train"):
        line.update("raw_shards")
    line.set(corpus__configuration="no")
    with pytest.raises(UserError, match=r"corpus.hub: .* cannot be opened .*no.*; correct corpus.hub"):
        line.update("raw_shards")


def test_a_configuration_of_the_data_set_is_read(new_line: NewLine) -> None:
    line = hub_line(new_line, {"en/train.jsonl": [{"text": "english"}], "de/train.jsonl": [{"text": "deutsch"}]})
    card = "configs:\n- config_name: en\n  data_files: data/en/*\n- config_name: de\n  data_files: data/de/*\n"
    (line.folder / "dataset" / "README.md").write_text(f"---\n{card}---\n")
    line.set(corpus__configuration="de")
    assert line.update("raw_shards")["raw_shards"].row_count_by_part == {"data/de/train": 1}
    assert line.read("raw_shards")["text"].to_list() == ["deutsch"]
