"""What the shipped models must do for the method to work at all; the model card has the figures."""

import math

import pytest
import torch

from benchmarks.embedded_model.export import WANTED
from toolformer_dag.model.engine import Engine
from toolformer_dag.model.loading import load_model
from toolformer_dag.model.weights import count_folder_parameters
from toolformer_dag.settings.model_settings import ModelSettings
from toolformer_dag.synthetic import EMBEDDED_MODEL_FOLDER, SMALL_MODEL_FOLDER

FOLDERS = {"model": EMBEDDED_MODEL_FOLDER, "model_small": SMALL_MODEL_FOLDER}
TEXTS = 24


@pytest.fixture(scope="module", params=["model_small", pytest.param("model", marks=pytest.mark.long)])
def engine(request: pytest.FixtureRequest) -> Engine:
    """Both shipped models; the larger one in the long tests."""
    return Engine(load_model(ModelSettings(name=str(FOLDERS[request.param]), dtype="float32")))


def test_both_models_together_stay_within_12_megabytes_and_have_a_card() -> None:
    files = [file for folder in FOLDERS.values() for file in folder.iterdir()]
    assert sum(file.stat().st_size for file in files) < 12e6
    assert count_folder_parameters(SMALL_MODEL_FOLDER) < 1e6
    assert {file.parent.name for file in files if file.name == "README.md"} == set(FOLDERS)
    assert not [file for file in files if file.suffix in (".bin", ".pt", ".pkl")]


def test_marks_of_calls_are_tokens_and_texts_begin_with_the_special_token(engine: Engine) -> None:
    tokenizer = engine.language_model.tokenizer
    assert all(len(tokenizer(mark, add_special_tokens=False).input_ids) == 1 for mark in WANTED)
    assert engine.encoding.bos_ids == [0]
    assert engine.language_model.context_length >= 1024


@pytest.mark.parametrize("way", [3, 5, 8, 16])
def test_what_was_said_is_said_again_over_short_and_long_ways(engine: Engine, way: int) -> None:
    """Else a finetuned model calls the tool and cannot use the result, which stands a few tokens before."""
    random = torch.Generator().manual_seed(0)
    vocabulary = engine.language_model.model.config.vocab_size
    before, said = (torch.randint(1, vocabulary, (64, length), generator=random) for length in (30, way))
    ids = torch.cat([torch.zeros(64, 1, dtype=torch.long), before, said, said], 1)
    with torch.inference_mode():
        logits = engine.language_model.model(ids).logits[:, -way:-1]
    losses = torch.nn.functional.cross_entropy(logits.flatten(0, 1), said[:, 1:].flatten())
    assert losses < 0.6 * math.log(vocabulary)
