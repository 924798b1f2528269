"""Where the rules of the built-in tools propose calls, and what they read of the text after a call."""

import json
import operator
import random
from fractions import Fraction
from pathlib import Path

import pytest

from toolformer_dag.texts.look_ahead import TextUnits
from toolformer_dag.tools.built_in.calculator import evaluate_expression
from toolformer_dag.tools.registry import load_tool
from toolformer_dag.tools.rules.facts import propose_searches
from toolformer_dag.tools.rules.glosses import propose_glosses
from toolformer_dag.tools.rules.questions import propose_questions
from toolformer_dag.tools.rules.sums import propose_sums
from toolformer_dag.tools.tool import NoResult, ProposedCall


def sums(text: str, strict: bool = False) -> dict[str, list[str]]:
    """The calls by the word before which they stand."""
    found: dict[str, list[str]] = {}
    for one in propose_sums(text, strict):
        found.setdefault(text[one.offset :].split()[0].rstrip(".,"), []).append(one.input)
    return found


EXACT = {"+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.truediv}


def by_hand(numbers: list[str], target: str) -> set[str]:
    """Every `a op b` of two numbers before whose result, as the calculator writes it, is the target."""
    found = set()
    for at, a in enumerate(numbers):
        for b in numbers[:at]:
            for call in (f"{x} {sign} {y}" for x, y in ((a, b), (b, a)) for sign in "+-*/"):
                try:
                    left, sign, right = call.split()
                    value = EXACT[sign](Fraction(left), Fraction(right))
                    if evaluate_expression(call) == target and ("." in target or value.denominator == 1):
                        found.add(call)
                except (NoResult, ZeroDivisionError):
                    pass
    return found


@pytest.mark.parametrize("seed", range(20))
def test_sums_are_those_that_the_calculator_answers_with_the_next_number(seed: int) -> None:
    draw = random.Random(seed)
    numbers = [
        str(draw.choice([draw.randrange(2, 40), draw.randrange(2, 400) / 4])).removesuffix(".0") for _ in range(7)
    ]
    text = " and ".join(numbers) + "."
    found = list(propose_sums(text, strict=False))
    for at, target in enumerate(numbers):
        offset = len(" and ".join(numbers[:at])) + (5 if at else 0)
        calls = {one.input for one in found if one.offset == offset}
        expected = by_hand(numbers[:at], target)
        assert calls <= expected
        assert bool(calls) == any(not is_trivial(call) for call in expected), (text, target, expected)


def is_trivial(call: str) -> bool:
    """Whether an operand is the answer: times or over 1, less itself."""
    a, sign, b = call.split()
    return (sign == "-" and a == b) or (sign in "*/" and "1" in (a, b)) or Fraction(a) == 0


def test_the_nearest_operands_come_first_and_words_and_percents_are_numbers() -> None:
    assert sums("He had 3 and 9, then 5 and 7, so 12 in all.")["12"] == ["5 + 7", "3 + 9"]
    assert sums("A dozen eggs and 4 more are 16.") == {"16": ["12 + 4"]}
    assert sums("20% of 60 is 12.")["12"] == ["20% * 60"]
    assert sums("10 parts of 3 are 3.33.")["3.33"] == ["10 / 3"]


@pytest.mark.parametrize(
    "text",
    [
        "In 1999 and 2 years later came 2001.",
        "At 10 and 15 it was 12:25 o'clock.",
        "Take 3 and 4, which makes 7.",
        "There were 1 and 29, so 30.",
        "Version 10 and 15 became v 1.25 of it.",
    ],
)
def test_on_web_pages_years_times_versions_and_small_numbers_are_no_sums(text: str) -> None:
    assert sums(text, strict=True) == {}


def test_a_sum_of_a_web_page_is_proposed_and_looks_at_no_operand_ahead() -> None:
    text = "The hall has 140 seats and the balcony 25, so 165 in all. Of these 40 are broken."
    assert sums(text, strict=True) == {"165": ["140 + 25"]}
    units = TextUnits.from_text(text)
    assert not any(units.list_units_ahead(one.offset, one.input) for one in propose_sums(text, strict=False))


def test_questions_follow_from_a_name_at_the_beginning_and_not_from_the_answer() -> None:
    text = "It rained. Ada Lovelace was born in London. She was born in May. The house was built by hand."
    found = list(propose_questions(text))
    assert [one.input for one in found] == ["When was Ada Lovelace born?", "Where was Ada Lovelace born?"]
    assert {text[one.offset :].split()[0] for one in found} == {"London."}
    other = text.replace("London", "1815")
    assert [one.input for one in propose_questions(other)] == [one.input for one in found]
    assert [one.input for one in propose_questions("Hamlet was written by Shakespeare.")] == ["Who wrote Hamlet?"]


def test_glosses_are_translated_inside_their_quotes() -> None:
    text = 'Her "la tortuga lenta" means "the slow turtle", and “Guten Tag” (“good day”) too; "a b" "c d" do not.'
    found = list(propose_glosses(text))
    assert [one.input for one in found] == ["la tortuga lenta", "Guten Tag"]
    assert [text[one.offset :].split()[0] for one in found] == ["the", "good"]
    english = 'The "slow turtle of the sea" means "an animal".'
    tool = load_tool("machine_translation", {"backend": "embedded", "prompt": "embedded"})
    assert [one.input for one in tool.propose(text + english, "")] == ["la tortuga lenta", "Guten Tag"]


def test_searches_stand_before_new_facts_and_say_what_they_saw() -> None:
    text = (
        "The river Thames flows through London, where a tower called Big Ben was built by Augustus Pugin. Big Ben rings"
    )
    found = list(propose_searches(text))
    assert found and all(text[one.offset :].startswith(one.words) for one in found)
    assert len({one.words for one in found}) == len(found) <= 3
    assert all(one.words.lower() not in text[: one.offset].lower() for one in found)


def test_the_calendar_is_asked_before_parts_of_the_document_s_date() -> None:
    tool = load_tool("calendar", {"prompt": "embedded"})
    text = "It is Tuesday, in May 2021. On Friday in June 2020 it was not."
    assert [text[one.offset :].split()[0] for one in tool.propose(text, "2021-05-04")] == ["Tuesday,", "May", "2021."]
    assert list(tool.propose(text, "")) == []
    assert list(tool.propose("2021 " * 40, "2021-05-04")).__len__() <= 5


def test_a_rule_has_a_fingerprint_of_its_own() -> None:
    strict, all_sums = (
        load_tool("calculator", {"strict_rule": value, "prompt": "embedded"}) for value in (True, False)
    )
    assert strict.rule_identity() != all_sums.rule_identity() and strict.identity() == all_sums.identity()


PAGES = Path("../shared/data/ccnet/en_head_0000.json.gz")


@pytest.mark.skipif(not PAGES.is_file(), reason="needs ../shared/data: real pages")
def test_rules_stand_what_real_pages_hold() -> None:
    import gzip

    with gzip.open(PAGES, "rt", encoding="utf-8") as lines:
        texts = [json.loads(line)["raw_content"] for line, _ in zip(lines, range(60), strict=False)]
    for rule in (propose_questions, propose_glosses, propose_searches, lambda text: propose_sums(text, True)):
        for text in texts:
            assert all(isinstance(one, ProposedCall) and 0 <= one.offset < len(text) for one in rule(text))
