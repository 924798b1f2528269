"""The forms of C* in which calls are structured: chat, functions."""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from toolformer_dag.exports.forms import CALLS, ORIGIN, CorpusText, Form, ScoredCall, column, own
from toolformer_dag.pipeline.plan import Lane
from toolformer_dag.texts.arguments import Schema, read_arguments
from toolformer_dag.tools.tool import schemas_of

if TYPE_CHECKING:
    from toolformer_dag.model.encoding import Encoding

TEXT = pa.string()
INPUT = pa.struct({"input": pa.struct({"type": TEXT})})
PARAMETERS = pa.struct({"type": TEXT, "properties": INPUT, "required": pa.list_(TEXT)})
TOOL = pa.struct({"type": TEXT, "function": pa.struct({"name": TEXT, "description": TEXT, "parameters": PARAMETERS})})


def _message(arguments: pa.DataType) -> pa.DataType:
    """The type of a message; plain, since `datasets` reads JSON as an extension type from 4.7 on alone."""
    called = pa.struct({"id": TEXT, "type": TEXT, "function": pa.struct({"name": TEXT, "arguments": arguments})})
    return pa.struct(
        {"role": TEXT, "content": TEXT, "tool_calls": pa.list_(called), "tool_call_id": TEXT, "name": TEXT}
    )


INSTRUCTION = "Continue the text. Call a tool where its result helps to write what comes next.\n\n"


def chat_form(lanes: Sequence[Lane], encoding: "Encoding") -> Form:
    """Return each text as a conversation with structured calls: `messages` and `tools`, as chat templates take them.

    A web text has no user, so the user's message is made up: an instruction and the text before the first call. Delta
    was measured on the text with inline calls and says nothing of this form. `encoding` counts tokens of messages and
    tools written as JSON, in place of a chat template.

    Arguments are objects; where a tool has named ones, whose types a column cannot hold, they and `tools` are JSON
    text, as in OpenAI's protocol.
    """
    tools = [_function(lane) for lane in lanes]
    schemas = _schemas(lanes)

    def tokens(parts: Sequence[Mapping[str, Any]]) -> int:
        return sum(encoding.lengths([json.dumps(part, ensure_ascii=False) for part in parts]))

    before, listed = tokens(tools), _json(tools) if schemas else tools

    def rows(text: CorpusText) -> Iterator[Mapping[str, Any]]:
        messages = list(conversation(text, schemas))
        yield {"messages": _as_text(messages) if schemas else messages, "tools": listed, **own(text)}

    def length(row: Mapping[str, Any]) -> int:
        return before + tokens(row["messages"])

    message = _message(TEXT if schemas else pa.struct({"input": TEXT}))
    schema = pa.schema(
        [
            column("messages", pa.list_(message), "user, assistant with tool_calls, tool, ..., assistant"),
            column(
                "tools",
                TEXT if schemas else pa.list_(TOOL),
                "the tools in the form of a JSON schema",
            ),
            CALLS,
            *ORIGIN,
        ]
    )
    told = (
        "**Re-shaped: not filtered in this form.** The user's message is made up, and each inline call became a\n"
        "structured one with a `tool` message. `delta` was measured on the text with inline calls and says nothing\n"
        "about a conversation. The contents of the messages, without the instruction, are `plain`."
    )
    return Form("chat", schema, rows, told, {"tools": tools}, length=length)


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
    told = "A row per kept call: the text before it, the tools, and the call as JSON. Texts without calls have no row."
    return Form("functions", schema, rows, told, {"tools": tools})


def _schemas(lanes: Sequence[Lane]) -> dict[str, Schema]:
    return schemas_of({lane.tool.name: lane.tool for lane in lanes})


def _as_text(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Write the arguments of calls as JSON."""
    for asked in (asked["function"] for message in messages for asked in message.get("tool_calls", ())):
        asked["arguments"] = _json(asked["arguments"])
    return messages


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)


def _arguments(call: ScoredCall, schemas: Mapping[str, Schema]) -> dict[str, Any]:
    """Return the named arguments of a call, or its text as `input`."""
    return read_arguments(call.input, schemas[call.name]) if call.name in schemas else {"input": call.input}


def conversation(text: CorpusText, schemas: Mapping[str, Schema] = MappingProxyType({})) -> Iterator[dict[str, Any]]:
    """Yield the messages of a text; arguments are objects. A text without calls is parted at a space in its middle."""
    at = text.calls[0].offset if text.calls else max(text.plain.rfind(" ", 0, len(text.plain) // 2), 0)
    yield {"role": "user", "content": INSTRUCTION + text.plain[:at]}
    for number, call in enumerate(text.calls):
        function = {"name": _function_name(call.name), "arguments": _arguments(call, schemas)}
        asked = {"id": f"call_{number}", "type": "function", "function": function}
        yield {"role": "assistant", "content": text.plain[at : call.offset], "tool_calls": [asked]}
        yield {"role": "tool", "tool_call_id": asked["id"], "name": function["name"], "content": call.result}
        at = call.offset
    yield {"role": "assistant", "content": text.plain[at:]}


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
