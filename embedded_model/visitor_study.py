"""Ask a checkpoint what a visitor would type, in wordings of `visitor_questions.toml` that no training text has."""

import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from random import Random
from typing import Literal

import polars as pl

from toolformer_dag.computing.plan import lanes
from toolformer_dag.evaluation.asking import Asking
from toolformer_dag.evaluation.benchmark import Benchmark, BenchmarkQuestion, in_first_five_words, number_is_right
from toolformer_dag.evaluation.scores import wilson
from toolformer_dag.model.loading import LanguageModel
from toolformer_dag.settings.sections import Settings
from toolformer_dag.synthetic.calculations import operands, result_of
from toolformer_dag.synthetic.lexicon import phrase
from toolformer_dag.synthetic.today import date_text, day_of
from toolformer_dag.synthetic.wordings import KINDS, Numbers, Operation
from toolformer_dag.synthetic.world import the_world

Split = Literal["guide", "measured", "fresh", "typed"]

NUMBERS: Mapping[str, tuple[Operation, Numbers]] = {
    "a + b": ("+", "count"),
    "a - b": ("-", "count"),
    "a * b": ("*", "rate"),
    "a / b": ("/", "share"),
    "a / 2": ("/", "half"),
    "a * 2": ("*", "double"),
    "a * b / 100": ("%", "percent"),
}
"""What the keys under `calculator` calculate, and on which numbers."""
NUMERIC = frozenset({"calculator", "sum", "parentheses", "square_root", "average"})


@cache
def wordings(split: Split) -> Mapping[str, Mapping[str, Sequence[str]]]:
    """Return the wordings by skill and kind, as `visitor_questions.toml` has them."""
    with (Path(__file__).parent / "visitor_questions.toml").open("rb") as file:
        found: Mapping[str, Mapping[str, Sequence[str]]] = tomllib.load(file)[split]
    return found


def visitor_benchmark(skill: str, split: Split, each: int, seed: int = 0) -> Benchmark:
    """Return `each` questions per wording of a skill, about the evaluation part of the synthetic world.

    Sums are judged like mathematics, everything else like LAMA; any tool may be called.
    """
    random = Random(f"visitor {seed} {skill} {split}")
    question = _typed if split == "typed" else _question
    asked = [
        question(random, skill, kind, wording)
        for kind, templates in wordings(split)[skill].items()
        for wording in templates
        for _ in range(each)
    ]
    return Benchmark(skill, tuple(asked), number_is_right if skill in NUMERIC else in_first_five_words)


def _question(random: Random, skill: str, kind: str, wording: str) -> BenchmarkQuestion:
    if skill == "calculator":
        operation, numbers = NUMBERS[kind]
        a, b = operands(random, "evaluation", operation, numbers)
        return BenchmarkQuestion(wording.format(a=a, b=b), (result_of(a, operation, b),), wording=wording)
    if skill == "calendar":
        day = day_of(random, "evaluation")
        return BenchmarkQuestion(wording, (date_text(day, kind),), context=day.isoformat(), wording=wording)
    if skill == "machine_translation":
        foreign, english = phrase(random, "evaluation")
        return BenchmarkQuestion(wording.format(f=foreign), (english,), wording=wording)
    named, relation = kind.split(".")
    entity = random.choice(the_world().entities("evaluation", next(one for one in KINDS if one == named)))
    return BenchmarkQuestion(wording.format(e=entity.name), (entity.facts[relation],), wording=wording)


def _typed(random: Random, skill: str, kind: str, wording: str) -> BenchmarkQuestion:
    a, b, c = random.randint(2, 20), random.randint(2, 20), random.randint(21, 40)
    day, today = day_of(random, "evaluation"), day_of(random, "evaluation")
    prompt = wording.format(a=a, b=b, c=c, square=a * a, third=3 * c - a - b, day=date_text(day, "full"))
    answers = {"a + c": a + c, "(a + b) * c": (a + b) * c, "root": a, "mean": c, "weekday": date_text(day, "weekday")}
    return BenchmarkQuestion(prompt, (str(answers[kind]),), context=today.isoformat(), wording=wording)


def led(benchmark: Benchmark) -> Benchmark:
    """Put `The answer is` behind every question mark and full stop that ends a question."""
    asked = [
        replace(one, prompt=one.prompt + " The answer is") if one.prompt.endswith(("?", ".", "!")) else one
        for one in benchmark.questions
    ]
    return replace(benchmark, questions=tuple(asked))


def visitor_outcomes(settings: Settings, model: LanguageModel, split: Split, each: int) -> pl.DataFrame:
    """Ask all questions as they are, and again with `The answer is`; return a row per question.

    Columns: skill, form (`as typed`, `led`), wording, prompt, answer, text (with its call), called, correct.
    """
    asking = Asking(settings, lanes(settings), model, settings.decoding.k, frozenset())
    return pl.DataFrame(list(_rows(asking, split, each)), infer_schema_length=None)


def _rows(asking: Asking, split: Split, each: int) -> Iterator[dict[str, str | bool | None]]:
    for skill in wordings(split):
        typed = visitor_benchmark(skill, split, each)
        for form, benchmark in (("as typed", typed), ("led", led(typed))):
            found = asking.write([one.prompt for one in benchmark.questions], [q.context for q in benchmark.questions])
            for question, written in zip(benchmark.questions, found, strict=True):
                yield {
                    "skill": skill,
                    "form": form,
                    "wording": question.wording,
                    "prompt": question.prompt,
                    "answer": question.answers[0],
                    "text": written.text,
                    "called": written.calls[0].tool if written.calls else None,
                    "correct": benchmark.correct(written.plain, question.answers),
                }


def visitor_table(outcomes: pl.DataFrame) -> pl.DataFrame:
    """Return per skill and form: n, the per cent answered right, its 95 % interval, and the per cent that called."""
    groups = outcomes.group_by("skill", "form", maintain_order=True).agg(
        pl.len().alias("n"),
        pl.col("correct").sum(),
        (100 * pl.col("called").is_not_null().mean()).round(1).alias("called"),
    )
    ends = [wilson(correct, n) for correct, n in groups.select("correct", "n").iter_rows()]
    return groups.select(
        "skill",
        "form",
        "n",
        (100 * pl.col("correct") / pl.col("n")).round(1).alias("right"),
        pl.Series("interval", [f"{100 * low:.1f}-{100 * high:.1f}" for low, high in ends]),
        "called",
    )
