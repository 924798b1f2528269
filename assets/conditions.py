"""The models that are compared, and how each may use tools (METHOD 5 and 7)."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

import dagster as dg

from assets.plan import Plan
from toolformer_dag.checkpoints import checkpoint_folder, load_model

if TYPE_CHECKING:
    from toolformer_dag.evaluation.accuracy import Condition
    from toolformer_dag.language_model.load import LanguageModel

CHECKPOINTS = [dg.AssetKey(["training", name]) for name in ("finetuned_checkpoint", "baseline_checkpoint")]
DISABLED = 0


def compared(plan: Plan) -> "Iterator[tuple[LanguageModel, list[Condition]]]":
    """The base model, M + C, and Toolformer disabled and with tools; one model is in memory at a time."""
    from toolformer_dag.evaluation.accuracy import Condition

    settings = plan.settings
    finetuned, baseline = (str(checkpoint_folder(settings, key.path[-1])) for key in CHECKPOINTS)
    yield load_model(settings.model), [Condition("base", DISABLED)]
    yield load_model(settings.model, baseline), [Condition("base + C", DISABLED)]
    with_tools = Condition("Toolformer", settings.decoding.k)
    yield load_model(settings.model, finetuned), [Condition("Toolformer (disabled)", DISABLED), with_tools]
