"""e(c) and e(c, r): writing, reading, and results that come from outside."""

import re

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from toolformer_dag.texts.calls import Call, MalformedCall, clean_result, fault, format_call, holds_call, parse_call

NAMES = st.sampled_from(["Calculator", "QA", "WikiSearch", "MT", "Calendar"])
INPUTS = st.text().filter(lambda text: fault(Call("QA", text)) is None and not re.search(r"\[.*\(", text))


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


@given(NAMES, INPUTS)
def test_what_is_written_is_read_again(tool: str, text: str) -> None:
    assert parse_call(format_call(Call(tool, text))[2:-1]) == Call(tool, text)


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
        assert holds_call(text, ["QA", "MT"])
        assert not holds_call(text, ["MT"]) and not holds_call(text, [])
    for text in ("a[QA(b)]", "a [QA (b)]", "a [1] [QA]", "[QA(b)]", ""):
        assert not holds_call(text, ["QA"])


@pytest.mark.parametrize("line_end", ["\n", "\r", "\x0b", "\x85", "\u2028"])
def test_no_input_breaks_the_line_outside_of_a_string(line_end: str) -> None:
    for asked in (f"1{line_end}2", f"¹={line_end}", f'days=3,{line_end}city="Rome"'):
        assert fault(Call("Weather", asked)) == "newline_in_input"
    assert fault(Call("Weather", 'city="Ro\u2028me"')) is None
