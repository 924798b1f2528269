"""What the assistant thought is kept beside its words, wherever a form has it, and everything behind passes over it."""

import json
from dataclasses import replace
from typing import Any

import pytest

from tests.conversations.test_records import FORMS, read, record_file, values_of
from toolformer_dag.conversations.dropping import can_drop_calls, drop_calls
from toolformer_dag.conversations.messages import RecordedMessage, iter_indexed_openai_messages
from toolformer_dag.conversations.reading import ReadConversation, read_conversation
from toolformer_dag.conversations.record_paths import get_value_at

THOUGHT = "The user wants two temperatures and an author."
"""What the assistant thinks in the records of forms that have a place for it."""
FORMS_WITH_THOUGHTS = [form for form in FORMS if THOUGHT in record_file(form).read_text()]
QUESTION = {"role": "user", "content": "How warm is it in Oslo?"}
CALL = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Oslo"}'}}
RESULT = {"role": "tool", "tool_call_id": "c1", "content": "7 degrees"}
ANSWER = {"role": "assistant", "content": "It is 7 degrees."}


def messages_of(*stored: Any) -> tuple[RecordedMessage, ...]:
    """Read messages of a record; nothing of it may be left unread."""
    messages, faults = read_conversation({"messages": list(stored)})
    assert not faults
    return messages


def thoughts_of(*stored: Any) -> list[tuple[str, str]]:
    """Return words and thoughts of the messages of the assistant."""
    return [(one.content, one.thoughts) for one in messages_of(*stored) if one.role == "assistant"]


def test_most_forms_with_a_place_for_thoughts_have_a_record_with_one() -> None:
    assert len(FORMS_WITH_THOUGHTS) >= 25


@pytest.mark.parametrize("form", FORMS_WITH_THOUGHTS)
def test_a_thought_is_kept_at_the_message_that_follows_it_and_is_no_word(form: str) -> None:
    conversations = read(values_of(form))
    messages = [message for conversation in conversations for message in conversation.messages]
    thinking = [message for message in messages if THOUGHT in message.thoughts]
    assert thinking
    for message in thinking:
        assert message.role == "assistant"
        assert message.calls or message.content.startswith("I look up Oslo")
    assert not any(THOUGHT in message.content for message in messages)


@pytest.mark.parametrize(
    "fields",
    [
        {"reasoning_content": "Oslo is cold."},  # DeepSeek, vLLM
        {"reasoning": "Oslo is cold."},  # OpenRouter
        {"thinking": "Oslo is cold."},  # Ollama
        {"thinking_blocks": [{"type": "thinking", "thinking": "Oslo is cold.", "signature": "c2ln"}]},  # LiteLLM
        {"reasoning_details": [{"type": "reasoning.text", "text": "Oslo is cold."}]},  # OpenRouter
        {"additional_kwargs": {"reasoning_content": "Oslo is cold."}},  # LangChain
        {"reasoning_content": "Oslo is cold.", "reasoning": "Oslo is cold."},  # the same twice
    ],
    ids=lambda fields: "+".join(fields),
)
def test_thoughts_in_a_field_beside_the_content(fields: dict[str, Any]) -> None:
    call = {"role": "assistant", "content": "", "tool_calls": [CALL], **fields}
    assert thoughts_of(QUESTION, call, RESULT, ANSWER) == [("", "Oslo is cold."), ("It is 7 degrees.", "")]


@pytest.mark.parametrize(
    "part",
    [
        {"type": "thinking", "thinking": "Oslo is cold.", "signature": "c2ln"},  # Anthropic
        {"type": "thinking", "thinking": [{"type": "text", "text": "Oslo is cold."}]},  # Mistral
        {"type": "reasoning", "text": "Oslo is cold."},  # Vercel
        {"type": "reasoning", "reasoning": "Oslo is cold."},  # LangChain
        {"type": "reasoning", "content": "Oslo is cold."},  # OpenTelemetry
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "Oslo is cold."}]},  # OpenAI
        {"part_kind": "thinking", "content": "Oslo is cold."},  # pydantic-ai
        {"reasoningContent": {"reasoningText": {"text": "Oslo is cold.", "signature": "c2ln"}}},  # Bedrock
        {"text": "Oslo is cold.", "thought": True},  # Gemini
    ],
    ids=lambda part: "+".join(part),
)
def test_thoughts_in_a_part_of_the_content(part: dict[str, Any]) -> None:
    answer = {"role": "assistant", "content": [part, {"type": "text", "text": "It is 7 degrees."}]}
    assert thoughts_of(QUESTION, answer) == [("It is 7 degrees.", "Oslo is cold.")]


