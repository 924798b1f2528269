"""What the assistant thought is kept beside its words, wherever a form has it, and everything behind passes over it."""

import json
from dataclasses import replace
from typing import Any

import pytest

from tests.conversations.test_records import FORMS, read, record_file, values_of
from toolformer_dag.conversations.dropping import drop
from toolformer_dag.conversations.messages import RecordedMessage, to_openai
from toolformer_dag.conversations.reading import read_conversation

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
        assert list(to_openai(conversation.messages)) == list(to_openai(without))


def test_a_dropped_call_leaves_the_thoughts_of_the_record_where_they_are() -> None:
    call = {"role": "assistant", "content": "I look.", "reasoning_content": "Oslo is cold.", "tool_calls": [CALL]}
    record = {"messages": [QUESTION, call, RESULT, ANSWER]}
    messages, _ = read_conversation(record)
    left = drop(record, messages[1].calls)
    assert json.dumps(left).count("Oslo is cold.") == 1
    assert read_conversation(left)[0][1] == replace(messages[1], calls=())
