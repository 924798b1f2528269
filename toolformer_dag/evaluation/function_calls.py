"""Benchmarks whose questions bring functions: read them, offer the functions to a model, compare its calls."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from toolformer_dag.decoding.generation import REPEATED_CALL, DecodedCall
from toolformer_dag.evaluation.benchmark import Benchmark, BenchmarkQuestion, is_in_first_twenty_words
from toolformer_dag.evaluation.benchmark_files import (
    QuestionOrReason,
    build_benchmark,
    expect_record_shape,
    iter_json_lines,
    list_matching_files,
)
from toolformer_dag.evaluation.benchmark_readers import find_last_user_prompt
from toolformer_dag.texts.arguments import Schema, find_schema_fault, parse_arguments
from toolformer_dag.texts.calls import Call, find_call_fault
from toolformer_dag.tools.options import ToolOptions
from toolformer_dag.tools.tool import Tool, ToolCall, ToolDefaults, ToolResult

BENCHMARK_FILE_PATTERNS = ("*_simple.json", "*_simple_python.json", "*_multiple.json", "*_parallel.json")
"""Files of the leaderboard with one turn and functions of Python; `..._parallel_multiple.json` is among them."""
JSON_SCHEMA_TYPES = {"dict": "object", "float": "number", "tuple": "array"}
"""Types in the schemas of these files -> the names that JSON schema has for them; others are the same."""
IGNORED_SCHEMA_ENTRIES = (("type", "any"), ("required", True), ("required", False))
"""Entries in the schemas of these files that JSON schema lacks or that restrict nothing; they are removed."""
NULL_RESULT = "null"
"""The result of every function of a question: calls are compared, never run."""
OFFERING_VERSION = 1
"""Raise this when the same question would be asked with other functions or another result."""
ANY_ARGUMENTS_SCHEMA: Schema = {"additionalProperties": True}
"""A schema that all arguments fit."""


def read_function_calling(folder: Path) -> list[Benchmark]:
    """Read the Berkeley Function-Calling Leaderboard from a folder, as a benchmark per file (BENCHMARK_FILE_PATTERNS).

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
    return [_read_leaderboard_benchmark(file) for file in list_matching_files(folder, *BENCHMARK_FILE_PATTERNS)]


def _read_leaderboard_benchmark(file: Path) -> Benchmark:
    """Read a file of the Berkeley Function-Calling Leaderboard as a benchmark.

    The limit of calls per text (`max_function_calls`) is the largest number of right calls that a question has.

    Raises:
        BenchmarkError: The file or the file of right calls cannot be read, or has another shape.
    """
    right_calls_by_id = _read_right_calls(file.parent / "possible_answer" / file.name)
    benchmark = build_benchmark(
        name=file.stem,
        records_by_file={file: iter_json_lines(file)},
        convert_record=partial(_parse_function_record, right_calls_by_id),
        is_correct=is_in_first_twenty_words,  # never used: with `max_function_calls`, calls are judged, not texts
    )

    right_call_counts = []
    for question in benchmark.questions:
        # A question has one answer, the JSON list of its right calls: '[{"area": {"base": [10]}}]'.
        right_calls = json.loads(question.right_answers[0])
        right_call_counts.append(len(right_calls))
    return replace(benchmark, max_function_calls=max(right_call_counts, default=1))


def _read_right_calls(file: Path) -> dict[str, Any]:
    """Read the file of right calls.

    Returns:
        The right calls by the id of their record, such as {"simple_0": [{"area": {"base": [10], "height": [5]}}]}.

    Raises:
        BenchmarkError: The file cannot be read, or its calls have another shape.
    """
    right_calls_by_id: dict[str, Any] = {}
    for number, record in enumerate(iter_json_lines(file), 1):
        # This block turns a KeyError, TypeError and the like into BenchmarkError.
        with expect_record_shape(f"{file}, record {number}"):
            right_calls = record["ground_truth"]
            right_calls_by_id[record["id"]] = right_calls
            for right_call in right_calls:
                _check_right_call(right_call)
    return right_calls_by_id


def _check_right_call(right_call: Any) -> None:
    """Check that a right call of a benchmark's record has the form {function: {argument: [right values]}}.

    The errors are caught by the caller, which names the record in its message.

    Raises:
        ValueError: It does not have exactly one function.
        AttributeError: It is not an object, or its arguments are not.
        TypeError: The right values of an argument are a single value that is no list, such as a number.
    """
    [arguments] = right_call.values()
    for right_values in arguments.values():
        iter(right_values)  # raises TypeError for a single value


