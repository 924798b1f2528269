"""Load settings from all sources and explain what is wrong with them.

Later wins: defaults (the paper's), the chosen `[profiles.NAME]`, the file's own sections, variables such as
`TOOLFORMER__TOOLS__CALCULATOR__TAU_F=0.8`, `--set tools.calculator.tau_f=0.8`, `--profile` and `--shards`. A section
under `[tools]` makes a lane; a profile gives values to lanes and adds none.
"""

import os
import tomllib
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, get_args, get_origin

from pydantic import Field, ValidationError
from pydantic_core import ErrorDetails

from toolformer_dag.settings.sections import Settings, SettingsTables
from toolformer_dag.settings.servers import ServerSettings, with_server_lanes
from toolformer_dag.settings.setting_types import (
    SettingsError,
    Unfingerprinted,
    expanded,
    meant,
    mistake,
    printable,
    tables_in,
)
from toolformer_dag.settings.tool_settings import FORMS

PREFIX = "TOOLFORMER__"
PROFILES = Path(__file__).parents[1] / "profiles.toml"
PAPER_TOOLS = ("calculator", "calendar", "wiki_search", "question_answering", "machine_translation")
"""The tools of the paper: the lanes where the settings name none."""
MAXIMUM_DEPTH = 20
"""Levels of tables and lists; deeper values would exhaust the stack of whatever copies or prints them."""
PLACES = {"profile": ["profile"], "shards": ["corpus", "shards"]}
"""Where the values of the options --profile and --shards go."""
Origin = Callable[[Sequence[str]], str]
"""Names the option, variable or file that gives the value at a path."""
EXAMPLE = "write key.path=value, as in tools.calculator.tau_f=0.8"


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


Given = tuple[str, Mapping[str, Any]]
"""The option or variable that gives one value outside of the file, for messages, and the value, in its tables."""


def _given(origin: str, path: Sequence[str], value: Any) -> Given:
    """Give a value at a path. Raises SettingsError."""
    if not all(path):
        raise SettingsError(f"{origin}: a part of the key is empty; {EXAMPLE}")
    if len(path) > MAXIMUM_DEPTH:
        raise SettingsError(f"{origin}: the key has {len(path)} parts, and no setting has as many; {EXAMPLE}")
    for part in reversed(path):
        value = {part: value}
    _refuse_unusable(origin, value)
    return origin, value


def _origin(given: Sequence[Given], file: str, path: Sequence[str]) -> str:
    return next((origin for origin, values in given if _gives(values, path)), file)


def _gives(table: Any, path: Sequence[str]) -> bool:
    """Return whether the value at `path` comes from here: all of it, a part of it, or a value in place of it."""
    for part in path:
        if not isinstance(table, Mapping):
            return True
        if part not in table:
            return False
        table = table[part]
    return True


def _toml(file: Path, named: bool = False) -> dict[str, Any]:
    """Read a TOML file, with or without a byte-order mark; empty where there is none. Raises SettingsError.

    `named`: somebody named the file, and it has to be there.
    """
    shown, mistaken = printable(file), None
    try:
        str(file).encode()
        if not file.is_file() and (named or file.exists()):
            mistaken = "no such file; run in the folder that holds toolformer.toml or name it"
        values = tomllib.loads(file.read_text("utf-8-sig")) if file.is_file() else {}
    except UnicodeEncodeError:
        mistaken = "the path is not UTF-8, which tables and DuckDB require; rename it"
    except OSError as error:
        mistaken = f"cannot be read: {error.strerror}; name a file that can"
    except RecursionError:
        mistaken = "values are nested too deeply; no setting needs that"
    except ValueError as error:  # not TOML, not UTF-8, or an integer of more than 4,300 digits
        mistaken = f"not TOML: {error}; correct that line"
    if mistaken:
        raise SettingsError(f"{shown}: {mistaken}")
    _refuse_unusable(shown, values)
    return values


def settings_file(file: Path | None = None, environment: Mapping[str, str] | None = None) -> Path:
    """Return the absolute path of `file`, else of $TOOLFORMER_CONFIG, else of ./toolformer.toml, existing or not."""
    environment = os.environ if environment is None else environment
    return expanded(Path(file or environment.get("TOOLFORMER_CONFIG") or "toolformer.toml")).absolute()


