"""Prompts P(x) (appendix A.2): check them, or write one from a tool's description and a few examples."""

import json
import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple

from toolformer_dag.files import UserError
from toolformer_dag.texts.arguments import BadArguments, Schema, list_argument_names, parse_arguments
from toolformer_dag.texts.calls import Call, MalformedCall, one_line, parse_call, take_out
from toolformer_dag.texts.input_ends import find_behind_input
from toolformer_dag.tools.tool import Tool

LONGEST_MEANING = 100
"""The most characters with which a prompt describes an argument; a longer default or enum value is left out."""
MOST_VALUES = 8
"""The most values of an enum that a prompt lists."""
SAMPLE_VALUES: Mapping[str, object] = {"integer": 1, "number": 1, "boolean": True, "array": [], "object": {}}
"""The value that stands for each JSON type in a sample call; a string is `...`."""
EXCERPT_CHARACTERS = 40
"""Characters of an example that a warning shows, from where Input and Output begin to differ."""
_log = logging.getLogger(__name__)
# An opening bracket and a name right before a parenthesis, such as `[Calculator(`; only the bracket is matched.
_CALL_START = re.compile(r"\[(?=[^\s\[\]()]+\()")


class ToolError(UserError):
    """A tool that cannot be loaded. The message names the section or the prompt, the reason and the remedy."""


class PromptExample(NamedTuple):
    """An example of a prompt P(x): a text, and the same text with calls."""

    input: str
    output: str


def build_written_prompt(tool: Tool, examples: tuple[str, ...]) -> str:
    """Write the prompt P(x) of a tool (appendix A.2) from examples.

    It consists of an instruction and two lines per example. `It is [Weather(city="Rome")] sunny.` becomes
    `Input: It is sunny.` and `Output: It is [Weather(city="Rome")] sunny.`

    Args:
        examples: Texts with calls.
    """
    lines = [_format_instruction(tool)]

    for example in examples:
        output = " ".join(example.split())
        lines.append(f"Input: {_without_calls(output, tool.name)}")
        lines.append(f"Output: {output}")

    return "\n".join(lines) + "\n"


def _format_instruction(tool: Tool) -> str:
    """Return the first line of a written prompt: what the tool does, the form of its calls, and its arguments."""
    arguments = "input" if tool.schema is None else ", ".join(list_argument_names(tool.schema))
    call_form = f"[{tool.name}({arguments})]"
    return (
        f"Your task is to add calls to a {tool.name} API to a piece of text.{_format_description(tool)} The calls "
        f'should help you get information required to complete the text. You can call the API by writing "{call_form}"'
        f"{_describe_arguments(tool.schema or {})}. Here are some examples of API calls:"
    )


def _format_description(tool: Tool) -> str:
    """Return a space and what the tool does, as a sentence with its full stop; empty without a description."""
    about = tool.about.rstrip()
    if not about:
        return ""
    return f" {about}" if about[-1] in ".!?" else f" {about}."


def _without_calls(output: str, tool_name: str) -> str:
    """Return a text without its calls to the tool."""
    with_space = f" {output}"  # a call that begins the text is only found after a space
    return take_out(with_space, {tool_name}).strip()


def build_missing_examples_error(tool: Tool) -> ToolError:
    """Build the error for a tool of an MCP server whose section has no `examples`.

    Its message ends with lines that the user can paste into toolformer.toml.
    """
    example = f"... [{tool.name}({_format_sample_arguments(tool.schema or {})})] ..."

    # TOML's strings in single quotes have no escapes, so an example with a single quote is written as in JSON.
    quoted = json.dumps(example, ensure_ascii=False) if "'" in example else f"'{example}'"

    return ToolError(
        f"[tools.{tool.key}] (server {tool.server}) has no examples: paste these lines (without the header where it "
        "stands already), and write sentences of your texts, two to five, in place of the dots:\n"
        f"[tools.{tool.key}]\nexamples = [\n    {quoted},\n    {quoted},\n]"
    )


