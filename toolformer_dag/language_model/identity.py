"""What determines a model's numbers: the content of its files. Imports no torch."""

from collections.abc import Iterator, Mapping
from pathlib import Path

from toolformer_dag.file_hash import file_hash
from toolformer_dag.language_model.errors import ModelError

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
