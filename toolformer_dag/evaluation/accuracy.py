"""Asking a model the questions of a benchmark, zero-shot (paper, section 4.2)."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from toolformer_dag.decoding.generate import generate
from toolformer_dag.decoding.generation import Generation
from toolformer_dag.evaluation.benchmark import Benchmark
from toolformer_dag.evaluation.outcome import Outcome
from toolformer_dag.evaluation.question import Question
from toolformer_dag.language_model.load import LanguageModel
from toolformer_dag.tools.limits import ToolLimits
from toolformer_dag.tools.tool import Tool

CHUNK = 256  # questions between two reports of progress

Progress = Callable[[int, int], None]
"""Called with the questions answered and the questions there are."""


@dataclass(frozen=True, slots=True)
class Condition:
    """`k` as in decoding; 0 is the paper's "disabled", also right for models that know no calls."""

    name: str
    k: int


def outcomes(
    language_model: LanguageModel,
    benchmark: Benchmark,
    tools: Mapping[str, Tool],
    condition: Condition,
    *,
    max_new_tokens: int = 64,
    max_call_tokens: int = 64,
    limits: Mapping[str, ToolLimits] | None = None,
    progress: Progress | None = None,
) -> list[Outcome]:
    """One per question, in order; `tools` and `limits` are by name in the text."""
    found: list[Outcome] = []
    for at in range(0, len(benchmark.questions), CHUNK):
        chunk = benchmark.questions[at : at + CHUNK]
        generations = generate(
            language_model,
            [question.prompt for question in chunk],
            tools,
            k=condition.k,
            withheld=benchmark.withheld & tools.keys(),
            max_new_tokens=max_new_tokens,
            max_call_tokens=max_call_tokens,
            contexts=[question.context for question in chunk],
            limits=limits,
        )
        found += [_outcome(benchmark, condition, tools, *pair) for pair in zip(chunk, generations, strict=True)]
        if progress:
            progress(len(found), len(benchmark.questions))
    return found


def _outcome(
    benchmark: Benchmark, condition: Condition, tools: Mapping[str, Tool], question: Question, generation: Generation
) -> Outcome:
    call = generation.calls[0] if generation.calls else None
    key = tools[call.tool].key if call and call.tool in tools else None
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
