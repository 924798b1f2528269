"""Benchmarks whose questions bring functions: read them, offer the functions to a model, compare its calls."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from toolformer_dag.decoding.generation import REPEATED, DecodedCall
from toolformer_dag.evaluation.benchmark import Benchmark, BenchmarkQuestion, in_first_twenty_words
from toolformer_dag.evaluation.benchmark_files import QuestionOrReason, benchmark, expect_shape, files, json_lines
from toolformer_dag.evaluation.benchmark_readers import find_last_prompt
from toolformer_dag.texts.arguments import Schema, find_schema_fault, parse_arguments
from toolformer_dag.texts.calls import Call, fault
from toolformer_dag.tools.options import ToolOptions
from toolformer_dag.tools.tool import Tool, ToolCall, ToolDefaults, ToolResult

SETS = ("*_simple.json", "*_simple_python.json", "*_multiple.json", "*_parallel.json")
"""Files of the leaderboard with one turn and functions of Python; `..._parallel_multiple.json` is among them."""
JSON_TYPES = {"dict": "object", "float": "number", "tuple": "array"}
"""Types in the schemas of these files -> the names that JSON schema has for them; others are the same."""
NO_RULES = (("type", "any"), ("required", True), ("required", False))
"""Entries in the schemas of these files that JSON schema lacks or that restrict nothing; they are removed."""
NOTHING = "null"
"""The result of every function of a question: calls are compared, never run."""
OFFERING = 1
"""Raise this when the same question would be asked with other functions or another result."""
ANYTHING: Schema = {"additionalProperties": True}
"""A schema that all arguments fit."""


def function_calling(folder: Path) -> list[Benchmark]:
    """Read the files SETS of the Berkeley Function-Calling Leaderboard from a folder, as a benchmark per file.

    A record has an id, a conversation, and the functions that may be called:

        {"id": "simple_0", "question": [[{"role": "user", "content": "Area of a triangle with base 10, height 5?"}]],
         "function": [{"name": "area", "description": "...", "parameters": {"type": "dict", "properties": ...}}]}

    The file of the same name in the folder `possible_answer` has the right calls. Each argument may have several
    right values:

        {"id": "simple_0", "ground_truth": [{"area": {"base": [10], "height": [5], "unit": ["cm", ""]}}]}

    A record is left out if it has no right calls, or a function for which no call can be written.

    Raises:
        BenchmarkError: A file is missing, cannot be read or has another shape.
    """
    return [_read_benchmark_of_set(file) for file in files(folder, *SETS)]


def _read_benchmark_of_set(file: Path) -> Benchmark:
    """Read a file of the Berkeley Function-Calling Leaderboard as a benchmark.

    The limit of calls per text (`function_calls`) is the largest number of right calls that a question has.
    """
    right_calls = _read_right_calls(file.parent / "possible_answer" / file.name)
    without_limit = benchmark(
        name=file.stem,
        sources={file: json_lines(file)},
        convert=partial(_parse_function_record, right_calls),
        correct=in_first_twenty_words,
    )

    # The one answer of a question is the JSON list of its right calls: '[{"area": {"base": [10]}}]'.
    call_counts = [len(json.loads(question.answers[0])) for question in without_limit.questions]
    return replace(without_limit, function_calls=max(call_counts, default=1))


def _read_right_calls(file: Path) -> dict[str, Any]:
    """Read the file of right calls.

    Returns:
        The right calls by the id of their record, such as {"simple_0": [{"area": {"base": [10], "height": [5]}}]}.

    Raises:
        BenchmarkError: The file cannot be read, or its calls have another shape.
    """
    right_calls: dict[str, Any] = {}
    for number, record in enumerate(json_lines(file), 1):
        with expect_shape(f"{file}, record {number}"):  # turns a KeyError, TypeError and the like into BenchmarkError
            calls = record["ground_truth"]
            right_calls[record["id"]] = calls
            for call in calls:
                _check_right_call(call)
    return right_calls


def _check_right_call(call: Any) -> None:
    """Raise TypeError, ValueError or AttributeError unless `call` is {function: {argument: [right values]}}."""
    [arguments] = call.values()
    for values in arguments.values():
        iter(values)  # TypeError for a single value


def _parse_function_record(right_calls: Mapping[str, Any], record: Any) -> QuestionOrReason:
    """Convert a record of the leaderboard to a question.

    Returns:
        The question. Its context is the JSON of its functions, and its only answer is the JSON of its right calls.
        If the record cannot be used, the reason, such as "no_ground_truth".
    """
    prompt = find_last_prompt(record)
    declarations = _to_list(record["function"])

    if prompt is None:
        return "nobody_asks"
    if record["id"] not in right_calls:
        return "no_ground_truth"

    functions = []
    for declaration in declarations:
        function = _parse_function(declaration)
        if not _can_be_written(function):
            return "function_cannot_be_written"
        functions.append(function)

    answer = _to_json(right_calls[record["id"]])
    return BenchmarkQuestion(prompt, (answer,), context=_to_json(functions))


def _to_json(value: Any) -> str:
    """Return the JSON of a value, with the letters of all languages as they are."""
    return json.dumps(value, ensure_ascii=False)


def _parse_function(declaration: Any) -> dict[str, Any]:
    """Return a function of a record in the form of a question's context, its parameters as a JSON schema."""
    return {
        "name": declaration["name"],
        "description": declaration.get("description", ""),
        "parameters": _to_json_schema(declaration.get("parameters") or {}),
    }


