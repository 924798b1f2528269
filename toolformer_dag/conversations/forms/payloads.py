"""Forms of requests to model interfaces, with the answer where it is stored with them, and of lists of messages."""

from collections.abc import Iterator
from typing import Any

from toolformer_dag.conversations.forms.examples import (
    ANSWER,
    ANTHROPIC_CALL,
    ANTHROPIC_RESULT,
    OPENAI_RESULT,
    QUESTION,
)
from toolformer_dag.conversations.forms.form import Form
from toolformer_dag.conversations.plain_values import get_list_at
from toolformer_dag.conversations.raw_messages import StoredMessage
from toolformer_dag.conversations.record_paths import RecordPath, get_value_at
from toolformer_dag.conversations.shapes import FoundResult, find_id

MESSAGE_LIST_FIELDS = ("conversations", "conversation", "trajectory", "history", "chat_history", "dialog")
"""Fields that may hold the messages of a record, whatever their form."""
OTHER_MESSAGE_LIST_PATHS = ("turns", "dialogue", "events", "data.messages", "chat.messages", "conversation.messages")
"""Paths to lists of messages that are less common."""

PYDANTIC_ROLES_BY_PART_KIND = {
    "system-prompt": "system",
    "user-prompt": "user",
    "tool-return": "tool",
    "builtin-tool-return": "tool",
    "retry-prompt": "tool",
}
"""The role of a part of a message of pydantic-ai by its kind. Parts of other kinds are the assistant's."""


def iter_pydantic_messages(conversation: Any) -> Iterator[StoredMessage]:
    """Yield the parts of pydantic-ai's messages, such as `{"part_kind": "user-prompt", "content": "Hello"}`."""
    messages_path = _find_messages_path(conversation)
    for message_index, message in enumerate(get_value_at(conversation, messages_path)):
        parts_path = (*messages_path, message_index, "parts")
        for part_index, part in enumerate(get_list_at(message, "parts")):
            yield _parse_pydantic_part(part, (*parts_path, part_index))


def _find_messages_path(conversation: Any) -> RecordPath:
    """Find the path to the messages of a conversation. It is () if the conversation is their list itself."""
    if isinstance(conversation, list):
        return ()
    if conversation.get("messages"):
        return ("messages",)
    return ("all_messages",)


def _parse_pydantic_part(part: Any, path: RecordPath) -> StoredMessage:
    """Convert a part to a message, by its kind, such as "user-prompt", "text" or "builtin-tool-call"."""
    part_kind = str(part.get("part_kind")) if isinstance(part, dict) else ""
    if part_kind == "retry-prompt":
        return _parse_retry_prompt(part, path)

    role = PYDANTIC_ROLES_BY_PART_KIND.get(part_kind, "assistant")
    is_content_block = role == "assistant" or part_kind.startswith("builtin")
    return StoredMessage(path, part, role, is_part=is_content_block)


def _parse_retry_prompt(part: dict[str, Any], path: RecordPath) -> StoredMessage:
    """Parse a recorded prompt that asks the model to try again, such as after a call with wrong arguments.

    If it has the id of a call, it becomes the result of that call, marked as an error. Else it becomes a message of the
    user.
    """
    if not part.get("tool_call_id"):
        return StoredMessage(path, part, "user")

    call_id = find_id(part, ("tool_call_id",))
    result = FoundResult(part.get("content"), id=call_id, status_fields={"error": True})
    return StoredMessage(path, part, result=result)


