"""From all sources to settings.

Later wins: defaults (the paper's), the chosen `[profiles.NAME]`, the file's own sections, variables such as
`TOOLFORMER__TOOLS__CALCULATOR__TAU_F=0.8`, and `--set tools.calculator.tau_f=0.8`. A lane is a section under `[tools]`;
a profile gives values to lanes and adds none.
"""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from pydantic import ValidationError

from toolformer_dag.settings.explained import explain, meant
from toolformer_dag.settings.settings import Settings, Written
from toolformer_dag.settings.sources import BUILT_IN_TOOLS, SettingsError, Sources, Values, read_sources, with_profile
from toolformer_dag.settings.values import Frozen

NAME = re.compile(r"[A-Za-z0-9_]+")
GROUPS = ("ccnet", "training", "evaluation", "warehouse")
"""The groups of the asset graph that are no lanes."""
Validated = TypeVar("Validated", bound=Frozen)


def load_settings(
    file: Path | None = None,
    *,
    profile: str | None = None,
    overrides: Sequence[str] = (),
    shards: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
) -> Settings:
    """Settings of `file` (default: `$TOOLFORMER_CONFIG`, else ./toolformer.toml), with `key.path=value` overrides.

    `profile` and `shards`, where given, win over all other sources. Raises SettingsError, which names the file, option
    or variable, the key and the remedy, for a file that cannot be read, an unknown profile, an unknown key or an
    impossible value, in profiles that are not chosen too. Options of a tool are checked when the tool is loaded.
    """
    sources = read_sources(file, profile, overrides, shards, environment)
    _check_lanes(sources.file, _validated(sources, Written, sources.values))
    root = sources.file.parent
    settings = _validated(sources, Settings, with_profile(sources.file, sources.values) | {"root": root})
    return settings.model_copy(
        update={
            "paths": settings.paths.under(root),
            "model": settings.model.under(root),
            "evaluation": settings.evaluation.under(root),
        }
    )


def _validated(sources: Sources, model: type[Validated], values: Values) -> Validated:
    try:
        return model.model_validate(values)
    except ValidationError as error:
        raise SettingsError(explain(sources, error, model)) from error


def _check_lanes(source: Path, written: Written) -> None:
    """A lane's name is that of its assets; a profile gives values to lanes that there are, or come with the package."""
    for key in written.tools:
        if not NAME.fullmatch(key) or key in GROUPS:
            reason = f"a lane's name has letters, digits and _, and is none of {', '.join(GROUPS)}; rename the section"
            raise SettingsError(f"{source}: tools.{key}: {reason}")
    known = {*BUILT_IN_TOOLS, *written.tools}
    for name, profile in written.profiles.items():
        for key in sorted(profile.tools.keys() - known):
            reason = f"there is no such lane, and a profile adds none; {meant(key, known, 'lanes')}"
            raise SettingsError(f"{source}: profiles.{name}.tools.{key}: {reason}")
