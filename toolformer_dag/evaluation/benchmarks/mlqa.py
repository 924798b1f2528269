"""MLQA: an English paragraph, a question in another language (section 4.2.4)."""

from pathlib import Path
from typing import Any

from toolformer_dag.evaluation.benchmark import Benchmark
from toolformer_dag.evaluation.benchmarks.prompts import multilingual
from toolformer_dag.evaluation.benchmarks.source import BenchmarkError, Made, files, json_file, sort_out
from toolformer_dag.evaluation.question import Question
from toolformer_dag.evaluation.rules import in_first_ten_words

LANGUAGES = ("ar", "de", "es", "hi", "vi", "zh")  # the paper's; MLQA asks in English too, which needs no translation


def mlqa(folder: Path) -> list[Benchmark]:
    """The files `...context-en-question-LANGUAGE.json` of LANGUAGES."""
    found = files(folder, *(f"*context-en-question-{language}.json" for language in LANGUAGES))
    return [_mlqa(file) for file in found]


def _mlqa(file: Path) -> Benchmark:
    """XQuAD in that shape is named as such: it is not MLQA."""
    content = json_file(file)
    language = file.stem.rpartition("question-")[2]
    if not isinstance(content, dict) or "data" not in content:
        raise BenchmarkError(f"{file} is not in MLQA's form; give the benchmark's own file")
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
