"""The forms of C* in which calls are structured: chat, functions."""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from toolformer_dag.computing.plan import Lane
from toolformer_dag.exports.forms import CALLS, ORIGIN, Form, column, own
from toolformer_dag.pipeline.corpus_texts import CorpusText, ScoredCall
from toolformer_dag.texts.arguments import Schema, read_arguments
from toolformer_dag.tools.tool import schemas_of

if TYPE_CHECKING:
    from toolformer_dag.model.encoding import Encoding

TEXT = pa.string()
OBJECTS = pa.json_()
"""`datasets` reads it as objects from 4.7 on: in structs each field that others have would be None, not absent."""
INSTRUCTION = "Continue the text. Call a tool where its result helps to write what comes next.\n\n"


def chat_form(lanes: Sequence[Lane], encoding: "Encoding") -> Form:
    """Return each text as a conversation with structured calls: `messages` and `tools`, as chat templates take them.

    A web text has no user, so the user's message is made up: an instruction and the text before the first call. Delta
    was measured on the text with inline calls and says nothing of this form. `encoding` counts tokens of messages and
    tools written as JSON, in place of a chat template.

    Both columns are JSON: templates look for keys that are absent, and arguments have any type.
    """
    tools = [_function(lane) for lane in lanes]
    schemas, listed = _schemas(lanes), _json(tools)

    def tokens(parts: Sequence[Mapping[str, Any]]) -> int:
        return sum(encoding.lengths(list(map(_json, parts))))

    before = tokens(tools)

    def rows(text: CorpusText) -> Iterator[Mapping[str, Any]]:
        yield {"messages": _json(list(conversation(text, schemas))), "tools": listed, **own(text)}

    def length(row: Mapping[str, Any]) -> int:
        return before + tokens(json.loads(row["messages"]))

    schema = pa.schema(
        [
            column("messages", OBJECTS, "user, assistant with tool_calls, tool, ..., assistant"),
            column("tools", OBJECTS, "the tools in the form of a JSON schema"),
            CALLS,
            *ORIGIN,
        ]
    )
    about = (
        "**Re-shaped: not filtered in this form.** The user's message is made up, and each inline call became a\n"
        "structured one with a `tool` message. `delta` was measured on the text with inline calls and says nothing\n"
        "about a conversation. The contents of the messages, without the instruction, are `plain`."
    )
    return Form("chat", schema, rows, about, {"tools": tools}, length=length)


def functions_form(lanes: Sequence[Lane]) -> Form:
    """Return a row per kept call in the form of public function-calling sets: query, tools, answers, as JSON text.

    The query is the text before the call, so it is a context and no question.
    """
    schemas = _schemas(lanes)
    tools = [_function(lane)["function"] for lane in lanes]

    def rows(text: CorpusText) -> Iterator[Mapping[str, Any]]:
        for call in text.calls:
            answer = {"name": _function_name(call.name), "arguments": _arguments(call, schemas)}
            query = text.plain[: call.offset]
            yield {
                "query": query,
                "tools": _json(tools),
                "answers": _json([answer]),
                **own(text),
                "calls": [asdict(call)],
            }

    schema = pa.schema(
        [
            column("query", TEXT, "the text before the call"),
            column("tools", TEXT, "JSON: name, description and parameters of every tool"),
            column("answers", TEXT, "JSON: a list with the kept call, its name and arguments"),
            CALLS,
            *ORIGIN,
        ]
    )
    about = "A row per kept call: the text before it, the tools, and the call as JSON. Texts without calls have no row."
    return Form("functions", schema, rows, about, {"tools": tools})


def _schemas(lanes: Sequence[Lane]) -> dict[str, Schema]:
    return schemas_of({lane.tool.name: lane.tool for lane in lanes})


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)


def _arguments(call: ScoredCall, schemas: Mapping[str, Schema]) -> dict[str, Any]:
    """Return the named arguments of a call, or its text as `input`."""
    return read_arguments(call.input, schemas[call.name]) if call.name in schemas else {"input": call.input}


def conversation(text: CorpusText, schemas: Mapping[str, Schema] = MappingProxyType({})) -> Iterator[dict[str, Any]]:
    """Yield the messages of a text; arguments are objects. A text without calls is parted at a space in its middle.

    Calls of one place stand in one message, in parallel, where no word of a result is in the input of a later one.
    """
    at = text.calls[0].offset if text.calls else max(text.plain.rfind(" ", 0, len(text.plain) // 2), 0)
    yield {"role": "user", "content": INSTRUCTION + text.plain[:at]}
    number = 0
    for calls in _together(text.calls):
        asked = [_asked(call, schemas, each) for each, call in enumerate(calls, number)]
        yield {"role": "assistant", "content": text.plain[at : calls[0].offset], "tool_calls": asked}
        for call, one in zip(calls, asked, strict=True):
            name = one["function"]["name"]
            yield {"role": "tool", "tool_call_id": one["id"], "name": name, "content": call.result}
        at, number = calls[0].offset, number + len(calls)
    yield {"role": "assistant", "content": text.plain[at:]}


def _asked(call: ScoredCall, schemas: Mapping[str, Schema], number: int) -> dict[str, Any]:
    """Return a call of a message; templates in the manner of Mistral's take ids of nine letters and digits."""
    function = {"name": _function_name(call.name), "arguments": _arguments(call, schemas)}
    return {"id": f"call{number:05}", "type": "function", "function": function}


def _together(calls: Sequence[ScoredCall]) -> list[list[ScoredCall]]:
    """Part calls into those that may be asked at once."""
    parts: list[list[ScoredCall]] = []
    for call in calls:
        here = parts[-1] if parts and parts[-1][0].offset == call.offset else []
        if here and not any(_words(one.result) & _words(call.input) for one in here):
            here.append(call)
        else:
            parts.append([call])
    return parts


def _words(text: str) -> set[str]:
    return set(re.findall(r"\w+", text.casefold()))


def _function(lane: Lane) -> dict[str, Any]:
    """A tool as JSON schema: the model reads all of them before each text, so nothing stands there twice."""
    text = {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]}
    function = {
        "name": _function_name(lane.tool.name),
        "description": lane.tool.about,
        "parameters": text if lane.tool.schema is None else dict(lane.tool.schema),
    }
    return {"type": "function", "function": function}


def _function_name(name: str) -> str:
    """Chat templates and servers take letters, digits, `_` and `-`."""
    return re.sub(r"[^\w-]", "_", name, flags=re.ASCII)
