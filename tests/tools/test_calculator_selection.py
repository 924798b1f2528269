"""Which texts the calculator looks at: the paper's three rules, against a slow reading of them."""

import random
from datetime import date
from fractions import Fraction
from itertools import chain, combinations, permutations
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.texts.reading import read_documents
from toolformer_dag.texts.document import Document
from toolformer_dag.tools.calculator_selection import (
    MAX_NUMBER_PAIRS,
    WINDOW_TOKENS,
    find_selection_rule,
    has_operation_with_result,
)
from toolformer_dag.tools.registry import load_tool
from toolformer_dag.tools.text_numbers import IDENTIFIER_PATTERN, UNITS_PER_ONE, find_numbers
from toolformer_dag.tools.tool import OverBudget

UNLUCKY = "no text of the hundredth part picked by its hash "


def document(text: str) -> Document:
    return Document("s", "d", "https://example.org/", "example.org", "", date(2020, 1, 1), "en", text)


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("", []), ("no number", []), ("7", [7]), ("In 2017, 1,234.5 people", [2017, 1234.5]),
        ("$5.50 (or 3)", [5.5, 3]), ("11.4%", [0.114]), ("5,763,868.", [5763868]), ("1,2,3", [1, 2, 3]),
        ("1, 2, 3.", [1, 2, 3]), ("2017-03-09", [2017]), ("10:30", [10, 30]), ("-5 and +6", [5, 6]),
        ("18+12=30", [18, 12, 30]), ("3/4", [3, 4]), ("1,234,56", [1, 234, 56]), ("007", []), ("0.5", [0.5]),
        ("20th 1990s x86 5kg B52 a_1 1_000", []), ("10.5kg", []), ("v1.2", []), ("version 1.2.3", []),
        ("127.0.0.1", []), ("1.234,56", []), ("1234567890123456", []), ("123456789012345", [123456789012345]),
        ("3.14159", [3.14159]), ("0.123456789012", [0.123456789012]), ("0.1234567890123", []),
        ("0.123456789012%", [0.00123456789012]), ("٣", []), ("50 %", [50]), ("99.99%", [0.9999]), ("5%x", [0.05]),
        ("a 1.", [1]), ("1..2", [1]), ("½", []), ("e5 5e", []),
        (".5", [0.5]), ("x = .5 and -.25%", [0.5, 0.0025]), ("a.5 ..5 ...5 .5kg .5.5 .5,5 .NET . .", []),
        ("“so”.5 (so).5", []), ("0,125", [0, 125]), ("1,023", [1023]),
        ("Rs 1,00,000", [100000]), ("25,00,000.50", [2500000.5]), ("1,000,000,000,000,000", []),
        ("1,00,00", []), ("0,05", []),
    ],
)  # fmt: skip
def test_numbers(text: str, values: list[float]) -> None:
    assert [Fraction(number.value_in_units, UNITS_PER_ONE) for number in find_numbers(text)] == [
        Fraction(repr(value)) for value in values
    ]


def near(a: Fraction, result: Fraction) -> bool:
    """Exact, or half up to two decimals; a whole number is only an exact result."""
    rounded = Fraction((result * 100 + Fraction(1, 2)).__floor__(), 100)
    return a == result or (a == rounded and a.denominator > 1)


def slowly(words: list[str]) -> bool:
    """Every triple of numbers in every order, on words that are one token each; no part of an account number counts."""
    words = IDENTIFIER_PATTERN.sub(lambda found: " ".join("w" for _ in found[0].split()), " ".join(words)).split()
    found = [(at, Fraction(word)) for at, word in enumerate(words) if word != "w"]
    for triple in combinations(found, 3):
        if triple[2][0] - triple[0][0] >= WINDOW_TOKENS:
            continue
        for (_, a), (_, b), (_, c) in permutations(triple):
            if any(near(c, result) for result in (a + b, a - b, a * b)) or (b and near(c, a / b)):
                return True
    return False


NUMBERS = st.sampled_from(
    [
        "17",
        "23",
        "40",
        "6",
        "0.26",
        "391",
        "0.74",
        "1994",
        "2011",
        "1.35",
        "4.42",
        "1001",
        "7.7",
        "0",
        "1.125",
        "2.5",
        "3.63",
        "1",
        "1999",
        "2001",
        "0.0005",
    ]
)
FILLERS = st.sampled_from([0, 0, 1, 3, 30, 48, 49, 50, 51, 97, 98, 99, 100, 250]).map(lambda count: ["w"] * count)


