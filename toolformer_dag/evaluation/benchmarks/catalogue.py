"""The paper's benchmarks by name."""

from collections.abc import Callable, Mapping
from pathlib import Path

from toolformer_dag.evaluation.benchmark import Benchmark
from toolformer_dag.evaluation.benchmarks.dateset import dateset
from toolformer_dag.evaluation.benchmarks.lama import lama
from toolformer_dag.evaluation.benchmarks.mathematics import asdiv, mawps, svamp
from toolformer_dag.evaluation.benchmarks.mlqa import mlqa
from toolformer_dag.evaluation.benchmarks.open_questions import natural_questions, trivia_qa, web_questions
from toolformer_dag.evaluation.benchmarks.source import BenchmarkError, content
from toolformer_dag.evaluation.benchmarks.templama import templama

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
