"""`init`: write the files of a new project; it asks nothing and replaces no file."""

import json
from collections.abc import Iterator, Sequence
from importlib.resources import files
from pathlib import Path
from shlex import quote
from typing import Annotated

import typer

from toolformer_dag.cli.terminal import path
from toolformer_dag.files import write_whole

SETTINGS = "toolformer.toml"
WRITTEN = {
    SETTINGS: "toolformer.toml",
    "sum_tool.py": "sum_tool.py.txt",
    "sum_tool.txt": "sum_tool.txt",
    ".gitignore": "gitignore.txt",
}
"""A project's files, and the templates that they are written from."""


def init(
    folder: Annotated[Path, typer.Argument(parser=path, help="Folder of the project; made where it is not there.")],
) -> None:
    """Write a commented toolformer.toml, a tool of your own with its prompt, and a .gitignore. Replace no file.

    A corpus that lies in the folder becomes that of the settings, and so does a model: a folder with a config.json, or
    a GGUF file.

    Example: toolformer-dag init mine
    """
    corpus = list(_iter_corpus(folder))
    models = list(_iter_models(folder))
    settings = folder / SETTINGS
    # Says what stands in new settings; settings that are there already stay as they are.
    summary = "" if settings.exists() else _describe_corpus_and_model(corpus, models)
    for name, template in WRITTEN.items():
        _write_unless_there(folder / name, _fill_template(template, corpus, models))
    typer.echo(f"{summary}Take a first look:\n  toolformer-dag run --config {quote(str(settings))} --first 1")


def _write_unless_there(file: Path, text: str) -> None:
    """Write a file and print its name, or say that it is there already."""
    if file.exists():
        typer.echo(f"{file} is there already and stays as it is")
    else:
        write_whole(file, text.encode())
        typer.echo(file)


def _fill_template(template: str, corpus: Sequence[str], models: Sequence[str]) -> str:
    """Return the text of a template, with the corpus and the first model in its settings where there are any."""
    shards_line = f"shards = {json.dumps(corpus, ensure_ascii=False)}" if corpus else '# shards = ["pages"]'
    model_line = f"name = {json.dumps(models[0], ensure_ascii=False)}" if models else '# name = "gpt2"'
    text = files(__package__).joinpath("project_template", template).read_text("utf-8")
    return text.replace("{corpus}", shards_line).replace("{model}", model_line)


def _describe_corpus_and_model(corpus: Sequence[str], models: Sequence[str]) -> str:
    """Return which corpus and model stand in the settings."""
    shards = ", ".join(corpus) or "no JSON lines or Parquet: a synthetic web is used"
    model = f"The model is {models[0]}. " if models else ""
    return f"Found {shards}. {model}"


def _iter_models(folder: Path) -> Iterator[str]:
    """Yield the subfolders that hold a model, then the GGUF files in the folder and its subfolders."""
    yield from sorted(config.parent.name for config in folder.glob("*/config.json"))
    weights = [*folder.glob("*.gguf"), *folder.glob("*/*.gguf")]
    names = [file.relative_to(folder) for file in weights if file.is_file()]
    yield from sorted(name.as_posix() for name in names if not name.parts[0].startswith("."))


def _iter_corpus(folder: Path) -> Iterator[str]:
    """Yield the names of files of documents in the folder, and of its subfolders that hold such files."""
    for entry in sorted(folder.glob("*")):
        if _may_be_corpus(entry) and _has_documents(entry):
            yield entry.name


def _may_be_corpus(entry: Path) -> bool:
    """Return False for hidden entries, the lake, and folders of models."""
    if entry.name.startswith((".", "_")) or entry.name == "lake":  # perhaps a folder that this user may not enter
        return False
    return not (entry / "config.json").exists()


def _has_documents(entry: Path) -> bool:
    """Return whether an entry is a file of documents, or a folder with such a file at any depth."""
    candidates = entry.rglob("*") if entry.is_dir() else [entry]
    return any(_is_named_as_documents(file.name) for file in candidates)


def _is_named_as_documents(name: str) -> bool:
    """Return whether a file is named as JSON lines or Parquet, and not as what is published beside documents."""
    from toolformer_dag.computing.shards import DATA, SIDE_FILE

    return name.lower().endswith(DATA) and not SIDE_FILE.fullmatch(name)
