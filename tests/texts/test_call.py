"""e(c) and e(c, r), alone, in chains and in texts: written, read, and taken out byte for byte."""

import re

import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from toolformer_dag.texts.arguments import format_arguments
from toolformer_dag.texts.calls import (
    Call,
    MalformedCall,
    PlacedCall,
    SpliceError,
    clean_result,
    find_call_fault,
    format_call,
    has_call_to_tools,
    parse_call,
    parse_placed_calls,
    remove_calls,
    splice,
)
from toolformer_dag.texts.chains import (
    ChainLink,
    build_swap_comparisons,
    compute_least_need,
    format_chain_json,
    format_chain_text,
    parse_chain,
)


@pytest.mark.parametrize(
    ("call", "result", "text"),
    [
        (Call("Calculator", "400 / 1400"), None, " [Calculator(400 / 1400)]"),
        (Call("Calculator", "400 / 1400"), "0.29", " [Calculator(400 / 1400) -> 0.29]"),
        (Call("Calendar", ""), "Today is Friday.", " [Calendar() -> Today is Friday.]"),
        (Call("QA", '"Where was Joe Biden born?"'), "", ' [QA("Where was Joe Biden born?") -> ]'),
    ],
)  # fmt: skip
def test_e_of_c_as_in_the_paper(call: Call, result: str | None, text: str) -> None:
    assert format_call(call, result) == text


@given(st.text().filter(lambda text: find_call_fault(Call("QA", text)) is None and not re.search(r"\[.*\(", text)))
def test_an_input_is_read_as_it_was_written(text: str) -> None:
    assert parse_call(format_call(Call("QA", text))[2:-1]) == Call("QA", text)


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("", "not_a_call"), ("Calculator", "not_a_call"), ("Calculator(1", "not_a_call"), ("(1)", "not_a_call"),
        ("Two words(1)", "not_a_call"), ("Calculator(1) 2", "not_a_call"), ("QA(x) -> y", "not_a_call"),
        ("QA(x) -> y)", "arrow_in_input"), ("QA(x])", "bracket_in_input"), ("QA(a\nb)", "newline_in_input"),
        ("QA(a\n)", "newline_in_input"), ("QA(a\u2028b)", "newline_in_input"),
        ('QA("Where?") Scranton, [QA("In which state?")', "call_in_input"),
        ("Calendar() closed. [Calendar()", "call_in_input"),
    ],
)  # fmt: skip
def test_what_is_no_call_has_a_reason(body: str, reason: str) -> None:
    with pytest.raises(MalformedCall) as refused:
        parse_call(body)
    assert refused.value.reason == reason


def test_parentheses_and_brackets_that_do_no_harm_stay_in_the_input() -> None:
    assert parse_call("Calculator((1 + 2) * (3))") == Call("Calculator", "(1 + 2) * (3)")
    assert parse_call(" MT(a [b)") == Call("MT", "a [b")


@given(st.text(), st.integers(0, 40))
@example("a b", 2)
def test_a_cleaned_result_is_one_short_harmless_line(raw: str, limit: int) -> None:
    clean = clean_result(raw, limit)
    assert len(clean) <= limit
    assert not set(clean) & set("[]\n\r\t\x00\u202e\u2066") and "->" not in clean
    assert clean == clean.strip() and clean.splitlines() in ([], [clean])
    assert clean_result(clean, limit) == clean
    clean.encode()


def test_a_harmless_result_stays_as_it_is() -> None:
    for text in (
        "0.29",
        "Today is Monday, January 30, 2023.",
        "Ghana > Flag > Red, gold and green",
        "می\u200cخواهم",
        "a - > b",
    ):
        assert clean_result(text, 300) == text


def test_what_cleaning_writes_instead() -> None:
    assert clean_result("a -> [b]\n\n c\x00d\u202e", 300) == "a → (b) cd"
    assert clean_result("\u200b\n", 300) == ""
    assert clean_result("\u200d", 300) == clean_result("\u200c \u200d\n", 300) == clean_result("\u200da", 1) == ""


