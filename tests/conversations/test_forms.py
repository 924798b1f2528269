"""Every form is read from its example with the call and the result in it, and written without the call."""

import copy
import json
import random
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from toolformer_dag.conversations.dropping import drop_calls
from toolformer_dag.conversations.forms import ALL_FORMS
from toolformer_dag.conversations.forms.form import Form
from toolformer_dag.conversations.messages import RecordedCall
from toolformer_dag.conversations.reading import (
    MAX_CALLS,
    ReadConversation,
    read_conversation,
    read_conversations,
)
from toolformer_dag.conversations.record_paths import get_value_at
from toolformer_dag.texts.record_files import NumberedRecord

EACH_FORM = pytest.mark.parametrize("form", ALL_FORMS, ids=lambda form: form.name)
WITHOUT_RESULTS = ("xLAM",)


def records_of(form: Form) -> list[Any]:
    """The records of a file that holds the example of a form."""
    return list(form.example) if form.is_file else [form.example]


def read_all(records: list[Any]) -> list[ReadConversation]:
    return list(read_conversations(NumberedRecord(number, record) for number, record in enumerate(records, 1)))


def calls_of(conversation: ReadConversation) -> list[RecordedCall]:
    return [call for message in conversation.messages for call in message.calls]


@EACH_FORM
def test_the_example_of_a_form_is_read_with_its_call_and_result(form: Form) -> None:
    [conversation] = read_all(records_of(form))
    assert conversation.form_name == form.name and not conversation.faults
    [call] = calls_of(conversation)
    assert "Oslo" in json.dumps(call.arguments)
    if form.name not in WITHOUT_RESULTS:
        assert call.result is not None and "7" in call.result
        assert conversation.messages[-1].role == "assistant" and "7" in conversation.messages[-1].content


@EACH_FORM
def test_a_record_is_the_same_without_a_dropped_call(form: Form) -> None:
    [conversation] = read_all(records_of(form))
    assert drop_calls(form.example, []) == form.example
    if not form.can_drop:
        return
    before = copy.deepcopy(form.example)
    left = drop_calls(form.example, calls_of(conversation))
    assert form.example == before
    assert "weather Oslo" not in json.dumps(left) and '"c1"' not in json.dumps(left)
    [again] = read_all(left if form.is_file else [left])
    assert not calls_of(again)
    said = [(message.role, message.content) for message in conversation.messages if message.content]
    assert form.name in WITHOUT_RESULTS or [(one.role, one.content) for one in again.messages] == said


@EACH_FORM
def test_the_places_of_calls_are_in_the_record_and_json_stores_them(form: Form) -> None:
    [conversation] = read_all(records_of(form))
    [call] = calls_of(conversation)
    assert json.loads(json.dumps(call.place))
    if form.can_drop:
        assert get_value_at(form.example, call.place) is not None


def test_a_summary_of_autogen_repeats_no_dropped_call() -> None:
    calls = [{"id": f"c{n}", "name": "gauge", "arguments": f'{{"n": {n}}}'} for n in range(2)]
    results = [{"call_id": f"c{n}", "name": "gauge", "content": RESULTS[n], "is_error": n == 1} for n in (1, 0)]
    lines = [
        {"type": "ToolCallRequestEvent", "source": "a", "content": calls},
        {"type": "ToolCallExecutionEvent", "source": "a", "content": results},
        {"type": "ToolCallSummaryMessage", "source": "a", "content": "!", "tool_calls": calls, "results": results},
    ]
    for whole in (lines, {"messages": lines}):
        [conversation] = read_all(lines if whole is lines else [whole])
        first, second = calls_of(conversation)
        assert (first.failed, second.failed) == (False, True)
        left = drop_calls(whole, [second])
        assert '"c0"' in json.dumps(left) and '"c1"' not in json.dumps(left)
        rest = drop_calls(whole, [first, second])
        assert (rest if whole is lines else rest["messages"]) == [{**lines[2], "tool_calls": [], "results": []}]


