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
from toolformer_dag.settings.servers import ServerSettings, with_server_lanes
from toolformer_dag.settings.setting_types import (
    SettingsError,
    Unfingerprinted,
    expand_home,
    list_tables_in,
    mistake,
    suggest_name,
    to_printable,
)
from toolformer_dag.settings.tool_settings import FORMS

PREFIX = "TOOLFORMER__"
"""Begins the names of variables that hold a setting."""
PROFILES = Path(__file__).parents[1] / "profiles.toml"
"""The file of the package's profiles."""
PAPER_TOOLS = ("calculator", "calendar", "wiki_search", "question_answering", "machine_translation")
"""The tools of the paper, which have lanes if the settings name no tool."""
MAXIMUM_DEPTH = 20
"""Levels of tables and lists; deeper values would exhaust the stack of whatever copies or prints them."""
PLACES = {"profile": ["profile"], "shards": ["corpus", "shards"]}
"""The keys of the settings that the options --profile and --shards set."""
EXAMPLE = "write key.path=value, as in tools.calculator.tau_f=0.8"
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
    """A value of an option or a variable; it wins over the file."""

    origin: str
    """The option or variable, for messages: `--set tools.calculator.tau_f`."""
    values: Mapping[str, Any]
    """The value, in its tables: `{"tools": {"calculator": {"tau_f": 0.8}}}`."""


def _build_override(origin: str, path: Sequence[str], value: Any) -> Override:
    """Return a value at a path of keys. Raises SettingsError for an impossible path or value."""
    if not all(path):
        raise SettingsError(f"{origin}: a part of the key is empty; {EXAMPLE}")
    if len(path) > MAXIMUM_DEPTH:
        raise SettingsError(f"{origin}: the key has {len(path)} parts, and no setting has as many; {EXAMPLE}")
    for key in reversed(path):
        value = {key: value}
    _refuse_unusable(origin, value)
    return Override(origin, value)


class Sources(NamedTuple):
    """The sources of settings, which messages name."""

    overrides: Sequence[Override]
    """The winning one of two comes first."""
    file: str
    """The settings file, as messages show it."""

    def origin(self, path: Sequence[str]) -> str:
        """Return the option, variable or file that gives the value at a path of keys."""
        for override in self.overrides:
            if _gives(override.values, path):
                return override.origin
        return self.file


def _gives(table: Any, path: Sequence[str]) -> bool:
    """Return whether a table gives the value at `path`: all of it, a part of it, or a value in place of it."""
    for key in path:
        if not isinstance(table, Mapping):
            return True
        if key not in table:
            return False
        table = table[key]
    return True


def _read_toml(file: Path, *, must_exist: bool = False) -> dict[str, Any]:
    """Return the values of a TOML file, with or without a byte-order mark; empty if there is no file.

    must_exist: a missing file is a mistake, since somebody named it. Raises SettingsError.
    """
    try:
        fault = _find_path_fault(file, must_exist=must_exist)
        values = _parse_toml_file(file) if fault is None else {}
    except (OSError, RecursionError, ValueError) as error:
        raise SettingsError(f"{to_printable(file)}: {_explain_reading_fault(error)}") from error
    if fault is not None:  # not raised above, where a SettingsError, as a ValueError, would be caught
        raise SettingsError(f"{to_printable(file)}: {fault}")
    _refuse_unusable(to_printable(file), values)
    return values


def _parse_toml_file(file: Path) -> dict[str, Any]:
    """Parse a TOML file; empty if there is no file. Raises OSError, RecursionError, ValueError."""
    return tomllib.loads(file.read_text("utf-8-sig")) if file.is_file() else {}


def _explain_reading_fault(error: Exception) -> str:
    """Return why a settings file cannot be read, for the message."""
    if isinstance(error, OSError):
        return f"cannot be read: {error.strerror}; name a file that can"
    if isinstance(error, RecursionError):
        return "values are nested too deeply; no setting needs that"
    return f"not TOML: {error}; correct that line"  # or not UTF-8, or an integer of more than 4,300 digits


