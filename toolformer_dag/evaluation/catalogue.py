"""Which benchmarks there are, and those that the settings name beside the synthetic world's questions."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Literal

from toolformer_dag.evaluation.benchmark import Benchmark, BenchmarkQuestion, in_first_five_words, number_is_right
from toolformer_dag.evaluation.benchmark_files import BenchmarkError, content
from toolformer_dag.evaluation.dateset import dateset
from toolformer_dag.evaluation.knowledge_benchmarks import (
    lama,
    mlqa,
    natural_questions,
    templama,
    trivia_qa,
    web_questions,
)
from toolformer_dag.evaluation.mathematics import asdiv, mawps, svamp
from toolformer_dag.settings.sections import Evaluation
from toolformer_dag.synthetic.phenomena import questions
from toolformer_dag.synthetic.web import VERSION

READERS: Mapping[str, Callable[[Path], list[Benchmark]]] = {
    "lama": lama,
    "templama": lambda file: [templama(file)],
    "asdiv": lambda file: [asdiv(file)],
    "svamp": lambda file: [svamp(file)],
    "mawps": lambda folder: [mawps(folder)],
    "webquestions": lambda file: [web_questions(file)],
    "nq": lambda file: [natural_questions(file)],
    "triviaqa": lambda file: [trivia_qa(file)],
    "mlqa": mlqa,
    "dateset": lambda _: [dateset()],
}
"""What each reader is given: `lama`, `mawps`, `mlqa` a folder, `dateset` nothing that matters, the others a file."""
MADE = ("dateset",)
READING = 5  # raised by hand when the same files would give other questions, or the same output another verdict


def read_benchmark(name: str, path: Path) -> list[Benchmark]:
    """The benchmark of that name (several where it has subsets or languages). Raises BenchmarkError."""
    _refuse_unknown(name)
    return READERS[name](path)


def benchmark_identity(name: str, path: Path) -> str:
    """A hash of the benchmark's files; `made` for one that has none. Raises BenchmarkError."""
    _refuse_unknown(name)
    return "made" if name in MADE else content(path)


def _refuse_unknown(name: str) -> None:
    if name not in READERS:
        raise BenchmarkError(f"there is no benchmark {name!r}; known: {', '.join(READERS)}")


WITHHELD = {"wiki_search": frozenset({"QA"})}


def synthetic_benchmark(tool: str, n: int, seed: int, wordings: Literal["seen", "unseen"]) -> Benchmark:
    """`n` questions for the tool of that key, judged like the paper's mathematics or LAMA; search goes without QA."""
    asked = tuple(
        BenchmarkQuestion(one.prompt, (one.answer,), one.tool, one.date.isoformat() if one.date else "", one.wording)
        for one in questions(seed, tool, n, wordings)
    )
    rule = number_is_right if tool == "calculator" else in_first_five_words
    return Benchmark(f"{tool} ({wordings})", asked, rule, WITHHELD.get(tool, frozenset()))


def chosen_benchmarks(section: Evaluation, tools: Sequence[str]) -> list[Benchmark]:
    """The made world's questions for each of the tools, then the paper's benchmarks. Raises BenchmarkError."""
    made = [synthetic_benchmark(tool, section.questions, section.seed, "seen") for tool in tools if section.questions]
    named = [one for name, path in section.benchmarks.items() for one in read_benchmark(name, path)]
    for one in named:
        if not one.questions:
            raise BenchmarkError(f"{one.name} has no question ({dict(one.left_out)}); give the benchmark's own files")
    return made + named


def chosen_identity(section: Evaluation) -> Mapping[str, object]:
    """What the questions depend on. Raises BenchmarkError for an unknown benchmark, or one without its files."""
    files = {name: benchmark_identity(name, path) for name, path in section.benchmarks.items()}
    made = {"questions": section.questions, "seed": section.seed, "world": VERSION}
    return {**made, "benchmarks": files, "reading": READING}
