"""Calls are left out of records in every form, with their results and nothing else, and the record is read again."""

import copy
from collections.abc import Sequence
from typing import Any

import pytest

from tests.conversations.test_records import FORMS, read, values_of
from toolformer_dag.conversations.dropping import can_drop_calls, drop_calls
from toolformer_dag.conversations.messages import RecordedMessage, remove_call
from toolformer_dag.conversations.reading import read_conversation
from toolformer_dag.conversations.record_paths import NOTHING_LEFT, remove_paths

ACTIONS_WITH_THOUGHTS = ("OpenHands events", "Events of OpenHands' SDK", "smolagents steps")
"""Forms in which words and call are one event, which goes as a whole."""
UNITED_RESULTS = "sharegpt_function_call"
"""The form whose lists of results do not say for which calls they are: a list of one is one result."""
WordsAndCalls = tuple[list[tuple[str, str]], list[Any]]


def words_and_calls(messages: Sequence[RecordedMessage]) -> WordsAndCalls:
    """Return the words and the calls of a conversation, whatever messages it is cut into."""
    words = [(message.role, " ".join(message.content.split())) for message in messages if message.content.strip()]
    calls = [(call.tool, call.arguments, call.result, call.failed) for message in messages for call in message.calls]
    return words, calls


@pytest.mark.parametrize("form", FORMS)
def test_each_call_goes_with_its_result_and_nothing_else(form: str) -> None:
    values = values_of(form)
    conversations = [conversation for conversation in read(values) if can_drop_calls(conversation.form_name)]
    for conversation in conversations:
        is_file = conversation.record_count > 1
        record = values if is_file else values[conversation.first_record_number - 1]
        of_record = [other for other in read(values) if other.first_record_number == conversation.first_record_number]
        before = copy.deepcopy(record)
        for number, message in enumerate(conversation.messages):
            for index, call in enumerate(message.calls):
                left = drop_calls(record, [call])
                assert record == before, "the record itself is not changed"
                words, calls = words_and_calls(remove_call(conversation.messages, number, index))
                again = [words_and_calls(other.messages) for other in read(left if is_file else [left])]
                if not calls and not any(remaining_words for remaining_words, _ in again):
                    continue  # without a call it is in no form any more
                remaining = again[of_record.index(conversation)]
                if form != UNITED_RESULTS:
                    assert remaining[1] == calls
                if conversation.form_name not in ACTIONS_WITH_THOUGHTS:
                    assert remaining[0] == words


@pytest.mark.parametrize("form", FORMS)
def test_a_record_that_loses_nothing_is_the_same(form: str) -> None:
    for value in values_of(form):
        assert drop_calls(value, []) == value


CALL = '{"name": "gauge", "arguments": {"station": "%s"}}'
STATIONS = ("Norrby", "Tveit", "Olden")
NORRBY, TVEIT, OLDEN = (CALL % station for station in STATIONS)


@pytest.mark.parametrize(
    "text",
    [
        f"<tool_call>[{NORRBY}, {TVEIT}, {OLDEN}]</tool_call>",
        f"<tool_call>\n{NORRBY}\n{TVEIT}\n{OLDEN}\n</tool_call>",
        f"<tool_call>{NORRBY}</tool_call> <tool_call>{TVEIT}</tool_call><tool_call>{OLDEN}</tool_call>",
        "[gauge(station='Norrby'), gauge(station='Tveit'), gauge(station='Olden')]",
        "".join(f"<function=gauge><parameter=station>{name}</parameter></function>" for name in STATIONS),
    ],
)
@pytest.mark.parametrize("is_in_parts", [False, True])
@pytest.mark.parametrize("gone", [{0}, {1}, {2}, {0, 1}, {1, 2}, {0, 2}, {0, 1, 2}])
def test_any_of_the_calls_of_one_text_go_and_the_others_stay(text: str, is_in_parts: bool, gone: set[int]) -> None:
    content: Any = [{"type": "text", "text": text}] if is_in_parts else text
    results = [{"role": "tool", "content": f"<tool_response>{height} cm</tool_response>"} for height in (114, 87, 63)]
    messages = [{"role": "user", "content": "?"}, {"role": "assistant", "content": content}, *results]
    record = {"messages": [*messages, {"role": "assistant", "content": "So high."}]}
    messages, faults = read_conversation(record)
    calls = messages[1].calls
    assert not faults and [call.result for call in calls] == ["114 cm", "87 cm", "63 cm"]
    left, left_faults = read_conversation(drop_calls(record, [calls[number] for number in gone]))
    assert not left_faults
    expected = [call for number, call in enumerate(calls) if number not in gone]
    assert words_and_calls(left) == (
        [("user", "?"), ("assistant", "So high.")],
        [(call.tool, call.arguments, call.result, call.failed) for call in expected],
    )


def test_a_stretch_goes_once_nothing_is_left_of_what_it_holds() -> None:
    text = "before <a>[1, 2]</a> after"
    whole = (7, 20)
    inner = (3, 9)
    assert remove_paths(text, [(whole, inner, None, 0)]) == "before <a>[2]</a> after"
    assert remove_paths(text, [(whole, inner, None, 0), (whole, inner, None, 1)]) == "before  after"
    assert remove_paths([text], [(0,)]) is NOTHING_LEFT


def test_a_line_of_a_session_follows_the_one_before_the_line_that_is_gone() -> None:
    def line(line_id: str, parent: str | None, role: str, *content: dict[str, Any]) -> dict[str, Any]:
        return {
            "uuid": line_id,
            "parentUuid": parent,
            "type": role,
            "message": {"role": role, "content": list(content)},
        }

    session = [
        line("a", None, "user", {"type": "text", "text": "How high?"}),
        line("b", "a", "assistant", {"type": "tool_use", "id": "c1", "name": "gauge", "input": {}}),
        line("x", "a", "assistant", {"type": "text", "text": "A branch that was left."}),
        line("c", "b", "user", {"type": "tool_result", "tool_use_id": "c1", "content": "114 cm"}),
        line("d", "c", "assistant", {"type": "text", "text": "114 cm."}),
    ]
    [conversation] = read(session)
    [call] = [call for message in conversation.messages for call in message.calls]
    left = drop_calls(session, [call])
    assert [(line["uuid"], line["parentUuid"]) for line in left] == [("a", None), ("x", "a"), ("d", "a")]
