"""The benchmarks that the settings ask for. Imports no torch."""

from collections.abc import Mapping, Sequence

from toolformer_dag.embedded.web import VERSION
from toolformer_dag.evaluation.benchmark import Benchmark
from toolformer_dag.evaluation.benchmarks.catalogue import READING, benchmark_identity, read_benchmark
from toolformer_dag.evaluation.benchmarks.source import BenchmarkError
from toolformer_dag.evaluation.made_world import made_world
from toolformer_dag.settings.sections import Evaluation


def chosen_benchmarks(section: Evaluation, tools: Sequence[str]) -> list[Benchmark]:
    """The made world's questions for each of the tools, then the paper's benchmarks. Raises BenchmarkError."""
    made = [made_world(tool, section.questions, section.seed, "seen") for tool in tools if section.questions]
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