def _can_be_written(function: Mapping[str, Any]) -> bool:
    """Return whether decoding can write the name of a function and arguments of its schema."""
    return not (fault(Call(function["name"], "")) or find_schema_fault(function["parameters"]))


def _to_json_schema(parameters: Any) -> Any:
    """Return the leaderboard's `parameters` as a JSON schema: {"type": "dict"} becomes {"type": "object"}."""
    return json.loads(json.dumps(parameters), object_hook=_to_json_types)


def _to_json_types(schema: dict[str, Any]) -> dict[str, Any]:
    """Return an object of a schema with the types of JSON schema and without the entries of NO_RULES."""
    kept = {key: value for key, value in schema.items() if (key, value) not in NO_RULES}
    type_name = kept.get("type")
    if isinstance(type_name, str):
        kept["type"] = JSON_TYPES.get(type_name, type_name)
    return kept


class OfferedFunction(Tool):
    """A function of a question as a tool. Its calls are compared, not run: every result is NOTHING."""

    version = "1"
    defaults = ToolDefaults(0.0, 0, 0, 0.0)

    def __init__(self, name: str, description: str, parameters: Schema) -> None:
        super().__init__(name, ToolOptions(description=description), "")
        self.name = name
        self._parameters = parameters

    @property
    def schema(self) -> Schema:
        """The JSON schema of the function's arguments."""
        return self._parameters

    def run(self, calls: Sequence[ToolCall]) -> list[ToolResult]:
        """Return the result NOTHING for each call."""
        return [ToolResult(NOTHING) for _ in calls]


def parse_offered_functions(context: str) -> dict[str, Tool]:
    """Return the functions of a question as tools, by name. context: of the question, the JSON of its functions."""
    functions = json.loads(context)
    return {function["name"]: OfferedFunction(**function) for function in functions}


def calls_are_right(calls: Sequence[DecodedCall], answer: str) -> bool:
    """Check whether a text has exactly the right calls, in any order.

    Calls that repeat an earlier one are ignored.

    Args:
        calls: The calls of the text.
        answer: The right calls as JSON (`ground_truth`).
    """
    distinct = [call for call in calls if call.reason != REPEATED]
    right_calls = json.loads(answer)

    is_any_unfinished = any(call.result is None for call in distinct)
    if is_any_unfinished or len(distinct) != len(right_calls):
        return False

    written_calls = [_parse_written_call(call) for call in distinct]
    # For each right call the indices of the written calls that fit it; a written call may fit several.
    candidates = [_list_fitting_calls(right_call, written_calls) for right_call in right_calls]

    return _can_be_matched(candidates)


