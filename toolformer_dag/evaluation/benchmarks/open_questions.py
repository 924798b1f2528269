"""WebQuestions, Natural Questions and TriviaQA (section 4.2.3)."""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from toolformer_dag.evaluation.benchmark import Benchmark
from toolformer_dag.evaluation.benchmarks.prompts import question_answering
from toolformer_dag.evaluation.benchmarks.source import Made, json_file, json_lines, sort_out
from toolformer_dag.evaluation.question import Question
from toolformer_dag.evaluation.rules import in_first_twenty_words

WITHHELD = frozenset({"QA"})


def web_questions(file: Path) -> Benchmark:
    """The official test file: `qText`, `answers`."""
    return _benchmark("WebQuestions", file, json_file(file), lambda one: _question(one["qText"], one["answers"]))


def natural_questions(file: Path) -> Benchmark:
    """NQ-open: `question`, `answer`."""
    return _benchmark(
        "Natural Questions", file, json_lines(file), lambda one: _question(one["question"], one["answer"])
    )


def trivia_qa(file: Path) -> Benchmark:
    """JSON lines with `context` ("Question: ...\\nAnswer:"), `answer` and `aliases`; every alias is right."""
    return _benchmark("TriviaQA", file, json_lines(file), _trivia)


def _benchmark(name: str, file: Path, records: Iterable[Any], make: Callable[[Any], Made]) -> Benchmark:
    questions, left_out = sort_out(file, records, make)
    return Benchmark(name, questions, in_first_twenty_words, WITHHELD, left_out)


def _trivia(record: Any) -> Made:
    question = record["context"].removeprefix("Question: ").removesuffix("\nAnswer:")
    return _question(question, [record["answer"], *_listed(record["aliases"])])


def _question(question: str, answers: Any) -> Made:
    right = tuple(dict.fromkeys(answer for answer in _listed(answers) if answer.strip()))
    return Question(question_answering(question), right, "wiki_search") if right else "no_answer"


def _listed(texts: Any) -> Iterable[str]:
    """A text alone would pass for the list of its letters: TypeError."""
    if isinstance(texts, str):
        raise TypeError("one text stands where a list of them is expected")
    found: Iterable[str] = texts
    return found
