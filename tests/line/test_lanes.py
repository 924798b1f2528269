"""A change of one tool stays in its lane."""

import gzip
import json
from pathlib import Path

from toolformer_dag.tools.built_in.calculator import Calculator


def lanes_of(ran) -> set[str]:
    return {stage.partition("/")[0] for stage in ran.stages()}


def test_an_option_that_keeps_alone_looks_at_marks_its_calls_anew_without_a_token(world):
    assert world.sql("select count(*) from filtered_calls where tool = 'sums'") > [(0,)]
    change = "tools.sums.shortest=1000"
    assert world.run(change).spent.tokens == 0
    assert world.sql("select distinct reason from loss_deltas where tool = 'sums'") == [("tool_keeps_out",)]
    assert world.sql("select count(*) from filtered_calls where tool = 'sums'") == [(0,)]
    assert world.run(change).assets == []


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
    """A shard of documents with one text and a title each."""
    text = "\n".join(f"{number} and 2 make {number + 2} ." for number in range(6))
    record = {"url": "https://example.org/", "source_domain": "example.org", "raw_content": text, "language": "en"}
    lines = [json.dumps({**record, "digest": str(number), "title": title}) for number, title in enumerate(titles)]
    (folder / "one.json.gz").write_bytes(gzip.compress("\n".join(lines).encode()))


def test_a_result_follows_the_context_of_its_document(fresh, monkeypatch):
    """Both contexts are asked before and after: tool_results has the same rows."""
    monkeypatch.setenv("DAGSTER_HOME", str(fresh.folder / ".dagster"))
    (fresh.folder / "dated_tool.py").write_text(DATED)
    fresh.edit("sums_tool:Sums", "dated_tool:Dated")
    (fresh.folder / "web" / "two.json.gz").unlink()
    told = "select digest, result from loss_deltas where tool = 'sums' group by all order by digest"
    write_twins(fresh.folder / "web", "Monday", "Friday")
    fresh.run()
    assert fresh.sql(told) == [("0", "Monday"), ("1", "Friday")]
    write_twins(fresh.folder / "web", "Friday", "Monday")
    fresh.run()
    assert fresh.sql(told) == [("0", "Friday"), ("1", "Monday")]


def test_an_edited_prompt_samples_its_lane_anew(world):
    before = world.tables()
    (world.folder / "sums.txt").write_text("Sums.\nInput: 3 and 2 make 5 .\nOutput: 3 and 2 make [Search(3+2)] 5 .\n")
    line = world.line()
    assert {asset.key.path[0] for asset in line.stale()} == {"sums"}
    assert any(reason.startswith("settings.prompt: ") for asset in line.stale() for reason in line.why(asset))
    ran = world.run()
    assert ran.spent.tokens > 0
    assert lanes_of(ran) <= {"sums", "training", "warehouse"}
    after = world.tables()
    assert all(after[name].equals(before[name]) for name in before if name.startswith("calculator/"))


def test_another_version_of_a_tool_runs_its_calls_again_and_scores_what_changed(world, monkeypatch):
    before = world.sql("select count(distinct input) from candidates where tool = 'calculator' and input is not null")
    monkeypatch.setattr(Calculator, "version", "another")
    assert {asset.partition("[")[0] for asset in world.stale()} >= {"calculator/tool_results"}
    ran = world.run()
    assert (ran.spent.tokens, ran.spent.calls) == (0, before[0][0])
    assert lanes_of(ran) <= {"calculator", "warehouse"}


def test_another_backend_of_a_tool_scores_the_new_results(world):
    ran = world.run("tools.sums.edition=2")
    assert ran.spent.calls > 0 and ran.spent.tokens > 0
    assert {"sums/tool_results", "sums/loss_deltas"} <= ran.stages()
    assert "sums/scored_candidates" not in ran.stages()
    assert lanes_of(ran) <= {"sums", "training", "warehouse"}


def test_a_lane_removed_and_added_again_leaves_the_other_alone(world):
    world.run("tools.sums.enabled=false")
    assert world.sql("select distinct tool from loss_deltas") == [("calculator",)]
    assert world.sql("select count(*) from filtered_calls where tool = 'sums'") == [(0,)]
    ran = world.run()
    assert (ran.spent.tokens, ran.spent.calls) == (0, 0)
    assert len(world.sql("select distinct tool from loss_deltas")) == 2
    assert not any(asset.startswith("calculator/loss_deltas") for asset in ran.assets)
