"""The model that the assets ask, loaded when the first asset needs it and kept for the process."""

import os
from functools import lru_cache
from pathlib import Path
from tempfile import gettempdir
from typing import TYPE_CHECKING

import dagster as dg

from resources.gpu import own_gpu
from toolformer_dag.settings.sections import Model

if TYPE_CHECKING:
    from toolformer_dag.model.engine import Engine
    from toolformer_dag.model.loading import Tokens


class LanguageModelResource(dg.ConfigurableResource["LanguageModelResource"]):
    """The settings' model: a folder or hub id, its revision, dtype and device."""

    name: str
    revision: str | None = None
    dtype: str = "float32"
    device: str = "auto"
    token_budget: int | None = None
    trust_remote_code: bool = False

    def engine(self) -> "Engine":
        """Positions, samples and losses; the first call loads the weights. Raises ModelError."""
        return _engine(self._model())

    def tokens(self) -> "Tokens":
        """The tokenizer alone; no weights are loaded. Raises ModelError."""
        return _tokens(self._model())

    def _model(self) -> Model:
        return Model.model_validate(self.model_dump(include=set(Model.model_fields)))


def release() -> None:
    """Let go of the weights: finetuning and evaluation load models of their own."""
    _engine.cache_clear()


@lru_cache(maxsize=1)
def _engine(model: Model) -> "Engine":
    import torch

    from toolformer_dag.checkpoints import load_engine

    gpu = own_gpu(torch.cuda.device_count(), Path(os.environ.get("DAGSTER_HOME", gettempdir())))
    if gpu is not None:
        torch.cuda.set_device(gpu)
    return load_engine(model)


@lru_cache(maxsize=1)
def _tokens(model: Model) -> "Tokens":
    from toolformer_dag.checkpoints import model_name
    from toolformer_dag.model.loading import load_tokens

    return load_tokens(model_name(model), revision=model.revision, trust_remote_code=model.trust_remote_code)
