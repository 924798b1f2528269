"""The known benchmarks, and the benchmarks that the settings choose besides the synthetic world's questions."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal

from toolformer_dag.evaluation import readers
from toolformer_dag.evaluation.benchmark import Benchmark, BenchmarkQuestion, in_first_five_words, number_is_right
from toolformer_dag.evaluation.benchmark_files import BenchmarkError, content
from toolformer_dag.evaluation.dateset import dateset
from toolformer_dag.evaluation.function_calls import function_calling
from toolformer_dag.settings.evaluation_settings import EvaluationSettings
from toolformer_dag.settings.setting_types import determining
from toolformer_dag.synthetic.phenomena import TWO_HOP, questions
from toolformer_dag.synthetic.web import VERSION

READERS: Mapping[str, Callable[[Path], list[Benchmark]]] = {
    "lama": readers.lama,
    "templama": readers.templama,
    "asdiv": readers.asdiv,
    "svamp": readers.svamp,
    "mawps": readers.mawps,
    "webquestions": readers.web_questions,
    "nq": readers.natural_questions,
    "triviaqa": readers.trivia_qa,
    "mlqa": readers.mlqa,
    "irrelevance": readers.irrelevance,
    "when2call": readers.when2call,
    "functions": function_calling,
    "dateset": lambda _: [dateset()],
}
"""Readers by name: `lama`, `mawps`, `mlqa` and `functions` read a folder, `irrelevance` a file or a folder, `dateset`
ignores its path, the others read a file."""
READING = 7  # raise this when the same files would give other questions, or the same output another judgement


def read_benchmark(name: str, path: Path) -> list[Benchmark]:
    """Read a benchmark; the list has an entry per subset or language. Raises BenchmarkError."""
    return _reader(name)(path)


def benchmark_identity(name: str, path: Path) -> str:
    """Return a hash of the benchmark's files, or `made` for a generated benchmark. Raises BenchmarkError."""
    return "made" if _reader(name) is READERS["dateset"] else content(path)


def _reader(name: str) -> Callable[[Path], list[Benchmark]]:
    if name not in READERS:
        raise BenchmarkError(f"there is no benchmark {name!r}; known: {', '.join(READERS)}")
    return READERS[name]


WITHHELD = {"wiki_search": frozenset({"QA"})}
FIRST_ASKED = {TWO_HOP: "question_answering"}
"""The tool that is right where the phenomenon's own is that of the last call."""


def synthetic_benchmark(tool: str, n: int, seed: int, wordings: Literal["seen", "unseen"]) -> Benchmark:
    """Generate `n` questions for a tool, or questions that take several calls (TWO_HOP).

    The calculator's are judged like mathematics, all others like LAMA. WikiSearch's questions withhold QA.
    """
    generated = tuple(
        BenchmarkQuestion(each.before, (each.answer,), FIRST_ASKED.get(tool, tool), str(each.date or ""), each.wording)
        for each in questions(seed, tool, n, wordings)
    )
    rule = number_is_right if tool == "calculator" else in_first_five_words
    return Benchmark(f"{tool} ({wordings})", generated, rule, WITHHELD.get(tool, frozenset()))


def chosen_benchmarks(section: EvaluationSettings, tools: Sequence[str]) -> list[Benchmark]:
    """Return the synthetic world's benchmark of each tool, then the chosen benchmarks. Raises BenchmarkError."""
    asked_tools = tools if section.questions else ()
    synthetic = [synthetic_benchmark(tool, section.questions, section.seed, "seen") for tool in asked_tools]
    chosen = [each for name, path in section.benchmarks.items() for each in read_benchmark(name, path)]
    for each in chosen:
        if not each.questions:
            raise BenchmarkError(
                f"{each.name} has no questions ({dict(each.left_out)}); give the benchmark's own files"
            )
    return synthetic + [sampled(each, section.benchmark_questions) for each in chosen]


def sampled(benchmark: Benchmark, limit: int | None) -> Benchmark:
    """Take at most `limit` questions at equal distances: benchmarks are sorted by kinds of questions."""
    questions = benchmark.questions
    taken = len(questions) if limit is None else min(limit, len(questions))
    return replace(benchmark, questions=tuple(questions[at * len(questions) // taken] for at in range(taken)))


def chosen_identity(section: EvaluationSettings) -> Mapping[str, object]:
    """Return what determines the questions. Raises BenchmarkError for an unknown benchmark or missing files."""
    files = {name: benchmark_identity(name, path) for name, path in section.benchmarks.items()}
    counted = determining(section, "questions", "seed", "benchmark_questions")
    return {**counted, "world": VERSION, "benchmarks": files, "reading": READING}
