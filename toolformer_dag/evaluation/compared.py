"""The models that are compared, and how each may use tools (paper, sections 4.1 and 4.3)."""

from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

from toolformer_dag.checkpoints import checkpoint_folder, load_identified
from toolformer_dag.evaluation.condition import Condition
from toolformer_dag.language_model.load import LanguageModel
from toolformer_dag.settings.settings import Settings

NO_CALLS = 0
"""k of a disabled model."""
BASE, BASE_C = Condition("base", NO_CALLS), Condition("base + C", NO_CALLS)
DISABLED = Condition("Toolformer (disabled)", NO_CALLS)


Found = TypeVar("Found")


def compared(
    settings: Settings, measure: Callable[[LanguageModel, list[Condition]], Iterable[Found]]
) -> Iterator[Found]:
    """What `measure` finds for the base model, for M + C, and for Toolformer disabled and with tools.

    Each model is loaded when the one before is out of memory, as long as `measure` keeps none.
    """
    finetuned, baseline = (str(checkpoint_folder(settings, f"{name}_checkpoint")) for name in ("finetuned", "baseline"))
    yield from measure(load_identified(settings.model), [BASE])
    yield from measure(load_identified(settings.model, baseline), [BASE_C])
    yield from measure(
        load_identified(settings.model, finetuned), [DISABLED, Condition("Toolformer", settings.decoding.k)]
    )
