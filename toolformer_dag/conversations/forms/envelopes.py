"""What tracing puts around the messages of a request: spans, runs, observations; and a request beside its response."""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from toolformer_dag.conversations.forms.form import Form, messages_in, paths_matching, system_prompt
from toolformer_dag.conversations.forms.payloads import ANSWER, QUESTION
from toolformer_dag.conversations.plain_values import first_of, parsed
from toolformer_dag.conversations.raw_messages import StoredMessage
from toolformer_dag.conversations.record_paths import Path, value_at
from toolformer_dag.conversations.shapes import FoundCall, FoundResult

SEMCONV = "1.37"
"""The version of OpenTelemetry's conventions for generative AI that is read; all of it is still in development."""
INPUTS = (
    "gen_ai.input.messages",
    "gen_ai.prompt",
    "input.value",
    "mlflow.spanInputs",
    "traceloop.entity.input",
)
OUTPUTS = (
    "gen_ai.output.messages",
    "gen_ai.completion",
    "output.value",
    "mlflow.spanOutputs",
    "traceloop.entity.output",
)
"""Attributes of a span that hold the messages which a model was given, and those that it wrote, in JSON."""
SYSTEM_PROMPT = "gen_ai.system_instructions"
FLAT_PREFIXES = ("llm.input_messages", "llm.output_messages", "gen_ai.prompt", "gen_ai.completion")
"""How attributes begin that hold a field of a message each: OpenInference's `llm.input_messages.0.message.role`, and
OpenLLMetry's `gen_ai.prompt.0.role`."""
LISTS_INSIDE = ("", "messages", "input", "choices.*.message", "generations.*.*.message", "output")
"""Where in an input or an output the messages stand."""
REQUESTS = (
    "messages",
    "kwargs.messages",
    "request.messages",
    "request.body.messages",
    "request_body.messages",
    "body.messages",
    "params.messages",
    "request.input",
    "request.contents",
)
"""Where the messages of a request stand, also in the lines of a batch and in the rows of a proxy."""
RESPONSES = (
    "response.choices.0.message",
    "response.body.choices.0.message",
    "response_body.choices.0.message",
    "result.message",
)
"""Where the message of a response stands; of several choices the first."""
TRACE_IDS = ("traceId", "trace_id", "context.trace_id", "traceid")
STARTS = ("startTimeUnixNano", "start_time", "startTime", "start_time_unix_nano", "start_time_ns")


def attributes_of(span: Mapping[str, Any]) -> dict[str, tuple[Path, Any]]:
    """Return the attributes of a span by name, each with the way to its value.

    They are an object, or OTLP's list of `{"key": ..., "value": {"stringValue": ...}}`.
    """
    attributes = span.get("attributes")
    if isinstance(attributes, Mapping):
        return {str(name): (("attributes", name), value) for name, value in attributes.items()}
    found = dict[str, tuple[Path, Any]]()
    for index, item in enumerate(attributes if isinstance(attributes, list) else ()):
        value = item.get("value") if isinstance(item, Mapping) else None
        if isinstance(value, Mapping) and len(value) == 1:
            [kind] = value
            found[str(item.get("key"))] = (("attributes", index, "value", kind), plain_value(value))
    return found


def plain_value(value: Any) -> Any:
    """Return a value of OTLP as JSON has it: `{"arrayValue": {"values": [{"intValue": "4"}]}}` is [4]."""
    if not isinstance(value, Mapping) or len(value) != 1:
        return value
    [(kind, content)] = value.items()
    if kind == "arrayValue":
        items = content.get("values") if isinstance(content, Mapping) else None
        return [plain_value(item) for item in (items if isinstance(items, list) else ())]
    if kind == "kvlistValue":
        pairs = content.get("values") if isinstance(content, Mapping) else None
        return {
            str(first_of(pair, ("key",))): plain_value(first_of(pair, ("value",)))
            for pair in (pairs if isinstance(pairs, list) else ())
        }
    if kind == "intValue":
        return int(content) if str(content).lstrip("-").isdecimal() else content
    return content