def known_profiles(file: Path | None = None) -> list[str]:
    """Return the names of the file's own profiles and of the package's. Raises SettingsError."""
    return sorted({*_toml(settings_file(file)).get("profiles", {}), *_toml(PROFILES)["profiles"]})


def load_settings(
    file: Path | None = None,
    *,
    profile: str | None = None,
    overrides: Sequence[str] = (),
    shards: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
) -> Settings:
    """Load `file` (default: `$TOOLFORMER_CONFIG`, else ./toolformer.toml), with `key.path=value` overrides.

    `profile` and `shards`, where given, win over all other sources. Raises SettingsError, which names the file, option
    or variable, the key and the remedy, for a file that cannot be read, an unknown profile, an unknown key or an
    impossible value, in profiles that are not chosen too. Options of a tool are checked when the tool is loaded.
    """
    environment = os.environ if environment is None else environment
    source = settings_file(file, environment)
    shown, root = printable(source), source.parent
    in_file = _toml(source, named=bool(file or environment.get("TOOLFORMER_CONFIG")))
    options = {"profile": profile, "shards": list(shards)}
    given = [
        *[_given(f"--{name}", PLACES[name], value) for name, value in options.items() if value],
        *[_from_pair(shown, pair) for pair in reversed(overrides)],
        *_from_variables(environment, in_file),
    ]

    origin = partial(_origin, given, shown)
    in_file.setdefault("tools", {} if in_file.get("servers") else _built_in_sections())
    try:
        values = with_server_lanes(_over(*(values for _, values in given), in_file), root)
        return _settings(origin, values, root)
    except ValidationError as error:
        raise SettingsError("\n".join(_explained(item, origin) for item in error.errors())) from error


def _built_in_sections() -> dict[str, Any]:
    return {name: {} for name in PAPER_TOOLS}


def load_servers(file: Path | None = None) -> tuple[dict[str, ServerSettings], Path]:
    """Return the servers of the file, listed or not, and its folder. Raises SettingsError."""
    source = settings_file(file)
    try:
        tables = _toml(source, named=True).get("servers", {})
        servers = {name: ServerSettings.model_validate(table) for name, table in tables.items()}
    except (ValidationError, AttributeError) as error:
        raise SettingsError(f"{printable(source)}: servers: {error}") from error
    return servers, source.parent


def _settings(origin: Origin, values: Mapping[str, Any], root: Path) -> Settings:
    """Return the values with those of the chosen profile, which they name, below them."""
    written = WrittenSettings.model_validate(values)
    _refuse_lanes_of_profiles(origin, written)
    merged = WrittenSettings.model_validate(_over(values, _chosen_profile(origin, written)))
    given = {name: getattr(merged, name) for name in SettingsTables.model_fields if name != "tools"}
    tables = {name: table.under(root) for name, table in given.items() if table is not None}
    tools = {name: merged.tools[name] for name in written.tools}  # in the file's order, not the profile's
    return Settings.model_validate({**tables, "tools": tools, "profile": merged.profile, "root": root})


def _over(upper: Mapping[str, Any], *lower: Mapping[str, Any]) -> dict[str, Any]:
    """Merge sources table by table; earlier sources win."""
    merged = _over(*lower) if lower else {}
    for key, value in upper.items():
        below = merged.get(key)
        merged[key] = _over(value, below) if isinstance(value, Mapping) and isinstance(below, Mapping) else value
    return merged


def _chosen_profile(origin: Origin, written: WrittenSettings) -> dict[str, Any]:
    """Return the values of the chosen profile: the file's own, then the package's. Its other lanes are left out."""
    name, packaged = written.profile, _toml(PROFILES)["profiles"]
    own = {key: profile.model_dump(exclude_unset=True) for key, profile in written.profiles.items()}
    if name not in {*own, *packaged}:
        known = ", ".join(sorted({*own, *packaged}))
        raise SettingsError(f"{origin(['profile'])}: profile {name!r} does not exist; known profiles: {known}")
    chosen = _over(own.get(name, {}), packaged.get(name, {}))
    return {**chosen, "tools": {key: lane for key, lane in chosen.get("tools", {}).items() if key in written.tools}}


