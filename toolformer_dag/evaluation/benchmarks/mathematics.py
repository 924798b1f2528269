"""ASDiv, SVAMP and MAWPS (section 4.2.2)."""

import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from toolformer_dag.evaluation.benchmark import Benchmark
from toolformer_dag.evaluation.benchmarks.prompts import mathematics
from toolformer_dag.evaluation.benchmarks.source import BenchmarkError, Made, files, json_file, json_lines, sort_out
from toolformer_dag.evaluation.question import Question
from toolformer_dag.evaluation.rules import number_is_right

ASDIV_NUMBER = re.compile(r"(-?[\d,]*\.?\d+)\s*(?:\(.*\))?\s*")


def asdiv(file: Path) -> Benchmark:
    """ASDiv.xml; problems whose answer is no single number (a name, a ratio, several numbers) are left out."""
    try:
        problems = ElementTree.parse(file).getroot().iter("Problem")
    except (OSError, ElementTree.ParseError) as error:
        raise BenchmarkError(f"{file} is not ASDiv.xml ({error}); give the benchmark's own file") from error
    questions, left_out = sort_out(file, problems, _asdiv)
    return Benchmark("ASDiv", questions, number_is_right, left_out=left_out)


def svamp(file: Path) -> Benchmark:
    """SVAMP.json."""
    questions, left_out = sort_out(file, json_file(file), _svamp)
    return Benchmark("SVAMP", questions, number_is_right, left_out=left_out)


def mawps(folder: Path) -> Benchmark:
    """JSON lines with `input` (context and question in one) and `target`, all files of the folder together."""
    records = (one for file in files(folder, "*.jsonl") for one in json_lines(file))
    questions, left_out = sort_out(folder, records, _mawps)
    return Benchmark("MAWPS", questions, number_is_right, left_out=left_out)


def _asdiv(problem: Any) -> Made:
    body, question, answer = (problem.findtext(tag).strip() for tag in ("Body", "Question", "Answer"))
    match = ASDIV_NUMBER.fullmatch(answer)
    if match is None:
        return "answer_is_no_number"
    return Question(mathematics(body, question), (match[1],), "calculator", wording=problem.findtext("Solution-Type"))


def _svamp(record: Any) -> Made:
    prompt = mathematics(record["Body"].strip(), record["Question"].strip())
    return Question(prompt, (str(record["Answer"]),), "calculator", wording=record["Type"])


def _mawps(record: Any) -> Made:
    return Question(mathematics("", record["input"].strip()), (str(record["target"]),), "calculator")