def span_messages(span: Mapping[str, Any]) -> list[StoredMessage]:
    """Return the messages that a model was given and wrote in a span, with the ways to them; none in other spans."""
    attributes = attributes_of(span)
    said = list[StoredMessage]()
    if SYSTEM_PROMPT in attributes:
        said += system_prompt(*attributes[SYSTEM_PROMPT])
    prompts = len(said)
    for prefix in FLAT_PREFIXES:  # Phoenix opens them into objects
        nested = first_of(span.get("attributes"), (prefix,))
        for index, message in enumerate(nested if isinstance(nested, list) else ()):
            said.append(StoredMessage(("attributes", *prefix.split("."), index), message))
    if len(said) > prompts:
        return said
    for names in (INPUTS, OUTPUTS):
        for name in names:
            if name in attributes:
                path, value = attributes[name]
                said += [message._replace(path=(*path, *message.path)) for message in listed_messages(value)]
                break
    if len(said) > prompts:
        return said
    for prefix in FLAT_PREFIXES:
        said += flat_messages({name: value for name, (_, value) in attributes.items()}, prefix)
    if len(said) > prompts:
        return said
    return event_messages(span) or _given_and_written(span, "input", "output")


def listed_messages(value: Any) -> list[StoredMessage]:
    """Return the messages of an input or an output: a list, or an object that holds one, each of them maybe as JSON."""
    opened = parsed(value) if isinstance(value, str) else value
    inside: Path = (None,) if isinstance(value, str) and opened is not None else ()
    for way in LISTS_INSIDE:
        said = list[StoredMessage]()
        for path in paths_matching(opened, way):
            found = value_at(opened, path)
            if isinstance(found, list) and found and isinstance(found[0], list):  # LangSmith: a list per prompt
                said += [StoredMessage((*inside, *path, 0, index), message) for index, message in enumerate(found[0])]
            elif isinstance(found, list):
                said += [StoredMessage((*inside, *path, index), message) for index, message in enumerate(found)]
            elif isinstance(found, Mapping) and way.endswith("message"):
                said.append(StoredMessage((*inside, *path), found))
        if said and all(isinstance(message.value, Mapping) for message in said):
            return said
    if isinstance(opened, Mapping) and ("role" in opened or "tool_calls" in opened or "lc" in opened):
        return [StoredMessage(inside, opened if "role" in opened else {"role": "assistant", **opened})]
    return []


def flat_messages(attributes: Mapping[str, Any], prefix: str) -> list[StoredMessage]:
    """Return messages whose every field is an attribute of its own, as OpenInference writes them.

    They have no place in the record from which a call could be taken out.
    """
    tree: dict[str, Any] = {}
    for name, value in attributes.items():
        if not name.startswith(f"{prefix}."):
            continue
        node = tree
        *keys, last = name.removeprefix(f"{prefix}.").split(".")
        for key in keys:
            inner = node.setdefault(key, {})
            if not isinstance(inner, dict):
                break
            node = inner
        else:
            node[last] = value
    said = []
    for number in sorted((key for key in tree if key.isdecimal()), key=int):
        fields = tree[number].get("message", tree[number])
        calls = fields.get("tool_calls", {})
        message = {
            "role": fields.get("role"),
            "content": fields.get("content") or _flat_contents(fields.get("contents", {})),
            "tool_call_id": fields.get("tool_call_id"),
            "name": fields.get("name"),
            "tool_calls": [calls[key].get("tool_call", calls[key]) for key in sorted(calls, key=int)],
        }
        said.append(StoredMessage(("attributes", f"{prefix}.{number}"), message))
    return said


def _flat_contents(contents: Mapping[str, Any]) -> str:
    texts = [first_of(contents[key], ("message_content.text", "text")) for key in sorted(contents)]
    return "".join(text for text in texts if isinstance(text, str))


