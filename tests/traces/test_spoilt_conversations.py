"""The conversations of `python -m benchmarks.cleaning`: which answers repeat values, and what spoiling changes."""

from pathlib import Path

import pytest

from benchmarks.cleaning.choices import CHOICES, JudgedPlace, chosen_calls, verdict_quality
from benchmarks.cleaning.recorded_answers import (
    RecordedAnswer,
    conversations_with_calls,
    read_records,
    recorded_answers,
    write_conversations,
)
from benchmarks.cleaning.spoilt_answers import ValueDonors, spoil, with_changed_values
from benchmarks.cleaning.tool_conversations import tool_conversations
from toolformer_dag.conversations.reading import read_conversation

CONVERSATIONS = conversations_with_calls(tool_conversations(seed=1))
CALLS = recorded_answers(CONVERSATIONS)


def test_half_of_the_calls_are_of_tools_that_two_conversations_use() -> None:
    tools = [call.tool for call in CALLS]
    assert len(CALLS) == 120
    assert sum(tools.count(tool) == 2 for tool in tools) == 60
    assert all(call.repeated_values() for call in CALLS)


def test_values_that_were_said_before_the_call_are_not_repeated_ones() -> None:
    record = {
        "messages": [
            {"role": "user", "content": "How warm is it in Porto?"},
            {
                "role": "assistant",
                "content": "",
                "tool_calls": [{"id": "a", "function": {"name": "weather", "arguments": '{"city": "Porto"}'}}],
            },
            {"role": "tool", "tool_call_id": "a", "content": '{"city": "Porto", "degrees": 17, "unit": "C"}'},
            {"role": "assistant", "content": "It is 17 degrees in Porto."},
        ]
    }
    [call] = recorded_answers([read_conversation(record)[0]])
    assert call.repeated_values() == ["17"]


@pytest.mark.parametrize("share", [0.2, 0.6])
def test_spoiling_changes_a_share_of_the_conversations_and_says_which(share: float) -> None:
    spoilt = spoil(CONVERSATIONS, share, seed=1)
    assert spoilt == spoil(CONVERSATIONS, share, seed=1)
    assert len(spoilt.faults) == round(share * len(CONVERSATIONS))
    assert set(spoilt.faults.values()) == {"value", "swap", "error"}
    for call, changed in zip(CALLS, recorded_answers(spoilt.conversations), strict=True):
        fault = spoilt.faults.get((call.conversation, call.turn))
        assert (changed.messages != call.messages) == (fault is not None)
        if fault == "error":
            assert changed.messages[changed.turn].calls[0].result != call.result
            assert changed.answer == call.answer
        elif fault:
            assert not changed.repeated_values() or changed.answer != call.answer


def test_changed_values_stand_in_the_result_and_in_the_answer() -> None:
    import random

    donors = ValueDonors(CALLS)
    for call in CALLS:
        changed = with_changed_values(call, donors, random.Random(1))
        assert changed.answer != call.answer
        assert changed.repeated_values()


def test_written_conversations_are_read_again(tmp_path: Path) -> None:
    write_conversations(tmp_path / "some.jsonl", CONVERSATIONS)
    again = conversations_with_calls(read_records(tmp_path / "some.jsonl"))
    assert [_said(call) for call in recorded_answers(again)] == [_said(call) for call in CALLS]


def _said(call: RecordedAnswer) -> tuple[str, str, str, str]:
    return call.tool, call.before, call.result, call.answer


def test_each_choice_leaves_out_as_many_answers_as_the_verdict() -> None:
    faults = spoil(CONVERSATIONS, 0.4, seed=1).faults
    wrong = list(faults)[:30]
    judged = {
        (call.conversation, call.turn): JudgedPlace(
            "does not help" if (call.conversation, call.turn) in wrong else "helps", "", overlap=0.5
        )
        for call in CALLS
    }
    left = {choice: len(chosen_calls(choice, CALLS, judged, faults, seed=0)) for choice in CHOICES}
    assert left["all of it"] == 120
    assert left["what the verdict keeps"] == left["as many at random"] == left["as many by overlap"] == 90
    assert left["truly clean"] == 120 - len(faults)
    quality = verdict_quality(CALLS, judged, faults)
    assert (quality.dropped, quality.precision, quality.not_told) == (30, 1.0, 0.0)
    assert quality.recall == 30 / len(faults)