def _find_path_fault(file: Path, *, must_exist: bool) -> str | None:
    """Return why a path cannot be that of a settings file, for the message; None if it can. Raises OSError.

    must_exist: whether a missing file is a fault too.
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


def settings_file(file: Path | None = None, environment: Mapping[str, str] | None = None) -> Path:
    """Return the absolute path of `file`, else of $TOOLFORMER_CONFIG, else of ./toolformer.toml, existing or not."""
    environment = os.environ if environment is None else environment
    path = file or environment.get("TOOLFORMER_CONFIG") or "toolformer.toml"
    return expand_home(Path(path)).absolute()


def list_known_profiles(file: Path | None = None) -> list[str]:
    """Return the names of the file's own profiles and of the package's. Raises SettingsError."""
    file_profiles = _read_toml(settings_file(file)).get("profiles", {})
    package_profiles = _read_toml(PROFILES)["profiles"]
    return sorted({*file_profiles, *package_profiles})


def load_settings(
    file: Path | None = None,
    *,
    profile: str | None = None,
    overrides: Sequence[str] = (),
    shards: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
) -> Settings:
    """Load and validate the settings of all sources.

    file: the settings file; by default $TOOLFORMER_CONFIG or ./toolformer.toml.
    profile, shards: win over all other sources if they are not empty.
    overrides: `key.path=value`, as `--set` takes them; the last of two for one key wins.
    environment: variables, in place of those of this process.

    Raises SettingsError, which names the file, option or variable, the key and the remedy, for a file that cannot be
    read, an unknown profile, an unknown key or an impossible value, in profiles that are not chosen too. Options of a
    tool are checked when the tool is loaded.
    """
    environment = os.environ if environment is None else environment
    source = settings_file(file, environment)
    is_named = bool(file or environment.get("TOOLFORMER_CONFIG"))
    in_file = _read_toml(source, must_exist=is_named)
    all_overrides = [  # the first of two for one key wins; all of them win over the file
        *_parse_options(profile, shards),
        *_parse_pairs(to_printable(source), overrides),
        *_parse_variables(environment, in_file),
    ]
    return _merge_settings(Sources(all_overrides, to_printable(source)), _with_tools(in_file), source.parent)


def _with_tools(in_file: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a file's values; without `tools`, with the sections of the paper's tools, unless there are servers."""
    if "tools" in in_file:
        return in_file
    sections = {} if in_file.get("servers") else _build_paper_sections()
    return {**in_file, "tools": sections}


def _parse_pairs(file: str, pairs: Sequence[str]) -> list[Override]:
    """Return the settings of `--set`; the last pair comes first, since it wins. file: the settings file."""
    return [_parse_pair(file, pair) for pair in reversed(pairs)]


def _parse_options(profile: str | None, shards: Sequence[str]) -> list[Override]:
    """Return the settings of the options --profile and --shards."""
    overrides = []
    if profile:
        overrides.append(_build_override("--profile", PLACES["profile"], profile))
    if shards:
        overrides.append(_build_override("--shards", PLACES["shards"], list(shards)))
    return overrides


def _merge_settings(sources: Sources, in_file: Mapping[str, Any], root: Path) -> Settings:
    """Return the settings of the overrides and the file's values; the first override wins, the file last.

    Each listed tool of an MCP server gets a lane, which is a section under `tools`. root: the folder of
    toolformer.toml. Raises SettingsError, a line per mistake.
    """
    try:
        values = _merge_tables(*(override.values for override in sources.overrides), in_file)
        return _build_settings(sources, with_server_lanes(values, root), root)
    except ValidationError as error:
        raise SettingsError("\n".join(_explain_error(item, sources) for item in error.errors())) from error


def _build_paper_sections() -> dict[str, Any]:
    """Return the sections under `[tools]` for a file that has none."""
    return {name: {} for name in PAPER_TOOLS}


def load_servers(file: Path | None = None) -> tuple[dict[str, ServerSettings], Path]:
    """Return the MCP servers of the settings file, listed or not, and the file's folder. Raises SettingsError."""
    source = settings_file(file)
    try:
        tables = _read_toml(source, must_exist=True).get("servers", {})
        servers = {name: ServerSettings.model_validate(table) for name, table in tables.items()}
    except (ValidationError, AttributeError) as error:
        raise SettingsError(f"{to_printable(source)}: servers: {error}") from error
    return servers, source.parent


def _build_settings(sources: Sources, values: Mapping[str, Any], root: Path) -> Settings:
    """Return the settings of these values; keys that they leave out have the value of the profile that they choose.

    values: of all sources, merged. root: the folder from which relative paths count. Raises SettingsError,
    ValidationError.
    """
    without_profile = WrittenSettings.model_validate(values)
    _refuse_lanes_of_profiles(sources, without_profile)
    profile_values = _read_chosen_profile(sources, without_profile)
    with_profile = WrittenSettings.model_validate(_merge_tables(values, profile_values))  # the first one wins
    tables = _resolve_table_paths(root, with_profile)
    # In the file's order, not the profile's.
    tables["tools"] = {key: with_profile.tools[key] for key in without_profile.tools}
    return Settings.model_validate({**tables, "profile": with_profile.profile, "root": root})


