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

from toolformer_dag.settings.rounds import SUFFIXED
from toolformer_dag.settings.setting_types import ASSET_GROUPS, SettingsError, SettingsTable

_log = logging.getLogger(__name__)
LISTING = "mcp_tools.json"
"""The file next to toolformer.toml with the tools of each server, by the server's name.

A tool has `name`, `description`, `input_schema`, and FAULT if its calls cannot be written."""
MAX_KEY = 100
"""The most characters of a lane's key, which is also the name of a folder."""
FAULT = "fault"
"""The field of a listed tool that says why its calls cannot be written; missing if they can."""
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
    """Return the listed tools of each server from LISTING in the folder `root`; empty without such a file.

    Raises SettingsError if the file cannot be read.
    """
    file = root / LISTING
    try:
        listing = json.loads(file.read_bytes()) if file.is_file() else {}
        return {str(server): _parse_listed_tools(tools) for server, tools in listing.items()}
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise SettingsError(
            f"{file}: cannot be read ({type(error).__name__}); remove it and run `toolformer-dag servers`"
        ) from error


def _parse_listed_tools(tools: Any) -> list[dict[str, Any]]:
    """Return listed tools with their names as text. Raises KeyError or TypeError for another shape."""
    return [{**tool, "name": str(tool["name"])} for tool in tools]


def with_server_lanes(values: Values, root: Path) -> Values:
    """Return the settings with a lane, a section under `tools`, for each listed tool of each server.

    Its key is that of the section that names `server` and `tool`, else it follows from the tool's name (`lane_key`).

    root: the folder of toolformer.toml and LISTING.

    Raises SettingsError for a server that is not listed yet, and for a named tool that can have no lane.
    """
    servers = values.get("servers")
    if not isinstance(servers, Mapping) or not servers:
        return values
    listing = read_listing(root)
    sections = dict(values.get("tools") or {})
    for name, server in servers.items():
        if name not in listing:
            raise SettingsError(f"[servers.{name}]: its tools are not listed yet; run `toolformer-dag servers`")
        _ServerLanes(name, server, listing[name], sections).add()  # to `sections`
    return {**values, "tools": sections}


class _ServerLanes:
    """Adds the lanes of a server's tools to the sections `[tools.KEY]`.

    A tool is wanted if `tools` of the server's section names it or has a pattern for it, or if a section names it.
    """

    def __init__(self, name: str, server: Values, tools: Sequence[dict[str, Any]], sections: dict[str, Any]) -> None:
        """Read the server's section. Raises SettingsError if a section names a tool that is not listed.

        - `server`: the section `[servers.NAME]`
        - `tools`: the server's tools as listed
        - `sections`: key -> section `[tools.KEY]`; `add` adds lanes to it
        """
        self._name = name
        self._tools = tools
        self._sections = sections
        self._key_of_tool = _map_tool_to_key(name, tools, sections)  # of the section that names the tool
        self._patterns = [str(pattern) for pattern in server.get("tools", ["*"])]
        self._wanted = {*self._patterns, *self._key_of_tool}  # names of tools, and patterns for them
        self._connection = _without_tools(server)
        # Whether a tool that only a pattern names needs a section, where its examples would stand, to have a lane.
        self._requires_section = _some_have_sections(self._connection, tools, {*sections, *self._key_of_tool})
        self._tool_of_key: dict[str, str] = {}  # the first tool with each key
        self._without_examples: list[str] = []  # tools that `add` leaves out for want of a section, for a warning

    def add(self) -> None:
        """Add the lane of each wanted tool, in the order of the list; values of sections win over the server's.

        Raises SettingsError if `tools` names a tool that can have no lane.
        """
        for tool in self._tools:
            if _is_wanted(tool["name"], self._wanted):
                self._add_or_warn(tool)
        _warn_of_tools_without_examples(self._name, self._without_examples)

    def _add_or_warn(self, tool: Listed) -> None:
        """Add the lane of a tool, or warn why it has none. Raises SettingsError if `tools` names it."""
        try:
            self._add_unless_without_examples(tool)
        except SettingsError as error:
            if tool["name"] in self._patterns:
                raise
            _warn_once(f"{error}. It has no lane.")

    def _add_unless_without_examples(self, tool: Listed) -> None:
        """Add the lane of a tool, the section `[tools.KEY]`, or note that the tool lacks examples.

        Raises SettingsError where its key is another tool's, or its calls cannot be written.
        """
        name = tool["name"]
        key = self._key_of_tool.get(name) or _choose_free_key(name, self._name, self._sections)
        if self._lacks_examples(name, key):
            self._without_examples.append(name[:SHOWN])  # `add` warns of these
            return
        self._refuse_shared(name, key)
        self._refuse_faulty(tool, key)
        self._sections[key] = self._build_lane_section(tool, self._sections.get(key, {}))

    def _lacks_examples(self, tool: str, key: str) -> bool:
        """Return whether only a pattern asks for a tool that has no section, while others have one."""
        return self._requires_section and tool not in self._wanted and key not in self._sections

    def _refuse_shared(self, tool: str, key: str) -> None:
        """Raise SettingsError for a tool whose key another tool has."""
        first_tool = self._tool_of_key.setdefault(key, tool)
        if first_tool != tool:
            raise _build_section_error(self._name, tool, f"would share a lane with {first_tool[:SHOWN]!r}")

    def _refuse_faulty(self, tool: Listed, key: str) -> None:
        """Raise SettingsError for a tool whose calls cannot be written, unless a section may mend that."""
        if tool.get(FAULT) and not self._sections.get(key):
            raise SettingsError(f"[servers.{self._name}]: its tool {tool['name'][:SHOWN]!r}: {tool[FAULT]!r}")

    def _build_lane_section(self, tool: Listed, section: Values) -> dict[str, Any]:
        """Return the section of a tool's lane. section: the values that the settings have for it."""
        return {
            "use": "mcp",
            "server": self._name,
            **self._connection,
            "tool": tool["name"],
            "description": tool.get("description", ""),
            "input_schema": tool.get("input_schema", {}),
            **section,
        }


