"""Lanes of MCP servers: `[servers.office]` makes one per tool, from what `toolformer-dag servers` listed.

The list lies beside toolformer.toml, so that settings load without a server, and no server changes a lane by itself.
"""

import json
import logging
import re
from collections.abc import Mapping
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import Any

from pydantic import ConfigDict, Field

from toolformer_dag.settings.rounds import SUFFIXED
from toolformer_dag.settings.setting_types import ASSET_GROUPS, SettingsError, SettingsTable

_log = logging.getLogger(__name__)
LISTING = "mcp_tools.json"
"""The file beside toolformer.toml with the tools of each server, by its name.

A tool has `name`, `description`, `input_schema`, and FAULT where its calls cannot be written."""
MAX_KEY = 100
"""Characters of a lane's key that a tool's name gives: folders are named by it."""
FAULT = "fault"
"""The field of a listed tool that says why its calls cannot be written, where they cannot."""
SHOWN = 60
"""Characters of a tool's name in messages."""
FEW = 8
"""Names that a message lists."""
Values = Mapping[str, Any]
"""A table of settings as it is written, before it is validated."""
Listed = Mapping[str, Any]
"""A tool of a server as LISTING has it."""


class ServerSettings(SettingsTable):
    """Configure an MCP server; further keys are those of its connection: command or url, env, version and so on."""

    model_config = ConfigDict(extra="allow")

    tools: tuple[str, ...] = Field(
        ("*",), description="Tools of the server that have a lane: names, or patterns with `*`."
    )


def read_listing(root: Path) -> dict[str, list[dict[str, Any]]]:
    """Return the tools of each server as LISTING in the folder `root` has them, by server; nothing without such a file.

    Raises SettingsError where the file cannot be read.
    """
    file = root / LISTING
    tools_by_server: dict[str, list[dict[str, Any]]] = {}
    try:
        listing = json.loads(file.read_bytes()) if file.is_file() else {}
        for server, tools in listing.items():
            tools_by_server[str(server)] = [{**tool, "name": str(tool["name"])} for tool in tools]
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise SettingsError(
            f"{file}: cannot be read ({type(error).__name__}); remove it and run `toolformer-dag servers`"
        ) from error
    return tools_by_server


def with_server_lanes(values: Values, root: Path) -> Values:
    """Return the settings with a section under `tools` for each listed tool of each server: these tools have lanes.

    root: the folder of toolformer.toml, where LISTING lies.

    A section that names `server` and `tool` gives the tool's lane its key and its values. Else the key follows from the
    tool's name (`lane_key`), and a section of that key gives it values. A tool that can have no lane is left out, with
    a warning, where only a pattern asks for it.

    Raises SettingsError for another such tool, for a server that is not listed yet, and for a tool that no server
    lists.
    """
    servers = values.get("servers")
    if not isinstance(servers, Mapping) or not servers:
        return values
    tools_by_server = read_listing(root)
    sections = dict(values.get("tools") or {})
    for name, server in servers.items():
        if name not in tools_by_server:
            raise SettingsError(f"[servers.{name}]: its tools are not listed yet; run `toolformer-dag servers`")
        _add_lanes(name, server, tools_by_server[name], sections)
    return {**values, "tools": sections}


def _add_lanes(server_name: str, server: Values, tools: list[dict[str, Any]], sections: dict[str, Any]) -> None:
    """Add the section of each lane of a server to `sections`, in the order in which its tools are listed.

    server: the section `[servers.NAME]`.
    tools: the server's tools as listed.
    sections: the sections `[tools.KEY]`, by key. Their values win over those of the server and of the list.

    A tool has a lane where `tools` of the server's section names it or has a pattern for it, or where a section names
    it. It is left out with a warning
    - where it can have no lane: its name is no key, another tool has its key, or its calls cannot be written
    - where only a pattern asks for it and it has no section, while others have one (`_some_have_sections`)

    Raises SettingsError where `tools` names a tool that can have no lane, and where a section names a tool that is not
    listed.
    """
    key_of_tool = _keys_by_tool(server_name, tools, sections)
    patterns = [str(pattern) for pattern in server.get("tools", ["*"])]
    connection = {field: value for field, value in server.items() if field != "tools"}
    wanted = {*patterns, *key_of_tool}  # names and patterns
    needs_section = _some_have_sections(connection, tools, {*sections, *key_of_tool})
    tool_of_key: dict[str, str] = {}  # the first tool with each key
    without_examples: list[str] = []
    for tool in tools:
        tool_name = tool["name"]
        if not _is_wanted(tool_name, wanted):
            continue
        try:
            key = key_of_tool.get(tool_name) or _free_key(tool_name, server_name, sections)
            section = sections.get(key, {})
            only_by_pattern = tool_name not in wanted
            if needs_section and only_by_pattern and key not in sections:
                without_examples.append(tool_name[:SHOWN])
                continue
            first_tool = tool_of_key.setdefault(key, tool_name)
            _refuse_shared_or_faulty(server_name, tool, first_tool=first_tool, has_section=bool(section))
        except SettingsError as error:
            if tool_name in patterns:
                raise
            _warn_once(f"{error}. It has no lane.")
            continue
        sections[key] = {
            "use": "mcp",
            "server": server_name,
            **connection,
            "tool": tool_name,
            "description": tool.get("description", ""),
            "input_schema": tool.get("input_schema", {}),
            **section,
        }
    _warn_of_tools_without_examples(server_name, without_examples)


