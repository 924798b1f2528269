"""Compute accuracies with intervals from judged answers. Imports no torch."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import sqrt
from types import MappingProxyType

from toolformer_dag.decoding.generation import TOOL_DOWN, DecodedCall, Generation
from toolformer_dag.evaluation.benchmark import Benchmark
from toolformer_dag.tools.tool import LOST, ToolDown


@dataclass(frozen=True, slots=True)
class Condition:
    """A condition of evaluation; `k` as in decoding. k = 0 is the paper's "disabled", also for models without calls.

    `model`: name of the model that is asked, which several conditions may share; `name` where it is left out. A
    condition with `k` None asks no model.
    """

    name: str
    k: int | None
    model: str = ""

    @property
    def of_model(self) -> str:
        return self.model or self.name


Z_95 = 1.959963984540054


def wilson(successes: int, trials: int) -> tuple[float, float]:
    """Return the 95 % interval of Wilson (1927) for a share; (0, 1) for no trials."""
    if not trials:
        return 0.0, 1.0
    share, z2 = successes / trials, Z_95**2
    centre = (share + z2 / (2 * trials)) / (1 + z2 / trials)
    half = Z_95 * sqrt(share * (1 - share) / trials + z2 / (4 * trials**2)) / (1 + z2 / trials)
    return max(0.0, centre - half), min(1.0, centre + half)


MAX_LOST = 0.01  # the largest accepted share of questions with a lost call


@dataclass(frozen=True, slots=True)
class QuestionOutcome:
    """The judged answer to a question.

    - `question`: its number within the benchmark, from 1; `gold`: the right answers.
    - `written`: the generated text, including calls; `plain`: without them, which is what is judged.
    - `calls`: all calls in order, those without a result too (` [see the note]` is not a call).
    - `called`, `call_input`, `call_result`: the first of them; None without a call, `called` also where its name was
      not complete.
    - `right_tool`: whether a called tool is the question's target; None where it has none.
    - `reason`: why the first call without a result had none, or why nothing was generated (`does_not_fit`); else None.
    - `tokens`: the number of tokens that the model chose.
    """

    benchmark: str
    question: int
    condition: str
    model: str
    k: int | None
    wording: str
    prompt: str
    context: str
    gold: tuple[str, ...]
    written: str
    plain: str
    calls: tuple[DecodedCall, ...]
    reason: str | None
    right_tool: bool | None
    correct: bool
    tokens: int

    @property
    def called(self) -> str | None:
        return self.calls[0].tool or None if self.calls else None

    @property
    def call_input(self) -> str | None:
        return self.calls[0].input if self.calls else None

    @property
    def call_result(self) -> str | None:
        return self.calls[0].result if self.calls else None


def judge(
    benchmark: Benchmark,
    number: int,
    condition: Condition,
    generation: Generation,
    lane_of: Mapping[str, str] = MappingProxyType({}),
) -> QuestionOutcome:
    """Judge what was written after question `number` of a benchmark, from 1, by the benchmark's rule.

    `lane_of`: name of a tool in the text -> key of its lane, which questions name as their target.
    """
    question = benchmark.questions[number - 1]
    called = {lane_of.get(call.tool) for call in generation.calls}
    reasons = [call.reason for call in generation.calls if call.reason is not None]
    return QuestionOutcome(
        benchmark=benchmark.name,
        question=number,
        condition=condition.name,
        model=condition.of_model,
        k=condition.k,
        wording=question.wording,
        prompt=question.prompt,
        context=question.context,
        gold=question.answers,
        written=generation.text,
        plain=generation.plain,
        calls=generation.calls,
        reason=reasons[0] if reasons else generation.reason,
        right_tool=question.tool in called if question.tool else None,
        correct=benchmark.correct(generation.plain, question.answers),
        tokens=generation.tokens,
    )


@dataclass(frozen=True, slots=True)
class Score:
    """The score of a benchmark under a condition; shares are of all `n` questions.

    - `low`, `high`: the 95 % interval of the accuracy (Wilson).
    - `calls`: the share of questions with a call.
    - `right_tool`: the share of right tools among questions with a target; None without such questions.
    """

    benchmark: str
    condition: str
    model: str
    k: int | None
    n: int
    accuracy: float
    low: float
    high: float
    calls: float
    right_tool: float | None


def check_outage(outcomes: Sequence[QuestionOutcome]) -> None:
    """Raise ToolDown where a tool was down or calls of more than MAX_LOST of the questions were lost."""
    failed = [[call for call in outcome.calls if _is_outage(call)] for outcome in outcomes]
    affected = sum(map(bool, failed))
    down = any(call.reason == TOOL_DOWN for calls in failed for call in calls)
    if down or affected > MAX_LOST * len(outcomes):
        names = ", ".join(sorted({call.tool for calls in failed for call in calls}))
        raise ToolDown(f"{names}: no answer to {affected} of {len(outcomes)} questions; fix the backend and run again")


def _is_outage(call: DecodedCall) -> bool:
    return call.reason == TOOL_DOWN or (call.reason or "").startswith(LOST)


def score(outcomes: Sequence[QuestionOutcome]) -> Score:
    """Score the outcomes of a benchmark under a condition; there must be at least one outcome."""
    n, correct = len(outcomes), sum(outcome.correct for outcome in outcomes)
    low, high = wilson(correct, n)
    targeted = [outcome.right_tool for outcome in outcomes if outcome.right_tool is not None]
    return Score(
        benchmark=outcomes[0].benchmark,
        condition=outcomes[0].condition,
        model=outcomes[0].model,
        k=outcomes[0].k,
        n=n,
        accuracy=correct / n,
        low=low,
        high=high,
        calls=sum(outcome.called is not None for outcome in outcomes) / n,
        right_tool=sum(targeted) / len(targeted) if targeted else None,
    )