def _resolve_table_paths(root: Path, settings: WrittenSettings) -> dict[str, Any]:
    """Return the tables of settings by name, with paths counted from `root`; `tools` is left out."""
    tables: dict[str, Any] = {}
    for name in SettingsTables.model_fields:
        table = getattr(settings, name)
        if name != "tools" and table is not None:
            tables[name] = table.under(root)
    return tables


def _merge_tables(upper: Mapping[str, Any], *lower: Mapping[str, Any]) -> dict[str, Any]:
    """Return nested tables of settings merged; the first of several values for a key wins.

    _merged({"a": {"x": 1}}, {"a": {"x": 2, "y": 3}}) is {"a": {"x": 1, "y": 3}}.
    """
    merged = _merge_tables(*lower) if lower else {}
    for key, value in upper.items():
        value_below = merged.get(key)
        if isinstance(value, Mapping) and isinstance(value_below, Mapping):
            merged[key] = _merge_tables(value, value_below)
        else:
            merged[key] = value
    return merged


def _read_chosen_profile(sources: Sources, written: WrittenSettings) -> dict[str, Any]:
    """Return the values of the chosen profile.

    Values of the file's profile go before those of the package's profile with the same name. Tools that the file does
    not name are left out. Raises SettingsError for an unknown profile.
    """
    name = written.profile
    package_profiles = _read_toml(PROFILES)["profiles"]
    _refuse_unknown_profile(sources, name, {*written.profiles, *package_profiles})
    values = _merge_tables(_get_profile_in_file(written, name), package_profiles.get(name, {}))
    lanes = values.get("tools", {})
    return {**values, "tools": {key: lane for key, lane in lanes.items() if key in written.tools}}


def _get_profile_in_file(written: WrittenSettings, name: str) -> dict[str, Any]:
    """Return the values of the file's own profile of that name; none if it has no such profile."""
    profile = written.profiles.get(name)
    return profile.model_dump(exclude_unset=True) if profile else {}


def _refuse_unknown_profile(sources: Sources, name: str, profiles: set[str]) -> None:
    """Raise SettingsError if no profile has this name."""
    if name not in profiles:
        known = ", ".join(sorted(profiles))
        raise SettingsError(f"{sources.origin(['profile'])}: profile {name!r} does not exist; known profiles: {known}")


def _refuse_lanes_of_profiles(sources: Sources, written: WrittenSettings) -> None:
    """Raise SettingsError if a profile names a lane that neither the settings nor the package have."""
    lanes = {*PAPER_TOOLS, *written.tools}
    for name, profile in written.profiles.items():
        for key in sorted(profile.tools.keys() - lanes):
            path = ["profiles", name, "tools", key]
            reason = f"there is no such lane, and a profile adds none; {suggest_name(key, lanes, 'lanes')}"
            raise SettingsError(f"{sources.origin(path)}: {'.'.join(path)}: {reason}")


def _parse_variables(environment: Mapping[str, str], in_file: Mapping[str, Any]) -> list[Override]:
    """Return the settings of variables; longer names come first, since they win over shorter ones."""
    names = sorted((name for name in environment if name.startswith(PREFIX)), reverse=True)
    return [_parse_variable(name, environment[name], in_file) for name in names]


def _parse_variable(name: str, value: str, in_file: Mapping[str, Any]) -> Override:
    """Return the setting of a variable: TOOLFORMER__TOOLS__CALCULATOR__TAU_F is tools.calculator.tau_f.

    in_file: the values of the settings file.
    """
    parts = name.removeprefix(PREFIX).lower().split("__")
    origin = f"${to_printable(name)}"
    return _build_override(origin, _restore_key_path(parts, in_file), _parse_value(origin, value))


def _restore_key_path(parts: Sequence[str], in_file: Mapping[str, Any]) -> list[str]:
    """Return the path of a key in the settings file, from its parts in small letters: "gpt2" may mean the key "GPT2".

    A part for which the file has no key is returned as it is.
    """
    path = []
    table: Any = in_file
    for part in parts:
        keys = table if isinstance(table, Mapping) else {}
        key = _restore_key(part, keys)
        path.append(key)
        table = keys.get(key)
    return path


