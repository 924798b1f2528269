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

from toolformer_dag.files import UserError, find_changed_unseen, locked, replace_folder
from toolformer_dag.identity import cache_folder, file_hash
from toolformer_dag.settings.call_markers import PAPER_MARKERS, CallMarkers
from toolformer_dag.settings.model_settings import GGUF, ModelSettings
from toolformer_dag.settings.sections import Settings
from toolformer_dag.settings.setting_types import expand_home
from toolformer_dag.synthetic import MODEL, SMALL_MODEL

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
    """A checkpoint of this project that is damaged; the next run finetunes again."""

    REASON = "is damaged: its content is not what was written, so no row is made with it; run `toolformer-dag run`"


class OffsetError(UserError):
    """No token begins at this character; `nearest` is the closest character at which a token begins."""

    def __init__(self, offset: int, nearest: int) -> None:
        super().__init__(f"no token begins at character {offset}; the nearest token boundary is character {nearest}")
        self.nearest = nearest


SMALL = 20_000_000
"""Models below this number of parameters run on a single thread: at 2 million parameters, two threads were four times
slower."""


QUOTA = Path("/sys/fs/cgroup/cpu.max")
"""Where Linux tells a container's limit of processor time."""
UNLIMITED_CORES = 1_000_000


def cores() -> int:
    """Count the physical cores that this process may use, at least 1.

    A container's limit of processor time, rounded down, counts too.
    """
    hardware_threads = set(range(os.cpu_count() or 1))
    if hasattr(os, "sched_getaffinity"):  # on Linux, the threads that this process is bound to
        hardware_threads = os.sched_getaffinity(0)

    distinct_cores = {_core(thread) for thread in hardware_threads}  # several threads may share a core
    return max(1, min(len(distinct_cores), _count_container_cores()))


def _core(thread: int) -> str:
    """Return a name for the core of a hardware thread: on Linux, the list of all threads of that core."""
    file = Path(f"/sys/devices/system/cpu/cpu{thread}/topology/thread_siblings_list")
    return file.read_text() if file.is_file() else str(thread)


def _count_container_cores() -> int:
    """Return the whole cores that the container's limit leaves; UNLIMITED_CORES where there is no limit."""
    if not QUOTA.is_file():
        return UNLIMITED_CORES
    share, _, period = QUOTA.read_text().partition(" ")  # microseconds of processor time per period of microseconds
    return UNLIMITED_CORES if share == "max" else int(share) // int(period)


def is_small(model: ModelSettings) -> bool:
    """Return whether the settings' model is in a local folder and so small that it computes on a single thread."""
    return 0 < parameters(Path(model_name(model))) < SMALL


def parameters(folder: Path) -> int:
    """Count the parameters of the model in a folder, from the headers of its safetensors files.

    Returns:
        The number of parameters, or 0 if the folder does not exist.
    """
    from safetensors import safe_open

    total = 0
    for file in folder.glob("*.safetensors"):
        with safe_open(file, "numpy") as weights:
            for name in weights.keys():  # noqa: SIM118, no mapping
                total += prod(weights.get_slice(name).get_shape())
    return total


