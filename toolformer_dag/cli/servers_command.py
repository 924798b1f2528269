"""`servers`: list the tools of MCP servers, and what changed since the last list."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from pydantic import ValidationError

from toolformer_dag.cli.terminal import ConfigOption, escape_control_characters
from toolformer_dag.files import UserError, write_file_atomically
from toolformer_dag.settings.servers import (
    FAULT_FIELD,
    LISTING_FILE_NAME,
    ServerSettings,
    build_lane_key,
    read_tool_listing,
)
from toolformer_dag.settings.settings_file import load_server_settings, load_settings

if TYPE_CHECKING:
    from mcp.types import Tool

    from toolformer_dag.tools.mcp_options import McpOptions

ListedTools = list[dict[str, Any]]
"""Tools of a server as in mcp_tools.json: name, description, input_schema; FAULT_FIELD if it cannot be called."""


def servers(config: ConfigOption = None) -> None:
    """Ask the servers of [servers.NAME] for their tools; each becomes a lane. What changed since the last time is told.

    What cannot be asked is named, and keeps the tools that were listed before.

    The list is mcp_tools.json beside toolformer.toml: keep it with your settings. A tool whose arguments changed makes
    its lane stale, and no other.
    """
    settings_by_server, root = load_server_settings(config)
    if not settings_by_server:
        raise UserError(
            'there is no [servers.NAME] in toolformer.toml; add one with command = ["program"] or url = "..."'
        )

    # Servers that are no longer in the settings are forgotten.
    old_listing = read_tool_listing(root)
    previous_tools_by_server = {name: tools for name, tools in old_listing.items() if name in settings_by_server}

    # Servers that do not answer now keep the tools that they had before.
    tools_by_server = _list_tools_by_server(settings_by_server, root, previous_tools_by_server)
    _write_tool_listing(root, {**previous_tools_by_server, **tools_by_server})
    _print_unusable_lanes(config)

    some_failed = len(tools_by_server) < len(settings_by_server)
    if some_failed:
        raise typer.Exit(1)


def _list_tools_by_server(
    server_settings_by_name: Mapping[str, ServerSettings],
    root: Path,
    previous_tools_by_server: Mapping[str, ListedTools],
) -> dict[str, ListedTools]:
    """Ask each MCP server for its tools, and print them with what changed.

    Args:
        server_settings_by_name: How each server is reached.
        root: The folder that relative paths in the settings start from.
        previous_tools_by_server: The tools that were listed last time.

    Returns:
        The tools by server. A server that cannot be asked is left out, and its error is printed.
    """
    tools_by_server = {}
    for server_name, server_settings in server_settings_by_name.items():
        previous_tools = previous_tools_by_server.get(server_name, [])
        try:
            listed_tools = _list_server_tools(server_name, server_settings, root)
            tools_by_server[server_name] = listed_tools
            _print_server_tools(server_name, listed_tools, previous_tools)
        except UserError as error:
            _print_error(error)  # and go on with the next server
    return tools_by_server


def _write_tool_listing(root: Path, tools_by_server: Mapping[str, ListedTools]) -> None:
    """Write mcp_tools.json in the project's folder, which holds the tools by server."""
    listing = json.dumps(tools_by_server, ensure_ascii=False, indent=1)
    write_file_atomically(root / LISTING_FILE_NAME, f"{listing}\n".encode())


def _print_error(error: UserError) -> None:
    """Print an error on standard error; the command goes on."""
    typer.echo(f"error: {escape_control_characters(str(error))}", err=True)


def _print_unusable_lanes(config_file: Path | None) -> None:
    """Print why tools of MCP servers cannot be loaded. Most lack examples of calls, which a person has to write.

    If the settings are wrong, their error is printed instead.
    """
    try:
        settings = load_settings(config_file)
    except UserError as error:
        _print_error(error)
        return

    for lane_key, section in settings.tools.items():
        tool_options = section.get_tool_options()
        is_server_tool = tool_options.get("use") == "mcp"
        if section.enabled and is_server_tool:
            _print_if_lane_unusable(lane_key, tool_options, settings.root)


def _print_if_lane_unusable(lane_key: str, tool_options: Mapping[str, Any], root: Path) -> None:
    """Try to load the tool of a lane, and print the error if that fails.

    Args:
        lane_key: The name of its section in the settings: "weather" for [tools.weather].
        tool_options: The options in that section.
        root: The folder that relative paths in them start from.
    """
    from toolformer_dag.tools.registry import load_tool

    try:
        load_tool(lane_key, tool_options, root=root)
    except UserError as error:
        typer.echo(f"\n{escape_control_characters(str(error))}")


