"""Conversations in the forms that people store: the same is read from each, and each is written back as it came."""

import contextlib
import copy
import functools
import json
import random
from typing import Any

import pytest

from toolformer_dag.conversations.dropping import drop_calls
from toolformer_dag.conversations.messages import (
    RecordedMessage,
    iter_indexed_openai_messages,
    remove_call,
    replace_result,
)
from toolformer_dag.conversations.reading import UnknownForm, read_conversation
from toolformer_dag.conversations.record_paths import get_value_at

ADD = {"name": "add", "arguments": {"a": 2, "b": 3}}
SUB = {"name": "sub", "arguments": {"a": 9, "b": 1}}


def message_with_calls(*calls: dict[str, Any]) -> dict[str, Any]:
    """An assistant's message with calls as OpenAI stores them."""
    functions = [{"name": call["name"], "arguments": json.dumps(call["arguments"])} for call in calls]
    listed = [{"id": f"id{n}", "type": "function", "function": call} for n, call in enumerate(functions)]
    return {"role": "assistant", "content": None, "tool_calls": listed}


OPENAI = {
    "id": 7,
    "messages": [
        {"role": "user", "content": "2 + 3, and 9 - 1?"},
        message_with_calls(ADD, SUB),
        {"role": "tool", "tool_call_id": "id1", "content": "8"},
        {"role": "tool", "tool_call_id": "id0", "content": "5"},
        {"role": "assistant", "content": "5 and 8."},
    ],
}
HERMES = {
    "id": 7,
    "conversations": [
        {"from": "human", "value": "2 + 3, and 9 - 1?"},
        {
            "from": "gpt",
            "value": f"<tool_call>\n{json.dumps(ADD)}\n</tool_call>\n<tool_call>\n{SUB}\n</tool_call>",
        },
        {
            "from": "tool",
            "value": "<tool_response>\n5\n</tool_response>\n<tool_response>\n8\n</tool_response>",
        },
        {"from": "gpt", "value": "5 and 8."},
    ],
}
ATIF = {
    "schema_version": "ATIF-v1.4",
    "extra": {"run": 7},
    "steps": [
        {"step_id": 1, "source": "user", "message": "2 + 3, and 9 - 1?"},
        {
            "step_id": 2,
            "source": "agent",
            "message": "",
            "tool_calls": [
                {"tool_call_id": "x", "function_name": "add", "arguments": ADD["arguments"]},
                {"tool_call_id": "y", "function_name": "sub", "arguments": SUB["arguments"]},
            ],
            "observation": {
                "results": [{"source_call_id": "x", "content": "5"}, {"source_call_id": "y", "content": "8"}]
            },
        },
        {"step_id": 3, "source": "agent", "message": "5 and 8."},
    ],
}
VERIFIERS = {
    "task": "sums",
    "reward": 1.0,
    "prompt": [{"role": "user", "content": "2 + 3, and 9 - 1?"}],
    "completion": [
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [
                json.dumps({"id": n, "function": {**call, "arguments": json.dumps(call["arguments"])}})
                for n, call in (("x", ADD), ("y", SUB))
            ],
        },
        {"role": "tool", "tool_call_id": "x", "content": "5"},
        {"role": "tool", "tool_call_id": "y", "content": "8"},
        {"role": "assistant", "content": "5 and 8."},
    ],
}
FORMS = pytest.mark.parametrize(
    "record", [OPENAI, HERMES, ATIF, VERIFIERS], ids=["openai", "hermes", "atif", "verifiers"]
)


def words_and_calls(messages: tuple[RecordedMessage, ...]) -> list[Any]:
    """What a conversation says, whatever form it came in."""
    return [
        (message.role, message.content, [(call.tool, call.arguments, call.result) for call in message.calls])
        for message in messages
    ]


@FORMS
def test_every_form_tells_the_same(record: dict[str, Any]) -> None:
    messages, faults = read_conversation(record)
    calls = [("add", ADD["arguments"], "5"), ("sub", SUB["arguments"], "8")]
    assert words_and_calls(messages) == [
        ("user", "2 + 3, and 9 - 1?", []),
        ("assistant", "", calls),
        ("assistant", "5 and 8.", []),
    ]
    assert not faults


