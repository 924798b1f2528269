"""Completions for the shell's Tab key: lanes, profiles and settings of the project in the current folder."""

from collections.abc import Iterator, Mapping
from typing import Any

from toolformer_dag.files import UserError
from toolformer_dag.settings.settings_file import PAPER_TOOLS, list_known_profiles, load_settings


def lane_names(incomplete: str) -> list[str]:
    """Return the project's lanes, such as calculator, that begin with the typed text."""
    try:
        lanes = tuple(load_settings().tools)
    except UserError:  # the command itself reports a faulty settings file
        lanes = PAPER_TOOLS
    return [name for name in lanes if name.startswith(incomplete)]


def profile_names(incomplete: str) -> list[str]:
    """Return the profiles, built in or of the project, that begin with the typed text."""
    try:
        profiles = list_known_profiles()
    except UserError:
        return []
    return [name for name in profiles if name.startswith(incomplete)]


def setting_pairs(incomplete: str) -> list[str]:
    """Return the settings that begin with the typed text, as `tools.calculator.tau_f=`."""
    try:
        settings = load_settings().model_dump()
    except UserError:
        return []
    return [f"{key}=" for key in _iter_dotted_keys(settings) if key.startswith(incomplete)]


def _iter_dotted_keys(table: Mapping[str, Any]) -> Iterator[str]:
    """Yield the key of every value; keys of nested tables are joined by a dot, as in `corpus.first`."""
    for name, value in table.items():
        if isinstance(value, Mapping):
            for key in _iter_dotted_keys(value):
                yield f"{name}.{key}"
        else:
            yield name
