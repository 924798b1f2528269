"""Identity and size of a model folder or hub id, without loading it; the cores to run it on. Imports no torch."""

import json
import logging
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from importlib.util import find_spec
from math import prod
from pathlib import Path

from toolformer_dag.files import UserError, changed_unseen, locked, replace_folder
from toolformer_dag.identity import cache_folder, file_hash
from toolformer_dag.settings.call_markers import PAPER_MARKERS, CallMarkers
from toolformer_dag.settings.model_settings import GGUF, ModelSettings
from toolformer_dag.settings.sections import Settings
from toolformer_dag.settings.setting_types import expanded
from toolformer_dag.synthetic import MODEL, SMALL_MODEL

_log = logging.getLogger(__name__)


class ModelError(UserError):
    """A model that cannot be found, read or run. The message names the model, the reason and the remedy."""


class DamagedModel(ModelError):
    """A model whose files hold something else than when they were hashed, under the same size and times."""

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


def cores() -> int:
    """Return the cores this process may use: hardware threads of one core count once, a container's share is kept."""
    allowed = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))
    return max(1, min(len({_core(cpu) for cpu in allowed}), _quota()))


def _core(cpu: int) -> str:
    """The hardware threads that share the core of one of them."""
    file = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
    return file.read_text() if file.is_file() else str(cpu)


def _quota() -> int:
    """Whole cores that a container's limit leaves; a large number where there is none."""
    share, _, period = QUOTA.read_text().partition(" ") if QUOTA.is_file() else ("max", "", "")
    return 1_000_000 if share == "max" else int(share) // int(period)


def is_small(model: ModelSettings) -> bool:
    """Say whether the settings' model lies in a local folder and computes on a single thread."""
    return 0 < parameters(Path(model_name(model))) < SMALL


def parameters(folder: Path) -> int:
    """Count the parameters of a model folder from its safetensors headers; 0 where the folder is missing."""
    from safetensors import safe_open

    total = 0
    for file in folder.glob("*.safetensors"):
        with safe_open(file, "numpy") as weights:
            total += sum(prod(weights.get_slice(name).get_shape()) for name in weights.keys())  # noqa: SIM118, no mapping
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


def model_identity(name: str, revision: str | None = None) -> Mapping[str, str]:
    """Return hashes of the files that determine a folder's results, or the hub's id and revision.

    Of a GGUF file, return its hash, how it is converted, and whether BOS was chosen.
    A hub id without a revision means `main`; pin a revision to notice changes of the branch. Raises ModelError for a
    path that is not a model folder. Not covered: whether the files fit each other.
    """
    if folder := _folder(name):
        if folder.parent == _conversions():
            return dict(json.loads((folder / ORIGIN).read_bytes()))
        return {file.name: file_hash(file) for file in _files(folder)}
    return {"id": name, "revision": revision or "main"}


def is_packaged(identity: Mapping[str, object]) -> bool:
    """Return whether an identity is that of a model of this package; these know the synthetic world alone."""
    return any(model_identity(str(folder)).items() <= identity.items() for folder in (MODEL, SMALL_MODEL))


SHA_256 = re.compile("[0-9a-f]{64}")
CHECKPOINT = "training.json"
"""The sealed record of a model that was finetuned here."""


def checkpoint_folder(settings: Settings, name: str = "finetuned_checkpoint") -> Path:
    """Return the folder of a checkpoint that a round publishes."""
    return settings.paths.local / f"training{settings.rounds.suffix}" / name / "model"


def require_whole(name: str, revision: str | None = None, weights: bool = True) -> None:
    """Read the files of a model that are about to be loaded, `weights` among them or not.

    Raises DamagedModel where a file holds something else than its identity says: the cached hash of an identity tells
    whether rows are stale, not whether the file is whole. A large file of the hub is named after its hash.
    """
    folder = model_folder(name, revision)
    files = _identifying(folder) if folder else []
    loaded = [file for file in files if weights or file.suffix != ".safetensors"]
    file = changed_unseen(loaded) or next(filter(_is_misnamed, loaded), None)
    if file is None:
        return
    if not file.with_name(CHECKPOINT).is_file():
        raise DamagedModel(file)
    os.utime(file)
    raise DamagedCheckpoint(file)


