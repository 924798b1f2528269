"""Completions for the shell's Tab key: lanes, profiles and settings of the project in the current folder."""

from collections.abc import Iterator, Mapping
from typing import Any

from toolformer_dag.files import UserError
from toolformer_dag.settings.settings_file import PAPER_TOOLS, list_profile_names, load_settings


def complete_lane_names(incomplete: str) -> list[str]:
    """Return the names of the project's lanes (its tools, such as calculator) that begin with the typed text.

    If the settings file is faulty, the paper's tools are taken, because completion cannot show an error.
    """
    try:
        lanes = tuple(load_settings().tools)
    except UserError:  # the command itself reports a faulty settings file
        lanes = PAPER_TOOLS
    return [name for name in lanes if name.startswith(incomplete)]


def complete_profile_names(incomplete: str) -> list[str]:
    """Return the names of the profiles, built in or of the project, that begin with the typed text."""
    try:
        profiles = list_profile_names()
    except UserError:
        return []
    return [name for name in profiles if name.startswith(incomplete)]


def complete_setting_pairs(incomplete: str) -> list[str]:
    """Return the settings that begin with the typed text, each with a `=`: `tools.calculator.tau_f=`."""
    try:
        settings = load_settings().model_dump()
    except UserError:
        return []
    return [f"{key}=" for key in _iter_dotted_keys(settings) if key.startswith(incomplete)]


def _iter_dotted_keys(nested_table: Mapping[str, Any]) -> Iterator[str]:
    """Yield the key of every value in nested tables. Nested keys are joined by dots, as in `corpus.first`."""
    for name, value in nested_table.items():
        if isinstance(value, Mapping):
            for key in _iter_dotted_keys(value):
                yield f"{name}.{key}"
        else:
            yield name
