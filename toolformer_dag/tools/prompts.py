"""Prompts P(x) (appendix A.2): check them, or write one from a tool's description and a few examples."""

import json
import logging
import re
from collections.abc import Mapping
from functools import cache
from itertools import zip_longest
from typing import Any

from toolformer_dag.files import UserError
from toolformer_dag.texts.arguments import BadArguments, Schema, argument_names, read_arguments
from toolformer_dag.texts.calls import MalformedCall, find_behind_input, one_line, parse_call, take_out
from toolformer_dag.tools.tool import Tool

LONGEST_MEANING = 100
"""Characters of what a prompt tells about an argument; a longer value is not shown."""
SAMPLE_VALUES: Mapping[str, object] = {"integer": 1, "number": 1, "boolean": True, "array": [], "object": {}}
"""What stands in an example for a value of a type; a text is three dots."""
SHOWN = 40
"""Characters of an example that a warning shows, from where Input and Output begin to differ."""
_log = logging.getLogger(__name__)
_CALL_START = re.compile(r"\[(?=[^\s\[\]()]+\()")


class ToolError(UserError):
    """A tool that cannot be loaded. The message names the section or the prompt, the reason and the remedy."""


def written_prompt(tool: Tool, examples: tuple[str, ...]) -> str:
    """Write the paper's prompt for a tool; each example is a text with calls, and its Input the text without them."""
    about = tool.about.rstrip()
    described = f" {about}{'' if about[-1:] in '.!?' else '.'}" if about else ""
    form = f"[{tool.name}({', '.join(argument_names(tool.schema or {})) if tool.schema is not None else 'input'})]"
    lines = [
        f"Your task is to add calls to a {tool.name} API to a piece of text.{described} The calls should help you get "
        f'information required to complete the text. You can call the API by writing "{form}"{_meanings(tool.schema)}. '
        "Here are some examples of API calls:"
    ]
    for example in examples:
        output = " ".join(example.split())
        lines += [f"Input: {take_out(' ' + output, {tool.name}).strip()}", f"Output: {output}"]
    return "\n".join(lines) + "\n"


def missing_examples(tool: Tool) -> ToolError:
    """Return the error for a tool of a server that has no examples, with the lines that would give it some."""
    example = f"... [{tool.name}({_sample_arguments(tool.schema or {})})] ..."
    quoted = json.dumps(example, ensure_ascii=False) if "'" in example else f"'{example}'"
    return ToolError(
        f"[tools.{tool.key}] (server {tool.server}) has no examples: paste these lines (without the header where it "
        "stands already), and write sentences of your texts, two to five, in place of the dots:\n"
        f"[tools.{tool.key}]\nexamples = [\n    {quoted},\n    {quoted},\n]"
    )


def _sample_arguments(schema: Schema) -> str:
    """The arguments that a schema requires, with values of their types."""
    properties = schema.get("properties") or {}
    required = {name: properties.get(name) for name in argument_names(schema) if name in (schema.get("required") or ())}
    values = {
        name: next(iter(declared.get("enum") or [SAMPLE_VALUES.get(str(declared.get("type")), "...")]))
        for name, declared in (
            (name, declared if isinstance(declared, Mapping) else {}) for name, declared in required.items()
        )
    }
    return ", ".join(f"{name}={json.dumps(value, ensure_ascii=False)}" for name, value in values.items())


def _meanings(schema: Schema | None) -> str:
    """Say what each argument is, where the schema says it."""
    parts = []
    for name in argument_names(schema or {}):
        described = (schema or {}).get("properties", {}).get(name)
        meaning = _meaning(described) if isinstance(described, Mapping) else ""
        parts.append(f'"{name}" is {meaning}' if meaning else "")
    meanings = ", ".join(filter(None, parts))
    return f" where {meanings}" if meanings else ""


def _meaning(described: Mapping[str, Any]) -> str:
    what = one_line(str(described.get("description") or described.get("title") or "")).rstrip(". ")[:LONGEST_MEANING]
    if values := [json.dumps(value, ensure_ascii=False) for value in described.get("enum", ())[:8]]:
        return f"{what}: " * bool(what) + " or ".join(value for value in values if len(value) <= LONGEST_MEANING)
    value = json.dumps(described.get("default"), ensure_ascii=False)
    if "default" in described and len(value) <= LONGEST_MEANING:
        return f"{what} ({value} if left out)".strip()
    return what


def check_prompt(
    text: str, name: str, source: object, own: bool = True, schema: Schema | None = None
) -> list[tuple[str, str]]:
    """Check a prompt and return its examples, (Input, Output), which begin with these words and may span several lines.

    Raises ToolError where an Input has no Output, the instruction or all examples are missing, or a call does not
    parse or is not one to `name`. Of a person's `own` prompt, warns of an Output that is not the Input without its
    calls; two of the paper's are not. Not covered: whether the tool accepts the inputs of the calls.
    """
    instruction, *blocks = re.split(r"^Input:", text, flags=re.MULTILINE)
    if not instruction.strip():
        raise ToolError(f"{source}: no instruction before the first 'Input:' line; explain what the calls are for")
    if not blocks:
        raise ToolError(f"{source}: no example; add a few pairs of lines 'Input: ...' and 'Output: ...'")
    examples = [_example(block, name, f"{source}: example {number}", schema) for number, block in enumerate(blocks, 1)]
    for number, (given, output) in enumerate(examples if own else (), 1):
        _warn_of_another_text(given, take_out(" " + output, {name}).strip(), f"{source}: example {number}")
    if not any(_CALL_START.search(output) for _, output in examples):
        raise ToolError(f"{source}: no example holds a call; add calls as [{name}(input)]")
    return examples


def _example(block: str, name: str, where: str, schema: Schema | None) -> tuple[str, str]:
    parts = [part.strip() for part in re.split(r"^Output:", block, flags=re.MULTILINE)]
    if len(parts) != 2 or not all(parts):
        raise ToolError(f"{where}: write one 'Input: text' line and one 'Output: text' line")
    given, output = parts
    for start in _CALL_START.finditer(output):
        end = find_behind_input("]", output, start.end())
        body = output[start.end() : end if end >= 0 else None]
        try:
            call = parse_call(body)
        except MalformedCall as error:
            raise ToolError(f"{where}: [{body}] is not a call ({error}); write it as [{name}(input)]") from error
        if call.tool != name:
            raise ToolError(f"{where}: [{body}] calls {call.tool!r}, but this tool's name is {name!r}; rename the call")
        _check_arguments(call.input, schema, f"{where}: [{body}]")
    return given, output


def _check_arguments(input: str, schema: Schema | None, where: str) -> None:
    try:
        if schema is not None:
            read_arguments(input, schema)
    except BadArguments as error:
        names = ", ".join(argument_names(schema or {}))
        raise ToolError(f"{where}: {error.reason}; write {names} as name=value, with JSON values") from error


@cache
def _warn_of_another_text(given: str, left: str, where: str) -> None:
    """Warn once, however often tools are loaded."""
    if left != given:
        alike = next(at for at, pair in enumerate(zip_longest(left, given)) if pair[0] != pair[1])
        _log.warning(
            "%s: without its calls the Output reads %r where the Input reads %r, which teaches the model to change "
            "texts; make both equal, with a single space before each call",
            where,
            left[alike : alike + SHOWN],
            given[alike : alike + SHOWN],
        )
