"""Load settings from all sources and explain what is wrong with them.

Later wins: defaults (the paper's), the chosen `[profiles.NAME]`, the file's own sections, variables such as
`TOOLFORMER__TOOLS__CALCULATOR__TAU_F=0.8`, `--set tools.calculator.tau_f=0.8`, `--profile` and `--shards`. A section
under `[tools]` makes a lane; a profile gives values to lanes and adds none.
"""

import os
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, get_args, get_origin

from pydantic import Field, ValidationError
from pydantic_core import ErrorDetails

from toolformer_dag.settings.sections import Settings, SettingsTables
from toolformer_dag.settings.servers import ServerSettings, add_server_lanes
from toolformer_dag.settings.setting_types import (
    SettingsError,
    Unfingerprinted,
    expand_home,
    explain_validation_error,
    list_tables_in,
    suggest_name,
    to_printable,
)
from toolformer_dag.settings.tool_settings import FORM_MARKS

VARIABLE_PREFIX = "TOOLFORMER__"
"""Begins the names of variables that hold a setting."""
PROFILES = Path(__file__).parents[1] / "profiles.toml"
"""The file of the package's profiles."""
PAPER_TOOLS = ("calculator", "calendar", "wiki_search", "question_answering", "machine_translation")
"""The tools of the paper, which have lanes if the settings name no tool."""
MAX_TABLE_DEPTH = 20
"""Levels of tables and lists; deeper values would exhaust the stack of whatever copies or prints them."""
KEY_PATH_BY_OPTION = {"profile": ["profile"], "shards": ["corpus", "shards"]}
"""The keys of the settings that the options --profile and --shards set."""
PAIR_REMEDY = "write key.path=value, as in tools.calculator.tau_f=0.8"
"""The remedy for an option that gives no key and value."""


class WrittenSettings(SettingsTables):
    """Hold what all sources say together, before the chosen profile becomes part of it."""

    profile: Unfingerprinted[str] = Field(
        "embedded", description="Profile whose values hold where the file has none: embedded, gpt2, gptj, or your own."
    )
    profiles: Unfingerprinted[dict[str, SettingsTables]] = Field(
        default_factory=dict, description="Your own profiles: [profiles.NAME.SECTION] holds keys of that section."
    )
    servers: Unfingerprinted[dict[str, ServerSettings]] = Field(
        default_factory=dict, description="One table per MCP server; each of its tools that is listed has a lane."
    )


class Override(NamedTuple):
    """A value that an option of the command line or an environment variable gives. It wins over the settings file."""

    origin: str
    """The option or variable, for messages: `--set tools.calculator.tau_f`."""
    values: Mapping[str, Any]
    """The value, in its tables: `{"tools": {"calculator": {"tau_f": 0.8}}}`."""


def _build_override(origin: str, key_path: Sequence[str], value: Any) -> Override:
    """Build the override that sets the value at a path of keys.

    Example:
        The path ["tools", "qa", "k"] and the value 3 become {"tools": {"qa": {"k": 3}}}.

    Args:
        origin: The option or variable that gives the value, for messages.
        key_path: The keys of the tables around the value, and its own key.
        value: The value.

    Raises:
        SettingsError: A part of the path is empty, the path is too long, or the value can be no setting.
    """
    if not all(key_path):
        raise SettingsError(f"{origin}: a part of the key is empty; {PAIR_REMEDY}")
    if len(key_path) > MAX_TABLE_DEPTH:
        raise SettingsError(f"{origin}: the key has {len(key_path)} parts, and no setting has as many; {PAIR_REMEDY}")

    nested_value = value
    for key in reversed(key_path):
        nested_value = {key: nested_value}

    _refuse_unusable_value(origin, nested_value)
    return Override(origin, nested_value)


class Sources(NamedTuple):
    """The sources of settings, kept so that a message can name the one that gave a wrong value."""

    overrides: Sequence[Override]
    """The options and variables. If two set the same key, the first one wins."""
    file_name: str
    """The settings file, as messages show it."""

    def find_origin(self, key_path: Sequence[str]) -> str:
        """Find the option, variable or file that gives the value at a path of keys.

        Returns:
            The source as messages name it, such as "--set tools.qa.k". It is the file if no option or variable sets
            the value.
        """
        for override in self.overrides:
            if _has_value_at(override.values, key_path):
                return override.origin
        return self.file_name