def _parse_function_record(right_calls_by_id: Mapping[str, Any], record: Any) -> QuestionOrReason:
    """Convert a record of the leaderboard to a question.

    Args:
        right_calls_by_id: The right calls by the id of their record, as `_read_right_calls` returns them.
        record: The record.

    Returns:
        The question. Its context is the JSON of its functions, and its only answer is the JSON of its right calls.
        If the record cannot be used, the reason, such as "no_ground_truth".
    """
    prompt = find_last_user_prompt(record)
    declarations = _to_list(record["function"])

    if prompt is None:
        return "nobody_asks"
    if record["id"] not in right_calls_by_id:
        return "no_ground_truth"

    functions = []
    for declaration in declarations:
        function = _parse_function_declaration(declaration)
        if not _can_write_function_call(function):
            return "function_cannot_be_written"
        functions.append(function)

    right_calls = right_calls_by_id[record["id"]]
    return BenchmarkQuestion(prompt, right_answers=(_to_json(right_calls),), context=_to_json(functions))


def _to_json(value: Any) -> str:
    """Return the JSON of a value, with the letters of all languages as they are."""
    return json.dumps(value, ensure_ascii=False)


def _parse_function_declaration(declaration: Any) -> dict[str, Any]:
    """Return a function of a record in the form of a question's context, its parameters as a JSON schema."""
    return {
        "name": declaration["name"],
        "description": declaration.get("description", ""),
        "parameters": _to_json_schema(declaration.get("parameters") or {}),
    }


def _can_write_function_call(function: Mapping[str, Any]) -> bool:
    """Return whether decoding can write the name of a function and arguments of its schema."""
    name_fault = find_call_fault(Call(function["name"], ""))
    if name_fault:
        return False
    return not find_schema_fault(function["parameters"])


def _to_json_schema(parameters: Any) -> Any:
    """Return the leaderboard's `parameters` as a JSON schema: {"type": "dict"} becomes {"type": "object"}."""
    return json.loads(json.dumps(parameters), object_hook=_convert_schema_types)


def _convert_schema_types(schema: dict[str, Any]) -> dict[str, Any]:
    """Return an object of the leaderboard's schema in the terms of JSON schema, as {"type": "object"} for "dict".

    The entries of IGNORED_SCHEMA_ENTRIES are removed.
    """
    converted = {key: value for key, value in schema.items() if (key, value) not in IGNORED_SCHEMA_ENTRIES}
    type_name = converted.get("type")
    if isinstance(type_name, str):
        converted["type"] = JSON_SCHEMA_TYPES.get(type_name, type_name)
    return converted


class OfferedFunction(Tool):
    """A function of a question as a tool. Its calls are compared, not run: every result is NULL_RESULT."""

    version = "1"
    defaults = ToolDefaults(0.0, 0, 0, 0.0)

    def __init__(self, name: str, description: str, parameters: Schema) -> None:
        super().__init__(name, ToolOptions(description=description), "")
        self.name = name
        self._parameters = parameters

    @property
    def arguments_schema(self) -> Schema:
        """The JSON schema of the function's arguments."""
        return self._parameters

    def run(self, calls: Sequence[ToolCall]) -> list[ToolResult]:
        """Return NULL_RESULT for each call, because calls are compared and not run."""
        return [ToolResult(NULL_RESULT) for _ in calls]


def parse_offered_functions(context: str) -> dict[str, Tool]:
    """Return the functions of a question as tools, by name.

    Args:
        context: The JSON of the functions, each with name, description and parameters.
    """
    functions = json.loads(context)
    return {function["name"]: OfferedFunction(**function) for function in functions}


def has_right_calls(calls: Sequence[DecodedCall], right_calls_json: str) -> bool:
    """Check whether a text has exactly the right calls, in any order.

    Calls that repeat an earlier one are ignored.

    Args:
        calls: The calls of the text.
        right_calls_json: The right calls as JSON (`ground_truth`).
    """
    distinct_calls = [call for call in calls if call.reason != REPEATED_CALL]
    right_calls = json.loads(right_calls_json)

    has_unfinished_call = any(call.result is None for call in distinct_calls)
    if has_unfinished_call:
        return False
    if len(distinct_calls) != len(right_calls):
        return False

    written_calls = [_parse_written_call(call) for call in distinct_calls]
    # For each right call, the indices of the written calls that fit it. A written call may fit several right calls.
    fitting_indices = [_list_fitting_call_indices(right_call, written_calls) for right_call in right_calls]
    return _can_match_all_right_calls(fitting_indices)


