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
from toolformer_dag.model.sentencepieces import check_sentencepiece_tokenizer
from toolformer_dag.model.token_service import LoadService
from toolformer_dag.model.trials import check_model_is_causal, list_trial_token_ids, measure_bos_gain
from toolformer_dag.model.weights import (
    CHECKPOINT_FILE_NAME,
    IDENTIFYING_KEYS,
    MARKERS_KEY,
    SMALL_PARAMETER_COUNT,
    ModelError,
    check_model_exists,
    check_model_is_undamaged,
    count_cores,
    count_folder_parameters,
    find_model_folder,
    read_checkpoint_markers,
    read_model_dtype,
    read_model_identity,
    resolve_model_name,
)
from toolformer_dag.settings.call_markers import PAPER_MARKERS
from toolformer_dag.settings.model_settings import ENGINES, ModelSettings
from toolformer_dag.settings.setting_types import select_determining_settings
from toolformer_dag.texts.calls import replace_paper_markers

DEFAULT_TORCH_THREADS = min(torch.get_num_threads(), count_cores())
"""The threads of torch at start, at most one per core: more would spin until they get a core."""


def count_parameters(model: nn.Module) -> int:
    """Return the number of a model's parameters."""
    return sum(weight.numel() for weight in model.parameters())


def fit_threads(model: Any) -> None:
    """Set the number of torch's threads for the whole process, so that it suits a model.

    It is one for a small model (below SMALL_PARAMETER_COUNT) on a CPU, else DEFAULT_TORCH_THREADS.
    """
    is_small_on_cpu = model.device.type == "cpu" and count_parameters(model) < SMALL_PARAMETER_COUNT
    torch.set_num_threads(1 if is_small_on_cpu else DEFAULT_TORCH_THREADS)


def choose_fast_dtype() -> torch.dtype:
    """Return bfloat16 if the processor has AVX-512, else float32: without it, bfloat16 is 50 times slower."""
    has_avx_512 = torch.backends.cpu.get_cpu_capability() == "AVX512"
    return torch.bfloat16 if has_avx_512 else torch.float32


_log = logging.getLogger(__name__)
TORCH_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
"""The data types that models run in, by their names in the settings."""
UNLIMITED_CONTEXT_LENGTH = 1 << 30
"""The context length of a model whose config names none."""
_BOS_WARNING = (
    "%s: a text costs %.2f nats per token less after %s, which its tokenizer does not add; set model.bos = true to "
    "begin with it, or false to keep this"
)

# The bar of loading weights would break the progress display of a stage.
disable_progress_bar()


@dataclass(frozen=True, eq=False)
class LanguageModel:
    """A model in evaluation mode on its device, and its tokenizer.

    Attributes:
        encoding: The tokenizer as the method uses it.
        context_length: The most tokens of a sequence, whatever its attention's window.
        name: Folder or hub id.
        model: A torch module, or a `TokenService`, which runs the model in another engine such as vLLM.
        tokenizer: A fast tokenizer of transformers.
        config: The model's config in transformers.
        parameter_count: The number of its weights, or 0 for a served model whose files are not on this machine.
        identity: Hashes of the files it was loaded from. It is empty unless `load_model_with_identity` loaded it.
    """

    encoding: Encoding = field(repr=False)
    context_length: int
    name: str
    model: Any
    tokenizer: Any
    config: Any = field(repr=False)
    parameter_count: int
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
        """Return how products are computed: "tf32" for float32 on a GPU that may round, else the weights' data type."""
        allows_tf32 = self.device.type == "cuda" and torch.get_float32_matmul_precision() != "highest"
        uses_tf32 = allows_tf32 and self.dtype == "float32"
        return "tf32" if uses_tf32 else self.dtype


_BUILDING_MODEL = threading.Lock()
"""Held while transformers builds a model, because it changes the default device of the process meanwhile."""


