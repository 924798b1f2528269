"""Loading a causal model and its tokenizer, and trying the model before anything is built on how it behaves."""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.activations import NewGELUActivation
from transformers.utils.logging import disable_progress_bar

from toolformer_dag.model.attention import UnsupportedAttentionError
from toolformer_dag.model.encoding import Encoding
from toolformer_dag.model.memory import is_out_of_memory
from toolformer_dag.model.weights import SMALL, ModelError


def fit_threads(model: Any) -> None:
    """One thread for a small model on a CPU, for the whole process; larger models keep torch's choice."""
    parameters = sum(weight.numel() for weight in model.parameters())
    if model.device.type == "cpu" and parameters < SMALL:
        torch.set_num_threads(1)


def fast_dtype() -> torch.dtype:
    """bfloat16 where the processor has AVX-512; elsewhere float32, of whose speed bfloat16 reaches a fiftieth."""
    return torch.bfloat16 if torch.backends.cpu.get_cpu_capability() == "AVX512" else torch.float32


TRIAL = (7, 3, 5, 2, 9, 4, 8, 6, 1)
OTHER_END = (*TRIAL[:4], 1, 9, 2, 7, 3)
OWN_TOLERANCES = {torch.float32: 1e-4, torch.float16: 1e-3, torch.bfloat16: 1e-2}
"""Of the largest logit: the model's own operations round nearly alike."""
TOLERANCES = {torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 1e-1}
"""Of the largest logit: what another order of summation explains. A missing part of attention is off by more."""
UNFIT = (UnsupportedAttentionError, AttributeError, TypeError, KeyError, IndexError, ValueError, RuntimeError)


@torch.no_grad()  # what a model keeps of a pass (rotary tables) must serve training too
def check_causal(model: Any) -> None:
    """Raises ModelError for a model that looks ahead (BERT and its like, which load as causal ones)."""
    # of the same length, for an expert is chosen by a hair, and another length rounds otherwise
    expected, found = own_logits(model, TRIAL)[:4], own_logits(model, OTHER_END)[:4]
    if bool((expected - found).abs().max() > OWN_TOLERANCES[model.dtype] * expected.abs().max()):  # false for NaN
        raise ModelError(
            f"{type(model).__name__} reads what comes after a token; take a causal model (some are with "
            "is_decoder = true in config.json)"
        )


def own_logits(model: Any, tokens: Sequence[int]) -> Tensor:
    """The model's own logits [tokens, vocabulary] in float32, nothing taken over and nothing cached."""
    logits: Tensor = model(torch.tensor([tokens], device=model.device)).logits[0].float()
    return logits


def tried(way: Callable[[], Tensor]) -> Tensor | None:
    """None where the model does not fit this way; running out of memory says nothing about that, and is raised."""
    try:
        return way()
    except UNFIT as error:
        if isinstance(error, RuntimeError) and is_out_of_memory(error):
            raise
        return None


def agrees(expected: Tensor, found: Tensor | None, tolerance: float) -> bool:
    """Of two tables of logits; `tolerance` is a share of the largest expected."""
    return found is not None and bool((expected - found).abs().max() <= tolerance * expected.abs().max())


_log = logging.getLogger(__name__)
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
UNLIMITED = 1 << 30

disable_progress_bar()  # a stage shows its own progress; the bar of loading weights would break it


@dataclass(frozen=True, eq=False)
class LanguageModel:
    """A model in evaluation mode on its device, and its tokenizer.

    `positions`: the most tokens that the model's own attention takes. `context_length`: up to so many tokens each one
    sees all before it, so that plain causal attention gives the model's numbers. `identity`: of the files that it was
    loaded from, where `load_identified` did.
    """

    name: str
    model: Any
    tokenizer: Any
    encoding: Encoding = field(repr=False)
    positions: int
    context_length: int
    identity: Mapping[str, str] = field(default_factory=dict, repr=False)

    @property
    def device(self) -> torch.device:
        """Where its inputs go."""
        device: torch.device = self.model.device
        return device

    def count_tokens(self, texts: Sequence[str]) -> list[int]:
        """n for every text, without special tokens."""
        return [len(text.ids) for text in self.encoding.texts(texts)]

    def prompt_tokens(self, prompt: str) -> int:
        """How many tokens P(x) holds besides the text, which it holds twice: |P(x), x| = this + 2 n."""
        return len(self.encoding.head(prompt)) + len(self.encoding.output)


def load_language_model(
    name: str,
    *,
    revision: str | None = None,
    dtype: str = "auto",
    device: str = "auto",
    trust_remote_code: bool = False,
) -> LanguageModel:
    """Any causal LM by folder or hub id; safetensors only.

    `dtype` "auto" is bfloat16 on a GPU and float32 elsewhere; `device` "auto" is the GPU where there is one. Raises
    ModelError where something is missing, unreadable or not a causal LM with a fast tokenizer.
    """
    target = _device(device)
    common = {"revision": revision, "trust_remote_code": trust_remote_code}
    tokenizer = from_hub(AutoTokenizer, name, common)
    config = from_hub(AutoConfig, name, common)
    options = {**common, "config": config, "use_safetensors": True, "dtype": _dtype(dtype, target)}
    model = from_hub(AutoModelForCausalLM, name, options)
    return wrap_language_model(name, model.to(target), tokenizer)


