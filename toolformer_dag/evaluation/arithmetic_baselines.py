"""Answer arithmetic questions without a model: what the numbers of a question give by themselves. Imports no torch.

On SVAMP the difference of the first two numbers answers 23 % of the questions, so a model that answers fewer has
learnt nothing about them.
"""

from collections.abc import Callable, Mapping
from decimal import Decimal

from toolformer_dag.decoding.generation import Generation
from toolformer_dag.evaluation.benchmark import NUMBER, Benchmark, number_is_right
from toolformer_dag.evaluation.scores import Condition, QuestionOutcome, judge

NO_MODEL = "no model"
BASELINES: Mapping[str, tuple[int, Callable[..., Decimal]]] = {
    "a + b": (2, lambda a, b: a + b),
    "|a - b|": (2, lambda a, b: abs(a - b)),
    "a x b": (2, lambda a, b: a * b),
    "first number": (1, lambda a: a),
}
"""Name -> (how many of a question's first numbers it takes, the answer)."""


def baseline_outcomes(benchmark: Benchmark) -> list[list[QuestionOutcome]]:
    """Return the outcomes of each baseline, judged like those of a model; empty for other than arithmetic benchmarks.

    A question with fewer numbers than a baseline takes has no answer, which is wrong.
    """
    if benchmark.correct is not number_is_right:
        return []
    return [
        _outcomes(benchmark, Condition(f"{NO_MODEL}: {name}", None, NO_MODEL), *BASELINES[name]) for name in BASELINES
    ]


def _outcomes(
    benchmark: Benchmark, condition: Condition, taken: int, answer: Callable[..., Decimal]
) -> list[QuestionOutcome]:
    found = []
    for number, question in enumerate(benchmark.questions, 1):
        given = [Decimal(text.replace(",", "").replace("\u2212", "-")) for text in NUMBER.findall(question.prompt)]
        written = f" {answer(*given[:taken]):f}" if len(given) >= taken else ""
        reason = None if written else "too_few_numbers"
        found.append(judge(benchmark, number, condition, Generation(written, written, (), tokens=0, reason=reason)))
    return found