def load_model(
    model_settings: ModelSettings, other_model_name: str | None = None, dtype: str | None = None
) -> LanguageModel:
    """Load the causal language model of the settings, or another one, from safetensors files.

    On a GPU, this lets float32 be computed in TF32, in the whole process. A warning is logged if the tokenizer should
    add BOS and does not.

    Args:
        model_settings: The settings.
        other_model_name: The folder or hub id of another model, such as a checkpoint.
        dtype: Replaces the data type of the settings. By default, if the settings say `auto`, the other model gets the
            data type of the settings' model: a checkpoint stored in float32 is measured as its base model is.

    Raises:
        ModelError: A file is missing or unreadable, or the model is not a causal one with a fast tokenizer.
    """
    settings_to_load = model_settings
    if other_model_name is not None:
        settings_to_load = _build_model_settings(model_settings, other_model_name)
    dtype_to_load = _choose_dtype(model_settings, other_model_name, dtype)

    if model_settings.runs_in_torch:
        return _load_in_torch(settings_to_load, dtype_to_load)
    return _load_in_service(settings_to_load, dtype_to_load)


def _build_model_settings(model_settings: ModelSettings, other_model_name: str) -> ModelSettings:
    """Build the settings with which another model is loaded on this machine.

    They name no servers, because these run the settings' model only.

    Args:
        model_settings: The settings of the project's model.
        other_model_name: The folder or hub id of the model to load, which may be the project's model, too.
    """
    settings_to_load = model_settings
    if other_model_name != resolve_model_name(model_settings):
        settings_to_load = model_settings.with_other_model(other_model_name)
    return settings_to_load.model_copy(update={"url": ()})


def _load_in_torch(model_settings: ModelSettings, dtype: torch.dtype | str) -> LanguageModel:
    """Load a model into this process, onto the device of the settings.

    Raises:
        ModelError: The model cannot be loaded, or its weights have a data type that is not in TORCH_DTYPES.
    """
    device = _choose_device(model_settings.device)
    tokenizer = load_encoding(model_settings).tokenizer
    torch_module = _load_torch_module(model_settings, dtype)

    # This raises for data types outside TORCH_DTYPES. It lets a GPU compute float32 in TF32, in the whole process.
    _prepare_arithmetic(model_settings.name, _format_dtype(torch_module.dtype), device)

    language_model = wrap_language_model(resolve_model_name(model_settings), torch_module.to(device), tokenizer)
    _warn_of_missing_bos(model_settings, language_model)
    return language_model