@pytest.mark.parametrize(
    "content",
    [
        "<think>\nOslo is cold.\n</think>\n\nIt is 7 degrees.",
        "Oslo is cold.</think>It is 7 degrees.",
        "<thought>Oslo is cold.</thought> It is 7 degrees.",
        "[THINK]Oslo is cold.[/THINK]It is 7 degrees.",
    ],
)
def test_thoughts_between_marks_in_the_text(content: str) -> None:
    assert thoughts_of(QUESTION, {"role": "assistant", "content": content}) == [("It is 7 degrees.", "Oslo is cold.")]


def test_several_thoughts_of_a_message_stand_in_their_order() -> None:
    parts = [{"type": "thinking", "thinking": "First."}, {"type": "text", "text": "<think>Second.</think>It is 7."}]
    assert thoughts_of(QUESTION, {"role": "assistant", "content": parts}) == [("It is 7.", "First.\n\nSecond.")]


def test_a_thought_that_is_an_item_of_its_own_belongs_to_the_next_message_of_the_assistant() -> None:
    thought = {"type": "reasoning", "summary": [{"type": "summary_text", "text": "Oslo is cold."}]}
    call = {"type": "function_call", "call_id": "c1", "name": "weather", "arguments": "{}"}
    output = {"type": "function_call_output", "call_id": "c1", "output": "7 degrees"}
    assert thoughts_of(QUESTION, thought, call, output, ANSWER) == [("", "Oslo is cold."), ("It is 7 degrees.", "")]
    assert thoughts_of(QUESTION, call, output, thought, ANSWER) == [("", ""), ("It is 7 degrees.", "Oslo is cold.")]
    assert thoughts_of(QUESTION, thought, QUESTION, ANSWER) == [("It is 7 degrees.", "")]  # it led to no word


def test_a_thought_behind_a_result_belongs_to_the_words_behind_it() -> None:
    parts = [
        {"type": "reasoning", "text": "I look."},
        {"type": "tool-weather", "toolCallId": "c1", "input": {"city": "Oslo"}, "output": "7 degrees"},
        {"type": "reasoning", "text": "I answer."},
        {"type": "text", "text": "It is 7 degrees."},
    ]
    stored = {"role": "assistant", "parts": parts}
    assert thoughts_of(QUESTION, stored) == [("", "I look."), ("It is 7 degrees.", "I answer.")]


def test_an_encrypted_thought_and_a_users_text_are_no_thoughts() -> None:
    parts = [{"type": "redacted_thinking", "data": "RW5j"}, {"type": "text", "text": "It is 7 degrees."}]
    assert thoughts_of(QUESTION, {"role": "assistant", "content": parts}) == [("It is 7 degrees.", "")]
    user = {"role": "user", "content": "<think>Hm.</think> How warm is it?", "reasoning": "Hm."}
    assert messages_of(user, ANSWER)[0] == RecordedMessage("user", user["content"])


@pytest.mark.parametrize("form", FORMS_WITH_THOUGHTS)
def test_thoughts_are_passed_over_where_messages_are_written(form: str) -> None:
    for conversation in read(values_of(form)):
        without = [replace(message, thoughts="") for message in conversation.messages]
        assert list(iter_indexed_openai_messages(conversation.messages)) == list(iter_indexed_openai_messages(without))


@pytest.mark.parametrize("form", FORMS_WITH_THOUGHTS)
def test_a_thought_is_found_again_in_its_record(form: str) -> None:
    values = values_of(form)
    for conversation in read(values):
        record = records_of(conversation, values)
        for message in conversation.messages:
            assert bool(message.thoughts) == bool(message.thought_places)
            if THOUGHT in message.thoughts and can_drop_calls(conversation.form_name):
                found = [json.dumps(get_value_at(record, place)) for place in message.thought_places]
                assert any(THOUGHT in text for text in found)


@pytest.mark.parametrize("form", FORMS_WITH_THOUGHTS)
def test_a_record_without_its_thoughts_has_the_same_words_and_calls(form: str) -> None:
    values = values_of(form)
    for conversation in read(values):
        if not can_drop_calls(conversation.form_name):
            continue
        places = [place for message in conversation.messages for place in message.thought_places]
        record = records_of(conversation, values)
        left = drop_calls(record, [], places)
        [again] = [
            one
            for one in read(left if record is values else [left])
            if one.index_in_record == conversation.index_in_record
        ]
        assert words_and_calls(again) == words_and_calls(conversation)
        assert not any(message.thoughts for message in again.messages)


