"""Tools that answer oddly, fail or give up: what was paid for is stored, and what is left out has a reason."""

import gzip
import json
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest

from tests.pipeline.conftest import Lane, Line, NewLine
from toolformer_dag.files import UserError
from toolformer_dag.texts.document import Document
from toolformer_dag.tools.built_in.calculator import Calculator
from toolformer_dag.tools.tool import OverBudget, ToolCall, ToolDown, ToolResult, WorkBudget

BEFORE = ("raw_shards", "heuristic_subset", "scored_candidates")


def with_tool(line: Line, made: Callable[[Lane], Calculator]) -> None:
    """Put another tool in the place of the calculator."""
    line.adapt = lambda lane: replace(lane, tool=made(lane))


def odd(kind: type[Calculator]) -> Callable[[Lane], Calculator]:
    return lambda lane: kind(lane.tool.key, lane.tool.options, lane.tool.prompt)


class RunsOut(Calculator):
    """Has credit for three calls."""

    batch_size = 1
    credit = 3

    def run(self, calls: Sequence[ToolCall]) -> list[ToolResult]:
        if not self.credit:
            raise ToolDown("no credit; buy some")
        self.credit -= 1
        return super().run(calls)


def test_answers_before_a_tool_went_down_are_stored_in_the_midst_of_a_chunk(new_line: NewLine) -> None:
    line = new_line("one")
    line.set(execution__chunk_calls=512)
    with_tool(line, odd(RunsOut))
    with pytest.raises(ToolDown, match="no credit"):
        line.update(*BEFORE, "tool_results")
    line.adapt = lambda lane: lane
    report = line.update("tool_results")["tool_results"]
    computed = report.work.computed_rows_by_kind["calls"]
    reused = report.work.reused_rows_by_kind["calls"]
    assert computed > 0 and reused == RunsOut.credit


class Thrifty(Calculator):
    """Gives up texts with a seven, documents with a zero."""

    def wants_document(self, document: Document) -> str | None:
        WorkBudget(1).spend(2 if "0" in document.text else 1)
        return "every_text"

    def wants(self, text: str, document: Document) -> str | None:
        if "7" in text:
            raise OverBudget
        return "every_text"


def test_a_document_or_text_over_the_budget_of_a_rule_is_counted(new_line: NewLine) -> None:
    line = new_line("one")
    texts = ["1 + 1", "2 + 2", "10 + 1", "7"]
    lines = (json.dumps({"digest": text, "raw_content": text, "url": "https://a.org/x"}) for text in texts)
    (line.web / "one.json.gz").write_bytes(gzip.compress("\n".join(lines).encode()))
    with_tool(line, odd(Thrifty))
    report = line.update("raw_shards", "heuristic_subset")["heuristic_subset"]
    assert report.rejections_by_reason == {"over_budget": 2}
    assert line.read("heuristic_subset")["digest"].to_list() == ["1 + 1", "2 + 2"]


def failing(member: str, does: Callable[..., object]) -> type[Calculator]:
    return type("Failing", (Calculator,), {member: does})


def leave(*arguments: object) -> object:
    raise SystemExit(0)


@pytest.mark.parametrize(
    ("member", "does", "reason"),
    [
        ("wants_document", leave, "SystemExit: 0"),
        ("wants", leave, "SystemExit: 0"),
        ("wants", lambda *_: 1 / 0, "ZeroDivisionError: division by zero"),
        ("wants", lambda *_: True, "TypeError: it returned a bool, neither a text nor None"),
        ("wants", lambda *_: "half \ud83d", "UnicodeEncodeError: "),
        ("context", lambda *_: 7, "TypeError: it returned a int, neither a text nor None"),
        ("selection", lambda *_: 7, "TypeError: 'int' object is not iterable"),
        ("selection", leave, "SystemExit: 0"),
    ],
)
def test_a_rule_that_fails_stops_its_lane_by_name(
    new_line: NewLine, member: str, does: Callable[..., object], reason: str
) -> None:
    line = new_line("one")
    with_tool(line, odd(failing(member, does)))
    with pytest.raises(UserError) as told:
        line.update("raw_shards", "heuristic_subset", "loss_deltas")
    assert str(told.value).startswith(f"[tools.calculator]: Failing.{member} raised {reason}")
    assert str(told.value).endswith("; fix it and run again")


def test_a_rule_for_kept_calls_that_fails_stops_its_lane_by_name(finished: NewLine) -> None:
    line = finished("one")
    with_tool(line, odd(failing("keeps", leave)))
    line.set(execution__chunk_texts=1)
    line.lake.get_table("calculator/loss_deltas").withdraw_part("one")
    with pytest.raises(ToolDown, match=r"Failing\.keeps raised SystemExit: 0; fix it"):
        line.update("loss_deltas")
