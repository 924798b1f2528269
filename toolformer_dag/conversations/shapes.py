"""In which fields of an object a call, a result, words or thinking stand: what models' interfaces and logs call them.

A new name for a known thing is a word more in one of these tuples; a thing of another build is a `Shape` more.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from toolformer_dag.conversations.plain_values import first_of

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
"""Where a call has its id; `call_id` comes first, since an item of OpenAI's Responses has both."""
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
"""Where a result has the id of the call that it answers."""
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
"""Where a result has what the tool answered."""


@dataclass(frozen=True, slots=True)
class Shape:
    """An object that holds a call, a result, or both, and the fields in which they stand (paths of `first_of`).

    - `types`: what its type is, by any name of TYPE_KEYS; none where the key that it stands under tells what it is
    - `under`: the key whose value holds the fields; "" for the object itself
    - `tool`, `arguments`: of a call; none where it is only a result
    - `result`: of a result; none where it is only a call
    - `ids`: the call's own id, and the id of the call that a result answers
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
"""How the type of a part of Vercel's pages begins whose tool has a name of its own: `tool-get_weather`."""
CALL_TYPES = {kind: shape for shape in SHAPES for kind in shape.types}
CALL_KEYS = {shape.under: shape for shape in SHAPES if shape.under}

CALL_LISTS = ("tool_calls", "function_call", "toolInvocations", "toolCalls", "tool_call", "invalid_tool_calls")
"""The fields of a message that hold its calls: a list, one call, or either as JSON."""
RESULT_LISTS = ("observation.results", "tool_results", "toolResults", "tool_messages")
"""The fields of a message that hold results beside its calls."""
WORDS = ("text", "text.value", "value", "content", "input_text", "output_text")
"""Where a part has its words."""
TEXT_TYPES = ("text", "output_text", "input_text", "user-prompt", "system-prompt", "refusal", "retry-prompt")
THINKING_TYPES = (
    "thinking",
    "redacted_thinking",
    "reasoning",
    "reasoning_content",
    "thought",
    "think",
    "reasoning_text",
    "summary_text",
)
THINKING_KEYS = ("reasoningContent", "thought", "thinking")
"""Fields of a part that make it thinking: Bedrock's and Gemini's."""
SILENT_TYPES = ("mcp_list_tools", "item_reference", "step-start", "compaction", "context_management")
"""Types of items and parts that say nothing."""
CALL_WORDS = ("tool", "function", "call", "action", "invocation")
"""In the type or in a field of what may hold a call."""
PASSIVE_FIELDS = ("tools", "functions", "tool_choice", "function_call_mode", "toolConfig", "available_tools")
"""Fields with such a word that hold no call."""


@dataclass(frozen=True, slots=True)
class FoundCall:
    """The fields of a call in an object: the tool, the arguments as they stand there, the id, the result beside them.

    - `has_result`: whether `result` was there; `result` alone cannot say it, since it may be null
    - `beside`: the object, whose fields may say that the call failed
    """

    tool: str
    arguments: Any
    id: str | None
    result: Any = None
    has_result: bool = False
    beside: Any = None


@dataclass(frozen=True, slots=True)
class FoundResult:
    """The fields of a result.

    - `content`: what the tool answered
    - `id`: of the call
    - `tool`: its name
    - `beside`: the object with these fields, others of which may say that the call failed
    """

    content: Any
    id: str | None = None
    tool: str | None = None
    beside: Any = None


def shape_of(part: Mapping[str, Any]) -> tuple[Shape, Mapping[str, Any]] | None:
    """Return the shape of an object, which says where a call or a result has its fields, and the object with them.

    - `{"toolUse": {"name": ...}}`: the shape of the key toolUse, and the object there
    - `{"type": "tool_use", "name": ...}`: the shape of that type, and the object itself
    - `{"type": "tool-search", "toolCallId": ...}` of Vercel: the object with the tool's name as a field

    None where it is of no shape.
    """
    for key, shape in CALL_KEYS.items():
        fields = part.get(key)
        if isinstance(fields, Mapping):
            return shape, fields
    kind = first_of(part, TYPE_KEYS)
    if not isinstance(kind, str):
        return None
    if kind in CALL_TYPES:
        return CALL_TYPES[kind], part
    if kind.startswith(VERCEL_TOOL) and "toolCallId" in part:
        return CALL_TYPES["dynamic-tool"], {**part, "toolName": kind.removeprefix(VERCEL_TOOL)}
    return None


def found_call(shape: Shape, fields: Mapping[str, Any]) -> FoundCall | None:
    """Return the call of an object; None where it names no tool."""
    tool = first_of(fields, shape.tool)
    if not isinstance(tool, str) or not tool:
        return None
    result = first_of(fields, shape.result)
    return FoundCall(
        tool=tool,
        arguments=first_of(fields, shape.arguments),
        id=id_in(fields, shape.ids),
        result=result,
        has_result=result is not None,
        beside=fields if result is not None else None,
    )


def found_result(shape: Shape, fields: Mapping[str, Any]) -> FoundResult:
    """Return the result of an object; its content is None where it has none."""
    tool = first_of(fields, ("name", "tool_name", "toolName"))
    return FoundResult(
        content=first_of(fields, shape.result),
        id=id_in(fields, shape.ids),
        tool=tool if isinstance(tool, str) else None,
        beside=fields,
    )


def listed_call(fields: Any) -> FoundCall | None:
    """Return a call of a list of calls, in whatever fields it has them; None where it names no tool.

    As examples, `{"type": "function", "function": {"name": ..., "arguments": ...}}` by its fields, `{"toolCallId": ...,
    "toolName": ..., "args": ..., "result": ...}` of Vercel, which has the result beside the call, and
    `{"tool_call": {...}}` of OpenInference.
    """
    if not isinstance(fields, Mapping):
        return None
    if isinstance(fields.get("tool_call"), Mapping):  # OpenInference
        fields = fields["tool_call"]
    shaped = shape_of(fields)
    if shaped is not None:
        shape, fields_of_shape = shaped
        found = found_call(shape, fields_of_shape) if shape.tool else None
        if found is not None:
            return found
    is_of_vercel = "toolCallId" in fields
    any_call = Shape(tool=TOOL, arguments=ARGUMENTS, result=("result", "output") if is_of_vercel else ())
    return found_call(any_call, fields)


def id_in(fields: Any, keys: tuple[str, ...]) -> str | None:
    """Return the id at the first of these keys; of a list with one id that one. None where there is none."""
    value = first_of(fields, keys)
    if isinstance(value, list):
        value = value[0] if len(value) == 1 else None
    if isinstance(value, str) and value:
        return value
    return str(value) if isinstance(value, int) and not isinstance(value, bool) else None


def may_hold_call(name: str) -> bool:
    """Return whether a type or a field of this name may hold a call or its result."""
    lowered = name.lower()
    return name not in PASSIVE_FIELDS and any(word in lowered for word in CALL_WORDS)