def _restore_key(part: str, keys: Mapping[str, Any]) -> str:
    """Return the key of a table that is `part` in small letters; `part` itself if it is a key or there is none."""
    if part in keys:
        return part
    key_of_small_letters = {key.lower(): key for key in keys}
    return key_of_small_letters.get(part, part)


def _parse_pair(file: str, pair: str) -> Override:
    """Return the setting of `--set key.path=value`. file: the settings file, for messages."""
    key, equals, value = pair.partition("=")
    origin = f"--set {to_printable(key.strip())}"
    if not (key and equals):
        raise SettingsError(f"{file}: {origin}: {EXAMPLE}")
    return _build_override(origin, key.strip().split("."), _parse_value(origin, value))


def _parse_value(origin: str, text: str) -> Any:
    """Return a value of the command line, read as TOML: `0.8` is a number, `["a", "b"]` a list, anything else a text.

    origin: the option or variable, for messages. Raises SettingsError for a value over several lines.
    """
    text = text.strip()
    parsed = _parse_line(origin, f"value = {text}") or {"value": text}  # what is no TOML is a text
    holds_other_keys = len(parsed) > 1  # lines after the first were read as settings of their own
    is_text_of_lines = parsed["value"] == text and "\n" in text
    if holds_other_keys or is_text_of_lines:
        raise SettingsError(f"{origin}: the value has more than one line; give each setting on its own")
    return parsed["value"]


def _parse_line(origin: str, line: str) -> dict[str, Any]:
    """Parse a line of TOML; empty if it is none. Raises SettingsError for values that are nested too deeply."""
    try:
        return tomllib.loads(line)
    except RecursionError:
        raise SettingsError(f"{origin}: the value is nested too deeply; no setting needs that") from None
    except ValueError:
        return {}


def _refuse_unusable(origin: str, value: Any, *path: str) -> None:
    """Raise SettingsError if a value, a part of it or a key can be no setting.

    This is so for integers over 64 bits, texts with NUL or invalid UTF-8, and more than MAXIMUM_DEPTH levels.

    origin: for messages. path: the keys of the tables around the value.
    """
    if len(path) > MAXIMUM_DEPTH:
        raise SettingsError(f"{origin}: {to_printable(path[0])}: values are nested too deeply; no setting needs that")
    for key, item in _list_items(value):
        _refuse_unusable(origin, key, *path, "a key")  # "a key" stands in the message in place of the unusable text
        _refuse_unusable(origin, item, *path, key)
    reason = _find_value_fault(value)
    if reason is not None:
        raise SettingsError(f"{origin}: {to_printable('.'.join(path))}: {reason}")


def _list_items(value: Any) -> Iterable[tuple[str, Any]]:
    """Return the keys and values of a table, or the numbers and items of a list; nothing for other values."""
    if isinstance(value, Mapping):
        return value.items()
    if isinstance(value, list):
        return [(str(number), item) for number, item in enumerate(value)]
    return ()


def _find_value_fault(value: object) -> str | None:
    """Return why a number or text can be used nowhere, with the remedy; None if it can."""
    if isinstance(value, int) and value.bit_length() > 63:
        return "the number takes more than 64 bits; write a smaller number"
    if isinstance(value, str) and "\0" in value:
        return "the text holds a NUL character; remove it"
    if isinstance(value, str) and to_printable(value) != value:
        return "the text is not UTF-8; rename what it names"
    return None


def _explain_error(item: ErrorDetails, sources: Sources) -> str:
    """Return a validation error of pydantic as a message: origin, key, reason and remedy."""
    path = [str(part) for part in item["loc"] if part not in FORMS]
    key = ".".join(path) or "settings"
    if item["type"] in ("model_type", "dict_type"):
        return f"{sources.origin(path)}: {key}: must be a table; write [{key}] and its keys below it"
    keys_of_table = _list_keys_beside(path) if item["type"] == "extra_forbidden" else []
    return f"{sources.origin(path)}: {key}: {mistake(item, keys_of_table)}"


def _list_keys_beside(path: Sequence[str]) -> list[str]:
    """Return the keys that may replace the last key of `path`: all keys of its table."""
    table: Any = WrittenSettings  # a table, or a dictionary of tables
    for key in path[:-1]:
        is_dictionary = get_origin(table) is dict
        annotation = get_args(table)[1] if is_dictionary else table.model_fields[key].annotation
        table = next(iter(list_tables_in(annotation)), annotation)
    return list(table.model_fields)