def _is_misnamed(file: Path) -> bool:
    blob = file.resolve().name
    return SHA_256.fullmatch(blob) is not None and not blob.startswith(file_hash(file))


def model_folder(name: str, revision: str | None = None) -> Path | None:
    """Return the folder that holds a model: its own, or that of the hub's cache; None where it was not fetched yet.

    Raises ModelError for a path that leads nowhere.
    """
    from huggingface_hub import try_to_load_from_cache

    if folder := _folder(name):
        return folder
    config = try_to_load_from_cache(name, "config.json", revision=revision)
    return Path(config).parent if isinstance(config, str) else None


MARKERS = "call_markers"
"""The key of tokenizer_config.json that holds the markers of calls where they are not the paper's."""


def checkpoint_markers(name: str, revision: str | None = None) -> CallMarkers | None:
    """Return the markers that a model's files name, the paper's of a checkpoint that names none; None of any other."""
    folder = model_folder(name, revision)
    if folder is None:
        return None
    try:
        written = json.loads((folder / "tokenizer_config.json").read_bytes()).get(MARKERS)
        markers = CallMarkers.model_validate(written) if written else None
    except (OSError, ValueError, AttributeError):
        markers = None
    return PAPER_MARKERS if markers is None and (folder / CHECKPOINT).is_file() else markers


def refuse_other_markers(model: ModelSettings) -> None:
    """Raise ModelError where M was finetuned with other markers than the settings name."""
    markers = checkpoint_markers(model_name(model), model.revision)
    if markers not in (None, model.markers):
        raise ModelError(f"{model.name!r} was finetuned with other markers of calls; set [model] markers to {markers}")


def check_model(name: str, revision: str | None = None) -> None:
    """Raise ModelError at once for a name that is no folder, not cached, and that the hub does not give.

    transformers would ask the hub for each file anew, six times with pauses, before it says so.
    """
    from huggingface_hub import HfApi, try_to_load_from_cache

    if _folder(name):
        return
    try:
        if not isinstance(try_to_load_from_cache(name, "config.json", revision=revision), str):
            HfApi().model_info(name, revision=revision, timeout=HUB_PATIENCE)
    except Exception as error:
        reason = (str(error) or repr(error)).strip().splitlines()[0]
        raise ModelError(
            f"there is no folder {name!r}, and the hub does not give a model of that name ({reason}); correct the "
            "name, log in with `hf auth login`, or try again with a connection"
        ) from error


def _folder(name: str) -> Path | None:
    """Return the folder of a model, None for a hub id. Raises UserError for a path that leads nowhere."""
    folder = expanded(Path(name))
    if name.endswith(GGUF):
        return converted(folder)
    if folder.is_dir():
        return folder
    if name.startswith((".", "/", "~")) or name.count("/") > 1 or "\\" in name:
        raise ModelError(f"model folder {name!r} does not exist; give a model folder or a hub id")
    return None


def _files(folder: Path) -> Iterator[Path]:
    files = _identifying(folder)
    for required in (("config.json",), ("*.safetensors",), ("tokenizer*", "*.model")):
        if not any(file.match(pattern) for file in files for pattern in required):
            raise ModelError(
                f"{str(folder)!r} is not a model folder: it holds no {required[0]}; "
                "save a model there with save_pretrained, or give another folder or a hub id"
            )
    yield from files


def _identifying(folder: Path) -> list[Path]:
    return sorted({file for pattern in IDENTITY_FILES for file in folder.glob(pattern)})


