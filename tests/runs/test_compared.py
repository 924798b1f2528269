"""The models that are compared, one after the other."""

import gc
import weakref
from collections.abc import Iterator

from toolformer_dag.evaluation.asking import compared
from toolformer_dag.evaluation.scores import Condition
from toolformer_dag.model.loading import LanguageModel
from toolformer_dag.model.weights import checkpoint_folder, model_name
from toolformer_dag.synthetic import SMALL_MODEL
from toolformer_dag.training.training_report import finetuned_or_base


def test_one_model_is_in_memory_at_a_time(made) -> None:
    seen: list[weakref.ref] = []

    def measure(model: LanguageModel, conditions: list[Condition]) -> Iterator[str]:
        gc.collect()
        assert not [one for one in seen if one() is not None]
        seen.append(weakref.ref(model.model))
        yield from (condition.name for condition in conditions)

    names = list(compared(made.settings(), measure))
    assert names == ["base", "base + C", "Toolformer (disabled)", "Toolformer"]
    assert len(seen) == 3


def test_a_checkpoint_of_another_model_is_not_taken_for_the_settings_own(made) -> None:
    own, other = made.settings(), made.settings(f"model.name='{SMALL_MODEL}'")
    assert finetuned_or_base(own) == str(checkpoint_folder(own))
    assert finetuned_or_base(other) == model_name(other.model) == str(SMALL_MODEL)
