"""Load a causal model and its tokenizer, and check that they behave as the engine assumes."""

import logging
import threading
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
from toolformer_dag.model.token_service import LoadService
from toolformer_dag.model.trials import bos_gain, check_causal, list_trial_tokens
from toolformer_dag.model.weights import (
    CHECKPOINT,
    IDENTIFYING,
    MARKERS,
    SMALL,
    ModelError,
    check_model,
    cores,
    model_folder,
    model_name,
    parameters,
    read_checkpoint_markers,
    read_model_dtype,
    read_model_identity,
    require_whole,
)
from toolformer_dag.settings.call_markers import PAPER_MARKERS
from toolformer_dag.settings.model_settings import ENGINES, ModelSettings
from toolformer_dag.settings.setting_types import determining
from toolformer_dag.texts.calls import rewrite_markers

THREADS = min(torch.get_num_threads(), cores())
"""The threads of torch at start, at most one per core: more would spin until they get a core."""


def count_parameters(model: nn.Module) -> int:
    """Return the number of a model's parameters."""
    return sum(weight.numel() for weight in model.parameters())


def fit_threads(model: Any) -> None:
    """Set torch's threads for the whole process: one for a small model (below SMALL) on a CPU, else THREADS."""
    is_small = model.device.type == "cpu" and count_parameters(model) < SMALL
    torch.set_num_threads(1 if is_small else THREADS)


def choose_fast_dtype() -> torch.dtype:
    """Return bfloat16 where the processor has AVX-512, else float32: without it, bfloat16 is 50 times slower."""
    return torch.bfloat16 if torch.backends.cpu.get_cpu_capability() == "AVX512" else torch.float32


_log = logging.getLogger(__name__)
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
"""The data types that models run in, by their names in the settings."""
UNLIMITED = 1 << 30
"""The context length of a model whose config names none."""
_BOS_WARNING = (
    "%s: a text costs %.2f nats per token less after %s, which its tokenizer does not add; set model.bos = true to "
    "begin with it, or false to keep this"
)

disable_progress_bar()  # the bar of loading weights would break the progress display of a stage


@dataclass(frozen=True, eq=False)
class LanguageModel:
    """A model in evaluation mode on its device, and its tokenizer.

    - `encoding`: the tokenizer as the method uses it.
    - `context_length`: the most tokens of a sequence, whatever its attention's window.
    - `name`: folder or hub id.
    - `model`: a torch module, or a `TokenService`, which runs the model in another engine such as vLLM.
    - `tokenizer`: a fast tokenizer of transformers.
    - `config`: the model's config in transformers.
    - `parameters`: the number of its weights; 0 for a served model whose files are not on this machine.
    - `identity`: hashes of the files it was loaded from; empty unless `load_identified` loaded it.
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
        """Return the data type of the weights, such as "float32"."""
        return _format_dtype(self.model.dtype)

    @property
    def arithmetic(self) -> str:
        """Return how products are computed: "tf32" for float32 on a GPU, else the data type of the weights."""
        has_tf32 = self.device.type == "cuda" and torch.get_float32_matmul_precision() != "highest"
        return "tf32" if has_tf32 and self.dtype == "float32" else self.dtype


_BUILDING_MODEL = threading.Lock()
"""Held while transformers builds a model, because it changes the default device of the process meanwhile."""


def load_model(model: ModelSettings, name: str | None = None, dtype: str | None = None) -> LanguageModel:
    """Load the causal language model of the settings, or another one, from safetensors files.

    On a GPU, this lets float32 be computed in TF32, in the whole process. A warning is logged if the tokenizer should
    add BOS and does not.

    Args:
        model: The settings.
        name: The folder or hub id of another model, such as a checkpoint.
        dtype: Replaces the data type of the settings. By default, if the settings say `auto`, the other model gets the
            data type of the settings' model: a checkpoint stored in float32 is measured as its base model is.

    Raises:
        ModelError: A file is missing or unreadable, or the model is not a causal one with a fast tokenizer.
    """
    to_load = model if name is None else _build_settings(model, name)
    dtype_to_load = _choose_dtype(model, name, dtype)
    if model.in_torch:
        return _load_in_torch(to_load, dtype_to_load)
    return _load_in_service(to_load, dtype_to_load)


def _build_settings(model: ModelSettings, name: str) -> ModelSettings:
    """Return the settings under which the model `name` is loaded on this machine, without servers."""
    settings = model if name == model_name(model) else model.other(name)
    return settings.model_copy(update={"url": ()})  # the servers run the settings' model only


def _load_in_torch(model: ModelSettings, dtype: torch.dtype | str) -> LanguageModel:
    """Load a model into this process, onto the device of the settings.

    Raises:
        ModelError: The model cannot be loaded, or its weights have a data type that is not in DTYPES.
    """
    device = _choose_device(model.device)
    tokenizer = load_encoding(model).tokenizer
    module = _load_module(model, dtype)

    # This raises for data types outside DTYPES. It lets a GPU compute float32 in TF32, in the whole process.
    _prepare_arithmetic(model.name, _format_dtype(module.dtype), device)
    loaded = wrap_language_model(model_name(model), module.to(device), tokenizer)
    _warn_of_bos(model, loaded)  # if the token that begins a sequence is missing, and would make texts likelier
    return loaded


def _load_module(model: ModelSettings, dtype: torch.dtype | str) -> Any:
    """Return the settings' model as a torch module on the CPU. Raises ModelError where it cannot be loaded."""
    options = {**_build_source_options(model), "use_safetensors": True, "dtype": dtype}
    with _BUILDING_MODEL:
        return load_from_hub(AutoModelForCausalLM, model_name(model), options)