FORMS = (
    Form(
        name="OpenAI Responses",
        source="https://platform.openai.com/docs/api-reference/responses",
        signs=(
            "input.*.type=function_call",
            "output.*.type=function_call",
            "output.*.type=message",
            "items.*.type=function_call",
        ),
        messages=("instructions", "input", "items", "output"),
        example={
            "input": [QUESTION],
            "output": [
                {"type": "function_call", "call_id": "c1", "name": "weather", "arguments": '{"city": "Oslo"}'},
                {"type": "function_call_output", "call_id": "c1", "output": "7 degrees"},
                {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "It is 7."}]},
            ],
        },
    ),
    Form(
        name="Anthropic messages",
        source="https://docs.anthropic.com/en/docs/agents-and-tools/tool-use/overview",
        signs=(
            "messages.*.content.*.type=tool_use",
            "messages.*.content.*.type=server_tool_use",
            "messages.*.content.*.type=mcp_tool_use",
        ),
        messages=("system", "messages", "response", "output"),
        example={
            "messages": [
                QUESTION,
                ANTHROPIC_CALL,
                ANTHROPIC_RESULT,
                ANSWER,
            ]
        },
    ),
    Form(
        name="Bedrock Converse",
        source="https://docs.aws.amazon.com/bedrock/latest/APIReference/API_runtime_Converse.html",
        signs=("messages.*.content.*.toolUse",),
        messages=("system", "messages", "output.message"),
        example={
            "messages": [
                {"role": "user", "content": [{"text": "How warm is it in Oslo?"}]},
                {
                    "role": "assistant",
                    "content": [{"toolUse": {"toolUseId": "c1", "name": "weather", "input": {"city": "Oslo"}}}],
                },
                {
                    "role": "user",
                    "content": [
                        {"toolResult": {"toolUseId": "c1", "content": [{"text": "7 degrees"}], "status": "success"}}
                    ],
                },
                {"role": "assistant", "content": [{"text": "It is 7 degrees in Oslo."}]},
            ]
        },
    ),
    Form(
        name="Gemini contents",
        source="https://ai.google.dev/api/caching#Content",
        signs=("contents.*.parts", "history.*.parts", "request.contents.*.parts"),
        messages=(
            "systemInstruction",
            "system_instruction",
            "request.systemInstruction",
            "request.contents",
            "contents",
            "history",
            "candidates.*.content",
            "response.candidates.*.content",
        ),
        example={
            "contents": [
                {"role": "user", "parts": [{"text": "How warm is it in Oslo?"}]},
                {"role": "model", "parts": [{"functionCall": {"name": "weather", "args": {"city": "Oslo"}}}]},
                {
                    "role": "user",
                    "parts": [{"functionResponse": {"name": "weather", "response": {"degrees": 7}}}],
                },
                {"role": "model", "parts": [{"text": "It is 7 degrees in Oslo."}]},
            ]
        },
    ),
    Form(
        name="LangChain messages",
        source="https://python.langchain.com/docs/concepts/messages/",
        signs=("messages.*.lc", "messages.*.data.content", "messages.*.type=ai", "messages.*.type=tool"),
        messages=("messages",),
        example={
            "messages": [
                {"type": "human", "data": {"content": "How warm is it in Oslo?"}},
                {
                    "type": "ai",
                    "data": {
                        "content": "",
                        "tool_calls": [{"name": "weather", "args": {"city": "Oslo"}, "id": "c1"}],
                    },
                },
                {"type": "tool", "data": {"content": "7 degrees", "tool_call_id": "c1", "name": "weather"}},
                {"type": "ai", "data": {"content": "It is 7 degrees in Oslo."}},
            ]
        },
    ),
    Form(
        name="Vercel AI SDK messages",
        source="https://ai-sdk.dev/docs/reference/ai-sdk-core/model-message",
        signs=(
            "messages.*.content.*.type=tool-call",
            "messages.*.content.*.type=tool-result",
            "messages.*.toolInvocations",
            "messages.*.parts.*.type=tool-invocation",
            "messages.*.parts.*.toolCallId",
        ),
        messages=("system", "messages"),
        example={
            "messages": [
                QUESTION,
                {
                    "role": "assistant",
                    "content": [
                        {"type": "tool-call", "toolCallId": "c1", "toolName": "weather", "input": {"city": "Oslo"}}
                    ],
                },
                {
                    "role": "tool",
                    "content": [
                        {
                            "type": "tool-result",
                            "toolCallId": "c1",
                            "toolName": "weather",
                            "output": {"type": "text", "value": "7 degrees"},
                        }
                    ],
                },
                ANSWER,
            ]
        },
    ),
    Form(
        name="pydantic-ai",
        source="https://ai.pydantic.dev/message-history/",
        signs=("messages.*.parts.*.part_kind", "all_messages.*.parts.*.part_kind", "*.parts.*.part_kind"),
        read=iter_pydantic_messages,
        example={
            "messages": [
                {"kind": "request", "parts": [{"part_kind": "user-prompt", "content": "How warm is it in Oslo?"}]},
                {
                    "kind": "response",
                    "parts": [
                        {
                            "part_kind": "tool-call",
                            "tool_name": "weather",
                            "args": {"city": "Oslo"},
                            "tool_call_id": "c1",
                        }
                    ],
                },
                {
                    "kind": "request",
                    "parts": [
                        {
                            "part_kind": "tool-return",
                            "tool_name": "weather",
                            "content": "7 degrees",
                            "tool_call_id": "c1",
                        }
                    ],
                },
                {"kind": "response", "parts": [{"part_kind": "text", "content": "It is 7 degrees in Oslo."}]},
            ]
        },
    ),
    Form(
        name="Mistral's conversations",
        source="https://docs.mistral.ai/agents/agents_and_conversations",
        signs=("entries.*.type=function.call", "entries.*.type=message.output"),
        messages=("entries",),
        example={
            "entries": [
                {"type": "message.input", "role": "user", "content": "How warm is it in Oslo?"},
                {
                    "type": "function.call",
                    "tool_call_id": "c1",
                    "name": "weather",
                    "arguments": '{"city": "Oslo"}',
                },
                {"type": "function.result", "tool_call_id": "c1", "result": "7 degrees"},
                {"type": "message.output", "role": "assistant", "content": "It is 7 degrees in Oslo."},
            ]
        },
    ),
)

