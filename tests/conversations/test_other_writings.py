"""Conversations as people's programs write them beside the documented forms: read, or named."""

import json
from typing import Any

import pytest

from tests.conversations.test_records import read
from toolformer_dag.conversations.dropping import drop_calls
from toolformer_dag.conversations.reading import read_conversation

NORRBY = {"station": "Norrby"}
TVEIT = {"station": "Tveit"}
QUESTION = {"role": "user", "content": "How high is the river?"}
ANSWER = {"role": "assistant", "content": "114 cm."}
Row = tuple[str, Any, str | None, bool]


def function(arguments: Any, call_id: Any = None, name: str = "gauge") -> dict[str, Any]:
    """A call as OpenAI writes it."""
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": json.dumps(arguments)}}


def rows(record: Any) -> tuple[list[Row], list[str]]:
    """The calls of a record, and the reasons of its faults."""
    conversations = read([record])
    calls = [call for conversation in conversations for message in conversation.messages for call in message.calls]
    reasons = [reason for conversation in conversations for reason, _ in conversation.faults]
    return [(call.tool, call.arguments, call.result, call.failed) for call in calls], reasons


def in_text(text: str, result: dict[str, Any]) -> dict[str, Any]:
    """A conversation whose call stands in the assistant's text."""
    return {"messages": [QUESTION, {"role": "assistant", "content": text}, result, ANSWER]}


@pytest.mark.parametrize(
    "text",
    [
        "<tool_call>gauge\n<arg_key>station</arg_key>\n<arg_value>Norrby</arg_value>\n</tool_call>",
        '<function_calls><invoke name="gauge"><parameter name="station">Norrby</parameter></invoke></function_calls>',
        '<|python_tag|>{"name": "gauge", "parameters": {"station": "Norrby"}}',
        '<function=gauge>{"station": "Norrby"}</function>',
        "<tool_call>\n<function=gauge>\n<parameter=station>\nNorrby\n</parameter>\n</function>\n</tool_call>",
        "<scratch_pad>?</scratch_pad><tool_call>{'name': 'gauge', 'arguments': {'station': 'Norrby'}}</tool_call>",
    ],
    ids=["glm", "invoke", "llama", "function", "qwen_coder", "python"],
)
def test_a_call_between_the_marks_of_a_template_is_read(text: str) -> None:
    assert rows(in_text(text, {"role": "tool", "content": "114 cm"})) == ([("gauge", NORRBY, "114 cm", False)], [])


@pytest.mark.parametrize(
    "text",
    [
        '<minimax:tool_call>\n<invoke name="gauge"></invoke>\n</minimax:tool_call>',
        "<\uff5ctool\u2581calls\u2581begin\uff5c>function<\uff5ctool\u2581sep\uff5c>gauge",
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.gauge:0<|tool_call_end|>",
        "<|channel|>commentary to=functions.gauge <|message|>{}<|call|>",
        'Thought: I look.\nAction: gauge\nAction Input: {"station": "Norrby"}',
    ],
    ids=["minimax", "deepseek", "kimi", "harmony", "react"],
)
def test_marks_of_calls_that_are_not_read_are_named(text: str) -> None:
    calls, reasons = rows(in_text(text, {"role": "user", "content": "114 cm"}))
    assert (calls, reasons) == ([], ["unreadable_call"])


@pytest.mark.parametrize(
    "content",
    [
        "The manual: <tool_response>5</tool_response> is a result; more follows.",
        "<tool_response>\nThe manual: <tool_response>5</tool_response> is a result; more follows.\n</tool_response>",
    ],
)
def test_a_page_that_quotes_marks_of_results_is_a_result_as_a_whole(content: str) -> None:
    asked = '<tool_call>{"name": "read", "arguments": {}}</tool_call>'
    [(_, _, result, _)], reasons = rows(in_text(asked, {"role": "tool", "content": content}))
    assert result == "The manual: <tool_response>5</tool_response> is a result; more follows." and not reasons


def test_arguments_may_quote_the_mark_that_ends_a_call() -> None:
    call = {"name": "write", "arguments": {"text": "a </tool_call> b <tool_call> c"}}
    text = f"<tool_call>{json.dumps(call)}</tool_call> I wrote."
    expected = [("write", call["arguments"], "ok", False)]
    assert rows(in_text(text, {"role": "tool", "content": "ok"})) == (expected, [])


