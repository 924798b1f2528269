"""Identity and size of a model folder or hub id, without loading it; the cores to run it on. Imports no torch."""

import json
import logging
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from importlib.util import find_spec
from math import prod
from pathlib import Path

from toolformer_dag.files import UserError, find_silently_changed_file, hold_file_lock, replace_folder
from toolformer_dag.identity import file_hash, get_cache_folder
from toolformer_dag.settings.call_markers import PAPER_MARKERS, CallMarkers
from toolformer_dag.settings.model_settings import GGUF_SUFFIX, ModelSettings
from toolformer_dag.settings.sections import Settings
from toolformer_dag.settings.setting_types import expand_home
from toolformer_dag.synthetic import EMBEDDED_MODEL_FOLDER, SMALL_MODEL_FOLDER

_log = logging.getLogger(__name__)


class ModelError(UserError):
    """A model that cannot be found, read or run. The message names the model, the reason and the remedy."""


class DamagedModel(ModelError):
    """A model with a file whose content changed since it was hashed, while its size and times did not."""

    REASON = (
        "is damaged: its content changed since it was hashed, its size and times did not, and no row is made with it; "
        "copy the model there again and look at the disk"
    )

    def __init__(self, file: Path) -> None:
        super().__init__(f"{file} {self.REASON}")


class DamagedCheckpoint(DamagedModel):
    """A checkpoint of this project that is damaged. The next run finetunes again."""

    REASON = "is damaged: its content is not what was written, so no row is made with it; run `toolformer-dag run`"


class OffsetError(UserError):
    """No token begins at a character.

    Attributes:
        nearest_offset: The closest character at which a token begins.
    """

    def __init__(self, offset: int, nearest_offset: int) -> None:
        super().__init__(
            f"no token begins at character {offset}; the nearest token boundary is character {nearest_offset}"
        )
        self.nearest_offset = nearest_offset


SMALL_PARAMETER_COUNT = 20_000_000
"""Models below this number of parameters run on a single thread: at 2 million parameters, two threads were four times
slower."""


CPU_QUOTA_FILE = Path("/sys/fs/cgroup/cpu.max")
"""Where Linux tells a container's limit of processor time."""
UNLIMITED_CORES = 1_000_000


def count_cores() -> int:
    """Count the physical cores that this process may use, at least 1.

    A container's limit of processor time, rounded down, counts too.
    """
    hardware_threads = set(range(os.cpu_count() or 1))
    if hasattr(os, "sched_getaffinity"):  # on Linux, the threads that this process is bound to
        hardware_threads = os.sched_getaffinity(0)

    # Several hardware threads may share a core.
    core_names = {_read_core_name(thread) for thread in hardware_threads}
    usable_core_count = min(len(core_names), _count_container_cores())
    return max(1, usable_core_count)


def _read_core_name(hardware_thread: int) -> str:
    """Return a name for the core of a hardware thread: on Linux, the list of all threads of that core."""
    siblings_file = Path(f"/sys/devices/system/cpu/cpu{hardware_thread}/topology/thread_siblings_list")
    return siblings_file.read_text() if siblings_file.is_file() else str(hardware_thread)


def _count_container_cores() -> int:
    """Count the whole cores that the container's limit of processor time leaves.

    Returns:
        The number of cores, or UNLIMITED_CORES if there is no limit.
    """
    if not CPU_QUOTA_FILE.is_file():
        return UNLIMITED_CORES

    # The file has the microseconds of processor time that are allowed in a period, and the period's microseconds.
    allowed_time, _, period = CPU_QUOTA_FILE.read_text().partition(" ")
    if allowed_time == "max":
        return UNLIMITED_CORES
    return int(allowed_time) // int(period)


def is_small_model(model_settings: ModelSettings) -> bool:
    """Return whether the settings' model is in a local folder and so small that it computes on a single thread."""
    parameter_count = count_folder_parameters(Path(resolve_model_name(model_settings)))
    return 0 < parameter_count < SMALL_PARAMETER_COUNT


def count_folder_parameters(folder: Path) -> int:
    """Count the parameters of the model in a folder, from the headers of its safetensors files.

    Returns:
        The number of parameters, or 0 if the folder does not exist.
    """
    from safetensors import safe_open

    parameter_count = 0
    for file in folder.glob("*.safetensors"):
        with safe_open(file, "numpy") as weights:
            for weight_name in weights.keys():  # noqa: SIM118, no mapping
                shape = weights.get_slice(weight_name).get_shape()
                parameter_count += prod(shape)
    return parameter_count


