"""Add a lane (a tool with its settings) for each tool of an MCP server, `[servers.office]` in toolformer.toml.

`toolformer-dag servers` writes the list of tools next to toolformer.toml, so that settings load without a server, and
no server changes a lane by itself.
"""

import json
import logging
import re
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import Any

from pydantic import ConfigDict, Field

from toolformer_dag.settings.rounds import ROUND_LANE_PATTERN
from toolformer_dag.settings.setting_types import NON_LANE_GROUPS, SettingsError, SettingsTable

_log = logging.getLogger(__name__)
LISTING_FILE_NAME = "mcp_tools.json"
"""The file next to toolformer.toml with the tools of each server, by the server's name.

A tool has `name`, `description`, `input_schema`, and FAULT_FIELD if its calls cannot be written."""
MAX_KEY_CHARACTERS = 100
"""The most characters of a lane's key, which is also the name of a folder."""
FAULT_FIELD = "fault"
"""The field of a listed tool that says why its calls cannot be written; missing if they can."""
MAX_SHOWN_CHARACTERS = 60
"""Characters of a tool's name in messages."""
MAX_LISTED_NAMES = 8
"""Names that a message lists."""
SettingValues = Mapping[str, Any]
"""A table of settings as it is written, before it is validated."""
ListedTool = Mapping[str, Any]
"""A tool of a server, as the file LISTING_FILE_NAME lists it."""


class ServerSettings(SettingsTable):
    """Configure an MCP server; further keys are those of its connection: command or url, env, version and so on."""

    model_config = ConfigDict(extra="allow")

    tools: tuple[str, ...] = Field(
        ("*",), description="Tools of the server that have a lane: names, or patterns with `*`."
    )


def read_tool_listing(root: Path) -> dict[str, list[dict[str, Any]]]:
    """Read which tools each MCP server has, from the file that `toolformer-dag servers` wrote.

    Args:
        root: The folder of toolformer.toml, in which the file is.

    Returns:
        The tools by the server's name, or an empty dict if there is no such file.

    Raises:
        SettingsError: The file cannot be read.
    """
    file = root / LISTING_FILE_NAME
    try:
        listing = json.loads(file.read_bytes()) if file.is_file() else {}
        return {str(server_name): _parse_listed_tools(tools) for server_name, tools in listing.items()}
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise SettingsError(
            f"{file}: cannot be read ({type(error).__name__}); remove it and run `toolformer-dag servers`"
        ) from error


def _parse_listed_tools(tools: Any) -> list[dict[str, Any]]:
    """Return the listed tools of a server, with their names as text.

    Raises:
        KeyError: A tool has no name.
        TypeError: The value is not a list of dicts.
    """
    return [{**tool, "name": str(tool["name"])} for tool in tools]


def add_server_lanes(setting_values: SettingValues, root: Path) -> SettingValues:
    """Add a lane, which is a section under `tools`, for each wanted tool of each MCP server.

    If a section names the `server` and the `tool`, its key is the key of the lane. Otherwise the key follows from the
    tool's name (see `build_lane_key`).

    Args:
        setting_values: The tables of all settings.
        root: The folder of toolformer.toml and of the list of tools.

    Returns:
        The settings with the further sections. Without servers, the same settings.

    Raises:
        SettingsError: The tools of a server are not listed yet, or the list cannot be read. Or a section names a tool
            that its server does not list, or a server's section names a tool that can have no lane.
    """
    servers = setting_values.get("servers")
    if not isinstance(servers, Mapping) or not servers:
        return setting_values

    listing = read_tool_listing(root)
    sections_by_key = dict(setting_values.get("tools") or {})

    for server_name, server_section in servers.items():
        if server_name not in listing:
            raise SettingsError(f"[servers.{server_name}]: its tools are not listed yet; run `toolformer-dag servers`")
        server_lanes = _ServerLanes(server_name, server_section, listing[server_name], sections_by_key)
        server_lanes.add_lanes()  # changes `sections_by_key`

    return {**setting_values, "tools": sections_by_key}


