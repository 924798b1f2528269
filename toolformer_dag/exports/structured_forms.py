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
from toolformer_dag.exports.export_forms import CALLS, ORIGIN, ExportForm, column, shared_columns
from toolformer_dag.method.corpus_texts import CorpusText, ScoredCall
from toolformer_dag.texts.arguments import Schema, parse_arguments
from toolformer_dag.tools.tool import collect_schemas

if TYPE_CHECKING:
    from toolformer_dag.model.encoding import Encoding

TEXT = pa.string()
"""The type of columns with JSON as text."""
OBJECTS = pa.json_()
"""`datasets` reads it as objects from 4.7 on: in structs each field that others have would be None, not absent."""
ABOUT_CHAT = (
    "**Re-shaped: not filtered in this form.** The user's message is made up, and each inline call became a\n"
    "structured one with a `tool` message. `delta` was measured on the text with inline calls and says nothing\n"
    "about a conversation. The contents of the messages, without the instruction, are `plain`."
)
"""What the card says of the form `chat`."""
INSTRUCTION = "Continue the text. Call a tool where its result helps to write what comes next.\n\n"
"""What the user says before the text, in the form `chat`."""


def chat_form(lanes: Sequence[Lane], encoding: "Encoding") -> ExportForm:
    """Define the export form of conversations with structured calls.

    Its columns `messages` and `tools` are what chat templates expect. The user's message is made up.

    Args:
        lanes: The tools with their settings.
        encoding: Counts the tokens of the messages and tools, written as JSON.
    """
    conversations = _ChatRows(lanes, encoding)
    schema = pa.schema(
        [  # both are JSON: templates look for keys that are absent, and arguments have any type
            column("messages", OBJECTS, "user, assistant with tool_calls, tool, ..., assistant"),
            column("tools", OBJECTS, "the tools in the form of a JSON schema"),
            CALLS,
            *ORIGIN,
        ]
    )

    return ExportForm(
        name="chat",
        schema=schema,
        rows=conversations.rows,
        card=ABOUT_CHAT,
        settings={"tools": conversations.tools},
        length=conversations.length,
    )


class _ChatRows:
    """Makes a conversation of each text, all with the same `tools`, and counts its tokens."""

    def __init__(self, lanes: Sequence[Lane], encoding: "Encoding") -> None:
        self.tools = [_build_function(lane) for lane in lanes]
        self._encoding = encoding
        self._schemas = _schemas(lanes)
        self._tools_json = _to_json(self.tools)
        self._tools_tokens = self._count_tokens(self.tools)

    def rows(self, text: CorpusText) -> Iterator[Mapping[str, Any]]:
        """Yield the conversation of a text."""
        messages = list(conversation(text, self._schemas))
        yield {"messages": _to_json(messages), "tools": self._tools_json, **shared_columns(text)}

    def length(self, row: Mapping[str, Any]) -> int:
        """Return the tokens of a row's messages and tools."""
        return self._tools_tokens + self._count_tokens(json.loads(row["messages"]))

    def _count_tokens(self, parts: Sequence[Mapping[str, Any]]) -> int:
        """Return the tokens of messages or tools, each written as JSON."""
        return sum(self._encoding.lengths([_to_json(part) for part in parts]))


def functions_form(lanes: Sequence[Lane]) -> ExportForm:
    """Define the export form of public function-calling data sets, with a row per kept call.

    A row holds a query, the tools and the answers as JSON. The query is the text before the call, so it is
    not a question.
    """
    tools = [_build_function(lane)["function"] for lane in lanes]  # each {name, description, parameters}

    about = "A row per kept call: the text before it, the tools, and the call as JSON. Texts without calls have no row."

    return ExportForm(
        name="functions",
        schema=_build_functions_schema(),
        rows=partial(_iter_function_rows, tools_json=_to_json(tools), schemas=_schemas(lanes)),
        card=about,
        settings={"tools": tools},
    )


def _build_functions_schema() -> pa.Schema:
    """Return the columns of a data set with a row per kept call, as public function-calling sets have them.

    CALLS adds the call with its losses, ORIGIN the document that it is from.
    """
    return pa.schema(
        [
            column("query", TEXT, "the text before the call"),
            column("tools", TEXT, "JSON: name, description and parameters of every tool"),
            column("answers", TEXT, "JSON: a list with the kept call, its name and arguments"),
            CALLS,
            *ORIGIN,
        ]
    )


def _iter_function_rows(
    text: CorpusText, *, tools_json: str, schemas: Mapping[str, Schema]
) -> Iterator[Mapping[str, Any]]:
    """Convert each call of a text to a row: the text before it becomes `query`, the call becomes `answers`.

    Args:
        tools_json: All tools as JSON.
        schemas: The schemas of the arguments, by the tool's name in the text.
    """
    for call in text.calls:
        answer = {"name": _to_function_name(call.name), "arguments": _parse_call_arguments(call, schemas)}
        yield {
            **shared_columns(text),
            "query": text.plain[: call.offset],
            "tools": tools_json,
            "answers": _to_json([answer]),
            "calls": [asdict(call)],  # of all calls of the text, only this one
        }


