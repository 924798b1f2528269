"""The same texts in any published form give the same tables; each form is recognized by its records."""

import gzip
import json
from collections.abc import Mapping
from typing import Any

import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from polars.testing import assert_frame_equal

from tests.pipeline.conftest import Line, NewLine
from toolformer_dag.files import UserError
from toolformer_dag.texts.formats import FormatChoice
from toolformer_dag.texts.hub_reader import hub_batches, resolve
from toolformer_dag.texts.shard_reader import ShardError

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
    assert line.update("raw_shards")["raw_shards"].rows == {"data/train-0": 3, "data/train-1": 3}
    table = line.output("raw_shards").table
    records = [table.record(part) for part in table.parts()]
    assert len({record["revision"] for record in records}) == 1 and records[0]["hub"].endswith("/dataset")
    assert records[0]["format"] == "plain"
    assert line.update("raw_shards")["raw_shards"].unchanged
    (line.folder / "dataset" / "data" / "train-1.jsonl").write_bytes(lines([{"text": "new .", "id": "x"}]))
    report = line.update("raw_shards")["raw_shards"]
    assert (report.updated, report.rows) == (("data/train-1",), {"data/train-0": 3, "data/train-1": 1})
    assert table.record("data/train-1")["revision"] != records[1]["revision"]


def test_a_data_file_that_datasets_cannot_read_stops_no_other(new_line: NewLine) -> None:
    line = hub_line(new_line, {"train-0.jsonl": [{"text": "a"}], "train-1.jsonl": [{"text": "b"}]})
    (line.folder / "dataset" / "data" / "train-1.jsonl").write_bytes(b'{"text": "c"}\n{"text": \n')
    report = line.update("raw_shards")["raw_shards"]
    assert report.rows == {"data/train-0": 1, "data/train-1": 0} and report.rejections == {"unreadable_data": 1}
    [described] = line.lake.table("ccnet/rejected_lines").read("data/train-1").to_dicts()
    assert described["detail"].endswith("; download the data set and name its files in corpus.shards")


def test_a_data_set_that_is_gone_when_a_shard_is_read_can_be_tried_again(new_line: NewLine) -> None:
    line = hub_line(new_line, {"train-0.jsonl": [{"text": "a"}]})
    data = line.folder / "dataset"
    split = resolve(str(data), None, "train", None)
    (data / "data" / "train-0.jsonl").rename(data / "data" / "test-0.jsonl")
    with pytest.raises(ShardError, match="has no split 'train'"):
        list(hub_batches(split, 0, FormatChoice()))


def test_a_split_or_data_set_that_is_not_there_is_named(new_line: NewLine, monkeypatch: pytest.MonkeyPatch) -> None:
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
    assert line.update("raw_shards")["raw_shards"].rows == {"data/de/train": 1}
    assert line.read("raw_shards")["text"].to_list() == ["deutsch"]
