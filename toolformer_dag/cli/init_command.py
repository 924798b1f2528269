"""`init`: a project in one command, which asks nothing and replaces no file."""

import json
from collections.abc import Iterator
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
    corpus = list(_corpus(folder))
    models = list(_models(folder))
    values = {
        "{corpus}": f"shards = {json.dumps(corpus, ensure_ascii=False)}" if corpus else '# shards = ["pages"]',
        "{model}": f"name = {json.dumps(models[0], ensure_ascii=False)}" if models else '# name = "gpt2"',
    }
    summary = ""
    for name, template in WRITTEN.items():
        if (folder / name).exists():
            typer.echo(f"{folder / name} is there already and stays as it is")
            continue
        text = files(__package__).joinpath("project_template", template).read_text("utf-8")
        for mark, value in values.items():
            text = text.replace(mark, value)
        write_whole(folder / name, text.encode())
        typer.echo(folder / name)
        if name == SETTINGS:
            shards = ", ".join(corpus) or "no JSON lines or Parquet: a synthetic web is used"
            summary = f"Found {shards}. "
            if models:
                summary += f"The model is {models[0]}. "
    look = f"toolformer-dag run --config {quote(str(folder / SETTINGS))} --first 1"
    typer.echo(f"{summary}Take a first look:\n  {look}")


def _models(folder: Path) -> Iterator[str]:
    """Yield the folders of models, then the GGUF files in the folder and in those below it."""
    yield from sorted(file.parent.name for file in folder.glob("*/config.json"))
    near = [*folder.glob("*.gguf"), *folder.glob("*/*.gguf")]
    files = [path.relative_to(folder) for path in near if path.is_file()]
    yield from sorted(path.as_posix() for path in files if not path.parts[0].startswith("."))


def _corpus(folder: Path) -> Iterator[str]:
    """Yield the names of the entries of `folder` that are files of documents, or folders with such files in them.

    Hidden entries, the lake and folders of models (with a config.json) are skipped.
    """
    from toolformer_dag.computing.shards import DATA, SIDE_FILE

    for entry in sorted(folder.glob("*")):
        if entry.name.startswith((".", "_")) or entry.name == "lake" or (entry / "config.json").exists():
            continue
        below = entry.rglob("*") if entry.is_dir() else [entry]
        if any(path.name.lower().endswith(DATA) and not SIDE_FILE.fullmatch(path.name) for path in below):
            yield entry.name