class _ServerLanes:
    """Adds the lanes of a server's tools, each a section `[tools.KEY]`, to the settings.

    A tool is wanted if `tools` of the server's section names it or has a pattern for it, or if a section names it.
    """

    def __init__(
        self,
        server_name: str,
        server_section: SettingValues,
        listed_tools: Sequence[dict[str, Any]],
        sections_by_key: dict[str, Any],
    ) -> None:
        """Find out which tools of a server are wanted.

        Args:
            server_name: The name of the server.
            server_section: The section `[servers.NAME]`.
            listed_tools: The server's tools as listed.
            sections_by_key: The sections `[tools.KEY]` by key. `add_lanes` adds to this dict.

        Raises:
            SettingsError: A section names a tool that the server does not list.
        """
        self._server_name = server_name
        self._listed_tools = listed_tools
        self._sections_by_key = sections_by_key
        # tool -> key of the section `[tools.KEY]` that names it in its value `tool`
        self._key_by_tool = _map_tool_to_key(server_name, listed_tools, sections_by_key)
        self._tool_patterns = [str(pattern) for pattern in server_section.get("tools", ["*"])]
        self._wanted_patterns = {*self._tool_patterns, *self._key_by_tool}  # names of tools, and patterns for them
        self._connection_values = _select_connection_values(server_section)
        # If one tool has a section, where its examples stand, tools without a section get no lane (a tool with its
        # settings), unless the server's section names them or has examples for all.
        keys_and_tools_of_sections = {*sections_by_key, *self._key_by_tool}
        self._requires_section = _has_tool_sections(self._connection_values, listed_tools, keys_and_tools_of_sections)
        self._tool_by_key: dict[str, str] = {}  # the first tool with each key
        self._tools_without_examples: list[str] = []  # tools that are left out because they have no section

    def add_lanes(self) -> None:
        """Add the lane of each wanted tool, in the order of the list, and warn of tools that get none.

        Raises:
            SettingsError: The server's section names a tool that can have no lane.
        """
        for tool in self._listed_tools:
            if _is_tool_wanted(tool["name"], self._wanted_patterns):
                self._add_lane_or_warn(tool)
        _warn_of_tools_without_examples(self._server_name, self._tools_without_examples)

    def _add_lane_or_warn(self, listed_tool: ListedTool) -> None:
        """Add the lane of a tool, or warn that it can have none.

        Raises:
            SettingsError: It can have none although the server's section names it.
        """
        try:
            self._add_lane_with_examples(listed_tool)
        except SettingsError as error:
            if listed_tool["name"] in self._tool_patterns:
                raise
            _warn_once(f"{error}. It has no lane.")

    def _add_lane_with_examples(self, listed_tool: ListedTool) -> None:
        """Add the lane of a tool, or note that the tool lacks examples.

        The lane is the section `[tools.KEY]`. Values that such a section has already win over those of the server.

        Raises:
            SettingsError: Another tool has the same key, the tool's name gives no key, or its calls cannot be written.
        """
        tool_name = listed_tool["name"]
        key_of_naming_section = self._key_by_tool.get(tool_name)  # None if no section names the tool
        key = key_of_naming_section or _choose_free_key(tool_name, self._server_name, self._sections_by_key)

        if self._lacks_examples(tool_name, key):
            self._tools_without_examples.append(tool_name[:MAX_SHOWN_CHARACTERS])
            return

        self._refuse_shared_key(tool_name, key)
        self._refuse_faulty_tool(listed_tool, key)

        section_values = self._sections_by_key.get(key, {})
        self._sections_by_key[key] = self._build_lane_section(listed_tool, section_values)

    def _lacks_examples(self, tool_name: str, key: str) -> bool:
        """Check whether a tool is left out: only a pattern asks for it, and it has no section while other tools do."""
        return self._requires_section and tool_name not in self._wanted_patterns and key not in self._sections_by_key

    def _refuse_shared_key(self, tool_name: str, key: str) -> None:
        """Check that no other tool of the server has the key of a tool, and note that the tool has it.

        Raises:
            SettingsError: An earlier tool has this key.
        """
        first_tool = self._tool_by_key.setdefault(key, tool_name)
        if first_tool != tool_name:
            reason = f"would share a lane with {first_tool[:MAX_SHOWN_CHARACTERS]!r}"
            raise _build_section_error(self._server_name, tool_name, reason)

    def _refuse_faulty_tool(self, listed_tool: ListedTool, key: str) -> None:
        """Check that calls of a tool can be written, unless it has a section `[tools.KEY]`, which may mend the fault.

        Raises:
            SettingsError: The calls cannot be written.
        """
        fault = listed_tool.get(FAULT_FIELD)
        has_section = bool(self._sections_by_key.get(key))
        if fault and not has_section:
            shown_name = listed_tool["name"][:MAX_SHOWN_CHARACTERS]
            raise SettingsError(f"[servers.{self._server_name}]: its tool {shown_name!r}: {fault!r}")

    def _build_lane_section(self, listed_tool: ListedTool, section_values: SettingValues) -> dict[str, Any]:
        """Build the section of a tool's lane.

        Args:
            listed_tool: The tool as the server lists it.
            section_values: The values that the settings have for it, which win over all others.
        """
        return {
            "use": "mcp",
            "server": self._server_name,
            **self._connection_values,
            "tool": listed_tool["name"],
            "description": listed_tool.get("description", ""),
            "input_schema": listed_tool.get("input_schema", {}),
            **section_values,
        }


def _select_connection_values(server_section: SettingValues) -> dict[str, Any]:
    """Return the values of a server's section that configure its connection, which are all but `tools`."""
    return {field: value for field, value in server_section.items() if field != "tools"}


def _has_tool_sections(
    connection_values: SettingValues, listed_tools: Sequence[dict[str, Any]], section_keys: set[str]
) -> bool:
    """Check whether a server's tools get their examples from sections of their own, such as `[tools.get_weather]`.

    If so, tools without a section have no examples, and may be left out.

    Args:
        connection_values: The values of the server's section. `examples` or `prompt` there are for all its tools, so
            that no tool needs a section.
        listed_tools: The tools of the server.
        section_keys: The keys of all sections `[tools.KEY]`, and the names of the tools that sections name.
    """
    if "examples" in connection_values or "prompt" in connection_values:
        return False

    for tool in listed_tools:
        tool_name = tool["name"]
        if tool_name in section_keys or build_lane_key(tool_name) in section_keys:
            return True
    return False


