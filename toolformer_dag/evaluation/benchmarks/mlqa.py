"""MLQA: an English paragraph, a question in another language (section 4.2.4)."""

from pathlib import Path
from typing import Any

from toolformer_dag.evaluation.benchmark import Benchmark
from toolformer_dag.evaluation.benchmarks.prompts import multilingual
from toolformer_dag.evaluation.benchmarks.source import BenchmarkError, Made, json_file, sort_out
from toolformer_dag.evaluation.question import Question
from toolformer_dag.evaluation.rules import in_first_ten_words


def mlqa(file: Path) -> Benchmark:
    """A file `...context-en-question-LANGUAGE.json`. XQuAD in that shape is named as such: it is not MLQA."""
    content = json_file(file)
    language = file.stem.rpartition("question-")[2]
    if not isinstance(content, dict) or "data" not in content or language == file.stem:
        raise BenchmarkError(f"{file} is not in MLQA's form; give a context-en-question-LANGUAGE.json")
    name = "XQuAD in MLQA's form" if str(content.get("version", "")).startswith("xquad") else "MLQA"
    pairs = [
        (part["context"], one) for article in content["data"] for part in article["paragraphs"] for one in part["qas"]
    ]
    questions, left_out = sort_out(file, pairs, _made)
    return Benchmark(f"{name} ({language})", questions, in_first_ten_words, left_out=left_out)


def _made(pair: tuple[str, Any]) -> Made:
    paragraph, asked = pair
    answers = tuple(dict.fromkeys(answer["text"] for answer in asked["answers"]))
    if not answers:
        return "no_answer"
    return Question(multilingual(paragraph.strip(), asked["question"].strip()), answers, "machine_translation")
