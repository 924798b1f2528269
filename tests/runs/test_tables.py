"""Which rows a change of a tool or of a shard file reaches: the stages of a project, one after the other."""

import gzip
import json
import os
import time
from collections.abc import Mapping
from pathlib import Path

import polars as pl
import pytest

from tests.runs.conftest import World, apart_from_tables
from tests.worlds import write_shard
from toolformer_dag.pipeline.stages import table_outputs
from toolformer_dag.pipeline.update import TableReport, update
from toolformer_dag.pipeline.worker import Worker
from toolformer_dag.pipeline.workers import Workers, in_process

DATED = """
from sums_tool import Sums
from toolformer_dag.tools.tool import ToolResult


class Dated(Sums):
    def context(self, document):
        return document.title

    def run(self, calls):
        return [ToolResult(call.context) for call in calls]
"""


def updated(world: World, *overrides: str) -> Mapping[str, TableReport]:
    """Bring every table up to date without Dagster; return the reports of those that something changed for."""
    plan = world.project(*overrides).plan
    tables = {output.name: output for output in table_outputs(plan)}
    worker = Worker(plan)
    lent = Workers(worker, tables, in_process)
    reports = [update(worker, lent, output, lambda done, total: None) for output in tables.values()]
    return {report.name: report for report in reports if not report.unchanged}


def tokens(reports: Mapping[str, TableReport]) -> int:
    return sum(sum(report.work.tokens.values()) for report in reports.values())


def write_twins(folder: Path, *titles: str) -> None:
    """Write a shard of documents with one text and a title each."""
    text = "\n".join(f"{number} and 2 make {number + 2} ." for number in range(6))
    record = {"url": "https://example.org/", "source_domain": "example.org", "raw_content": text, "language": "en"}
    lines = [json.dumps({**record, "digest": str(number), "title": title}) for number, title in enumerate(titles)]
    (folder / "one.json.gz").write_bytes(gzip.compress("\n".join(lines).encode()))


def test_an_option_that_keeps_alone_looks_at_marks_its_calls_anew_without_a_token(world):
    reports = updated(world, "tools.sums.shortest=1000")
    assert tokens(reports) == 0
    assert {name.partition("/")[0] for name in reports} == {"sums", "training"}
    calls = world.lake.table("sums/loss_deltas").scan().collect()
    assert calls.filter(pl.col("ahead").is_null())["reason"].unique().to_list() == ["tool_keeps_out"]
    assert world.lake.table("sums/filtered_calls").scan().collect().is_empty()


def test_a_result_follows_the_context_of_its_document(fresh):
    """Ask in both contexts before and after: tool_results has the same rows."""
    (fresh.folder / "dated_tool.py").write_text(DATED)
    fresh.edit("sums_tool:Sums", "dated_tool:Dated")
    (fresh.folder / "web" / "two.json.gz").unlink()
    for titles in (("Monday", "Friday"), ("Friday", "Monday")):
        write_twins(fresh.folder / "web", *titles)
        reports = updated(fresh, "tools.calculator.enabled=false")
        told = fresh.lake.table("sums/loss_deltas").scan().select("digest", "result").unique().sort("digest")
        assert told.collect().rows() == list(zip("01", titles, strict=True))
    assert "sums/loss_deltas" in reports


def test_a_changed_shard_is_read_again_alone(world):
    shard = world.folder / "web" / "two.json.gz"
    records = gzip.decompress(shard.read_bytes()).splitlines()[:-1]
    shard.write_bytes(gzip.compress(b"\n".join(records) + b"\nnot json\n"))
    reports = updated(world)
    assert all(report.updated in (("two",), ("all",)) for report in reports.values())
    assert reports["ccnet/raw_shards"].rows == {"one": 6, "two": 5}
    assert reports["ccnet/raw_shards"].rejections == {"not_json": 1}
    asked = {name for name, report in reports.items() if sum(report.work.tokens.values())}
    assert asked <= {"calculator/swapped_results", "sums/swapped_results"}  # a document less to take results from


@pytest.mark.parametrize("seconds", [10_000, -10_000])
def test_a_shard_whose_time_alone_has_changed_is_read_once(world, seconds):
    shard = world.folder / "web" / "two.json.gz"
    then = time.time() + seconds
    os.utime(shard, (then, then))
    told = world.reasons()
    assert list(told) == ["ccnet/raw_shards"] and told["ccnet/raw_shards"][0].startswith("inputs.mtime_ns: ")
    assert list(updated(world)) == ["ccnet/raw_shards"]
    assert world.stale() == []


def test_a_bad_line_is_counted_in_sql_though_the_documents_are_the_same(world):
    shard = world.folder / "web" / "two.json.gz"
    shard.write_bytes(gzip.compress(gzip.decompress(shard.read_bytes()) + b"not json\n"))
    ran = apart_from_tables(world.run().ran)
    assert ran == ["ccnet/raw_shards", "warehouse/toolformer_duckdb", "warehouse/dataset"]
    assert world.sql("select reason, count from rejections where stage = 'raw_shards'") == [("not_json", 1)]
    assert world.stale() == []


def test_a_shard_may_have_a_long_name_in_any_script(world):
    name = "нейросетевой_корпус_текстов_русского_интернета_01"
    write_shard(world.folder / "web", name, documents=1)
    assert updated(world)["calculator/loss_deltas"].updated == (name,)
    assert world.lake.table("ccnet/raw_shards").parts() == ["one", "two", name]
    write_shard(world.folder / "web", "%" * 100, documents=1)
    [long] = updated(world)["calculator/loss_deltas"].updated
    assert long.startswith("%%%") and long.endswith("%%%") and len(long) < 100
