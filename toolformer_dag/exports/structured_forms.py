"""The forms of C* with structured calls: chat, functions."""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from toolformer_dag.computing.plan import Lane
from toolformer_dag.exports.export_forms import (
    CALLS_COLUMN,
    ORIGIN_COLUMNS,
    ExportForm,
    build_column,
    build_shared_columns,
)
from toolformer_dag.method.corpus_texts import CorpusText, ScoredCall
from toolformer_dag.texts.arguments import Schema, parse_arguments
from toolformer_dag.tools.tool import collect_argument_schemas

if TYPE_CHECKING:
    from toolformer_dag.model.encoding import Encoding

TEXT_TYPE = pa.string()
"""The type of columns with JSON as text."""
JSON_TYPE = pa.json_()
"""`datasets` reads it as objects from 4.7 on: in structs each field that others have would be None, not absent."""
CHAT_CARD_TEXT = (
    "**Re-shaped: not filtered in this form.** The user's message is made up, and each inline call became a\n"
    "structured one with a `tool` message. `delta` was measured on the text with inline calls and says nothing\n"
    "about a conversation. The contents of the messages, without the instruction, are `plain`."
)
"""What the card says of the form `chat`."""
USER_INSTRUCTION = "Continue the text. Call a tool where its result helps to write what comes next.\n\n"
"""What the user says before the text, in the form `chat`."""


def build_chat_form(lanes: Sequence[Lane], encoding: "Encoding") -> ExportForm:
    """Define the export form of conversations with structured calls.

    Its columns `messages` and `tools` are what chat templates expect. The user's message is made up.

    Args:
        lanes: The tools with their settings.
        encoding: Counts the tokens of the messages and tools, written as JSON.
    """
    conversations = _ChatRows(lanes, encoding)
    schema = pa.schema(
        [  # both are JSON: templates look for keys that are absent, and arguments have any type
            build_column("messages", JSON_TYPE, "user, assistant with tool_calls, tool, ..., assistant"),
            build_column("tools", JSON_TYPE, "the tools in the form of a JSON schema"),
            CALLS_COLUMN,
            *ORIGIN_COLUMNS,
        ]
    )

    return ExportForm(
        name="chat",
        schema=schema,
        iter_rows=conversations.iter_rows,
        card_text=CHAT_CARD_TEXT,
        settings={"tools": conversations.function_definitions},
        count_row_tokens=conversations.count_row_tokens,
    )


class _ChatRows:
    """Converts texts with calls to conversations, and counts the tokens of these.

    Attributes:
        function_definitions: The descriptions of all tools, which every conversation has.
    """

    def __init__(self, lanes: Sequence[Lane], encoding: "Encoding") -> None:
        self.function_definitions = [_build_function_definition(lane) for lane in lanes]
        self._encoding = encoding
        self._schema_by_tool = _collect_schema_by_tool(lanes)
        self._tools_json = _to_json(self.function_definitions)
        self._tools_token_count = self._count_json_tokens(self.function_definitions)

    def iter_rows(self, corpus_text: CorpusText) -> Iterator[Mapping[str, Any]]:
        """Yield one row for a text: its messages and the tools as JSON, and the columns of every form."""
        messages = list(iter_conversation_messages(corpus_text, self._schema_by_tool))
        yield {"messages": _to_json(messages), "tools": self._tools_json, **build_shared_columns(corpus_text)}

    def count_row_tokens(self, row: Mapping[str, Any]) -> int:
        """Return the number of tokens of a row's messages and tools, written as JSON."""
        messages = json.loads(row["messages"])
        return self._tools_token_count + self._count_json_tokens(messages)

    def _count_json_tokens(self, messages_or_tools: Sequence[Mapping[str, Any]]) -> int:
        """Return the number of tokens of messages or tools, each written as JSON."""
        texts = [_to_json(message_or_tool) for message_or_tool in messages_or_tools]
        return sum(self._encoding.count_tokens(texts))


