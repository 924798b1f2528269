"""Lanes of MCP servers: `[servers.office]` makes one per tool, from what `toolformer-dag servers` listed.

The list lies beside toolformer.toml, so that settings load without a server, and no server changes a lane by itself.
"""

import json
import re
from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from pydantic import ConfigDict, Field

from toolformer_dag.settings.setting_types import SettingsError, SettingsTable

LISTING = "mcp_tools.json"
"""Server -> its tools, each with `name`, `description` and `input_schema`; in the folder of toolformer.toml."""
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
            str(server): [{**tool, "name": str(tool["name"])} for tool in found] for server, found in listed.items()
        }
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise SettingsError(
            f"{file}: cannot be read ({type(error).__name__}); remove it and run `toolformer-dag servers`"
        ) from error


def with_server_lanes(values: Values, root: Path) -> Values:
    """Return the values with a section under `tools` for each listed tool of each server.

    A section that names `server` and `tool` gives that lane its key and its values; another of the tool's name gives it
    values. Raises SettingsError for a server that is not listed yet, and for a tool that its server does not list.
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
    named = {
        section.get("tool"): key
        for key, section in sections.items()
        if isinstance(section, Mapping) and section.get("server") == name
    }
    if unknown := named.keys() - {tool["name"] for tool in listed}:
        known = ", ".join(sorted(tool["name"] for tool in listed))
        raise SettingsError(
            f"[tools.{named[min(unknown, key=str)]}] tool: the server {name!r} lists no {min(unknown, key=str)!r} "
            f"({known}); correct it, or list them again with `toolformer-dag servers`"
        )
    connection = {key: value for key, value in server.items() if key != "tools"}
    for tool in listed:
        if tool["name"] in named or any(fnmatchcase(tool["name"], str(one)) for one in server.get("tools", ["*"])):
            key = named.get(tool["name"]) or lane_key(tool["name"])
            if sections.get(key, {}).get("server", name) != name:  # another server's tool has this name
                key = f"{name}_{key}"
            told = {"description": tool.get("description", ""), "input_schema": tool.get("input_schema", {})}
            own = sections.get(key, {})
            yield key, {"use": "mcp", "server": name, **connection, "tool": tool["name"], **told, **own}


def lane_key(tool: str) -> str:
    """Return the lane's key for a tool's name: getWeather, get-weather and get_weather are get_weather."""
    parted = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", tool)
    return re.sub(r"[^A-Za-z0-9]+", "_", parted).strip("_").lower()
