"""Name the fields in which calls, results and words stand, in the words of model interfaces and logs.

To read another field name, add it to one of these tuples; to read another kind of object, add a `Shape`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from toolformer_dag.conversations.plain_values import find_first_value

TOOL = (
    "function.name",
    "name",
    "function_name",
    "toolName",
    "tool_name",
    "recipient_name",
    "api_name",
    "function",
    "tool",
)
ARGUMENTS = (
    "function.arguments",
    "function.parameters",
    "function.args",
    "arguments",
    "args",
    "input",
    "parameters",
    "params",
    "rawInput",
    "action",
    "kwargs",
)
CALL_IDS = ("call_id", "tool_call_id", "toolCallId", "toolUseId", "tool_use_id", "id")
"""Fields with the id of a call; `call_id` comes first, since an item of OpenAI's Responses also has `id`."""
ANSWERED_IDS = (
    "tool_call_id",
    "source_call_id",
    "call_id",
    "toolCallId",
    "tool_use_id",
    "toolUseId",
    "toolCallID",
    "tool_call_ids",
    "callId",
    "additional_kwargs.tool_call_id",
)
"""Fields of a result with the id of the call that it answers."""
RESULT_FIELDS = (
    "content",
    "output",
    "response",
    "result",
    "results",
    "value",
    "text",
    "message",
    "observation",
    "errorText",
    "outputs",
    "blocks",
)
"""Fields of a result with the tool's answer."""


@dataclass(frozen=True, slots=True)
class Shape:
    """A kind of object that holds a call, a result, or both, and the fields in which they stand.

    Fields are paths such as "name" or "function.name", in the order in which they are looked for.

    Attributes:
        type_names: The types of such objects, which stand in one of TYPE_KEYS. They are empty if objects of this kind
            are known by their `wrapper_key` instead.
        wrapper_key: The key whose value holds the fields, as in `{"toolUse": {...}}`, or "" if the object itself does.
        tool_fields: Fields with the name of the tool, or empty if the object is only a result.
        argument_fields: Fields with the arguments of a call, or empty if the object is only a result.
        result_fields: Fields with a result, or empty if the object is only a call.
        id_fields: Fields with the id of the call, or of the call that a result answers.
    """

    type_names: tuple[str, ...] = ()
    wrapper_key: str = ""
    tool_fields: tuple[str, ...] = ()
    argument_fields: tuple[str, ...] = ()
    result_fields: tuple[str, ...] = ()
    id_fields: tuple[str, ...] = CALL_IDS