def _refuse_lanes_of_profiles(origin: Origin, written: WrittenSettings) -> None:
    """Raise SettingsError where a profile names a lane that neither the settings nor the package have."""
    known = {*PAPER_TOOLS, *written.tools}
    for name, profile in written.profiles.items():
        for key in sorted(profile.tools.keys() - known):
            path = ["profiles", name, "tools", key]
            reason = f"there is no such lane, and a profile adds none; {meant(key, known, 'lanes')}"
            raise SettingsError(f"{origin(path)}: {'.'.join(path)}: {reason}")


def _from_variables(environment: Mapping[str, str], known: Any) -> list[Given]:
    """Read the variables that hold settings; a longer name wins over a shorter name."""
    names = sorted((name for name in environment if name.startswith(PREFIX)), reverse=True)
    return [_from_variable(name, environment[name], known) for name in names]


def _from_variable(name: str, value: str, known: Any) -> Given:
    """Read a variable; its name has no capitals of its own, so it takes those of the file's keys."""
    path = []
    for part in name.removeprefix(PREFIX).lower().split("__"):
        table = known if isinstance(known, Mapping) else {}
        key = part if part in table else {key.lower(): key for key in table}.get(part, part)
        path.append(key)
        known = table.get(key)
    origin = f"${printable(name)}"
    return _given(origin, path, _value(origin, value))


def _from_pair(shown: str, pair: str) -> Given:
    key, equals, value = pair.partition("=")
    origin = f"--set {printable(key.strip())}"
    if not (key and equals):
        raise SettingsError(f"{shown}: {origin}: {EXAMPLE}")
    return _given(origin, key.strip().split("."), _value(origin, value))


def _value(origin: str, text: str) -> Any:
    """Read a TOML value; text that is none is taken as it is. Raises SettingsError."""
    text = text.strip()
    try:
        parsed = tomllib.loads(f"value = {text}")
    except RecursionError:
        raise SettingsError(f"{origin}: the value is nested too deeply; no setting needs that") from None
    except ValueError:
        parsed = {"value": text}
    if len(parsed) > 1 or (parsed["value"] == text and "\n" in text):
        raise SettingsError(f"{origin}: the value has more than one line; give each setting on its own")
    return parsed["value"]


def _refuse_unusable(origin: str, value: Any, *path: str) -> None:
    """Raise SettingsError for values that TOML allows and nothing else can hold, in options of tools too."""
    if len(path) > MAXIMUM_DEPTH:
        raise SettingsError(f"{origin}: {printable(path[0])}: values are nested too deeply; no setting needs that")
    if isinstance(value, list):
        value = {str(number): nested for number, nested in enumerate(value)}
    for key, nested in value.items() if isinstance(value, Mapping) else ():
        _refuse_unusable(origin, key, *path, "a key")
        _refuse_unusable(origin, nested, *path, key)
    if reason := _unusable(value):
        raise SettingsError(f"{origin}: {printable('.'.join(path))}: {reason}")


def _unusable(value: object) -> str | None:
    if isinstance(value, int) and value.bit_length() > 63:
        return "the number takes more than 64 bits; write a smaller number"
    if isinstance(value, str) and "\0" in value:
        return "the text holds a NUL character; remove it"
    if isinstance(value, str) and printable(value) != value:
        return "the text is not UTF-8; rename what it names"
    return None


def _explained(item: ErrorDetails, origin: Origin) -> str:
    """Return origin, key, reason and remedy of a mistake."""
    path = [str(part) for part in item["loc"] if part not in FORMS]
    key = ".".join(path) or "settings"
    if item["type"] in ("model_type", "dict_type"):
        return f"{origin(path)}: {key}: must be a table; write [{key}] and its keys below it"
    known = _known_keys(path) if item["type"] == "extra_forbidden" else ()
    return f"{origin(path)}: {key}: {mistake(item, known)}"


def _known_keys(path: Sequence[str]) -> list[str]:
    """Return the keys of the table that holds the last part of `path`."""
    table: Any = WrittenSettings
    for part in path[:-1]:
        kind = get_args(table)[1] if get_origin(table) is dict else table.model_fields[part].annotation
        table = next(iter(tables_in(kind)), kind)
    return list(table.model_fields)