def _format_dtype(dtype: torch.dtype | str) -> str:
    """Return the name of a data type without "torch.", such as "float32"."""
    return str(dtype).removeprefix("torch.")


def _prepare_arithmetic(name: str, dtype: str, device: torch.device) -> None:
    """Let a GPU compute float32 in TF32, in the whole process, and warn of a data type that is slow on the CPU.

    Args:
        name: The name of the model, for messages.
        dtype: The data type of its weights, such as "float32".
        device: Where it runs.

    Raises:
        ModelError: The data type is not in DTYPES.
    """
    if dtype not in DTYPES:
        raise ModelError(f"the weights of {name!r} are {dtype}; set model.dtype to {', '.join(DTYPES)}")

    is_slow = device.type == "cpu" and dtype != "float32" and choose_fast_dtype() == torch.float32
    if is_slow:
        _log.warning('on this processor %s is 50 times slower than float32; set dtype = "float32"', dtype)

    if device.type == "cuda" and dtype == "float32":
        torch.set_float32_matmul_precision("high")  # allows TF32


def _warn_of_bos(model: ModelSettings, loaded: LanguageModel) -> None:
    """Log a warning where BOS, the token that begins a sequence, is not added and would make texts likelier."""
    if model.bos is not None:
        return
    if Path(loaded.name, CHECKPOINT).is_file():  # a checkpoint of this project runs as it was trained
        return
    gain = bos_gain(loaded.model, loaded.encoding, loaded.context_length)
    if gain:
        _log.warning(_BOS_WARNING, loaded.name, gain, loaded.tokenizer.bos_token)


def _load_in_service(model: ModelSettings, dtype: torch.dtype | str) -> LanguageModel:
    """Load a model into an engine such as vLLM, or connect to the servers that run it.

    Tokenizer and config are loaded into this process, too.

    Raises:
        ModelError: The engine's package is missing, or the engine cannot run the model.
    """
    engine = _import_engine_module(model.engine)
    name = model_name(model)
    encoding = load_encoding(model)
    config = load_config(model)
    check_rows(name, encoding, config)

    length = context_length(config)
    load_service: LoadService = engine.load_service
    service = load_service(model, _format_dtype(dtype), config, length)

    return LanguageModel(
        encoding=encoding,
        context_length=length,
        name=name,
        model=service,
        tokenizer=encoding.tokenizer,
        config=config,
        parameters=_count_stored_parameters(name, model.revision),
    )


def _import_engine_module(engine: str) -> Any:
    """Import the module that runs models in an engine, such as vLLM.

    Raises:
        ModelError: The engine's package is missing.
    """
    module = ENGINES[engine].module
    assert module is not None  # every other engine that runs M in this way has one
    try:
        return import_module(module)
    except ImportError as error:
        raise ModelError(
            f'model.engine = "{engine}" needs the package {engine} ({error}); install it as '
            f'docs/howto/{engine}.md says, or set model.engine = "transformers"'
        ) from error