def _has_value_at(nested_table: Any, key_path: Sequence[str]) -> bool:
    """Check whether a table of tables sets something at a path of keys.

    Example:
        {"a": {"b": 1}} has a value at ["a"] and at ["a", "b"], but not at ["a", "c"]. {"a": 1} has one at ["a", "b"],
        because the number stands where the table should be.
    """
    value_so_far = nested_table
    for key in key_path:
        if not isinstance(value_so_far, Mapping):
            return True
        if key not in value_so_far:
            return False
        value_so_far = value_so_far[key]
    return True


def _read_toml_file(file: Path, *, must_exist: bool = False) -> dict[str, Any]:
    """Read the values of a TOML file, which may begin with a byte-order mark.

    Args:
        file: The path of the file.
        must_exist: Whether a missing file is a mistake, because somebody named it.

    Returns:
        The values, or an empty dict if there is no file.

    Raises:
        SettingsError: The file is missing although it must exist, cannot be read or parsed, or holds a value that can
            be no setting.
    """
    printable_path = to_printable(file)
    try:
        fault = _find_path_fault(file, must_exist=must_exist)
        values = _parse_toml_file(file) if fault is None else {}
    except (OSError, RecursionError, ValueError) as error:
        raise SettingsError(f"{printable_path}: {_explain_reading_fault(error)}") from error

    # Not raised in the `try` block: a SettingsError is a ValueError, which would be caught there.
    if fault is not None:
        raise SettingsError(f"{printable_path}: {fault}")

    _refuse_unusable_value(printable_path, values)
    return values


def _parse_toml_file(file: Path) -> dict[str, Any]:
    """Parse a TOML file.

    Returns:
        Its values, or an empty dict if there is no file.

    Raises:
        OSError: The file cannot be read.
        RecursionError: The values are nested too deeply.
        ValueError: The content is not TOML or not UTF-8.
    """
    if not file.is_file():
        return {}
    return tomllib.loads(file.read_text("utf-8-sig"))


def _explain_reading_fault(error: Exception) -> str:
    """Describe for a message why a settings file cannot be read, and what to do."""
    if isinstance(error, OSError):
        return f"cannot be read: {error.strerror}; name a file that can"
    if isinstance(error, RecursionError):
        return "values are nested too deeply; no setting needs that"
    # The file may also not be UTF-8, or hold an integer of more than 4,300 digits.
    return f"not TOML: {error}; correct that line"


def _find_path_fault(file: Path, *, must_exist: bool) -> str | None:
    """Find out why a path cannot be used as the path of a settings file.

    Args:
        file: The path.
        must_exist: Whether a missing file is a fault too.

    Returns:
        The reason with a remedy, or None if the path can be used.

    Raises:
        OSError: The path cannot be looked at.
    """
    try:
        str(file).encode()
    except UnicodeEncodeError:
        return "the path is not UTF-8, which tables and DuckDB require; rename it"

    is_something_else = file.exists() and not file.is_file()
    is_missing = must_exist and not file.is_file()
    if is_something_else or is_missing:
        return "no such file; run in the folder that holds toolformer.toml or name it"
    return None


def resolve_settings_path(file: Path | None = None, environment: Mapping[str, str] | None = None) -> Path:
    """Return the absolute path of the settings file, which may not exist.

    Args:
        file: The path that the user named. By default it is $TOOLFORMER_CONFIG, or else ./toolformer.toml.
        environment: The environment variables. By default those of this process.

    Raises:
        SettingsError: The path begins with `~name`, and there is no such user.
    """
    if environment is None:
        environment = os.environ
    path = file or environment.get("TOOLFORMER_CONFIG") or "toolformer.toml"
    return expand_home(Path(path)).absolute()


def list_profile_names(file: Path | None = None) -> list[str]:
    """Return the names of all profiles, those of the settings file and those of the package, sorted.

    Raises:
        SettingsError: The file cannot be read.
    """
    file_profiles = _read_toml_file(resolve_settings_path(file)).get("profiles", {})
    package_profiles = _read_toml_file(PROFILES)["profiles"]
    return sorted({*file_profiles, *package_profiles})