def _schemas(lanes: Sequence[Lane]) -> dict[str, Schema]:
    """Return the tool's name in the text -> the schema of its arguments, for tools that have one."""
    return collect_schemas({lane.tool.name: lane.tool for lane in lanes})


def _to_json(value: object) -> str:
    """Return a value as JSON that keeps letters of all scripts as they are."""
    return json.dumps(value, ensure_ascii=False)


def _parse_call_arguments(call: ScoredCall, schemas: Mapping[str, Schema]) -> dict[str, Any]:
    """Return the named arguments of a call or, for a tool without a schema, its text as `input`."""
    if call.name not in schemas:
        return {"input": call.input}
    return parse_arguments(call.input, schemas[call.name])


def conversation(text: CorpusText, schemas: Mapping[str, Schema] = MappingProxyType({})) -> Iterator[dict[str, Any]]:
    """Convert a text with calls to the messages of a conversation.

    The user's message holds the beginning of the text. The assistant continues it and makes the calls.

    Args:
        schemas: The JSON schemas of the arguments, by the tool's name in the text.

    Example:
        "Ada had 12 apples and 30 pears, 42 in all." with a call before `42` becomes

            user: INSTRUCTION and "Ada had 12 apples and 30 pears, "
            assistant: "", with the call Calculator(input="12 + 30")
            tool: "42"
            assistant: "42 in all."
    """
    position = _find_end_of_question(text)
    yield {"role": "user", "content": INSTRUCTION + text.plain[:position]}

    call_count = 0
    for calls in _group_parallel_calls(text.calls):
        calls_offset = calls[0].offset  # the same for all calls of a group
        tool_calls = _build_calls_of_message(calls, schemas, first_number=call_count)

        before_calls = text.plain[position:calls_offset]
        yield {"role": "assistant", "content": before_calls, "tool_calls": tool_calls}
        yield from _iter_tool_messages(calls, tool_calls)

        position = calls_offset
        call_count += len(calls)

    yield {"role": "assistant", "content": text.plain[position:]}


def _find_end_of_question(text: CorpusText) -> int:
    """Return the character at which the user's message ends: at the first call, else at a space in the middle."""
    return text.calls[0].offset if text.calls else _find_middle_space(text.plain)


def _find_middle_space(text: str) -> int:
    """Return the index of the last space in the first half of a text; 0 without one."""
    return max(text.rfind(" ", 0, len(text) // 2), 0)


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


def _build_calls_of_message(
    calls: Sequence[ScoredCall], schemas: Mapping[str, Schema], *, first_number: int
) -> list[dict[str, Any]]:
    """Return the calls of an assistant's message. first_number: of the first one in the conversation, from 0."""
    return [_build_tool_call(call, schemas, number) for number, call in enumerate(calls, first_number)]


def _build_tool_call(call: ScoredCall, schemas: Mapping[str, Schema], number: int) -> dict[str, Any]:
    """Return a call for the assistant's message. number: of the call in the conversation, from 0.

    Its id has nine letters and digits, which templates like Mistral's demand.
    """
    function = {"name": _to_function_name(call.name), "arguments": _parse_call_arguments(call, schemas)}
    return {"id": f"call{number:05}", "type": "function", "function": function}


def _group_parallel_calls(calls: Sequence[ScoredCall]) -> list[list[ScoredCall]]:
    """Group the calls of a text into calls that may be made at once.

    The calls of a group are at the same place, and none uses the result of another.
    """
    groups: list[list[ScoredCall]] = []
    for call in calls:
        if groups and _can_join(call, groups[-1]):
            groups[-1].append(call)
        else:
            groups.append([call])
    return groups


def _can_join(call: ScoredCall, group: Sequence[ScoredCall]) -> bool:
    """Return whether a call has the offset of a group, and no word of the group's results in its input."""
    if group[0].offset != call.offset:
        return False
    input_words = _split_into_words(call.input)
    return not any(_split_into_words(earlier.result) & input_words for earlier in group)


def _split_into_words(text: str) -> set[str]:
    """Return the words of a text without their case."""
    return set(re.findall(r"\w+", text.casefold()))


def _build_function(lane: Lane) -> dict[str, Any]:
    """Describe a tool in the form of chat templates: {"type": "function", "function": {name, description, parameters}}.

    The parameters are the JSON schema of the tool's arguments. A tool without a schema has a single argument, `input`.
    """
    only_input = {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]}

    function = {
        "name": _to_function_name(lane.tool.name),
        "description": lane.tool.about,
        "parameters": only_input if lane.tool.schema is None else dict(lane.tool.schema),
    }
    return {"type": "function", "function": function}


def _to_function_name(name: str) -> str:
    """Return a tool's name as chat templates and servers take it: letters, digits, `_` and `-`."""
    return re.sub(r"[^\w-]", "_", name, flags=re.ASCII)
