"""Load a causal model and its tokenizer, and check that they behave as the engine assumes."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from importlib import import_module
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.activations import NewGELUActivation
from transformers.utils.logging import disable_progress_bar

from toolformer_dag.model.encoding import Encoding
from toolformer_dag.model.sentencepieces import check_sentencepiece
from toolformer_dag.model.token_service import TokenService
from toolformer_dag.model.trials import bos_gain, check_causal, trial_tokens
from toolformer_dag.model.weights import (
    CHECKPOINT,
    IDENTIFYING,
    MARKERS,
    SMALL,
    ModelError,
    check_model,
    checkpoint_markers,
    cores,
    model_dtype,
    model_folder,
    model_identity,
    model_name,
    parameters,
    require_whole,
)
from toolformer_dag.settings.call_markers import PAPER_MARKERS
from toolformer_dag.settings.model_settings import ModelSettings
from toolformer_dag.settings.setting_types import determining
from toolformer_dag.texts.calls import in_markers

THREADS = min(torch.get_num_threads(), cores())
"""What torch was started with; threads without a core of their own would spin until they get one."""


def fit_threads(model: Any) -> int:
    """Set torch, for the whole process, to one thread where a small model runs on a CPU, else to what it began with.

    Returns the number of the model's parameters.
    """
    size: int = sum(weight.numel() for weight in model.parameters())
    torch.set_num_threads(1 if model.device.type == "cpu" and size < SMALL else THREADS)
    return size


def fast_dtype() -> torch.dtype:
    """Return bfloat16 where the processor has AVX-512, else float32: bfloat16 is then 50 times slower."""
    return torch.bfloat16 if torch.backends.cpu.get_cpu_capability() == "AVX512" else torch.float32


_log = logging.getLogger(__name__)
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
UNLIMITED = 1 << 30
BOS_HELPS = (
    "%s: a text costs %.2f nats per token less after %s, which its tokenizer does not add; set model.bos = true to "
    "begin with it, or false to keep this"
)

disable_progress_bar()  # the bar of loading weights would break the progress display of a stage


@dataclass(frozen=True, eq=False)
class LanguageModel:
    """A model in evaluation mode on its device, and its tokenizer.

    `model`: a module of torch, or a `TokenService`. `context_length`: the most tokens of a sequence, whatever its
    attention's window. `identity`: hashes of the files it was loaded from; empty unless `load_identified` loaded it.
    """

    encoding: Encoding = field(repr=False)
    context_length: int
    name: str
    model: Any
    tokenizer: Any
    config: Any = field(repr=False)
    parameters: int
    identity: Mapping[str, str] = field(default_factory=dict, repr=False)

    @property
    def device(self) -> torch.device:
        """Return the device of the model's inputs."""
        return torch.device(self.model.device)

    @property
    def dtype(self) -> str:
        """Return the data type of the weights."""
        return str(self.model.dtype).removeprefix("torch.")

    @property
    def arithmetic(self) -> str:
        """Return how products are computed: tf32 for float32 on a GPU, else the data type of the weights."""
        fast = self.device.type == "cuda" and torch.get_float32_matmul_precision() != "highest"
        return "tf32" if fast and self.dtype == "float32" else self.dtype


def load_model(model: ModelSettings, name: str | None = None, dtype: str | None = None) -> LanguageModel:
    """Load the settings' causal LM, or the model `name`, under the settings' device and dtype; safetensors only.

    Another model takes the data type of the settings' model for `auto`, so that a checkpoint, which is stored in
    float32, is measured as its base model is. On a GPU, products of float32 are computed in TF32, in the whole process.
    Where BOS clearly helps and the tokenizer does not add it, a warning names the setting. Raises ModelError where a
    file is missing or unreadable, or the model is not a causal LM with a fast tokenizer.
    """
    named = model if name in (None, model_name(model)) else model.other(name)
    asked = named if name is None else named.model_copy(update={"url": ()})  # servers have the settings' model
    load = _load_in_torch if model.in_torch else _load_in_service
    return load(asked, _wanted_dtype(model, name, dtype))


def _load_in_torch(model: ModelSettings, dtype: torch.dtype | str) -> LanguageModel:
    target = _device(model.device)
    options = {**_source(model), "use_safetensors": True, "dtype": dtype}
    tokenizer = load_encoding(model).tokenizer
    loaded = from_hub(AutoModelForCausalLM, model_name(model), options)
    stored = str(loaded.dtype).removeprefix("torch.")
    if stored not in DTYPES:
        raise ModelError(f"the weights of {model.name!r} are {stored}; set model.dtype to {', '.join(DTYPES)}")
    if target.type == "cpu" and stored != "float32" and fast_dtype() == torch.float32:
        _log.warning('on this processor %s is 50 times slower than float32; set dtype = "float32"', stored)
    if target.type == "cuda" and stored == "float32":
        torch.set_float32_matmul_precision("high")
    wrapped = wrap_language_model(model_name(model), loaded.to(target), tokenizer)
    _warn_of_bos(model, wrapped)
    return wrapped


