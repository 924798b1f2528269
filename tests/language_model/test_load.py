"""Loading models, saying what is wrong with those that cannot be loaded, and their identity."""

import copy
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from transformers import CTRLConfig, CTRLTokenizer, PreTrainedTokenizerFast

from tests.tiny_models import save
from toolformer_dag.model.engine import Engine
from toolformer_dag.model.loading import (
    check_tokenizer,
    choose_fast_dtype,
    load_config,
    load_encoding,
    load_model,
    read_context_length,
    wrap_language_model,
)
from toolformer_dag.model.requests import LossRequest
from toolformer_dag.model.weights import ModelError, read_model_dtype, read_model_identity
from toolformer_dag.settings.model_settings import ModelSettings


@pytest.fixture
def folder(gpt2: Any, tmp_path: Path) -> Path:
    save(gpt2.language_model, tmp_path / "model")
    return tmp_path / "model"


def test_a_folder_comes_back_with_the_same_numbers(gpt2: Any, folder: Path, texts: tuple[str, ...]) -> None:
    request = LossRequest(texts[0], 3, "Add", "1", "2")
    loaded = load_model(ModelSettings(name=str(folder), dtype="float32", device="cpu"))
    assert Engine(loaded).losses([request]) == gpt2.engine().losses([request])
    assert loaded.context_length == 512 and not loaded.model.training