def test_an_id_that_returns_stands_for_the_call_of_the_latest_turn() -> None:
    first = {"role": "assistant", "tool_calls": [function(NORRBY, "call_0")]}
    second = {"role": "assistant", "tool_calls": [function(TVEIT, "call_0")]}
    result = {"role": "tool", "tool_call_id": "call_0", "content": "87 cm"}
    expected = [("gauge", NORRBY, None, False), ("gauge", TVEIT, "87 cm", False)]
    assert rows({"messages": [QUESTION, first, QUESTION, second, result]}) == (expected, [])


def test_calls_of_one_id_in_one_message_are_two_calls() -> None:
    asked = {"role": "assistant", "tool_calls": [function(NORRBY, "x"), function(TVEIT, "x")]}
    results = [{"role": "tool", "tool_call_id": "x", "content": content} for content in ("114 cm", "87 cm")]
    expected = [("gauge", NORRBY, "114 cm", False), ("gauge", TVEIT, "87 cm", False)]
    assert rows({"messages": [QUESTION, asked, *results]}) == (expected, [])


AUTOGEN: list[Any] = [
    {"source": "user", "type": "TextMessage", "content": "How high?"},
    {"source": "a", "type": "ToolCallRequestEvent", "content": [{"id": "1", "name": "gauge", "arguments": "{}"}]},
    {"source": "a", "type": "ToolCallExecutionEvent", "content": [{"call_id": "1", "content": "no", "is_error": True}]},
    {"source": "a", "type": "TextMessage", "content": "I do not know."},
]
HAYSTACK: list[Any] = [
    {"role": "user", "content": [{"text": "How high?"}]},
    {"role": "assistant", "content": [{"tool_call": {"id": "1", "tool_name": "gauge", "arguments": {}}}]},
    {"role": "tool", "content": [{"tool_call_result": {"result": "no", "error": True, "origin": {"id": "1"}}}]},
]
LLAMA_INDEX: list[Any] = [
    {"role": "user", "blocks": [{"block_type": "text", "text": "How high?"}]},
    {"role": "assistant", "blocks": [], "additional_kwargs": {"tool_calls": [function({}, "1")]}},
    {
        "role": "tool",
        "blocks": [{"block_type": "text", "text": "Error: no"}],
        "additional_kwargs": {"tool_call_id": "1"},
    },
]
COHERE: list[Any] = [
    {"role": "USER", "message": "How high?"},
    {"role": "CHATBOT", "message": "", "tool_calls": [{"name": "gauge", "parameters": {}}]},
    {"role": "TOOL", "tool_results": [{"call": {"name": "gauge"}, "outputs": [{"error": "no"}]}]},
]


@pytest.mark.parametrize("messages", [HAYSTACK, LLAMA_INDEX], ids=["haystack", "llama_index"])
def test_messages_of_frameworks_hold_their_calls_and_results(messages: list[Any]) -> None:
    [(tool, arguments, result, failed)], reasons = rows({"messages": messages})
    assert (tool, arguments, failed, reasons) == ("gauge", {}, True, []) and "no" in str(result)


def test_events_of_autogen_have_calls_as_the_parts_of_a_content() -> None:
    named = [{**message, "source": "assistant" if message["source"] == "a" else "user"} for message in AUTOGEN]
    assert rows({"messages": named}) == ([("gauge", {}, "no", True)], [])


def test_roles_in_capitals_and_results_beside_the_call_are_read() -> None:
    assert rows({"chat_history": COHERE}) == ([("gauge", {}, '[{"error": "no"}]', True)], [])


def test_a_copy_of_a_call_that_a_framework_keeps_goes_with_it() -> None:
    both = {"tool_calls": [{"name": "gauge", "args": NORRBY, "id": "1"}]}
    kept = {"additional_kwargs": {"tool_calls": [function(NORRBY, "1")]}}
    for message in (both, kept, both | kept):
        asked = {"type": "ai", "content": "", **message}
        record = {
            "messages": [
                {"type": "human", "content": "?"},
                asked,
                {"type": "tool", "tool_call_id": "1", "content": "114"},
            ]
        }
        assert rows(record) == ([("gauge", NORRBY, "114", False)], [])


