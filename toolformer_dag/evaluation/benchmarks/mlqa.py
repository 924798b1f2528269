"""MLQA: an English paragraph, a question in another language (section 4.2.4)."""

from pathlib import Path
from typing import Any

from toolformer_dag.evaluation.benchmark import Benchmark
from toolformer_dag.evaluation.benchmarks.prompts import multilingual
from toolformer_dag.evaluation.benchmarks.source import (
    BenchmarkError,
    Made,
    files,
    json_file,
    list_in,
    own_shape,
    sort_out,
)
from toolformer_dag.evaluation.question import Question
from toolformer_dag.evaluation.rules import in_first_ten_words

LANGUAGES = ("ar", "de", "es", "hi", "vi", "zh")  # the paper's; MLQA asks in English too, which needs no translation


def mlqa(folder: Path) -> list[Benchmark]:
    """The files `...context-en-question-LANGUAGE.json` of LANGUAGES, one of each."""
    found = files(folder, *(f"*context-en-question-{language}.json" for language in LANGUAGES))
    _refuse_a_second(found)
    return [_mlqa(file) for file in found]


def _refuse_a_second(found: list[Path]) -> None:
    """MLQA gives out `dev-...` and `test-...`; under one name no table could tell them apart."""
    first: dict[str, Path] = {}
    for file in found:
        other = first.setdefault(_language(file), file)
        if other is not file:
            raise BenchmarkError(f"{other} and {file.name} are of one language; leave one there (the paper's is test)")


def _language(file: Path) -> str:
    return file.stem.rpartition("question-")[2]


def _mlqa(file: Path) -> Benchmark:
    """XQuAD in that shape is named as such: it is not MLQA."""
    content = json_file(file)
    articles = list_in(content, file, "data")
    name = "XQuAD in MLQA's form" if str(content.get("version", "")).startswith("xquad") else "MLQA"
    pairs = [pair for number, one in enumerate(articles, 1) for pair in _pairs(f"{file}, article {number}", one)]
    questions, left_out = sort_out({file: pairs}, _made)
    return Benchmark(f"{name} ({_language(file)})", questions, in_first_ten_words, left_out=left_out)


def _pairs(where: str, article: Any) -> list[tuple[str, Any]]:
    with own_shape(where):
        return [(part["context"], one) for part in article["paragraphs"] for one in part["qas"]]


def _made(pair: tuple[str, Any]) -> Made:
    paragraph, asked = pair
    answers = tuple(answer["text"] for answer in asked["answers"])
    return Question(multilingual(paragraph.strip(), asked["question"].strip()), answers, "machine_translation")