def _format_sample_arguments(schema: Schema) -> str:
    """Write sample arguments for a call, such as `city="...", days=1`, with only the required arguments."""
    properties = schema.get("properties") or {}
    required = schema.get("required") or ()

    arguments = []
    for name in list_argument_names(schema):
        if name in required:
            value = json.dumps(_choose_sample_value(properties.get(name)), ensure_ascii=False)
            arguments.append(f"{name}={value}")

    return ", ".join(arguments)


def _choose_sample_value(declaration: Any) -> object:
    """Choose a value for a sample call: the first of the argument's enum, or else one of its type (SAMPLE_VALUES)."""
    if not isinstance(declaration, Mapping):
        return "..."
    for value in declaration.get("enum") or ():
        return value
    return SAMPLE_VALUES.get(str(declaration.get("type")), "...")


def _describe_arguments(schema: Schema) -> str:
    """Return ` where "city" is ..., "days" is ...`, for the arguments that the schema describes; empty for none."""
    meanings = []
    for name in list_argument_names(schema):
        declaration = schema.get("properties", {}).get(name)
        meaning = _describe_argument(declaration) if isinstance(declaration, Mapping) else ""
        if meaning:
            meanings.append(f'"{name}" is {meaning}')
    return f" where {', '.join(meanings)}" if meanings else ""


def _describe_argument(declaration: Mapping[str, Any]) -> str:
    """Describe an argument of a tool in a few words: `the unit: "C" or "F"` or `days from today (1 if left out)`.

    declaration: its JSON schema.
    """
    description = _shorten_description(declaration)
    values = _format_enum_values(declaration)
    if values is not None:
        return f"{description}: {values}" if description else values
    default = json.dumps(declaration.get("default"), ensure_ascii=False)
    if "default" in declaration and len(default) <= LONGEST_MEANING:
        return f"{description} ({default} if left out)".strip()
    return description


def _shorten_description(declaration: Mapping[str, Any]) -> str:
    """Return the description or title of an argument on one line of at most LONGEST_MEANING, without a full stop."""
    description = one_line(str(declaration.get("description") or declaration.get("title") or ""))
    return description.rstrip(". ")[:LONGEST_MEANING]


def _format_enum_values(declaration: Mapping[str, Any]) -> str | None:
    """Return the first values of an argument's enum, such as `"C" or "F"`, without long ones; None without an enum."""
    values = [json.dumps(value, ensure_ascii=False) for value in declaration.get("enum", ())[:MOST_VALUES]]
    if not values:
        return None
    return " or ".join(value for value in values if len(value) <= LONGEST_MEANING)


def check_prompt(
    text: str, name: str, source: object, *, is_users: bool = True, schema: Schema | None = None
) -> list[PromptExample]:
    """Check a tool's prompt, which consists of an instruction and examples (`Input: ...`, `Output: ...`).

    Args:
        text: The prompt.
        name: The tool's name in calls.
        source: Where the prompt is from, for messages.
        is_users: Whether the user wrote it. Then there is a warning if an Output differs from its Input by more than
            calls.
        schema: The schema of the tool's named arguments, which all calls must fit. None if calls take one text.

    Returns:
        The examples.

    Raises:
        ToolError: The instruction, an example or an Output is missing, or no example has a call, or a call is malformed
            or is to another tool.
    """
    examples = []
    for number, block in enumerate(_split_into_examples(text, source), 1):
        where = f"{source}: example {number}"
        example = _parse_example(block, where)
        _check_calls(example.output, name, where, schema)
        examples.append(example)

    if is_users:  # two of the paper's own examples differ
        _warn_of_changed_texts(examples, name, source)

    has_call = any(_CALL_START.search(example.output) for example in examples)
    if not has_call:
        raise ToolError(f"{source}: no example holds a call; add calls as [{name}(input)]")

    return examples


