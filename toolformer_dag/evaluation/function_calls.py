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
    """Read the files SETS of the Berkeley Function-Calling Leaderboard from a folder, a benchmark per file.

    A record has an id, a conversation, and the functions that may be called:

        {"id": "simple_0", "question": [[{"role": "user", "content": "Area of a triangle with base 10, height 5?"}]],
         "function": [{"name": "area", "description": "...", "parameters": {"type": "dict", "properties": ...}}]}

    The file of the same name in the folder `possible_answer` has the right values of each argument of its right calls:

        {"id": "simple_0", "ground_truth": [{"area": {"base": [10], "height": [5], "unit": ["cm", ""]}}]}

    Records without right calls, or with a function for which no call can be written, are left out. Raises
    BenchmarkError.
    """
    return [_read_benchmark_of_set(file) for file in files(folder, *SETS)]


def _read_benchmark_of_set(file: Path) -> Benchmark:
    """Read a file of the Berkeley Function-Calling Leaderboard as a benchmark.

    A model's text may hold as many calls (`function_calls`) as the question with the most right calls has.
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
    """Read the file of right calls: id of the record -> [{"area": {"base": [10], "height": [5]}}].

    Raises BenchmarkError for calls of another shape.
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
    """Return the question of a record, or the reason why it has none.

    Its `context` is the JSON of its functions, its only answer the JSON of its right calls.
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
    """Return whether the calls of a text are the right ones, in any order, each once; repeated calls do not count.

    answer: the right calls (`ground_truth`) as JSON.
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
    """Match a right call with a written call that fits it; return whether that was possible.

    If all that fit are taken, an earlier right call may move to another one: an augmenting path of Kuhn's algorithm for
    bipartite matching. Calls are indices.

    candidates: for each right call, the written calls that fit it.
    right_call_of: written call -> right call, as matched so far; changed here, like `tried`.
    tried: written calls that this search has looked at.
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
    """Return whether a written value is the right one; texts are compared without case and punctuation."""
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