def load_settings(
    file: Path | None = None,
    *,
    profile: str | None = None,
    overrides: Sequence[str] = (),
    shards: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
) -> Settings:
    """Load the settings from all sources, merge and validate them.

    Options win over environment variables, and these over the file. Options of a tool are checked later, when the
    tool is loaded.

    Args:
        file: The settings file. By default it is $TOOLFORMER_CONFIG, or else ./toolformer.toml.
        profile: The value of the option --profile. If it is not empty, it wins over all other sources.
        overrides: Settings such as "tools.qa.k=3", as `--set` takes them. If two set the same key, the last one wins.
        shards: The values of the option --shards. If there are any, they win over all other sources.
        environment: The environment variables. By default those of this process.

    Raises:
        SettingsError: The file cannot be read, a profile or key is unknown, or a value is impossible (also in profiles
            that are not chosen). The message names the file, option or variable, the key and the remedy.
    """
    if environment is None:
        environment = os.environ
    settings_file = resolve_settings_path(file, environment)
    file_name = to_printable(settings_file)

    is_named = bool(file or environment.get("TOOLFORMER_CONFIG"))
    file_values = _read_toml_file(settings_file, must_exist=is_named)

    # If two set the same key, the first one wins. All of them win over the file.
    all_overrides = [
        *_parse_options(profile, shards),
        *_parse_pairs(file_name, overrides),
        *_parse_variables(environment, file_values),
    ]

    sources = Sources(all_overrides, file_name)
    return _merge_settings(sources, _add_default_tools(file_values), root=settings_file.parent)