TYPE_KEYS = ("type", "part_kind", "kind", "block_type")
SHAPES = (
    # Anthropic's content blocks, https://docs.anthropic.com/en/api/messages
    Shape(("tool_use", "server_tool_use", "mcp_tool_use"), "", ("name",), ("input",), id_fields=("id",)),
    Shape(
        (
            "web_search_tool_result",
            "web_fetch_tool_result",
            "code_execution_tool_result",
            "bash_code_execution_tool_result",
            "text_editor_code_execution_tool_result",
            "mcp_tool_result",
        ),
        result_fields=("content",),
        id_fields=("tool_use_id",),
    ),
    # ... and Vercel's parts of the same type, https://ai-sdk.dev/docs/reference/ai-sdk-core/model-message
    Shape(
        ("tool_result", "tool-result"),
        result_fields=("content", "output", "result", "value"),
        id_fields=("tool_use_id", "toolCallId", "tool_call_id", "id"),
    ),
    Shape(("tool-error",), result_fields=("error", "output"), id_fields=("toolCallId",)),
    # OpenAI's items, https://platform.openai.com/docs/api-reference/responses; LangChain's and Vercel's parts
    Shape(
        ("function_call", "custom_tool_call", "tool_call", "tool-call", "toolCall", "function", "function.call"),
        "",
        TOOL,
        ARGUMENTS,
    ),
    Shape(("mcp_call",), "", ("name",), ("arguments",), ("output", "error"), ("id",)),
    Shape(
        (
            "function_call_output",
            "custom_tool_call_output",
            "local_shell_call_output",
            "tool_search_output",
            "function.result",
        ),
        result_fields=("output", "result", "tools"),
        id_fields=("call_id", "tool_call_id", "id"),
    ),
    Shape(
        ("local_shell_call", "tool_search_call"), "", ("type",), ("action", "arguments"), id_fields=("call_id", "id")
    ),
    # Bedrock's Converse, https://docs.aws.amazon.com/bedrock/latest/APIReference/API_runtime_ContentBlock.html
    Shape((), "toolUse", ("name",), ("input",), id_fields=("toolUseId",)),
    Shape((), "toolResult", result_fields=("content",), id_fields=("toolUseId",)),
    # Gemini's parts, https://ai.google.dev/api/caching#Part
    Shape((), "functionCall", ("name",), ("args",), id_fields=("id",)),
    Shape((), "functionResponse", result_fields=("response",), id_fields=("id",)),
    Shape((), "function_call", ("name",), ("args", "arguments"), id_fields=("id",)),
    Shape((), "function_response", result_fields=("response",), id_fields=("id",)),
    Shape((), "executableCode", ("language",), ("code",)),
    Shape((), "executable_code", ("language",), ("code",)),
    Shape((), "codeExecutionResult", result_fields=("output", "outcome")),
    Shape((), "code_execution_result", result_fields=("output", "outcome")),
    # Haystack's parts, https://docs.haystack.deepset.ai/docs/chatmessage
    Shape((), "tool_call", ("tool_name",), ("arguments",), id_fields=("id",)),
    Shape((), "tool_call_result", result_fields=("result",), id_fields=("origin.id",)),
    # Vercel's parts of the page, https://ai-sdk.dev/docs/reference/ai-sdk-core/ui-message
    Shape(("dynamic-tool",), "", ("toolName",), ("input", "args"), ("output", "result", "errorText"), ("toolCallId",)),
    Shape((), "toolInvocation", ("toolName",), ("args", "input"), ("result", "output", "errorText"), ("toolCallId",)),
    # pydantic-ai, https://ai.pydantic.dev/message-history/
    Shape(("builtin-tool-call",), "", ("tool_name",), ("args",), id_fields=("tool_call_id",)),
    Shape(("tool-return", "builtin-tool-return"), result_fields=("content",), id_fields=("tool_call_id",)),
    # OpenTelemetry's parts, https://opentelemetry.io/docs/specs/semconv/gen-ai/
    Shape(("tool_call_response",), result_fields=("response", "result", "content"), id_fields=("id",)),
)
VERCEL_TOOL_PREFIX = "tool-"
"""How types of parts begin that name their tool: `tool-get_weather`, in messages of Vercel's pages."""
SHAPES_BY_TYPE = {type_name: shape for shape in SHAPES for type_name in shape.type_names}
SHAPES_BY_KEY = {shape.wrapper_key: shape for shape in SHAPES if shape.wrapper_key}

ANY_CALL_SHAPE = Shape(tool_fields=TOOL, argument_fields=ARGUMENTS)
"""A call in a list of calls, which need not name its type."""
VERCEL_CALL_SHAPE = Shape(tool_fields=TOOL, argument_fields=ARGUMENTS, result_fields=("result", "output"))
"""A call in a list of calls of Vercel, which may hold its result."""