def _without_tools(server: Values) -> dict[str, Any]:
    """Return the keys of a server's section that are of its connection: all but `tools`."""
    return {field: value for field, value in server.items() if field != "tools"}


def _some_have_sections(connection: Values, tools: Sequence[dict[str, Any]], keys: set[str]) -> bool:
    """Return whether some tools of a server have sections with examples, so that tools without one are not wanted.

    connection: the server's own keys. keys: of all sections, and the tools that sections name.
    """
    if "examples" in connection or "prompt" in connection:
        return False
    names = [tool["name"] for tool in tools]
    return any(name in keys or lane_key(name) in keys for name in names)


def _is_wanted(tool: str, patterns: set[str]) -> bool:
    """Return whether a tool's name is among names, or matches a pattern among them."""
    return tool in patterns or any(fnmatchcase(tool, pattern) for pattern in patterns)


@cache
def _warn_once(message: str) -> None:
    """Log a warning once per process, however often settings are loaded."""
    _log.warning("%s", message)


def _warn_of_tools_without_examples(server: str, tools: list[str]) -> None:
    """Warn, once, of tools that only a pattern asks for and that nobody has written examples for."""
    if not tools:
        return
    names = ", ".join(repr(tool) for tool in tools[:FEW])
    more = f" and {len(tools) - FEW} more" if len(tools) > FEW else ""
    _warn_once(
        f"[servers.{server}]: no examples for {names}{more}, so there is no lane; "
        "write a section with examples, [tools.KEY], for each that is to have one, and name those in tools = [...]"
    )


def _map_tool_to_key(server: str, tools: Sequence[dict[str, Any]], sections: Values) -> dict[str, str]:
    """Return tool -> key of the section that names it (`server` and `tool`), for the tools of a server.

    Raises SettingsError if the server does not list such a tool.
    """
    key_of_tool: dict[str, str] = {}
    for key, section in sections.items():
        if isinstance(section, Mapping) and section.get("server") == server:
            key_of_tool[str(section.get("tool"))] = key
    _refuse_unlisted(server, key_of_tool, listed={tool["name"] for tool in tools})
    return key_of_tool


def _refuse_unlisted(server: str, key_of_tool: Mapping[str, str], listed: set[str]) -> None:
    """Raise SettingsError if a section names a tool that the server does not list."""
    unlisted = sorted(key_of_tool.keys() - listed)
    if unlisted:
        tool = unlisted[0]
        raise SettingsError(
            f"[tools.{key_of_tool[tool]}] tool: the server {server!r} lists no {tool!r} "
            f"({', '.join(sorted(listed))}); correct it, or list them again with `toolformer-dag servers`"
        )


def _choose_free_key(tool: str, server: str, sections: Values) -> str:
    """Return the key of a tool's lane, from the tool's name: `get_weather` for getWeather.

    If a section of another server has that key, the server's name stands before it: `office_get_weather`. Raises
    SettingsError if the name gives no key.
    """
    key = lane_key(tool)
    if not _may_be_key(key):
        raise _build_section_error(
            server, tool, f"has a name that is no lane's (letters, digits and _, at most {MAX_KEY})"
        )
    section = sections.get(key, {})
    is_of_other_server = section.get("server", server) != server  # a section without `server` may be this tool's
    return f"{server}_{key}" if is_of_other_server else key


def _may_be_key(key: str) -> bool:
    """Return whether a lane may have a key: it is neither empty nor too long, and names nothing else."""
    has_fitting_length = 0 < len(key) <= MAX_KEY
    names_something_else = key in ASSET_GROUPS or SUFFIXED.fullmatch(key) is not None
    return has_fitting_length and not names_something_else


def _build_section_error(server: str, tool: str, why: str) -> SettingsError:
    """Return the error for a tool that can only have a lane by a section of its own."""
    return SettingsError(
        f"[servers.{server}]: its tool {tool[:SHOWN]!r} {why}; give it a section of its own, [tools.KEY] with server "
        "and tool, or leave it out with tools = [...]"
    )


def lane_key(tool: str) -> str:
    """Return the lane's key for a tool's name: `get_weather` for getWeather, get-weather and get_weather."""
    words_apart = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", tool)
    return re.sub(r"[^A-Za-z0-9]+", "_", words_apart).strip("_").lower()