def build_functions_form(lanes: Sequence[Lane]) -> ExportForm:
    """Define the export form of public function-calling data sets, with a row per kept call.

    A row holds a query, the tools and the answers as JSON. The query is the text before the call, so it is
    not a question.

    Args:
        lanes: The tools with their settings.
    """
    tools = [_build_function_definition(lane)["function"] for lane in lanes]  # each {name, description, parameters}

    card_text = (
        "A row per kept call: the text before it, the tools, and the call as JSON. Texts without calls have no row."
    )

    return ExportForm(
        name="functions",
        schema=_build_functions_schema(),
        iter_rows=partial(
            _iter_function_rows, tools_json=_to_json(tools), schema_by_tool=_collect_schema_by_tool(lanes)
        ),
        card_text=card_text,
        settings={"tools": tools},
    )


def _build_functions_schema() -> pa.Schema:
    """Return the columns of a data set with a row per kept call.

    The first three are those of public function-calling data sets. CALLS_COLUMN adds the call with its losses, and
    ORIGIN_COLUMNS the document that it is from.
    """
    return pa.schema(
        [
            build_column("query", TEXT_TYPE, "the text before the call"),
            build_column("tools", TEXT_TYPE, "JSON: name, description and parameters of every tool"),
            build_column("answers", TEXT_TYPE, "JSON: a list with the kept call, its name and arguments"),
            CALLS_COLUMN,
            *ORIGIN_COLUMNS,
        ]
    )


def _iter_function_rows(
    corpus_text: CorpusText, *, tools_json: str, schema_by_tool: Mapping[str, Schema]
) -> Iterator[Mapping[str, Any]]:
    """Convert each call of a text to a row: the text before it becomes `query`, the call becomes `answers`.

    Args:
        corpus_text: The text and its calls.
        tools_json: All tools as JSON, which every row holds.
        schema_by_tool: The schemas of the arguments, by the tool's name in the text.
    """
    for call in corpus_text.calls:
        arguments = _parse_call_arguments(call, schema_by_tool)
        answer = {"name": _to_function_name(call.name), "arguments": arguments}
        yield {
            **build_shared_columns(corpus_text),
            "query": corpus_text.text_without_calls[: call.offset],
            "tools": tools_json,
            "answers": _to_json([answer]),
            "calls": [asdict(call)],  # of all calls of the text, only this one
        }


def _collect_schema_by_tool(lanes: Sequence[Lane]) -> dict[str, Schema]:
    """Return the schema of the arguments of each tool that has one, by the tool's name in texts."""
    tools_by_name = {lane.tool.name: lane.tool for lane in lanes}
    return collect_argument_schemas(tools_by_name)


def _to_json(value: object) -> str:
    """Write a value as JSON, without escapes for letters outside ASCII."""
    return json.dumps(value, ensure_ascii=False)


def _parse_call_arguments(call: ScoredCall, schema_by_tool: Mapping[str, Schema]) -> dict[str, Any]:
    """Return the named arguments of a call: {"city": "Rome"} for 'city="Rome"'.

    If its tool has no schema of arguments, the whole input is the only argument: {"input": "12 + 30"}.
    """
    if call.name not in schema_by_tool:
        return {"input": call.input}
    return parse_arguments(call.input, schema_by_tool[call.name])


def iter_conversation_messages(
    corpus_text: CorpusText, schema_by_tool: Mapping[str, Schema] = MappingProxyType({})
) -> Iterator[dict[str, Any]]:
    """Convert a text with calls to the messages of a conversation.

    The user's message holds the beginning of the text. The assistant continues it and makes the calls.

    Args:
        corpus_text: The text and its calls.
        schema_by_tool: The JSON schemas of the arguments, by the tool's name in the text.

    Example:
        "Ada had 12 apples and 30 pears, 42 in all." with a call before `42` becomes

            user: USER_INSTRUCTION and "Ada had 12 apples and 30 pears, "
            assistant: "", with the call Calculator(input="12 + 30")
            tool: "42"
            assistant: "42 in all."
    """
    text = corpus_text.text_without_calls
    position = _find_user_message_end(corpus_text)  # the character at which the next message begins
    yield {"role": "user", "content": USER_INSTRUCTION + text[:position]}

    call_count = 0
    for calls in _group_parallel_calls(corpus_text.calls):
        calls_offset = calls[0].offset  # the same for all calls of a group
        tool_calls = _build_tool_calls(calls, schema_by_tool, first_call_index=call_count)

        before_calls = text[position:calls_offset]
        yield {"role": "assistant", "content": before_calls, "tool_calls": tool_calls}
        yield from _iter_tool_messages(calls, tool_calls)

        position = calls_offset
        call_count += len(calls)

    yield {"role": "assistant", "content": text[position:]}