@FORMS
def test_a_dropped_call_leaves_the_rest_of_its_record_as_it_was(record: dict[str, Any]) -> None:
    messages, _ = read_conversation(record)
    first, second = messages[1].calls
    cleaned = drop_calls(record, [first])
    assert words_and_calls(read_conversation(cleaned)[0]) == words_and_calls(remove_call(messages, 1, 0))
    assert cleaned.keys() == record.keys()
    assert "5 and 8." in json.dumps(cleaned)
    assert drop_calls(record, []) == record
    both = read_conversation(drop_calls(record, [first, second]))
    assert words_and_calls(both[0]) == [("user", "2 + 3, and 9 - 1?", []), ("assistant", "5 and 8.", [])]
    assert not both[1]


def test_what_is_written_for_openai_is_read_again() -> None:
    messages, _ = read_conversation(HERMES)
    assert words_and_calls(
        read_conversation({"messages": [message for _, message in iter_indexed_openai_messages(messages)]})[0]
    ) == words_and_calls(messages)


def test_variants_of_a_call_change_nothing_else() -> None:
    messages, _ = read_conversation(OPENAI)
    other = replace_result(messages, 1, 1, "80")
    assert [call.result for call in other[1].calls] == ["5", "80"]
    assert remove_call(remove_call(messages, 1, 0), 1, 0) == (messages[0], messages[2])


@pytest.mark.parametrize(
    ("result", "failed"),
    [
        ("Error: no such city", True),
        ('{"error": "rate limit"}', True),
        ('{"exception": null, "output": 3}', False),
        ("Traceback (most recent call last): ...", True),
        ("17 degrees, no error", False),
        ('{"isError": true, "content": "x"}', True),
        ('{"success": false, "message": "no such thing"}', True),
        ('{"status": "ERROR"}', True),
        ('{"errors": ["no such thing"], "data": null}', True),
        ('{"passed": 12, "failed": 3, "errors": 0}', False),
        ("HTTP 404 Not Found", True),
        ("Process exited with code 1", True),
        ("Exit code: 0", False),
        ("Failed: 0, passed: 12", False),
        ("Error-free: 4 files", False),
        ("Failure mode analysis of the pump", False),
        ("Failure: the pump is off", True),
    ],
)
def test_a_result_says_whether_its_call_failed(result: str, failed: bool) -> None:
    record = {"messages": [message_with_calls(ADD), {"role": "tool", "tool_call_id": "id0", "content": result}]}
    [message] = read_conversation(record)[0]
    [call] = message.calls
    assert (call.tool, call.arguments, call.id, call.result, call.failed) == (
        "add",
        ADD["arguments"],
        "id0",
        result,
        failed,
    )
    assert get_value_at(record, call.place)["id"] == "id0" and call.answered == ("messages", 1)


def test_a_result_too_many_does_not_keep_later_calls_of_its_turn_from_theirs() -> None:
    def call(function: dict[str, Any]) -> dict[str, Any]:
        return {"role": "assistant", "content": "", "function_call": function}

    results = [{"role": "function", "content": content} for content in ("5", "spare", "8")]
    conversation = [call(ADD), results[0], results[1], call(SUB), results[2]]
    messages, faults = read_conversation({"messages": conversation})
    assert [(call.tool, call.result) for message in messages for call in message.calls] == [("add", "5"), ("sub", "8")]
    assert faults == [("result_without_call", "spare")]


@pytest.mark.parametrize(
    ("messages", "reason"),
    [
        ([{"role": "tool", "tool_call_id": "zz", "content": "5"}], "result_without_call"),
        ([{"role": "tool", "tool_call_id": "id0", "content": "5"}, message_with_calls(ADD)], "result_before_call"),
        ([message_with_calls(ADD), {"role": "user", "content": "?"}, {"role": "tool", "content": "5"}], "late_result"),
        (
            [message_with_calls(ADD), *[{"role": "tool", "tool_call_id": "id0", "content": "5"}] * 2],
            "result_without_call",
        ),
        ([{"role": "critic", "content": "weak"}], "unknown_role"),
        ([{"role": "user", "content": "?"}, "hello"], "no_message"),
        ([{"role": "assistant", "tool_calls": [{"id": "x"}]}], "unreadable_call"),
        ([{"role": "assistant", "content": "<tool_call>{oops</tool_call>"}], "unreadable_call"),
    ],
)
def test_what_cannot_be_used_is_named(messages: list[Any], reason: str) -> None:
    read_messages, faults = read_conversation({"messages": messages})
    assert [fault for fault, _ in faults] == [reason]
    assert drop_calls({"messages": messages}, []) == {"messages": messages}
    if reason in ("result_before_call", "late_result"):
        assert [call.result for message in read_messages for call in message.calls] == ["5"]


