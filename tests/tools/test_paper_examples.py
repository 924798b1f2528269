"""The worked examples of the paper: Figure 1, Table 1, the calls of Table 10 and of the prompts."""

import json
import re
from pathlib import Path

import pytest

from toolformer_dag.evaluation.paper_tables import FIGURES
from toolformer_dag.texts.calls import Call, parse_call, placed_calls, splice, take_out
from toolformer_dag.tools.registry import built_in_tools, load_tool
from toolformer_dag.tools.tool import ToolCall, unquote

NAMES = ("QA", "Calculator", "MT", "WikiSearch", "Calendar")
KEYS = {load_tool(key, {}).name: key for key in built_in_tools() if key != "mcp"}
FIGURE_1 = [
    (
        "The New England Journal of Medicine is a registered trademark of",
        Call("QA", "“Who is the publisher of The New England Journal of Medicine?”"),
        "Massachusetts Medical Society",
        " the MMS.",
    ),
    ("Out of 1400 participants, 400 (or", Call("Calculator", "400 / 1400"), "0.29", " 29%) passed the test."),
    (
        "The name derives from “la tortuga”, the Spanish word for",
        Call("MT", "“tortuga”"),
        "turtle",
        " turtle.",
    ),
    (
        "The Brown Act is California’s law",
        Call("WikiSearch", "“Brown Act”"),
        "The Ralph M. Brown Act is an act of the California State Legislature that guarantees the public's right to "
        "attend and participate in meetings of local legislative bodies.",
        " that requires legislative bodies, like city councils, to hold their meetings open to the public.",
    ),
]
FISHING = (
    "Spin fishing is distinguished between fly fishing and bait cast fishing by the type of rod and reel used. There "
    "are two types of reels used when spin fishing, the open faced reel and the closed faced reel."
)


def asked(key: str, input: str, context: str = "", **options: object) -> str | None:
    return load_tool(key, options).run([ToolCall(input, context)])[0].result


@pytest.mark.parametrize(("before", "call", "result", "after"), FIGURE_1, ids=[call.tool for _, call, _, _ in FIGURE_1])
def test_figure_1_is_written_as_in_the_paper_and_read_back(before: str, call: Call, result: str, after: str) -> None:
    text = f"{before} [{call.tool}({call.input}) -> {result}]{after}"
    [placed] = placed_calls(text, NAMES)
    assert (placed.call, placed.result, placed.offset) == (call, result, len(before))
    plain = take_out(text, NAMES)
    assert plain == before + after and splice(plain, [placed]) == text
    assert unquote(call.input) == call.input.strip("“”")


def test_table_1(tmp_path: Path) -> None:
    assert asked("calculator", "27 + 4 * 2") == "35"
    assert asked("calendar", "", "2023-01-30") == "Today is Monday, January 30, 2023."
    texts = (FISHING, "A fish of the sea.", "The reel of a film is a type of spool.")
    lines = [json.dumps({"id": n, "title": "Spin fishing", "text": text}) for n, text in enumerate(texts)]
    (tmp_path / "wiki.jsonl").write_text("\n".join(lines))
    found = asked("wiki_search", "Fishing Reel Types", passages=str(tmp_path / "wiki.jsonl"), index_folder=tmp_path)
    assert found == f"Spin fishing > {FISHING}"


@pytest.mark.parametrize("example", FIGURES["example"], ids=lambda example: example["call"][:30])
def test_the_calls_of_table_10_have_their_results(example: dict[str, str]) -> None:
    written, _, result = example["call"].partition(" -> ")
    call, dates = parse_call(written), {"March 9": "2017-03-09", "April 19": "2013-04-19", "June 25": "2011-06-25"}
    assert KEYS[call.tool] == example["tool"] and result
    context = next((iso for day, iso in dates.items() if day in result), "")
    if call.tool == "Calendar":
        assert context and asked("calendar", call.input, context) == result
    if call.tool == "Calculator":  # a trailing zero is no digit of ours
        assert asked("calculator", call.input) == result.removesuffix("0")


def test_every_call_of_the_prompts_can_be_run() -> None:
    outputs = {name: " ".join(re.findall(r"Output: (.*)", load_tool(key, {}).prompt)) for name, key in KEYS.items()}
    inputs = {name: [parse_call(body).input for body in re.findall(r"\[([^]]*)\]", outputs[name])] for name in NAMES}
    results = [asked("calculator", expression) for expression in inputs["Calculator"]]
    assert results == ["54", "5779763.16", "2.87", "703", "17", "120"]
    assert inputs["Calendar"] == [""] * 5 and [len(inputs[name]) for name in NAMES] == [4, 6, 3, 3, 5]
