"""The conversations of `python -m benchmarks.cleaning`: which answers repeat values, and what spoiling changes."""

from pathlib import Path

import pytest

from benchmarks.cleaning.choices import CHOICES, JudgedPlace, chosen_calls, judged_answers, verdict_quality
from benchmarks.cleaning.folds import fold_of
from benchmarks.cleaning.recorded_answers import (
    RecordedAnswer,
    conversations_with_calls,
    read_records,
    recorded_answers,
    write_conversations,
)
from benchmarks.cleaning.spoilt_answers import ValueDonors, spoil, with_changed_values
from benchmarks.cleaning.tool_conversations import tool_conversations
from benchmarks.cleaning.trainings import Interval, Training, TrainingFile, difference_interval, hit_interval
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
    judged = {}
    for call in CALLS:
        verdict = "does not help" if call.place in wrong else "helps"
        judged[call.place] = JudgedPlace(verdict, "", overlap=0.5)
    left = {choice: len(chosen_calls(choice, CALLS, judged, faults, seed=0)) for choice in CHOICES}
    assert left["all of it"] == 120
    assert left["what the verdict keeps"] == left["as many at random"] == left["as many by overlap"] == 90
    assert left["truly clean"] == 120 - len(faults)
    quality = verdict_quality(judged_answers(CALLS, judged, faults, range(120)))
    assert (quality.answers, quality.spoilt, quality.dropped, quality.not_told) == (120, len(faults), 30, 0)
    assert quality.precision == (1.0, 1.0, 1.0)
    assert quality.recall.value == 30 / len(faults)
    assert quality.recall.low < quality.recall.value < quality.recall.high


def test_three_seeds_test_every_conversation_once_and_no_question_that_was_trained_on() -> None:
    folds = [fold_of(CONVERSATIONS, seed) for seed in range(3)]
    assert sorted(number for fold in folds for number in fold.test) == list(range(120))
    for fold in folds:
        assert abs(len(fold.test) - 40) <= 2
        assert sorted([*fold.test, *fold.training]) == list(range(120))
        trained = {CONVERSATIONS[number][0].content for number in fold.training}
        assert not trained & {CONVERSATIONS[number][0].content for number in fold.test}


def test_differences_are_paired_by_conversation() -> None:
    hard_and_easy = [{0: [False, False], 1: [True, True]}, {2: [False], 3: [True, True, True]}]
    better_by_half = [{0: [True, False], 1: [True, True]}, {2: [True], 3: [True, True, True]}]
    assert hit_interval(hard_and_easy).value == 0.5
    assert difference_interval(better_by_half, hard_and_easy).value == (0.5 + 0 + 1 + 0) / 4
    assert difference_interval(hard_and_easy, hard_and_easy) == (0.0, 0.0, 0.0)
    assert Interval(-0.104, -0.17, 0.03).written() == "-.10 (-.17 to .03)"
    assert Interval(1.0, 0.953, 1.0).written() == "1.00 (.95-1.00)"


def test_trainings_are_found_again(tmp_path: Path) -> None:
    file = TrainingFile(tmp_path / "trainings.jsonl")
    assert file.read() == {}
    hits = {4: [True, False], 17: [True]}
    training = Training("folder", "model", 0.4, 1, "all of it", answers=9, spoilt=3, recorded=hits, changed=hits)
    file.append(training)
    assert TrainingFile(file.path).read() == {training.key: training}
