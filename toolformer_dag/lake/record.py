"""The record beside every output: what it was made from; and the one comparison that decides what is out of date."""

import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

STORES = "stores"
"""The field that names the row stores behind an output; `clean` keeps those."""
PACKAGES = ("toolformer-dag", "polars", "duckdb", "torch", "transformers", "tokenizers")
ABSENT = "(absent)"
SHORT = 60
COMPARED = ("settings", "inputs")
"""The fields of a record that determine rows; versions, commit and time are there for people."""


def record(settings: Mapping[str, Any], inputs: Mapping[str, Any], **facts: Any) -> dict[str, Any]:
    """Return a record. `settings`: what determines the rows beside `inputs` (name -> data version)."""
    return {
        "settings": dict(settings),
        "inputs": dict(inputs),
        "versions": dict(versions()),
        "commit": commit(),
        "written": datetime.now(UTC).isoformat(timespec="seconds"),
        **facts,
    }


@dataclass(frozen=True, slots=True)
class FieldChange:
    """A difference between two records; `field` is a dotted path: "settings.prompt", "inputs.scored_candidates"."""

    field: str
    old: object
    new: object

    def __str__(self) -> str:
        return f"{self.field}: {' -> '.join(shortened_pair(self.old, self.new))}"


def changes(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[FieldChange]:
    """Return what differs in settings, then in inputs, sorted by field. Empty means: up to date.

    `stale`, `--why` and every asset that skips itself ask this function.
    """
    if all(old.get(key, {}) == new.get(key, {}) for key in COMPARED):
        return []
    before = dict(flat({key: old.get(key, {}) for key in COMPARED}))
    after = dict(flat({key: new.get(key, {}) for key in COMPARED}))
    fields = sorted(
        {*before, *after}, key=lambda field: (not field.startswith("settings."), field)
    )  # a person's own first
    changed = [field for field in fields if before.get(field, ABSENT) != after.get(field, ABSENT)]
    return [FieldChange(field, before.get(field, ABSENT), after.get(field, ABSENT)) for field in changed]


def shortened(value: object) -> str:
    """Return the value in at most 60 characters of one line."""
    text = str(value).replace("\n", "\\n")
    return text if len(text) <= SHORT else f"{text[: SHORT - 3]}..."


def shortened_pair(old: object, new: object) -> tuple[str, str]:
    """Return two values in at most 60 characters each; of long texts the place where they begin to differ."""
    if not (isinstance(old, str) and isinstance(new, str)) or max(len(old), len(new)) <= SHORT:
        return shortened(old), shortened(new)
    differing = (place for place, pair in enumerate(zip(old, new, strict=False)) if pair[0] != pair[1])
    same = next(differing, min(len(old), len(new)))
    begin = max(0, same - SHORT // 4)
    dots = "..." if begin else ""
    return shortened(dots + old[begin:]), shortened(dots + new[begin:])


def flat(value: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, object]]:
    """Yield the values of nested tables with their dotted paths."""
    for key, item in value.items():
        if isinstance(item, Mapping):
            yield from flat(item, f"{path}{key}.")
        else:
            yield f"{path}{key}", list(item) if isinstance(item, tuple) else item


@lru_cache(maxsize=1)
def versions() -> Mapping[str, str]:
    """Return the installed versions of the packages that make rows, without importing them."""
    return {package: installed_version(package) for package in PACKAGES}


def installed_version(package: str) -> str:
    """Return the version of a package; `not installed` for one that lies on the path alone, as a checkout may."""
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


@lru_cache(maxsize=1)
def commit() -> str | None:
    """Return the checked-out commit; None where the package was not installed from a checkout."""
    checkout = Path(__file__).resolve().parents[2]
    if not (checkout / ".git").exists():
        return None
    command = ["git", "-C", str(checkout), "rev-parse", "HEAD"]
    try:
        return subprocess.run(command, capture_output=True, check=True, text=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):  # git is not installed: the record says null
        return None