def event_messages(span: Mapping[str, Any]) -> list[StoredMessage]:
    """Return the messages that stand in the events of a span, as the conventions had it before version 1.37."""
    said = []
    events = span.get("events")
    for index, event in enumerate(events if isinstance(events, list) else ()):
        name = str(event.get("name")) if isinstance(event, Mapping) else ""
        if not name.startswith("gen_ai."):
            continue
        attributes = {key: value for key, (_, value) in attributes_of(event).items()}
        body = first_of(event, ("body",)) or attributes
        role = name.split(".")[1]
        message = body.get("message") if isinstance(body, Mapping) and role == "choice" else body
        message = parsed(message) if isinstance(message, str) else message
        if isinstance(message, Mapping):
            role = "assistant" if role == "choice" else role
            said.append(StoredMessage(("events", index), {"role": role, **message, "tool_call_id": message.get("id")}))
    return said


def tool_span(span: Mapping[str, Any], path: Path) -> list[StoredMessage]:
    """Return the call and the result of a span that runs a tool; none of another one."""
    values = {name: value for name, (_, value) in attributes_of(span).items()}
    tool = values.get("gen_ai.tool.name") or values.get("tool.name")
    if not isinstance(tool, str):
        return []
    arguments = values.get("gen_ai.tool.call.arguments", values.get("input.value"))
    result = values.get("gen_ai.tool.call.result", values.get("output.value"))
    call_id = str(values.get("gen_ai.tool.call.id", first_of(span, ("spanId", "span_id"))))
    said = [StoredMessage(path, span, call=FoundCall(tool, arguments, call_id))]
    if result is not None:
        said.append(StoredMessage(path, span, result=FoundResult(result, id=call_id, tool=tool)))
    return said


def conversation_of(spans: Sequence[tuple[Path, Mapping[str, Any]]]) -> list[StoredMessage]:
    """Return the conversation of the spans of a trace: that of the model's span with most messages.

    Each request of an agent repeats what was said before it, so the last one holds all. Where no span has messages, the
    spans that run tools are the calls.
    """
    longest = list[StoredMessage]()
    for path, span in spans:
        said = [message._replace(path=(*path, *message.path)) for message in span_messages(span)]
        if len(said) >= len(longest):
            longest = said
    if longest:
        return longest
    return [said for path, span in spans for said in tool_span(span, path)]


def by_trace(spans: Sequence[tuple[Path, Mapping[str, Any]]]) -> Iterator[list[StoredMessage]]:
    """Yield the conversation of each trace, its spans in the order in which they began."""
    traces = defaultdict[str, list[tuple[Path, Mapping[str, Any]]]](list)
    for path, span in spans:
        traces[str(first_of(span, TRACE_IDS))].append((path, span))
    for trace in traces.values():
        yield conversation_of(sorted(trace, key=lambda item: str(first_of(item[1], STARTS)).zfill(25)))


def otlp_spans(record: Any) -> Iterator[list[StoredMessage]]:
    """Yield the conversations of an export of OTLP in JSON."""
    found = list[tuple[Path, Mapping[str, Any]]]()
    for resources, scopes in (("resourceSpans", "scopeSpans"), ("resource_spans", "scope_spans")):
        for path in paths_matching(record, f"{resources}.*.{scopes}.*.spans.*"):
            found.append((path, value_at(record, path)))
    yield from by_trace(found)


def span_lines(records: Sequence[Any]) -> Iterator[list[StoredMessage]]:
    """Yield the conversations of spans that stand in a file one by one."""
    yield from by_trace([((number,), record) for number, record in enumerate(records) if isinstance(record, Mapping)])


def spans_in(record: Any) -> Iterator[list[StoredMessage]]:
    """Yield the conversations of a trace that holds its spans as a list."""
    found = [
        (path, value_at(record, path)) for way in ("spans.*", "data.spans.*") for path in paths_matching(record, way)
    ]
    yield conversation_of([(path, span) for path, span in found if isinstance(span, Mapping)])


