"""Where settings come from: a TOML file, a profile in it, the environment, and `key.path=value` pairs."""

import os
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from toolformer_dag.errors import UserError

Values = dict[str, Any]
PREFIX = "TOOLFORMER__"
PROFILES = Path(__file__).parents[1] / "profiles.toml"
BUILT_IN_TOOLS = ("calculator", "calendar", "wiki_search", "question_answering", "machine_translation")


@dataclass(frozen=True, slots=True)
class Sources:
    """The settings file, what all sources say together, unvalidated, and what was said outside of the file: by path."""

    file: Path
    values: Values
    outside: Mapping[tuple[str, ...], str]

    def origin(self, path: Sequence[int | str]) -> str:
        """Where the value at a path, or one within it, was given."""
        key = tuple(map(str, path))
        found = [name for given, name in self.outside.items() if key[: len(given)] == given[: len(key)]]
        return found[-1] if found else str(self.file)


class SettingsError(UserError, ValueError):
    """A setting that cannot be: names the file, the key and the remedy."""


def settings_file(file: Path | None = None, environment: Mapping[str, str] | None = None) -> Path:
    """The absolute path of `file`, else of $TOOLFORMER_CONFIG, else of ./toolformer.toml, be it there or not."""
    environment = os.environ if environment is None else environment
    return Path(file or environment.get("TOOLFORMER_CONFIG") or "toolformer.toml").absolute()


def read_sources(
    file: Path | None,
    profile: str | None,
    overrides: Sequence[str],
    shards: Sequence[str],
    environment: Mapping[str, str] | None,
) -> Sources:
    """A file that nobody named may be absent. Raises SettingsError."""
    environment = os.environ if environment is None else environment
    source = settings_file(file, environment)
    values = _read(source) if source.exists() or file or environment.get("TOOLFORMER_CONFIG") else {}
    values.setdefault("tools", {key: {} for key in BUILT_IN_TOOLS})
    chosen = ({"profile": profile} if profile else {}) | ({"corpus": {"shards": list(shards)}} if shards else {})
    variables, pairs = _spelled_as(values, _from_environment(environment)), _from_pairs(source, overrides)
    named = {path: "$" + PREFIX + "__".join(path).upper() for path in _leaves(variables)}
    named |= {path: f"--set {'.'.join(path)}" for path in _leaves(pairs)}
    for over in (variables, pairs, chosen):
        values = merge(values, over)
    return Sources(source, values, named)


def with_profile(source: Path, values: Values) -> Values:
    """Well-formed `values` laid on those of the profile that they choose, and without `profiles`.

    Raises SettingsError for a profile that does not exist.
    """
    profiles = merge(_read(PROFILES)["profiles"], values.get("profiles", {}))
    local = {key: value for key, value in values.items() if key != "profiles"}
    return merge(_profile(source, profiles, local), local)


def merge(under: Mapping[str, Any], over: Mapping[str, Any]) -> Values:
    """`over` laid on `under`, table by table."""
    merged = dict(under)
    for key, value in over.items():
        below = merged.get(key)
        merged[key] = merge(below, value) if isinstance(below, Mapping) and isinstance(value, Mapping) else value
    return merged


def _read(source: Path) -> Values:
    if not source.is_file():
        raise SettingsError(f"{source}: no such file; run in the folder that holds toolformer.toml or name it")
    try:
        return tomllib.loads(source.read_text("utf-8-sig"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise SettingsError(f"{source}: not TOML: {error}; correct that line") from error


def _profile(source: Path, profiles: Mapping[str, Values], local: Values) -> Values:
    name = local.get("profile", "embedded")
    if name not in profiles:
        raise SettingsError(f"{source}: profile {name!r} does not exist; known profiles: {', '.join(sorted(profiles))}")
    chosen = dict(profiles.get(name, {}))
    lanes = chosen.get("tools", {})
    return chosen | {"tools": {key: lanes[key] for key in lanes if key in local["tools"]}}


def _from_environment(environment: Mapping[str, str]) -> Values:
    found = sorted((name, value) for name, value in environment.items() if name.startswith(PREFIX))
    return _nested((name.removeprefix(PREFIX).lower().split("__"), value) for name, value in found)


def _spelled_as(known: Values, values: Values) -> Values:
    """With the capitals that `known` has: a variable's name has none of its own."""
    names = {name.lower(): name for name in known} | {name: name for name in known}
    spelled: Values = {}
    for key, value in values.items():
        name = names.get(key, key)
        spelled = merge(spelled, {name: _within(known.get(name), value)})
    return spelled


def _within(known: object, value: Any) -> Any:
    return _spelled_as(known, value) if isinstance(known, dict) and isinstance(value, dict) else value


def _from_pairs(source: Path, pairs: Iterable[str]) -> Values:
    split = [pair.partition("=") for pair in pairs]
    for key, equals, _ in split:
        if not (key and equals):
            raise SettingsError(f"{source}: --set {key}: write key.path=value, as in tools.calculator.tau_f=0.8")
    return _nested((key.strip().split("."), value) for key, _, value in split)


def _nested(items: Iterable[tuple[list[str], str]]) -> Values:
    values: Values = {}
    for path, text in items:
        nested: Any = _toml_value(text)
        for part in reversed(path):
            nested = {part: nested}
        values = merge(values, nested)
    return values


def _leaves(values: Values, above: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    for key, value in values.items():
        if isinstance(value, dict):
            yield from _leaves(value, (*above, key))
        else:
            yield (*above, key)


def _toml_value(text: str) -> Any:
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text