@pytest.mark.parametrize(("kind", "field"), [("ToolBatchEvent", "content"), ("ToolCallSummaryMessage", "tool_calls")])
def test_a_message_of_autogen_with_calls_that_are_not_read_is_named(kind: str, field: str) -> None:
    unknown = {"type": kind, "source": "a", field: [{"id": "c1", "name": "gauge", "arguments": "{}"}]}
    _, faults = read_conversation({"messages": [{"type": "TextMessage", "source": "user", "content": "?"}, unknown]})
    assert [reason for reason, _ in faults] == ["unknown_role"]


def test_what_is_left_of_autogen_without_any_message_is_the_rest_of_the_record() -> None:
    call = {"id": "c1", "name": "gauge", "arguments": "{}"}
    record = {"messages": [{"type": "ToolCallRequestEvent", "source": "a", "content": [call]}], "stop_reason": None}
    assert drop_calls(record, calls_of(read_all([record])[0])) == {"stop_reason": None}


CALL_KEYS = {"function_name", "functionCall", "toolUse", "toolInvocation", "api_action"}


def counted(value: Any) -> Iterator[str]:
    """The calls in a record, counted without any knowledge of forms: objects with a name and arguments beside it."""
    if isinstance(value, str) and value[:1] in ("{", "["):
        try:
            value = json.loads(value)
        except ValueError:
            return
    if isinstance(value, Mapping):
        names = {"name", "function_name", "toolName", "tool_name", "function", "tool"} & value.keys()
        arguments = {"arguments", "args", "input", "kwargs", "parameters"} & value.keys()
        if any(isinstance(value[name], str) for name in names) and arguments:
            yield str(next(value[name] for name in names))
            return
        for item in value.values():
            yield from counted(item)
    elif isinstance(value, list):
        for item in value:
            yield from counted(item)


@EACH_FORM
def test_a_count_by_the_names_of_fields_finds_no_more_calls(form: Form) -> None:
    [conversation] = read_all(records_of(form))
    assert len(list(counted(form.example))) <= len(calls_of(conversation))


RESULTS = ["114 cm", "87 cm", "63 cm", "42 cm"]


def openai(order: list[int], with_ids: bool) -> dict[str, Any]:
    calls = [{"id": f"c{n}", "function": {"name": "gauge", "arguments": {"n": n}}} for n in range(len(order))]
    results = [{"role": "tool", "tool_call_id": f"c{n}", "content": RESULTS[n]} for n in order]
    if not with_ids:
        calls = [{"function": call["function"]} for call in calls]
        results = [{"role": "tool", "content": result["content"]} for result in results]
    return {"messages": [{"role": "user", "content": "?"}, {"role": "assistant", "tool_calls": calls}, *results]}


def anthropic(order: list[int], with_ids: bool) -> dict[str, Any]:
    calls = [{"type": "tool_use", "id": f"c{n}", "name": "gauge", "input": {"n": n}} for n in range(len(order))]
    results = [{"type": "tool_result", "tool_use_id": f"c{n}", "content": RESULTS[n]} for n in order]
    return {"messages": [{"role": "assistant", "content": calls}, {"role": "user", "content": results}]}


def responses(order: list[int], with_ids: bool) -> dict[str, Any]:
    calls = [
        {"type": "function_call", "call_id": f"c{n}", "name": "gauge", "arguments": f'{{"n": {n}}}'}
        for n in range(len(order))
    ]
    results = [{"type": "function_call_output", "call_id": f"c{n}", "output": RESULTS[n]} for n in order]
    return {"input": [{"role": "user", "content": "?"}, *calls, *results]}


def bedrock(order: list[int], with_ids: bool) -> dict[str, Any]:
    calls = [{"toolUse": {"toolUseId": f"c{n}", "name": "gauge", "input": {"n": n}}} for n in range(len(order))]
    results = [{"toolResult": {"toolUseId": f"c{n}", "content": [{"text": RESULTS[n]}]}} for n in order]
    return {"messages": [{"role": "assistant", "content": calls}, {"role": "user", "content": results}]}


