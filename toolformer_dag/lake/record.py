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
"""The packages whose versions stand in a record."""
ABSENT = "(absent)"
"""What a FieldChange shows for a field that one of the two records lacks."""
SHORT = 60
"""The most characters of a value that people are shown."""
COMPARED = ("settings", "inputs")
"""The fields of a record that determine rows; versions, commit and time are there for people."""


def record(settings: Mapping[str, Any], inputs: Mapping[str, Any], **facts: Any) -> dict[str, Any]:
    """Make the record of an output that is written now.

    It also holds the versions of PACKAGES, the git commit and the time (UTC).

    Args:
        settings: What determines the rows, apart from the inputs.
        inputs: What the output is made from: the version of the data, by name.
        facts: Further fields, such as STORES, that do not count when records are compared.
    """
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
    """A difference between two records, as text `settings.tau_f: 0.5 -> 0.8`.

    - `field`: a dotted path, such as "settings.prompt" or "inputs.scored_candidates"
    - `old`, `new`: the two values; ABSENT where a record has no such field
    """

    field: str
    old: object
    new: object

    def __str__(self) -> str:
        old, new = shorten_pair(self.old, self.new)
        return f"{self.field}: {old} -> {new}"


def changes(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[FieldChange]:
    """Return the settings that differ between two records, then the inputs, each sorted by field."""
    if all(old.get(field, {}) == new.get(field, {}) for field in COMPARED):
        return []
    return _list_changed_fields(_collect_compared_values(old), _collect_compared_values(new))


def _list_changed_fields(old: Mapping[str, object], new: Mapping[str, object]) -> list[FieldChange]:
    """List the fields whose values differ: settings first, then inputs.

    Args:
        old: Values by dotted path, such as "settings.tau_f".
        new: Other values in the same form.
    """
    changed = []
    for field in sorted(old.keys() | new.keys(), key=_sort_settings_first):
        old_value = old.get(field, ABSENT)
        new_value = new.get(field, ABSENT)
        if old_value != new_value:
            changed.append(FieldChange(field, old_value, new_value))
    return changed


def _sort_settings_first(field: str) -> tuple[bool, str]:
    """Return the sort key that puts settings, which people change themselves, before inputs."""
    is_input = not field.startswith("settings.")
    return is_input, field


def _collect_compared_values(record: Mapping[str, Any]) -> dict[str, object]:
    """Return the settings and inputs of a record by dotted path, such as "settings.tau_f"."""
    return dict(flat({field: record.get(field, {}) for field in COMPARED}))


def shortened(value: object) -> str:
    """Return the value in at most SHORT characters of one line; `...` stands for what is left out."""
    text = str(value).replace("\n", "\\n")
    if len(text) <= SHORT:
        return text
    return f"{text[: SHORT - 3]}..."


def shorten_pair(old: object, new: object) -> tuple[str, str]:
    """Shorten two values to at most SHORT characters each.

    Long texts are cut in such a way that their first difference is shown.
    """
    if isinstance(old, str) and isinstance(new, str):
        begin = _find_first_shown_character(old, new)
        return _shorten_from(begin, old), _shorten_from(begin, new)
    return shortened(old), shortened(new)


def _find_first_shown_character(old: str, new: str) -> int:
    """Find where to start showing two texts, so that their first difference is seen.

    Returns:
        A character offset shortly before the first difference, or 0 if both texts are short.
    """
    if max(len(old), len(new)) <= SHORT:
        return 0

    # One text may begin with the other.
    first_difference = min(len(old), len(new))
    for offset, (old_character, new_character) in enumerate(zip(old, new, strict=False)):
        if old_character != new_character:
            first_difference = offset
            break

    return max(0, first_difference - SHORT // 4)


def _shorten_from(begin: int, text: str) -> str:
    """Return a text from the character offset `begin` on, in at most SHORT characters; `...` marks what is cut."""
    dots = "..." if begin else ""
    return shortened(dots + text[begin:])


def flat(value: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, object]]:
    """Flatten nested mappings. Tuples become lists, as in JSON.

    Yields:
        The dotted path and the value of each innermost field.

    Example:
        {"tool": {"tau_f": 0.5, "names": ("a",)}} gives ("tool.tau_f", 0.5) and ("tool.names", ["a"]).
    """
    for key, item in value.items():
        if isinstance(item, Mapping):
            yield from flat(item, f"{path}{key}.")
        elif isinstance(item, tuple):
            yield f"{path}{key}", list(item)
        else:
            yield f"{path}{key}", item


@lru_cache(maxsize=1)
def versions() -> Mapping[str, str]:
    """Return the installed versions of PACKAGES, without importing them; once per process."""
    return {package: get_installed_version(package) for package in PACKAGES}


def get_installed_version(package: str) -> str:
    """Return the installed version of a package, else "not installed"."""
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


@lru_cache(maxsize=1)
def commit() -> str | None:
    """Return the hash of the git commit that this package runs from, read once per process.

    Returns:
        None if there is no git checkout, or git is not installed or fails.
    """
    checkout = Path(__file__).resolve().parents[2]
    if not (checkout / ".git").exists():
        return None

    command = ["git", "-C", str(checkout), "rev-parse", "HEAD"]
    try:
        return subprocess.run(command, capture_output=True, check=True, text=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None
