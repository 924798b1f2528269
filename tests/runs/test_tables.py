"""What a change of a tool's options or of its context reaches, without Dagster."""

import gzip
import json
from pathlib import Path

import polars as pl

KEEPING = """
from sums_tool import Sums, SumsOptions


class KeepingOptions(SumsOptions):
    shortest: int = 0


class Keeping(Sums):
    Options = KeepingOptions

    def keeps(self, text, offset, input):
        return len(input) >= self.options.shortest
"""
DATED = """
from sums_tool import Sums
from toolformer_dag.tools.tool import ToolResult


class Dated(Sums):
    def context(self, document):
        return document.title

    def run(self, calls):
        return [ToolResult(call.context) for call in calls]
"""


def write_twins(folder: Path, *titles: str) -> None:
    """Write a shard of documents with one text and a title each."""
    text = "\n".join(f"{number} and 2 make {number + 2} ." for number in range(6))
    record = {"url": "https://example.org/", "source_domain": "example.org", "raw_content": text, "language": "en"}
    lines = [json.dumps({**record, "digest": str(number), "title": title}) for number, title in enumerate(titles)]
    (folder / "one.json.gz").write_bytes(gzip.compress("\n".join(lines).encode()))


def test_an_option_that_keeps_alone_looks_at_marks_its_calls_anew_without_a_token(world):
    (world.folder / "keeping_tool.py").write_text(KEEPING)
    world.edit("sums_tool:Sums", "keeping_tool:Keeping")
    reports = world.update("tools.sums.shortest=1000")
    assert not any(sum(report.work.tokens.values()) for report in reports.values())
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
        reports = fresh.update("tools.calculator.enabled=false")
        told = fresh.lake.table("sums/loss_deltas").scan().select("digest", "result").unique().sort("digest")
        assert told.collect().rows() == list(zip("01", titles, strict=True))
    assert "sums/loss_deltas" in reports
