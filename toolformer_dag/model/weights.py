"""What can be said of a model without loading it: identity, size, and what is wrong with it. Imports no torch."""

from collections.abc import Iterator, Mapping
from math import prod
from pathlib import Path

from toolformer_dag.errors import UserError
from toolformer_dag.file_hash import file_hash


class ModelError(UserError):
    """A model that cannot be found, read or run. The message names it, the reason and the remedy."""


class OffsetError(UserError):
    """A character at which no token begins. `nearest` is the closest character at which one does."""

    def __init__(self, offset: int, nearest: int) -> None:
        super().__init__(f"no token begins at character {offset}; the nearest token boundary is character {nearest}")
        self.nearest = nearest


SMALL = 20_000_000
"""Parameters under which threads wait for each other longer than they compute: at 2 million, two threads did about
a quarter of what one did."""


def parameters(folder: Path) -> int:
    """Of the model in `folder`, by the headers of its weights; 0 where there is no such folder."""
    from safetensors import safe_open

    total = 0
    for file in folder.glob("*.safetensors"):
        with safe_open(file, "numpy") as weights:
            total += sum(prod(weights.get_slice(name).get_shape()) for name in weights.keys())  # noqa: SIM118, no mapping
    return total


CONTENT = (
    "config.json",
    "model*.safetensors",
    "model.safetensors.index.json",
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.*",
    "merges.txt",
    "spiece.model",
    "*.py",
)


def model_identity(name: str, revision: str | None = None) -> Mapping[str, str]:
    """Hashes of the files that a folder's results depend on, or the id and revision of a model of the hub.

    A hub id without a revision is `main`: pin one where a moved branch must be noticed. Raises ModelError for a path
    that is no model folder. Whether the files fit each other is only known when the model is loaded.
    """
    folder = Path(name).expanduser()
    if folder.is_dir():
        return {file.name: file_hash(file) for file in _files(folder)}
    if _looks_like_path(name):
        raise ModelError(f"model folder {name!r} does not exist; give a folder or the id of a model of the hub")
    return {"id": name, "revision": revision or "main"}


def _looks_like_path(name: str) -> bool:
    return name.startswith((".", "/", "~")) or name.count("/") > 1 or "\\" in name


def _files(folder: Path) -> Iterator[Path]:
    files = sorted({file for pattern in CONTENT for file in folder.glob(pattern)})
    for wanted in ("config.json", "*.safetensors", "tokenizer*"):
        if not any(file.match(wanted) for file in files):
            raise ModelError(
                f"{str(folder)!r} is no model folder: it holds no {wanted}; "
                "save a model there with save_pretrained, or give another folder or a hub id"
            )
    yield from files
