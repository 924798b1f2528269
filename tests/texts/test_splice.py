"""Calls in, calls out: the text comes back byte for byte."""

import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from toolformer_dag.texts.arguments import write_arguments
from toolformer_dag.texts.calls import (
    Call,
    MalformedCall,
    PlacedCall,
    SpliceError,
    clean_result,
    fault,
    format_call,
    holds_call,
    placed_calls,
    splice,
    take_out,
)

TOOLS = ["Calculator", "Calendar", "WikiSearch", "QA", "MT"]
PIECES = [" [", "]", "[", "QA(", "QA", " [QA", "(", ") -> ", "->", " ", "\n", "\r\n", "é", "\u202e", "x", "\x00", "1"]
TEXTS = st.text() | st.lists(st.sampled_from(PIECES), max_size=30).map("".join)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | TEXTS.filter(lambda text: len(text.splitlines()) < 2),
    lambda values: st.lists(values, max_size=3) | st.dictionaries(TEXTS.filter(str.isprintable), values, max_size=3),
    max_leaves=5,
)
NAMED = st.dictionaries(st.sampled_from(["city", "days", "a_1", "ort"]), VALUES, min_size=1, max_size=3).map(
    lambda arguments: write_arguments(arguments, {})
)
INPUTS = (
    TEXTS.map(lambda text: clean_result(text, 60))
    | st.sampled_from([" [QA(", "a) -", "[", "(", "", "a=[5", "a=(5", "x = 3"])
    | NAMED
).filter(lambda text: fault(Call("QA", text)) is None)
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
    assume(not holds_call(text, TOOLS))
    calls = [placed for placed in calls if placed.offset <= len(text)]
    spliced = splice(text, calls)
    assert spliced == one_by_one(text, calls)
    assert take_out(spliced, TOOLS) == text
    assert placed_calls(spliced, TOOLS) == sorted(calls, key=lambda placed: placed.offset)


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
    assert take_out("a [QA(b)] c [MT(d) -> e] f", TOOLS) == "a c f"
    assert take_out("a [QA(b)] c [MT(d) -> e] f", ["MT"]) == "a [QA(b)] c f"
    assert take_out("a [QA(b c", TOOLS) == "a [QA(b c"
    assert take_out("a [1] b", TOOLS) == "a [1] b"


def test_a_call_without_a_result_is_no_placed_call() -> None:
    assert placed_calls("a [QA(b) -> c] d", TOOLS) == [PlacedCall(1, Call("QA", "b"), "c")]
    with pytest.raises(MalformedCall, match="no_result"):
        placed_calls("a [QA(b)] c", TOOLS)


def test_a_million_openings_that_never_close_are_read_once() -> None:
    text = " [QA(" * 1_000_000
    assert take_out(text, TOOLS) == text
