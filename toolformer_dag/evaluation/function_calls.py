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
"""Entries in the schemas of these files that JSON schema does not have or that rule nothing; they are removed."""
NOTHING = "null"
"""What every function of a question returns: calls are compared, never run."""
OFFERING = 1
"""Raise this when the same question would be asked with other functions or another result."""
ANYTHING: Schema = {"additionalProperties": True}
"""A schema that all arguments fit."""


def function_calling(folder: Path) -> list[Benchmark]:
    """Read the files SETS of the Berkeley Function-Calling Leaderboard from a folder: a benchmark per file.

    A record has an id, a conversation, and the functions that may be called:

        {"id": "simple_0", "question": [[{"role": "user", "content": "Area of a triangle with base 10, height 5?"}]],
         "function": [{"name": "area", "description": "...", "parameters": {"type": "dict", "properties": ...}}]}

    The file of the same name in the folder `possible_answer` has its right calls and, for each argument, right values:

        {"id": "simple_0", "ground_truth": [{"area": {"base": [10], "height": [5], "unit": ["cm", ""]}}]}

    Records without right calls are left out, and records with a function for which no call can be written.

    Raises BenchmarkError.
    """
    return [_benchmark_of_set(file) for file in files(folder, *SETS)]


def _benchmark_of_set(file: Path) -> Benchmark:
    """Read a file of the Berkeley Function-Calling Leaderboard as a benchmark, with its right calls.

    An answer may hold as many calls (`function_calls`) as the question with the most right calls has.
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


def _question(right_calls: Mapping[str, Any], record: Any) -> QuestionOrReason:
    """Turn a record into a question, or return the reason why it is left out.

    right_calls: id of the record -> its right calls.
    record: `id`, `question` and `function`, as `function_calling` describes them.

    The question's `context` is the JSON of its functions (name, description, schema of the arguments); its only answer
    is the JSON of its right calls. The reasons are "nobody_asks", "no_ground_truth" (no right calls) and
    "function_cannot_be_written" (a function whose name or schema decoding cannot write).
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
        schema = _json_schema(function.get("parameters") or {})
        if fault(Call(name, "")) or schema_fault(schema):
            return "function_cannot_be_written"
        functions.append({"name": name, "description": function.get("description", ""), "parameters": schema})
    return BenchmarkQuestion(
        prompt=prompt,
        answers=(json.dumps(right_calls[record["id"]], ensure_ascii=False),),
        context=json.dumps(functions, ensure_ascii=False),
    )


def _json_schema(parameters: Any) -> Any:
    """Translate the leaderboard's `parameters` to JSON schema: {"type": "dict"} becomes {"type": "object"}."""
    return json.loads(json.dumps(parameters), object_hook=_json_types)


def _json_types(schema: dict[str, Any]) -> dict[str, Any]:
    """Translate an object within a schema: types by JSON_TYPES, and without the entries of NO_RULES."""
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
    """Return whether every right call can be paired with a written call of its own (bipartite matching, Kuhn 1955).

    fitting: for each right call, the indices of the written calls that fit it. [[0, 1], [0]] can be matched, as
    right call 0 with written call 1 and right call 1 with written call 0; [[0], [0]] cannot.
    """
    expected_call_of: dict[int, int] = {}  # written call -> right call, as matched so far
    return all(_match(expected_call, fitting, expected_call_of, set()) for expected_call in range(len(fitting)))


def _match(
    expected_call: int, fitting: Sequence[Sequence[int]], expected_call_of: dict[int, int], tried: set[int]
) -> bool:
    """Match an expected call with a written call, moving earlier matches if needed; return whether that was possible.

    This is the search for an augmenting path in bipartite matching.

    fitting: for each expected call, the written calls that would be right for it.
    expected_call_of: written call -> expected call, as matched so far. Changed in place if a match was possible.
    tried: written calls that this search has looked at; it does so once each. Changed in place.
    """
    for written_call in fitting[expected_call]:
        if written_call in tried:
            continue
        tried.add(written_call)
        is_free = written_call not in expected_call_of
        if is_free or _match(expected_call_of[written_call], fitting, expected_call_of, tried):
            expected_call_of[written_call] = expected_call
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
