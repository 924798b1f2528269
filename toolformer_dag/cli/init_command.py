"""`init`: write the files of a new project; it asks nothing and replaces no file."""

import json
from collections.abc import Iterator, Sequence
from importlib.resources import files
from pathlib import Path
from shlex import quote
from typing import Annotated

import typer

from toolformer_dag.cli.terminal import path
from toolformer_dag.files import write_file_atomically

SETTINGS_FILE_NAME = "toolformer.toml"
TEMPLATE_BY_FILE_NAME = {
    SETTINGS_FILE_NAME: "toolformer.toml",
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
    corpus_names = list(_iter_corpus_names(folder))
    model_names = list(_iter_model_names(folder))
    settings_file = folder / SETTINGS_FILE_NAME

    # The summary says what stands in new settings. Settings that are there already stay as they are.
    has_settings = settings_file.exists()
    summary = "" if has_settings else _describe_corpus_and_model(corpus_names, model_names)

    for file_name, template_name in TEMPLATE_BY_FILE_NAME.items():
        text = _fill_template(template_name, corpus_names, model_names)
        _write_unless_exists(folder / file_name, text)
    typer.echo(f"{summary}Take a first look:\n  toolformer-dag run --config {quote(str(settings_file))} --first 1")


def _write_unless_exists(file: Path, text: str) -> None:
    """Write a file and print its path, or print that it is there already and stays."""
    if file.exists():
        typer.echo(f"{file} is there already and stays as it is")
    else:
        write_file_atomically(file, text.encode())
        typer.echo(file)


def _fill_template(template_name: str, corpus_names: Sequence[str], model_names: Sequence[str]) -> str:
    """Return the text of a template, in whose settings the corpus and the model of the project's folder are filled in.

    Args:
        template_name: The template's file name in `project_template`.
        corpus_names: The files and folders of documents. If there are none, the setting stays a comment.
        model_names: The models, of which the first is taken. If there are none, the setting stays a comment.
    """
    shards_line = '# shards = ["pages"]'
    if corpus_names:
        shards_line = f"shards = {json.dumps(corpus_names, ensure_ascii=False)}"

    model_line = '# name = "gpt2"'
    if model_names:
        model_line = f"name = {json.dumps(model_names[0], ensure_ascii=False)}"

    template = files(__package__).joinpath("project_template", template_name).read_text("utf-8")
    return template.replace("{corpus}", shards_line).replace("{model}", model_line)


def _describe_corpus_and_model(corpus_names: Sequence[str], model_names: Sequence[str]) -> str:
    """Return a text that says which corpus and which model the new settings name. It ends with a space."""
    corpus = ", ".join(corpus_names) or "no JSON lines or Parquet: a synthetic web is used"
    model_sentence = f"The model is {model_names[0]}. " if model_names else ""
    return f"Found {corpus}. {model_sentence}"


def _iter_model_names(folder: Path) -> Iterator[str]:
    """Yield the names of the models in a folder: subfolders with a config.json, then GGUF files, each sorted.

    GGUF files may also lie in subfolders that are not hidden.
    """
    yield from sorted(config_file.parent.name for config_file in folder.glob("*/config.json"))

    weight_files = [*folder.glob("*.gguf"), *folder.glob("*/*.gguf")]
    relative_paths = [file.relative_to(folder) for file in weight_files if file.is_file()]
    visible_paths = [relative for relative in relative_paths if not relative.parts[0].startswith(".")]
    yield from sorted(relative.as_posix() for relative in visible_paths)


def _iter_corpus_names(folder: Path) -> Iterator[str]:
    """Yield the names of a folder's entries that hold documents: files, and subfolders with such files."""
    for entry in sorted(folder.glob("*")):
        if _is_corpus_candidate(entry) and _has_document_files(entry):
            yield entry.name


def _is_corpus_candidate(entry_path: Path) -> bool:
    """Return whether documents may lie here: not in a hidden entry, the project's lake, or a model's folder."""
    # The name is checked first, since this user may not be allowed to look into the folder.
    if entry_path.name.startswith((".", "_")) or entry_path.name == "lake":
        return False
    return not (entry_path / "config.json").exists()


def _has_document_files(entry_path: Path) -> bool:
    """Return whether an entry is a file of documents, or a folder with such a file at any depth."""
    candidates = entry_path.rglob("*") if entry_path.is_dir() else [entry_path]
    return any(_is_document_file_name(file.name) for file in candidates)


def _is_document_file_name(file_name: str) -> bool:
    """Return whether a file is named as JSON lines or Parquet.

    Names of files that are published beside documents, and hold none, do not count.
    """
    from toolformer_dag.computing.shards import DOCUMENT_FILE_ENDINGS, SIDE_FILE_PATTERN

    return file_name.lower().endswith(DOCUMENT_FILE_ENDINGS) and not SIDE_FILE_PATTERN.fullmatch(file_name)