def _parse_written_call(call: DecodedCall) -> dict[str, Any]:
    """Return a written call in the form of the right ones: {"area": {"base": 10, "height": 5}}."""
    return {call.tool: parse_arguments(call.input, ANYTHING)}


def _list_fitting_calls(right_call: Any, written_calls: Sequence[Any]) -> list[int]:
    """Return the indices of the written calls that fit a right call."""
    return [index for index, call in enumerate(written_calls) if _is_right_value(call, right_call)]


def _can_be_matched(candidates: Sequence[Sequence[int]]) -> bool:
    """Return whether every right call can be paired with a different written call (bipartite matching, Kuhn 1955).

    candidates: per right call, the indices of written calls that fit. [[0, 1], [0]] can be matched, [[0], [0]] cannot.
    """
    right_call_of: dict[int, int] = {}  # written call -> right call, as matched so far
    return all(
        _match_right_call(right_call, candidates, right_call_of, tried=set()) for right_call in range(len(candidates))
    )


def _match_right_call(
    right_call: int, candidates: Sequence[Sequence[int]], right_call_of: dict[int, int], tried: set[int]
) -> bool:
    """Try to match a right call with a written call that fits it.

    If all that fit are taken, an earlier right call may move to another written call. This is an augmenting path
    of Kuhn's algorithm for bipartite matching. Calls are given by their indices.

    Args:
        candidates: For each right call, the written calls that fit it.
        right_call_of: The matches so far, from written call to right call. A match is added here.
        tried: The written calls that this search has looked at. They are added here.

    Returns:
        Whether a match was found.
    """
    for written_call in candidates[right_call]:
        if written_call in tried:
            continue

        tried.add(written_call)
        is_free = written_call not in right_call_of
        if is_free or _match_right_call(right_call_of[written_call], candidates, right_call_of, tried):
            right_call_of[written_call] = right_call
            return True
    return False


def _arguments_fit(arguments: Mapping[str, Any], right: Mapping[str, Any]) -> bool:
    """Return whether each argument has a right value and no required argument is missing.

    right: argument -> its right values; an argument with "" among them is optional.
    """
    if not arguments.keys() <= right.keys():
        return False
    return all(_argument_fits(arguments, name, _to_list(values)) for name, values in right.items())


def _argument_fits(arguments: Mapping[str, Any], name: str, right_values: Sequence[Any]) -> bool:
    """Return whether an argument has one of its right values, or is missing and optional."""
    if name not in arguments:
        return "" in right_values
    return any(_is_right_value(arguments[name], right_value) for right_value in right_values)


def _to_list(values: Any) -> list[Any]:
    """Return a list as it is, any other value as a list of one."""
    return values if isinstance(values, list) else [values]


def _is_right_value(value: Any, right: Any) -> bool:
    """Check whether a written value is a right one.

    Texts are compared without case, white space and punctuation, and lists and objects part by part.
    """
    if isinstance(right, dict):
        return isinstance(value, dict) and _arguments_fit(value, right)
    if isinstance(right, list):
        return isinstance(value, list) and _has_right_items(value, right)
    if isinstance(right, str):
        return isinstance(value, str) and _without_punctuation(value) == _without_punctuation(right)

    both_or_neither_bool = isinstance(value, bool) == isinstance(right, bool)
    return both_or_neither_bool and bool(value == right)


def _has_right_items(values: Sequence[Any], right: Sequence[Any]) -> bool:
    """Return whether two lists have equally many items, and each item of the first is right."""
    if len(values) != len(right):
        return False
    return all(_is_right_value(value, right_value) for value, right_value in zip(values, right, strict=True))


def _without_punctuation(text: str) -> str:
    """Return a text for comparison: without case, white space and some punctuation, with one kind of quotes."""
    return re.sub(r"[\s,./_*^-]", "", text).casefold().replace("'", '"')
