"""Questions that bring their own functions: read them, offer the functions to a model, compare its calls as trees."""

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
from toolformer_dag.evaluation.benchmark_readers import last_asked
from toolformer_dag.texts.arguments import Schema, read_arguments, schema_fault
from toolformer_dag.texts.calls import Call, fault
from toolformer_dag.tools.options import ToolOptions
from toolformer_dag.tools.tool import Tool, ToolCall, ToolDefaults, ToolResult

SETS = ("*_simple.json", "*_simple_python.json", "*_multiple.json", "*_parallel.json")
"""Files of the leaderboard with one turn and functions of Python; `..._parallel_multiple.json` is among them."""
JSON_TYPES = {"dict": "object", "float": "number", "tuple": "array"}
"""Types in the schemas of these files -> the names that JSON schema has for them; others are the same."""
NO_RULES = (("type", "any"), ("required", True), ("required", False))
"""Entries of the schemas of these files that are not of JSON schema; they are removed."""
NOTHING = "null"
"""What a function of a question returns: calls are compared, and none is run."""
OFFERING = 1
"""Raise this when the same question would be asked with other functions or another result."""
ANYTHING: Schema = {"additionalProperties": True}
"""A schema that every arguments fit."""


def function_calling(folder: Path) -> list[Benchmark]:
    """Read sets of the Berkeley Function-Calling Leaderboard: SETS of a folder, with right calls in `possible_answer`.

    A record has `id`, `question` as in `irrelevance`, and `function`: a list of name, description and parameters. The
    file of the same name in `possible_answer` has `id` and `ground_truth`: a list of {name: {argument: [values]}}.
    Left out: records without right calls, and those of whose functions no call can be written.

    Raises BenchmarkError.
    """
    return [_benchmark_of_set(file) for file in files(folder, *SETS)]


def _benchmark_of_set(file: Path) -> Benchmark:
    """Read a file of the Berkeley Function-Calling Leaderboard as a benchmark, with its right calls.

    An answer may hold as many calls as the question with the most right calls has.
    """
    right_calls = _right_calls(file.parent / "possible_answer" / file.name)
    of_file = benchmark(
        name=file.stem,
        sources={file: json_lines(file)},
        convert=partial(_question, right_calls),
        correct=in_first_twenty_words,
    )
    call_counts = [len(json.loads(question.answers[0])) for question in of_file.questions]
    return replace(of_file, function_calls=max(call_counts, default=1))


def _right_calls(file: Path) -> dict[str, Any]:
    """Read the file of right calls: id of the record -> [{"name": {"argument": [its right values]}}].

    Raises BenchmarkError for calls of another shape.
    """
    right_calls: dict[str, Any] = {}
    for number, record in enumerate(json_lines(file), 1):
        with expect_shape(f"{file}, record {number}"):
            calls = record["ground_truth"]
            right_calls[record["id"]] = calls
            for call in calls:
                [arguments] = call.values()
                for values in arguments.values():
                    iter(values)  # TypeError where they are not listed
    return right_calls


def _question(right_calls: Mapping[str, Any], record: Any) -> QuestionOrReason:
    """Turn a record into a question, or return the reason why it is left out.

    right_calls: of all records, by id. `context` of the question holds its functions (name, description, schema of the
    arguments), `answers` its right calls, both as JSON. Left out: nobody_asks, no_ground_truth, and where a function
    has a name or a schema that decoding cannot write, function_cannot_be_written.
    """
    prompt = last_asked(record)
    declared = record["function"]
    if prompt is None:
        return "nobody_asks"
    if record["id"] not in right_calls:
        return "no_ground_truth"
    functions = []
    for function in declared if isinstance(declared, list) else [declared]:
        name = function["name"]
        schema = json.loads(json.dumps(function.get("parameters") or {}), object_hook=_json_types)
        if fault(Call(name, "")) or schema_fault(schema):
            return "function_cannot_be_written"
        functions.append({"name": name, "description": function.get("description", ""), "parameters": schema})
    return BenchmarkQuestion(
        prompt=prompt,
        answers=(json.dumps(right_calls[record["id"]], ensure_ascii=False),),
        context=json.dumps(functions, ensure_ascii=False),
    )


