"""Forms of traces, which put spans, runs or observations around messages, and of requests with their responses."""

import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from toolformer_dag.conversations.forms.examples import ANSWER, OPENAI_CALL, OPENAI_RESULT, QUESTION
from toolformer_dag.conversations.forms.form import Form, iter_messages_at, iter_paths_matching, system_prompt
from toolformer_dag.conversations.plain_values import find_value, list_at, parse_json
from toolformer_dag.conversations.raw_messages import StoredMessage
from toolformer_dag.conversations.record_paths import Path, get_value_at
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
"""Attributes of a span with the messages of a request (INPUTS), and of the model's answer (OUTPUTS), in JSON."""
SYSTEM_PROMPT = "gen_ai.system_instructions"
FLAT_PREFIXES = ("llm.input_messages", "llm.output_messages", "gen_ai.prompt", "gen_ai.completion")
"""Prefixes of attributes that each hold a field of a message: OpenInference's `llm.input_messages.0.message.role`, and
OpenLLMetry's `gen_ai.prompt.0.role`."""
LISTS_INSIDE = ("", "messages", "input", "choices.*.message", "generations.*.*.message", "output")
"""Paths to the messages in an input or an output."""
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
"""Paths to the messages of a request, also in the lines of a batch and in the rows of a proxy."""
RESPONSES = (
    "response.choices.0.message",
    "response.body.choices.0.message",
    "response_body.choices.0.message",
    "result.message",
)
"""Paths to the message of a response; of several choices the first counts."""
TOOL_ARGUMENTS = ("gen_ai.tool.call.arguments", "input.value")
TOOL_RESULTS = ("gen_ai.tool.call.result", "output.value")
"""Attributes of a span that runs a tool, with the call's arguments and with its result."""
TRACE_IDS = ("traceId", "trace_id", "context.trace_id", "traceid")
STARTS = ("startTimeUnixNano", "start_time", "startTime", "start_time_unix_nano", "start_time_ns")


class Attribute(NamedTuple):
    """The value of an attribute of a span, with the path to it in the span."""

    path: Path
    value: Any


def parse_attributes(span: Mapping[str, Any]) -> dict[str, Attribute]:
    """Return the attributes of a span by name, from an object or from a list of OTLP."""
    attributes = span.get("attributes")
    if isinstance(attributes, Mapping):
        return {str(name): Attribute(("attributes", name), value) for name, value in attributes.items()}
    return _parse_otlp_attributes(span)


def _parse_otlp_attributes(span: Mapping[str, Any]) -> dict[str, Attribute]:
    """Return the attributes of a span by name, from the list of pairs that OTLP writes."""
    attributes_by_name = dict[str, Attribute]()
    for index, item in enumerate(list_at(span, "attributes")):
        attribute = _parse_otlp_attribute(item, ("attributes", index))
        if attribute is not None:
            attributes_by_name[str(item.get("key"))] = attribute
    return attributes_by_name


def _parse_otlp_attribute(item: Any, path: Path) -> Attribute | None:
    """Return the attribute of `{"key": "name", "value": {"stringValue": "chat"}}`; None for any other item."""
    value = item.get("value") if isinstance(item, Mapping) else None
    if not isinstance(value, Mapping) or len(value) != 1:
        return None
    [value_key] = value  # such as stringValue
    return Attribute((*path, "value", value_key), parse_otlp_value(value))