GENERAL_FORMS = (
    Form(
        name="OpenAI chat",
        source="https://platform.openai.com/docs/api-reference/chat",
        signs=("messages", "choices.*.message"),
        messages=("messages", "choices.0.message"),
        example={
            "messages": [
                QUESTION,
                {
                    "role": "assistant",
                    "content": None,
                    "tool_calls": [
                        {
                            "id": "c1",
                            "type": "function",
                            "function": {"name": "weather", "arguments": '{"city": "Oslo"}'},
                        }
                    ],
                },
                OPENAI_RESULT,
                ANSWER,
            ]
        },
    ),
    Form(
        name="Prompt and completion",
        source="https://huggingface.co/docs/trl/dataset_formats",
        signs=("prompt.*.role", "completion.*.role", "prompt"),
        messages=("prompt", "completion"),
        example={
            "prompt": [QUESTION],
            "completion": [
                {
                    "role": "assistant",
                    "tool_calls": [
                        {"type": "function", "function": {"name": "weather", "arguments": {"city": "Oslo"}}}
                    ],
                },
                {"role": "tool", "name": "weather", "content": "7 degrees"},
                ANSWER,
            ],
        },
    ),
    *(
        Form(
            name=f"Messages in `{key}`",
            source="https://huggingface.co/docs/trl/dataset_formats",
            signs=(key,),
            messages=("system", key) if key == "conversations" else (key,),
            example={
                key: [
                    QUESTION,
                    {"role": "assistant", "tool_calls": [{"name": "weather", "arguments": {"city": "Oslo"}}]},
                    {"role": "tool", "content": "7 degrees"},
                    ANSWER,
                ]
            },
        )
        for key in MESSAGE_LIST_FIELDS
    ),
    Form(
        name="Messages under other names",
        source="https://huggingface.co/docs/trl/dataset_formats",
        signs=tuple(f"{path}.*.role" for path in OTHER_MESSAGE_LIST_PATHS),
        messages=OTHER_MESSAGE_LIST_PATHS,
        example={
            "turns": [
                QUESTION,
                {"role": "assistant", "tool_calls": [{"name": "weather", "arguments": {"city": "Oslo"}}]},
                {"role": "tool", "content": "7 degrees"},
                ANSWER,
            ]
        },
    ),
    Form(
        name="A list of messages",
        source="https://platform.openai.com/docs/api-reference/chat",
        signs=("*.role", "*.from", "*.type"),
        messages=("",),
        example=[
            QUESTION,
            {"role": "assistant", "tool_calls": [{"name": "weather", "arguments": {"city": "Oslo"}}]},
            {"role": "tool", "content": "7 degrees"},
            ANSWER,
        ],
    ),
)