def _load_torch_module(model_settings: ModelSettings, dtype: torch.dtype | str) -> Any:
    """Load the settings' model as a torch module on the CPU.

    Raises:
        ModelError: The model cannot be loaded.
    """
    load_options = {**_build_source_options(model_settings), "use_safetensors": True, "dtype": dtype}
    with _BUILDING_MODEL:
        return load_pretrained(AutoModelForCausalLM, resolve_model_name(model_settings), load_options)


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
        ModelError: The data type is not in TORCH_DTYPES.
    """
    if dtype not in TORCH_DTYPES:
        raise ModelError(f"the weights of {name!r} are {dtype}; set model.dtype to {', '.join(TORCH_DTYPES)}")

    is_slow = device.type == "cpu" and dtype != "float32" and choose_fast_dtype() == torch.float32
    if is_slow:
        _log.warning('on this processor %s is 50 times slower than float32; set dtype = "float32"', dtype)

    if device.type == "cuda" and dtype == "float32":
        torch.set_float32_matmul_precision("high")  # allows TF32


def _warn_of_missing_bos(model_settings: ModelSettings, language_model: LanguageModel) -> None:
    """Log a warning if BOS, the token that begins a sequence, is not added although it would make texts likelier.

    There is no warning if the settings decide about BOS, or for a checkpoint of this project, which has to run as it
    was trained.
    """
    if model_settings.bos is not None:
        return

    is_checkpoint = Path(language_model.name, CHECKPOINT_FILE_NAME).is_file()
    if is_checkpoint:
        return

    gain = measure_bos_gain(language_model.model, language_model.encoding, language_model.context_length)
    if gain > 0:
        _log.warning(_BOS_WARNING, language_model.name, gain, language_model.tokenizer.bos_token)


def _load_in_service(model_settings: ModelSettings, dtype: torch.dtype | str) -> LanguageModel:
    """Load a model into an engine such as vLLM, or connect to the servers that run it.

    Tokenizer and config are loaded into this process, too.

    Raises:
        ModelError: The engine's package is missing, or the engine cannot run the model.
    """
    engine_module = _import_engine_module(model_settings.engine)
    name = resolve_model_name(model_settings)
    encoding = load_encoding(model_settings)
    config = load_config(model_settings)
    check_embedding_rows(name, encoding, config)

    context_length = read_context_length(config)
    load_service: LoadService = engine_module.load_service
    service = load_service(model_settings, _format_dtype(dtype), config, context_length)

    return LanguageModel(
        encoding=encoding,
        context_length=context_length,
        name=name,
        model=service,
        tokenizer=encoding.tokenizer,
        config=config,
        parameter_count=_count_stored_parameters(name, model_settings.revision),
    )


def _import_engine_module(engine_name: str) -> Any:
    """Import the module that runs models in an engine, such as vLLM.

    Raises:
        ModelError: The engine's package is missing.
    """
    module_name = ENGINES[engine_name].service_module
    assert module_name is not None  # every engine that does not run in torch has one
    try:
        return import_module(module_name)
    except ImportError as error:
        raise ModelError(
            f'model.engine = "{engine_name}" needs the package {engine_name} ({error}); install it as '
            f'docs/howto/{engine_name}.md says, or set model.engine = "transformers"'
        ) from error


def _count_stored_parameters(name: str, revision: str | None) -> int:
    """Count the parameters of a model in its files.

    Returns:
        The number of parameters, or 0 if the files are on another machine.
    """
    folder = find_model_folder(name, revision)
    if folder is None:
        return 0
    return count_folder_parameters(folder)


def wrap_language_model(name: str, model: Any, tokenizer: Any) -> LanguageModel:
    """Check a torch model and a tokenizer that are already in memory, and combine them into a LanguageModel.

    The model is changed in place: its activations are fused, and it is set to evaluation mode. The number of torch's
    threads changes for the whole process.

    Raises:
        ModelError: The tokenizer or the model is unsuitable.
    """
    check_tokenizer(name, tokenizer)
    encoding = Encoding(tokenizer)
    check_embedding_rows(name, encoding, model.config)

    fuse_activations(model)
    fit_threads(model)
    model.eval()
    check_model_is_causal(model, list_trial_token_ids(encoding))

    return LanguageModel(
        encoding=encoding,
        context_length=read_context_length(model.config),
        name=name,
        model=model,
        tokenizer=tokenizer,
        config=model.config,
        parameter_count=count_parameters(model),
    )


def check_embedding_rows(name: str, encoding: Encoding, config: Any) -> None:
    """Check that the model's embedding has a row for every token that the tokenizer may write.

    Args:
        name: The name of the model, for the message.
        encoding: The tokenizer.
        config: The config of the model.

    Raises:
        ModelError: A token has no row.
    """
    row_count = int(config.get_text_config().vocab_size)
    unused_ids = _list_unused_special_tokens(encoding)

    for token_text, token_id in encoding.tokenizer.get_vocab().items():
        has_row = token_id < row_count
        if not has_row and token_id not in unused_ids:
            raise ModelError(
                f"the tokenizer of {name!r} has the token {token_text!r} with number {token_id}, and the model has "
                f"{row_count} rows of embeddings; call model.resize_token_embeddings(len(tokenizer)) and save both "
                "again, or remove the token"
            )


def _list_unused_special_tokens(encoding: Encoding) -> set[int]:
    """List the special tokens that are in no sequence, such as Gemma 3's image token: all but BOS, EOS and markers."""
    added_tokens = encoding.tokenizer.added_tokens_decoder
    special_ids = {token_id for token_id, added_token in added_tokens.items() if added_token.special}
    marker_ids = chain.from_iterable(encoding.added_marker_ids.values())
    return special_ids - {*encoding.bos_ids, *encoding.eos_ids, *marker_ids}


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
    _check_brackets(name, tokenizer)

    encoding = Encoding(tokenizer)
    if not encoding.has_stable_text_tokens():
        raise ModelError(
            f"the tokenizer of {name!r} adds a space before the first word and merges the end of a text with a "
            "following ' [', so no call can be tokenized apart from its text; use a model with another tokenizer"
        )

    # The same check as for brackets, for a call in the tokenizer's own markers, such as "<call>".
    if encoding.markers != PAPER_MARKERS:
        _check_markers(name, encoding)