STORED_DTYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16", "F64": "float64"}
"""safetensors' names of floating-point types."""
HUB_PATIENCE = 10.0
"""Seconds in which the hub has to say whether it has a model."""
IDENTITY_FILES = (
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


IDENTIFYING = ("name", "revision", "dtype")
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
    folder = _find_folder(name)
    if folder is None:
        return {"id": name, "revision": revision or "main"}
    if folder.parent == _get_conversions_folder():  # from a GGUF file; the conversion recorded the identity
        return dict(json.loads((folder / ORIGIN).read_bytes()))
    return {file.name: file_hash(file) for file in _list_required_files(folder)}


def is_packaged(identity: Mapping[str, object]) -> bool:
    """Return whether an identity is one of a model in this package, which knows the synthetic world only.

    The identity may have further fields, such as settings.
    """
    packaged = [read_model_identity(str(folder)) for folder in (MODEL, SMALL_MODEL)]
    return any(files.items() <= identity.items() for files in packaged)


SHA_256 = re.compile("[0-9a-f]{64}")
"""The name of a large file in the hub's cache: the hash of its content."""
CHECKPOINT = "training.json"
"""The sealed record of a model that was finetuned here."""


def checkpoint_folder(settings: Settings, name: str = "finetuned_checkpoint") -> Path:
    """Return the folder of a checkpoint of the settings' round, whether it exists or not."""
    return settings.paths.local / f"training{settings.rounds.suffix}" / name / "model"


def require_whole(name: str, revision: str | None = None, weights: bool = True) -> None:
    """Check before a model is loaded that none of its files is damaged.

    The content of a damaged file has changed since it was hashed, but its size and times have not. A model that is
    not on this machine is not checked.

    Args:
        name: The folder or hub id of the model.
        revision: The revision on the hub.
        weights: Whether the weights will be loaded, too.

    Raises:
        DamagedCheckpoint: A checkpoint of this project is damaged. The file's times are set to now, so that the next
            run notices the change and finetunes again.
        DamagedModel: Another model is damaged.
    """
    folder = model_folder(name, revision)
    if folder is None:
        return

    damaged_file = _find_damaged_file(folder, weights=weights)
    if damaged_file is None:
        return
    if not damaged_file.with_name(CHECKPOINT).is_file():
        raise DamagedModel(damaged_file)

    os.utime(damaged_file)  # with new times, the next run computes its hash again
    raise DamagedCheckpoint(damaged_file)


def _find_damaged_file(folder: Path, *, weights: bool) -> Path | None:
    """Find a file of a model whose content is no longer what was hashed.

    The hash is remembered from an earlier reading. In the cache of the Hugging Face hub, it is also the name of a
    large file.

    Args:
        folder: The folder of the model.
        weights: Whether to check the weights, too.

    Returns:
        The first damaged file found, or None if all files are whole.
    """
    files = [file for file in _list_identifying_files(folder) if weights or file.suffix != ".safetensors"]
    changed_file = find_changed_unseen(
        files
    )  # its content does not match the remembered hash, although its size and times are the same
    if changed_file is not None:
        return changed_file

    for file in files:
        if _is_misnamed(file):
            return file
    return None


def _is_misnamed(file: Path) -> bool:
    """Return whether a large file of the hub's cache, which is named after its hash, has another content."""
    name = file.resolve().name
    return SHA_256.fullmatch(name) is not None and not name.startswith(file_hash(file))


def model_folder(name: str, revision: str | None = None) -> Path | None:
    """Find the folder with the files of a model.

    Returns:
        The folder, or None for a hub id that is not in the hub's cache.

    Raises:
        ModelError: The name is a path without a model folder.
    """
    from huggingface_hub import try_to_load_from_cache

    folder = _find_folder(name)
    if folder is not None:
        return folder
    config = try_to_load_from_cache(name, "config.json", revision=revision)
    return Path(config).parent if isinstance(config, str) else None


MARKERS = "call_markers"
"""The key of tokenizer_config.json that holds the markers of calls where they are not the paper's."""


def read_checkpoint_markers(name: str, revision: str | None = None) -> CallMarkers | None:
    """Read from a model's files the markers with which it was finetuned to write calls, such as ` [` and `->`.

    Returns:
        The markers. If the files name none, these are the paper's for a checkpoint of this project, else None.
    """
    folder = model_folder(name, revision)
    if folder is None:
        return None
    markers = _read_markers(folder / "tokenizer_config.json")
    if markers is None and (folder / CHECKPOINT).is_file():  # this file marks a checkpoint of this project
        return PAPER_MARKERS
    return markers


def _read_markers(file: Path) -> CallMarkers | None:
    """Return the markers in a tokenizer's config; None where it has none or cannot be read."""
    try:
        values = json.loads(file.read_bytes()).get(MARKERS)
        return CallMarkers.model_validate(values) if values else None
    except (OSError, ValueError, AttributeError):
        return None


def refuse_other_markers(model: ModelSettings) -> None:
    """Raise ModelError where a model was finetuned with other markers of calls than the settings name."""
    markers = read_checkpoint_markers(model_name(model), model.revision)
    if markers not in (None, model.markers):
        raise ModelError(f"{model.name!r} was finetuned with other markers of calls; set [model] markers to {markers}")


def check_model(name: str, revision: str | None = None) -> None:
    """Check that a name is a model folder, or a model in the hub's cache or on the hub.

    The hub is asked only once, for at most HUB_PATIENCE seconds. transformers would ask it for each file, six
    times with pauses.

    Raises:
        ModelError: There is no such model, or the hub does not answer.
    """
    from huggingface_hub import HfApi, try_to_load_from_cache

    if _find_folder(name) is not None:
        return
    try:
        is_cached = isinstance(try_to_load_from_cache(name, "config.json", revision=revision), str)
        if not is_cached:
            HfApi().model_info(name, revision=revision, timeout=HUB_PATIENCE)
    except Exception as error:
        reason = (str(error) or repr(error)).strip().splitlines()[0]
        raise ModelError(
            f"there is no folder {name!r}, and the hub does not give a model of that name ({reason}); correct the "
            "name, log in with `hf auth login`, or try again with a connection"
        ) from error


def _find_folder(name: str) -> Path | None:
    """Find the folder that a model's name stands for. A GGUF file is first converted to a folder, once.

    Returns:
        The folder, or None for a hub id such as "org/model".

    Raises:
        ModelError: The name is a path without a folder, or a GGUF file cannot be converted.
    """
    folder = expand_home(Path(name))
    if name.endswith(GGUF):
        return convert_gguf(folder)
    if folder.is_dir():
        return folder
    if name.startswith((".", "/", "~")) or name.count("/") > 1 or "\\" in name:  # a path, not a hub id
        raise ModelError(f"model folder {name!r} does not exist; give a model folder or a hub id")
    return None


REQUIRED_FILES = (("config.json",), ("*.safetensors",), ("tokenizer*", "*.model"))
"""What a model folder has: a file for one pattern of each group."""


def _list_required_files(folder: Path) -> list[Path]:
    """List the files of a model folder that determine its results: config, weights, tokenizer and code.

    Raises:
        ModelError: The config, the weights or the tokenizer is missing.
    """
    files = _list_identifying_files(folder)
    for patterns in REQUIRED_FILES:
        has_file = any(file.match(pattern) for file in files for pattern in patterns)
        if not has_file:
            raise ModelError(
                f"{str(folder)!r} is not a model folder: it holds no {patterns[0]}; "
                "save a model there with save_pretrained, or give another folder or a hub id"
            )
    return files


def _list_identifying_files(folder: Path) -> list[Path]:
    """Return the files of a folder that may determine a model's results, sorted."""
    files: set[Path] = set()
    for pattern in IDENTITY_FILES:
        files.update(folder.glob(pattern))
    return sorted(files)


def read_model_dtype(model: ModelSettings) -> str:
    """Read the data type of the settings' model. If the settings say `auto`, the files in the model's folder tell it.

    For a hub id it stays `auto`: only loading would show the data type, and the model's revision determines it.
    """
    folder = expand_home(Path(model_name(model)))
    if model.dtype == "auto" and folder.is_dir():
        return _read_folder_dtype(folder)
    return model.dtype


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

    for part in (config, config.get("text_config") or {}):
        dtype = part.get("dtype") or part.get("torch_dtype")
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
            for name in weights.keys():  # noqa: SIM118, no mapping
                stored_dtype = weights.get_slice(name).get_dtype()
                if stored_dtype in STORED_DTYPES:
                    return STORED_DTYPES[stored_dtype]
    return None


def model_name(model: ModelSettings) -> str:
    """Return the folder or hub id of the settings' model; `embedded` is the model in the package.

    A GGUF file is converted to a folder first, unless it was already. Raises ModelError where it cannot be converted.
    """
    if model.name.endswith(GGUF):
        return str(convert_gguf(expand_home(Path(model.name))))
    return str(MODEL) if model.name == "embedded" else model.name


ORIGIN = "gguf.json"
"""The file of a converted model that holds its identity."""
CONVERTER = "toolformer_dag.model.gguf_conversion"
"""The module that runs in a process of its own to convert a file."""
CONVERSION = 1
"""Raise this when the same GGUF file gives other weights or tokens; part of folder names and identities."""


def _get_conversions_folder() -> Path:
    """Return the folder of converted models in the user's cache."""
    return cache_folder() / "models"


def convert_gguf(file: Path) -> Path:
    """Convert a GGUF file to a model folder with safetensors and a tokenizer, unless this was done before.

    If several processes need the folder, one of them converts and the others wait. The folder appears only when it is
    complete.

    Returns:
        The folder, which is in the user's cache and named after the hash of the file.

    Raises:
        ModelError: The file cannot be read or converted.
    """
    try:
        digest = file_hash(file)
        folder = _get_conversions_folder() / f"{digest}-v{CONVERSION}"
        if not folder.is_dir():
            with locked(folder.with_suffix(".lock")):
                if not folder.is_dir():  # another process may have converted it in the meantime
                    _convert(file, digest, folder)
    except OSError as error:
        raise ModelError(
            f"{file} cannot be read or converted: {error}; correct the path, or free disk space"
        ) from error
    return folder


def _convert(file: Path, digest: str, folder: Path) -> None:
    """Convert a GGUF file to a model folder. The folder appears only when it is complete.

    Args:
        file: The GGUF file.
        digest: Its hash.
        folder: The folder to create.

    Raises:
        ModelError: The conversion fails, or the package gguf is missing.
    """
    if find_spec("gguf") is None:
        raise ModelError(
            f"{file} needs the package gguf, which is not there; run `pip install -c constraints.txt -e '.[gguf]'`, "
            "or give a folder with safetensors"
        )

    _log.warning("%s is converted to safetensors once, which may take minutes; they stay in %s", file.name, folder)
    _remove_unfinished(folder)
    building = folder.with_suffix(f".{os.getpid()}.building")
    _run_conversion(file, digest, building)
    replace_folder(folder, building)

    # The conversion notes BOS, the token before texts, if it added one because that clearly lowers the loss.
    bos = read_model_identity(str(folder)).get("bos")
    if bos:
        _log.warning("%s: texts begin with %s, after which they cost clearly less; see model.bos", file.name, bos)


def _remove_unfinished(folder: Path) -> None:
    """Remove what killed runs left of conversions to this folder; their processes may still write there."""
    for unfinished in folder.parent.glob(f"{folder.name}.*.building"):
        shutil.rmtree(unfinished, ignore_errors=True)


def _run_conversion(file: Path, digest: str, folder: Path) -> None:
    """Convert a GGUF file to `folder` in a child process. Raises ModelError with its last line where that fails."""
    # In a child process, because definitions load no torch, and the libraries' progress bars stay off the terminal.
    command = [sys.executable, "-P", "-m", CONVERTER, str(file.absolute()), digest, str(folder)]
    child = subprocess.run(command, capture_output=True, encoding="utf-8", errors="replace")
    if child.returncode:
        error_lines = child.stderr.strip().splitlines()
        reason = error_lines[-1] if error_lines else f"exit {child.returncode}"
        raise ModelError(f"{file} cannot be converted: {reason}; give another GGUF file, or a folder with safetensors")


def format_model_name(model: str) -> str:
    """Return the name of a model for cards: the last part of an absolute path; anything else as it is."""
    return Path(model).name if Path(model).is_absolute() else model