def _json_types(schema: dict[str, Any]) -> dict[str, Any]:
    """Return an object of such a schema in JSON schema's words (JSON_TYPES), without NO_RULES."""
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
        return self._parameters

    def run(self, calls: Sequence[ToolCall]) -> list[ToolResult]:
        return [ToolResult(NOTHING) for _ in calls]


def offered_functions(context: str) -> dict[str, Tool]:
    """Return the functions of a question as tools, by name.

    context: that of the question, as `function_calling` writes it.
    """
    functions = json.loads(context)
    return {function["name"]: OfferedFunction(**function) for function in functions}


def calls_are_right(calls: Sequence[DecodedCall], answer: str) -> bool:
    """Return whether the calls are those of `answer` (a `ground_truth` as JSON), in any order and each once.

    A call is right with the function's name and, for each argument, a value of its list; where the list has "", the
    argument may be left out. Texts are compared without case, white space and `,./-_*^`. A call that repeats an earlier
    one in the text is not counted again; one that was not finished counts as wrong.
    """
    distinct = [call for call in calls if call.reason != REPEATED]
    right_calls = json.loads(answer)
    if len(distinct) != len(right_calls) or any(call.result is None for call in distinct):
        return False
    written_calls = [{call.tool: read_arguments(call.input, ANYTHING)} for call in distinct]
    fitting: list[list[int]] = []  # for each right call, the indices of the written calls that are like it
    for right_call in right_calls:
        fitting.append([index for index, call in enumerate(written_calls) if _same(call, right_call)])
    return _can_be_matched(fitting)


def _can_be_matched(fitting: Sequence[Sequence[int]]) -> bool:
    """Return whether each right call can have a written call that fits it, no two the same (Kuhn 1955).

    fitting: for each right call, the indices of the written calls that fit it.
    """
    right_call_of: dict[int, int] = {}  # the right call that each written call was matched with
    return all(_match(right_call, fitting, right_call_of, set()) for right_call in range(len(fitting)))


def _match(right_call: int, fitting: Sequence[Sequence[int]], right_call_of: dict[int, int], tried: set[int]) -> bool:
    """Match a right call with a written call, moving earlier matches where needed; return whether that was possible.

    This is a step of bipartite matching: the search for an augmenting path.

    fitting: for each right call, the written calls that would be right for it.
    right_call_of: written call -> right call; changed where it was possible.
    tried: written calls that need not be tried again for this match; changed.
    """
    for written_call in fitting[right_call]:
        if written_call in tried:
            continue
        tried.add(written_call)
        is_free = written_call not in right_call_of
        if is_free or _match(right_call_of[written_call], fitting, right_call_of, tried):
            right_call_of[written_call] = right_call
            return True
    return False


def _fit(arguments: Mapping[str, Any], right: Mapping[str, Any]) -> bool:
    """Return whether each argument has one of its right values, and none is missing that has to be there.

    right: for each argument its right values; "" among them means that it may be left out.

    Also compares calls, as {name of the function: its arguments}.
    """
    if not arguments.keys() <= right.keys():
        return False
    for name, values in right.items():
        right_values = _listed(values)
        if name in arguments:
            fits = any(_same(arguments[name], right_value) for right_value in right_values)
        else:
            fits = "" in right_values
        if not fits:
            return False
    return True


def _listed(values: Any) -> list[Any]:
    return values if isinstance(values, list) else [values]


def _same(value: Any, right: Any) -> bool:
    """Return whether an argument's value in a call is the right one.

    Texts are compared without case and punctuation, lists item by item. Of an object each value has to be among those
    that `right` lists for its key. True is not 1.
    """
    if isinstance(right, dict):
        return isinstance(value, dict) and _fit(value, right)
    if isinstance(right, list):
        if not isinstance(value, list) or len(value) != len(right):
            return False
        return all(_same(item, right_item) for item, right_item in zip(value, right, strict=True))
    if isinstance(right, str):
        return isinstance(value, str) and _plain(value) == _plain(right)
    return isinstance(value, bool) == isinstance(right, bool) and bool(value == right)


def _plain(text: str) -> str:
    """Return a text as it is compared: without case, white space and some punctuation, with one kind of quotes."""
    return re.sub(r"[\s,./_*^-]", "", text).casefold().replace("'", '"')
