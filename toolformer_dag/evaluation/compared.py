"""The models that are compared, and how each may use tools (METHOD 5 and 7)."""

from collections.abc import Iterator

from toolformer_dag.checkpoints import checkpoint_folder, load_model
from toolformer_dag.evaluation.accuracy import Condition
from toolformer_dag.language_model.load import LanguageModel
from toolformer_dag.settings import Settings

NO_CALLS = 0
"""k of a disabled model."""
BASE, BASE_C = Condition("base", NO_CALLS), Condition("base + C", NO_CALLS)
DISABLED = Condition("Toolformer (disabled)", NO_CALLS)


def compared(settings: Settings) -> Iterator[tuple[LanguageModel, list[Condition]]]:
    """The base model, M + C, and Toolformer disabled and with tools; one model is in memory at a time."""
    finetuned, baseline = (str(checkpoint_folder(settings, f"{name}_checkpoint")) for name in ("finetuned", "baseline"))
    yield load_model(settings.model), [BASE]
    yield load_model(settings.model, baseline), [BASE_C]
    yield load_model(settings.model, finetuned), [DISABLED, Condition("Toolformer", settings.decoding.k)]
