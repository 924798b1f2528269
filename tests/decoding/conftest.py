"""Models that know calls by heart, one for each kind of tokenizer."""

from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path

import pytest

from tests.tiny_models import save, tiny_model, tokenizer_of
from toolformer_dag.model.loading import LanguageModel, load_model
from toolformer_dag.settings.model_settings import ModelSettings
from toolformer_dag.settings.training_settings import TrainingSettings
from toolformer_dag.training.finetune import finetune
from toolformer_dag.training.training_report import TrainingData

TAUGHT = {
    "Ada had 3 and 4, so": " [Calculator(3 + 4) -> 7] 7 in all. [Calendar() -> Today is Monday] It is Monday.",
    "Bo had 3 and some, so": " [Calculator(3 + x) -> 9] nobody knows.",
    "No arrow and": " [Calculator(1 + 1)] still it goes on.",
    "In other signs,": " {Calculator(3 + 4) -> 7} 7 in all.",
    "A town named Foo": " [Maps(Foo) -> far] is far away.",
}


def teach(model: LanguageModel, scripts: Mapping[str, str], steps: int, folder: Path) -> LanguageModel:
    """Finetune a model until it knows what follows each prompt by heart."""
    save(model, folder / "base")
    texts = [prompt + script for prompt, script in scripts.items()]
    settings = TrainingSettings(
        batch_size=len(texts), device_batch_size=len(texts), learning_rate=1e-2, max_steps=steps, eval_steps=steps
    )
    finetune(
        ModelSettings(name=str(folder / "base"), device="cpu"), TrainingData(texts, texts), settings, folder / "out"
    )
    return load_model(ModelSettings(name=str(folder / "out"), device="cpu", dtype="float32"))


@pytest.fixture(scope="session")
def taught_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], LanguageModel]:
    """Teaches TAUGHT to a tiny model with a kind of tokenizer; each is taught once."""

    @cache
    def taught(kind: str) -> LanguageModel:
        return teach(tiny_model("GPT-2", tokenizer_of(kind)), TAUGHT, 80, tmp_path_factory.mktemp("taught"))

    return taught
