"""What is wrong with settings, in words: the file, the key, the reason, the remedy."""

import difflib
from collections.abc import Iterable, Sequence
from typing import Any, get_args, get_origin

from pydantic import BaseModel, ValidationError

from toolformer_dag.settings.sources import Sources


def explain(sources: Sources, error: ValidationError, model: type[BaseModel]) -> str:
    """One line per mistake: file (or option or variable), key, what is wrong, and what would be right."""
    lines = []
    for item in error.errors():
        key = ".".join(map(str, item["loc"])) or "settings"
        lines.append(f"{sources.origin(item['loc'])}: {key}: {_reason(item['loc'], item['type'], item['msg'], model)}")
    return "\n".join(lines)


def meant(word: str, known: Iterable[str], noun: str) -> str:
    """`did you mean 'k'?`, or `known NOUN: a, b` where nothing is close."""
    known = sorted(known)
    close = difflib.get_close_matches(word, known, 1)
    return f"did you mean {close[0]!r}?" if close else f"known {noun}: {', '.join(known)}"


def _reason(path: Sequence[int | str], kind: str, message: str, model: type[BaseModel]) -> str:
    if kind == "extra_forbidden":
        return f"unknown key; {meant(str(path[-1]), _known_keys(path, model), 'keys')}"
    if kind in ("model_type", "dict_type"):
        return f"must be a table; write [{'.'.join(map(str, path))}] and its keys below it"
    return f"{message.removeprefix('Value error, ')}; correct the value or remove the key"


def _known_keys(path: Sequence[int | str], model: type[BaseModel]) -> list[str]:
    """The keys of the table that holds the last part of `path`."""
    kind: Any = model
    for part in path[:-1]:
        kind = get_args(kind)[1] if get_origin(kind) is dict else kind.model_fields[part].annotation
    return list(kind.model_fields)
