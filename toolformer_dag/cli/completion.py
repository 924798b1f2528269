"""What the shell offers when a user presses Tab: lanes, profiles and settings of the project in the current folder."""

from toolformer_dag.files import UserError


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
    from toolformer_dag.cli.settings_reference import setting_keys

    named = [(key, told) for key, told in setting_keys() if "NAME" not in key]
    for key, told in setting_keys():
        if key.startswith("tools.NAME."):
            named += [(key.replace("NAME", lane, 1), told) for lane in _lanes()]
    return [(f"{key}=", told) for key, told in named if key.startswith(incomplete)]


def _lanes() -> tuple[str, ...]:
    from toolformer_dag.settings.settings_file import BUILT_IN_TOOLS, load_settings

    try:
        return tuple(load_settings().tools)
    except UserError:
        return BUILT_IN_TOOLS