def test_code_that_a_model_runs_is_a_call() -> None:
    parts = [
        {"executableCode": {"language": "PYTHON", "code": "print(1)"}},
        {"codeExecutionResult": {"outcome": "OUTCOME_OK", "output": "1"}},
        {"text": "1."},
    ]
    record = {"contents": [{"role": "user", "parts": [{"text": "?"}]}, {"role": "model", "parts": parts}]}
    assert rows(record) == ([("PYTHON", {"input": "print(1)"}, "1", False)], [])


def test_attributes_of_one_field_each_are_read_under_both_of_their_names() -> None:
    span = {
        "trace_id": "t",
        "span_id": "1",
        "attributes": {
            "gen_ai.prompt.0.role": "user",
            "gen_ai.prompt.0.content": "?",
            "gen_ai.prompt.1.role": "assistant",
            "gen_ai.prompt.1.tool_calls.0.id": "1",
            "gen_ai.prompt.1.tool_calls.0.name": "gauge",
            "gen_ai.prompt.1.tool_calls.0.arguments": json.dumps(NORRBY),
            "gen_ai.prompt.2.role": "tool",
            "gen_ai.prompt.2.tool_call_id": "1",
            "gen_ai.prompt.2.content": "114 cm",
            "gen_ai.completion.0.role": "assistant",
            "gen_ai.completion.0.content": "114 cm.",
        },
    }
    assert rows(span) == ([("gauge", NORRBY, "114 cm", False)], [])


@pytest.mark.parametrize(
    "record",
    [
        {"messages": "[1, oops"},
        {"messages": "see above"},
        {"trace_id": "t", "span_id": "1", "attributes": {}},
        {"chat": "hello USER: a\nbla ASSISTANT: b"},
    ],
)
def test_a_record_that_says_nothing_is_named(record: Any) -> None:
    assert rows(record) == ([], ["unknown_form"])


def test_the_message_of_an_answer_stands_beside_those_of_its_request() -> None:
    answer = {"index": 0, "message": {"role": "assistant", "content": None, "tool_calls": [function(NORRBY, "1")]}}
    messages, faults = read_conversation({"messages": [QUESTION], "choices": [answer]})
    assert not faults and [call.tool for message in messages for call in message.calls] == ["gauge"]


def line(own: str, parent: str | None, role: str, *content: dict[str, Any], **fields: Any) -> dict[str, Any]:
    """A line of a session of Claude Code."""
    message = {"role": role, "content": list(content)}
    return {"type": role, "uuid": own, "parentUuid": parent, "sessionId": "s", "message": message, **fields}


def call_line(own: str, parent: str, call_id: str, arguments: Any) -> dict[str, Any]:
    return line(own, parent, "assistant", {"type": "tool_use", "id": call_id, "name": "gauge", "input": arguments})


def result_line(own: str, parent: str, call_id: str, content: str) -> dict[str, Any]:
    return line(own, parent, "user", {"type": "tool_result", "tool_use_id": call_id, "content": content})


def test_a_session_begins_with_lines_of_other_kinds_and_goes_on_once_it_was_made_shorter() -> None:
    queued = [{"type": "queue-operation", "operation": "enqueue", "sessionId": "s"}] * 9
    boundary = {"type": "system", "uuid": "k", "parentUuid": None, "logicalParentUuid": "r", "sessionId": "s"}
    session = [
        *queued,
        line("a", None, "user", {"type": "text", "text": "How high?"}),
        call_line("b", "a", "1", NORRBY),
        result_line("r", "b", "1", "114 cm"),
        boundary,
        line("s", "k", "user", {"type": "text", "text": "Go on."}),
        call_line("c", "s", "2", TVEIT),
        result_line("q", "c", "2", "87 cm"),
    ]
    [conversation] = read(session)
    calls = [call for message in conversation.messages for call in message.calls]
    assert [call.result for call in calls] == ["114 cm", "87 cm"] and not conversation.faults
    left = drop_calls(session, calls[1:])
    assert boundary in left and [one.get("uuid") for one in left[9:]] == ["a", "b", "r", "k", "s"]


@pytest.mark.parametrize(
    "beside",
    [
        {"trace_id": "t", "span_id": "1"},
        {"type": "session"},
        {"steps": [{"task": "?"}]},
        {"uuid": "u", "parentUuid": None},
    ],
)
def test_fields_of_logs_beside_messages_change_nothing(beside: dict[str, Any]) -> None:
    asked = {"role": "assistant", "tool_calls": [function(NORRBY, "1")]}
    record = {**beside, "messages": [QUESTION, asked, {"role": "tool", "tool_call_id": "1", "content": "114 cm"}]}
    conversations = read([record, record])
    calls = [call for one in conversations for message in one.messages for call in message.calls]
    assert [call.result for call in calls] == ["114 cm", "114 cm"]
    assert not any(one.faults for one in conversations)