DTYPES_BY_SAFETENSORS_NAME = {"F32": "float32", "BF16": "bfloat16", "F16": "float16", "F64": "float64"}
"""safetensors' names of floating-point types."""
HUB_TIMEOUT_SECONDS = 10.0
"""Seconds in which the hub has to say whether it has a model."""
IDENTITY_FILE_PATTERNS = (
    "config.json",
    "model*.safetensors",
    "model.safetensors.index.json",
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.*",
    "merges.txt",
    "*.model",
    "*.py",
)


IDENTIFYING_KEYS = ("name", "revision", "dtype")
"""The keys of `[model]` that the files' identity and the data type stand for."""


def read_model_identity(name: str, revision: str | None = None) -> Mapping[str, str]:
    """Read what identifies a model. If it changes, everything computed with the model is out of date.

    It is not checked whether the files of a model fit each other.

    Returns:
        For a folder: the hashes of the files that determine the model's results, by file name.
        For a GGUF file: its hash, the version of the conversion, and BOS if the conversion chose one.
        For a hub id: the id and the revision. Without a revision it is "main", and changes of that branch go unnoticed.

    Raises:
        ModelError: The name is a path without a model folder.
    """
    folder = _find_local_folder(name)
    if folder is None:
        return {"id": name, "revision": revision or "main"}

    # For a GGUF file, the conversion to a folder recorded the identity.
    was_converted = folder.parent == _get_conversions_folder()
    if was_converted:
        return dict(json.loads((folder / IDENTITY_FILE_NAME).read_bytes()))

    return {file.name: file_hash(file) for file in _list_required_files(folder)}


def is_packaged_model(identity: Mapping[str, object]) -> bool:
    """Return whether an identity belongs to a model in this package, which knows the synthetic world only.

    The identity may have further fields, such as settings.
    """
    for folder in (EMBEDDED_MODEL_FOLDER, SMALL_MODEL_FOLDER):
        hash_by_file_name = read_model_identity(str(folder))
        if hash_by_file_name.items() <= identity.items():
            return True
    return False


SHA_256_PATTERN = re.compile("[0-9a-f]{64}")
"""The name of a large file in the hub's cache: the hash of its content."""
CHECKPOINT_FILE_NAME = "training.json"
"""The sealed record of a model that was finetuned here."""


def get_checkpoint_folder(settings: Settings, name: str = "finetuned_checkpoint") -> Path:
    """Return the folder of a checkpoint of the settings' round, whether it exists or not."""
    training_folder = settings.paths.local_folder / f"training{settings.rounds.name_suffix}"
    return training_folder / name / "model"


def check_model_is_undamaged(name: str, revision: str | None = None, includes_weights: bool = True) -> None:
    """Check before a model is loaded that none of its files is damaged.

    The content of a damaged file has changed since it was hashed, but its size and times have not. A model that is
    not on this machine is not checked.

    Args:
        name: The folder or hub id of the model.
        revision: The revision on the hub.
        includes_weights: Whether the weights will be loaded, too.

    Raises:
        DamagedCheckpoint: A checkpoint of this project is damaged. The file's times are set to now, so that the next
            run notices the change and finetunes again.
        DamagedModel: Another model is damaged.
    """
    folder = find_model_folder(name, revision)
    if folder is None:
        return

    damaged_file = _find_damaged_file(folder, includes_weights=includes_weights)
    if damaged_file is None:
        return

    is_checkpoint = damaged_file.with_name(CHECKPOINT_FILE_NAME).is_file()
    if not is_checkpoint:
        raise DamagedModel(damaged_file)

    os.utime(damaged_file)  # with new times, the next run computes its hash again
    raise DamagedCheckpoint(damaged_file)