def _count_stored_parameters(name: str, revision: str | None) -> int:
    """Return the number of a model's parameters by its files; 0 where they are on another machine."""
    folder = model_folder(name, revision)
    return 0 if folder is None else parameters(folder)


def wrap_language_model(name: str, model: Any, tokenizer: Any) -> LanguageModel:
    """Check a torch model and a tokenizer that are already in memory, and combine them to a LanguageModel.

    The model is changed in place: its activations are fused, and it is set to evaluation mode. The number of torch's
    threads changes for the whole process.

    Raises:
        ModelError: The tokenizer or the model is unsuitable.
    """
    check_tokenizer(name, tokenizer)
    encoding = Encoding(tokenizer)
    check_rows(name, encoding, model.config)

    fuse_activations(model)
    fit_threads(model)
    model.eval()
    check_causal(model, list_trial_tokens(encoding))

    return LanguageModel(
        encoding=encoding,
        context_length=context_length(model.config),
        name=name,
        model=model,
        tokenizer=tokenizer,
        config=model.config,
        parameters=count_parameters(model),
    )


def check_rows(name: str, encoding: Encoding, config: Any) -> None:
    """Check that the model's embedding has a row for every token that the tokenizer may write.

    Args:
        name: The name of the model, for the message.
        encoding: The tokenizer.
        config: The config of the model.

    Raises:
        ModelError: A token has no row.
    """
    row_count = int(config.get_text_config().vocab_size)
    never_written = _list_unused_special_tokens(encoding)

    for text, token in encoding.tokenizer.get_vocab().items():
        has_row = token < row_count
        if not has_row and token not in never_written:
            raise ModelError(
                f"the tokenizer of {name!r} has the token {text!r} with number {token}, and the model has {row_count} "
                "rows of embeddings; call model.resize_token_embeddings(len(tokenizer)) and save both again, or remove "
                "the token"
            )


def _list_unused_special_tokens(encoding: Encoding) -> set[int]:
    """Return the special tokens that no sequence holds, such as Gemma 3's image token: all but BOS, EOS and markers."""
    added_tokens = encoding.tokenizer.added_tokens_decoder
    special_tokens = {token for token, content in added_tokens.items() if content.special}
    marker_tokens = chain.from_iterable(encoding.added.values())
    return special_tokens - {*encoding.bos, *encoding.eos, *marker_tokens}


def check_tokenizer(name: str, tokenizer: Any) -> None:
    """Check that a tokenizer gives character offsets, and that it can write calls apart from the text around them.

    Args:
        name: The name of the model, for messages.
        tokenizer: A tokenizer of transformers.

    Raises:
        ModelError: It does not give offsets, or cannot write such calls.
    """
    if not getattr(tokenizer, "is_fast", False):
        raise ModelError(f"the tokenizer of {name!r} gives no character offsets; save it as a fast tokenizer")
    _check_brackets(name, tokenizer)  # its tokens of " [a(1)]" have to decode to a text with this call

    encoding = Encoding(tokenizer)
    if not encoding.keeps_text_tokens():
        raise ModelError(
            f"the tokenizer of {name!r} adds a space before the first word and merges the end of a text with a "
            "following ' [', so no call can be tokenized apart from its text; use a model with another tokenizer"
        )

    if encoding.markers != PAPER_MARKERS:
        _check_markers(name, encoding)  # the same check for a call in the tokenizer's own markers, such as "<call>"


def _check_brackets(name: str, tokenizer: Any) -> None:
    """Check that a tokenizer can write a call; one with an empty vocabulary cannot.

    transformers silently builds an empty tokenizer from a folder without tokenizer files.

    Raises:
        ModelError: The call's tokens decode to a text without it.
    """
    call_tokens = tokenizer(" [a(1)]", add_special_tokens=False).input_ids
    if "[a(1)]" not in tokenizer.decode(call_tokens):
        raise ModelError(
            f"the tokenizer of {name!r} cannot write ' [a(1)]'; give a folder with the tokenizer's own files "
            "(tokenizer.json), or a model whose vocabulary holds brackets"
        )