def _add_default_tools(file_values: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the values of a settings file, with sections for the paper's tools if it names neither tools nor servers.

    If it names only servers, `tools` is an empty table.
    """
    if "tools" in file_values:
        return file_values

    has_servers = bool(file_values.get("servers"))
    sections: dict[str, Any] = {}
    if not has_servers:
        sections = {tool_name: {} for tool_name in PAPER_TOOLS}
    return {**file_values, "tools": sections}


def _parse_pairs(file_name: str, pairs: Sequence[str]) -> list[Override]:
    """Parse the values of the option --set, such as "tools.qa.k=3".

    Args:
        file_name: The settings file, for messages.
        pairs: The values in the order of the command line.

    Returns:
        An override for each value, the last one first, because it wins.

    Raises:
        SettingsError: A value has another form.
    """
    return [_parse_pair(file_name, pair) for pair in reversed(pairs)]


def _parse_options(profile: str | None, shards: Sequence[str]) -> list[Override]:
    """Return the overrides of the options --profile and --shards, without those that are empty."""
    overrides = []
    if profile:
        overrides.append(_build_override("--profile", KEY_PATH_BY_OPTION["profile"], profile))
    if shards:
        overrides.append(_build_override("--shards", KEY_PATH_BY_OPTION["shards"], list(shards)))
    return overrides


def _merge_settings(sources: Sources, file_values: Mapping[str, Any], root: Path) -> Settings:
    """Merge the overrides and the values of the settings file, and validate the result.

    The first override wins over the others, and all win over the file. Each listed tool of an MCP server gets a lane,
    which is a section under `tools`.

    Args:
        sources: The overrides, and the name of the file for messages.
        file_values: The values of the file.
        root: The folder of toolformer.toml.

    Raises:
        SettingsError: A setting is wrong. The message has a line for each mistake.
    """
    override_values = [override.values for override in sources.overrides]
    try:
        merged_values = _merge_tables(*override_values, file_values)
        with_server_lanes = add_server_lanes(merged_values, root)
        return _build_settings(sources, with_server_lanes, root)
    except ValidationError as error:
        messages = [_format_validation_error(details, sources) for details in error.errors()]
        raise SettingsError("\n".join(messages)) from error


def load_server_settings(file: Path | None = None) -> tuple[dict[str, ServerSettings], Path]:
    """Read the MCP servers of the settings file, whether their tools are listed yet or not.

    Returns:
        The servers by name, and the folder of the settings file.

    Raises:
        SettingsError: The file is missing or cannot be read, or the section of a server is wrong.
    """
    source = resolve_settings_path(file)
    try:
        tables = _read_toml_file(source, must_exist=True).get("servers", {})
        servers = {name: ServerSettings.model_validate(table) for name, table in tables.items()}
    except (ValidationError, AttributeError) as error:
        raise SettingsError(f"{to_printable(source)}: servers: {error}") from error
    return servers, source.parent


def _build_settings(sources: Sources, merged_values: Mapping[str, Any], root: Path) -> Settings:
    """Build the settings from merged values. Keys that are left out get the value of the chosen profile.

    Args:
        sources: The sources of the values, for messages.
        merged_values: The values of all sources.
        root: The folder from which relative paths count.

    Raises:
        SettingsError: The chosen profile is unknown, or a profile names an unknown lane.
        ValidationError: A key is unknown, or a value is impossible.
    """
    without_profile = WrittenSettings.model_validate(merged_values)
    _refuse_unknown_profile_lanes(sources, without_profile)

    # Values of the sources win over those of the profile.
    profile_values = _read_chosen_profile(sources, without_profile)
    with_profile = WrittenSettings.model_validate(_merge_tables(merged_values, profile_values))

    tables = _resolve_table_paths(root, with_profile)
    # `tables` has no tools yet. They are those of the file, in its order: a profile only gives values to them.
    tables["tools"] = {key: with_profile.tools[key] for key in without_profile.tools}
    return Settings.model_validate({**tables, "profile": with_profile.profile, "root": root})


def _resolve_table_paths(root: Path, settings: WrittenSettings) -> dict[str, Any]:
    """Return the tables of settings by name, with relative paths made absolute.

    The table `tools` is left out, and so are tables that are not set.

    Args:
        root: The folder from which relative paths count.
        settings: The tables.
    """
    tables: dict[str, Any] = {}
    for name in SettingsTables.model_fields:
        table = getattr(settings, name)
        if name != "tools" and table is not None:
            tables[name] = table.with_absolute_paths(root)
    return tables


def _merge_tables(higher_table: Mapping[str, Any], *lower_tables: Mapping[str, Any]) -> dict[str, Any]:
    """Merge nested tables of settings. If several tables have a value for a key, the first one wins.

    Example:
        {"a": {"x": 1}} and {"a": {"x": 2, "y": 3}} become {"a": {"x": 1, "y": 3}}.
    """
    merged = _merge_tables(*lower_tables) if lower_tables else {}

    for key, value in higher_table.items():
        value_below = merged.get(key)
        if isinstance(value, Mapping) and isinstance(value_below, Mapping):
            merged[key] = _merge_tables(value, value_below)
        else:
            merged[key] = value

    return merged


def _read_chosen_profile(sources: Sources, written_settings: WrittenSettings) -> dict[str, Any]:
    """Return the values of the chosen profile, without tools that the settings do not name.

    If the file and the package both have a profile of this name, values of the file's profile win.

    Raises:
        SettingsError: There is no such profile.
    """
    profile_name = written_settings.profile
    package_profiles = _read_toml_file(PROFILES)["profiles"]
    _refuse_unknown_profile(sources, profile_name, {*written_settings.profiles, *package_profiles})

    file_profile_values = _get_file_profile_values(written_settings, profile_name)
    values = _merge_tables(file_profile_values, package_profiles.get(profile_name, {}))

    tools = values.get("tools", {})
    named_tools = {key: tool for key, tool in tools.items() if key in written_settings.tools}
    return {**values, "tools": named_tools}


def _get_file_profile_values(written_settings: WrittenSettings, profile_name: str) -> dict[str, Any]:
    """Return the values of a profile in the settings file, or an empty dict if the file has no such profile."""
    profile = written_settings.profiles.get(profile_name)
    if not profile:
        return {}
    return profile.model_dump(exclude_unset=True)


def _refuse_unknown_profile(sources: Sources, profile_name: str, known_profiles: set[str]) -> None:
    """Check that a profile exists.

    Raises:
        SettingsError: No known profile has this name.
    """
    if profile_name in known_profiles:
        return

    origin = sources.find_origin(["profile"])
    known = ", ".join(sorted(known_profiles))
    raise SettingsError(f"{origin}: profile {profile_name!r} does not exist; known profiles: {known}")


def _refuse_unknown_profile_lanes(sources: Sources, written_settings: WrittenSettings) -> None:
    """Check that the profiles of the settings give values only to lanes (tools with their settings) that exist.

    Raises:
        SettingsError: A profile names a lane that is neither in the settings nor one of the paper's tools.
    """
    known_lanes = {*PAPER_TOOLS, *written_settings.tools}
    for profile_name, profile in written_settings.profiles.items():
        unknown_lanes = sorted(profile.tools.keys() - known_lanes)
        if not unknown_lanes:
            continue

        lane_key = unknown_lanes[0]
        key_path = ["profiles", profile_name, "tools", lane_key]
        reason = f"there is no such lane, and a profile adds none; {suggest_name(lane_key, known_lanes, 'lanes')}"
        raise SettingsError(f"{sources.find_origin(key_path)}: {'.'.join(key_path)}: {reason}")


def _parse_variables(environment: Mapping[str, str], file_values: Mapping[str, Any]) -> list[Override]:
    """Parse the environment variables that hold settings, such as TOOLFORMER__TOOLS__QA__K=3.

    Args:
        environment: All variables. Those with other names are ignored.
        file_values: The values of the settings file, which show how keys are spelled.

    Returns:
        An override for each variable. Longer names come before their beginnings, because they win.

    Raises:
        SettingsError: A name or value is impossible.
    """
    setting_names = [name for name in environment if name.startswith(VARIABLE_PREFIX)]
    longer_names_first = sorted(setting_names, reverse=True)
    return [_parse_variable(name, environment[name], file_values) for name in longer_names_first]


def _parse_variable(variable_name: str, variable_value: str, file_values: Mapping[str, Any]) -> Override:
    """Parse an environment variable: TOOLFORMER__TOOLS__CALCULATOR__TAU_F sets tools.calculator.tau_f.

    Args:
        variable_name: The name of the variable, which begins with VARIABLE_PREFIX.
        variable_value: Its value.
        file_values: The values of the settings file, which show how keys are spelled.

    Raises:
        SettingsError: The name or value is impossible.
    """
    lowercase_parts = variable_name.removeprefix(VARIABLE_PREFIX).lower().split("__")
    key_path = _restore_key_path(lowercase_parts, file_values)

    origin = f"${to_printable(variable_name)}"
    value = _parse_value(origin, variable_value)
    return _build_override(origin, key_path, value)


def _restore_key_path(lowercase_parts: Sequence[str], file_values: Mapping[str, Any]) -> list[str]:
    """Restore the spelling of a path of keys, of which only the lowercase form is known.

    Example:
        ["profiles", "gpt2"] becomes ["profiles", "GPT2"] if the settings file has that profile. A part for which the
        file has no key stays as it is.
    """
    key_path = []
    value_below: Any = file_values  # what the file has under the keys so far

    for lowercase_part in lowercase_parts:
        table = value_below if isinstance(value_below, Mapping) else {}
        key = _restore_key(lowercase_part, table)
        key_path.append(key)
        value_below = table.get(key)

    return key_path


def _restore_key(lowercase_part: str, table: Mapping[str, Any]) -> str:
    """Return the key of a table whose lowercase form is given.

    If the lowercase form is itself a key, or no key has this form, it is returned unchanged.
    """
    if lowercase_part in table:
        return lowercase_part
    key_by_lowercase_form = {key.lower(): key for key in table}
    return key_by_lowercase_form.get(lowercase_part, lowercase_part)


def _parse_pair(file_name: str, pair: str) -> Override:
    """Parse a value of the option --set, such as "tools.qa.k=3".

    Args:
        file_name: The settings file, for messages.
        pair: The value of the option.

    Raises:
        SettingsError: There is no "=" or no key before it, or the key or value is impossible.
    """
    key, equals_sign, value_text = pair.partition("=")
    origin = f"--set {to_printable(key.strip())}"
    if not (key and equals_sign):
        raise SettingsError(f"{file_name}: {origin}: {PAIR_REMEDY}")

    value = _parse_value(origin, value_text)
    return _build_override(origin, key.strip().split("."), value)


def _parse_value(origin: str, value_text: str) -> Any:
    """Parse the value of an option or variable as TOML, or take it as a text if it is not TOML.

    Example:
        "0.8" becomes a number, '["a", "b"]' a list, "true" a truth value, and "gpt2" stays a text.

    Args:
        origin: The option or variable, for messages.
        value_text: The value as it is written.

    Raises:
        SettingsError: The value has several lines, or is nested too deeply.
    """
    value_text = value_text.strip()
    parsed = _parse_toml_line(origin, f"value = {value_text}")
    if not parsed:  # not TOML
        parsed = {"value": value_text}

    holds_other_keys = len(parsed) > 1  # later lines were read as settings of their own
    is_text_of_lines = parsed["value"] == value_text and "\n" in value_text
    if holds_other_keys or is_text_of_lines:
        raise SettingsError(f"{origin}: the value has more than one line; give each setting on its own")
    return parsed["value"]


def _parse_toml_line(origin: str, line: str) -> dict[str, Any]:
    """Parse a line of TOML, such as "value = 0.8".

    Args:
        origin: The option or variable that the line comes from, for the message.
        line: The line.

    Returns:
        The values by key, or an empty dict if the line is not TOML.

    Raises:
        SettingsError: The value is nested too deeply.
    """
    try:
        return tomllib.loads(line)
    except RecursionError:
        raise SettingsError(f"{origin}: the value is nested too deeply; no setting needs that") from None
    except ValueError:
        return {}


def _refuse_unusable_value(origin: str, value: Any, *key_path: str) -> None:
    """Check that a value, its parts and its keys could be settings.

    Args:
        origin: The option, variable or file that gives the value, for messages.
        value: The value. Tables and lists are checked with all that they hold.
        key_path: The keys of the tables around the value.

    Raises:
        SettingsError: There is an integer of more than 64 bits, a text with NUL or invalid UTF-8, or the tables and
            lists have more than MAX_TABLE_DEPTH levels.
    """
    if len(key_path) > MAX_TABLE_DEPTH:
        top_key = to_printable(key_path[0])
        raise SettingsError(f"{origin}: {top_key}: values are nested too deeply; no setting needs that")

    for key, item in _list_items(value):  # none for a number or text, keys "0", "1", ... for a list
        # In the message, "a key" stands for the key itself, which may not be printable.
        _refuse_unusable_value(origin, key, *key_path, "a key")
        _refuse_unusable_value(origin, item, *key_path, key)

    reason = _find_value_fault(value)
    if reason is not None:
        raise SettingsError(f"{origin}: {to_printable('.'.join(key_path))}: {reason}")


def _list_items(value: Any) -> Iterable[tuple[str, Any]]:
    """Return pairs of the keys and values of a table, or of the numbers and items of a list: [("0", "a"), ("1", "b")].

    For any other value there are no pairs.
    """
    if isinstance(value, Mapping):
        return value.items()
    if isinstance(value, list):
        return [(str(number), item) for number, item in enumerate(value)]
    return ()


def _find_value_fault(value: object) -> str | None:
    """Find out why a number or text can be no setting.

    Returns:
        The reason with a remedy, or None if the value can be used.
    """
    if isinstance(value, int) and value.bit_length() > 63:
        return "the number takes more than 64 bits; write a smaller number"
    if isinstance(value, str) and "\0" in value:
        return "the text holds a NUL character; remove it"
    if isinstance(value, str) and to_printable(value) != value:
        return "the text is not UTF-8; rename what it names"
    return None


def _format_validation_error(error_details: ErrorDetails, sources: Sources) -> str:
    """Format a validation error of pydantic as a message: the origin of the value, its key, the reason and a remedy.

    Args:
        error_details: The error, with `loc`, the path of the key, and `type`, the kind of mistake.
        sources: The sources of the settings, of which the message names one.
    """
    key_path = [str(part) for part in error_details["loc"] if part not in FORM_MARKS]
    key = ".".join(key_path) or "settings"
    origin = sources.find_origin(key_path)

    if error_details["type"] in ("model_type", "dict_type"):
        return f"{origin}: {key}: must be a table; write [{key}] and its keys below it"

    is_unknown_key = error_details["type"] == "extra_forbidden"
    known_keys = _list_sibling_keys(key_path) if is_unknown_key else []
    return f"{origin}: {key}: {explain_validation_error(error_details, known_keys)}"


def _list_sibling_keys(key_path: Sequence[str]) -> list[str]:
    """List the keys that may have been meant by a misspelled one: all known keys of its table.

    Args:
        key_path: The path to the misspelled key. All keys before it are known, and lead to its table.

    Example:
        For ["model", "nam"] these are the keys of the table `model`: "name", "revision" and so on.
    """
    # From the outermost table, each key but the last leads one table further in.
    table_type: Any = WrittenSettings  # a table, or a dictionary of tables such as dict[str, ToolSettings]

    for key in key_path[:-1]:
        is_dictionary = get_origin(table_type) is dict
        annotation = get_args(table_type)[1] if is_dictionary else table_type.model_fields[key].annotation
        table_types = list_tables_in(annotation)
        table_type = table_types[0] if table_types else annotation

    return list(table_type.model_fields)
