"""Prompts P(x) (appendix A.2): check them, or write one from a tool's description and a few examples."""

import json
import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple

from toolformer_dag.files import UserError
from toolformer_dag.texts.arguments import BadArguments, Schema, list_argument_names, parse_arguments
from toolformer_dag.texts.calls import Call, MalformedCall, parse_call, remove_calls, to_single_line
from toolformer_dag.texts.input_ends import find_text_after_input
from toolformer_dag.tools.tool import Tool

MAX_MEANING_CHARACTERS = 100
"""The most characters with which a prompt describes an argument; a longer default or enum value is left out."""
MAX_ENUM_VALUES = 8
"""The most values of an enum that a prompt lists."""
SAMPLE_VALUES_BY_TYPE: Mapping[str, object] = {"integer": 1, "number": 1, "boolean": True, "array": [], "object": {}}
"""The value that stands for each JSON type in a sample call; a string is `...`."""
MAX_EXCERPT_CHARACTERS = 40
"""Characters of an example that a warning shows, from where Input and Output begin to differ."""
_log = logging.getLogger(__name__)
# An opening bracket and a name right before a parenthesis, such as `[Calculator(`; only the bracket is matched.
_CALL_START_PATTERN = re.compile(r"\[(?=[^\s\[\]()]+\()")


class ToolError(UserError):
    """A tool that cannot be loaded. The message names the section or the prompt, the reason and the remedy."""


class PromptExample(NamedTuple):
    """An example of a prompt P(x).

    Attributes:
        input_text: A text.
        output_text: The same text with calls.
    """

    input_text: str
    output_text: str


def build_prompt_from_examples(tool: Tool, examples: tuple[str, ...]) -> str:
    """Write the prompt P(x) of a tool (appendix A.2) from examples.

    It consists of an instruction and two lines per example. `It is [Weather(city="Rome")] sunny.` becomes
    `Input: It is sunny.` and `Output: It is [Weather(city="Rome")] sunny.`

    Args:
        tool: The tool.
        examples: Texts with calls.
    """
    lines = [_format_instruction(tool)]

    for example in examples:
        output_text = " ".join(example.split())  # on one line
        input_text = _remove_tool_calls(output_text, tool.name)
        lines.append(f"Input: {input_text}")
        lines.append(f"Output: {output_text}")

    return "\n".join(lines) + "\n"


def _format_instruction(tool: Tool) -> str:
    """Write the instruction of a prompt: what the tool does, the form of its calls, and what its arguments mean."""
    schema = tool.arguments_schema
    argument_names = ["input"] if schema is None else list_argument_names(schema)

    call_form = f"[{tool.name}({', '.join(argument_names)})]"
    return (
        f"Your task is to add calls to a {tool.name} API to a piece of text.{_format_description(tool)} The calls "
        f'should help you get information required to complete the text. You can call the API by writing "{call_form}"'
        f"{_describe_arguments(schema or {})}. Here are some examples of API calls:"
    )


def _format_description(tool: Tool) -> str:
    """Return a space and what the tool does, as a sentence with its full stop, or "" without a description."""
    summary = tool.summary.rstrip()
    if not summary:
        return ""

    has_full_stop = summary[-1] in ".!?"
    return f" {summary}" if has_full_stop else f" {summary}."


def _remove_tool_calls(text_with_calls: str, tool_name: str) -> str:
    """Return a text without its calls to a tool."""
    text_after_space = f" {text_with_calls}"  # a call that begins the text is only found after a space
    return remove_calls(text_after_space, {tool_name}).strip()


def build_missing_examples_error(tool: Tool) -> ToolError:
    """Build the error for a tool of an MCP server whose section has no `examples`.

    Its message ends with lines that the user can paste into toolformer.toml.
    """
    sample_arguments = _format_sample_arguments(tool.arguments_schema or {})
    example = f"... [{tool.name}({sample_arguments})] ..."

    # TOML's strings in single quotes have no escapes, so an example with a single quote is written as in JSON.
    quoted_example = json.dumps(example, ensure_ascii=False) if "'" in example else f"'{example}'"

    return ToolError(
        f"[tools.{tool.key}] (server {tool.server_name}) has no examples: "
        "paste these lines (without the header where it "
        "stands already), and write sentences of your texts, two to five, in place of the dots:\n"
        f"[tools.{tool.key}]\nexamples = [\n    {quoted_example},\n    {quoted_example},\n]"
    )


def _format_sample_arguments(schema: Schema) -> str:
    """Write sample arguments for a call, such as `city="...", days=1`, with only the required arguments.

    Args:
        schema: The JSON schema of the tool's arguments.
    """
    argument_schemas = schema.get("properties") or {}
    required_names = schema.get("required") or ()

    arguments = []
    for name in list_argument_names(schema):
        if name in required_names:
            sample_value = _choose_sample_value(argument_schemas.get(name))
            arguments.append(f"{name}={json.dumps(sample_value, ensure_ascii=False)}")

    return ", ".join(arguments)


