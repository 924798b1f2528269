"""A tool with named arguments goes the whole way, from calls of a file to C* and to SQL."""

import json

import polars as pl

from tests.pipeline.conftest import NewLine, warehouse
from toolformer_dag.lake.warehouse import query
from toolformer_dag.texts.calls import remove_calls

ADDER = '''
"""Adds two numbers; strings may hold what ends calls."""

from typing import Literal

from pydantic import BaseModel, Field

from toolformer_dag.tools.tool import Tool, ToolDefaults, ToolResult


class Add(Tool):
    name = "Add"
    version = "1"
    defaults = ToolDefaults(0.1, 2, 6, -100.0)

    class Arguments(BaseModel):
        note: str
        a: int = Field(ge=0)
        b: int = 1
        sign: Literal["+", "-"] = "+"

    def run(self, calls):
        return [ToolResult(f"{c.arguments.a + c.arguments.b} ({c.arguments.note})") for c in calls]
'''
NOTES = "SELECT arguments::VARCHAR, arguments->>'note' FROM calls ORDER BY 1"
CALLS = {
    'note="x] -> (y", a=3': {"note": "x] -> (y", "a": 3},
    ' sign = "+", b=1, a=3, note = "x] -> (y" ': {"note": "x] -> (y", "a": 3},
    'a=2, b=5, note="= \\"q\\" [Add("': {"note": '= "q" [Add(', "a": 2, "b": 5},
}
REFUSED = {
    "a=3": "missing: note",
    'note="n", a="3"': "bad_arguments: a is no integer",
    'note="n", a=-1': "bad_arguments: a is below 0",
    'note="n", a=1, sign="*"': "bad_arguments: sign is none of its values",
    'note="n", a=1, c=1': "unknown: c",
    "3 and 4": "bad_arguments",
    'note="n': "open_quote",
}


def test_named_arguments_are_read_run_spliced_and_asked_for_in_sql(new_line: NewLine, finished: NewLine) -> None:
    line = new_line("one")
    (line.folder / "adder.py").write_text(ADDER)
    (line.folder / "calculator.txt").write_text('Call.\nInput: 3\nOutput: [Add(note="n", a=1, b=2)] 3\n')
    line.set(tools__calculator__use='"adder:Add"', tools__calculator__proposals='["calls.jsonl"]', tau_f=-100.0)
    texts = finished("one").read("heuristic_subset").unique("digest", maintain_order=True).head(len(CALLS) + 1)
    rows = [
        {"digest": text["digest"], "char_offset": text["offset"] + text["text"].index(" ") + 1, "input": asked}
        for text, asked in zip(texts.iter_rows(named=True), CALLS, strict=False)
    ]
    rows += [{**rows[0], "input": asked} for asked in REFUSED]
    (line.folder / "calls.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    reports = line.update()
    counted = reports["scored_candidates"].rejections_by_reason
    assert {reason: counted[reason] for reason in REFUSED.values()} == dict.fromkeys(REFUSED.values(), 1)
    candidates = line.read("scored_candidates").filter(pl.col("input").is_not_null())
    assert set(candidates["input"]) == {'note="x] -> (y", a=3', 'note="= \\"q\\" [Add(", a=2, b=5'}
    assert set(line.read("tool_results")["result"]) == {"4 (x) → (y)", '7 (= "q" (Add()'}
    corpus = line.read("augmented_corpus").filter(pl.col("calls") > 0)
    assert corpus.height == len(CALLS)
    for text, plain in corpus.select("text_with_calls", "text").iter_rows():
        assert "[Add(note=" in text and remove_calls(text, ["Add"]) == plain
    found = query(warehouse(line.outputs()), NOTES).iter_rows()
    read = [(json.loads(whole), note) for whole, note in found]
    assert all(arguments["note"] == note for arguments, note in read)
    assert {json.dumps(arguments) for arguments, _ in read} == {json.dumps(one) for one in CALLS.values()}
