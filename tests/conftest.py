"""Fixtures that every room's tests share."""

import fcntl
import gc
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, settings

from tests.cpu_budget import pytest_addoption, pytest_runtest_call

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

    from toolformer_dag.model.loading import LanguageModel


__all__ = ["pytest_addoption", "pytest_runtest_call"]  # hooks

for name in [name for name in os.environ if name.startswith(("DAGSTER_", "TOOLFORMER_"))]:
    del os.environ[name]  # the settings and the history of whoever runs the tests are not theirs

# No test is timed: a busy machine must not make one fail.
settings.register_profile("untimed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("untimed")


def pytest_collection_finish() -> None:
    """What was imported stays: a full collection in a test need not walk through it."""
    gc.collect()
    gc.freeze()


Once = Callable[[str, Callable[[Path], object]], Path]


@pytest.fixture(scope="session")
def once(tmp_path_factory: pytest.TempPathFactory) -> Once:
    """Makes a folder once for all processes of a test run: `once("made", fill)`."""
    base = tmp_path_factory.getbasetemp()
    shared = base.parent if os.environ.get("PYTEST_XDIST_WORKER") else base

    def make(name: str, fill: Callable[[Path], object]) -> Path:
        folder = shared / name
        with (shared / f"{name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not (shared / f"{name}.done").exists():
                fill(folder)
                (shared / f"{name}.done").touch()
        return folder

    return make


@pytest.fixture(scope="session")
def model(once: Once) -> Path:
    """The model of tests.worlds."""
    from tests.worlds import make_model

    return once("model-a", make_model)


@pytest.fixture(scope="session")
def made_folder(once: Once, model: Path) -> Path:
    """A world of tests.worlds in which `run` has made everything, training and evaluation too. Not to be changed."""
    from tests.command_line import cli
    from tests.worlds import lay_out

    def run(folder: Path) -> None:
        done = cli("run", "--config", str(lay_out(folder, model) / "toolformer.toml"))
        assert done.returncode == 0, done.stderr

    return once("made", run)


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder of real data beside the checkout; tests that read it skip where it is absent."""
    folder = Path(__file__).resolve().parents[2] / "shared"
    if not folder.is_dir():
        pytest.skip("../shared (real data for tests) is not there")
    return folder


@pytest.fixture(scope="session")
def tiny_model() -> "Callable[..., LanguageModel]":
    """Makes random models of some 50,000 parameters: `tiny_model("gptj", one_token_start=True, bos=False, seed=0)`."""
    return make_tiny_model


def make_tiny_model(
    kind: str,
    *,
    one_token_start: bool = True,
    bos: bool = False,
    seed: int = 0,
    positions: int = 256,
    width: int = 32,
    tokenizer: "PreTrainedTokenizerFast | None" = None,
) -> "LanguageModel":
    """`one_token_start`: whether ` [` is one token of the vocabulary, or a space and a bracket."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from toolformer_dag.model.loading import wrap_language_model

    tokenizer = tokenizer or make_tiny_tokenizer(one_token_start, bos)
    ends = {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id}
    sizes = {"vocab_size": len(tokenizer), **ends}
    shapes = {
        "gptj": {"n_embd": width, "n_layer": 2, "n_head": 2, "n_positions": positions, "rotary_dim": 8},
        "gpt2": {"n_embd": width, "n_layer": 2, "n_head": 2, "n_positions": positions},
        "llama": {
            "hidden_size": width,
            "intermediate_size": 2 * width,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "max_position_embeddings": positions,
        },
        "lfm2": {
            "hidden_size": width,
            "intermediate_size": 2 * width,
            "num_attention_heads": 2,
            "num_key_value_heads": 2,
            "layer_types": ["conv", "full_attention"],
            "num_hidden_layers": 2,
            "max_position_embeddings": positions,
        },
        "llama4_text": {  # a query grows with its place in the padded row
            "hidden_size": width,
            "intermediate_size": 2 * width,
            "intermediate_size_mlp": 2 * width,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "num_key_value_heads": 2,
            "head_dim": width // 2,
            "num_local_experts": 2,
            "no_rope_layers": [1, 0],
            "floor_scale": 4,
            "max_position_embeddings": positions,
        },
        "bert": {
            "hidden_size": width,
            "intermediate_size": 2 * width,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "max_position_embeddings": positions,
        },
        "gpt_neo": {
            "hidden_size": width,
            "num_layers": 2,
            "num_heads": 2,
            "attention_types": [[["global", "local"], 1]],
            "max_position_embeddings": positions,
        },
        "recurrent_gemma": {
            "hidden_size": width,
            "intermediate_size": 2 * width,
            "block_types": ["recurrent", "attention"],
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "attention_window_size": 64,
            "lru_width": width,
        },
        "roberta": {
            "hidden_size": width,
            "intermediate_size": 2 * width,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "max_position_embeddings": positions,
            "is_decoder": True,
        },
        "mamba": {"hidden_size": width, "num_hidden_layers": 2, "state_size": 8},
    }
    torch.set_num_threads(1)  # models this small only wait for each other on more
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **sizes, **shapes[kind]))
    return wrap_language_model(kind, model, tokenizer)


def make_tiny_tokenizer(one_token_start: bool, bos: bool) -> "PreTrainedTokenizerFast":
    """A byte-level BPE of at most 400 tokens whose digits stand alone."""
    from tokenizers import processors

    from tests.tokenizers import byte_level

    alone = r"\d" if one_token_start else r"[\d\[\]]"
    texts = [
        "Ada had 17 apples and got 25 more, so there were [Calculator(17 + 25) -> 42] 42 apples.",
        'The river of Oslo is [QA("Which river?") -> Akerselva] long. Today is [Calendar() -> Monday] Monday.',
    ]
    tokenizer = byte_level([text for text in texts for _ in range(4)], 400, "<end>", alone)
    if bos:
        begun = processors.TemplateProcessing(single="<end> $A", special_tokens=[("<end>", 0)])
        tokenizer.backend_tokenizer.post_processor = begun
    return tokenizer


@pytest.fixture(scope="session")
def llama_tokenizer() -> "Callable[[str], PreTrainedTokenizerFast]":
    """Like Llama's, which puts "▁" before a text and drops it when decoding: by "prepended" (Llama-2) or by "first"."""
    return make_llama_tokenizer


def make_llama_tokenizer(kind: str) -> "PreTrainedTokenizerFast":
    """ "prepended" also puts it before a text that begins with a space; " [", "▁QA" and "▁Cal" are one token each."""
    from tests.tokenizers import metaspace

    return metaspace(["I have [ [ [ two QA QA Cal Cal and Calendar [ ] ( ) Wiki 1 2"] * 5, 340, kind)
