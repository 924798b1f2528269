"""What changed between two records, field by field: the answer to "why is this stale?"."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

ABSENT = "(not there)"
EXPLAINED = ("settings", "inputs")
"""The fields of a record that determine rows; versions, commit and time are not compared."""


@dataclass(frozen=True, slots=True)
class FieldChange:
    """`field` is a dotted path: "settings.prompt", "inputs.scored_candidates"."""

    field: str
    old: object
    new: object

    def __str__(self) -> str:
        return f"{self.field}: {_short(self.old)} -> {_short(self.new)}"


def drift(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[FieldChange]:
    """The changes from record `old` to record `new` in settings and inputs, in order of the fields' names."""
    one = dict(_flat({key: old.get(key, {}) for key in EXPLAINED}))
    other = dict(_flat({key: new.get(key, {}) for key in EXPLAINED}))
    changed = [field for field in sorted({*one, *other}) if one.get(field, ABSENT) != other.get(field, ABSENT)]
    return [FieldChange(field, one.get(field, ABSENT), other.get(field, ABSENT)) for field in changed]


def _flat(value: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, object]]:
    for key, item in value.items():
        if isinstance(item, Mapping):
            yield from _flat(item, f"{path}{key}.")
        else:
            yield f"{path}{key}", list(item) if isinstance(item, tuple) else item


def _short(value: object) -> str:
    text = str(value).replace("\n", "\\n")
    return text if len(text) <= 60 else f"{text[:57]}..."
