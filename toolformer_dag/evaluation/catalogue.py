"""The known benchmarks, and the ones that the settings choose, with questions about the synthetic world."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal

from toolformer_dag.evaluation import benchmark_readers
from toolformer_dag.evaluation.benchmark import Benchmark, BenchmarkQuestion, in_first_five_words, number_is_right
from toolformer_dag.evaluation.benchmark_files import BenchmarkError, content
from toolformer_dag.evaluation.dateset import dateset
from toolformer_dag.evaluation.function_calls import function_calling
from toolformer_dag.settings.evaluation_settings import EvaluationSettings
from toolformer_dag.settings.setting_types import determining
from toolformer_dag.synthetic.phenomena import TWO_HOP, questions
from toolformer_dag.synthetic.sentences import Phenomenon
from toolformer_dag.synthetic.web import VERSION

READERS: Mapping[str, Callable[[Path], list[Benchmark]]] = {
    "lama": benchmark_readers.lama,
    "templama": benchmark_readers.templama,
    "asdiv": benchmark_readers.asdiv,
    "svamp": benchmark_readers.svamp,
    "mawps": benchmark_readers.mawps,
    "webquestions": benchmark_readers.web_questions,
    "nq": benchmark_readers.natural_questions,
    "triviaqa": benchmark_readers.trivia_qa,
    "mlqa": benchmark_readers.mlqa,
    "irrelevance": benchmark_readers.irrelevance,
    "when2call": benchmark_readers.when2call,
    "functions": function_calling,
    "dateset": lambda _: [dateset()],
}
"""Name -> reader. `lama`, `mawps`, `mlqa` and `functions` read a folder, `irrelevance` a file or a folder, `dateset`
ignores its path, the others read a file."""
READING = 7
"""Raise this when the same files would give other questions, or the same output another judgement."""


def read_benchmark(name: str, path: Path) -> list[Benchmark]:
    """Return a benchmark as a list with an entry per subset or language. Raises BenchmarkError."""
    return _get_reader(name)(path)


def read_benchmark_identity(name: str, path: Path) -> str:
    """Return a hash of the benchmark's files, or `made` for a generated benchmark. Raises BenchmarkError."""
    is_generated = _get_reader(name) is READERS["dateset"]
    return "made" if is_generated else content(path)


def _get_reader(name: str) -> Callable[[Path], list[Benchmark]]:
    """Return the reader of a benchmark. Raises BenchmarkError for an unknown name."""
    if name not in READERS:
        raise BenchmarkError(f"there is no benchmark {name!r}; known: {', '.join(READERS)}")
    return READERS[name]


WITHHELD = {"wiki_search": frozenset({"QA"})}
"""Tool that synthetic questions need -> names of the tools that may not be called for them."""
FIRST_TOOLS = {TWO_HOP: "question_answering"}
"""Kind of questions that take several calls -> the tool of the first call, which counts as the right one."""


def build_synthetic_benchmark(tool: str, n: int, seed: int, wordings: Literal["seen", "unseen"]) -> Benchmark:
    """Generate a benchmark of questions that a tool answers, about the invented world of the synthetic corpus.

    Args:
        tool: Such as "calculator", or TWO_HOP for questions that take two calls of question answering.
        n: The number of questions.
        seed: The seed of the generator.
        wordings: "seen" uses the sentence templates of the synthetic corpus, "unseen" uses others.
    """
    generated_texts = questions(seed, tool, n, wordings)
    is_right = number_is_right if tool == "calculator" else in_first_five_words
    return Benchmark(
        name=f"{tool} ({wordings})",
        questions=tuple(_build_synthetic_question(tool, text) for text in generated_texts),
        correct=is_right,  # judges the texts that models write after the prompts
        withheld=WITHHELD.get(tool, frozenset()),  # tools that may not be called: they would make it trivial
    )


def _build_synthetic_question(tool: str, phenomenon: Phenomenon) -> BenchmarkQuestion:
    """Return a generated text as a question. tool: the tool that answers it, or TWO_HOP."""
    return BenchmarkQuestion(
        prompt=phenomenon.before,
        answers=(phenomenon.answer,),
        tool=FIRST_TOOLS.get(tool, tool),  # TWO_HOP is no tool
        context=str(phenomenon.date or ""),
        wording=phenomenon.wording,
    )


def collect_chosen_benchmarks(section: EvaluationSettings, tools: Sequence[str]) -> list[Benchmark]:
    """Collect the benchmarks that the settings choose: synthetic ones for each tool, then benchmarks in files.

    Args:
        tools: Such as "calculator", or TWO_HOP.

    Raises:
        BenchmarkError: A benchmark cannot be read, or has no questions.
    """
    benchmarks: list[Benchmark] = []
    if section.questions:
        for tool in tools:
            benchmarks.append(build_synthetic_benchmark(tool, section.questions, section.seed, "seen"))

    for name, path in section.benchmarks.items():
        for benchmark in read_benchmark(name, path):
            _refuse_empty(benchmark)
            benchmarks.append(sampled(benchmark, section.benchmark_questions))

    return benchmarks


def _refuse_empty(benchmark: Benchmark) -> None:
    """Raise BenchmarkError if a benchmark has no questions."""
    if not benchmark.questions:
        raise BenchmarkError(
            f"{benchmark.name} has no questions ({dict(benchmark.left_out)}); give the benchmark's own files"
        )


def sampled(benchmark: Benchmark, limit: int | None) -> Benchmark:
    """Reduce a benchmark to at most `limit` of its questions, at equal distances.

    The first questions would not do, because files are sorted by kind of question.
    """
    questions = benchmark.questions
    if limit is None or limit >= len(questions):
        return benchmark

    indices = [number * len(questions) // limit for number in range(limit)]
    return replace(benchmark, questions=tuple(questions[index] for index in indices))


def build_questions_identity(section: EvaluationSettings) -> Mapping[str, object]:
    """Return what determines the questions. Raises BenchmarkError for an unknown benchmark or missing files."""
    return {
        **determining(section, "questions", "seed", "benchmark_questions"),
        "world": VERSION,
        "benchmarks": {name: read_benchmark_identity(name, path) for name, path in section.benchmarks.items()},
        "reading": READING,
    }
