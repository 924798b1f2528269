"""From judged answers to accuracies with their intervals. Imports no torch."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import sqrt

from toolformer_dag.decoding.generation import TOOL_DOWN
from toolformer_dag.tools.tool import LOST, ToolDown


@dataclass(frozen=True, slots=True)
class Condition:
    """`k` as in decoding; 0 is the paper's "disabled", also right for models that know no calls."""

    name: str
    k: int


Z_95 = 1.959963984540054


def wilson(successes: int, trials: int) -> tuple[float, float]:
    """The 95 % interval of Wilson (1927) for a share; (0, 1) where nothing was tried."""
    if not trials:
        return 0.0, 1.0
    share, z2 = successes / trials, Z_95**2
    centre = (share + z2 / (2 * trials)) / (1 + z2 / trials)
    half = Z_95 * sqrt(share * (1 - share) / trials + z2 / (4 * trials**2)) / (1 + z2 / trials)
    return max(0.0, centre - half), min(1.0, centre + half)


LARGEST_LOST = 0.01  # of the questions: calls that got no answer by accident


@dataclass(frozen=True, slots=True)
class QuestionOutcome:
    """`text`: what was written, calls included; `called`: the tool's name in the text, None without a call
    (` [see the note]` is none).

    `right_tool`: whether that is the tool that the question is made for, None where it is made for none. `reason`: why
    the call had no result, or why nothing could be written (`does_not_fit`); None else.
    """

    benchmark: str
    condition: str
    prompt: str
    answers: tuple[str, ...]
    wording: str
    text: str
    called: str | None
    right_tool: bool | None
    correct: bool
    reason: str | None


@dataclass(frozen=True, slots=True)
class Score:
    """Shares are of all `n` questions; `low`, `high`: 95 % interval of the accuracy (Wilson).

    `right_tool`: None where no question is made for a tool. `tools`: calls by name in the text; `reasons`: why calls
    had no result.
    """

    benchmark: str
    condition: str
    n: int
    accuracy: float
    low: float
    high: float
    calls: float
    right_tool: float | None
    tools: Mapping[str, int]
    reasons: Mapping[str, int]


def refuse_outage(outcomes: Sequence[QuestionOutcome]) -> None:
    """Raises ToolDown where a tool was down, or lost more calls than LARGEST_LOST: what its model answered meanwhile
    measures nothing.
    """
    down = [outcome for outcome in outcomes if outcome.reason == TOOL_DOWN]
    lost = [outcome for outcome in outcomes if (outcome.reason or "").startswith(LOST)]
    if down or len(lost) > LARGEST_LOST * len(outcomes):
        names = ", ".join(sorted({outcome.called for outcome in down + lost if outcome.called}))
        raise ToolDown(
            f"{names}: no answer to {len(down + lost)} of {len(outcomes)} questions; mend the backend and run again"
        )


def score(outcomes: Sequence[QuestionOutcome]) -> Score:
    """Of the outcomes of one benchmark under one condition; at least one."""
    n, correct = len(outcomes), sum(outcome.correct for outcome in outcomes)
    low, high = wilson(correct, n)
    aimed = [outcome.right_tool for outcome in outcomes if outcome.right_tool is not None]
    return Score(
        benchmark=outcomes[0].benchmark,
        condition=outcomes[0].condition,
        n=n,
        accuracy=correct / n,
        low=low,
        high=high,
        calls=sum(outcome.called is not None for outcome in outcomes) / n,
        right_tool=sum(aimed) / len(aimed) if aimed else None,
        tools=dict(Counter(outcome.called for outcome in outcomes if outcome.called is not None)),
        reasons=dict(Counter(outcome.reason for outcome in outcomes if outcome.reason is not None)),
    )