def test_results_of_one_message_go_by_the_ids_that_tau2_gives_them() -> None:
    calls = [{"id": name, "name": "gauge", "arguments": NORRBY, "requestor": "assistant"} for name in ("a", "b")]
    results = [
        {"id": "b", "role": "tool", "content": "87 cm", "requestor": "assistant", "error": False},
        {"id": "a", "role": "tool", "content": "no such station", "requestor": "assistant", "error": True},
    ]
    asked = {"role": "assistant", "content": None, "tool_calls": calls}
    record = {"messages": [QUESTION, asked, {"role": "tool", "tool_messages": results}]}
    assert rows(record) == ([("gauge", NORRBY, "no such station", True), ("gauge", NORRBY, "87 cm", False)], [])


@pytest.mark.parametrize("numbers", ["1,", "[],", '"x",'])
@pytest.mark.parametrize("place", ["messages", "content", "arguments"])
def test_a_list_of_a_million_things_is_read_or_named(numbers: str, place: str) -> None:
    text = f"[{numbers * 1_000_000}0]"
    asked: dict[str, Any] = {"role": "assistant", "tool_calls": [function({}, "1")]}
    result = {"role": "tool", "tool_call_id": "1", "content": text}
    if place == "arguments":
        asked["tool_calls"][0]["function"]["arguments"] = text
        result["content"] = "ok"
    record: Any = {"messages": text if place == "messages" else [QUESTION, asked, result]}
    calls, reasons = rows(record)
    if place == "messages":
        assert not calls and "unknown_form" in reasons
    else:
        assert len(calls) == 1 and not reasons


ASKED = {"role": "assistant", "tool_calls": [function(NORRBY, "1")]}
ANSWERED = {"role": "tool", "tool_call_id": "1", "content": "114 cm"}


@pytest.mark.parametrize(
    "record",
    [
        {"turns": [QUESTION, ASKED, ANSWERED]},
        {"data": {"messages": [QUESTION, ASKED, ANSWERED]}},
        {"custom_id": "x", "method": "POST", "body": {"model": "m", "messages": [QUESTION, ASKED, ANSWERED]}},
        {
            "request_body": {"messages": [QUESTION, ASKED, ANSWERED]},
            "response_body": {"choices": [{"message": ANSWER}]},
        },
    ],
    ids=["turns", "data", "batch", "proxy"],
)
def test_messages_are_found_where_batches_and_proxies_keep_them(record: Any) -> None:
    assert rows(record) == ([("gauge", NORRBY, "114 cm", False)], [])


@pytest.mark.parametrize(
    "record",
    [
        {"custom_id": "x", "response": {"status_code": 200, "body": {"choices": [{"message": ASKED}]}}},
        {"object": "chat.completion", "choices": [{"index": 0, "message": ASKED}]},
    ],
)
def test_an_answer_alone_is_a_conversation(record: Any) -> None:
    assert rows(record) == ([("gauge", NORRBY, None, False)], [])


@pytest.mark.parametrize(
    ("beside", "way"),
    [
        ({"tool_calls": [function(NORRBY, "1")]}, "tool_calls"),
        ({"rejected": [ASKED]}, "rejected.0.tool_calls"),
        ({"log": {"requests": [{"name": "gauge", "arguments": NORRBY}]}}, "log.requests.0"),
    ],
)
def test_a_call_beside_messages_without_one_is_named_with_its_place(beside: dict[str, Any], way: str) -> None:
    [conversation] = read([{"messages": [QUESTION, ANSWER], **beside}])
    [(reason, detail)] = conversation.faults
    assert reason == "unknown_field" and detail == f"no call was read, and {way} holds one"


def test_descriptions_of_tools_are_no_calls() -> None:
    described = {"type": "function", "function": {"name": "gauge", "parameters": {"type": "object"}}}
    expected = {"evaluation_criteria": {"actions": [{"name": "gauge", "arguments": NORRBY}]}}
    assert rows({"messages": [QUESTION, ANSWER], "tools": [described], "task": expected}) == ([], [])