@pytest.mark.parametrize("form", [openai, anthropic, responses, bedrock])
@given(order=st.permutations(range(4)))
def test_results_in_any_order_go_to_their_calls_by_id(form: Any, order: list[int]) -> None:
    messages, faults = read_conversation(form(order, True))
    assert not faults
    calls = [call for message in messages for call in message.calls]
    assert [call.result for call in calls] == RESULTS


@given(order=st.permutations(range(4)), cuts=st.lists(st.booleans(), min_size=4, max_size=4))
def test_results_without_ids_go_to_the_calls_of_the_turn_in_their_order(order: list[int], cuts: list[bool]) -> None:
    """However many messages of the assistant the calls of the turn stand in."""
    record = openai(order, False)
    question, asked, *results = record["messages"]
    messages = [question]
    for call, is_new in zip(asked["tool_calls"], cuts, strict=True):
        if is_new or len(messages) == 1:
            messages.append({"role": "assistant", "tool_calls": []})
        messages[-1]["tool_calls"].append(call)
    read, faults = read_conversation({"messages": [*messages, *results]})
    assert not faults
    assert [call.result for message in read for call in message.calls] == [RESULTS[n] for n in order]


def test_calls_of_the_user_take_their_own_results() -> None:
    record = {
        "messages": [
            {"role": "user", "content": None, "tool_calls": [{"id": "u", "name": "status", "arguments": {}}]},
            {"role": "tool", "id": "u", "content": "no bars", "requestor": "user"},
            {"role": "assistant", "tool_calls": [{"id": "a", "name": "mast", "arguments": {}}]},
            {"role": "tool", "id": "a", "content": "114 cm", "requestor": "assistant"},
        ]
    }
    messages, faults = read_conversation(record)
    assert not faults
    assert [(message.role, call.result) for message in messages for call in message.calls] == [
        ("user", "no bars"),
        ("assistant", "114 cm"),
    ]


@pytest.mark.parametrize(
    "text",
    [
        "<think>I could write <tool_call>{}</tool_call>.</think>\n<tool_call>CALL</tool_call>",
        "The mark <tool_call> stands before a call. <tool_call>CALL</tool_call>",
        "<think>\n<tool_call> comes next\n</think>\n<tool_call>\nCALL\n</tool_call>",
        "I look it up. <tool_call>CALL",
        "<functioncall> CALL <|endoftext|>",
        "[TOOL_CALLS] [CALL]",
        "<tool_call>[CALL]</tool_call>",
    ],
)
def test_a_call_in_text_is_what_the_assistant_wrote_outside_of_its_thinking(text: str) -> None:
    call = '{"name": "gauge", "arguments": {"station": "Norrby"}}'
    said = [
        {"from": "human", "value": "<tool_call>{}</tool_call> is how a call is written."},
        {
            "from": "gpt",
            "value": text.replace("CALL", call) if "[TOOL_CALLS]" not in text else f"[TOOL_CALLS] [{call}]",
        },
        {"from": "tool", "value": "<tool_response>114 cm</tool_response>"},
    ]
    messages, faults = read_conversation({"conversations": said})
    assert not faults
    [found] = [call for message in messages for call in message.calls]
    assert (found.tool, found.arguments, found.result) == ("gauge", {"station": "Norrby"}, "114 cm")


def test_a_page_that_quotes_marks_is_a_result_as_a_whole() -> None:
    page = "The manual: <tool_response>5</tool_response> is a result; 40 more pages follow."
    record = openai([0], True)
    record["messages"][-1]["content"] = page
    messages, _ = read_conversation(record)
    assert messages[1].calls[0].result == page


