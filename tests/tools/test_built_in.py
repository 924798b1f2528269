"""The built-in tools: the paper's names, thresholds, prompts and worked examples; the calendar; quotes of inputs."""

import calendar
import json
import locale
import re
from datetime import date
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from toolformer_dag.evaluation.paper_tables import PAPER_FIGURES
from toolformer_dag.settings.settings_file import load_settings
from toolformer_dag.texts.calls import Call, parse_call, parse_placed_calls, remove_calls, splice
from toolformer_dag.texts.document import Document
from toolformer_dag.tools.prompts import ToolError
from toolformer_dag.tools.registry import list_built_in_tool_names, load_tool
from toolformer_dag.tools.tool import ToolCall, ToolDefaults, ToolResult, unquote

RARE = ToolDefaults(tau_s=0.05, k=5, m=5, tau_f=1.0)
EAGER = ToolDefaults(tau_s=0.0, k=20, m=10, tau_f=0.5)
PAPER = {  # appendix A, "API Call Sampling" and Table 2
    "calculator": ("Calculator", EAGER),
    "calendar": ("Calendar", RARE),
    "machine_translation": ("MT", EAGER),
    "question_answering": ("QA", RARE),
    "wiki_search": ("WikiSearch", RARE),
}
TOOLS = sorted(PAPER)
PROMPTS = {
    "calculator": (5, 7),
    "calendar": (5, 6),
    "machine_translation": (3, 4),
    "question_answering": (2, 5),
    "wiki_search": (3, 4),
}
"""Examples and calls in the prompts of appendix A.2."""


@pytest.mark.parametrize("key", TOOLS)
def test_names_thresholds_and_prompts_are_the_paper_s(key: str) -> None:
    tool = load_tool(key, {})
    assert (tool.name, tool.defaults) == PAPER[key]
    examples, calls = PROMPTS[key]
    assert tool.prompt.count("Input:") == tool.prompt.count("Output:") == examples
    assert tool.prompt.count(f"[{tool.name}(") == calls


@pytest.fixture(scope="module")
def appendix(shared: Path) -> list[str]:
    """The prompts of appendix A.2 without white space, in the order of the paper; where lines broke, none is known."""
    text = re.sub(r"--- PAGE \d+ ---", "", (shared / "paper" / "toolformer.txt").read_text("utf-8"))
    appendix = text[text.index("A.2 Prompts") : text.index("B Toolformer Training")]
    prompts = re.findall(r"Your task is to .*?(?=Input: x\s)", appendix, flags=re.DOTALL)
    return ["".join(prompt.split()) for prompt in prompts]


@pytest.mark.parametrize("profile", ["gptj", "gpt2"])
def test_the_papers_profiles_have_every_word_of_its_prompts(
    appendix: list[str], profile: str, caplog: pytest.LogCaptureFixture
) -> None:
    sections = load_settings(profile=profile, environment={}).tools
    loaded = {key: load_tool(key, section.get_tool_options()) for key, section in sections.items()}
    order = ("question_answering", "calculator", "wiki_search", "machine_translation", "calendar")
    assert ["".join(loaded[key].prompt.split()) for key in order] == appendix
    assert not caplog.messages  # two of them change the text; the page of decisions says so, not every command


@pytest.mark.parametrize("key", TOOLS)
def test_the_synthetic_world_s_prompt_fits_the_tool_too(key: str) -> None:
    assert load_tool(key, {"prompt": "embedded"}).prompt != load_tool(key, {}).prompt


@pytest.mark.parametrize("key", TOOLS)
def test_a_mistyped_option_is_refused(key: str) -> None:
    with pytest.raises(ToolError, match=rf"\[tools.{key}\] promt: unknown key; did you mean 'prompt'"):
        load_tool(key, {"promt": "x"})


NAMES = ("QA", "Calculator", "MT", "WikiSearch", "Calendar")
KEYS = {load_tool(key, {}).name: key for key in list_built_in_tool_names() if key != "mcp"}
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
    [placed] = parse_placed_calls(text, NAMES)
    assert (placed.call, placed.result, placed.offset) == (call, result, len(before))
    plain = remove_calls(text, NAMES)
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


