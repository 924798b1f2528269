"""Write the reference of all settings as Markdown, from their declarations."""

import json
from collections.abc import Iterator
from pathlib import Path
from types import NoneType
from typing import Any, Literal, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from toolformer_dag.settings.sections import OUTSIDE_FINGERPRINTS, SettingsTable, SettingsTables
from toolformer_dag.settings.settings_file import WrittenSettings

KINDS: dict[Any, str] = {
    bool: "true or false",
    int: "integer",
    float: "number",
    str: "text",
    Path: "path",
    SettingsTables: "table",
}
BOUNDS = {Ge: ("ge", ">="), Gt: ("gt", ">"), Le: ("le", "<="), Lt: ("lt", "<")}
HEAD = """\
| key | type | default | what it does | fingerprint |
| --- | --- | --- | --- | --- |"""


def settings_reference() -> str:
    """Return the keys outside of sections, then a heading and a table per section of toolformer.toml.

    The column `fingerprint` says "yes" where a new value makes stored rows or checkpoints out of date.
    """
    return "\n\n".join(_sections("", WrittenSettings)) + "\n"


def _sections(name: str, table: type[SettingsTable]) -> Iterator[str]:
    rows = [_row(key, field) for key, field in table.model_fields.items() if _subtable(field) is None]
    if rows:
        yield "\n".join((HEAD, *rows))
    for key, field in table.model_fields.items():
        if (below := _subtable(field)) is not None:
            path = ".".join(filter(None, (name, key, "NAME" if get_origin(field.annotation) is dict else "")))
            yield f"## `[{path}]`\n\n{field.description}"
            yield from _sections(path, below)


def _row(key: str, field: FieldInfo) -> str:
    fingerprint = "no" if OUTSIDE_FINGERPRINTS in field.metadata else "yes"
    cells = (f"`{key}`", _kind(field), _default(field), field.description or "", fingerprint)
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


def _subtable(field: FieldInfo) -> type[SettingsTable] | None:
    """Return the table that a key holds, or holds one of per name; a profile repeats them all and is left out."""
    for kind in (field.annotation, *get_args(field.annotation)):
        if isinstance(kind, type) and issubclass(kind, SettingsTable) and kind is not SettingsTables:
            return kind
    return None


def _kind(field: FieldInfo) -> str:
    bounds = [
        f"{sign} {getattr(bound, name):,}"
        for bound in field.metadata
        for kind, (name, sign) in BOUNDS.items()
        if isinstance(bound, kind)
    ]
    return " ".join((_type(field.annotation), " and ".join(bounds))).strip()


def _type(annotation: Any) -> str:
    kinds = [kind for kind in get_args(annotation) if kind not in (NoneType, Ellipsis)]
    origin = get_origin(annotation)
    if origin is Literal:
        *most, last = map(json.dumps, kinds)
        return f"{', '.join(most)} or {last}"
    if origin is tuple:
        return f"list of {_type(kinds[0])}s"
    if origin is dict:
        return f"table of {_type(kinds[1])}s"
    return _type(kinds[0]) if kinds else KINDS[annotation]


def _default(field: FieldInfo) -> str:
    default = field.get_default(call_default_factory=True)
    if default is None:
        return "none"
    assert default is not PydanticUndefined, "the keys of a settings file all have a default"
    return f"`{json.dumps(default, default=str)}`"