def _list_server_tools(server_name: str, server_settings: ServerSettings, root: Path) -> ListedTools:
    """Ask an MCP server for its tools, and return their entries for mcp_tools.json, sorted by name.

    Raises:
        UserError: The options of the server are wrong, or it does not answer.
    """
    from toolformer_dag.tools.mcp_session import fetch_server_tools

    connection_options = _build_connection_options(server_name, server_settings, root)
    mcp_tools = fetch_server_tools(connection_options)
    sorted_tools = sorted(mcp_tools, key=lambda mcp_tool: mcp_tool.name)
    return [_build_tool_entry(mcp_tool) for mcp_tool in sorted_tools]


def _build_connection_options(server_name: str, server_settings: ServerSettings, root: Path) -> "McpOptions":
    """Return the options with which a server is reached, from its section [servers.NAME] of the settings.

    Args:
        server_name: The name of the section.
        server_settings: The section.
        root: The folder that relative paths in it start from.

    Raises:
        UserError: An option is wrong. The message names it.
    """
    from toolformer_dag.tools.mcp_options import McpOptions
    from toolformer_dag.tools.options import explain_option_errors

    try:
        section_options = server_settings.model_extra or {}
        options = {"server": server_name, "tool": "", **section_options}
        return McpOptions.model_validate(options, context={"root": root})
    except ValidationError as error:
        # The explanation is written for the section of a tool, [tools.NAME].
        explanation = explain_option_errors(server_name, error, McpOptions)
        raise UserError(explanation.replace("[tools.", "[servers.")) from error


def _build_tool_entry(mcp_tool: "Tool") -> dict[str, Any]:
    """Return the entry of a tool in mcp_tools.json: its name, description and arguments.

    If calls of the tool cannot be written because of its arguments, the entry also says why.
    """
    from toolformer_dag.texts.arguments import find_schema_fault

    tool_entry = {
        "name": mcp_tool.name,
        "description": mcp_tool.description or "",
        "input_schema": mcp_tool.input_schema,
    }
    fault = find_schema_fault(mcp_tool.input_schema)
    if fault:
        tool_entry[FAULT_FIELD] = fault
    return tool_entry


def _print_server_tools(server_name: str, listed_tools: ListedTools, previous_tools: ListedTools) -> None:
    """Print how many tools a server has, and a line for each one that says what changed since the last list."""
    typer.echo(f"{server_name}: {len(listed_tools)} tools")
    for line in _iter_tool_lines(listed_tools, previous_tools):
        typer.echo(f"  {_to_one_line(line)}")


def _iter_tool_lines(listed_tools: ListedTools, previous_tools: ListedTools) -> Iterator[str]:
    """Yield a line for each tool of a server, then a line for each one that is gone since the last list."""
    previous_tool_by_name = {tool["name"]: tool for tool in previous_tools}
    for tool in listed_tools:
        yield _format_tool_line(tool, previous_tool_by_name.get(tool["name"]))

    listed_names = {tool["name"] for tool in listed_tools}
    gone_names = previous_tool_by_name.keys() - listed_names
    for name in sorted(gone_names):
        yield f"{build_lane_key(name)}: {name}  gone"


def _format_tool_line(listed_tool: Mapping[str, Any], previous_tool: Mapping[str, Any] | None) -> str:
    """Format a tool as a line: its lane, its name, its arguments, and how it changed since the last list.

    For example, `get_weather: get-weather(city, days)  as before`.

    Args:
        listed_tool: The tool's entry in mcp_tools.json.
        previous_tool: Its entry in the last list. None if it was not there.
    """
    from toolformer_dag.texts.arguments import list_argument_names

    tool_name = listed_tool["name"]
    names = f"{build_lane_key(tool_name)}: {tool_name}"
    change = _describe_tool_change(listed_tool, previous_tool)

    fault = listed_tool.get(FAULT_FIELD)
    if fault:
        return f"{names}  {change}; its calls cannot be written: {fault}"
    arguments = ", ".join(list_argument_names(listed_tool["input_schema"]))
    return f"{names}({arguments})  {change}"


def _to_one_line(text: str) -> str:
    """Make text of a server safe for the terminal, on one line. After a line end it could pretend to be a tool."""
    return escape_control_characters(text.replace("\n", "\ufffd"))


def _describe_tool_change(listed_tool: Mapping[str, Any], previous_tool: Mapping[str, Any] | None) -> str:
    """Return in a word or two how a tool differs from its entry in the last list. A new tool has no such entry."""
    if previous_tool is None:
        return "new"
    if previous_tool == listed_tool:
        return "as before"
    if previous_tool.get("input_schema") != listed_tool["input_schema"]:  # the arguments
        return "changed"
    return "described otherwise"