def _check_brackets(name: str, tokenizer: Any) -> None:
    """Check that a tokenizer can write a call in brackets.

    A tokenizer with an empty vocabulary cannot. transformers silently builds one from a folder without tokenizer files.

    Raises:
        ModelError: The tokens of the call " [a(1)]" decode to a text without this call.
    """
    call_ids = tokenizer(" [a(1)]", add_special_tokens=False).input_ids
    if "[a(1)]" not in tokenizer.decode(call_ids):
        raise ModelError(
            f"the tokenizer of {name!r} cannot write ' [a(1)]'; give a folder with the tokenizer's own files "
            "(tokenizer.json), or a model whose vocabulary holds brackets"
        )


def _check_markers(name: str, encoding: Encoding) -> None:
    """Check that a tokenizer can write a call in its own markers.

    Raises:
        ModelError: The tokens of the call decode to a text without this call.
    """
    call = " [a(1) -> 2]"
    written_call = replace_paper_markers(call, encoding.markers).strip()

    [call_ids] = encoding.encode_calls([call])
    decoded_call = encoding.tokenizer.decode(call_ids, clean_up_tokenization_spaces=False)
    if written_call not in decoded_call:
        raise ModelError(
            f"the tokenizer of {name!r} cannot write {written_call!r}; set [model] markers to what it can write"
        )


def fuse_activations(model: nn.Module) -> None:
    """Replace a model's NewGELU modules by torch's fused kernel, in place.

    NewGELU takes a quarter of GPT-2's time on a CPU.
    """
    for module in model.modules():
        for child_name, child in module.named_children():
            if isinstance(child, NewGELUActivation):
                setattr(module, child_name, nn.GELU(approximate="tanh"))


def read_context_length(config: Any) -> int:
    """Read from a model's config the maximum number of tokens in a sequence.

    Returns:
        The number of tokens, or UNLIMITED_CONTEXT_LENGTH if the config names none.
    """
    text_config = config.get_text_config()
    # LongRoPE rotates keys by other factors in long sequences, so that cached keys would be wrong there.
    return min(_count_positions(text_config), _compute_short_factor_length(text_config))


def _count_positions(text_config: Any) -> int:
    """Return the number of positions that a config names, or UNLIMITED_CONTEXT_LENGTH if it names none."""
    for key in ("max_position_embeddings", "max_seq_len"):
        position_count = getattr(text_config, key, None)
        if position_count and position_count > 0:
            return int(position_count)
    return UNLIMITED_CONTEXT_LENGTH


def _compute_short_factor_length(text_config: Any) -> int:
    """Compute the maximum length of a sequence for which LongRoPE uses its short factors.

    LongRoPE is a rotary position embedding that has other factors for long sequences than for short ones.

    Returns:
        The length in tokens, or UNLIMITED_CONTEXT_LENGTH if the model does not use LongRoPE.
    """
    length_key = "original_max_position_embeddings"
    default_length = getattr(text_config, length_key, None)

    shortest_length = UNLIMITED_CONTEXT_LENGTH
    for rotary_parameters in _list_rotary_parameters(text_config):
        length = rotary_parameters.get(length_key) or default_length
        if rotary_parameters.get("rope_type") == "longrope" and length:
            shortest_length = min(shortest_length, int(length))
    return shortest_length