def test_a_text_holds_a_call_when_one_begins_in_it() -> None:
    for text in ("a [QA(b)] c", "a [QA(b", "a [QA(b) -> c] d"):
        assert has_call_to_tools(text, ["QA", "MT"])
        assert not has_call_to_tools(text, ["MT"]) and not has_call_to_tools(text, [])
    for text in ("a[QA(b)]", "a [QA (b)]", "a [1] [QA]", "[QA(b)]", ""):
        assert not has_call_to_tools(text, ["QA"])


@pytest.mark.parametrize("line_end", ["\n", "\r", "\x0b", "\x85", "\u2028"])
def test_no_input_breaks_the_line_outside_of_a_string(line_end: str) -> None:
    for asked in (f"1{line_end}2", f"¹={line_end}", f'days=3,{line_end}city="Rome"'):
        assert find_call_fault(Call("Weather", asked)) == "newline_in_input"
    assert find_call_fault(Call("Weather", 'city="Ro\u2028me"')) is None


TOOLS = ["Calculator", "Calendar", "WikiSearch", "QA", "MT"]
PIECES = [" [", "]", "[", "QA(", "QA", " [QA", "(", ") -> ", "->", " ", "\n", "\r\n", "é", "\u202e", "x", "\x00", "1"]
TEXTS = st.text() | st.lists(st.sampled_from(PIECES), max_size=30).map("".join)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | TEXTS.filter(lambda text: len(text.splitlines()) < 2),
    lambda values: st.lists(values, max_size=3) | st.dictionaries(TEXTS.filter(str.isprintable), values, max_size=3),
    max_leaves=5,
)
NAMED = st.dictionaries(st.sampled_from(["city", "days", "a_1", "ort"]), VALUES, min_size=1, max_size=3).map(
    lambda arguments: format_arguments(arguments, {})
)
INPUTS = (
    TEXTS.map(lambda text: clean_result(text, 60))
    | st.sampled_from([" [QA(", "a) -", "[", "(", "", "a=[5", "a=(5", "x = 3"])
    | NAMED
).filter(lambda text: find_call_fault(Call("QA", text)) is None)
RESULTS = TEXTS.map(lambda text: clean_result(text, 60))
CALLS = st.builds(PlacedCall, st.integers(0, 60), st.builds(Call, st.sampled_from(TOOLS), INPUTS), RESULTS)


def one_by_one(text: str, calls: list[PlacedCall]) -> str:
    """The obvious reference: insert from the last offset to the first."""
    for placed in sorted(calls, key=lambda placed: -placed.offset):
        inserted = format_call(placed.call, placed.result)
        text = text[: placed.offset] + inserted + text[placed.offset :]
    return text


@given(TEXTS, st.lists(CALLS, max_size=6, unique_by=lambda placed: placed.offset))
@example(
    "ab", [PlacedCall(0, Call("QA", ""), ""), PlacedCall(1, Call("MT", "x"), "y"), PlacedCall(2, Call("QA", "z"), "")]
)
@example(" [QA", [PlacedCall(4, Call("QA", " [QA("), "(")])
@example(" ", [PlacedCall(1, Call("QA", "x"), "y")])
@example("", [PlacedCall(0, Call("QA", "x"), "y")])
def test_taking_out_gives_the_text_back(text: str, calls: list[PlacedCall]) -> None:
    assume(not has_call_to_tools(text, TOOLS))
    calls = [placed for placed in calls if placed.offset <= len(text)]
    spliced = splice(text, calls)
    assert spliced == one_by_one(text, calls)
    assert remove_calls(spliced, TOOLS) == text
    assert parse_placed_calls(spliced, TOOLS) == sorted(calls, key=lambda placed: placed.offset)


