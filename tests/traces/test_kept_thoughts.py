"""Thoughts of the assistant are stored with the conversations, and change nothing of what is said of their calls."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import orjson
import pytest

from benchmarks.made_traces import records
from tests.traces.conftest import settings_at, write_lines
from toolformer_dag.conversations.messages import RecordedMessage
from toolformer_dag.lake.warehouse import query
from toolformer_dag.traces import recorded_conversations
from toolformer_dag.traces.cleaned import write_cleaned_conversations
from toolformer_dag.traces.judgement import Judgement, get_traces_database_path, judge_traces
from toolformer_dag.traces.stored_messages import messages_as_json, parse_messages

THOUGHT = "I had better look it up."
SHOWN = ("trace_calls", "trace_swaps", "trace_messages", "trace_sources")
"""The tables of the file that say what was recorded and judged."""


def judged(folder: Path, lines: list[Any]) -> Judgement:
    """Judge lines in a project of the embedded model."""
    settings = settings_at(folder)
    return judge_traces(settings, [write_lines(folder / "traces.jsonl", lines)], get_traces_database_path(settings))


def with_thoughts(record: dict[str, Any]) -> dict[str, Any]:
    """Return a record in which the assistant thinks before each message."""
    messages = record["messages"]
    thinking = [{**one, "reasoning_content": THOUGHT} if one["role"] == "assistant" else one for one in messages]
    return {**record, "messages": thinking}


def stored_thoughts(judgement: Judgement) -> set[str]:
    """Return the thoughts of the assistant in the lake."""
    table = judgement.plan.lake.get_table(recorded_conversations.TABLE_NAME).scan_parts(
        judgement.plan.conversation_shards_by_name
    )
    stored = table.select("messages").collect()["messages"]
    return {one.thoughts for text in stored for one in parse_messages(text) if one.role == "assistant"}


def test_messages_are_stored_with_their_thoughts() -> None:
    places = (("messages", 1, "reasoning_content"), ("messages", 1, "content", (0, 12)))
    answer = RecordedMessage("assistant", "It is 7.", thoughts=THOUGHT, thought_places=places)
    messages = (RecordedMessage("user", "?"), answer)
    stored = messages_as_json(messages)
    assert parse_messages(stored) == messages
    assert parse_messages(stored)[1].thought_places == places
    assert "thoughts" not in messages_as_json([replace(message, thoughts="") for message in messages])


def test_thoughts_change_no_verdict_and_cost_no_loss(tmp_path: Path) -> None:
    made = records(12)
    before = judged(tmp_path, made)
    tables = [query(before.database, f"FROM {table} ORDER BY ALL") for table in SHOWN]
    after = judged(tmp_path, [with_thoughts(record) for record in made])
    assert stored_thoughts(after) == {THOUGHT}
    assert after.loss_counts == {"computed": 0, "reused": 0}  # calls of the same key were judged
    assert after.model_token_count == 0
    for name, table in zip(SHOWN, tables, strict=True):
        assert query(after.database, f"FROM {name} ORDER BY ALL").equals(table), name


def test_conversations_that_were_stored_without_thoughts_are_read_again_and_not_judged_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = [with_thoughts(record) for record in records(12)]
    with monkeypatch.context() as earlier:
        earlier.setattr(recorded_conversations, "READER", 3)
        earlier.setattr(recorded_conversations, "messages_as_json", as_reader_3_stored_them)
        before = judged(tmp_path, lines)
        assert stored_thoughts(before) == {""}
        calls = query(before.database, "FROM trace_calls ORDER BY ALL")
    after = judged(tmp_path, lines)
    assert stored_thoughts(after) == {THOUGHT}
    assert after.loss_counts == {"computed": 0, "reused": 0}
    assert query(after.database, "FROM trace_calls ORDER BY ALL").equals(calls)


def as_reader_3_stored_them(messages: tuple[RecordedMessage, ...]) -> str:
    """Return messages as JSON without thoughts."""
    return messages_as_json([replace(message, thoughts="") for message in messages])


def test_records_are_written_again_with_their_thoughts(tmp_path: Path) -> None:
    lines = [with_thoughts(record) for record in records(4)]
    write_cleaned_conversations(judged(tmp_path, lines), tmp_path / "cleaned", "nothing")
    written = [orjson.loads(line) for line in (tmp_path / "cleaned" / "traces.jsonl").read_bytes().splitlines()]
    assert [record["messages"] for record in written] == [record["messages"] for record in lines]