def _list_rotary_parameters(text_config: Any) -> list[dict[str, Any]]:
    """List a config's sets of rotary parameters: one for all layers, and one for each kind of layer.

    Where a config has a set for each kind of layer, these are nested in the first one, which is also listed.
    """
    parameters = getattr(text_config, "rope_parameters", None) or getattr(text_config, "rope_scaling", None) or {}
    parameters_by_layer_kind = [value for value in parameters.values() if isinstance(value, dict)]
    return [parameters, *parameters_by_layer_kind]


def load_pretrained(pretrained_class: Any, name: str, load_options: Mapping[str, Any]) -> Any:
    """Load a model, tokenizer or config from a folder or from the hub.

    Args:
        pretrained_class: The class of transformers that loads it, such as AutoTokenizer.
        name: The folder or hub id.
        load_options: Arguments of the class's `from_pretrained`.

    Raises:
        ModelError: It cannot be loaded.
        DamagedModel: A file was damaged since it was hashed.
    """
    loads_weights = "Model" in pretrained_class.__name__  # AutoModelForCausalLM, not AutoConfig or AutoTokenizer
    check_model_is_undamaged(name, load_options.get("revision"), includes_weights=loads_weights)

    source = str(Path(name).expanduser()) if name.startswith("~") else name
    try:
        return pretrained_class.from_pretrained(source, **load_options)
    except Exception as error:  # the libraries below transformers raise many kinds of errors
        raise ModelError(
            f"{pretrained_class.__name__} cannot load {name!r}: {_format_error(error)}; give the folder of a model "
            "saved with safetensors (save_pretrained), or a hub id that this machine can reach or has cached"
        ) from error


def _format_error(error: Exception) -> str:
    """Return the message of an error in a line of at most 600 characters, or the name of its class if it has none."""
    message = " ".join(str(error).split())[:600]
    return message or type(error).__name__


def _choose_device(device: str) -> torch.device:
    """Turn the device name of the settings into a device. `auto` means a GPU if there is one, else the CPU.

    Raises:
        ModelError: This machine has no such device.
    """
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")

    try:
        # Creating an empty tensor shows whether the device exists.
        return torch.empty(0, device=device).device
    except (RuntimeError, AssertionError) as error:
        raise ModelError(f"device {device!r} cannot be used: {_format_error(error)}; use auto, cpu or cuda") from error


LOCAL_INIT_KWARGS = ("is_local", "local_files_only")
"""Entries of a tokenizer's `init_kwargs` that say how this machine loaded it."""


def load_encoding(model_settings: ModelSettings) -> Encoding:
    """Load the tokenizer of the settings' model, together with the markers of its calls, such as ` [` and `->`.

    Raises:
        ModelError: The tokenizer is missing, unreadable, wrongly converted from sentencepiece, or unsuitable for the
            method.
    """
    name = resolve_model_name(model_settings)
    check_model_exists(name, model_settings.revision)
    tokenizer = load_pretrained(AutoTokenizer, name, _build_source_options(model_settings))
    check_sentencepiece_tokenizer(name, tokenizer, model_settings.revision)

    if model_settings.bos is not None:
        set_bos(name, tokenizer, model_settings.bos)
    _set_call_markers(model_settings, tokenizer)
    check_tokenizer(name, tokenizer)

    _remove_local_init_kwargs(tokenizer)
    return Encoding(tokenizer)


def _remove_local_init_kwargs(tokenizer: Any) -> None:
    """Remove the notes on how this machine loaded a tokenizer, so that they are not saved with it."""
    for key in LOCAL_INIT_KWARGS:
        tokenizer.init_kwargs.pop(key, None)


def _set_call_markers(model_settings: ModelSettings, tokenizer: Any) -> None:
    """Store the markers of calls, such as ` [` and `->`, in the tokenizer, unless they are the paper's.

    When the tokenizer is saved, its files have the markers, too. Markers that the loaded tokenizer already has stay.
    Otherwise those in the model's files come before those of the settings, because the model was finetuned with them.
    """
    checkpoint_markers = read_checkpoint_markers(resolve_model_name(model_settings), model_settings.revision)
    markers = checkpoint_markers or model_settings.markers
    if markers != PAPER_MARKERS:
        tokenizer.init_kwargs.setdefault(MARKERS_KEY, markers.model_dump())