@pytest.mark.parametrize(
    ("calls", "message"),
    [
        ([PlacedCall(5, Call("QA", ""), "")], "outside the text"),
        ([PlacedCall(-1, Call("QA", ""), "")], "outside the text"),
        ([PlacedCall(1, Call("QA", "]"), "")], "bracket_in_input"),
        ([PlacedCall(1, Call("QA", ""), "a] b")], "clean the result"),
        ([PlacedCall(1, Call("QA", ""), "a -> b")], "clean the result"),
        ([PlacedCall(1, Call("QA", ""), "a\nb")], "clean the result"),
        ([PlacedCall(1, Call("Q A", ""), "")], "bad_name"),
        ([PlacedCall(1, Call("QA", 'a="b'), "")], "open_quote"),
        ([PlacedCall(1, Call("QA", 'a="b"]'), "")], "bracket_in_input"),
        ([PlacedCall(1, Call("QA", ""), 'a="]"')], "clean the result"),
    ],
)
def test_what_could_not_be_taken_out_is_refused(calls: list[PlacedCall], message: str) -> None:
    with pytest.raises(SpliceError, match=message):
        splice("text", calls)


def test_the_paper_s_example() -> None:
    text = "Out of 1400 participants, 400 (or 29%) passed the test."
    placed = PlacedCall(33, Call("Calculator", "400 / 1400"), "0.29")
    spliced = "Out of 1400 participants, 400 (or [Calculator(400 / 1400) -> 0.29] 29%) passed the test."
    assert splice(text, [placed]) == spliced


def test_taking_out_what_others_wrote() -> None:
    assert remove_calls("a [QA(b)] c [MT(d) -> e] f", TOOLS) == "a c f"
    assert remove_calls("a [QA(b)] c [MT(d) -> e] f", ["MT"]) == "a [QA(b)] c f"
    assert remove_calls("a [QA(b c", TOOLS) == "a [QA(b c"
    assert remove_calls("a [1] b", TOOLS) == "a [1] b"


def test_a_call_without_a_result_is_no_placed_call() -> None:
    assert parse_placed_calls("a [QA(b) -> c] d", TOOLS) == [PlacedCall(1, Call("QA", "b"), "c")]
    with pytest.raises(MalformedCall, match="no_result"):
        parse_placed_calls("a [QA(b)] c", TOOLS)


def test_a_million_openings_that_never_close_are_read_once() -> None:
    text = " [QA(" * 1_000_000
    assert remove_calls(text, TOOLS) == text


WORDS = st.text('ab 0"é', min_size=1, max_size=8)
LINKS = st.lists(st.builds(ChainLink, st.sampled_from(["QA", "Calculator"]), WORDS, WORDS), min_size=1, max_size=3)


@given(LINKS)
def test_a_chain_is_read_as_it_was_written(links: list[ChainLink]) -> None:
    assert parse_chain(format_chain_json(links)) == links
    assert parse_chain(None) == []


@given(LINKS, st.integers(0, 4))
def test_a_chain_stands_at_one_place_and_can_be_taken_out(links: list[ChainLink], offset: int) -> None:
    placed = [PlacedCall(offset, Call(link.tool, link.input), link.result) for link in links]
    spliced = splice("text", placed)
    assert spliced == "text"[:offset] + format_chain_text(links) + "text"[offset:]
    assert parse_placed_calls(spliced, TOOLS) == placed and remove_calls(spliced, TOOLS) == "text"


def test_each_earlier_result_is_exchanged_before_each_later_call() -> None:
    links = [ChainLink("QA", "a", "1"), ChainLink("QA", "b", "2"), ChainLink("Calculator", "1 + 2", "3")]
    asked = build_swap_comparisons(links, ["8", "9"])
    one = " [QA(a) -> 1]"
    two = " [QA(b) -> 2]"
    assert asked == [
        (one, " [QA(a) -> 8]", " [QA(b)]"),
        (one + two, " [QA(a) -> 8]" + two, " [Calculator(1 + 2)]"),
        (one + two, one + " [QA(b) -> 9]", " [Calculator(1 + 2)]"),
    ]


def test_the_result_that_is_needed_least_tells_the_need() -> None:
    """The first result helps the last call alone, by 5; the second one by 3."""
    assert compute_least_need(3, [-0.5, 5.0, 3.0]) == 3.0
    assert compute_least_need(3, [-0.5, -0.1, 3.0]) == -0.1
    assert compute_least_need(2, [2.5]) == 2.5
