"""A call looks ahead when its input tells a number or a name that the text has only after the call."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from toolformer_dag.texts.look_ahead import NON_NAME_WORDS, NUMBERS_BY_WORD, TextUnits


def ahead(marked: str, input: str) -> list[str]:
    """The units ahead of a call that stands at the bar."""
    before, after = marked.split("|")
    return TextUnits.from_text(before + after).list_units_ahead(len(before), input)


@pytest.mark.parametrize(
    ("text", "input", "units"),
    [
        ("so many: |120/24 = 5", "24 * 5", ["24", "5"]),
        ("of 24 there were 5, so | 120/24 = 5", "24 * 5", []),
        ("It was | 1,240 in all", "1240 - 0", ["1240"]),
        ("1,240 and 2.50 give | 1240 or 2.5", "1240 * 2.5", []),
        ("half of it is | 12.5", "25 * 0.5", []),
        ("a dozen boxes of twenty-four are | 288, 24 and 12", "12 * 24", []),
        ("Twelve men make | 12", "12 / 1", []),
        ("a week has | 7 days", "7 * 1", []),
        ("it costs |5, no more", "5 + 1", ["5"]),
        ("Joe was born in |Scranton, Pennsylvania", '"In which state is Scranton?"', ["Scranton"]),
        ("Joe Biden's town is |Scranton", '"Where was Joe Biden born?"', []),
        ("Joe Biden said |that Biden's wife", '"Who is Biden\'s wife?"', []),
        ("He said that |Opened doors are open", '"What is open?"', []),
        ("He came. |The end", '"The end"', []),
        ("it is | red", '"Which colour is Mars?"', []),
        ("it was |5", "", []),
        ("la |Casa Blanca", "Casa", ["Casa"]),
        ("the word |ПРИВЕТ Мир", "Мир", ["Мир"]),
        ("in 12|345", "12345", ["12345"]),
        ("12|, 13", "12", []),
        ("1980|s", "1980", []),
    ],
)
def test_units_are_numbers_and_names_that_come_only_later(text: str, input: str, units: list[str]) -> None:
    assert ahead(text, input) == units


words = st.sampled_from(
    ["12", "1,200", "1200", "2.50", "2.5", ".5", "0.5", "twelve", "Rome", "rome", "The", "house", "5"]
)
texts = st.lists(words, max_size=12)


def slowly(before: list[str], after: list[str], input: list[str]) -> list[str]:
    """The rule over words, one at a time."""
    found: dict[str, str] = {}
    for word in input:
        same = [
            other for other in before if unit(other) == unit(word) or unit(word) in NUMBERS_BY_WORD.get(unit(other), ())
        ]
        later = [other for other in after if unit(other) == unit(word)]
        everywhere = [other for other in before + after if unit(other) == unit(word)]
        named = all(other[0].isupper() for other in everywhere) and unit(word) not in NON_NAME_WORDS
        if later and not same and (not word[0].isalpha() or named):
            found.setdefault(unit(word), word)
    return list(found.values())


def unit(word: str) -> str:
    if word[0].isalpha():
        return word.lower()
    return re.sub(r"^0(?=\.)", "", f"{float(word.replace(',', '')):g}")


@given(texts, texts, texts)
def test_the_rule_agrees_with_a_slow_one(before: list[str], after: list[str], input: list[str]) -> None:
    text = " ".join(before + after)
    offset = len(" ".join(before)) + (1 if before and after else 0)
    assert TextUnits.from_text(text).list_units_ahead(offset, " ".join(input)) == slowly(before, after, input)


@given(st.text(), st.text(), st.text())
def test_what_the_text_has_before_or_nowhere_is_never_ahead(before: str, after: str, input: str) -> None:
    text = before + after
    units = TextUnits.from_text(text)
    assert units.list_units_ahead(len(text), input) == []
    assert TextUnits.from_text(before + " " + before).list_units_ahead(len(before), before) == []
    assert all(one in input for one in units.list_units_ahead(len(before), input))
