"""Write the reference of all settings as Markdown, from their declarations."""

import json
from collections.abc import Iterator
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt
from pydantic.fields import FieldInfo

from toolformer_dag.settings.sections import SettingsTables
from toolformer_dag.settings.setting_types import OUTSIDE_FINGERPRINTS, SettingsTable, tables_in
from toolformer_dag.settings.settings_file import WrittenSettings

KINDS: dict[Any, str] = {
    bool: "true or false",
    int: "integer",
    float: "number",
    str: "text",
    Path: "path",
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


def setting_keys(name: str = "", table: type[SettingsTable] = SettingsTables) -> Iterator[tuple[str, str]]:
    """Yield every key with its description; `tools.NAME.tau_f` stands for the keys of all tools."""
    for key, field in table.model_fields.items():
        path = f"{name}.{key}".lstrip(".")
        if _holds_values(field):
            yield path, field.description or ""
        if (below := _subtable(field)) is not None:
            yield from setting_keys(f"{path}.NAME" if get_origin(field.annotation) is dict else path, below)


def _sections(name: str, table: type[SettingsTable]) -> Iterator[str]:
    rows = [_row(key, field) for key, field in table.model_fields.items() if _holds_values(field)]
    if rows:
        yield "\n".join((HEAD, *rows))
    for key, field in table.model_fields.items():
        if (below := _subtable(field)) is not None:
            path = ".".join(filter(None, (name, key, "NAME" if get_origin(field.annotation) is dict else "")))
            described = field.description if not _holds_values(field) else below.__doc__
            yield f"## `[{path}]`\n\n{described}"
            yield from _sections(path, below)


def _row(key: str, field: FieldInfo) -> str:
    fingerprint = "no" if OUTSIDE_FINGERPRINTS in field.metadata else "yes"
    cells = (f"`{key}`", _kind(field), _default(field), field.description or "", fingerprint)
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


def _subtable(field: FieldInfo) -> type[SettingsTable] | None:
    """Return the table that a key holds, or holds one of per name; a profile repeats them all and is left out."""
    named = get_args(field.annotation)[1:] if get_origin(field.annotation) is dict else ()
    found = [table for kind in (field.annotation, *named) for table in tables_in(kind) if table is not SettingsTables]
    return found[0] if found else None


def _holds_values(field: FieldInfo) -> bool:
    """Whether a value other than a table may be written, as for a threshold that is a number or a table."""
    return _subtable(field) is None or field.default is None


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
    if isinstance(annotation, type) and issubclass(annotation, SettingsTable):
        return KINDS.get(annotation, "table")
    if origin is Annotated:
        return _type(kinds[0])
    if origin in (Union, UnionType):
        return " or ".join(map(_type, kinds))
    if origin is Literal:
        *most, last = map(json.dumps, kinds)
        return f"{', '.join(most)} or {last}"
    if origin is tuple:
        return f"list of {_type(kinds[0])}s"
    if origin is dict:
        return f"table of {_type(kinds[1])}s"
    return _type(kinds[0]) if kinds else KINDS[annotation]


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    default = field.get_default(call_default_factory=True)
    if default is None:
        return "none"
    return f"`{json.dumps(default, default=str)}`"