@given(
    st.lists(st.tuples(FILLERS, NUMBERS).map(lambda pair: [*pair[0], pair[1]]), max_size=7).map(
        lambda parts: list(chain.from_iterable(parts))
    )
)
def test_an_operation_within_a_hundred_tokens(words: list[str]) -> None:
    text = " ".join(words)
    assert has_operation_with_result(text, find_numbers(text)) == slowly(words)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("From 1994 until 2011, so in total 17 years.", "operation"),
        ("252 matches were played, and 723 goals were scored: 2.87 per match", "operation"),
        ("Out of 1400 participants, 400 (or 0.29) passed the test.", "operation"), ("18, 12 and 30", "operation"),
        ("20% of 50 is 10", "operation"), ("1,234.5 and 0.5 and 1,235", "operation"), ("x = 7", "phrase"),
        ("it equals 7", "phrase"), ("equal to\n7", "phrase"), ("A Total of $7", "phrase"),
        ("an average of (7", "phrase"), ("x=7", "phrase"), ("equals -7", "phrase"), ("a total of seven", None),
        ("7 = x", None), ("an average 7", None), ("total of about 7", None), ("", None),
        (UNLUCKY + "7 19 1000", None), (UNLUCKY + "7 19", None), ("= 7th", None),
        ("π is equal to 3.14159.", "phrase"), ("a total  of 5", "phrase"), ("equal\xa0to 5", "phrase"),
        ("average\n\u2009of\u202f5", "phrase"), ("x = .5", "phrase"), ("x equals .5%", "phrase"),
        (UNLUCKY + "a loan of Rs 25,00,000 in 2019", None),
        (UNLUCKY + "Version 1 was out in 1999, the next in 2001", None), (UNLUCKY + "7 of 1000000, none: 0", None),
        ("499 and 735 make 1.47", "operation"), ("1999 to 2001 is 1.00100050025", None),
        (UNLUCKY + "Pay to DE89 3704 0044 0532 0130 00 by Friday", None), (UNLUCKY + "card 4111 1111 1111 2222", None),
        (UNLUCKY + "AT61 1904 3002 3457 3201, 1904 and 3808", None), (UNLUCKY + "call +44 20 40 60 20", None),
        (UNLUCKY + "room 007, 07 and 14", None), ("1100 seats, 1000 sold, 100 left", "operation"),
        ("2.71828 and 3.14159 make 5.85987", "operation"), ("totalof 5", None),
    ],
)  # fmt: skip
def test_rules(text: str, reason: str | None) -> None:
    assert find_selection_rule(text, text) == reason


@pytest.mark.parametrize(
    ("between", "reason"),
    [
        ("word " * 97, "operation"),
        ("word " * 98, None),
        ("." * 97 + " ", "operation"),
        ("." * 98 + " ", None),
        ("7,654,321.5 " * 97, "operation"),
    ],
)
def test_words_marks_and_numbers_are_a_token_each_and_three_numbers_stand_in_a_hundred(
    between: str, reason: str | None
) -> None:
    assert find_selection_rule(f"{UNLUCKY}18 12 {between}30", UNLUCKY) == reason


def test_one_percent_of_the_texts_with_three_numbers_and_always_the_same() -> None:
    texts = [f"{number} and 50021 and 7" for number in range(1_000_000, 1_010_000)]
    picked = [text for text in texts if find_selection_rule(text, text)]
    assert 70 < len(picked) < 130
    assert picked == [text for text in texts if find_selection_rule(text, text) == "three_numbers"]


def test_a_segment_is_picked_with_its_document() -> None:
    tool = load_tool("calculator", {})
    whole = next(
        text for text in (f"7 and 50021 and {n}.\nx" for n in range(10**6, 10**7)) if find_selection_rule(text, text)
    )
    assert tool.wants_document(document(whole)) == tool.wants(whole.split("\n")[0], document(whole)) == "three_numbers"
    assert tool.wants("7 and 8", document(whole)) is None


def test_a_text_of_nothing_but_unrelated_numbers_is_read_in_one_pass() -> None:
    text = " ".join(str(100_003 + 7919 * n * n) for n in range(1500))
    found = find_numbers(text)
    assert len(found) == 1500 and not has_operation_with_result(text, found)
    assert has_operation_with_result(text + " 18 12 30", find_numbers(text + " 18 12 30"))


def unrelated(count: int) -> str:
    """Numbers of twelve digits, no three of which are related."""
    generator = random.Random(0)
    return " ".join(str(generator.randrange(10**11, 10**12)) for _ in range(count))


def test_a_text_that_costs_more_pairs_than_the_budget_is_given_up() -> None:
    rows = MAX_NUMBER_PAIRS // (WINDOW_TOKENS - 1)
    assert find_selection_rule(unrelated(rows), UNLUCKY) is None
    with pytest.raises(OverBudget):
        find_selection_rule(unrelated(rows + WINDOW_TOKENS), UNLUCKY)


def test_no_segment_of_a_real_document_meets_a_rule_that_the_document_does_not(shared: Path) -> None:
    path = shared / "data" / "ccnet" / "en_head_0000.json.gz"
    texts = [item.text for item in read_documents(path, "0") if isinstance(item, Document)][:400]
    reasons = [find_selection_rule(text, text) for text in texts]
    assert {"operation", "phrase"} < set(reasons)
    for text, reason in zip(texts, reasons, strict=True):
        if reason is None:
            assert all(find_selection_rule(paragraph, text) is None for paragraph in text.split("\n"))
