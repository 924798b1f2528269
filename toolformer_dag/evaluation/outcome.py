"""What a model made of a question, and what all of them add up to. Imports no torch."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from toolformer_dag.decoding.generation import TOOL_DOWN
from toolformer_dag.evaluation.interval import wilson
from toolformer_dag.tools.tool import LOST, ToolDown

LARGEST_LOST = 0.01  # of the questions: calls that got no answer by accident


@dataclass(frozen=True, slots=True)
class Outcome:
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


def refuse_outage(outcomes: Sequence[Outcome]) -> None:
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


def score(outcomes: Sequence[Outcome]) -> Score:
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