def _find_damaged_file(folder: Path, *, includes_weights: bool) -> Path | None:
    """Find a file of a model whose content is no longer what was hashed.

    The hash is remembered from an earlier reading. In the cache of the Hugging Face hub, it is also the name of a
    large file.

    Args:
        folder: The folder of the model.
        includes_weights: Whether to check the weights, too.

    Returns:
        The first damaged file found, or None if all files are whole.
    """
    files = _list_identifying_files(folder)
    if not includes_weights:
        files = [file for file in files if file.suffix != ".safetensors"]

    # This file's content does not match the remembered hash, although its size and times are the same.
    changed_file = find_silently_changed_file(files)
    if changed_file is not None:
        return changed_file

    for file in files:
        if _is_misnamed_hub_file(file):
            return file
    return None


def _is_misnamed_hub_file(file: Path) -> bool:
    """Return whether a large file of the hub's cache, which is named after its hash, has another content.

    It is False for all other files.
    """
    file_name = file.resolve().name  # files of the cache are links
    is_named_after_hash = SHA_256_PATTERN.fullmatch(file_name) is not None
    if not is_named_after_hash:
        return False
    return not file_name.startswith(file_hash(file))


def find_model_folder(name: str, revision: str | None = None) -> Path | None:
    """Find the folder with the files of a model.

    Returns:
        The folder, or None for a hub id that is not in the hub's cache.

    Raises:
        ModelError: The name is a path without a model folder.
    """
    from huggingface_hub import try_to_load_from_cache

    folder = _find_local_folder(name)
    if folder is not None:
        return folder

    # The answer is no string if the file is not in the cache, or is known not to be on the hub.
    config_file = try_to_load_from_cache(name, "config.json", revision=revision)
    return Path(config_file).parent if isinstance(config_file, str) else None


MARKERS_KEY = "call_markers"
"""The key of tokenizer_config.json that holds the markers of calls where they are not the paper's."""


def read_checkpoint_markers(name: str, revision: str | None = None) -> CallMarkers | None:
    """Read from a model's files the markers with which it was finetuned to write calls, such as ` [` and `->`.

    Returns:
        The markers. If the files name none, these are the paper's for a checkpoint of this project, else None.
    """
    folder = find_model_folder(name, revision)
    if folder is None:
        return None

    markers = _read_markers(folder / "tokenizer_config.json")
    is_checkpoint = (folder / CHECKPOINT_FILE_NAME).is_file()
    if markers is None and is_checkpoint:
        return PAPER_MARKERS
    return markers


def _read_markers(file: Path) -> CallMarkers | None:
    """Read the markers of calls in a tokenizer's config.

    Returns:
        The markers, or None if the config has none or cannot be read.
    """
    try:
        tokenizer_config = json.loads(file.read_bytes())
        marker_values = tokenizer_config.get(MARKERS_KEY)
        return CallMarkers.model_validate(marker_values) if marker_values else None
    except (OSError, ValueError, AttributeError):
        return None


def check_call_markers(model_settings: ModelSettings) -> None:
    """Check that a model was not finetuned with other markers of calls than those of the settings.

    Raises:
        ModelError: The model was finetuned with other markers.
    """
    markers = read_checkpoint_markers(resolve_model_name(model_settings), model_settings.revision)
    if markers not in (None, model_settings.markers):
        raise ModelError(
            f"{model_settings.name!r} was finetuned with other markers of calls; set [model] markers to {markers}"
        )


def check_model_exists(name: str, revision: str | None = None) -> None:
    """Check that a name is a model folder, or a model in the hub's cache or on the hub.

    The hub is asked only once, for at most HUB_TIMEOUT_SECONDS. transformers would ask it for each file, six times with
    pauses.

    Raises:
        ModelError: There is no such model, or the hub does not answer.
    """
    from huggingface_hub import HfApi, try_to_load_from_cache

    if _find_local_folder(name) is not None:
        return

    try:
        is_cached = isinstance(try_to_load_from_cache(name, "config.json", revision=revision), str)
        if not is_cached:
            HfApi().model_info(name, revision=revision, timeout=HUB_TIMEOUT_SECONDS)
    except Exception as error:
        message = str(error) or repr(error)
        reason = message.strip().splitlines()[0]
        raise ModelError(
            f"there is no folder {name!r}, and the hub does not give a model of that name ({reason}); correct the "
            "name, log in with `hf auth login`, or try again with a connection"
        ) from error


