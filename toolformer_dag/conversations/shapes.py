"""Name the fields in which calls, results and words stand, in the words of model interfaces and logs.

To read another field name, add it to one of these tuples; to read another kind of object, add a `Shape`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from toolformer_dag.conversations.plain_values import find_value

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
RESULT = (
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

    Fields are paths of `find_value`, in the order in which they are looked for.

    - `types`: the types of such objects, which stand in one of TYPE_KEYS; empty where `under` tells them
    - `under`: the key whose value holds the fields; "" for the object itself
    - `tool`, `arguments`: fields of a call; empty where the object is only a result
    - `result`: fields with a result; empty where the object is only a call
    - `ids`: fields with the id of the call, or of the call that a result answers
    """

    types: tuple[str, ...] = ()
    under: str = ""
    tool: tuple[str, ...] = ()
    arguments: tuple[str, ...] = ()
    result: tuple[str, ...] = ()
    ids: tuple[str, ...] = CALL_IDS


TYPE_KEYS = ("type", "part_kind", "kind", "block_type")
SHAPES = (
    # Anthropic's content blocks, https://docs.anthropic.com/en/api/messages
    Shape(("tool_use", "server_tool_use", "mcp_tool_use"), "", ("name",), ("input",), ids=("id",)),
    Shape(
        (
            "web_search_tool_result",
            "web_fetch_tool_result",
            "code_execution_tool_result",
            "bash_code_execution_tool_result",
            "text_editor_code_execution_tool_result",
            "mcp_tool_result",
        ),
        result=("content",),
        ids=("tool_use_id",),
    ),
    # ... and Vercel's parts of the same type, https://ai-sdk.dev/docs/reference/ai-sdk-core/model-message
    Shape(
        ("tool_result", "tool-result"),
        result=("content", "output", "result", "value"),
        ids=("tool_use_id", "toolCallId", "tool_call_id", "id"),
    ),
    Shape(("tool-error",), result=("error", "output"), ids=("toolCallId",)),
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
        result=("output", "result", "tools"),
        ids=("call_id", "tool_call_id", "id"),
    ),
    Shape(("local_shell_call", "tool_search_call"), "", ("type",), ("action", "arguments"), ids=("call_id", "id")),
    # Bedrock's Converse, https://docs.aws.amazon.com/bedrock/latest/APIReference/API_runtime_ContentBlock.html
    Shape((), "toolUse", ("name",), ("input",), ids=("toolUseId",)),
    Shape((), "toolResult", result=("content",), ids=("toolUseId",)),
    # Gemini's parts, https://ai.google.dev/api/caching#Part
    Shape((), "functionCall", ("name",), ("args",), ids=("id",)),
    Shape((), "functionResponse", result=("response",), ids=("id",)),
    Shape((), "function_call", ("name",), ("args", "arguments"), ids=("id",)),
    Shape((), "function_response", result=("response",), ids=("id",)),
    Shape((), "executableCode", ("language",), ("code",)),
    Shape((), "executable_code", ("language",), ("code",)),
    Shape((), "codeExecutionResult", result=("output", "outcome")),
    Shape((), "code_execution_result", result=("output", "outcome")),
    # Haystack's parts, https://docs.haystack.deepset.ai/docs/chatmessage
    Shape((), "tool_call", ("tool_name",), ("arguments",), ids=("id",)),
    Shape((), "tool_call_result", result=("result",), ids=("origin.id",)),
    # Vercel's parts of the page, https://ai-sdk.dev/docs/reference/ai-sdk-core/ui-message
    Shape(("dynamic-tool",), "", ("toolName",), ("input", "args"), ("output", "result", "errorText"), ("toolCallId",)),
    Shape((), "toolInvocation", ("toolName",), ("args", "input"), ("result", "output", "errorText"), ("toolCallId",)),
    # pydantic-ai, https://ai.pydantic.dev/message-history/
    Shape(("builtin-tool-call",), "", ("tool_name",), ("args",), ids=("tool_call_id",)),
    Shape(("tool-return", "builtin-tool-return"), result=("content",), ids=("tool_call_id",)),
    # OpenTelemetry's parts, https://opentelemetry.io/docs/specs/semconv/gen-ai/
    Shape(("tool_call_response",), result=("response", "result", "content"), ids=("id",)),
)
VERCEL_TOOL = "tool-"
"""How types of parts begin that name their tool: `tool-get_weather`, in messages of Vercel's pages."""
CALL_TYPES = {kind: shape for shape in SHAPES for kind in shape.types}
CALL_KEYS = {shape.under: shape for shape in SHAPES if shape.under}

ANY_CALL = Shape(tool=TOOL, arguments=ARGUMENTS)
"""A call in a list of calls, which need not name its type."""
VERCEL_CALL = Shape(tool=TOOL, arguments=ARGUMENTS, result=("result", "output"))
"""A call in a list of calls of Vercel, which may hold its result."""

CALL_LISTS = ("tool_calls", "function_call", "toolInvocations", "toolCalls", "tool_call", "invalid_tool_calls")
"""Fields of a message that hold its calls: a list, one call, or either as JSON."""
RESULT_LISTS = ("observation.results", "tool_results", "toolResults", "tool_messages")
"""Fields of a message that hold results."""
WORDS = ("text", "text.value", "value", "content", "input_text", "output_text")
"""Fields with the words of a part."""
TEXT_TYPES = ("text", "output_text", "input_text", "user-prompt", "system-prompt", "refusal", "retry-prompt")
SILENT_TYPES = ("mcp_list_tools", "item_reference", "step-start", "compaction", "context_management")
"""Types of items and parts that say nothing."""
CALL_WORDS = ("tool", "function", "call", "action", "invocation")
"""Words in the types and names of fields that may hold a call."""
PASSIVE_FIELDS = ("tools", "functions", "tool_choice", "function_call_mode", "toolConfig", "available_tools")
"""Fields that have such a word in their name and hold no call."""