def _choose_sample_value(argument_schema: Any) -> object:
    """Choose the value of an argument in a sample call, such as 1 for an integer or "..." for a text.

    If the argument has an enum, a list of its possible values, this is the first of them.

    Args:
        argument_schema: The JSON schema of the argument, or anything else if the server declares none.
    """
    if not isinstance(argument_schema, Mapping):
        return "..."

    for first_value in argument_schema.get("enum") or ():
        return first_value

    type_name = str(argument_schema.get("type"))
    return SAMPLE_VALUES_BY_TYPE.get(type_name, "...")


def _describe_arguments(schema: Schema) -> str:
    """Say what the arguments of a tool mean: ` where "city" is the city's name, "days" is the number of days`.

    Args:
        schema: The JSON schema of the arguments.

    Returns:
        The text with a space before it, or "" if the schema describes no argument.
    """
    meanings = []
    for name in list_argument_names(schema):
        argument_schema = schema.get("properties", {}).get(name)
        meaning = _describe_argument(argument_schema) if isinstance(argument_schema, Mapping) else ""
        if meaning:
            meanings.append(f'"{name}" is {meaning}')

    if not meanings:
        return ""
    return f" where {', '.join(meanings)}"


def _describe_argument(argument_schema: Mapping[str, Any]) -> str:
    """Describe an argument of a tool in a few words: `the unit: "C" or "F"` or `days from today (1 if left out)`.

    Args:
        argument_schema: The JSON schema of the argument.

    Returns:
        The description, which is empty if the schema says nothing about the argument.
    """
    description = _shorten_description(argument_schema)

    enum_values = _format_enum_values(argument_schema)
    if enum_values is not None:
        return f"{description}: {enum_values}" if description else enum_values

    default = json.dumps(argument_schema.get("default"), ensure_ascii=False)
    if "default" in argument_schema and len(default) <= MAX_MEANING_CHARACTERS:
        return f"{description} ({default} if left out)".strip()

    return description


def _shorten_description(argument_schema: Mapping[str, Any]) -> str:
    """Return the description or title in an argument's JSON schema, on one line and without a full stop.

    It has at most MAX_MEANING_CHARACTERS, and is empty if there is neither.
    """
    description = argument_schema.get("description") or argument_schema.get("title") or ""
    line = to_single_line(str(description))
    return line.rstrip(". ")[:MAX_MEANING_CHARACTERS]


def _format_enum_values(argument_schema: Mapping[str, Any]) -> str | None:
    """Write the possible values that an argument's JSON schema lists (its enum), such as `"C" or "F"`.

    Returns:
        The first MAX_ENUM_VALUES values, without those of more than MAX_MEANING_CHARACTERS. If none of them is short
        enough, "". Without an enum, None.
    """
    first_values = argument_schema.get("enum", ())[:MAX_ENUM_VALUES]
    if not first_values:
        return None

    json_values = [json.dumps(value, ensure_ascii=False) for value in first_values]
    short_values = [value for value in json_values if len(value) <= MAX_MEANING_CHARACTERS]
    return " or ".join(short_values)


def check_prompt(
    prompt_text: str,
    tool_name: str,
    prompt_source: object,
    *,
    is_user_written: bool = True,
    schema: Schema | None = None,
) -> list[PromptExample]:
    """Check a tool's prompt, which consists of an instruction and examples (`Input: ...`, `Output: ...`).

    Args:
        prompt_text: The prompt.
        tool_name: The tool's name in calls.
        prompt_source: Where the prompt is from, for messages.
        is_user_written: Whether the user wrote it. If so, there is a warning for each Output that differs from its
            Input by more than calls.
        schema: The schema of the tool's named arguments, which all calls must fit. None if calls take one text.

    Returns:
        The examples.

    Raises:
        ToolError: The instruction, an example or an Output is missing, or no example has a call, or a call is malformed
            or is to another tool.
    """
    examples = []
    example_blocks = _split_into_example_blocks(prompt_text, prompt_source)
    for number, block in enumerate(example_blocks, 1):
        example_label = f"{prompt_source}: example {number}"
        example = _parse_example(block, example_label)
        _check_calls(example.output_text, tool_name, example_label, schema)
        examples.append(example)

    if is_user_written:  # no warning of the paper's own examples, two of which differ
        _warn_of_changed_texts(examples, tool_name, prompt_source)

    has_call = any(_CALL_START_PATTERN.search(example.output_text) for example in examples)
    if not has_call:
        raise ToolError(f"{prompt_source}: no example holds a call; add calls as [{tool_name}(input)]")

    return examples


def _warn_of_changed_texts(examples: Sequence[PromptExample], tool_name: str, prompt_source: object) -> None:
    """Log a warning for each example whose Output, without its calls, is not its Input."""
    for number, example in enumerate(examples, 1):
        output_text = _remove_tool_calls(example.output_text, tool_name)
        _warn_of_changed_text(example.input_text, output_text, f"{prompt_source}: example {number}")


