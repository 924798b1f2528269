"""Read ASDiv, SVAMP and MAWPS (paper, section 4.2.2)."""

import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from toolformer_dag.evaluation.benchmark import NUMBER, Benchmark, BenchmarkQuestion, number_is_right
from toolformer_dag.evaluation.benchmark_files import (
    BenchmarkError,
    QuestionOrReason,
    files,
    mathematics,
    read_questions,
    records,
)

ASDIV_ANSWER = re.compile(r"([^\s()]+)\s*(?:\([^()]*\))?")  # a number and its unit
NO_NUMBER = "answer_is_no_number"


def asdiv(file: Path) -> Benchmark:
    """Read ASDiv.xml; problems whose answer is not a single number (a name, a ratio) are left out."""
    try:
        problems = ElementTree.parse(file).getroot().iter("Problem")
    except (OSError, ElementTree.ParseError, LookupError, ValueError) as error:  # the last two for an unknown encoding
        raise BenchmarkError(f"{file} is not ASDiv.xml ({error}); give the benchmark's own file") from error
    questions, left_out = read_questions({file: problems}, _asdiv)
    return Benchmark("ASDiv", questions, number_is_right, left_out=left_out)


def svamp(file: Path) -> Benchmark:
    """Read SVAMP: a JSON list (the original), JSON lines or CSV with `Body`, `Question`, `Answer` and maybe `Type`."""
    questions, left_out = read_questions({file: records(file)}, _svamp, "Body, Question and Answer")
    return Benchmark("SVAMP", questions, number_is_right, left_out=left_out)


def mawps(folder: Path) -> Benchmark:
    """Read all files of a folder as MAWPS; problems with several solutions are left out.

    Records have `sQuestion` and `lSolutions` (the original), or `input` (context and question) and `target`, as JSON or
    CSV.
    """
    found = {file: records(file) for file in files(folder, "*.json", "*.jsonl", "*.csv")}
    questions, left_out = read_questions(found, _mawps, "sQuestion and lSolutions; input and target")
    return Benchmark("MAWPS", questions, number_is_right, left_out=left_out)


def _asdiv(problem: Any) -> QuestionOrReason:
    body, question, answer = (problem.findtext(tag).strip() for tag in ("Body", "Question", "Answer"))
    match = ASDIV_ANSWER.fullmatch(answer)
    if match is None:
        return NO_NUMBER
    return _question(mathematics(body, question), match[1], problem.findtext("Solution-Type"))


def _svamp(record: Any) -> QuestionOrReason:
    prompt = mathematics(record["Body"].strip(), record["Question"].strip())
    return _question(prompt, record["Answer"], str(record.get("Type") or ""))


def _mawps(record: Any) -> QuestionOrReason:
    if "sQuestion" not in record:
        return _question(mathematics("", record["input"].strip()), record["target"])
    solutions = record["lSolutions"]
    if len(solutions) != 1:
        return NO_NUMBER
    return _question(mathematics("", record["sQuestion"].strip()), solutions[0])


def _question(prompt: str, answer: Any, wording: str = "") -> QuestionOrReason:
    if NUMBER.fullmatch(str(answer)) is None:
        return NO_NUMBER
    return BenchmarkQuestion(prompt, (str(answer),), "calculator", wording=wording)