def _warn_of_bos(model: ModelSettings, loaded: LanguageModel) -> None:
    """Log where BOS would help and nothing is set; a checkpoint goes on as it was trained."""
    open_question = model.bos is None and not Path(loaded.name, CHECKPOINT).is_file()
    if open_question and (gain := bos_gain(loaded.model, loaded.encoding, loaded.context_length)):
        _log.warning(BOS_HELPS, loaded.name, gain, loaded.tokenizer.bos_token)


SERVICES: Mapping[str, str] = {"vllm": "toolformer_dag.model.vllm_service"}
"""By `model.engine`, the file whose `load_service` gives the engine as a `TokenService`; it alone needs a package."""


def _load_in_service(model: ModelSettings, dtype: torch.dtype | str) -> LanguageModel:
    try:
        engine = import_module(SERVICES[model.engine])
    except ImportError as error:
        raise ModelError(
            f'model.engine = "{model.engine}" needs the package {model.engine} ({error}); install it as '
            f'docs/howto/{model.engine}.md says, or set model.engine = "transformers"'
        ) from error
    name, encoding, config = model_name(model), load_encoding(model), load_config(model)
    check_rows(name, encoding, config)
    length = context_length(config)
    service: TokenService = engine.load_service(model, str(dtype).removeprefix("torch."), config, length)
    folder = model_folder(name, model.revision)  # a served model need not lie here
    size = parameters(folder) if folder is not None else 0
    return LanguageModel(encoding, length, name, service, encoding.tokenizer, config, size)


def wrap_language_model(name: str, model: Any, tokenizer: Any) -> LanguageModel:
    """Wrap a model and tokenizer in memory (such as a freshly trained model) and set evaluation mode.

    Raises ModelError for a tokenizer that cannot write calls or a model that attends to later tokens.
    """
    check_tokenizer(name, tokenizer)
    encoding = Encoding(tokenizer)
    check_rows(name, encoding, model.config)
    fuse_activations(model)
    size = fit_threads(model)
    model.eval()
    check_causal(model, trial_tokens(encoding))
    return LanguageModel(encoding, context_length(model.config), name, model, tokenizer, model.config, size)


def check_rows(name: str, encoding: Encoding, config: Any) -> None:
    """Raise ModelError where texts, calls or their ends may hold a token that the embedding has no row for.

    Special tokens beyond it, as Gemma 3's token of an image, stand in no text: their characters are encoded.
    """
    rows, added = int(config.get_text_config().vocab_size), encoding.tokenizer.added_tokens_decoder
    written = {*encoding.bos, *encoding.eos, *chain.from_iterable(encoding.added.values())}
    unwritten = {token for token, content in added.items() if content.special} - written
    for text, token in encoding.tokenizer.get_vocab().items():
        if token >= rows and token not in unwritten:
            raise ModelError(
                f"the tokenizer of {name!r} has the token {text!r} with number {token}, and the model has {rows} rows "
                "of embeddings; call model.resize_token_embeddings(len(tokenizer)) and save both again, or remove the "
                "token"
            )


def check_tokenizer(name: str, tokenizer: Any) -> None:
    """Raise ModelError where the tokenizer gives no character offsets or cannot write a call.

    transformers silently builds an empty vocabulary from a folder without tokenizer files.
    """
    if not getattr(tokenizer, "is_fast", False):
        raise ModelError(f"the tokenizer of {name!r} gives no character offsets; save it as a fast tokenizer")
    if "[a(1)]" not in tokenizer.decode(tokenizer(" [a(1)]", add_special_tokens=False).input_ids):
        raise ModelError(
            f"the tokenizer of {name!r} cannot write ' [a(1)]'; give a folder with the tokenizer's own files "
            "(tokenizer.json), or a model whose vocabulary holds brackets"
        )
    encoding = Encoding(tokenizer)
    if not encoding.keeps_text_tokens():
        raise ModelError(
            f"the tokenizer of {name!r} adds a space before the first word and merges the end of a text with a "
            "following ' [', so no call can be tokenized apart from its text; use a model with another tokenizer"
        )
    call = in_markers(" [a(1) -> 2]", encoding.markers).strip()
    if encoding.markers != PAPER_MARKERS and call not in tokenizer.decode(
        encoding.calls([" [a(1) -> 2]"])[0], clean_up_tokenization_spaces=False
    ):
        raise ModelError(f"the tokenizer of {name!r} cannot write {call!r}; set [model] markers to what it can write")