@pytest.mark.parametrize("example", PAPER_FIGURES["example"], ids=lambda example: example["call"][:30])
def test_the_calls_of_table_10_have_their_results(example: dict[str, str]) -> None:
    written, _, result = example["call"].partition(" -> ")
    call = parse_call(written)
    dates = {"March 9": "2017-03-09", "April 19": "2013-04-19", "June 25": "2011-06-25"}
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


CALENDAR = load_tool("calendar", {})


def document(day: date | None) -> Document:
    return Document("s", "d", "https://example.org/", "example.org", "", day, "en", "text")


@given(st.dates())
def test_every_day_is_named_as_the_standard_library_names_it(day: date) -> None:
    assert locale.getlocale(locale.LC_TIME)[0] in (None, "C", "en_US", "C.UTF-8")
    name = calendar.day_name[day.weekday()]
    month = calendar.month_name[day.month]
    expected = f"Today is {name}, {month} {day.day}, {day.year}."
    assert CALENDAR.run([ToolCall("", CALENDAR.context(document(day)))]) == [ToolResult(expected)]


def test_without_a_context_it_is_today() -> None:
    before = date.today()
    results = CALENDAR.run([ToolCall("")])
    after = date.today()
    assert results[0] in [CALENDAR.run([ToolCall("", day.isoformat())])[0] for day in (before, after)]


def test_what_has_no_result_has_a_reason_and_the_others_stay() -> None:
    calls = [
        ToolCall("today", "2023-01-30"),
        ToolCall(" ", "2023-01-30"),
        ToolCall('""', "2023-02-30"),
        ToolCall('""', "x"),
        ToolCall("", "2020-02-29"),
    ]
    assert CALENDAR.run(calls) == [
        ToolResult(None, "input_not_empty"),
        ToolResult("Today is Monday, January 30, 2023."),
        ToolResult(None, "bad_context"),
        ToolResult(None, "bad_context"),
        ToolResult("Today is Saturday, February 29, 2020."),
    ]


def test_it_wants_the_texts_whose_url_holds_a_date() -> None:
    dated = document(date(2017, 3, 9))
    undated = document(None)
    assert CALENDAR.wants_document(dated) == CALENDAR.wants("a segment", dated) == "date_in_url"
    assert CALENDAR.wants_document(undated) is None and CALENDAR.wants("a segment", undated) is None
    assert CALENDAR.context(dated) == "2017-03-09" and CALENDAR.context(undated) == ""


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", ""), ('"', '"'), ('""', ""), ("a", "a"), (' "a b" ', "a b"), ("'76'", "76"), ("“a ”", "a"), ("«a»", "a"),
        ('"a', '"a'), ('“a"', '“a"'), ("l'été d'", "l'été d'"), ("'It's Tom's'", "It's Tom's"),
        ("‘It’s the dogs’ food’", "It’s the dogs’ food"), ('"He said "hi" to me"', 'He said "hi" to me'),
        ("“He said “hi” and “ho” to me”", "He said “hi” and “ho” to me"), ('"a"b"', 'a"b'), ('""a""', '"a"'),
        ('5" or 6"', '5" or 6"'),
    ],
)  # fmt: skip
def test_one_pair_around_all_of_it(text: str, expected: str) -> None:
    assert unquote(text) == expected


@pytest.mark.parametrize(
    "text",
    [
        '"Hamlet" or "Macbeth"', '"Hamlet","Macbeth"', '"a" "b" "c"', "'Hamlet's ghost' or 'Tom's'", "“a” and “b”",
        "‘Tom’s’ and ‘b’", "«a» «b»", '"What?" (not "Why?")...\n"Who?"',
    ],
)  # fmt: skip
def test_two_quotations_stay(text: str) -> None:
    assert unquote(text) == text


@given(st.text(), st.sampled_from(['""', "''", "“”", "‘’", "«»"]))
def test_a_text_without_quotes_loses_those_around_it(text: str, pair: str) -> None:
    plain = "".join(character for character in text if character not in "\"'“”‘’«»").strip()
    assert unquote(f" {pair[0]}{plain}{pair[1]}\n") == unquote(plain) == plain


def test_a_long_text_of_quotes_is_read_in_one_pass() -> None:
    for text in ('"' * 1_000_000, '"a" ' * 300_000 + '"', "'a" * 500_000 + "'", '"a ' + '"b ' * 300_000 + '"'):
        assert unquote(text) in (text, text[1:-1].strip())