def langfuse_trace(record: Any) -> Iterator[StoredMessage]:
    """Yield the messages of a trace of Langfuse: of the generation with most of them, else of the trace itself."""
    longest = list[StoredMessage]()
    for path in paths_matching(record, "observations.*"):
        observation = value_at(record, path)
        if isinstance(observation, Mapping) and str(observation.get("type")).upper() in ("GENERATION", "AGENT"):
            said = _given_and_written(observation, "input", "output")
            if len(said) >= len(longest):
                longest = [message._replace(path=(*path, *message.path)) for message in said]
    yield from longest or _given_and_written(record, "input", "output")


def langsmith_run(record: Any) -> Iterator[StoredMessage]:
    """Yield the messages of a run of LangSmith: what went in, then what came out; the latter alone if it holds both."""
    given = listed_messages(record.get("inputs"))
    written = listed_messages(record.get("outputs"))
    beginning = [message.value for message in written[: len(given)]]
    repeats = bool(given) and beginning == [message.value for message in given]
    said = [("outputs", message) for message in written]
    if not repeats:
        said = [("inputs", message) for message in given] + said
    for key, message in said:
        yield message._replace(path=(key, *message.path))


def _given_and_written(record: Mapping[str, Any], given: str, written: str) -> list[StoredMessage]:
    """Return the messages of two fields, one after the other, with the ways to them."""
    said = []
    for key in (given, written):
        said += [message._replace(path=(key, *message.path)) for message in listed_messages(record.get(key))]
    return said


def request_and_response(record: Any) -> Iterator[StoredMessage]:
    """Yield the messages of a request and of its response, which stand beside each other."""
    yield from messages_in(record, ("system", "request.system", "request.body.system"))
    yield from messages_in(record, REQUESTS)
    yield from messages_in(record, RESPONSES)
    response = first_of(record, ("response.body", "response"))
    path: Path = ("response", "body") if first_of(record, ("response.body",)) is not None else ("response",)
    if isinstance(response, Mapping) and response.get("role") is not None:
        yield StoredMessage(path, response)
    yield from (
        said._replace(path=(*path, *said.path)) for said in messages_in(response, ("output", "candidates.*.content"))
    )


def _span(name: str, messages: Sequence[Any], written: Sequence[Any]) -> dict[str, Any]:
    """Return a span for examples."""
    import json

    return {
        "traceId": "t1",
        "spanId": "1",
        "name": name,
        "startTimeUnixNano": "1",
        "attributes": [
            {"key": "gen_ai.input.messages", "value": {"stringValue": json.dumps(messages)}},
            {"key": "gen_ai.output.messages", "value": {"stringValue": json.dumps(written)}},
        ],
    }