CALL_LISTS = ("tool_calls", "function_call", "toolInvocations", "toolCalls", "tool_call", "invalid_tool_calls")
"""Fields of a message that hold its calls: a list, one call, or either as JSON."""
RESULT_LISTS = ("observation.results", "tool_results", "toolResults", "tool_messages")
"""Fields of a message that hold results."""
TEXT_FIELDS = ("text", "text.value", "value", "content", "input_text", "output_text")
"""Fields with the words of a part."""
TEXT_TYPES = ("text", "output_text", "input_text", "user-prompt", "system-prompt", "refusal", "retry-prompt")
SKIPPED_TYPES = ("mcp_list_tools", "item_reference", "step-start", "compaction", "context_management")
"""Types of items and parts that say nothing."""
CALL_WORDS = ("tool", "function", "call", "action", "invocation")
"""Words in the names of fields, and of types, that may hold a call."""
FIELDS_WITHOUT_CALLS = ("tools", "functions", "tool_choice", "function_call_mode", "toolConfig", "available_tools")
"""Fields that have such a word in their name and hold no call."""


@dataclass(frozen=True, slots=True)
class FoundCall:
    """The fields of a call that stands in a record.

    Attributes:
        tool: The tool's name.
        arguments: The arguments as they were recorded, such as an object or its JSON.
        id: The id of the call, or None if there is none.
        result: The result, if the same object holds it.
        has_result: Whether the same object holds a result.
        status_fields: The object with the result, whose other fields may report a failure.
    """

    tool: str
    arguments: Any
    id: str | None
    result: Any = None
    has_result: bool = False
    status_fields: Any = None

    def build_found_result(self) -> "FoundResult | None":
        """Return the result that the object of the call holds too, or None if there is none."""
        if not self.has_result:
            return None
        return FoundResult(content=self.result, id=self.id, tool=self.tool, status_fields=self.status_fields)


@dataclass(frozen=True, slots=True)
class FoundResult:
    """The fields of a result that stands in a record.

    Attributes:
        content: What the tool answered.
        id: The id of the call, or None if there is none.
        tool: The tool's name, or None if there is none.
        status_fields: The object with the result, whose other fields may report a failure.
    """

    content: Any
    id: str | None = None
    tool: str | None = None
    status_fields: Any = None


class ShapedObject(NamedTuple):
    """An object that is known to hold a call or a result.

    Attributes:
        shape: The kind of object.
        fields: The object with the fields of the call or result. It is the object itself, or stands inside it.
    """

    shape: Shape
    fields: Mapping[str, Any]

    def parse_call(self) -> FoundCall | None:
        """Return the call of the object, or None if it is only a result or names no tool."""
        if not self.shape.tool_fields:
            return None
        return parse_call_of_shape(self.shape, self.fields)

    @property
    def has_json_value(self) -> bool:
        """Whether the object is a call whose fields stand as JSON in its field `value`."""
        if not self.shape.tool_fields:
            return False
        return isinstance(find_first_value(self.fields, ("value",)), str)

    def parse_result(self) -> FoundResult | None:
        """Return the result of the object, or None if it is a call."""
        is_only_result = bool(self.shape.result_fields) and not self.shape.tool_fields
        if not is_only_result:
            return None
        return parse_result_of_shape(self.shape, self.fields)


def find_shaped_object(part: Mapping[str, Any]) -> ShapedObject | None:
    """Find out which known kind of call or result an object is.

    Returns:
        The shape, with the object that has its fields, or None if the object is no known call or result.
        - `{"toolUse": {"name": ...}}`: the shape of the key toolUse, and the inner object. Keys count before types.
        - `{"type": "tool_use", "name": ...}`: the shape of that type, and the object itself.
    """
    for key, shape in SHAPES_BY_KEY.items():
        fields = part.get(key)
        if isinstance(fields, Mapping):
            return ShapedObject(shape, fields)

    type_name = find_first_value(part, TYPE_KEYS)
    if not isinstance(type_name, str):
        return None
    return _find_shaped_object_by_type(type_name, part)