def wrap_language_model(name: str, model: Any, tokenizer: Any) -> LanguageModel:
    """A model and tokenizer at hand (just trained, made in a test) as a LanguageModel; puts it in evaluation mode.

    Raises ModelError for a tokenizer that cannot write calls, or a model that looks ahead.
    """
    check_tokenizer(name, tokenizer)
    fuse_activations(model)
    fit_threads(model)
    model.eval()
    check_causal(model)
    config = model.config
    return LanguageModel(name, model, tokenizer, Encoding(tokenizer), positions(config), context_length(config))


def check_tokenizer(name: str, tokenizer: Any) -> None:
    """Raises ModelError where it gives no character offsets, or cannot write a call.

    transformers makes an empty vocabulary of a folder without tokenizer files, and says nothing.
    """
    if not getattr(tokenizer, "is_fast", False):
        raise ModelError(f"the tokenizer of {name!r} gives no character offsets; save it as a fast tokenizer")
    if "[a(1)]" not in tokenizer.decode(tokenizer(" [a(1)]", add_special_tokens=False).input_ids):
        raise ModelError(
            f"the tokenizer of {name!r} cannot write ' [a(1)]'; give a folder with the tokenizer's own files "
            "(tokenizer.json), or a model whose vocabulary holds brackets"
        )
    if not Encoding(tokenizer).keeps_text_apart():
        raise ModelError(
            f"the tokenizer of {name!r} puts a space before what comes first and joins the tokens of a text with the "
            "' [' behind it, so no call can be tokenized apart from its text; use a model with another tokenizer"
        )


def fuse_activations(model: nn.Module) -> None:
    """The same function in one kernel where transformers takes eight: a quarter of GPT-2's time on a CPU."""
    for module in model.modules():
        for name, child in module.named_children():
            if isinstance(child, NewGELUActivation):
                setattr(module, name, nn.GELU(approximate="tanh"))


def positions(config: Any) -> int:
    """The most tokens in one sequence, of a model of text or of the text part of one.

    With LongRoPE those of its short factors: beyond them a token's keys depend on how long its sequence becomes.
    """
    text = config.get_text_config()
    lengths = (getattr(text, name, None) for name in ("max_position_embeddings", "max_seq_len"))
    return min(next((int(length) for length in lengths if length and length > 0), UNLIMITED), _short_factors(text))


def _short_factors(text: Any) -> int:
    rope = getattr(text, "rope_parameters", None) or getattr(text, "rope_scaling", None) or {}
    name = "original_max_position_embeddings"
    length = (rope.get(name) or getattr(text, name, None)) if rope.get("rope_type") == "longrope" else None
    return int(length or UNLIMITED)


def context_length(config: Any) -> int:
    """The same, or the window of the model's local attention (sliding, or Llama 4's chunk) where that is shorter."""
    text = config.get_text_config()
    sliding = getattr(text, "sliding_window", None) if getattr(text, "use_sliding_window", True) else None
    windows = (sliding, getattr(text, "attention_chunk_size", None))
    return min(positions(config), *(int(window or UNLIMITED) for window in windows))


def from_hub(auto_class: Any, name: str, options: dict[str, Any]) -> Any:
    """What `auto_class` loads of a folder or hub id; raises ModelError with the remedy."""
    try:
        return auto_class.from_pretrained(str(Path(name).expanduser()) if name.startswith("~") else name, **options)
    except Exception as error:
        what = auto_class.__name__.removeprefix("Auto").removesuffix("ForCausalLM").lower()
        raise ModelError(
            f"cannot load the {what} of {name!r}: {_one_line(error)}; give the folder of a causal LM saved with "
            "safetensors, or an id of the hub that this machine can reach (or has in its cache)"
        ) from error


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:600] or type(error).__name__


def _device(device: str) -> torch.device:
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        return torch.empty(0, device=device).device
    except (RuntimeError, AssertionError) as error:
        raise ModelError(f"device {device!r} cannot be used: {_one_line(error)}; use auto, cpu or cuda") from error


def _dtype(dtype: str, device: torch.device) -> torch.dtype:
    if dtype == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    if dtype not in DTYPES:
        raise ModelError(f"dtype {dtype!r} is unknown; use auto, {', '.join(DTYPES)}")
    if device.type == "cpu" and dtype != "float32" and fast_dtype() == torch.float32:
        _log.warning('on this processor %s is a fiftieth as fast as float32; set dtype = "float32"', dtype)
    return DTYPES[dtype]


@dataclass(frozen=True, eq=False)
class Tokens:
    """A model's tokenizer, and its `positions` and `context_length` as in LanguageModel."""

    encoding: Encoding = field(repr=False)
    positions: int
    context_length: int

    def count(self, texts: Sequence[str]) -> list[int]:
        """n for every text, without special tokens."""
        return [len(text.ids) for text in self.encoding.texts(texts)]

    def prompt(self, prompt: str) -> int:
        """How many tokens P(x) holds besides the text, which it holds twice."""
        return len(self.encoding.head(prompt)) + len(self.encoding.output)


def load_tokens(name: str, *, revision: str | None = None, trust_remote_code: bool = False) -> Tokens:
    """The tokenizer and lengths of a folder or hub id. Raises ModelError."""
    common = {"revision": revision, "trust_remote_code": trust_remote_code}
    tokenizer = from_hub(AutoTokenizer, name, common)
    check_tokenizer(name, tokenizer)
    config = from_hub(AutoConfig, name, common)
    return Tokens(Encoding(tokenizer), positions(config), context_length(config))