def _check_markers(name: str, encoding: Encoding) -> None:
    """Check that a tokenizer can write a call in its own markers.

    Raises:
        ModelError: The call's tokens decode to a text without it.
    """
    call = " [a(1) -> 2]"
    written_call = rewrite_markers(call, encoding.markers).strip()
    [call_tokens] = encoding.calls([call])
    if written_call not in encoding.tokenizer.decode(call_tokens, clean_up_tokenization_spaces=False):
        raise ModelError(
            f"the tokenizer of {name!r} cannot write {written_call!r}; set [model] markers to what it can write"
        )


def fuse_activations(model: nn.Module) -> None:
    """Replace NewGELU modules, which take a quarter of GPT-2's time on a CPU, by torch's fused kernel, in place."""
    for module in model.modules():
        for name, child in module.named_children():
            if isinstance(child, NewGELUActivation):
                setattr(module, name, nn.GELU(approximate="tanh"))


def context_length(config: Any) -> int:
    """Return the most tokens of a sequence by a model's config; UNLIMITED where it names no length."""
    text_config = config.get_text_config()
    # LongRoPE rotates keys by other factors in long sequences, so that cached keys would be wrong there.
    return min(_count_positions(text_config), _compute_short_factor_length(text_config))


def _count_positions(text_config: Any) -> int:
    """Return the number of positions that a config names; UNLIMITED where it names none."""
    for name in ("max_position_embeddings", "max_seq_len"):
        length = getattr(text_config, name, None)
        if length and length > 0:
            return int(length)
    return UNLIMITED


def _compute_short_factor_length(text_config: Any) -> int:
    """Compute the maximum length of a sequence for which LongRoPE uses its short factors.

    Returns:
        The length in tokens, or UNLIMITED if the model does not use LongRoPE.
    """
    length_name = "original_max_position_embeddings"
    length_of_model = getattr(text_config, length_name, None)

    shortest = UNLIMITED
    for rotary in _list_rotary_parameters(text_config):
        length = rotary.get(length_name) or length_of_model
        if rotary.get("rope_type") == "longrope" and length:
            shortest = min(shortest, int(length))
    return shortest


def _list_rotary_parameters(text_config: Any) -> list[dict[str, Any]]:
    """Return a config's sets of rotary parameters: one for all layers, and one for each kind of layer."""
    rotary = getattr(text_config, "rope_parameters", None) or getattr(text_config, "rope_scaling", None) or {}
    by_kind_of_layer = [values for values in rotary.values() if isinstance(values, dict)]
    return [rotary, *by_kind_of_layer]


def load_from_hub(pretrained: Any, name: str, options: Mapping[str, Any]) -> Any:
    """Load a model, tokenizer or config from a folder or from the hub.

    Args:
        pretrained: The class of transformers that loads it, such as AutoTokenizer.
        name: The folder or hub id.
        options: Arguments of the class's `from_pretrained`.

    Raises:
        ModelError: It cannot be loaded.
        DamagedModel: A file was damaged since it was hashed.
    """
    loads_weights = "Model" in pretrained.__name__  # AutoModelForCausalLM, not AutoConfig or AutoTokenizer
    require_whole(name, options.get("revision"), weights=loads_weights)  # raises for damaged files

    source = str(Path(name).expanduser()) if name.startswith("~") else name
    try:
        return pretrained.from_pretrained(source, **options)
    except Exception as error:  # the libraries below transformers raise many kinds of errors
        raise ModelError(
            f"{pretrained.__name__} cannot load {name!r}: {_format_error(error)}; give the folder of a model saved "
            "with safetensors (save_pretrained), or a hub id that this machine can reach or has cached"
        ) from error


def _format_error(error: Exception) -> str:
    """Return the message of an error in a line of at most 600 characters, or its class where it has none."""
    return " ".join(str(error).split())[:600] or type(error).__name__


def _choose_device(device: str) -> torch.device:
    """Turn the device name of the settings into a device. `auto` means a GPU if there is one, else the CPU.

    Raises:
        ModelError: This machine has no such device.
    """
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        return torch.empty(0, device=device).device  # an empty tensor shows whether the device exists
    except (RuntimeError, AssertionError) as error:
        raise ModelError(f"device {device!r} cannot be used: {_format_error(error)}; use auto, cpu or cuda") from error


LOCAL_INIT_KWARGS = ("is_local", "local_files_only")
"""Entries of a tokenizer's `init_kwargs` that say how this machine loaded it."""


