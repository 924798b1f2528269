"""Questions that bring their own functions: sets in the leaderboard's form, right calls as trees, and who is asked."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.tiny_models import tiny_model, tokenizer_of
from toolformer_dag.computing.plan import load_lanes
from toolformer_dag.decoding.generation import DecodedCall
from toolformer_dag.evaluation.asking import Asking, ask_benchmark
from toolformer_dag.evaluation.benchmark_files import BenchmarkError
from toolformer_dag.evaluation.catalogue import read_benchmark
from toolformer_dag.evaluation.function_calls import has_right_calls
from toolformer_dag.evaluation.outcomes import Condition
from toolformer_dag.settings.settings_file import load_settings

PAINT = {
    "name": "shop.paint",
    "description": "Tells how much paint a wall takes.",
    "parameters": {
        "type": "dict",
        "properties": {
            "height": {"type": "float", "description": "metres", "required": True},
            "colour": {"type": "string", "enum": ["red", "blue"], "default": "red"},
            "corners": {"type": "tuple", "items": {"type": "any"}},
        },
        "required": ["height"],
    },
}
CLOCK: dict[str, Any] = {"name": "clock", "parameters": {"type": "dict", "properties": {}, "required": []}}
HIGH: list[dict[str, Any]] = [{"shop.paint": {"height": [2.5, 3], "colour": ["blue", ""]}}]


def record(key: str, text: str, *functions: dict[str, Any]) -> dict[str, Any]:
    return {"id": key, "question": [[{"role": "user", "content": text}]], "function": functions}


def write(folder: Path, name: str, records: Sequence[dict[str, Any]], right: dict[str, Any]) -> None:
    (folder / "possible_answer").mkdir(exist_ok=True)
    answers = [{"id": key, "ground_truth": truth} for key, truth in right.items()]
    for file, lines in ((folder / name, records), (folder / "possible_answer" / name, answers)):
        file.write_text("".join(f"{json.dumps(line)}\n" for line in lines))


def test_the_sets_of_a_folder_are_read_and_what_has_no_right_call_is_counted(tmp_path: Path) -> None:
    odd = {"name": "odd", "parameters": {"type": "dict", "properties": {"x": {"type": "HashMap"}}}}
    records = [
        record("a", " How much paint? ", PAINT, CLOCK),
        record("b", "What now?", CLOCK),
        record("c", "Odd?", odd),
        record("d", "Odd?", {**CLOCK, "name": "a b"}),
        {**record("e", "", CLOCK), "question": [[{"role": "system", "content": "Be brief."}]]},
    ]
    write(tmp_path, "BFCL_v4_multiple.json", records, dict.fromkeys("acde", HIGH))
    write(tmp_path, "BFCL_v4_live_parallel.json", [record("a", "Twice?", CLOCK)], {"a": [*HIGH, {"clock": {}}]})
    write(tmp_path, "BFCL_v4_simple_java.json", [{"not": "read"}], {})
    parallel, multiple = read_benchmark("functions", tmp_path)
    [asked] = multiple.questions
    assert (parallel.name, parallel.max_function_calls) == ("BFCL_v4_live_parallel", 2)
    assert (multiple.name, multiple.max_function_calls) == ("BFCL_v4_multiple", 1)
    assert asked.prompt == "Answer the following question: How much paint?"
    assert json.loads(asked.right_answers[0]) == HIGH
    first, second = json.loads(asked.context)
    assert [first["name"], second["name"]] == ["shop.paint", "clock"]
    types = {name: value.get("type") for name, value in first["parameters"]["properties"].items()}
    assert (first["parameters"]["type"], types) == (
        "object",
        {"height": "number", "colour": "string", "corners": "array"},
    )
    assert first["parameters"]["properties"]["corners"]["items"] == {}
    assert "required" not in first["parameters"]["properties"]["height"]
    assert multiple.left_out_counts == {"no_ground_truth": 1, "function_cannot_be_written": 2, "nobody_asks": 1}


def test_a_set_without_its_answers_or_with_others_is_named(tmp_path: Path) -> None:
    with pytest.raises(BenchmarkError, match=r"holds no \*_simple\.json or"):
        read_benchmark("functions", tmp_path)
    write(tmp_path, "X_simple.json", [record("a", "?", CLOCK)], {"a": [{"clock": {"x": 3}}]})
    with pytest.raises(BenchmarkError, match=r"possible_answer/X_simple\.json, record 1 has an unexpected shape"):
        read_benchmark("functions", tmp_path)
    (tmp_path / "possible_answer/X_simple.json").unlink()
    with pytest.raises(BenchmarkError, match=r"possible_answer/X_simple\.json cannot be read"):
        read_benchmark("functions", tmp_path)


def made(*calls: str) -> list[DecodedCall]:
    return [DecodedCall(*call.removesuffix(")").split("(", 1), "null", None) for call in calls]


TREE = [{"f": {"at": [{"x": [1, 2], "note": ["", "far"]}], "list": [[1, "Two"], [3]], "on": [True]}}]
BOTH = [{"f": {"a": [1, 2]}}, {"f": {"a": [1]}}, {"g": {}}]


@pytest.mark.parametrize(
    ("calls", "right", "expected"),
    [
        (["shop.paint(height=2.5)"], HIGH, True),
        (['shop.paint(height=3.0, colour="Blue")'], HIGH, True),
        (['shop.paint(height=3, colour="red")'], HIGH, False),
        (["shop.paint(height=4)"], HIGH, False),
        (['shop.paint(height="3")'], HIGH, False),
        (["shop.paint(height=3, corners=[])"], HIGH, False),
        (['shop.paint(colour="blue")'], HIGH, False),
        (["shop.pain(height=3)"], HIGH, False),
        (["shop.paint(height=3)", "shop.paint(height=2.5)"], HIGH, False),
        ([], HIGH, False),
        (['f(at={"x": 2}, list=[1, "t-w o"], on=true)'], TREE, True),
        (['f(at={"x": 1, "note": "far"}, list=[3], on=true)'], TREE, True),
        (['f(at={"x": 3}, list=[3], on=true)'], TREE, False),
        (['f(at={"note": "far"}, list=[3], on=true)'], TREE, False),
        (['f(at={"x": 1}, list=[3, 3], on=true)'], TREE, False),
        (['f(at={"x": 1}, list=[3], on=1)'], TREE, False),
        (["f(at=1, list=[3], on=true)"], TREE, False),
        (["f(a=1)", "g()", "f(a=2)"], BOTH, True),
        (["f(a=2)", "g()", "f(a=1)"], BOTH, True),
        (["f(a=2)", "g()", "f(a=2)"], BOTH, False),
    ],
)
def test_calls_are_compared_as_trees_and_several_in_any_order(
    calls: list[str], right: list[dict[str, Any]], expected: bool
) -> None:
    assert has_right_calls(made(*calls), json.dumps(right)) is expected


def test_a_repeated_call_counts_once_and_an_unfinished_one_is_wrong() -> None:
    call = made("shop.paint(height=3)")
    text = json.dumps(HIGH)
    assert has_right_calls([*call, DecodedCall("shop.paint", "height=3", None, "repeated_call")], text)
    assert not has_right_calls([DecodedCall("shop.paint", "height=3", None, "no_end")], text)


def test_a_model_calls_the_functions_of_its_question_and_no_other_tool(tmp_path: Path) -> None:
    """What a random model calls becomes the right answer, or another one, of the same question."""
    settings = load_settings(
        toml(
            tmp_path, "[tools.calculator]\n[decoding]\nk = 300\nmax_new_tokens = 12\n[sampling]\nmax_call_tokens = 60\n"
        )
    )
    model = tiny_model("Llama", tokenizer_of("merged"))
    texts = {str(at): f"How much paint for wall {at}?" for at in range(6)}
    records = [record(key, text, CLOCK, {**CLOCK, "name": "shop.time"}) for key, text in texts.items()]
    two = [{"clock": {}}, {"shop.time": {}}]
    write(tmp_path, "X_parallel.json", records, dict.fromkeys(texts, two))
    [asked] = read_benchmark("functions", tmp_path)
    asking = Asking(settings, load_lanes(settings), model, 300, frozenset(), asked.max_function_calls)
    written = asking.generate_texts([one.prompt for one in asked.questions], [one.context for one in asked.questions])
    calls = [[call for call in one.calls if call.result is not None] for one in written]
    assert {call.tool for some in calls for call in some} == {"clock", "shop.time"}
    assert all(call.result == "null" for some in calls for call in some) and max(map(len, calls)) > 1
    right = {key: [{call.tool: {}} for call in some] or two for key, some in zip(texts, calls, strict=True)}
    write(tmp_path, "X_parallel.json", records, right)
    [again] = read_benchmark("functions", tmp_path)
    again = replace(again, max_function_calls=asked.max_function_calls)
    expected = [has_right_calls(one.calls, json.dumps(right[key])) for key, one in zip(texts, written, strict=True)]
    found = ask_benchmark(settings, load_lanes(settings), model, Condition("tools", 300), again)
    assert [one.correct for one in found.outcomes] == expected and any(expected)
    silent = ask_benchmark(settings, load_lanes(settings), model, Condition("disabled", 0), again)
    assert not any(one.correct or one.calls for one in silent.outcomes)


def toml(folder: Path, text: str) -> Path:
    (folder / "toolformer.toml").write_text(text)
    return folder / "toolformer.toml"