def fuse_activations(model: nn.Module) -> None:
    """Replace NewGELU by torch's fused kernel: its eight kernels take a quarter of GPT-2's time on a CPU."""
    for module in model.modules():
        for name, child in module.named_children():
            if isinstance(child, NewGELUActivation):
                setattr(module, name, nn.GELU(approximate="tanh"))


def context_length(config: Any) -> int:
    """Return the most tokens in a sequence, from the text part of the config; no window of attention shortens it.

    With LongRoPE, return the length of its short factors: beyond it, a token's keys depend on the sequence length.
    """
    text = config.get_text_config()
    lengths = (getattr(text, name, None) for name in ("max_position_embeddings", "max_seq_len"))
    return min(next((int(length) for length in lengths if length and length > 0), UNLIMITED), _short_factors(text))


def _short_factors(text: Any) -> int:
    rope = getattr(text, "rope_parameters", None) or getattr(text, "rope_scaling", None) or {}
    parts = [rope, *(part for part in rope.values() if isinstance(part, dict))]
    name = "original_max_position_embeddings"
    lengths = [part.get(name) or getattr(text, name, None) for part in parts if part.get("rope_type") == "longrope"]
    return min(map(int, filter(None, lengths)), default=UNLIMITED)


def from_hub(pretrained: Any, name: str, options: Mapping[str, Any]) -> Any:
    """Load a folder or hub id with a class of transformers. Raises ModelError, DamagedModel: see `require_whole`."""
    require_whole(name, options.get("revision"), weights="Model" in pretrained.__name__)
    try:
        return pretrained.from_pretrained(str(Path(name).expanduser()) if name.startswith("~") else name, **options)
    except Exception as error:  # backends of transformers raise many kinds
        raise ModelError(
            f"{pretrained.__name__} cannot load {name!r}: {_one_line(error)}; give the folder of a model saved with "
            "safetensors (save_pretrained), or a hub id that this machine can reach or has cached"
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


OF_THIS_MACHINE = ("is_local", "local_files_only")
"""What transformers notes about how a tokenizer was loaded, and would write into the files of a published one."""


def load_encoding(model: ModelSettings) -> Encoding:
    """Load the tokenizer of the settings' model, with the markers that its files tell, else those of the settings.

    Raises ModelError.
    """
    name = model_name(model)
    check_model(name, model.revision)
    tokenizer = from_hub(AutoTokenizer, name, _source(model))
    check_sentencepiece(name, tokenizer, model.revision)
    if model.bos is not None:
        set_bos(name, tokenizer, model.bos)
    markers = checkpoint_markers(name, model.revision) or model.markers
    if markers != PAPER_MARKERS:
        tokenizer.init_kwargs.setdefault(MARKERS, markers.model_dump())
    check_tokenizer(name, tokenizer)
    for key in OF_THIS_MACHINE:
        tokenizer.init_kwargs.pop(key, None)
    return Encoding(tokenizer)


def set_bos(name: str, tokenizer: Any, wanted: bool) -> None:
    """Let a tokenizer begin sequences with its BOS, or with nothing; its saved files do so too.

    Raises ModelError where it has no BOS.
    """
    if wanted and tokenizer.bos_token_id is None:
        raise ModelError(f"model.bos = true, but the tokenizer of {name!r} has no BOS; remove model.bos")
    if wanted != bool(Encoding(tokenizer).bos):
        tokenizer.add_bos_token = wanted


def load_config(model: ModelSettings) -> Any:
    """Load the config of the settings' model. Raises ModelError."""
    return from_hub(AutoConfig, model_name(model), _source(model))


def _source(model: ModelSettings) -> dict[str, Any]:
    return {"revision": model.revision, "trust_remote_code": model.trust_remote_code}


def _wanted_dtype(model: ModelSettings, name: str | None, dtype: str | None) -> torch.dtype | str:
    """Return how to load; reads the config of the settings' model from the hub where no folder tells its data type."""
    if dtype is None:
        dtype = model_dtype(model)
        if dtype == "auto" and name is not None:
            dtype = str(load_config(model).dtype or torch.float32).removeprefix("torch.")
    if dtype not in ("auto", *DTYPES):
        raise ModelError(f"dtype {dtype!r} is unknown; use auto, {', '.join(DTYPES)}")
    return DTYPES.get(dtype, dtype)


def load_identified(model: ModelSettings, name: str | None = None) -> LanguageModel:
    """Load as `load_model` does and record the identity of the files read. Raises ModelError.

    Loading is repeated when another run replaces the files meanwhile.
    """
    named = model_name(model) if name is None else name
    while True:
        identity = model_identity(named, model.revision)
        loaded = load_model(model, name)
        if model_identity(named, model.revision) == identity:
            return replace(loaded, identity={**identity, **determining(model, but=IDENTIFYING)})