@dataclass(frozen=True, slots=True)
class FoundCall:
    """The fields of a call that stands in a record.

    - `tool`: the tool's name
    - `arguments`: the arguments as they were recorded, such as an object or its JSON
    - `id`: the id of the call; None without one
    - `result`: the result, where the same object holds it
    - `has_result`: whether the same object holds a result
    - `status_fields`: the object with the result, whose other fields may report a failure
    """

    tool: str
    arguments: Any
    id: str | None
    result: Any = None
    has_result: bool = False
    status_fields: Any = None

    def get_held_result(self) -> "FoundResult | None":
        """Return the result that the object of the call holds too; None without one."""
        if not self.has_result:
            return None
        return FoundResult(content=self.result, id=self.id, tool=self.tool, status_fields=self.status_fields)


@dataclass(frozen=True, slots=True)
class FoundResult:
    """The fields of a result that stands in a record.

    - `content`: what the tool answered
    - `id`: the id of the call; None without one
    - `tool`: the tool's name; None without one
    - `status_fields`: the object with the result, whose other fields may report a failure
    """

    content: Any
    id: str | None = None
    tool: str | None = None
    status_fields: Any = None


class ShapedObject(NamedTuple):
    """An object of a known shape: the shape, and the object that holds the fields."""

    shape: Shape
    fields: Mapping[str, Any]

    def call(self) -> FoundCall | None:
        """Return the call of the object; None where it is only a result, or names no tool."""
        return parse_call_of_shape(self.shape, self.fields) if self.shape.tool else None

    @property
    def holds_json(self) -> bool:
        """Whether the object is a call whose fields stand as JSON in its field `value`."""
        return bool(self.shape.tool) and isinstance(find_value(self.fields, ("value",)), str)

    def result(self) -> FoundResult | None:
        """Return the result of the object; None where it is a call."""
        is_only_result = bool(self.shape.result) and not self.shape.tool
        return parse_result_of_shape(self.shape, self.fields) if is_only_result else None


def find_shape(part: Mapping[str, Any]) -> ShapedObject | None:
    """Find out which known kind of call or result an object is.

    Returns:
        The shape, with the object that has its fields, or None if the object is no known call or result.
        - `{"toolUse": {"name": ...}}`: the shape of the key toolUse, and the inner object. Keys count before types.
        - `{"type": "tool_use", "name": ...}`: the shape of that type, and the object itself.
    """
    for key, shape in CALL_KEYS.items():
        fields = part.get(key)
        if isinstance(fields, Mapping):
            return ShapedObject(shape, fields)

    kind = find_value(part, TYPE_KEYS)
    return _find_shape_of_type(kind, part) if isinstance(kind, str) else None


def _find_shape_of_type(kind: str, part: Mapping[str, Any]) -> ShapedObject | None:
    """Find the shape of an object by its type.

    Vercel's `{"type": "tool-search", "toolCallId": ...}` names the tool in its type. It gets the name as a field too.

    Returns:
        The shape with the object, or None if the type is unknown.
    """
    if kind in CALL_TYPES:
        return ShapedObject(CALL_TYPES[kind], part)

    if kind.startswith(VERCEL_TOOL) and "toolCallId" in part:
        fields = {**part, "toolName": kind.removeprefix(VERCEL_TOOL)}
        return ShapedObject(CALL_TYPES["dynamic-tool"], fields)
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
    tool = find_value(fields, shape.tool)
    if not isinstance(tool, str) or not tool:
        return None

    result = find_value(fields, shape.result)  # None in an object that is only a call
    return FoundCall(
        tool=tool,
        arguments=find_value(fields, shape.arguments),
        id=find_id(fields, shape.ids),
        result=result,
        has_result=result is not None,
        status_fields=fields if result is not None else None,
    )


def parse_result_of_shape(shape: Shape, fields: Mapping[str, Any]) -> FoundResult:
    """Parse the result in the fields of an object. Its content is None if the fields hold none."""
    tool = find_value(fields, ("name", "tool_name", "toolName"))
    return FoundResult(
        content=find_value(fields, shape.result),
        id=find_id(fields, shape.ids),
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
    shaped = find_shape(fields)
    call = None if shaped is None else shaped.call()
    if call is not None:
        return call

    # An item of no known type: its tool and arguments may stand in any of the usual fields.
    shape = VERCEL_CALL if "toolCallId" in fields else ANY_CALL
    return parse_call_of_shape(shape, fields)


def find_id(fields: Any, keys: tuple[str, ...]) -> str | None:
    """Find an id in the fields of an object.

    Args:
        fields: The object.
        keys: The fields that may hold the id. The first with a value counts.

    Returns:
        The id as text, or None if there is none. The id may also be a number, or the only item of a list.
    """
    value = find_value(fields, keys)
    if isinstance(value, list):
        value = value[0] if len(value) == 1 else None

    if isinstance(value, str) and value:
        return value
    is_number = isinstance(value, int) and not isinstance(value, bool)
    return str(value) if is_number else None


def may_hold_call(name: str) -> bool:
    """Return whether a type or a field of this name may hold a call or a result."""
    lowered = name.lower()
    return name not in PASSIVE_FIELDS and any(word in lowered for word in CALL_WORDS)