def _find_local_folder(name: str) -> Path | None:
    """Find the folder that a model's name stands for. A GGUF file is first converted to a folder, once.

    Returns:
        The folder, or None for a hub id such as "org/model".

    Raises:
        ModelError: The name is a path without a folder, or a GGUF file cannot be converted.
    """
    path = expand_home(Path(name))
    if name.endswith(GGUF_SUFFIX):
        return convert_gguf(path)
    if path.is_dir():
        return path

    # A hub id, such as "org/model", has none of these.
    looks_like_path = name.startswith((".", "/", "~")) or name.count("/") > 1 or "\\" in name
    if looks_like_path:
        raise ModelError(f"model folder {name!r} does not exist; give a model folder or a hub id")
    return None


REQUIRED_FILE_PATTERNS = (("config.json",), ("*.safetensors",), ("tokenizer*", "*.model"))
"""The files that a model folder must have: in each group, a file for at least one of the patterns."""


def _list_required_files(folder: Path) -> list[Path]:
    """List the files of a model folder that determine its results: config, weights, tokenizer and code.

    Raises:
        ModelError: The config, the weights or the tokenizer is missing.
    """
    files = _list_identifying_files(folder)
    for patterns in REQUIRED_FILE_PATTERNS:
        has_file = any(file.match(pattern) for file in files for pattern in patterns)
        if not has_file:
            raise ModelError(
                f"{str(folder)!r} is not a model folder: it holds no {patterns[0]}; "
                "save a model there with save_pretrained, or give another folder or a hub id"
            )
    return files


def _list_identifying_files(folder: Path) -> list[Path]:
    """List the files of a folder that may determine a model's results, sorted."""
    files: set[Path] = set()
    for pattern in IDENTITY_FILE_PATTERNS:
        files.update(folder.glob(pattern))
    return sorted(files)


def read_model_dtype(model_settings: ModelSettings) -> str:
    """Read the data type of the settings' model. If the settings say `auto`, it comes from the model's folder.

    For a hub id it stays `auto`: only loading would show the data type, and the model's revision determines it.
    """
    folder = expand_home(Path(resolve_model_name(model_settings)))
    if model_settings.dtype == "auto" and folder.is_dir():
        return _read_folder_dtype(folder)
    return model_settings.dtype


def _read_folder_dtype(folder: Path) -> str:
    """Read the data type in which a model folder stores its weights, such as "bfloat16".

    It is in config.json. Otherwise it is the type of the first floating-point weights, or float32.

    Raises:
        ModelError: The config.json cannot be read.
    """
    return _read_config_dtype(folder / "config.json") or _read_weights_dtype(folder) or "float32"


def _read_config_dtype(file: Path) -> str | None:
    """Read the data type from a config.json, or from the part of it that describes the text model.

    Returns:
        A name such as "float32", or None if the config names no data type.

    Raises:
        ModelError: The file cannot be read.
    """
    try:
        config = json.loads(file.read_bytes())
    except (OSError, ValueError) as error:
        raise ModelError(f"{file} cannot be read: {error}; save the model again") from error

    text_config = config.get("text_config") or {}
    for config_part in (config, text_config):
        dtype = config_part.get("dtype") or config_part.get("torch_dtype")
        if dtype:
            return str(dtype)
    return None


def _read_weights_dtype(folder: Path) -> str | None:
    """Find the data type of the first floating-point weights in a folder's safetensors files.

    Returns:
        A name such as "float32", or None if there are no such weights.
    """
    from safetensors import safe_open

    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, "numpy") as weights:
            for weight_name in weights.keys():  # noqa: SIM118, no mapping
                stored_dtype = weights.get_slice(weight_name).get_dtype()
                if stored_dtype in DTYPES_BY_SAFETENSORS_NAME:
                    return DTYPES_BY_SAFETENSORS_NAME[stored_dtype]
    return None


def resolve_model_name(model_settings: ModelSettings) -> str:
    """Return the folder or hub id of the settings' model.

    The name `embedded` stands for the model in this package. A GGUF file is converted to a folder, unless this was done
    before.

    Raises:
        ModelError: A GGUF file cannot be converted.
    """
    name = model_settings.name
    if name.endswith(GGUF_SUFFIX):
        gguf_file = expand_home(Path(name))
        return str(convert_gguf(gguf_file))
    if name == "embedded":
        return str(EMBEDDED_MODEL_FOLDER)
    return name