def parse_attribute_values(span: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of the attributes of a span by name."""
    return {name: attribute.value for name, attribute in parse_attributes(span).items()}


def parse_otlp_value(value: Any) -> Any:
    """Convert a value of OTLP (OpenTelemetry's protocol) to plain JSON.

    A value of OTLP is an object whose only key is its type. Any other value is returned unchanged.

    Example:
        parse_otlp_value({"arrayValue": {"values": [{"intValue": "4"}]}})  # [4]
    """
    if not isinstance(value, Mapping) or len(value) != 1:
        return value

    [(kind, content)] = value.items()
    if kind == "arrayValue":
        return [parse_otlp_value(item) for item in list_at(content, "values")]
    if kind == "kvlistValue":
        return dict(map(_parse_otlp_pair, list_at(content, "values")))
    return _parse_integer(content) if kind == "intValue" else content


def _parse_integer(content: Any) -> Any:
    """Return 4 for "4", since OTLP writes integers as text; any other value unchanged."""
    is_integer = str(content).lstrip("-").isdecimal()
    return int(content) if is_integer else content


def _parse_otlp_pair(pair: Any) -> tuple[str, Any]:
    """Return the key and the value of a pair of OTLP."""
    return str(find_value(pair, ("key",))), parse_otlp_value(find_value(pair, ("value",)))


def list_span_messages(span: Mapping[str, Any]) -> list[StoredMessage]:
    """List the messages of the request and of the answer in a span of a trace.

    Libraries write them in several layouts. These are tried in turn, until one gives messages:

    1. Phoenix: lists of messages under names such as `llm.input_messages`
    2. OpenTelemetry and others: an attribute with all messages in JSON, such as `gen_ai.input.messages`
    3. OpenInference: an attribute per field of a message, such as `llm.input_messages.0.message.role`
    4. OpenTelemetry before version 1.37: an event per message
    5. the fields `input` and `output` of the span

    In layouts 1 to 3, the system prompt may have an attribute of its own (SYSTEM_PROMPT). It comes first.

    Returns:
        The messages, or an empty list if the span has none.
    """
    attributes = parse_attributes(span)
    instructions = attributes.get(SYSTEM_PROMPT)
    system = list(system_prompt(instructions.path, instructions.value)) if instructions is not None else []
    for read in (_list_nested_messages, _list_attribute_messages, _list_flat_span_messages):
        messages = read(span)
        if messages:
            return [*system, *messages]

    return list_event_messages(span) or _list_input_and_output(span)


def _list_nested_messages(span: Mapping[str, Any]) -> list[StoredMessage]:
    """Return the messages of lists under the names FLAT_PREFIXES, as Phoenix writes them."""
    messages = []
    for prefix in FLAT_PREFIXES:
        for index, message in enumerate(list_at(span.get("attributes"), prefix)):
            messages.append(StoredMessage(("attributes", *prefix.split("."), index), message))
    return messages


def _list_attribute_messages(span: Mapping[str, Any]) -> list[StoredMessage]:
    """List the messages of a span that stand in attributes with all messages in JSON.

    The first attribute of INPUTS that the span has is read, then the first of OUTPUTS.
    """
    attributes = parse_attributes(span)
    messages = []
    for names in (INPUTS, OUTPUTS):
        present_names = [name for name in names if name in attributes]
        if present_names:
            attribute = attributes[present_names[0]]
            messages_of_attribute = parse_messages(attribute.value)  # their paths begin at its value
            messages += _prefix_paths(attribute.path, messages_of_attribute)
    return messages


def _list_flat_span_messages(span: Mapping[str, Any]) -> list[StoredMessage]:
    """Return the messages whose fields are attributes, under any of FLAT_PREFIXES."""
    values = parse_attribute_values(span)
    messages = []
    for prefix in FLAT_PREFIXES:
        messages += list_flat_messages(values, prefix)
    return messages


def _prefix_paths(path: Path, messages: Iterable[StoredMessage]) -> list[StoredMessage]:
    """Return the messages of a value with paths from the record on. path: of the value in the record."""
    return [message._replace(path=(*path, *message.path)) for message in messages]


def parse_messages(value: Any) -> list[StoredMessage]:
    """Find the messages in an input or an output, which may be JSON.

    It may be a list of messages, an object that holds a list or a message (LISTS_INSIDE), or a single message.

    Returns:
        The messages, with paths from the value on, or an empty list if it holds none.
    """
    if not isinstance(value, str):
        return _list_messages_in_value(value)
    json_value = parse_json(value)
    if json_value is None:  # a text that is no JSON
        return []
    json_path: Path = (None,)  # the step None opens JSON
    return _prefix_paths(json_path, _list_messages_in_value(json_value))


def _list_messages_in_value(value: Any) -> list[StoredMessage]:
    """List the messages in an input or an output.

    They stand at the first path of LISTS_INSIDE that leads only to objects. Else the value may be a message itself.
    """
    for pattern in LISTS_INSIDE:
        messages = _list_messages_matching(value, pattern)
        if messages and all(isinstance(message.value, Mapping) for message in messages):
            return messages
    message = _parse_single_message(value)
    return [] if message is None else [StoredMessage((), message)]


def _list_messages_matching(value: Any, pattern: str) -> list[StoredMessage]:
    """Return the messages in a value at the paths that match a pattern of LISTS_INSIDE."""
    messages = []
    for path in iter_paths_matching(value, pattern):
        messages += _list_messages_at(path, get_value_at(value, path), may_be_message=pattern.endswith("message"))
    return messages


def _parse_single_message(value: Any) -> Mapping[str, Any] | None:
    """Return a value that is a message, with the role assistant where it names none; None for any other value."""
    is_message = isinstance(value, Mapping) and ("role" in value or "tool_calls" in value or "lc" in value)
    if not is_message:
        return None
    return value if "role" in value else {"role": "assistant", **value}


def _list_messages_at(path: Path, value: Any, *, may_be_message: bool) -> list[StoredMessage]:
    """List the messages that a value holds.

    Args:
        path: The path to the value.
        value: A list of messages, a list of such lists, or a message. LangSmith has one list per prompt, and the first
            of them counts.
        may_be_message: Whether an object counts as a message.
    """
    if isinstance(value, list) and value and isinstance(value[0], list):
        path = (*path, 0)
        value = value[0]
    if isinstance(value, list):
        return [StoredMessage((*path, index), message) for index, message in enumerate(value)]
    return [StoredMessage(path, value)] if may_be_message and isinstance(value, Mapping) else []


def list_flat_messages(attributes: Mapping[str, Any], prefix: str) -> list[StoredMessage]:
    """Build the messages whose every field is an attribute, as in OpenInference.

    For example, `llm.input_messages.0.message.role` is the role of the first message under `llm.input_messages`. The
    paths of these messages do not exist in the record, so that no call can be removed from it.

    Args:
        attributes: The values of the attributes, by name.
        prefix: The beginning of the names, such as "llm.input_messages".
    """
    messages_by_number = _build_tree(attributes, prefix)  # {"0": {"message": {"role": "user", ...}}, "1": ...}
    messages = []
    for number in sorted((key for key in messages_by_number if key.isdecimal()), key=int):
        numbered = messages_by_number[number]
        fields = numbered.get("message", numbered)  # OpenLLMetry writes no `message` in between
        path = ("attributes", f"{prefix}.{number}")  # tells where the message comes from
        messages.append(StoredMessage(path, _to_openai_message(fields)))
    return messages


def _to_openai_message(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Convert a message whose lists are objects by index to OpenAI's form.

    For example, {"tool_calls": {"0": {"tool_call": {...}}}} becomes {"tool_calls": [{...}]}. If the message has no
    `content`, the texts of `contents` are joined.
    """
    calls = fields.get("tool_calls", {})
    return {
        "role": fields.get("role"),
        "content": fields.get("content") or _join_content_texts(fields.get("contents", {})),
        "tool_call_id": fields.get("tool_call_id"),
        "name": fields.get("name"),
        "tool_calls": [calls[key].get("tool_call", calls[key]) for key in sorted(calls, key=int)],
    }


def _build_tree(attributes: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    """Return the attributes under a prefix as nested objects: {"a": {"b": 1}} for "prefix.a.b" with the value 1."""
    tree: dict[str, Any] = {}
    for name, value in attributes.items():
        if name.startswith(f"{prefix}."):
            _add_to_tree(tree, name.removeprefix(f"{prefix}.").split("."), value)
    return tree


def _add_to_tree(tree: dict[str, Any], keys: Sequence[str], value: Any) -> None:
    """Put a value at the end of some keys into nested objects; not where a key before the last has another value."""
    node: Any = tree
    for key in keys[:-1]:
        node = node.setdefault(key, {}) if isinstance(node, dict) else None
    if isinstance(node, dict):
        node[keys[-1]] = value


def _join_content_texts(contents: Mapping[str, Any]) -> str:
    """Return the texts of the parts of a content, joined."""
    texts = [find_value(contents[key], ("message_content.text", "text")) for key in sorted(contents)]
    return "".join(text for text in texts if isinstance(text, str))


def list_event_messages(span: Mapping[str, Any]) -> list[StoredMessage]:
    """List the messages in the events of a span, as in OpenTelemetry's conventions before version 1.37.

    An event is, for example, `{"name": "gen_ai.user.message", "body": {"content": "Hello"}}`.
    """
    messages = []
    for index, event in enumerate(list_at(span, "events")):
        message = _parse_event_message(event)
        if message is not None:
            messages.append(StoredMessage(("events", index), message))
    return messages


def _parse_event_message(event: Any) -> dict[str, Any] | None:
    """Find the message in an event such as `gen_ai.user.message` or `gen_ai.choice`.

    Returns:
        The message, or None if the event has none.
    """
    name = str(event.get("name")) if isinstance(event, Mapping) else ""
    if not name.startswith("gen_ai."):
        return None

    role = name.split(".")[1]
    body = find_value(event, ("body",)) or parse_attribute_values(event)
    return _parse_choice_message(body) if role == "choice" else _parse_body_message(role, body)


def _parse_choice_message(body: Any) -> dict[str, Any] | None:
    """Return the message of the assistant in the body of the event `gen_ai.choice`; None where it has none."""
    answer = body.get("message") if isinstance(body, Mapping) else body
    return _parse_body_message("assistant", answer)


def _parse_body_message(role: str, body: Any) -> dict[str, Any] | None:
    """Return the body of an event, maybe in JSON, as a message of this role; None where it is no object."""
    message = parse_json(body) if isinstance(body, str) else body
    if not isinstance(message, Mapping):
        return None
    return {"role": role, **message, "tool_call_id": message.get("id")}


def list_tool_span_messages(span: Mapping[str, Any], path: Path) -> list[StoredMessage]:
    """List the call and the result of a span that runs a tool.

    Returns:
        One message with the call, and one with the result if there is one. An empty list if the span runs no tool.
    """
    call = _find_span_call(span)
    if call is None:
        return []
    messages = [StoredMessage(path, span, call=call)]
    content = _find_first_value(parse_attribute_values(span), TOOL_RESULTS)
    if content is not None:
        result = FoundResult(content, id=call.id, tool=call.tool)
        messages.append(StoredMessage(path, span, result=result))
    return messages


def _find_span_call(span: Mapping[str, Any]) -> FoundCall | None:
    """Find the call of a span that runs a tool.

    Returns:
        The call, with the id of the span if it has no id itself, or None if the span runs no tool.
    """
    values = parse_attribute_values(span)
    tool = values.get("gen_ai.tool.name") or values.get("tool.name")
    if not isinstance(tool, str):
        return None

    span_id = find_value(span, ("spanId", "span_id"))
    call_id = values.get("gen_ai.tool.call.id", span_id)
    return FoundCall(tool, _find_first_value(values, TOOL_ARGUMENTS), id=str(call_id))


def _find_first_value(values: Mapping[str, Any], names: Sequence[str]) -> Any:
    """Return the value of the first of some attributes that a span has; None without one."""
    return next((values[name] for name in names if name in values), None)


class TraceSpan(NamedTuple):
    """A span of a trace, with the path to it in the record."""

    path: Path
    fields: Mapping[str, Any]


def choose_conversation(spans: Sequence[TraceSpan]) -> list[StoredMessage]:
    """Choose the messages that are the conversation of a trace.

    They are the messages of the span with the most messages, since each request of an agent repeats the messages before
    it. Of spans with equally many messages, the last one counts. If no span has messages, the calls and results of the
    spans that run tools are taken.
    """
    # Paths of a span's messages begin at the span; _prefix_paths puts the span's own path before them.
    longest = _longest(_prefix_paths(span.path, list_span_messages(span.fields)) for span in spans)
    if longest:
        return longest

    calls = list[StoredMessage]()
    for span in spans:
        calls += list_tool_span_messages(span.fields, span.path)
    return calls


def _longest(conversations: Iterable[list[StoredMessage]]) -> list[StoredMessage]:
    """Find the conversation with the most messages: the last one of equally long ones, [] if there is none."""
    longest = list[StoredMessage]()
    for messages in conversations:
        if len(messages) >= len(longest):
            longest = messages
    return longest


def iter_trace_conversations(spans: Sequence[TraceSpan]) -> Iterator[list[StoredMessage]]:
    """Group spans by their trace, and find the conversation of each trace.

    Yields:
        The messages of each trace. Its spans count in the order in which they began.
    """
    traces = defaultdict[str, list[TraceSpan]](list)
    for span in spans:
        traces[str(find_value(span.fields, TRACE_IDS))].append(span)
    for trace in traces.values():
        yield choose_conversation(sorted(trace, key=_get_padded_start))


def _get_padded_start(span: TraceSpan) -> str:
    """Return the start of a span as text that sorts like the time: nanoseconds are padded with zeros."""
    return str(find_value(span.fields, STARTS)).zfill(25)


def iter_otlp_conversations(record: Any) -> Iterator[list[StoredMessage]]:
    """Yield the conversations of an export of OTLP in JSON."""
    spans = []
    for resources, scopes in (("resourceSpans", "scopeSpans"), ("resource_spans", "scope_spans")):
        for path in iter_paths_matching(record, f"{resources}.*.{scopes}.*.spans.*"):
            spans.append(TraceSpan(path, get_value_at(record, path)))
    yield from iter_trace_conversations(spans)


def iter_span_line_conversations(records: Sequence[Any]) -> Iterator[list[StoredMessage]]:
    """Yield the conversations of a file with a span per line."""
    spans = []
    for number, record in enumerate(records):
        if isinstance(record, Mapping):
            spans.append(TraceSpan((number,), record))
    yield from iter_trace_conversations(spans)


def iter_span_list_conversations(record: Any) -> Iterator[list[StoredMessage]]:
    """Yield the conversation of a trace with a list of spans."""
    spans = []
    for pattern in ("spans.*", "data.spans.*"):
        for path in iter_paths_matching(record, pattern):
            fields = get_value_at(record, path)
            if isinstance(fields, Mapping):
                spans.append(TraceSpan(path, fields))
    yield choose_conversation(spans)


def iter_langfuse_messages(record: Any) -> Iterator[StoredMessage]:
    """Yield the messages of the longest generation of a Langfuse trace, or the trace's own messages without one.

    Each generation repeats the messages before it, so of equally long generations the last one counts.
    """
    yield from _longest(_iter_generations(record)) or _list_input_and_output(record)


def _iter_generations(record: Any) -> Iterator[list[StoredMessage]]:
    """Yield the messages of each observation of a Langfuse trace that is a generation or an agent's run."""
    for path in iter_paths_matching(record, "observations.*"):
        observation = get_value_at(record, path)
        kind = str(find_value(observation, ("type",)))
        if kind.upper() in ("GENERATION", "AGENT"):
            yield _prefix_paths(path, _list_input_and_output(observation))


def iter_langsmith_messages(record: Any) -> Iterator[StoredMessage]:
    """Yield the messages in the inputs of a LangSmith run, then the messages in its outputs.

    If the outputs begin with all messages of the inputs, the inputs are left out.
    """
    inputs = parse_messages(record.get("inputs"))
    outputs = parse_messages(record.get("outputs"))
    first_outputs = [message.value for message in outputs[: len(inputs)]]
    outputs_repeat_inputs = bool(inputs) and first_outputs == [message.value for message in inputs]
    if not outputs_repeat_inputs:
        yield from _prefix_paths(("inputs",), inputs)
    yield from _prefix_paths(("outputs",), outputs)


def _list_input_and_output(record: Mapping[str, Any]) -> list[StoredMessage]:
    """Return the messages of the field `input`, then those of `output`."""
    messages = []
    for key in ("input", "output"):
        messages += _prefix_paths((key,), parse_messages(record.get(key)))
    return messages


def iter_request_and_response(record: Any) -> Iterator[StoredMessage]:
    """Yield the messages of a request to a model, then those of the response.

    A record is, for example, `{"request": {"messages": [...]}, "response": {"choices": [{"message": {...}}]}}`.
    """
    yield from iter_messages_at(record, ("system", "request.system", "request.body.system"))
    yield from iter_messages_at(record, REQUESTS)
    yield from iter_messages_at(record, RESPONSES)
    response_body = find_value(record, ("response.body",))
    if response_body is not None:
        yield from _iter_response_messages(response_body, ("response", "body"))
    else:
        yield from _iter_response_messages(find_value(record, ("response",)), ("response",))


def _iter_response_messages(response: Any, path: Path) -> Iterator[StoredMessage]:
    """Yield a response that is itself a message, then the messages in its output (OpenAI) or candidates (Gemini)."""
    if isinstance(response, Mapping) and response.get("role") is not None:
        yield StoredMessage(path, response)
    yield from _prefix_paths(path, iter_messages_at(response, ("output", "candidates.*.content")))


def _build_span(name: str, messages: Sequence[Any], written: Sequence[Any]) -> dict[str, Any]:
    """Build a span for the examples, with the messages of its request and the messages written in answer."""
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
FORMS = (
    Form(
        name="OpenTelemetry, OTLP in JSON",
        source=f"https://opentelemetry.io/docs/specs/semconv/gen-ai/ (version {SEMCONV})",
        signs=("resourceSpans.*.scopeSpans.*.spans", "resource_spans.*.scope_spans.*.spans"),
        split=iter_otlp_conversations,
        can_drop=False,
        example={"resourceSpans": [{"scopeSpans": [{"spans": [_build_span("chat", OTEL_INPUT, OTEL_OUTPUT)]}]}]},
    ),
    Form(
        name="OpenTelemetry, a span per line",
        source=f"https://opentelemetry.io/docs/specs/semconv/gen-ai/ (version {SEMCONV})",
        signs=("traceId", "context.trace_id", "span_id", "spanId"),
        split=iter_span_line_conversations,
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
        split=iter_span_list_conversations,
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
        split=iter_span_list_conversations,
        can_drop=False,
        example={
            "info": {"trace_id": "t1"},
            "data": {
                "spans": [
                    {
                        "name": "chat",
                        "attributes": {
                            "mlflow.spanInputs": {"messages": [QUESTION, OPENAI_CALL, OPENAI_RESULT]},
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
        read=iter_langfuse_messages,
        can_drop=False,
        example={
            "id": "t1",
            "observations": [
                {"type": "GENERATION", "input": [QUESTION, OPENAI_CALL, OPENAI_RESULT], "output": ANSWER},
            ],
        },
    ),
    Form(
        name="LangSmith run",
        source="https://docs.langchain.com/langsmith/run-data-format",
        signs=("inputs.messages", "outputs.messages", "outputs.generations", "outputs.choices"),
        read=iter_langsmith_messages,
        example={
            "id": "r1",
            "run_type": "llm",
            "inputs": {"messages": [QUESTION, OPENAI_CALL, OPENAI_RESULT]},
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
        read=iter_request_and_response,
        example={
            "request": {"model": "m", "messages": [QUESTION, OPENAI_CALL, OPENAI_RESULT]},
            "response": {"choices": [{"message": ANSWER}]},
        },
    ),
)