def _some_have_sections(connection: Values, tools: list[dict[str, Any]], keys: set[str]) -> bool:
    """Return whether some tools of a server have sections with examples, so that those without one are not wanted.

    connection: the server's own keys. Where they have examples or a prompt, these are of all its tools: the result is
        False.
    keys: the keys of all sections, and the names of the tools that sections name.
    """
    if "examples" in connection or "prompt" in connection:
        return False
    names = [tool["name"] for tool in tools]
    return any(name in keys or lane_key(name) in keys for name in names)


def _is_wanted(tool: str, patterns: set[str]) -> bool:
    """Return whether a tool's name is one of these names, or matches one of these patterns."""
    return tool in patterns or any(fnmatchcase(tool, pattern) for pattern in patterns)


def _refuse_shared_or_faulty(server: str, tool: Listed, *, first_tool: str, has_section: bool) -> None:
    """Raise SettingsError for a tool whose key another has, and for one whose calls cannot be written.

    first_tool: the name of the first tool with its key. A section may mend what is at fault, such as the schema.
    """
    if first_tool != tool["name"]:
        raise _needs_section(server, tool["name"], f"would share a lane with {first_tool[:SHOWN]!r}")
    if tool.get(FAULT) and not has_section:
        raise SettingsError(f"[servers.{server}]: its tool {tool['name'][:SHOWN]!r}: {tool[FAULT]!r}")


@cache
def _warn_once(message: str) -> None:
    """Log a warning the first time that this process has it, however often settings are loaded."""
    _log.warning("%s", message)


def _warn_of_tools_without_examples(server: str, tools: list[str]) -> None:
    """Warn, once, of tools that only a pattern asks for and nobody has written examples for."""
    if not tools:
        return
    names = ", ".join(repr(tool) for tool in tools[:FEW])
    more = f" and {len(tools) - FEW} more" if len(tools) > FEW else ""
    _warn_once(
        f"[servers.{server}]: no examples for {names}{more}, so there is no lane; "
        "write a section with examples, [tools.KEY], for each that is to have one, and name those in tools = [...]"
    )


def _keys_by_tool(server: str, tools: list[dict[str, Any]], sections: Values) -> dict[str, str]:
    """Return, for each tool of a server that a section names (`server` and `tool`), the section's key.

    Raises SettingsError where the server does not list such a tool.
    """
    key_of_tool: dict[str, str] = {}
    for key, section in sections.items():
        if isinstance(section, Mapping) and section.get("server") == server:
            key_of_tool[str(section.get("tool"))] = key
    listed_names = sorted(tool["name"] for tool in tools)
    unlisted = sorted(key_of_tool.keys() - set(listed_names))
    if unlisted:
        tool_name = unlisted[0]
        raise SettingsError(
            f"[tools.{key_of_tool[tool_name]}] tool: the server {server!r} lists no {tool_name!r} "
            f"({', '.join(listed_names)}); correct it, or list them again with `toolformer-dag servers`"
        )
    return key_of_tool


def _free_key(tool: str, server: str, sections: Values) -> str:
    """Return the key of a tool's lane: `lane_key`, after the server's name where another server's tool has that key.

    Raises SettingsError where the tool's name gives no key.
    """
    key = lane_key(tool)
    is_key = key and len(key) <= MAX_KEY and key not in ASSET_GROUPS and not SUFFIXED.fullmatch(key)
    if not is_key:
        raise _needs_section(server, tool, f"has a name that is no lane's (letters, digits and _, at most {MAX_KEY})")
    server_of_key = sections.get(key, {}).get("server", server)
    return key if server_of_key == server else f"{server}_{key}"


def _needs_section(server: str, tool: str, why: str) -> SettingsError:
    """Return the error of a tool that can only have a lane by a section of its own."""
    return SettingsError(
        f"[servers.{server}]: its tool {tool[:SHOWN]!r} {why}; give it a section of its own, [tools.KEY] with server "
        "and tool, or leave it out with tools = [...]"
    )


def lane_key(tool: str) -> str:
    """Return the lane's key for a tool's name: `get_weather` for getWeather, get-weather and get_weather."""
    words_apart = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", tool)
    return re.sub(r"[^A-Za-z0-9]+", "_", words_apart).strip("_").lower()