@pytest.mark.parametrize(
    ("record", "named"),
    [
        ({"question": "?", "answer": "!"}, "question, answer"),
        ([1], "a list"),
        ({"messages": [{"text": "no role"}]}, "text"),
    ],
)
def test_another_form_is_refused_with_its_fields(record: object, named: str) -> None:
    with pytest.raises(UnknownForm, match=named):
        read_conversation(record)


EXPECTED = ("user", "2 + 3?", [])
MESSAGES: list[Any] = [{"role": "user", "content": "2 + 3?"}]


@pytest.mark.parametrize(
    "beside",
    [
        {"steps": "1. call 2. answer"},
        {"trajectory": "runs/12.json"},
        {"trajectory": [{"prompt": "x", "completion": "y"}]},
        {"steps": []},
        {"conversations": None},
    ],
)
def test_a_field_that_holds_no_messages_hides_none(beside: dict[str, Any]) -> None:
    record = {**beside, "messages": MESSAGES}
    assert words_and_calls(read_conversation(record)[0]) == [EXPECTED]
    assert words_and_calls(read_conversation({**beside, "messages": json.dumps(MESSAGES)})[0]) == [EXPECTED]
    assert drop_calls(record, []) == record


@pytest.mark.parametrize(
    ("role", "results"),
    [
        ("tool", [{"name": "sub", "content": "8"}, {"name": "add", "content": "5"}]),
        ("function", [{"name": "sub", "content": "8"}, {"name": "add", "content": "5"}]),
        ("user", [{"content": f'<tool_response>{{"name": "{name}"}}</tool_response>'} for name in ("sub", "add")]),
    ],
)
def test_a_result_without_an_id_goes_to_the_call_of_the_tool_that_it_names(role: str, results: list[Any]) -> None:
    record = {"messages": [message_with_calls(ADD, SUB), *({"role": role, **result} for result in results)]}
    [message], faults = read_conversation(record)
    assert not faults
    assert [("5" in str(call.result), "add" in str(call.result)) for call in message.calls] in (
        [(True, False), (False, False)],
        [(False, True), (False, False)],
    )


def test_words_beside_a_result_are_said_by_whoever_wrote_them() -> None:
    content = "<tool_response>5</tool_response>\nNow answer."
    messages, faults = read_conversation({"messages": [message_with_calls(ADD), {"role": "user", "content": content}]})
    assert not faults
    assert words_and_calls(messages) == [
        ("assistant", "", [("add", ADD["arguments"], "5")]),
        ("user", "Now answer.", []),
    ]


def test_steps_are_numbered_without_a_gap_after_a_call_is_dropped() -> None:
    record = {**ATIF, "final_metrics": {"total_steps": 3, "total_cost_usd": 0.1}}
    messages, _ = read_conversation(record)
    cleaned = drop_calls(record, messages[1].calls)
    assert [step["step_id"] for step in cleaned["steps"]] == [1, 2]
    assert cleaned["final_metrics"] == {"total_steps": 2, "total_cost_usd": 0.1}


JUNK = (
    None,
    1,
    True,
    "x",
    "<tool_call>{</tool_call>",
    "<tool_response>y</tool_response>",
    [],
    {},
    [None],
    [1],
    {"a": 1},
)
MORE_JUNK = (
    {"results": 3},
    {"results": [3, None]},
    "[1]",
    {"function": 3},
    {"function": {"name": 3}},
    [{"type": "text"}],
)


def places(value: Any, way: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The ways to everything within a record."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [one for key, item in inner for one in ((*way, key), *places(item, (*way, key)))]


def test_whatever_stands_in_a_record_it_is_read_or_refused() -> None:
    chance = random.Random(5)
    read = 0
    for _ in range(2000):
        record = copy.deepcopy(chance.choice((OPENAI, HERMES, ATIF, VERIFIERS)))
        for way in chance.sample(places(record), 2):
            with contextlib.suppress(KeyError, IndexError, TypeError):  # the first change has taken it away
                inner = functools.reduce(lambda value, key: value[key], way[:-1], record)
                inner[way[-1]] = copy.deepcopy(chance.choice(JUNK + MORE_JUNK))
        with contextlib.suppress(UnknownForm):
            messages, _ = read_conversation(record)
            calls = [call for message in messages for call in message.calls]
            assert len(words_and_calls(read_conversation(drop_calls(record, calls))[0])) <= len(messages) + 1
            assert list(iter_indexed_openai_messages(messages)) or not messages
            read += 1
    assert read > 1000