def load_encoding(model: ModelSettings) -> Encoding:
    """Load the tokenizer of the settings' model, together with the markers of its calls, such as ` [` and `->`.

    Raises:
        ModelError: The tokenizer is missing, unreadable, wrongly converted from sentencepiece, or unsuitable for the
            method.
    """
    name = model_name(model)
    check_model(name, model.revision)
    tokenizer = load_from_hub(AutoTokenizer, name, _build_source_options(model))
    check_sentencepiece(name, tokenizer, model.revision)

    if model.bos is not None:
        set_bos(name, tokenizer, model.bos)
    _set_markers(model, tokenizer)
    check_tokenizer(name, tokenizer)

    _remove_local_entries(tokenizer)
    return Encoding(tokenizer)


def _remove_local_entries(tokenizer: Any) -> None:
    """Keep how this machine loaded a tokenizer out of the files in which it is saved."""
    for key in LOCAL_INIT_KWARGS:
        tokenizer.init_kwargs.pop(key, None)


def _set_markers(model: ModelSettings, tokenizer: Any) -> None:
    """Note the markers of calls in the tokenizer, unless they are the paper's; its saved files have them too.

    Markers in the model's files come before the settings': the model was finetuned with them.
    """
    markers = read_checkpoint_markers(model_name(model), model.revision) or model.markers
    if markers != PAPER_MARKERS:
        tokenizer.init_kwargs.setdefault(MARKERS, markers.model_dump())


def set_bos(name: str, tokenizer: Any, wanted: bool) -> None:
    """Make a tokenizer put BOS before sequences, or nothing. The files saved from it will say the same.

    Args:
        name: The name of the model, for the message.
        tokenizer: The tokenizer, which is changed in place.
        wanted: Whether to put BOS there.

    Raises:
        ModelError: BOS is wanted, but the tokenizer has none.
    """
    if wanted and tokenizer.bos_token_id is None:
        raise ModelError(f"model.bos = true, but the tokenizer of {name!r} has no BOS; remove model.bos")
    if wanted != bool(Encoding(tokenizer).bos):
        tokenizer.add_bos_token = wanted


def load_config(model: ModelSettings) -> Any:
    """Load the transformers config of the settings' model.

    Raises:
        ModelError: It cannot be loaded.
    """
    return load_from_hub(AutoConfig, model_name(model), _build_source_options(model))


def _build_source_options(model: ModelSettings) -> dict[str, Any]:
    """Return the arguments of `from_pretrained` that say which revision is loaded, and whether its code may run."""
    return {"revision": model.revision, "trust_remote_code": model.trust_remote_code}


def _choose_dtype(model: ModelSettings, name: str | None, dtype: str | None) -> torch.dtype | str:
    """Choose the torch data type in which a model is loaded, or "auto", which leaves the choice to transformers.

    Args:
        model: The settings.
        name: The folder or hub id of another model, or None for the settings' model.
        dtype: The caller's choice, or None to go by the settings.

    Raises:
        ModelError: The data type is neither "auto" nor in DTYPES.
    """
    chosen = _choose_dtype_name(model, is_other_model=name is not None) if dtype is None else dtype
    if chosen not in ("auto", *DTYPES):
        raise ModelError(f"dtype {chosen!r} is unknown; use auto, {', '.join(DTYPES)}")
    return DTYPES.get(chosen, chosen)


def _choose_dtype_name(model: ModelSettings, *, is_other_model: bool) -> str:
    """Return the name of the data type by the settings, where these say `auto` by the files of the settings' model.

    "auto" where these are not on this machine. Another model then gets the data type in the config on the hub.
    """
    chosen = read_model_dtype(model)
    if chosen == "auto" and is_other_model:
        return _format_dtype(load_config(model).dtype or torch.float32)
    return chosen


def load_identified(model: ModelSettings, name: str | None = None) -> LanguageModel:
    """Load a model as `load_model` does, and store in its `identity` what determines its results.

    The identity has the hashes of exactly the files that were read, and the settings that change results.

    Raises:
        ModelError: As in `load_model`.
    """
    loaded_name = model_name(model) if name is None else name

    while True:  # repeat if another run has replaced files in the meantime
        identity = read_model_identity(loaded_name, model.revision)
        loaded = load_model(model, name)
        if read_model_identity(loaded_name, model.revision) == identity:
            return replace(loaded, identity={**identity, **determining(model, but=IDENTIFYING)})