def _parse_written_call(call: DecodedCall) -> dict[str, Any]:
    """Return a written call in the form of the right ones: {"area": {"base": 10, "height": 5}}."""
    return {call.tool: parse_arguments(call.input, ANY_ARGUMENTS_SCHEMA)}


def _list_fitting_call_indices(right_call: Any, written_calls: Sequence[Any]) -> list[int]:
    """Return the indices of the written calls that fit a right call."""
    return [index for index, call in enumerate(written_calls) if _is_right_value(call, right_call)]


def _can_match_all_right_calls(fitting_indices: Sequence[Sequence[int]]) -> bool:
    """Return whether every right call can be paired with a different written call (bipartite matching, Kuhn 1955).

    Args:
        fitting_indices: For each right call, the indices of the written calls that fit it. [[0, 1], [0]] can be
            matched, [[0], [0]] cannot.
    """
    matched_right_calls: dict[int, int] = {}  # written call -> right call, as matched so far
    for right_call_index in range(len(fitting_indices)):
        if not _match_right_call(right_call_index, fitting_indices, matched_right_calls, tried_calls=set()):
            return False
    return True


def _match_right_call(
    right_call_index: int,
    fitting_indices: Sequence[Sequence[int]],
    matched_right_calls: dict[int, int],
    tried_calls: set[int],
) -> bool:
    """Try to match a right call with a written call that fits it.

    If all that fit are taken, an earlier right call may move to another written call. This is an augmenting path
    of Kuhn's algorithm for bipartite matching. Calls are given by their indices.

    Args:
        fitting_indices: For each right call, the written calls that fit it.
        matched_right_calls: The matches so far, from written call to right call. A match is added here.
        tried_calls: The written calls that this search has looked at. They are added here.

    Returns:
        Whether a match was found.
    """
    for written_call in fitting_indices[right_call_index]:
        if written_call in tried_calls:
            continue
        tried_calls.add(written_call)

        can_take = True
        earlier_right_call = matched_right_calls.get(written_call)
        if earlier_right_call is not None:
            # It is taken, but free if the right call that has it can move to another written call.
            can_take = _match_right_call(earlier_right_call, fitting_indices, matched_right_calls, tried_calls)

        if can_take:
            matched_right_calls[written_call] = right_call_index
            return True
    return False


def _are_arguments_right(arguments: Mapping[str, Any], right_values_by_name: Mapping[str, Any]) -> bool:
    """Return whether each argument has a right value, and no required argument is missing.

    Args:
        arguments: The written arguments by name.
        right_values_by_name: The right values of each argument. An argument with "" among them is optional.
    """
    has_unknown_argument = not arguments.keys() <= right_values_by_name.keys()
    if has_unknown_argument:
        return False

    for argument_name, right_values in right_values_by_name.items():
        if not _is_argument_right(arguments, argument_name, _to_list(right_values)):
            return False
    return True


def _is_argument_right(arguments: Mapping[str, Any], argument_name: str, right_values: Sequence[Any]) -> bool:
    """Return whether an argument has one of its right values, or is missing and optional."""
    if argument_name not in arguments:
        return "" in right_values  # an argument with "" among its right values is optional

    value = arguments[argument_name]
    return any(_is_right_value(value, right_value) for right_value in right_values)


def _to_list(values: Any) -> list[Any]:
    """Return a list as it is, any other value as a list of one."""
    return values if isinstance(values, list) else [values]


def _is_right_value(value: Any, right_value: Any) -> bool:
    """Return whether a written value equals a right one.

    Texts are compared without case, white space and punctuation, and lists and objects part by part. True and 1 are
    different values.
    """
    if isinstance(right_value, dict):
        return isinstance(value, dict) and _are_arguments_right(value, right_value)
    if isinstance(right_value, list):
        return isinstance(value, list) and _has_right_items(value, right_value)
    if isinstance(right_value, str):
        return isinstance(value, str) and _normalize_for_comparison(value) == _normalize_for_comparison(right_value)

    both_or_neither_bool = isinstance(value, bool) == isinstance(right_value, bool)
    return both_or_neither_bool and bool(value == right_value)


def _has_right_items(values: Sequence[Any], right_values: Sequence[Any]) -> bool:
    """Return whether two lists have equally many items, and each item of the first is right."""
    if len(values) != len(right_values):
        return False
    return all(_is_right_value(value, right_value) for value, right_value in zip(values, right_values, strict=True))


def _normalize_for_comparison(text: str) -> str:
    """Return a text for comparison: without case, white space and some punctuation, with one kind of quotes."""
    return re.sub(r"[\s,./_*^-]", "", text).casefold().replace("'", '"')
