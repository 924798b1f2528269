"""BOS: measured where the tokenizer does not add it, named by a warning, set by `model.bos`, kept by checkpoints."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer, GPT2Config, GPT2LMHeadModel

from tests.tiny_models import CORPUS, save
from tests.tokenizers import byte_level, metaspace
from tests.training.test_finetune import HELDOUT, TEXTS
from toolformer_dag.model.engine import Engine
from toolformer_dag.model.loading import (
    LanguageModel,
    load_encoding,
    load_model,
    load_model_with_identity,
    wrap_language_model,
)
from toolformer_dag.model.requests import LossRequest
from toolformer_dag.model.trials import ORDINARY_TEXT
from toolformer_dag.model.weights import ModelError
from toolformer_dag.settings.model_settings import ModelSettings
from toolformer_dag.settings.setting_types import select_determining_settings
from toolformer_dag.settings.training_settings import TrainingSettings
from toolformer_dag.training.finetune import finetune
from toolformer_dag.training.training_report import TrainingData


def learned(behind_bos: bool) -> LanguageModel:
    """Make a model that knows one text, which it has read after BOS or without; its tokenizer adds none."""
    torch.manual_seed(1)
    tokenizer = byte_level([*CORPUS, ORDINARY_TEXT], 400)
    config = GPT2Config(vocab_size=len(tokenizer), n_embd=32, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0)
    model = GPT2LMHeadModel(config)
    bos = [tokenizer.bos_token_id] * behind_bos
    ids = torch.tensor([bos + tokenizer(ORDINARY_TEXT).input_ids])
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-2)
    for _ in range(30):
        optimizer.zero_grad()
        model(ids, labels=ids).loss.backward()
        optimizer.step()
    return wrap_language_model("learned", model, tokenizer)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that needs BOS."""
    found = tmp_path_factory.mktemp("bos") / "model"
    save(learned(behind_bos=True), found)
    return found


def settings(folder: Path, **values: Any) -> ModelSettings:
    return ModelSettings(name=str(folder), device="cpu", **values)


def text_loss(model: LanguageModel) -> float:
    request = LossRequest(ORDINARY_TEXT, 8, "Add", "1 + 2", "3")
    return Engine(model).losses([request])[0].loss_empty


def test_a_model_that_needs_bos_is_named_and_the_setting_gives_it(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    without = load_model(settings(folder))
    assert without.encoding.bos_ids == [] and "set model.bos = true" in caplog.text and "<|end|>" in caplog.text
    caplog.clear()
    given = load_model(settings(folder, bos=True))
    assert load_model(settings(folder, bos=False)).encoding.bos_ids == []
    assert given.encoding.bos_ids == [0] and not caplog.records
    assert text_loss(given) < text_loss(without) - 0.5
    assert given.encoding.encode_texts(["1 + 2"])[0].token_ids == without.encoding.encode_texts(["1 + 2"])[0].token_ids


def test_nothing_is_said_of_a_model_that_bos_does_not_help(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    save(learned(behind_bos=False), tmp_path)
    assert load_model(settings(tmp_path)).encoding.bos_ids == [] and not caplog.records


def test_a_saved_tokenizer_and_a_checkpoint_begin_as_their_base_does(
    folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    load_encoding(settings(folder, bos=True)).tokenizer.save_pretrained(tmp_path / "tokenizer")
    assert AutoTokenizer.from_pretrained(tmp_path / "tokenizer")("1 + 2").input_ids[0] == 0
    recipe = TrainingSettings(batch_size=8, device_batch_size=8, learning_rate=1e-3, max_steps=2, eval_steps=2)
    for bos, first in ((True, [0]), (None, [])):
        base = settings(folder, bos=bos)
        finetune(base, TrainingData(TEXTS, HELDOUT), recipe, tmp_path / f"out {bos}")
        caplog.clear()
        assert load_model(base, str(tmp_path / f"out {bos}")).encoding.bos_ids == first
        assert not caplog.records  # a checkpoint goes on as it was trained
    assert load_model(settings(folder, bos=True), str(folder)).encoding.bos_ids == [0]


def test_bos_is_taken_off_where_the_tokenizer_adds_it(tmp_path: Path) -> None:
    tokenizer = metaspace(CORPUS, 330, "bos")
    tokenizer.save_pretrained(tmp_path)
    GPT2Config(vocab_size=len(tokenizer)).save_pretrained(tmp_path)
    assert [load_encoding(settings(tmp_path, bos=bos)).bos_ids for bos in (None, True, False)] == [[1], [1], []]


def test_a_tokenizer_without_bos_cannot_begin_with_it(tmp_path: Path) -> None:
    tokenizer = byte_level(CORPUS, 300)
    tokenizer.bos_token = None
    tokenizer.save_pretrained(tmp_path)
    GPT2Config(vocab_size=len(tokenizer)).save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=r"model.bos = true, .* has no BOS; remove model.bos"):
        load_encoding(settings(tmp_path, bos=True))


def test_only_a_bos_that_is_set_is_in_an_identity(folder: Path) -> None:
    assert (
        "bos" not in select_determining_settings(settings(folder))
        and "bos" not in load_model_with_identity(settings(folder)).identity
    )
    assert load_model_with_identity(settings(folder, bos=True)).identity["bos"] is True
