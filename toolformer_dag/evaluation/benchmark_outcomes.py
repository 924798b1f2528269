"""Asking a model a benchmark as the settings say."""

from collections.abc import Sequence

from toolformer_dag.evaluation.accuracy import Condition, outcomes
from toolformer_dag.evaluation.benchmark import Benchmark
from toolformer_dag.evaluation.outcome import Outcome
from toolformer_dag.lane import Lane
from toolformer_dag.language_model.load import LanguageModel
from toolformer_dag.settings.settings import Settings


def benchmark_outcomes(
    settings: Settings, lanes: Sequence[Lane], model: LanguageModel, condition: Condition, benchmark: Benchmark
) -> list[Outcome]:
    """One per question; the tools of all `lanes` may be called, but those that the benchmark withholds."""
    return outcomes(
        model,
        benchmark,
        {lane.tool.name: lane.tool for lane in lanes},
        condition,
        max_new_tokens=settings.decoding.max_new_tokens,
        max_call_tokens=settings.sampling.max_call_tokens,
        limits={lane.tool.name: lane.limits for lane in lanes},
    )