@pytest.mark.parametrize(
    ("given_arguments", "meant"),
    [
        ('"{\\"station\\": \\"Norrby\\"}"', {"station": "Norrby"}),
        ("null", {}),
        (None, {}),
        ("", {}),
        ({"station": "Norrby", "a": None, "in": {"b": None}}, {"station": "Norrby", "in": {}}),
        ('{"id": 123456789012345678901234567890}', {"id": 123456789012345678901234567890}),
        ("Norrby", {"input": "Norrby"}),
        ([1], {"input": [1]}),
    ],
)
def test_arguments_are_what_they_were_meant_to_be(given_arguments: Any, meant: Any) -> None:
    record = openai([0], True)
    record["messages"][1]["tool_calls"][0]["function"]["arguments"] = given_arguments
    messages, _ = read_conversation(record)
    assert messages[1].calls[0].arguments == meant


@pytest.mark.parametrize(
    ("message", "fault"),
    [
        ({"role": "assistant", "content": [{"type": "toolCallV9", "payload": 1}]}, "unknown_part"),
        ({"role": "assistant", "content": "x", "my_tool_calls": [{"name": "a", "arguments": {}}]}, "unknown_field"),
        ({"role": "assistant", "content": "<tool_call>{oops</tool_call>"}, "unreadable_call"),
        ({"role": "assistant", "content": "<function=>"}, "unreadable_call"),
        ({"role": "assistant", "tool_calls": [{"id": "x"}]}, "unreadable_call"),
    ],
)
def test_what_may_hold_a_call_and_is_not_understood_is_named(message: dict[str, Any], fault: str) -> None:
    _, faults = read_conversation({"messages": [{"role": "user", "content": "?"}, message]})
    assert [reason for reason, _ in faults] == [fault]


def nested(levels: int) -> Any:
    value: Any = {"role": "assistant", "content": "x"}
    for _ in range(levels):
        value = [value]
    return value


def many_calls() -> dict[str, Any]:
    calls = [{"id": str(n), "name": "gauge", "arguments": {}} for n in range(MAX_CALLS + 1)]
    return {"messages": [{"role": "assistant", "tool_calls": calls}]}


@pytest.mark.parametrize(
    "record",
    [
        {"messages": nested(1000)},
        {"messages": [{"role": "tool", "content": "[1," * 1_000_000}]},
        {"messages": [{"role": "assistant", "content": "<tool_call>" + "\n" * 100_000}]},
        {"messages": [{"role": "assistant", "content": "<tool_call>" * 20_000}]},
        {"messages": [{"role": "assistant", "content": "<think>" * 20_000}]},
        {"messages": [{"role": "assistant", "content": "<function=a>" * 20_000}]},
        many_calls(),
        {"steps": [{"source": "agent", "message": "x"}], "extra": None},
        "x",
        None,
        [],
        {"messages": "[" * 5_000},
    ],
    ids=[
        "deep",
        "literal",
        "newlines",
        "marks",
        "thoughts",
        "functions",
        "calls",
        "null",
        "text",
        "none",
        "empty",
        "json",
    ],
)
def test_hostile_records_are_read_or_rejected(record: Any) -> None:
    assert read_all([record])


def changed(value: Any, chance: random.Random) -> Any:
    """A record with a value somewhere in it exchanged for another one."""
    junk = [None, 1, "x", [], {}, [None], {"type": "tool_use"}, {"functionCall": 3}, "<tool_call>{", ["x"], {"a": {}}]
    if not isinstance(value, Mapping | list) or not value or chance.random() < 0.1:
        return chance.choice(junk)
    if isinstance(value, list):
        index = chance.randrange(len(value))
        return [*value[:index], changed(value[index], chance), *value[index + 1 :]]
    key = chance.choice(list(value))
    return {**value, key: changed(value[key], chance)}


@EACH_FORM
def test_whatever_stands_in_a_record_it_is_read_or_rejected(form: Form) -> None:
    chance = random.Random(form.name)
    for _ in range(100):
        example = changed(form.example, chance)
        records = example if form.is_file and isinstance(example, list) else [example]
        for conversation in read_all(records):
            assert conversation.messages or conversation.faults or conversation.form_name != "unknown"
            whole = records if form.is_file else example
            drop_calls(whole, calls_of(conversation))
