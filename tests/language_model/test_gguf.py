"""A GGUF file as a model: converted once, known by its content, and used as a folder is."""

import json
import re
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from tests.command_line import cli
from tests.tiny_models import CORPUS
from tests.tokenizers import byte_level
from toolformer_dag.identity import file_hash
from toolformer_dag.model.loading import load_model
from toolformer_dag.model.trials import ORDINARY_TEXT
from toolformer_dag.model.weights import (
    CONVERSION_VERSION,
    ModelError,
    read_model_dtype,
    read_model_identity,
    resolve_model_name,
)
from toolformer_dag.settings.model_settings import ModelSettings
from toolformer_dag.settings.settings_file import load_settings

pytest.importorskip("gguf", reason="the extra gguf is not installed")
SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}


@dataclass
class Written:
    """A GGUF file, the cache that it was converted into, and the model that it holds."""

    file: Path
    cache: Path
    model: LlamaForCausalLM
    ids: list[int]


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Written:
    """A model that knows one text after BOS, in a file whose tokenizer adds none."""
    from tests.environments.gguf_writer import write

    folder = tmp_path_factory.mktemp("gguf")
    torch.manual_seed(1)
    tokenizer = byte_level([*CORPUS, ORDINARY_TEXT], 400)
    model = LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), max_position_embeddings=512, **SIZES))
    ids = [tokenizer.bos_token_id, *tokenizer(ORDINARY_TEXT).input_ids]
    behind = torch.tensor([ids])
    alone = torch.tensor([ids[1:]])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(40):
        optimizer.zero_grad()
        (model(behind, labels=behind).loss + model(alone, labels=alone.flip(1)).loss).backward()
        optimizer.step()
    write(model.eval(), tokenizer, str(folder / "tiny.gguf"))
    found = Written(folder / "tiny.gguf", folder / "cache", model.bfloat16(), ids)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TOOLFORMER_CACHE", str(found.cache))
        leftover = found.cache / "models" / f"{file_hash(found.file)}-v{CONVERSION_VERSION}.1.building"
        leftover.mkdir(parents=True)  # of a conversion that was killed
        (leftover / "config.json").write_text("{")
        resolve_model_name(ModelSettings(name=str(found.file)))
    return found


@pytest.fixture
def settings(written: Written, monkeypatch: pytest.MonkeyPatch) -> ModelSettings:
    monkeypatch.setenv("TOOLFORMER_CACHE", str(written.cache))
    monkeypatch.setitem(sys.modules, "gguf", None)  # what is converted needs it no longer
    return ModelSettings(name=str(written.file), device="cpu")


def test_the_weights_are_those_of_the_file_rounded_to_bfloat16(written: Written, settings: ModelSettings) -> None:
    loaded = load_model(settings)
    assert loaded.dtype == read_model_dtype(settings) == "bfloat16"
    found = loaded.model.state_dict()
    expected = written.model.state_dict()
    assert found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in found)
    assert not [file for file in written.cache.rglob("*") if "building" in file.name]


def test_a_bos_that_clearly_helps_is_added_by_the_converted_tokenizer(
    written: Written, settings: ModelSettings
) -> None:
    assert load_model(settings).encoding.bos_ids == [written.ids[0]]
    assert AutoTokenizer.from_pretrained(resolve_model_name(settings))(ORDINARY_TEXT).input_ids == written.ids
    assert load_model(settings.model_copy(update={"bos": False})).encoding.bos_ids == []
    assert read_model_identity(str(written.file))["bos"] == "<|end|>"


def test_identity_follows_the_content_of_the_file_and_not_its_name(
    written: Written, settings: ModelSettings, tmp_path: Path
) -> None:
    other = Path(shutil.copy(written.file, tmp_path / "another name.gguf"))
    assert (
        read_model_identity(str(other))
        == read_model_identity(str(written.file))
        == read_model_identity(resolve_model_name(settings))
    )
    other.write_bytes(other.read_bytes()[:-4] + b"\0\0\0\0")
    with pytest.raises(ModelError, match=r"another name.gguf needs the package gguf.*pip install .*\[gguf\]"):
        read_model_identity(str(other))


@pytest.fixture(scope="module")
def refused(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, list[Path]]:
    """What is said of a file that is no GGUF file, and the folders that are left."""
    folder = tmp_path_factory.mktemp("refused")
    (folder / "bad.gguf").write_bytes(b"GGUF, but no more")
    with pytest.MonkeyPatch.context() as patch, pytest.raises(ModelError) as caught:
        patch.setenv("TOOLFORMER_CACHE", str(folder))
        read_model_identity(str(folder / "bad.gguf"))
    return str(caught.value), [path for path in (folder / "models").iterdir() if path.is_dir()]


def test_what_is_no_gguf_file_is_named_with_the_reason(refused: tuple[str, list[Path]], tmp_path: Path) -> None:
    said, folders = refused
    assert re.search(r"bad.gguf cannot be converted: .+; give another GGUF file, or a folder", said) and not folders
    with pytest.raises(ModelError, match=r"none.gguf cannot be read or converted: .*No such file"):
        read_model_identity(str(tmp_path / "none.gguf"))


def test_commands_take_a_file_as_they_take_a_folder(written: Written, settings: ModelSettings, tmp_path: Path) -> None:
    (tmp_path / "toolformer.toml").write_text(
        f'profile = "mine"\n[corpus]\nshards = ["c"]\n[tools.calculator]\n[profiles.mine.model]\n'
        f'name = "{written.file.name}"\ndevice = "cpu"\n'
    )
    shutil.copy(written.file, tmp_path)
    config = ["--config", str(tmp_path / "toolformer.toml")]
    assert load_settings(tmp_path / "toolformer.toml").model.name == str(tmp_path / written.file.name)
    line = {"text": "1 + 2 is 3.", "offset": 8, "tool": "Add", "input": "1 + 2", "result": "3"}
    asked = [["score", "-", *config], ["score", "-", *config, "--model", str(written.file)]]
    asked.append(["score", "-", *config, "--model", resolve_model_name(settings)])
    scores = [cli(*one, stdin=json.dumps(line)).stdout for one in asked]
    assert scores[0] == scores[1] == scores[2] and "delta" in scores[0]
    said = cli("generate", "The harbour of the", "--model", str(written.file), "--max-new-tokens", "2", *config)
    assert said.stdout.startswith("The harbour of the tow")
