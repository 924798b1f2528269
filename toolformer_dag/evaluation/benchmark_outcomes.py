"""Asking a model the questions of a benchmark, zero-shot (paper, section 4.2)."""

from collections.abc import Sequence
from dataclasses import dataclass

from toolformer_dag.decoding.generation import Generation
from toolformer_dag.evaluation.asking import Asking
from toolformer_dag.evaluation.benchmark import Benchmark
from toolformer_dag.evaluation.condition import Condition
from toolformer_dag.evaluation.generations import generation_store, generations
from toolformer_dag.evaluation.outcome import Outcome
from toolformer_dag.evaluation.question import Question
from toolformer_dag.lane import Lane
from toolformer_dag.language_model.load import LanguageModel
from toolformer_dag.settings.settings import Settings
from toolformer_dag.storage.lake import Lake


@dataclass(frozen=True, slots=True)
class Asked:
    """One outcome per question, in order. `store`: the row store in which the lake keeps what the model wrote."""

    outcomes: list[Outcome]
    store: str


def benchmark_outcomes(
    settings: Settings, lanes: Sequence[Lane], model: LanguageModel, condition: Condition, benchmark: Benchmark
) -> Asked:
    """The tools of all `lanes` may be called, but those that the benchmark withholds.

    What the lake of `settings` has from an earlier run is judged again and not written again. Raises StorageError,
    WriteError.
    """
    asking = Asking(settings, lanes, model, condition.k, benchmark.withheld)
    store = generation_store(Lake(settings.paths.lake), asking)
    keys = {lane.tool.name: lane.key for lane in lanes}
    made = zip(benchmark.questions, generations(store, asking, benchmark.questions), strict=True)
    return Asked([_outcome(benchmark, condition, keys, *pair) for pair in made], store.name)


def _outcome(
    benchmark: Benchmark, condition: Condition, keys: dict[str, str], question: Question, generation: Generation
) -> Outcome:
    call = generation.calls[0] if generation.calls else None
    key = keys.get(call.tool) if call else None
    return Outcome(
        benchmark=benchmark.name,
        condition=condition.name,
        prompt=question.prompt,
        answers=question.answers,
        wording=question.wording,
        text=generation.text,
        called=(call.tool or None) if call else None,
        right_tool=key == question.tool if question.tool else None,
        correct=benchmark.correct(generation.plain, question.answers),
        reason=call.reason if call else generation.reason,
    )