def _is_tool_wanted(tool_name: str, patterns: set[str]) -> bool:
    """Check whether a tool's name is in a set of names and patterns, or matches a pattern in it such as "get_*"."""
    if tool_name in patterns:
        return True
    return any(fnmatchcase(tool_name, pattern) for pattern in patterns)


@cache
def _warn_once(message: str) -> None:
    """Log a warning once per process, however often settings are loaded."""
    _log.warning("%s", message)


def _warn_of_tools_without_examples(server_name: str, tool_names: list[str]) -> None:
    """Warn that tools have no lane because there are no examples for them. Equal warnings are logged only once."""
    if not tool_names:
        return

    listed_names = ", ".join(repr(tool_name) for tool_name in tool_names[:MAX_LISTED_NAMES])
    unlisted_count = len(tool_names) - MAX_LISTED_NAMES
    if unlisted_count > 0:
        listed_names += f" and {unlisted_count} more"

    _warn_once(
        f"[servers.{server_name}]: no examples for {listed_names}, so there is no lane; "
        "write a section with examples, [tools.KEY], for each that is to have one, and name those in tools = [...]"
    )


def _map_tool_to_key(
    server_name: str, listed_tools: Sequence[dict[str, Any]], sections_by_key: SettingValues
) -> dict[str, str]:
    """Find the sections that name a tool of a server, in their values `server` and `tool`.

    Args:
        server_name: The name of the server.
        listed_tools: The tools that the server has.
        sections_by_key: The sections `[tools.KEY]` by key.

    Returns:
        The key of the section for each named tool: {"getWeather": "weather"}.

    Raises:
        SettingsError: A section names a tool that the server does not list.
    """
    key_by_tool: dict[str, str] = {}
    for key, section in sections_by_key.items():
        if isinstance(section, Mapping) and section.get("server") == server_name:
            tool_name = str(section.get("tool"))
            key_by_tool[tool_name] = key

    listed_names = {tool["name"] for tool in listed_tools}
    _refuse_unlisted_tools(server_name, key_by_tool, listed_names)
    return key_by_tool


def _refuse_unlisted_tools(server_name: str, key_by_tool: Mapping[str, str], listed_names: set[str]) -> None:
    """Check that a server lists all tools that sections name.

    Args:
        server_name: The name of the server.
        key_by_tool: The key of the section that names each tool.
        listed_names: The names of the tools that the server lists.

    Raises:
        SettingsError: The server does not list such a tool.
    """
    unlisted_names = sorted(key_by_tool.keys() - listed_names)
    if not unlisted_names:
        return

    tool_name = unlisted_names[0]
    key = key_by_tool[tool_name]
    known_names = ", ".join(sorted(listed_names))
    raise SettingsError(
        f"[tools.{key}] tool: the server {server_name!r} lists no {tool_name!r} "
        f"({known_names}); correct it, or list them again with `toolformer-dag servers`"
    )


def _choose_free_key(tool_name: str, server_name: str, sections_by_key: SettingValues) -> str:
    """Choose the key of a tool's lane (the section `[tools.KEY]`) from the tool's name: "get_weather" for getWeather.

    If another server's section has this key already, the name of the tool's server comes first: "office_get_weather".

    Raises:
        SettingsError: The name gives no valid key.
    """
    key = build_lane_key(tool_name)
    if not _is_valid_lane_key(key):
        reason = f"has a name that is no lane's (letters, digits and _, at most {MAX_KEY_CHARACTERS})"
        raise _build_section_error(server_name, tool_name, reason)

    section = sections_by_key.get(key, {})
    server_of_section = section.get("server", server_name)  # a section without `server` may be for this tool
    if server_of_section != server_name:
        return f"{server_name}_{key}"
    return key


def _is_valid_lane_key(key: str) -> bool:
    """Check whether a lane may have a key: it is neither empty nor too long, and is not a reserved name."""
    has_fitting_length = 0 < len(key) <= MAX_KEY_CHARACTERS
    names_something_else = key in NON_LANE_GROUPS or ROUND_LANE_PATTERN.fullmatch(key) is not None
    return has_fitting_length and not names_something_else


def _build_section_error(server_name: str, tool_name: str, reason: str) -> SettingsError:
    """Build the error for a tool that cannot have a lane unless the settings have a section for it."""
    shown_name = tool_name[:MAX_SHOWN_CHARACTERS]
    return SettingsError(
        f"[servers.{server_name}]: its tool {shown_name!r} {reason}; give it a section of its own, [tools.KEY] with "
        "server and tool, or leave it out with tools = [...]"
    )


def build_lane_key(tool_name: str) -> str:
    """Convert a tool's name to the key of a lane: getWeather, get-weather and get_weather become "get_weather"."""
    with_separated_words = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", tool_name)
    with_underscores = re.sub(r"[^A-Za-z0-9]+", "_", with_separated_words)
    return with_underscores.strip("_").lower()
