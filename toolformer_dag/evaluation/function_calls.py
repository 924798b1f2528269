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
from toolformer_dag.evaluation.readers import last_asked
from toolformer_dag.texts.arguments import Schema, read_arguments, schema_fault
from toolformer_dag.texts.calls import Call, fault
from toolformer_dag.tools.options import ToolOptions
from toolformer_dag.tools.tool import Tool, ToolCall, ToolDefaults, ToolResult

SETS = ("*_simple.json", "*_simple_python.json", "*_multiple.json", "*_parallel.json")
"""Files of one turn whose functions are Python's; `..._parallel_multiple.json` is among them."""
JSON_TYPES = {"dict": "object", "float": "number", "tuple": "array"}
"""What a schema of these files calls a type -> what JSON schema calls it."""
NO_RULES = (("type", "any"), ("required", True), ("required", False))
NOTHING = "null"
"""What a function of a question returns: calls are compared, and none is run."""
OFFERING = 1  # raise this when the same question would be asked with other functions or another result
ANYTHING: Schema = {"additionalProperties": True}


def function_calling(folder: Path) -> list[Benchmark]:
    """Read sets of the Berkeley Function-Calling Leaderboard: SETS of a folder, with right calls in `possible_answer`.

    A record has `id`, `question` as in `irrelevance`, and `function`: a list of name, description and parameters. The
    file of the same name in `possible_answer` has `id` and `ground_truth`: a list of {name: {argument: [values]}}.
    Left out: records without right calls, and those of whose functions no call can be written.
    """
    return [_set(file) for file in files(folder, *SETS)]


def _set(file: Path) -> Benchmark:
    right, answers = file.parent / "possible_answer" / file.name, dict[str, Any]()
    for number, record in enumerate(json_lines(right), 1):
        with expect_shape(f"{right}, record {number}"):
            answers[record["id"]] = record["ground_truth"]
            for call in record["ground_truth"]:
                [arguments] = call.values()
                _ = [[*values] for values in arguments.values()]  # TypeError where they are no lists
    of_file = benchmark(file.stem, {file: json_lines(file)}, partial(_question, answers), in_first_twenty_words)
    return replace(
        of_file, function_calls=max((len(json.loads(one.answers[0])) for one in of_file.questions), default=1)
    )


def _question(answers: Mapping[str, Any], record: Any) -> QuestionOrReason:
    asked, given = last_asked(record), record["function"]
    if asked is None:
        return "nobody_asks"
    if record["id"] not in answers:
        return "no_ground_truth"
    functions = []
    for one in given if isinstance(given, list) else [given]:
        schema = json.loads(json.dumps(one.get("parameters") or {}), object_hook=_json_types)
        if fault(Call(one["name"], "")) or schema_fault(schema):
            return "function_cannot_be_written"
        functions.append({"name": one["name"], "description": one.get("description", ""), "parameters": schema})
    context = json.dumps(functions, ensure_ascii=False)
    return BenchmarkQuestion(asked, (json.dumps(answers[record["id"]], ensure_ascii=False),), context=context)


def _json_types(schema: dict[str, Any]) -> dict[str, Any]:
    """Return a part of a schema in JSON schema's words; `required` of a single argument is none of them."""
    kept = {key: value for key, value in schema.items() if (key, value) not in NO_RULES}
    kind = kept.get("type")
    return {**kept, "type": JSON_TYPES.get(kind, kind)} if isinstance(kind, str) else kept


class OfferedFunction(Tool):
    """A function of a question, which returns nothing."""

    version, defaults = "1", ToolDefaults(0.0, 0, 0, 0.0)

    def __init__(self, name: str, description: str, parameters: Schema) -> None:
        super().__init__(name, ToolOptions(description=description), "")
        self.name, self._parameters = name, parameters

    @property
    def schema(self) -> Schema:
        return self._parameters

    def run(self, calls: Sequence[ToolCall]) -> list[ToolResult]:
        return [ToolResult(NOTHING) for _ in calls]


def offered_functions(context: str) -> dict[str, Tool]:
    """Return the functions of a question as tools, by name; `context`: as `function_calling` writes it."""
    return {one["name"]: OfferedFunction(**one) for one in json.loads(context)}


def calls_are_right(calls: Sequence[DecodedCall], answer: str) -> bool:
    """Return whether the calls are those of `answer` (a `ground_truth` as JSON), in any order and each once.

    A call is right with the function's name and, for each argument, a value of its list; where the list has "", the
    argument may be left out. Texts are compared without case, white space and `,./-_*^`. A call that stands in the text
    already counts once; one that was not finished counts as wrong.
    """
    made = [call for call in calls if call.reason != REPEATED]
    wanted = json.loads(answer)
    if len(made) != len(wanted) or any(call.result is None for call in made):
        return False
    read = [{call.tool: read_arguments(call.input, ANYTHING)} for call in made]
    return _each_has_its_own([[at for at, call in enumerate(read) if _same(call, one)] for one in wanted])


def _each_has_its_own(fits: Sequence[Sequence[int]]) -> bool:
    """Return whether each place can have one of the numbers listed for it, no two the same (Kuhn 1955)."""
    owner: dict[int, int] = {}

    def placed(place: int, tried: set[int]) -> bool:
        for number in fits[place]:
            if number not in tried:
                tried.add(number)
                if number not in owner or placed(owner[number], tried):
                    owner[number] = place
                    return True
        return False

    return all(placed(place, set()) for place in range(len(fits)))


def _fit(arguments: Mapping[str, Any], right: Mapping[str, Any]) -> bool:
    """Return whether each argument has one of its right values, and none is missing that has to be there.

    A call is a tree of this kind too: its function, and the arguments.
    """
    return arguments.keys() <= right.keys() and all(
        any(_same(arguments[name], value) for value in _listed(values)) if name in arguments else "" in _listed(values)
        for name, values in right.items()
    )


def _listed(values: Any) -> list[Any]:
    return values if isinstance(values, list) else [values]


def _same(value: Any, right: Any) -> bool:
    if isinstance(right, dict):
        return isinstance(value, dict) and _fit(value, right)
    if isinstance(right, list):
        return isinstance(value, list) and len(value) == len(right) and all(map(_same, value, right))
    if isinstance(right, str):
        return isinstance(value, str) and _plain(value) == _plain(right)
    return isinstance(value, bool) == isinstance(right, bool) and bool(value == right)


def _plain(text: str) -> str:
    return re.sub(r"[\s,./_*^-]", "", text).casefold().replace("'", '"')