def set_bos(name: str, tokenizer: Any, should_add_bos: bool) -> None:
    """Make a tokenizer put BOS before sequences, or nothing. The files saved from it will say the same.

    Args:
        name: The name of the model, for the message.
        tokenizer: The tokenizer, which is changed in place.
        should_add_bos: Whether to put BOS there.

    Raises:
        ModelError: BOS is wanted, but the tokenizer has none.
    """
    if should_add_bos and tokenizer.bos_token_id is None:
        raise ModelError(f"model.bos = true, but the tokenizer of {name!r} has no BOS; remove model.bos")

    adds_bos_already = bool(Encoding(tokenizer).bos_ids)
    if should_add_bos != adds_bos_already:
        tokenizer.add_bos_token = should_add_bos


def load_config(model_settings: ModelSettings) -> Any:
    """Load the transformers config of the settings' model.

    Raises:
        ModelError: It cannot be loaded.
    """
    return load_pretrained(AutoConfig, resolve_model_name(model_settings), _build_source_options(model_settings))


def _build_source_options(model_settings: ModelSettings) -> dict[str, Any]:
    """Return the arguments of `from_pretrained` that decide which revision is loaded, and whether its code may run."""
    return {"revision": model_settings.revision, "trust_remote_code": model_settings.trust_remote_code}


def _choose_dtype(model_settings: ModelSettings, other_model_name: str | None, dtype: str | None) -> torch.dtype | str:
    """Choose the torch data type in which a model is loaded, or "auto", which leaves the choice to transformers.

    Args:
        model_settings: The settings.
        other_model_name: The folder or hub id of another model, or None for the settings' model.
        dtype: The caller's choice, or None to go by the settings.

    Raises:
        ModelError: The data type is neither "auto" nor in TORCH_DTYPES.
    """
    dtype_name = dtype
    if dtype_name is None:
        dtype_name = _choose_dtype_name(model_settings, is_other_model=other_model_name is not None)

    if dtype_name not in ("auto", *TORCH_DTYPES):
        raise ModelError(f"dtype {dtype_name!r} is unknown; use auto, {', '.join(TORCH_DTYPES)}")
    return TORCH_DTYPES.get(dtype_name, dtype_name)


def _choose_dtype_name(model_settings: ModelSettings, *, is_other_model: bool) -> str:
    """Choose the name of the data type in which the settings' model, or another one that goes with it, is loaded.

    Args:
        model_settings: The settings. If they say `auto`, the data type is that of the files of their model.
        is_other_model: Whether another model is loaded, such as a checkpoint. It gets the same data type.

    Returns:
        The name, such as "float32". It is "auto" for a settings' model that has a hub id instead of a folder.
    """
    dtype_name = read_model_dtype(model_settings)
    # "auto" would load the other model in the data type of its own files.
    if dtype_name == "auto" and is_other_model:
        config = load_config(model_settings)
        return _format_dtype(config.dtype or torch.float32)
    return dtype_name


def load_model_with_identity(model_settings: ModelSettings, other_model_name: str | None = None) -> LanguageModel:
    """Load a model as `load_model` does, and store in its `identity` what determines its results.

    The identity has the hashes of exactly the files that were read, and the settings that change results.

    Raises:
        ModelError: As in `load_model`.
    """
    name = resolve_model_name(model_settings) if other_model_name is None else other_model_name

    # Repeat this if another run has replaced files while they were read.
    while True:
        identity_before = read_model_identity(name, model_settings.revision)
        language_model = load_model(model_settings, other_model_name)
        identity_after = read_model_identity(name, model_settings.revision)
        if identity_after == identity_before:
            break

    determining_settings = select_determining_settings(model_settings, excluded_keys=IDENTIFYING_KEYS)
    return replace(language_model, identity={**identity_before, **determining_settings})