def _find_user_message_end(corpus_text: CorpusText) -> int:
    """Return the character of a text at which the user's message ends.

    This is the offset of the first call. In a text without calls, it is the last space in the first half.
    """
    if corpus_text.calls:
        return corpus_text.calls[0].offset
    return _find_middle_space(corpus_text.text_without_calls)


def _find_middle_space(text: str) -> int:
    """Return the index of the last space in the first half of a text, or 0 if there is none."""
    middle = len(text) // 2
    space = text.rfind(" ", 0, middle)  # -1 if there is none
    return max(space, 0)


def _iter_tool_messages(
    calls: Sequence[ScoredCall], tool_calls: Sequence[Mapping[str, Any]]
) -> Iterator[dict[str, Any]]:
    """Build the tool messages with the results of calls.

    Args:
        calls: The calls with their results.
        tool_calls: The same calls in the form of the assistant's message.
    """
    for call, tool_call in zip(calls, tool_calls, strict=True):
        yield {
            "role": "tool",
            "tool_call_id": tool_call["id"],
            "name": tool_call["function"]["name"],
            "content": call.result,
        }


def _build_tool_calls(
    calls: Sequence[ScoredCall], schema_by_tool: Mapping[str, Schema], *, first_call_index: int
) -> list[dict[str, Any]]:
    """Build the list `tool_calls` of an assistant's message.

    Args:
        calls: The calls of the message.
        schema_by_tool: The schemas of the arguments, by the tool's name in the text.
        first_call_index: The index of the first of these calls in the conversation, from 0.
    """
    return [_build_tool_call(call, schema_by_tool, index) for index, call in enumerate(calls, first_call_index)]


def _build_tool_call(call: ScoredCall, schema_by_tool: Mapping[str, Schema], call_index: int) -> dict[str, Any]:
    """Build a call for an assistant's message: {"id": "call00000", "type": "function", "function": {...}}.

    Args:
        call: The call.
        schema_by_tool: The schemas of the arguments, by the tool's name in the text.
        call_index: The index of the call in the conversation, from 0.
    """
    arguments = _parse_call_arguments(call, schema_by_tool)
    function = {"name": _to_function_name(call.name), "arguments": arguments}
    call_id = f"call{call_index:05}"  # nine letters and digits, which chat templates such as Mistral's require
    return {"id": call_id, "type": "function", "function": function}


def _group_parallel_calls(calls: Sequence[ScoredCall]) -> list[list[ScoredCall]]:
    """Group the calls of a text into calls that may be made at once.

    The calls of a group are at the same place, and none uses the result of another.
    """
    groups: list[list[ScoredCall]] = []
    for call in calls:
        if groups and _can_join_group(call, groups[-1]):
            groups[-1].append(call)
        else:
            groups.append([call])
    return groups


def _can_join_group(call: ScoredCall, parallel_calls: Sequence[ScoredCall]) -> bool:
    """Check whether a call may be made at once with the calls of a group.

    This is so if it has the same offset, and its input has no word of their results.
    """
    if parallel_calls[0].offset != call.offset:
        return False

    input_words = _split_into_words(call.input)
    for earlier_call in parallel_calls:
        result_words = _split_into_words(earlier_call.result)
        if result_words & input_words:
            return False
    return True


def _split_into_words(text: str) -> set[str]:
    """Return the words and numbers of a text, in lower case."""
    return set(re.findall(r"\w+", text.casefold()))


def _build_function_definition(lane: Lane) -> dict[str, Any]:
    """Describe a tool in the form of chat templates: {"type": "function", "function": {name, description, parameters}}.

    The parameters are the JSON schema of the tool's arguments. A tool without a schema has a single argument, `input`.
    """
    tool = lane.tool
    if tool.arguments_schema is None:
        parameters = {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]}
    else:
        parameters = dict(tool.arguments_schema)

    function = {"name": _to_function_name(tool.name), "description": tool.summary, "parameters": parameters}
    return {"type": "function", "function": function}


def _to_function_name(tool_name: str) -> str:
    """Replace characters of a tool's name that chat templates do not take: "web search" becomes "web_search".

    They take ASCII letters, digits, "_" and "-".
    """
    return re.sub(r"[^\w-]", "_", tool_name, flags=re.ASCII)
