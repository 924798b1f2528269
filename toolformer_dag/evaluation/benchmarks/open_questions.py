"""WebQuestions, Natural Questions and TriviaQA (section 4.2.3)."""

import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from toolformer_dag.evaluation.benchmark import Benchmark
from toolformer_dag.evaluation.benchmarks.prompts import question_answering
from toolformer_dag.evaluation.benchmarks.source import Made, json_lines, json_list, sort_out
from toolformer_dag.evaluation.question import Question
from toolformer_dag.evaluation.rules import in_first_twenty_words

WITHHELD = frozenset({"QA"})
DESCRIPTION = re.compile(r'\(description (?:"((?:[^"\\]|\\.)*)"|([^()]*))\)')  # of an answer, in Lisp


def web_questions(file: Path) -> Benchmark:
    """A list of `utterance` and `targetValue`, as WebQuestions is given out, or of `qText` and `answers`."""
    return _benchmark("WebQuestions", file, json_list(file), _web_question)


def natural_questions(file: Path) -> Benchmark:
    """NQ-open: `question`, `answer`."""
    return _benchmark(
        "Natural Questions", file, json_lines(file), lambda one: _question(one["question"], one["answer"])
    )


def trivia_qa(file: Path) -> Benchmark:
    """TriviaQA's own file (`*.json`: a table whose `Data` has `Question` and `Answer`), every alias being right.

    Or JSON lines with `context` ("Question: ...\\nAnswer:"), `answer` and `aliases`.
    """
    records = json_list(file, "Data") if file.suffix == ".json" else json_lines(file)
    return _benchmark("TriviaQA", file, records, _trivia)


def _benchmark(name: str, file: Path, records: Iterable[Any], make: Callable[[Any], Made]) -> Benchmark:
    questions, left_out = sort_out({file: records}, make)
    return Benchmark(name, questions, in_first_twenty_words, WITHHELD, left_out)


def _web_question(record: Any) -> Made:
    if "utterance" not in record:
        return _question(record["qText"], record["answers"])
    found = DESCRIPTION.findall(record["targetValue"])
    return _question(record["utterance"], [bare or re.sub(r"\\(.)", r"\1", quoted) for quoted, bare in found])


def _trivia(record: Any) -> Made:
    if "Question" in record:
        return _question(record["Question"], [record["Answer"]["Value"], *_listed(record["Answer"]["Aliases"])])
    question = record["context"].removeprefix("Question: ").removesuffix("\nAnswer:")
    return _question(question, [record["answer"], *_listed(record["aliases"])])


def _question(question: str, answers: Any) -> Made:
    return Question(question_answering(question), tuple(_listed(answers)), "wiki_search")


def _listed(texts: Any) -> Iterable[str]:
    """A text alone would pass for the list of its letters: TypeError."""
    if isinstance(texts, str):
        raise TypeError("one text stands where a list of them is expected")
    found: Iterable[str] = texts
    return found
