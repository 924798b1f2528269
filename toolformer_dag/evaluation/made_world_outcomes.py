"""Asking a model the made world's questions as the settings say."""

from collections.abc import Sequence
from typing import Literal

from toolformer_dag.evaluation.accuracy import Condition, outcomes
from toolformer_dag.evaluation.made_world import made_world
from toolformer_dag.evaluation.outcome import Outcome
from toolformer_dag.lane import Lane
from toolformer_dag.language_model.load import LanguageModel
from toolformer_dag.settings import Settings


def made_world_outcomes(
    settings: Settings,
    lanes: Sequence[Lane],
    model: LanguageModel,
    condition: Condition,
    tool: str,
    wordings: Literal["seen", "unseen"],
) -> list[Outcome]:
    """One outcome per question that is made for `tool` (a lane's key); the tools of all `lanes` may be called."""
    return outcomes(
        model,
        made_world(tool, settings.evaluation.questions, settings.evaluation.seed, wordings),
        {lane.tool.name: lane.tool for lane in lanes},
        condition,
        max_new_tokens=settings.decoding.max_new_tokens,
        max_call_tokens=settings.sampling.max_call_tokens,
        limits={lane.tool.name: lane.limits for lane in lanes},
    )