def _warn_of_changed_texts(examples: Sequence[PromptExample], name: str, source: object) -> None:
    """Log a warning for each example whose Output, without its calls, is not its Input."""
    for number, example in enumerate(examples, 1):
        output_text = _without_calls(example.output, name)
        _warn_of_changed_text(example.input, output_text, f"{source}: example {number}")


def _split_into_examples(text: str, source: object) -> list[str]:
    """Split a prompt into what follows each `Input:`.

    Raises:
        ToolError: There is no instruction before the first example, or no example.
    """
    instruction, *blocks = re.split(r"^Input:", text, flags=re.MULTILINE)
    if not instruction.strip():
        raise ToolError(f"{source}: no instruction before the first 'Input:' line; explain what the calls are for")

    if not blocks:
        raise ToolError(f"{source}: no example; add a few pairs of lines 'Input: ...' and 'Output: ...'")

    return blocks


def _parse_example(block: str, where: str) -> PromptExample:
    """Parse an example from what follows its `Input:`.

    Raises:
        ToolError: There is not exactly one `Output:`, or a text is empty.
    """
    parts = [part.strip() for part in re.split(r"^Output:", block, flags=re.MULTILINE)]
    if len(parts) != 2 or not all(parts):
        raise ToolError(f"{where}: write one 'Input: text' line and one 'Output: text' line")

    return PromptExample(*parts)


def _check_calls(output: str, name: str, where: str, schema: Schema | None) -> None:
    """Check that every call in an example is well-formed, is to the tool `name` and fits its schema.

    Args:
        output: The example's text with calls.
        name: The tool's name.
        where: Names the example in messages.
        schema: The schema of the arguments, or None if calls take one text.

    Raises:
        ToolError: A call is wrong.
    """
    for body in _iter_call_bodies(output):
        call = _parse_example_call(body, name, where)
        if schema is not None:
            _check_arguments(call.input, schema, f"{where}: [{body}]")


def _iter_call_bodies(output: str) -> Iterator[str]:
    """Yield what the calls of a text have between their brackets: `Weather(city="Rome")`."""
    for start in _CALL_START.finditer(output):
        end = find_behind_input("]", output, start.end())
        yield output[start.end() : end if end >= 0 else None]


def _parse_example_call(body: str, name: str, where: str) -> Call:
    """Parse a call from the text between its brackets.

    Raises:
        ToolError: The text is not a call, or the call is not to the tool `name`.
    """
    try:
        call = parse_call(body)
    except MalformedCall as error:
        raise ToolError(f"{where}: [{body}] is not a call ({error}); write it as [{name}(input)]") from error

    if call.tool != name:
        raise ToolError(f"{where}: [{body}] calls {call.tool!r}, but this tool's name is {name!r}; rename the call")

    return call


def _check_arguments(input: str, schema: Schema, where: str) -> None:
    """Raise ToolError if a call's input does not fit the schema; `where` names the example and the call."""
    try:
        parse_arguments(input, schema)
    except BadArguments as error:
        names = ", ".join(list_argument_names(schema))
        raise ToolError(f"{where}: {error.reason}; write {names} as name=value, with JSON values") from error


@cache  # so that each example is warned of once per process
def _warn_of_changed_text(input: str, output_text: str, where: str) -> None:
    """Log a warning if an example's Output, without its calls, is another text than its Input.

    Args:
        input: The Input.
        output_text: The Output without its calls.
        where: Names the example in the warning.
    """
    if output_text == input:
        return

    first_difference = _find_first_difference(output_text, input)
    _log.warning(
        "%s: without its calls the Output reads %r where the Input reads %r, which teaches the model to change "
        "texts; make both equal, with a single space before each call",
        where,
        output_text[first_difference : first_difference + EXCERPT_CHARACTERS],
        input[first_difference : first_difference + EXCERPT_CHARACTERS],
    )


def _find_first_difference(first: str, second: str) -> int:
    """Return the first character in which two texts differ; the shorter length if one begins with the other."""
    shorter_length = min(len(first), len(second))
    for position in range(shorter_length):
        if first[position] != second[position]:
            return position
    return shorter_length