def _split_into_example_blocks(prompt_text: str, prompt_source: object) -> list[str]:
    """Split a prompt into the blocks that follow each `Input:`, one for each example.

    Example:
        "Add calls.\\nInput: A\\nOutput: B\\nInput: C\\nOutput: D" gives [" A\\nOutput: B\\n", " C\\nOutput: D"].

    Args:
        prompt_text: The prompt.
        prompt_source: Where the prompt is from, for messages.

    Raises:
        ToolError: There is no instruction before the first example, or no example.
    """
    instruction, *blocks = re.split(r"^Input:", prompt_text, flags=re.MULTILINE)
    if not instruction.strip():
        raise ToolError(
            f"{prompt_source}: no instruction before the first 'Input:' line; explain what the calls are for"
        )

    if not blocks:
        raise ToolError(f"{prompt_source}: no example; add a few pairs of lines 'Input: ...' and 'Output: ...'")

    return blocks


def _parse_example(example_block: str, example_label: str) -> PromptExample:
    """Parse an example from what follows its `Input:`.

    Args:
        example_block: The text, a line that begins with `Output:`, and the text with calls.
        example_label: Names the example in messages.

    Raises:
        ToolError: There is not exactly one `Output:`, or a text is empty.
    """
    texts = [part.strip() for part in re.split(r"^Output:", example_block, flags=re.MULTILINE)]
    if len(texts) != 2 or not all(texts):
        raise ToolError(f"{example_label}: write one 'Input: text' line and one 'Output: text' line")

    input_text, output_text = texts
    return PromptExample(input_text, output_text)


def _check_calls(example_output: str, tool_name: str, example_label: str, schema: Schema | None) -> None:
    """Check that every call in an example is well-formed, is to the tool `tool_name` and fits its schema.

    Args:
        example_output: The example's text with calls.
        tool_name: The tool's name.
        example_label: Names the example in messages.
        schema: The schema of the arguments, or None if calls take one text.

    Raises:
        ToolError: A call is wrong.
    """
    for call_body in _iter_call_bodies(example_output):
        call = _parse_example_call(call_body, tool_name, example_label)
        if schema is not None:
            call_label = f"{example_label}: [{call_body}]"
            _check_arguments(call.input, schema, call_label)


def _iter_call_bodies(text_with_calls: str) -> Iterator[str]:
    """Yield what each call of a text has between its brackets: `Weather(city="Rome")` of `[Weather(city="Rome")]`.

    If a call has no closing bracket, this is the whole text after its opening bracket.
    """
    for opening_bracket in _CALL_START_PATTERN.finditer(text_with_calls):
        body_start = opening_bracket.end()
        body_end = find_text_after_input("]", text_with_calls, body_start)
        if body_end < 0:  # there is no closing bracket
            body_end = len(text_with_calls)
        yield text_with_calls[body_start:body_end]


def _parse_example_call(call_body: str, tool_name: str, example_label: str) -> Call:
    """Parse a call from the text between its brackets, such as `Weather(city="Rome")`.

    Args:
        call_body: This text.
        tool_name: The name of the tool that the call must be to.
        example_label: Names the example in messages.

    Raises:
        ToolError: The text is not a call, or the call is to another tool.
    """
    try:
        call = parse_call(call_body)
    except MalformedCall as error:
        raise ToolError(
            f"{example_label}: [{call_body}] is not a call ({error}); write it as [{tool_name}(input)]"
        ) from error

    if call.tool != tool_name:
        raise ToolError(
            f"{example_label}: [{call_body}] calls {call.tool!r}, but this tool's name is {tool_name!r}; "
            "rename the call"
        )

    return call


def _check_arguments(call_input: str, schema: Schema, call_label: str) -> None:
    """Check that the arguments of a call fit the schema of its tool.

    Args:
        call_input: The text between the parentheses of the call, such as `city="Rome", days=3`.
        schema: The JSON schema of the arguments.
        call_label: Names the example and the call in messages.

    Raises:
        ToolError: The arguments cannot be parsed, or do not fit.
    """
    try:
        parse_arguments(call_input, schema)
    except BadArguments as error:
        names = ", ".join(list_argument_names(schema))
        raise ToolError(f"{call_label}: {error.reason}; write {names} as name=value, with JSON values") from error


@cache  # so that each example is warned of once per process
def _warn_of_changed_text(input_text: str, output_text: str, example_label: str) -> None:
    """Log a warning if an example of a prompt changes its text instead of only adding calls.

    An example has the lines `Input: It is 17.` and `Output: It is [Weather()] 17.` Without its calls, the Output must
    equal the Input.

    Args:
        input_text: The Input.
        output_text: The Output without its calls.
        example_label: Names the example in the warning.
    """
    if output_text == input_text:
        return

    start = _find_difference_position(output_text, input_text)
    end = start + MAX_EXCERPT_CHARACTERS
    _log.warning(
        "%s: without its calls the Output reads %r where the Input reads %r, which teaches the model to change "
        "texts; make both equal, with a single space before each call",
        example_label,
        output_text[start:end],
        input_text[start:end],
    )


def _find_difference_position(first_text: str, second_text: str) -> int:
    """Return the index of the first character in which two texts differ.

    If one of them begins with the other, this is the length of the shorter text.
    """
    shorter_length = min(len(first_text), len(second_text))
    for position in range(shorter_length):
        if first_text[position] != second_text[position]:
            return position
    return shorter_length
