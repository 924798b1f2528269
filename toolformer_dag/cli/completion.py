"""What the shell offers when a user presses Tab: lanes, profiles and settings of the project in the current folder."""

from collections.abc import Iterator, Mapping
from typing import Any

from toolformer_dag.files import UserError
from toolformer_dag.settings.settings_file import PAPER_TOOLS, known_profiles, load_settings


def lane_names(incomplete: str) -> list[str]:
    """Return the keys of the project's lanes, such as calculator."""
    try:
        lanes = tuple(load_settings().tools)
    except UserError:  # the command will say what is wrong with the file
        lanes = PAPER_TOOLS
    return [name for name in lanes if name.startswith(incomplete)]


def profile_names(incomplete: str) -> list[str]:
    """Return the package's profiles and the project's own."""
    try:
        return [name for name in known_profiles() if name.startswith(incomplete)]
    except UserError:
        return []


def setting_pairs(incomplete: str) -> list[str]:
    """Return `tools.calculator.tau_f=` and all other keys."""
    try:
        return [f"{key}=" for key in _keys(load_settings().model_dump()) if key.startswith(incomplete)]
    except UserError:
        return []


def _keys(table: Mapping[str, Any]) -> Iterator[str]:
    """Yield the keys of settings, those of tables within them after the name of the table: `corpus.first`."""
    for name, value in table.items():
        if isinstance(value, Mapping):
            for key in _keys(value):
                yield f"{name}.{key}"
        else:
            yield name
