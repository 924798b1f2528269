"""A visitor's questions: what they ask, that no training text words them alike, and how they are judged."""

import re
import tomllib
from collections.abc import Iterator
from typing import Any

import pytest

from embedded_model.visitor_study import NUMBERS, SKILLS, led, visitor_benchmark, visitor_table, wordings
from toolformer_dag.synthetic.lexicon import translate
from toolformer_dag.synthetic.wordings import FOLDER
from toolformer_dag.tools.built_in.calculator import evaluate


def _plain(template: str) -> str:
    """A template without case, punctuation, contractions and what follows a fact's place."""
    words = template.lower().partition("{v}")[0].replace("what's", "what is").replace("who's", "who is")
    return " ".join(re.findall(r"[\w{}%+*/=-]+", words))


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    else:
        for each in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
            yield from _strings(each)


def test_no_wording_that_measures_stands_in_the_templates() -> None:
    files = [tomllib.loads(file.read_text("utf-8")) for file in FOLDER.glob("*.toml")]
    templates = {_plain(text) for file in files for text in _strings(file)}
    measured = {_plain(text) for skill in wordings("measured").values() for own in skill.values() for text in own}
    assert len(measured) > 120 and not measured & templates
    guide = {_plain(text) for skill in wordings("guide").values() for own in skill.values() for text in own}
    assert not measured & guide


@pytest.mark.parametrize("skill", SKILLS)
@pytest.mark.parametrize("split", ["guide", "measured", "fresh"])
def test_questions_have_the_answers_of_the_tools(skill: str, split: Any) -> None:
    benchmark = visitor_benchmark(skill, split, 2)
    assert len(benchmark.questions) == 2 * sum(map(len, wordings(split)[skill].values()))
    for question in benchmark.questions:
        assert "{" not in question.prompt and benchmark.correct(f" {question.answers[0]}.", question.answers)
        assert (question.context != "") == (skill == "calendar")
    assert visitor_benchmark(skill, split, 2) == benchmark


def test_sums_and_phrases_are_what_the_tools_say() -> None:
    plain = re.compile(r"^What is ([\d.,]+ [-+*/] [\d.,]+)\?$")
    found = [(plain.match(each.prompt), each) for each in visitor_benchmark("calculator", "guide", 5).questions]
    sums = [(match[1], each.answers[0]) for match, each in found if match]
    assert len(sums) == 20 and all(evaluate(expression) == answer for expression, answer in sums)
    asked = re.compile(r"^What does ([^\"]+) mean\?$")
    phrases = [
        (asked.match(each.prompt), each) for each in visitor_benchmark("machine_translation", "guide", 5).questions
    ]
    assert all(translate(match[1]) == each.answers[0] for match, each in phrases if match)
    assert set(NUMBERS) == set(wordings("guide")["calculator"])
    for split in ("measured", "fresh"):
        assert {skill: set(own) for skill, own in wordings(split).items()} == {
            skill: set(own) for skill, own in wordings("guide").items()
        }


def test_questions_are_led_and_statements_stay() -> None:
    typed = visitor_benchmark("calculator", "guide", 1).questions
    for before, after in zip(typed, led(visitor_benchmark("calculator", "guide", 1)).questions, strict=True):
        asks = before.prompt[-1] in "?.!"
        assert after.prompt == before.prompt + (" The answer is" if asks else "")


def test_the_table_counts_answers_and_calls() -> None:
    import polars as pl

    rows = [("a", "led", True, "QA"), ("a", "led", False, None), ("a", "as typed", True, None)]
    table = visitor_table(pl.DataFrame(rows, schema=["skill", "form", "correct", "called"], orient="row"))
    assert table.rows() == [("a", "led", 2, 50.0, "9.5-90.5", 50.0), ("a", "as typed", 1, 100.0, "20.7-100.0", 0.0)]
