"""What the shell offers when a user presses Tab: lanes, profiles and settings of the project in the current folder."""

from collections.abc import Iterator
from typing import get_args, get_origin

from pydantic.fields import FieldInfo

from toolformer_dag.files import UserError
from toolformer_dag.settings.sections import SettingsTables
from toolformer_dag.settings.setting_types import SettingsTable, tables_in


def lane_names(incomplete: str) -> list[str]:
    """Return the keys of the project's lanes, such as calculator."""
    return [name for name in _lanes() if name.startswith(incomplete)]


def profile_names(incomplete: str) -> list[str]:
    """Return the package's profiles and the project's own."""
    from toolformer_dag.settings.settings_file import known_profiles

    try:
        return [name for name in known_profiles() if name.startswith(incomplete)]
    except UserError:  # the command will say what is wrong with the file
        return []


def setting_pairs(incomplete: str) -> list[tuple[str, str]]:
    """Return `tools.calculator.tau_f=` and all other keys, each with its meaning."""
    named = [(key, told) for key, told in setting_keys() if "NAME" not in key]
    for key, told in setting_keys():
        if key.startswith("tools.NAME."):
            named += [(key.replace("NAME", lane, 1), told) for lane in _lanes()]
    return [(f"{key}=", told) for key, told in named if key.startswith(incomplete)]


def setting_keys(name: str = "", table: type[SettingsTable] = SettingsTables) -> Iterator[tuple[str, str]]:
    """Yield every key with its description; `tools.NAME.tau_f` stands for the keys of all tools."""
    for key, field in table.model_fields.items():
        path = f"{name}.{key}".lstrip(".")
        if holds_values(field):
            yield path, field.description or ""
        if (below := subtable(field)) is not None:
            yield from setting_keys(f"{path}.NAME" if get_origin(field.annotation) is dict else path, below)


def subtable(field: FieldInfo) -> type[SettingsTable] | None:
    """Return the table that a key holds, or holds one of per name; a profile repeats them all and is left out."""
    named = get_args(field.annotation)[1:] if get_origin(field.annotation) is dict else ()
    found = [table for kind in (field.annotation, *named) for table in tables_in(kind) if table is not SettingsTables]
    return found[0] if found else None


def holds_values(field: FieldInfo) -> bool:
    """Return whether a value other than a table may be written, as for a threshold that is a number or a table."""
    return subtable(field) is None or field.default is None


def _lanes() -> tuple[str, ...]:
    from toolformer_dag.settings.settings_file import BUILT_IN_TOOLS, load_settings

    try:
        return tuple(load_settings().tools)
    except UserError:
        return BUILT_IN_TOOLS