@pytest.mark.parametrize("stored", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("named", [True, False])
def test_auto_is_the_checkpoints_own_type(gpt2: Any, tmp_path: Path, stored: str, named: bool) -> None:
    folder = tmp_path / "model"
    copy.deepcopy(gpt2.language_model.model).to(getattr(torch, stored)).save_pretrained(folder)
    gpt2.language_model.tokenizer.save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    assert config["dtype"] == stored
    if not named:
        del config["dtype"]
        (folder / "config.json").write_text(json.dumps(config))
    settings = ModelSettings(name=str(folder), device="cpu")
    assert (settings.dtype, read_model_dtype(settings)) == ("auto", stored)
    assert load_model(ModelSettings(name=str(folder), device="cpu")).dtype == stored
    loaded = load_model(settings)
    assert (loaded.dtype, loaded.arithmetic) == (stored, stored)
    other = load_model(ModelSettings(name=str(folder), dtype="float32", device="cpu"))
    assert (other.dtype, other.arithmetic) == ("float32", "float32")


def test_a_finetuned_checkpoint_is_measured_in_the_type_of_its_base(gpt2: Any, folder: Path, tmp_path: Path) -> None:
    base = tmp_path / "base"
    copy.deepcopy(gpt2.language_model.model).to(torch.bfloat16).save_pretrained(base)
    gpt2.language_model.tokenizer.save_pretrained(base)
    settings = ModelSettings(name=str(base), device="cpu")
    assert load_model(settings, str(folder)).dtype == "bfloat16"
    assert load_model(settings, str(folder), "float32").dtype == "float32"


def test_a_type_that_the_processor_multiplies_slowly_is_warned_of(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    load_model(ModelSettings(name=str(folder), dtype="float32", device="cpu"))
    assert not caplog.records
    load_model(ModelSettings(name=str(folder), dtype="bfloat16", device="cpu"))
    assert [record.message.split(";")[-1] for record in caplog.records] == (
        [' set dtype = "float32"'] if choose_fast_dtype() == torch.float32 else []
    )


def test_weights_that_are_not_safetensors_are_refused(gpt2: Any, folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    torch.save(gpt2.language_model.model.state_dict(), folder / "pytorch_model.bin")
    with pytest.raises(ModelError, match=r"cannot load .* safetensors"):
        load_model(ModelSettings(name=str(folder), device="cpu"))


@pytest.mark.parametrize("missing", ["config.json", "model.safetensors", "tokenizer.json"])
def test_a_folder_that_is_no_model_names_folder_and_remedy(folder: Path, missing: str) -> None:
    (folder / missing).unlink()
    (folder / "tokenizer_config.json").unlink()
    with pytest.raises(ModelError, match=r"cannot .*; (give (a|the) folder|save the model)") as caught:
        load_model(ModelSettings(name=str(folder), device="cpu"))
    assert str(folder) in str(caught.value)


@pytest.mark.parametrize(("device", "dtype"), [("cpu", "float8"), ("cuda:99", None), ("nonsense", None)])
def test_impossible_options_are_named(folder: Path, device: str, dtype: str | None) -> None:
    with pytest.raises(ModelError, match="use auto"):
        load_model(ModelSettings(name=str(folder), device=device), None, dtype)


def test_a_tokenizer_that_joins_texts_with_calls_is_refused(llama_tokenizer: Any) -> None:
    for kind in ("first", "prepended"):
        check_tokenizer(kind, llama_tokenizer(kind))
    content = json.loads(llama_tokenizer("prepended").backend_tokenizer.to_str())
    model = content["model"]
    for first in ("a", "▁a"):
        model["merges"].append([first, "▁["])
        model["vocab"].setdefault(first, len(model["vocab"]))
        model["vocab"].setdefault(f"{first}▁[", len(model["vocab"]))
    joining = PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(json.dumps(content)), unk_token="<unk>")
    with pytest.raises(ModelError, match=r"'joining' .* merges the end of a text .*; use a model"):
        check_tokenizer("joining", joining)


def test_a_tokenizer_without_offsets_is_refused_where_texts_are_cut(tmp_path: Path) -> None:
    (tmp_path / "vocab.json").write_text(json.dumps({"a</w>": 0, "<unk>": 1}))
    (tmp_path / "merges.txt").write_text("#version: 0.2\n")
    CTRLTokenizer(str(tmp_path / "vocab.json"), str(tmp_path / "merges.txt")).save_pretrained(tmp_path)
    CTRLConfig(vocab_size=2).save_pretrained(tmp_path)
    with pytest.raises(ModelError, match="gives no character offsets; save it as a fast tokenizer"):
        load_encoding(ModelSettings(name=str(tmp_path)))


def with_token(tokenizer: PreTrainedTokenizerFast, token: str, special: bool) -> PreTrainedTokenizerFast:
    """Return a copy of the tokenizer with a token more."""
    found = copy.deepcopy(tokenizer)
    found.add_tokens([token], special_tokens=special)
    return found


def test_a_token_without_a_row_of_the_embedding_is_named(gpt2: Any, folder: Path) -> None:
    model = gpt2.language_model.model
    tokenizer = gpt2.language_model.tokenizer
    rows = model.config.vocab_size
    with_token(tokenizer, "<think>", special=False).save_pretrained(folder)
    with pytest.raises(ModelError, match=rf"'<think>' with number {rows}, .* {rows} rows .*resize_token_embeddings"):
        load_model(ModelSettings(name=str(folder), device="cpu"))
    unwritten = with_token(tokenizer, "<image>", special=True)  # no text holds it
    assert wrap_language_model("gpt2", model, unwritten).encoding.encode_texts(["<image>"])[0].token_ids != [rows]
    unwritten.eos_token = "<image>"
    with pytest.raises(ModelError, match="'<image>' with number"):
        wrap_language_model("gpt2", model, unwritten)


def test_code_that_comes_with_a_model_is_not_run(folder: Path) -> None:
    config = folder / "config.json"
    auto_map = '"auto_map": {"AutoConfig": "evil.Config"}, "model_type": "unheard_of",'
    config.write_text(config.read_text().replace('"model_type": "gpt2",', auto_map))
    (folder / "evil.py").write_text("raise SystemExit('code of the model ran')")
    with pytest.raises(ModelError, match="trust_remote_code"):
        load_model(ModelSettings(name=str(folder), device="cpu"))


@pytest.mark.parametrize(("name", "context"), [("mistral", 131_072), ("llama", 512), ("gemma3", 512)])
def test_the_context_is_the_models_own_whatever_its_window(cases: Any, tmp_path: Path, name: str, context: int) -> None:
    model = cases(name).language_model
    model.model.config.save_pretrained(tmp_path)
    model.tokenizer.save_pretrained(tmp_path)
    found = read_context_length(load_config(ModelSettings(name=str(tmp_path))))
    assert [model.context_length, found] == [context, context]
    assert cases(name).engine().backend.context_length == context


def test_a_model_without_positions_has_no_end(cases: Any) -> None:
    assert read_context_length(cases("bloom").language_model.model.config) > 100_000


class Sizes(SimpleNamespace):
    """A config of these fields."""

    def get_text_config(self) -> "Sizes":
        return self


def test_factors_that_depend_on_the_length_bound_it() -> None:
    rope = {
        "rope_type": "longrope",
        "original_max_position_embeddings": 64,
        "short_factor": [1.0],
        "long_factor": [2.0],
    }
    for parameters in (rope, {"full_attention": rope, "sliding_attention": {"rope_type": "default"}}):
        assert read_context_length(Sizes(max_position_embeddings=256, rope_parameters=parameters)) == 64
    assert read_context_length(Sizes(max_position_embeddings=256, rope_parameters={"rope_type": "yarn"})) == 256
    assert read_context_length(Sizes(max_seq_len=512)) == 512


def test_a_model_that_looks_ahead_is_refused(tiny_model: Any) -> None:
    with pytest.raises(ModelError, match="attends to later tokens; use a causal model"):
        tiny_model("bert")


def test_identity_follows_the_content_and_nothing_else(folder: Path, tmp_path: Path) -> None:
    before = read_model_identity(str(folder))
    (folder / "README.md").write_text("a note")
    assert read_model_identity(str(folder)) == before
    moved = folder.rename(tmp_path / "elsewhere")
    assert read_model_identity(str(moved)) == before
    weights = bytearray((moved / "model.safetensors").read_bytes())
    weights[-1] ^= 1
    (moved / "model.safetensors").write_bytes(weights)
    changed = read_model_identity(str(moved))
    assert {name for name in before if before[name] != changed[name]} == {"model.safetensors"}


def test_identity_of_a_hub_id_and_of_what_is_no_model(tmp_path: Path) -> None:
    assert read_model_identity("gpt2", "abc") == {"id": "gpt2", "revision": "abc"}
    assert read_model_identity("EleutherAI/gpt-j-6b")["revision"] == "main"
    for name, reason in ((str(tmp_path), "holds no config.json"), (str(tmp_path / "x"), "does not exist")):
        with pytest.raises(ModelError, match=reason):
            read_model_identity(name)