def model_dtype(model: ModelSettings) -> str:
    """Return the data type of the settings' model: that of the folder's checkpoint for `auto`.

    `auto` stays where only loading would show it: for a hub id, whose revision then determines it.
    """
    folder = expanded(Path(model_name(model)))
    return _checkpoint_dtype(folder) if model.dtype == "auto" and folder.is_dir() else model.dtype


def _checkpoint_dtype(folder: Path) -> str:
    """Return the data type that config.json names, else that of the first floating-point weights."""
    from safetensors import safe_open

    try:
        config = json.loads((folder / "config.json").read_bytes())
    except (OSError, ValueError) as error:
        raise ModelError(f"{folder / 'config.json'} cannot be read: {error}; save the model again") from error
    for part in (config, config.get("text_config") or {}):
        named = part.get("dtype") or part.get("torch_dtype")
        if named:
            return str(named)
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, "numpy") as weights:
            kinds = [weights.get_slice(name).get_dtype() for name in weights.keys()]  # noqa: SIM118, no mapping
        for kind in kinds:
            if kind in STORED_DTYPES:
                return STORED_DTYPES[kind]
    return "float32"


def model_name(model: ModelSettings) -> str:
    """Return the folder or id of the settings' model; `embedded` is the model in the package.

    Of a GGUF file, return the folder that it is converted to. Raises ModelError.
    """
    if model.name.endswith(GGUF):
        return str(converted(expanded(Path(model.name))))
    return str(MODEL) if model.name == "embedded" else model.name


ORIGIN = "gguf.json"
"""The file of a converted model that holds its identity."""
CONVERTER = "toolformer_dag.model.gguf_conversion"
CONVERSION = 1
"""Raise this when the same GGUF file gives other weights or tokens; part of folder names and identities."""


def _conversions() -> Path:
    return cache_folder() / "models"


def converted(file: Path) -> Path:
    """Return the folder of safetensors and tokenizer that a GGUF file is converted to; convert it where there is none.

    The folder is named after the file's content and lies in `models` of the cache. It appears only when complete; one
    process converts, others wait. Raises ModelError.
    """
    try:
        digest = file_hash(file)
        folder = _conversions() / f"{digest}-v{CONVERSION}"
        with nullcontext() if folder.is_dir() else locked(folder.with_suffix(".lock")):
            if not folder.is_dir():
                _convert(file, digest, folder)
    except OSError as error:
        raise ModelError(
            f"{file} cannot be read or converted: {error}; correct the path, or free disk space"
        ) from error
    return folder


def _convert(file: Path, digest: str, folder: Path) -> None:
    if find_spec("gguf") is None:
        raise ModelError(
            f"{file} needs the package gguf, which is not there; run `pip install -c constraints.txt -e '.[gguf]'`, "
            "or give a folder with safetensors"
        )
    _log.warning("%s is converted to safetensors once, which may take minutes; they stay in %s", file.name, folder)
    for unfinished in folder.parent.glob(f"{folder.name}.*.building"):
        shutil.rmtree(unfinished, ignore_errors=True)  # of a run that was killed, whose process may still write there
    fresh = folder.with_suffix(f".{os.getpid()}.building")
    # a process of its own: definitions load no torch, and the libraries' bars stay off the terminal
    command = [sys.executable, "-P", "-m", CONVERTER, str(file.absolute()), digest, str(fresh)]
    child = subprocess.run(command, capture_output=True, encoding="utf-8", errors="replace")
    if child.returncode:
        reason = (child.stderr.strip().splitlines() or [f"exit {child.returncode}"])[-1]
        raise ModelError(f"{file} cannot be converted: {reason}; give another GGUF file, or a folder with safetensors")
    replace_folder(folder, fresh)
    if bos := model_identity(str(folder)).get("bos"):
        _log.warning("%s: texts begin with %s, after which they cost clearly less; see model.bos", file.name, bos)


def folder_name(model: str) -> str:
    """Return what a card calls a model: a folder by its last name alone, anything else as it is."""
    return Path(model).name if Path(model).is_absolute() else model
