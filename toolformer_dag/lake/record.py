"""The record beside every output: what it was made from; and the one comparison that decides what is out of date."""

import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

STORES_FIELD = "stores"
"""The field that names the row stores behind an output; `clean` keeps those."""
PACKAGES = ("toolformer-dag", "polars", "duckdb", "torch", "transformers", "tokenizers")
"""The packages whose versions stand in a record."""
ABSENT = "(absent)"
"""What a FieldChange shows for a field that one of the two records lacks."""
MAX_SHOWN_CHARACTERS = 60
"""The most characters of a value that people are shown."""
COMPARED_FIELDS = ("settings", "inputs")
"""The fields of a record that determine rows; versions, commit and time are there for people."""


def build_record(settings: Mapping[str, Any], inputs: Mapping[str, Any], **extra_fields: Any) -> dict[str, Any]:
    """Make the record of an output that is written now.

    It also holds the versions of PACKAGES, the git commit and the time (UTC).

    Args:
        settings: What determines the rows, apart from the inputs.
        inputs: The data that the output is made from: its version, by name.
        extra_fields: Further fields, such as STORES_FIELD, that do not count when records are compared.
    """
    return {
        "settings": dict(settings),
        "inputs": dict(inputs),
        "versions": dict(get_package_versions()),
        "commit": find_git_commit(),
        "written": datetime.now(UTC).isoformat(timespec="seconds"),
        **extra_fields,
    }


@dataclass(frozen=True, slots=True)
class FieldChange:
    """A difference between two records. Its text is such as "settings.tau_f: 0.5 -> 0.8".

    Attributes:
        field_path: The dotted path of the field, such as "settings.prompt" or "inputs.scored_candidates".
        old_value: The value in the old record, or ABSENT if that record has no such field.
        new_value: The value in the new record, or ABSENT.
    """

    field_path: str
    old_value: object
    new_value: object

    def __str__(self) -> str:
        old_text, new_text = shorten_pair(self.old_value, self.new_value)
        return f"{self.field_path}: {old_text} -> {new_text}"


def list_record_changes(old_record: Mapping[str, Any], new_record: Mapping[str, Any]) -> list[FieldChange]:
    """List the settings that differ between two records, then the inputs, each sorted by their path.

    A record says what an output was made from. If nothing differs, the output is up to date.
    """
    # Mostly nothing differs, which this finds out faster.
    are_equal = all(old_record.get(field, {}) == new_record.get(field, {}) for field in COMPARED_FIELDS)
    if are_equal:
        return []

    old_values_by_path = _collect_compared_values(old_record)
    new_values_by_path = _collect_compared_values(new_record)
    return _list_changed_fields(old_values_by_path, new_values_by_path)


def _list_changed_fields(
    old_values_by_path: Mapping[str, object], new_values_by_path: Mapping[str, object]
) -> list[FieldChange]:
    """List the fields whose values differ: settings first, then inputs.

    Args:
        old_values_by_path: The old values by dotted path, such as "settings.tau_f".
        new_values_by_path: The new values in the same form.
    """
    all_paths = old_values_by_path.keys() | new_values_by_path.keys()

    field_changes = []
    for field_path in sorted(all_paths, key=_build_sort_key):
        old_value = old_values_by_path.get(field_path, ABSENT)
        new_value = new_values_by_path.get(field_path, ABSENT)
        if old_value != new_value:
            field_changes.append(FieldChange(field_path, old_value, new_value))
    return field_changes


def _build_sort_key(field_path: str) -> tuple[bool, str]:
    """Return a sort key that puts settings, which people change themselves, before inputs."""
    is_input = not field_path.startswith("settings.")
    return is_input, field_path


def _collect_compared_values(record: Mapping[str, Any]) -> dict[str, object]:
    """Return the settings and inputs of a record by dotted path, such as "settings.tau_f"."""
    compared_fields = {field: record.get(field, {}) for field in COMPARED_FIELDS}
    return dict(iter_flat_fields(compared_fields))


def shorten_value(value: object) -> str:
    """Return a value as one line of at most MAX_SHOWN_CHARACTERS. A longer text is cut and ends with "..."."""
    text = str(value).replace("\n", "\\n")
    if len(text) <= MAX_SHOWN_CHARACTERS:
        return text
    return f"{text[: MAX_SHOWN_CHARACTERS - 3]}..."


def shorten_pair(old_value: object, new_value: object) -> tuple[str, str]:
    """Shorten two values to at most MAX_SHOWN_CHARACTERS each.

    Two long texts are cut in such a way that their first difference is shown.
    """
    if isinstance(old_value, str) and isinstance(new_value, str):
        first_offset = _find_first_shown_offset(old_value, new_value)
        return _shorten_from(first_offset, old_value), _shorten_from(first_offset, new_value)

    return shorten_value(old_value), shorten_value(new_value)


def _find_first_shown_offset(old_text: str, new_text: str) -> int:
    """Find where to start showing two texts, so that their first difference is seen.

    Returns:
        A character offset shortly before the first difference, or 0 if both texts are short.
    """
    longer_length = max(len(old_text), len(new_text))
    if longer_length <= MAX_SHOWN_CHARACTERS:
        return 0

    # If one text begins with the other, they first differ where the shorter one ends.
    first_difference = min(len(old_text), len(new_text))
    for offset, (old_character, new_character) in enumerate(zip(old_text, new_text, strict=False)):
        if old_character != new_character:
            first_difference = offset
            break

    # Show some characters before the difference, too.
    return max(0, first_difference - MAX_SHOWN_CHARACTERS // 4)


def _shorten_from(first_offset: int, text: str) -> str:
    """Return a text from a character offset on, as one line of at most MAX_SHOWN_CHARACTERS.

    "..." stands for what is left out before and after it.
    """
    leading_dots = "..." if first_offset > 0 else ""
    return shorten_value(leading_dots + text[first_offset:])


def iter_flat_fields(nested_mapping: Mapping[str, Any], path_prefix: str = "") -> Iterator[tuple[str, object]]:
    """Flatten nested mappings. Tuples become lists, as in JSON.

    Yields:
        The dotted path and the value of each innermost field.

    Example:
        {"tool": {"tau_f": 0.5, "names": ("a",)}} gives ("tool.tau_f", 0.5) and ("tool.names", ["a"]).
    """
    for key, value in nested_mapping.items():
        field_path = f"{path_prefix}{key}"
        if isinstance(value, Mapping):
            yield from iter_flat_fields(value, f"{field_path}.")
        elif isinstance(value, tuple):
            yield field_path, list(value)
        else:
            yield field_path, value


@lru_cache(maxsize=1)
def get_package_versions() -> Mapping[str, str]:
    """Return the installed version of each of PACKAGES. They are read once per process, without an import."""
    return {package: get_installed_version(package) for package in PACKAGES}


def get_installed_version(package: str) -> str:
    """Return the installed version of a package, or "not installed"."""
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


@lru_cache(maxsize=1)
def find_git_commit() -> str | None:
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
