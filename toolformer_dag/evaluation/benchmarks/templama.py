"""TempLAMA: facts that change from 2010 to 2020 (section 4.2.5)."""

from datetime import date
from pathlib import Path
from typing import Any

from toolformer_dag.evaluation.benchmark import Benchmark
from toolformer_dag.evaluation.benchmarks.prompts import completion
from toolformer_dag.evaluation.benchmarks.source import Made, json_lines, sort_out
from toolformer_dag.evaluation.question import Question
from toolformer_dag.evaluation.rules import in_first_five_words

BLANK = "_X_"


def templama(file: Path) -> Benchmark:
    """One question per query and year. The paper does not say where the year stands: here the calendar knows it.

    An answer of more than five words cannot stand within the first five and is always wrong.
    """
    questions, left_out = sort_out({file: json_lines(file)}, _made)
    return Benchmark("TempLAMA", questions, in_first_five_words, left_out=left_out)


def _made(record: Any) -> Made:
    before, blank, after = record["query"].partition(BLANK)
    if not blank or after.strip(" ."):
        return "mask_not_last"
    answers = record["answer"] if isinstance(record["answer"], list) else [record["answer"]]
    names = tuple(answer["name"] for answer in answers)
    new_year = date.fromisoformat(f"{record['date']}-01-01").isoformat()  # ValueError where `date` is no year
    return Question(completion(before.rstrip()), names, "calendar", new_year, record["relation"])