def records_of(conversation: ReadConversation, values: list[Any]) -> Any:
    """Return what a conversation was read from: a record, or all records of a file."""
    return values if conversation.record_count > 1 else values[conversation.first_record_number - 1]


def words_and_calls(conversation: ReadConversation) -> list[Any]:
    """Return the role, the words and the calls with their results of each message."""
    return [
        (one.role, one.content, [(call.tool, call.arguments, call.result) for call in one.calls])
        for one in conversation.messages
    ]


def test_a_thought_that_the_record_repeats_is_found_at_each_place() -> None:
    block = {"type": "thinking", "thinking": "Oslo is cold.", "signature": "c2ln"}
    fields = {"reasoning_content": "Oslo is cold.", "thinking_blocks": [block]}
    in_fields = {"role": "assistant", "content": "It is 7.", **fields}
    in_parts = {"role": "assistant", "content": [block, {"type": "text", "text": "It is 7."}], **fields}
    for answer in (in_fields, in_parts):
        record = {"messages": [QUESTION, answer]}
        messages, _ = read_conversation(record)
        assert messages[1].thoughts == "Oslo is cold."
        assert "cold" not in json.dumps(drop_calls(record, [], messages[1].thought_places))


def test_a_thought_between_marks_is_taken_out_of_the_text_around_a_call() -> None:
    call = '<tool_call>{"name": "weather", "arguments": {"city": "Oslo"}}</tool_call>'
    text = f"\n <think>Oslo is cold.</think> I look.\n{call}"
    result = {"from": "tool", "value": "<tool_response>7</tool_response>"}
    answer = {"from": "gpt", "value": " <think>So it is 7.</think>\nIt is 7."}
    record = {"conversations": [{"from": "human", "value": "?"}, {"from": "gpt", "value": text}, result, answer]}
    messages, faults = read_conversation(record)
    assert not faults
    assert [message.thoughts for message in messages] == ["", "Oslo is cold.", "So it is 7."]
    places = [place for message in messages for place in message.thought_places]
    left = drop_calls(record, [], places)["conversations"]
    assert [message["value"] for message in left] == ["?", f"I look.\n{call}", result["value"], "It is 7."]


def test_a_dropped_call_leaves_the_thoughts_of_the_record_where_they_are() -> None:
    call = {"role": "assistant", "content": "I look.", "reasoning_content": "Oslo is cold.", "tool_calls": [CALL]}
    record = {"messages": [QUESTION, call, RESULT, ANSWER]}
    messages, _ = read_conversation(record)
    left = drop_calls(record, messages[1].calls)
    assert json.dumps(left).count("Oslo is cold.") == 1
    assert read_conversation(left)[0][1] == replace(messages[1], calls=())


def test_a_thought_between_marks_without_words_waits_for_the_next_message() -> None:
    thought = {"role": "assistant", "content": "<think>Oslo is cold.</think>"}
    call = {"role": "assistant", "content": None, "tool_calls": [CALL]}
    assert thoughts_of(QUESTION, thought, call, RESULT, ANSWER)[0] == ("", "Oslo is cold.")
    assert thoughts_of(QUESTION, {**thought, "reasoning": "First."}, call, RESULT)[0] == ("", "First.\n\nOslo is cold.")


def test_a_thought_that_the_record_repeats_beside_a_later_part_stays_one() -> None:
    parts = [
        {"type": "tool_use", "id": "c1", "name": "weather", "input": {"city": "Oslo"}},
        {"type": "tool_result", "tool_use_id": "c1", "content": "7 degrees"},
        {"type": "thinking", "thinking": "Oslo is cold."},
        {"type": "text", "text": "It is 7 degrees."},
    ]
    messages = messages_of(QUESTION, {"role": "assistant", "content": parts, "reasoning": "Oslo is cold."})
    thinking = [message for message in messages if message.thoughts or message.thought_places]
    assert [(message.content, message.thoughts) for message in thinking] == [("It is 7 degrees.", "Oslo is cold.")]
    assert len(thinking[0].thought_places) == 2


def test_thoughts_that_overlap_are_one() -> None:
    text = "<think>a <thinking>b</think> c</thinking> hi"
    [(content, thoughts)] = thoughts_of(QUESTION, {"role": "assistant", "content": text})
    assert content == "hi" and all(letter in thoughts for letter in "abc")