IDENTITY_FILE_NAME = "gguf.json"
"""The file of a converted model that holds its identity."""
CONVERTER_MODULE = "toolformer_dag.model.gguf_conversion"
"""The module that runs in a process of its own to convert a file."""
CONVERSION_VERSION = 1
"""Raise this when the same GGUF file gives other weights or tokens; part of folder names and identities."""


def _get_conversions_folder() -> Path:
    """Return the folder of converted models in the user's cache."""
    return get_cache_folder() / "models"


def convert_gguf(gguf_file: Path) -> Path:
    """Convert a GGUF file to a model folder with safetensors and a tokenizer, unless this was done before.

    If several processes need the folder, one of them converts and the others wait. The folder appears only when it is
    complete.

    Returns:
        The folder, which is in the user's cache and named after the hash of the file.

    Raises:
        ModelError: The file cannot be read or converted.
    """
    try:
        gguf_hash = file_hash(gguf_file)
        folder = _get_conversions_folder() / f"{gguf_hash}-v{CONVERSION_VERSION}"
        if folder.is_dir():
            return folder
        with hold_file_lock(folder.with_suffix(".lock")):
            # Look again: another process may have converted the file while this one waited for the lock.
            if not folder.is_dir():
                _convert_to_folder(gguf_file, gguf_hash, folder)
    except OSError as error:
        raise ModelError(
            f"{gguf_file} cannot be read or converted: {error}; correct the path, or free disk space"
        ) from error
    return folder


def _convert_to_folder(gguf_file: Path, gguf_hash: str, model_folder: Path) -> None:
    """Convert a GGUF file to a model folder. The folder appears only when it is complete.

    Args:
        gguf_file: The GGUF file.
        gguf_hash: Its hash.
        model_folder: The folder to create.

    Raises:
        ModelError: The conversion fails, or the package gguf is missing.
    """
    if find_spec("gguf") is None:
        raise ModelError(
            f"{gguf_file} needs the package gguf, which is not there; run `pip install -c constraints.txt -e "
            "'.[gguf]'`, or give a folder with safetensors"
        )

    _log.warning(
        "%s is converted to safetensors once, which may take minutes; they stay in %s", gguf_file.name, model_folder
    )

    # The conversion writes to another folder, which is renamed when it is complete.
    _remove_unfinished(model_folder)
    unfinished_folder = model_folder.with_suffix(f".{os.getpid()}.building")
    _run_conversion(gguf_file, gguf_hash, unfinished_folder)
    replace_folder(model_folder, unfinished_folder)

    # The conversion tests whether BOS, a token before texts, clearly lowers their loss. If so, the converted tokenizer
    # adds it, and the identity of the model names it as `bos`.
    bos_token = read_model_identity(str(model_folder)).get("bos")
    if bos_token:
        _log.warning(
            "%s: texts begin with %s, after which they cost clearly less; see model.bos", gguf_file.name, bos_token
        )


def _remove_unfinished(folder: Path) -> None:
    """Remove the unfinished conversions to a folder that killed runs left behind.

    Errors are ignored, because the processes of these runs may still write there.
    """
    for unfinished_folder in folder.parent.glob(f"{folder.name}.*.building"):
        shutil.rmtree(unfinished_folder, ignore_errors=True)


def _run_conversion(gguf_file: Path, gguf_hash: str, output_folder: Path) -> None:
    """Convert a GGUF file to a model folder in a child process.

    A child process is needed, because definitions of assets load no torch, and because the progress bars of the
    libraries have to stay off the terminal.

    Raises:
        ModelError: The conversion fails. The message has the last line that the child wrote to its standard error.
    """
    command = [sys.executable, "-P", "-m", CONVERTER_MODULE, str(gguf_file.absolute()), gguf_hash, str(output_folder)]
    child = subprocess.run(command, capture_output=True, encoding="utf-8", errors="replace")
    if child.returncode == 0:
        return

    error_lines = child.stderr.strip().splitlines()
    reason = error_lines[-1] if error_lines else f"exit {child.returncode}"
    raise ModelError(f"{gguf_file} cannot be converted: {reason}; give another GGUF file, or a folder with safetensors")


def format_model_name(model_path_or_id: str) -> str:
    """Return the name of a model for model cards: the last part of an absolute path, and other names as they are."""
    path = Path(model_path_or_id)
    return path.name if path.is_absolute() else model_path_or_id
