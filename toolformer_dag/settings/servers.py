"""Lanes of MCP servers: `[servers.office]` makes one per tool, from what `toolformer-dag servers` listed.

The list lies beside toolformer.toml, so that settings load without a server, and no server changes a lane by itself.
"""

import json
import logging
import re
from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import Any

from pydantic import ConfigDict, Field

from toolformer_dag.settings.rounds import SUFFIXED
from toolformer_dag.settings.setting_types import ASSET_GROUPS, SettingsError, SettingsTable

_log = logging.getLogger(__name__)
LISTING = "mcp_tools.json"
"""Server -> its tools, each with `name`, `description`, `input_schema`, maybe FAULT; in toolformer.toml's folder."""
MAX_KEY = 100
"""Characters of a lane's key that a tool's name gives: folders are named by it."""
FAULT = "fault"
"""The field of a listed tool that says why its calls cannot be written, where they cannot."""
SHOWN, FEW = 60, 8
"""Characters of a tool's name, and names, in messages."""
Values = Mapping[str, Any]


class ServerSettings(SettingsTable):
    """Configure an MCP server; further keys are those of its connection: command or url, env, version and so on."""

    model_config = ConfigDict(extra="allow")

    tools: tuple[str, ...] = Field(
        ("*",), description="Tools of the server that have a lane: names, or patterns with `*`."
    )


def read_listing(root: Path) -> dict[str, list[dict[str, Any]]]:
    """Return what is listed of each server; nothing where there is no list. Raises SettingsError."""
    file = root / LISTING
    try:
        listed = json.loads(file.read_bytes()) if file.is_file() else {}
        return {
            str(server): [{**tool, "name": str(tool["name"])} for tool in tools] for server, tools in listed.items()
        }
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise SettingsError(
            f"{file}: cannot be read ({type(error).__name__}); remove it and run `toolformer-dag servers`"
        ) from error


def with_server_lanes(values: Values, root: Path) -> Values:
    """Return the values with a section under `tools` for each listed tool of each server.

    A section that names `server` and `tool` gives that lane its key and its values; another of the tool's name gives it
    values. A tool that can have no lane is left out where a pattern alone asks for it, with a warning. Raises
    SettingsError for another such tool, for a server that is not listed yet, and for a tool that no server lists.
    """
    servers = values.get("servers")
    if not isinstance(servers, Mapping) or not servers:
        return values
    listing, sections = read_listing(root), dict(values.get("tools") or {})
    for name, server in servers.items():
        if name not in listing:
            raise SettingsError(f"[servers.{name}]: its tools are not listed yet; run `toolformer-dag servers`")
        sections.update(_lanes(name, server, listing[name], sections))
    return {**values, "tools": sections}


def _lanes(name: str, server: Values, listed: list[dict[str, Any]], sections: Values) -> Iterator[tuple[str, Values]]:
    """Yield key and section of each lane of a server; those in the settings win over what is listed."""
    named, made, silent = _named(name, listed, sections), dict[str, str](), list[str]()
    patterns, connection = list(map(str, server.get("tools", ["*"]))), dict(server)
    connection.pop("tools", None)
    known, bare = {*patterns, *named}, _some_have_sections(connection, listed, {*sections, *named})
    for tool in filter(lambda tool: _fits(tool["name"], known), listed):
        try:
            key = named.get(tool["name"]) or _free_key(tool["name"], name, sections)
            own = sections.get(key, {})
            if bare and known.isdisjoint([tool["name"]]) and key not in sections:
                silent.append(tool["name"][:SHOWN])
                continue
            _check(name, tool, made.setdefault(key, tool["name"]), own)
        except SettingsError as error:
            if tool["name"] in patterns:
                raise
            _leave_out(f"{error}. It has no lane.")
            continue
        described = {"description": tool.get("description", ""), "input_schema": tool.get("input_schema", {})}
        yield key, {"use": "mcp", "server": name, **connection, "tool": tool["name"], **described, **own}
    _leave_out_silent(name, tuple(silent))


def _some_have_sections(connection: Values, listed: list[dict[str, Any]], sections: set[str]) -> bool:
    """Return whether examples stand in sections of some lanes of a server, so that the others are not wanted."""
    keys = {key for tool in listed for key in (tool["name"], lane_key(tool["name"]))}
    return connection.keys().isdisjoint(("examples", "prompt")) and not keys.isdisjoint(sections)


def _fits(tool: str, patterns: set[str]) -> bool:
    return tool in patterns or any(fnmatchcase(tool, pattern) for pattern in patterns)


def _check(server: str, tool: Values, first: str, own: Values) -> None:
    """Raise SettingsError for a tool whose lane is that of another, or, without a section of its own, cannot be."""
    if first != tool["name"]:
        raise _unnamed(server, tool["name"], f"would share a lane with {first[:SHOWN]!r}")
    if tool.get(FAULT) and not own:
        raise SettingsError(f"[servers.{server}]: its tool {tool['name'][:SHOWN]!r}: {tool[FAULT]!r}")


@cache
def _leave_out(why: str) -> None:
    """Say once, however often settings are loaded, that a tool which a pattern asks for has no lane."""
    _log.warning("%s", why)


def _leave_out_silent(server: str, tools: tuple[str, ...]) -> None:
    """Name the tools of a pattern that nobody has written examples for."""
    more = f" and {len(tools) - FEW} more" if len(tools) > FEW else ""
    if tools:
        _leave_out(
            f"[servers.{server}]: no examples for {', '.join(map(repr, tools[:FEW]))}{more}, so there is no lane; "
            "write a section with examples, [tools.KEY], for each that is to have one, and name those in tools = [...]"
        )


def _named(name: str, listed: list[dict[str, Any]], sections: Values) -> dict[str, str]:
    """Return the sections that name a tool of the server, by the tool. Raises SettingsError where it is not listed."""
    of_server = {key: one for key, one in sections.items() if isinstance(one, Mapping) and one.get("server") == name}
    named = {str(section.get("tool")): key for key, section in of_server.items()}
    known = sorted(tool["name"] for tool in listed)
    for tool in sorted(named.keys() - set(known)):
        raise SettingsError(
            f"[tools.{named[tool]}] tool: the server {name!r} lists no {tool!r} ({', '.join(known)}); correct it, or "
            "list them again with `toolformer-dag servers`"
        )
    return named


def _free_key(tool: str, server: str, sections: Values) -> str:
    """Return the key of a tool's lane: its name, with the server's before it where another server's tool has that."""
    key = lane_key(tool)
    if not key or key in ASSET_GROUPS or SUFFIXED.fullmatch(key) or len(key) > MAX_KEY:
        raise _unnamed(server, tool, f"has a name that is no lane's (letters, digits and _, at most {MAX_KEY})")
    return key if sections.get(key, {}).get("server", server) == server else f"{server}_{key}"


def _unnamed(server: str, tool: str, why: str) -> SettingsError:
    return SettingsError(
        f"[servers.{server}]: its tool {tool[:SHOWN]!r} {why}; give it a section of its own, [tools.KEY] with server "
        "and tool, or leave it out with tools = [...]"
    )


def lane_key(tool: str) -> str:
    """Return the lane's key for a tool's name: getWeather, get-weather and get_weather are get_weather."""
    parted = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", tool)
    return re.sub(r"[^A-Za-z0-9]+", "_", parted).strip("_").lower()
