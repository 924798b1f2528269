"""A visitor's questions: what they ask, that no training text words them alike, and how they are judged."""

import json
import re
import tomllib
from typing import Any, get_args

import polars as pl
import pytest

from embedded_model.visitor_study import NUMBERS, Split, led, visitor_benchmark, visitor_table, wordings
from toolformer_dag.synthetic.lexicon import translate
from toolformer_dag.synthetic.wordings import FOLDER
from toolformer_dag.tools.built_in.calculator import evaluate


def _plain(template: str) -> str:
    """A template without case, punctuation, contractions and what follows a fact's place."""
    words = template.lower().partition("{v}")[0].replace("what's", "what is").replace("who's", "who is")
    return " ".join(re.findall(r"[\w{}%+*/=-]+", words))


def _texts(split: Any) -> set[str]:
    return {_plain(text) for skill in wordings(split).values() for own in skill.values() for text in own}


def test_no_wording_that_measures_stands_in_the_templates() -> None:
    files = "".join(json.dumps(tomllib.loads(file.read_text("utf-8"))) for file in FOLDER.glob("*.toml"))
    templates = {_plain(json.loads(text)) for text in re.findall(r'"(?:[^"\\]|\\.)*"', files)}
    measured = _texts("measured")
    assert len(measured) > 120 and len(templates) > 1000
    assert not measured & (templates | _texts("guide"))


@pytest.mark.parametrize(("split", "skill"), [(split, skill) for split in get_args(Split) for skill in wordings(split)])
def test_questions_have_the_answers_of_the_tools(split: Any, skill: str) -> None:
    benchmark = visitor_benchmark(skill, split, 2)
    assert len(benchmark.questions) == 2 * sum(map(len, wordings(split)[skill].values()))
    for question in benchmark.questions:
        assert "{" not in question.prompt and benchmark.correct(f" {question.answers[0]}.", question.answers)
        assert (question.context != "") == (split == "typed" or skill == "calendar")
    assert visitor_benchmark(skill, split, 2) == benchmark


def test_sums_and_phrases_are_what_the_tools_say() -> None:
    for skill, wording, tool in (
        ("calculator", r"^What is ([\d.,]+ [-+*/] [\d.,]+)\?$", evaluate),
        ("machine_translation", r"^What does ([^\"]+) mean\?$", translate),
    ):
        found = [
            (re.match(wording, one.prompt), one.answers[0]) for one in visitor_benchmark(skill, "guide", 5).questions
        ]
        asked = [(match[1], answer) for match, answer in found if match]
        assert asked and all(tool(given) == answer for given, answer in asked)


def test_every_split_has_wordings_of_the_same_kinds() -> None:
    kinds = {
        split: {skill: set(own) for skill, own in wordings(split).items()} for split in ("guide", "measured", "fresh")
    }
    assert kinds["guide"] == kinds["measured"] == kinds["fresh"]
    assert set(NUMBERS) == kinds["guide"]["calculator"]


def test_questions_are_led_and_statements_stay() -> None:
    typed = visitor_benchmark("calculator", "guide", 1)
    for before, after in zip(typed.questions, led(typed).questions, strict=True):
        assert after.prompt == before.prompt + (" The answer is" if before.prompt[-1] in "?.!" else "")


def test_the_table_counts_answers_and_calls() -> None:
    rows = [("a", "led", True, "QA"), ("a", "led", False, None), ("a", "as typed", True, None)]
    table = visitor_table(pl.DataFrame(rows, schema=["skill", "form", "correct", "called"], orient="row"))
    assert table.rows() == [("a", "led", 2, 50.0, "9.5-90.5", 50.0), ("a", "as typed", 1, 100.0, "20.7-100.0", 0.0)]