def _find_shaped_object_by_type(type_name: str, part: Mapping[str, Any]) -> ShapedObject | None:
    """Find the shape of an object by its type.

    Vercel's `{"type": "tool-search", "toolCallId": ...}` names the tool in its type. It gets the name as a field too.

    Returns:
        The shape with the object, or None if the type is unknown.
    """
    if type_name in SHAPES_BY_TYPE:
        return ShapedObject(SHAPES_BY_TYPE[type_name], part)

    if type_name.startswith(VERCEL_TOOL_PREFIX) and "toolCallId" in part:
        fields = {**part, "toolName": type_name.removeprefix(VERCEL_TOOL_PREFIX)}
        return ShapedObject(SHAPES_BY_TYPE["dynamic-tool"], fields)
    return None


def parse_call_of_shape(shape: Shape, fields: Mapping[str, Any]) -> FoundCall | None:
    """Parse the call in the fields of an object, with its result if the object holds one.

    Args:
        shape: Names the fields that may hold the tool, the arguments, the result and the id. Of several fields, the
            first with a value counts.
        fields: The object.

    Returns:
        The call, or None if the object names no tool.
    """
    tool = find_first_value(fields, shape.tool_fields)
    if not isinstance(tool, str) or not tool:
        return None

    result = find_first_value(fields, shape.result_fields)  # None in an object that is only a call
    return FoundCall(
        tool=tool,
        arguments=find_first_value(fields, shape.argument_fields),
        id=find_id(fields, shape.id_fields),
        result=result,
        has_result=result is not None,
        status_fields=fields if result is not None else None,
    )


def parse_result_of_shape(shape: Shape, fields: Mapping[str, Any]) -> FoundResult:
    """Parse the result in the fields of an object.

    Args:
        shape: Names the fields that may hold the content and the id. Of several fields, the first with a value counts.
        fields: The object.

    Returns:
        The result. Its content is None if the fields hold none.
    """
    tool = find_first_value(fields, ("name", "tool_name", "toolName"))
    return FoundResult(
        content=find_first_value(fields, shape.result_fields),
        id=find_id(fields, shape.id_fields),
        tool=tool if isinstance(tool, str) else None,
        status_fields=fields,
    )


def parse_listed_call(item: Any) -> FoundCall | None:
    """Parse an item of a list of calls, whatever names its fields have.

    Examples:
        - `{"type": "function", "function": {"name": ..., "arguments": ...}}`
        - `{"toolCallId": ..., "toolName": ..., "args": ..., "result": ...}` of Vercel, which holds the result too
        - `{"tool_call": {...}}` of OpenInference

    Returns:
        The call, or None if the item names no tool.
    """
    if not isinstance(item, Mapping):
        return None

    inner_item = item.get("tool_call")
    fields = inner_item if isinstance(inner_item, Mapping) else item

    shaped_object = find_shaped_object(fields)
    call = None if shaped_object is None else shaped_object.parse_call()
    if call is not None:
        return call

    # An item of no known type: its tool and arguments may stand in any of the usual fields.
    shape = VERCEL_CALL_SHAPE if "toolCallId" in fields else ANY_CALL_SHAPE
    return parse_call_of_shape(shape, fields)


def find_id(fields: Any, id_fields: tuple[str, ...]) -> str | None:
    """Find an id in the fields of an object.

    Args:
        fields: The object.
        id_fields: The fields that may hold the id. The first with a value counts.

    Returns:
        The id as text, or None if there is none. The id may also be a number, or the only item of a list.
    """
    value = find_first_value(fields, id_fields)
    if isinstance(value, list):
        value = value[0] if len(value) == 1 else None

    if isinstance(value, str) and value:
        return value
    is_number = isinstance(value, int) and not isinstance(value, bool)
    return str(value) if is_number else None


def may_hold_call(field_or_type_name: str) -> bool:
    """Return whether a type or a field of this name may hold a call or a result, since a word of it sounds so."""
    if field_or_type_name in FIELDS_WITHOUT_CALLS:
        return False
    lowercase_name = field_or_type_name.lower()
    return any(word in lowercase_name for word in CALL_WORDS)
