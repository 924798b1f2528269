"""Recorded conversations that `judge` has read: right ones with a needless call, hostile ones, and a long one."""

from pathlib import Path

from benchmarks.made_traces import conversation, facts, records, turn
from tests.explorer.hand_made_calls import HOSTILE
from tests.traces.conftest import settings_at, write_lines
from toolformer_dag.traces.judgement import get_traces_database_path, judge_traces

MADE = 12
LONG = 300
"""Messages before the call of the long conversation."""


def judged_conversations(folder: Path) -> None:
    """Judge the conversations with the embedded model, into lake/traces.duckdb."""
    folder.mkdir(exist_ok=True)
    hostile = [
        [
            {"role": "user", "content": f"{one} and what is {number} and 1?"},
            *turn([("calculator", {"expression": one}, f"{number + 1} {one}"), (one, {}, one)]),
            {"role": "assistant", "content": f"{one} is {number + 1}."},
        ]
        for number, one in enumerate(HOSTILE)
    ]
    talk = [{"role": "user", "content": f"line {number}"} for number in range(LONG)]
    said = [*records(MADE, "needless"), *({"messages": one} for one in hostile)]
    source = write_lines(folder / f"{HOSTILE[0]}.jsonl", [*said, {"messages": [*talk, *conversation(facts(1, 9)[0])]}])
    settings = settings_at(folder)
    judge_traces(settings, [source], get_traces_database_path(settings))