OTEL_INPUT = [
    {"role": "user", "parts": [{"type": "text", "content": "How warm is it in Oslo?"}]},
    {
        "role": "assistant",
        "parts": [{"type": "tool_call", "id": "c1", "name": "weather", "arguments": {"city": "Oslo"}}],
    },
    {"role": "tool", "parts": [{"type": "tool_call_response", "id": "c1", "response": "7 degrees"}]},
]
OTEL_OUTPUT = [{"role": "assistant", "parts": [{"type": "text", "content": "It is 7 degrees in Oslo."}]}]
CALLED = {
    "role": "assistant",
    "content": "",
    "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Oslo"}'}}],
}
ANSWERED = {"role": "tool", "tool_call_id": "c1", "content": "7 degrees"}
FORMS = (
    Form(
        name="OpenTelemetry, OTLP in JSON",
        source=f"https://opentelemetry.io/docs/specs/semconv/gen-ai/ (version {SEMCONV})",
        signs=("resourceSpans.*.scopeSpans.*.spans", "resource_spans.*.scope_spans.*.spans"),
        split=otlp_spans,
        can_drop=False,
        example={"resourceSpans": [{"scopeSpans": [{"spans": [_span("chat", OTEL_INPUT, OTEL_OUTPUT)]}]}]},
    ),
    Form(
        name="OpenTelemetry, a span per line",
        source=f"https://opentelemetry.io/docs/specs/semconv/gen-ai/ (version {SEMCONV})",
        signs=("traceId", "context.trace_id", "span_id", "spanId"),
        split=span_lines,
        is_file=True,
        can_drop=False,
        example=[
            {
                "trace_id": "t1",
                "span_id": "1",
                "start_time": "1",
                "attributes": {"gen_ai.input.messages": OTEL_INPUT, "gen_ai.output.messages": OTEL_OUTPUT},
            }
        ],
    ),
    Form(
        name="OpenInference",
        source="https://github.com/Arize-ai/openinference/blob/main/spec/semantic_conventions.md",
        signs=("spans.*.attributes",),
        split=spans_in,
        can_drop=False,
        example={
            "spans": [
                {
                    "context": {"trace_id": "t1"},
                    "attributes": {
                        "llm.input_messages.0.message.role": "user",
                        "llm.input_messages.0.message.content": "How warm is it in Oslo?",
                        "llm.input_messages.1.message.role": "assistant",
                        "llm.input_messages.1.message.tool_calls.0.tool_call.id": "c1",
                        "llm.input_messages.1.message.tool_calls.0.tool_call.function.name": "weather",
                        "llm.input_messages.1.message.tool_calls.0.tool_call.function.arguments": '{"city": "Oslo"}',
                        "llm.input_messages.2.message.role": "tool",
                        "llm.input_messages.2.message.tool_call_id": "c1",
                        "llm.input_messages.2.message.content": "7 degrees",
                        "llm.output_messages.0.message.role": "assistant",
                        "llm.output_messages.0.message.content": "It is 7 degrees in Oslo.",
                    },
                }
            ]
        },
    ),
    Form(
        name="MLflow trace",
        source="https://mlflow.org/docs/latest/genai/tracing/",
        signs=("data.spans.*.attributes",),
        split=spans_in,
        can_drop=False,
        example={
            "info": {"trace_id": "t1"},
            "data": {
                "spans": [
                    {
                        "name": "chat",
                        "attributes": {
                            "mlflow.spanInputs": {"messages": [QUESTION, CALLED, ANSWERED]},
                            "mlflow.spanOutputs": {"choices": [{"message": ANSWER}]},
                        },
                    }
                ]
            },
        },
    ),
    Form(
        name="Langfuse trace",
        source="https://langfuse.com/docs/api-and-data-platform/features/export-to-blob-storage",
        signs=("observations.*.type",),
        read=langfuse_trace,
        can_drop=False,
        example={
            "id": "t1",
            "observations": [
                {"type": "GENERATION", "input": [QUESTION, CALLED, ANSWERED], "output": ANSWER},
            ],
        },
    ),
    Form(
        name="LangSmith run",
        source="https://docs.langchain.com/langsmith/run-data-format",
        signs=("inputs.messages", "outputs.messages", "outputs.generations", "outputs.choices"),
        read=langsmith_run,
        example={
            "id": "r1",
            "run_type": "llm",
            "inputs": {"messages": [QUESTION, CALLED, ANSWERED]},
            "outputs": {"choices": [{"message": ANSWER}]},
        },
    ),
    Form(
        name="Request and response",
        source="https://platform.openai.com/docs/api-reference/chat/object",
        signs=(
            "request.messages",
            "request.body.messages",
            "request.input",
            "request_body.messages",
            "body.messages",
            "params.messages",
            "response.choices.*.message",
            "response.body.choices.*.message",
            "response_body.choices.*.message",
            "response.role",
        ),
        read=request_and_response,
        example={
            "request": {"model": "m", "messages": [QUESTION, CALLED, ANSWERED]},
            "response": {"choices": [{"message": ANSWER}]},
        },
    ),
)
