"""Forms of traces, which put spans, runs or observations around messages, and of requests with their responses."""

import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from toolformer_dag.conversations.forms.examples import ANSWER, OPENAI_CALL, OPENAI_RESULT, QUESTION
from toolformer_dag.conversations.forms.form import (
    Form,
    iter_messages_at,
    iter_paths_matching,
    iter_system_prompt_messages,
)
from toolformer_dag.conversations.plain_values import find_first_value, get_list_at, try_parse_json
from toolformer_dag.conversations.raw_messages import StoredMessage
from toolformer_dag.conversations.record_paths import RecordPath, get_value_at
from toolformer_dag.conversations.shapes import FoundCall, FoundResult

SEMCONV_VERSION = "1.37"
"""The version of OpenTelemetry's conventions for generative AI that is read; all of it is still in development."""
INPUT_ATTRIBUTES = (
    "gen_ai.input.messages",
    "gen_ai.prompt",
    "input.value",
    "mlflow.spanInputs",
    "traceloop.entity.input",
)
OUTPUT_ATTRIBUTES = (
    "gen_ai.output.messages",
    "gen_ai.completion",
    "output.value",
    "mlflow.spanOutputs",
    "traceloop.entity.output",
)
"""Attributes of a span with messages in JSON: those of a request (INPUT_ATTRIBUTES), and the model's answer."""
SYSTEM_PROMPT_ATTRIBUTE = "gen_ai.system_instructions"
MESSAGE_ATTRIBUTE_PREFIXES = ("llm.input_messages", "llm.output_messages", "gen_ai.prompt", "gen_ai.completion")
"""Prefixes of attributes that each hold a field of a message: OpenInference's `llm.input_messages.0.message.role`, and
OpenLLMetry's `gen_ai.prompt.0.role`."""
MESSAGES_PATH_PATTERNS = ("", "messages", "input", "choices.*.message", "generations.*.*.message", "output")
"""Paths to the messages in an input or an output."""
REQUEST_PATHS = (
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
RESPONSE_PATHS = (
    "response.choices.0.message",
    "response.body.choices.0.message",
    "response_body.choices.0.message",
    "result.message",
)
"""Paths to the message of a response; of several choices the first counts."""
TOOL_ARGUMENT_ATTRIBUTES = ("gen_ai.tool.call.arguments", "input.value")
TOOL_RESULT_ATTRIBUTES = ("gen_ai.tool.call.result", "output.value")
"""Attributes of a span that runs a tool, with the call's arguments and with its result."""
TRACE_ID_FIELDS = ("traceId", "trace_id", "context.trace_id", "traceid")
START_TIME_FIELDS = ("startTimeUnixNano", "start_time", "startTime", "start_time_unix_nano", "start_time_ns")


class Attribute(NamedTuple):
    """The value of an attribute of a span, with the path to it in the span."""

    path: RecordPath
    value: Any


def parse_attributes(span: Mapping[str, Any]) -> dict[str, Attribute]:
    """Collect the attributes of a span by name.

    A span is one step of a traced program, such as a request to a model. Its attributes are an object, or a list of
    pairs as OTLP (OpenTelemetry's protocol) writes them.
    """
    attributes = span.get("attributes")
    if not isinstance(attributes, Mapping):
        return _parse_otlp_attributes(span)

    attributes_by_name = {}
    for name, value in attributes.items():
        attributes_by_name[str(name)] = Attribute(("attributes", name), value)
    return attributes_by_name


def _parse_otlp_attributes(span: Mapping[str, Any]) -> dict[str, Attribute]:
    """Collect the attributes of a span by name, from the list of pairs that OTLP writes."""
    attributes_by_name = dict[str, Attribute]()
    for index, item in enumerate(get_list_at(span, "attributes")):
        attribute = _parse_otlp_attribute(item, ("attributes", index))
        if attribute is not None:
            attributes_by_name[str(item.get("key"))] = attribute
    return attributes_by_name


def _parse_otlp_attribute(item: Any, path: RecordPath) -> Attribute | None:
    """Parse an attribute such as `{"key": "name", "value": {"stringValue": "chat"}}`.

    Returns:
        The attribute, or None if the item is anything else.
    """
    value = item.get("value") if isinstance(item, Mapping) else None
    if not isinstance(value, Mapping) or len(value) != 1:
        return None

    [type_key] = value  # such as "stringValue"
    return Attribute((*path, "value", type_key), parse_otlp_value(value))


def parse_attribute_values(span: Mapping[str, Any]) -> dict[str, Any]:
    """Collect the values of the attributes of a span by name."""
    return {name: attribute.value for name, attribute in parse_attributes(span).items()}


def parse_otlp_value(value: Any) -> Any:
    """Convert a value of OTLP (OpenTelemetry's protocol) to plain JSON.

    A value of OTLP is an object whose only key is its type. Any other value is returned unchanged.

    Example:
        parse_otlp_value({"arrayValue": {"values": [{"intValue": "4"}]}})  # [4]
    """
    if not isinstance(value, Mapping) or len(value) != 1:
        return value

    [(value_type, content)] = value.items()
    if value_type == "arrayValue":
        return [parse_otlp_value(item) for item in get_list_at(content, "values")]
    if value_type == "kvlistValue":
        return dict(map(_parse_otlp_pair, get_list_at(content, "values")))
    if value_type == "intValue":
        return _parse_integer(content)
    return content


def _parse_integer(content: Any) -> Any:
    """Convert "4" to 4, since OTLP writes integers as text. Any other value is returned unchanged."""
    is_integer = str(content).lstrip("-").isdecimal()
    return int(content) if is_integer else content


def _parse_otlp_pair(pair: Any) -> tuple[str, Any]:
    """Return the key and the value of a pair of OTLP, such as `{"key": "city", "value": {"stringValue": "Oslo"}}`."""
    key = find_first_value(pair, ("key",))
    value = find_first_value(pair, ("value",))
    return str(key), parse_otlp_value(value)


def list_span_messages(span: Mapping[str, Any]) -> list[StoredMessage]:
    """List the messages of the request and of the answer in a span of a trace.

    Libraries write them in several layouts. These are tried in turn, until one gives messages:

    1. Phoenix: lists of messages under names such as `llm.input_messages`
    2. OpenTelemetry and others: an attribute with all messages in JSON, such as `gen_ai.input.messages`
    3. OpenInference: an attribute per field of a message, such as `llm.input_messages.0.message.role`
    4. OpenTelemetry before version 1.37: an event per message
    5. the fields `input` and `output` of the span

    In layouts 1 to 3, the system prompt may have an attribute of its own (SYSTEM_PROMPT_ATTRIBUTE). It comes first.

    Returns:
        The messages, or an empty list if the span has none.
    """
    system_prompt_messages = _list_system_prompt_messages(span)
    for list_messages in (_list_nested_messages, _list_attribute_messages, _list_flat_span_messages):
        messages = list_messages(span)
        if messages:
            return [*system_prompt_messages, *messages]

    return list_event_messages(span) or _list_input_and_output_messages(span)


def _list_system_prompt_messages(span: Mapping[str, Any]) -> list[StoredMessage]:
    """List the messages of the system prompt, if a span has it in an attribute of its own."""
    instructions = parse_attributes(span).get(SYSTEM_PROMPT_ATTRIBUTE)
    if instructions is None:
        return []
    return list(iter_system_prompt_messages(instructions.path, instructions.value))


def _list_nested_messages(span: Mapping[str, Any]) -> list[StoredMessage]:
    """List the messages that stand in lists, as Phoenix writes them.

    The lists lie under the names MESSAGE_ATTRIBUTE_PREFIXES: `{"attributes": {"llm": {"input_messages": [...]}}}`.
    """
    attributes = span.get("attributes")
    messages = []
    for prefix in MESSAGE_ATTRIBUTE_PREFIXES:
        list_path = ("attributes", *prefix.split("."))
        for index, message in enumerate(get_list_at(attributes, prefix)):
            messages.append(StoredMessage((*list_path, index), message))
    return messages


def _list_attribute_messages(span: Mapping[str, Any]) -> list[StoredMessage]:
    """List the messages of a span that stand in attributes with all messages in JSON.

    The first attribute of INPUT_ATTRIBUTES that the span has is read, then the first of OUTPUT_ATTRIBUTES.
    """
    attributes = parse_attributes(span)
    messages = []
    for names in (INPUT_ATTRIBUTES, OUTPUT_ATTRIBUTES):
        present_names = [name for name in names if name in attributes]
        if not present_names:
            continue

        attribute = attributes[present_names[0]]
        messages_of_attribute = parse_messages(attribute.value)  # their paths begin at the attribute's value
        messages += _prefix_paths(attribute.path, messages_of_attribute)
    return messages


def _list_flat_span_messages(span: Mapping[str, Any]) -> list[StoredMessage]:
    """List the messages of a span whose every field is an attribute, such as `llm.input_messages.0.message.role`."""
    attribute_values = parse_attribute_values(span)
    messages = []
    for prefix in MESSAGE_ATTRIBUTE_PREFIXES:
        messages += list_flat_messages(attribute_values, prefix)
    return messages


def _prefix_paths(prefix_path: RecordPath, messages: Iterable[StoredMessage]) -> list[StoredMessage]:
    """Copy messages, putting a path before the path of each.

    The messages of a value have paths that begin there. With the path to the value, they begin at the record.
    """
    return [message._replace(path=(*prefix_path, *message.path)) for message in messages]


def parse_messages(value: Any) -> list[StoredMessage]:
    """Find the messages in an input or an output, which may be JSON.

    It may be a list of messages, a single message, or an object that holds either (MESSAGES_PATH_PATTERNS).

    Example:
        In {"messages": [{"role": "user", ...}]} the message has the path ("messages", 0).

    Returns:
        The messages with their paths in the value, or an empty list if it holds none.
    """
    if not isinstance(value, str):
        return _list_messages_in_value(value)

    json_value = try_parse_json(value)
    if json_value is None:  # a text that is no JSON
        return []

    json_path: RecordPath = (None,)  # the step None opens JSON
    return _prefix_paths(json_path, _list_messages_in_value(json_value))


def _list_messages_in_value(value: Any) -> list[StoredMessage]:
    """List the messages in an input or an output.

    They stand at the first path of MESSAGES_PATH_PATTERNS that leads only to objects. Without such a path, the value
    may be a message itself.
    """
    for pattern in MESSAGES_PATH_PATTERNS:
        messages = _list_messages_matching(value, pattern)
        if messages and all(isinstance(message.value, Mapping) for message in messages):
            return messages

    single_message = _parse_single_message(value)
    return [] if single_message is None else [StoredMessage((), single_message)]


def _list_messages_matching(value: Any, pattern: str) -> list[StoredMessage]:
    """List the messages in a value, at the paths that match a pattern such as "choices.*.message"."""
    leads_to_message = pattern.endswith("message")
    messages = []
    for path in iter_paths_matching(value, pattern):
        messages += _list_messages_at(path, get_value_at(value, path), may_be_message=leads_to_message)
    return messages


def _parse_single_message(value: Any) -> Mapping[str, Any] | None:
    """Return a value that is a message, with the role "assistant" if it names none.

    Returns:
        The message, or None if the value lacks the fields of one.
    """
    if not isinstance(value, Mapping):
        return None
    if "role" in value:
        return value
    if "tool_calls" in value or "lc" in value:  # `lc` marks a message that LangChain has serialized
        return {"role": "assistant", **value}
    return None


def _list_messages_at(path: RecordPath, value: Any, *, may_be_message: bool) -> list[StoredMessage]:
    """List the messages that a value holds.

    Args:
        path: The path to the value.
        value: A list of messages, a list of such lists, or a message. LangSmith has one list per prompt, and the first
            of them counts.
        may_be_message: Whether an object counts as a message.
    """
    is_list_of_lists = isinstance(value, list) and bool(value) and isinstance(value[0], list)
    if is_list_of_lists:
        path = (*path, 0)
        value = value[0]

    if isinstance(value, list):
        return [StoredMessage((*path, index), message) for index, message in enumerate(value)]
    if may_be_message and isinstance(value, Mapping):
        return [StoredMessage(path, value)]
    return []


def list_flat_messages(attribute_values: Mapping[str, Any], name_prefix: str) -> list[StoredMessage]:
    """Build the messages whose every field is an attribute, as in OpenInference.

    For example, `llm.input_messages.0.message.role` is the role of the first message under `llm.input_messages`. The
    paths of these messages do not exist in the record, so that no call can be removed from it.

    Args:
        attribute_values: The values of the attributes, by name.
        name_prefix: The beginning of the names, such as "llm.input_messages".
    """
    # The tree is, for example, {"0": {"message": {"role": "user", ...}}, "1": ...}.
    tree = _build_attribute_tree(attribute_values, name_prefix)
    message_numbers = [key for key in tree if key.isdecimal()]
    messages = []
    for number in sorted(message_numbers, key=int):
        node = tree[number]
        fields = node.get("message", node)  # OpenLLMetry writes no `message` in between
        path = ("attributes", f"{name_prefix}.{number}")  # no path of the record: it only tells the message's origin
        messages.append(StoredMessage(path, _convert_to_openai_message(fields)))
    return messages


def _convert_to_openai_message(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Convert a message whose lists are objects by index to OpenAI's form.

    For example, {"tool_calls": {"0": {"tool_call": {...}}}} becomes {"tool_calls": [{...}]}. If the message has no
    `content`, the texts of `contents` are joined.
    """
    content = fields.get("content") or _join_content_texts(fields.get("contents", {}))

    calls_by_index = fields.get("tool_calls", {})
    calls = []
    for index in sorted(calls_by_index, key=int):
        item = calls_by_index[index]
        calls.append(item.get("tool_call", item))

    return {
        "role": fields.get("role"),
        "content": content,
        "tool_call_id": fields.get("tool_call_id"),
        "name": fields.get("name"),
        "tool_calls": calls,
    }


def _build_attribute_tree(attribute_values: Mapping[str, Any], name_prefix: str) -> dict[str, Any]:
    """Build nested objects from the attributes under a prefix: {"a": {"b": 1}} for "prefix.a.b" with the value 1."""
    tree: dict[str, Any] = {}
    for name, value in attribute_values.items():
        if name.startswith(f"{name_prefix}."):
            keys = name.removeprefix(f"{name_prefix}.").split(".")
            _add_to_tree(tree, keys, value)
    return tree


def _add_to_tree(tree: dict[str, Any], keys: Sequence[str], value: Any) -> None:
    """Put a value into nested objects, at the end of some keys.

    For example, the keys ["a", "b"] and the value 1 make {"a": {"b": 1}} of {}. If a key before the last has a value
    already that is no object, the new value is dropped.
    """
    node: Any = tree
    for key in keys[:-1]:
        node = node.setdefault(key, {}) if isinstance(node, dict) else None

    if isinstance(node, dict):
        last_key = keys[-1]
        node[last_key] = value


def _join_content_texts(contents: Mapping[str, Any]) -> str:
    """Join the texts of the parts of a content, which is an object by index, such as {"0": {"text": "Hello"}}."""
    texts = [find_first_value(contents[key], ("message_content.text", "text")) for key in sorted(contents)]
    return "".join(text for text in texts if isinstance(text, str))


def list_event_messages(span: Mapping[str, Any]) -> list[StoredMessage]:
    """List the messages in the events of a span, as in OpenTelemetry's conventions before version 1.37.

    An event is, for example, `{"name": "gen_ai.user.message", "body": {"content": "Hello"}}`.
    """
    messages = []
    for index, event in enumerate(get_list_at(span, "events")):
        message = _parse_event_message(event)
        if message is not None:
            messages.append(StoredMessage(("events", index), message))
    return messages


def _parse_event_message(event: Any) -> dict[str, Any] | None:
    """Find the message in an event such as `gen_ai.user.message` or `gen_ai.choice`.

    Returns:
        The message, or None if the event has none.
    """
    if not isinstance(event, Mapping):
        return None
    name = str(event.get("name"))
    if not name.startswith("gen_ai."):
        return None

    role = name.split(".")[1]  # "user" for gen_ai.user.message, "choice" for gen_ai.choice
    body = find_first_value(event, ("body",)) or parse_attribute_values(event)
    if role == "choice":
        return _parse_choice_message(body)
    return _parse_body_message(role, body)


def _parse_choice_message(body: Any) -> dict[str, Any] | None:
    """Return the assistant's message in the body of the event `gen_ai.choice`, or None if it has none."""
    answer = body.get("message") if isinstance(body, Mapping) else body
    return _parse_body_message("assistant", answer)


def _parse_body_message(role: str, body: Any) -> dict[str, Any] | None:
    """Convert the body of an event to a message. It has this role unless the body names another.

    Returns:
        The message, or None if the body is neither an object nor an object in JSON.
    """
    message = try_parse_json(body) if isinstance(body, str) else body
    if not isinstance(message, Mapping):
        return None
    # In the event of a tool's result, `id` is that of the call.
    return {"role": role, **message, "tool_call_id": message.get("id")}


def list_tool_span_messages(span: Mapping[str, Any], path: RecordPath) -> list[StoredMessage]:
    """List the call and the result of a span that runs a tool.

    Returns:
        One message with the call, and one with the result if there is one. An empty list if the span runs no tool.
    """
    call = _find_span_call(span)
    if call is None:
        return []
    call_message = StoredMessage(path, span, call=call)

    content = _get_first_attribute_value(parse_attribute_values(span), TOOL_RESULT_ATTRIBUTES)
    if content is None:
        return [call_message]

    result = FoundResult(content, id=call.id, tool=call.tool)
    return [call_message, StoredMessage(path, span, result=result)]


def _find_span_call(span: Mapping[str, Any]) -> FoundCall | None:
    """Find the call of a span that runs a tool.

    Returns:
        The call, with the id of the span if it has no id itself, or None if the span runs no tool. Without either id,
        the id is the text "None".
    """
    attribute_values = parse_attribute_values(span)
    tool = attribute_values.get("gen_ai.tool.name") or attribute_values.get("tool.name")
    if not isinstance(tool, str):
        return None

    arguments = _get_first_attribute_value(attribute_values, TOOL_ARGUMENT_ATTRIBUTES)
    span_id = find_first_value(span, ("spanId", "span_id"))
    call_id = attribute_values.get("gen_ai.tool.call.id", span_id)
    return FoundCall(tool, arguments, id=str(call_id))


def _get_first_attribute_value(attribute_values: Mapping[str, Any], attribute_names: Sequence[str]) -> Any:
    """Return the value of the first of these attributes that a span has, or None if it has none of them."""
    for name in attribute_names:
        if name in attribute_values:
            return attribute_values[name]
    return None


class TraceSpan(NamedTuple):
    """A span of a trace, with the path to it in the record."""

    path: RecordPath
    fields: Mapping[str, Any]


def choose_trace_conversation(spans: Sequence[TraceSpan]) -> list[StoredMessage]:
    """Choose the messages that are the conversation of a trace.

    They are the messages of the span with the most messages, since each request of an agent repeats the messages before
    it. Of spans with equally many messages, the last one counts. If no span has messages, the calls and results of the
    spans that run tools are taken.
    """
    # Paths of a span's messages begin at the span; _prefix_paths puts the span's own path before them.
    conversations = (_prefix_paths(span.path, list_span_messages(span.fields)) for span in spans)
    longest_conversation = _find_longest_conversation(conversations)
    if longest_conversation:
        return longest_conversation

    calls_and_results = list[StoredMessage]()
    for span in spans:
        calls_and_results += list_tool_span_messages(span.fields, span.path)
    return calls_and_results


def _find_longest_conversation(conversations: Iterable[list[StoredMessage]]) -> list[StoredMessage]:
    """Find the conversation with the most messages.

    Returns:
        Its messages: those of the last one if several are equally long, or an empty list if there is no conversation.
    """
    longest_conversation = list[StoredMessage]()
    for messages in conversations:
        if len(messages) >= len(longest_conversation):
            longest_conversation = messages
    return longest_conversation


def iter_trace_conversations(spans: Sequence[TraceSpan]) -> Iterator[list[StoredMessage]]:
    """Group spans by their trace, and find the conversation of each trace.

    A trace is one run of a program; its spans are the steps of the run.

    Yields:
        The messages of each trace. Its spans count in the order in which they began.
    """
    spans_by_trace_id = defaultdict[str, list[TraceSpan]](list)
    for span in spans:
        trace_id = str(find_first_value(span.fields, TRACE_ID_FIELDS))
        spans_by_trace_id[trace_id].append(span)

    for spans_of_trace in spans_by_trace_id.values():
        spans_in_order = sorted(spans_of_trace, key=_get_sortable_start)
        yield choose_trace_conversation(spans_in_order)


def _get_sortable_start(span: TraceSpan) -> str:
    """Return the start of a span as text that sorts like the time: nanoseconds are padded with zeros."""
    return str(find_first_value(span.fields, START_TIME_FIELDS)).zfill(25)


def iter_otlp_conversations(record: Any) -> Iterator[list[StoredMessage]]:
    """Yield the conversations of an export of OTLP (OpenTelemetry's protocol) in JSON, one for each trace."""
    spans = []
    for pattern in ("resourceSpans.*.scopeSpans.*.spans.*", "resource_spans.*.scope_spans.*.spans.*"):
        for path in iter_paths_matching(record, pattern):
            spans.append(TraceSpan(path, get_value_at(record, path)))
    yield from iter_trace_conversations(spans)


def iter_span_line_conversations(records: Sequence[Any]) -> Iterator[list[StoredMessage]]:
    """Yield the conversations of a file with a span per line, one for each trace."""
    spans = []
    for line_index, record in enumerate(records):
        if isinstance(record, Mapping):
            spans.append(TraceSpan((line_index,), record))
    yield from iter_trace_conversations(spans)


def iter_span_list_conversations(record: Any) -> Iterator[list[StoredMessage]]:
    """Yield the conversation of a trace with a list of spans."""
    spans = []
    for pattern in ("spans.*", "data.spans.*"):
        for path in iter_paths_matching(record, pattern):
            fields = get_value_at(record, path)
            if isinstance(fields, Mapping):
                spans.append(TraceSpan(path, fields))
    yield choose_trace_conversation(spans)


def iter_langfuse_messages(record: Any) -> Iterator[StoredMessage]:
    """Yield the messages of the longest generation of a Langfuse trace, or the trace's own messages without one.

    A generation is a request to a model with its answer. Each one repeats the messages before it, so of equally long
    generations the last one counts.
    """
    longest_conversation = _find_longest_conversation(_iter_generation_messages(record))
    yield from longest_conversation or _list_input_and_output_messages(record)


def _iter_generation_messages(record: Any) -> Iterator[list[StoredMessage]]:
    """Yield the messages of each observation of a Langfuse trace that is a generation or an agent's run."""
    for path in iter_paths_matching(record, "observations.*"):
        observation = get_value_at(record, path)
        observation_type = str(find_first_value(observation, ("type",)))
        if observation_type.upper() in ("GENERATION", "AGENT"):
            yield _prefix_paths(path, _list_input_and_output_messages(observation))


def iter_langsmith_messages(record: Any) -> Iterator[StoredMessage]:
    """Yield the messages in the inputs of a LangSmith run, then the messages in its outputs.

    If the outputs begin with all messages of the inputs, the inputs are left out.
    """
    input_messages = parse_messages(record.get("inputs"))
    output_messages = parse_messages(record.get("outputs"))

    input_values = [message.value for message in input_messages]
    first_output_values = [message.value for message in output_messages[: len(input_messages)]]
    outputs_repeat_inputs = bool(input_values) and first_output_values == input_values
    if not outputs_repeat_inputs:
        yield from _prefix_paths(("inputs",), input_messages)

    yield from _prefix_paths(("outputs",), output_messages)


def _list_input_and_output_messages(record: Mapping[str, Any]) -> list[StoredMessage]:
    """List the messages in the field `input` of a record, then those in `output`."""
    messages = []
    for key in ("input", "output"):
        messages += _prefix_paths((key,), parse_messages(record.get(key)))
    return messages


def iter_request_and_response(record: Any) -> Iterator[StoredMessage]:
    """Yield the messages of a request to a model, then those of the response.

    A record is, for example, `{"request": {"messages": [...]}, "response": {"choices": [{"message": {...}}]}}`.
    """
    yield from iter_messages_at(record, ("system", "request.system", "request.body.system"))
    yield from iter_messages_at(record, REQUEST_PATHS)
    yield from iter_messages_at(record, RESPONSE_PATHS)

    response_body = find_first_value(record, ("response.body",))
    if response_body is not None:
        yield from _iter_response_messages(response_body, ("response", "body"))
    else:
        yield from _iter_response_messages(find_first_value(record, ("response",)), ("response",))


def _iter_response_messages(response: Any, path: RecordPath) -> Iterator[StoredMessage]:
    """Yield a response that is itself a message, then the messages in its output (OpenAI) or candidates (Gemini)."""
    if isinstance(response, Mapping) and response.get("role") is not None:
        yield StoredMessage(path, response)
    yield from _prefix_paths(path, iter_messages_at(response, ("output", "candidates.*.content")))


def _build_span(name: str, request_messages: Sequence[Any], answer_messages: Sequence[Any]) -> dict[str, Any]:
    """Build a span for the examples of forms, with the messages of its request and those of the model's answer."""
    return {
        "traceId": "t1",
        "spanId": "1",
        "name": name,
        "startTimeUnixNano": "1",
        "attributes": [
            {"key": "gen_ai.input.messages", "value": {"stringValue": json.dumps(request_messages)}},
            {"key": "gen_ai.output.messages", "value": {"stringValue": json.dumps(answer_messages)}},
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
        source=f"https://opentelemetry.io/docs/specs/semconv/gen-ai/ (version {SEMCONV_VERSION})",
        signs=("resourceSpans.*.scopeSpans.*.spans", "resource_spans.*.scope_spans.*.spans"),
        split=iter_otlp_conversations,
        can_drop=False,
        example={"resourceSpans": [{"scopeSpans": [{"spans": [_build_span("chat", OTEL_INPUT, OTEL_OUTPUT)]}]}]},
    ),
    Form(
        name="OpenTelemetry, a span per line",
        source=f"https://opentelemetry.io/docs/specs/semconv/gen-ai/ (version {SEMCONV_VERSION})",
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
