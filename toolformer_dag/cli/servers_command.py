"""`servers`: list the tools of MCP servers, and what changed since the last list."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from pydantic import ValidationError

from toolformer_dag.cli.terminal import Config, escape_controls
from toolformer_dag.files import UserError, write_whole
from toolformer_dag.settings.servers import FAULT, LISTING, ServerSettings, lane_key, read_listing
from toolformer_dag.settings.settings_file import load_servers, load_settings

if TYPE_CHECKING:
    from mcp.types import Tool

    from toolformer_dag.tools.mcp_options import McpOptions

Listed = list[dict[str, Any]]
"""Tools of a server as in mcp_tools.json: name, description, input_schema; FAULT if calls of it cannot be written."""


def servers(config: Config = None) -> None:
    """Ask the servers of [servers.NAME] for their tools; each becomes a lane. What changed since the last time is told.

    What cannot be asked is named, and keeps the tools that were listed before.

    The list is mcp_tools.json beside toolformer.toml: keep it with your settings. A tool whose arguments changed makes
    its lane stale, and no other.
    """
    tables, root = load_servers(config)
    if not tables:
        raise UserError(
            'there is no [servers.NAME] in toolformer.toml; add one with command = ["program"] or url = "..."'
        )
    listed_before = {name: tools for name, tools in read_listing(root).items() if name in tables}
    listed_now = _list_servers(tables, root, listed_before)  # without servers that did not answer; prints what changed
    _write_listing(root, {**listed_before, **listed_now})
    _print_unusable_lanes(config)  # a lane is a tool with its settings; one of a server may lack examples
    some_failed = len(listed_now) < len(tables)
    if some_failed:
        raise typer.Exit(1)


def _list_servers(
    tables: Mapping[str, ServerSettings], root: Path, listed_before: Mapping[str, Listed]
) -> dict[str, Listed]:
    """Ask each server for its tools and print what changed; return the tools by server, without servers that failed."""
    listed = {}
    for name, server in tables.items():
        try:
            listed[name] = _list_server(name, server, root)
            _print_server(name, listed[name], listed_before.get(name, []))
        except UserError as error:
            _print_error(error)
    return listed


def _write_listing(root: Path, listed: Mapping[str, Listed]) -> None:
    """Write mcp_tools.json: the tools by server."""
    listing = json.dumps(listed, ensure_ascii=False, indent=1)
    write_whole(root / LISTING, f"{listing}\n".encode())


def _print_error(error: UserError) -> None:
    """Print an error on standard error; the command goes on."""
    typer.echo(f"error: {escape_controls(str(error))}", err=True)


def _print_unusable_lanes(config: Path | None) -> None:
    """Print why tools of servers cannot be loaded; most lack examples, which a person has to write.

    Wrong settings are printed too.
    """
    try:
        settings = load_settings(config)
    except UserError as error:
        _print_error(error)
        return
    for key, section in settings.tools.items():
        options = section.options()
        if section.enabled and options.get("use") == "mcp":
            _print_if_unusable(key, options, settings.root)


def _print_if_unusable(key: str, options: Mapping[str, Any], root: Path) -> None:
    """Print why the tool of a lane cannot be loaded, if it cannot. key: of the lane; options: of its section."""
    from toolformer_dag.tools.registry import load_tool

    try:
        load_tool(key, options, root=root)
    except UserError as error:
        typer.echo(f"\n{escape_controls(str(error))}")


def _list_server(name: str, server: ServerSettings, root: Path) -> Listed:
    """Ask a server for its tools, and return them by name. Raises UserError for wrong options or without an answer."""
    from toolformer_dag.tools.mcp_session import list_tools

    tools = list_tools(_build_connection_options(name, server, root))
    return [_build_tool_entry(tool) for tool in sorted(tools, key=lambda tool: tool.name)]


def _build_connection_options(name: str, server: ServerSettings, root: Path) -> "McpOptions":
    """Return the options to connect to a server. Raises UserError for wrong ones.

    `root`: the folder that relative paths start from.
    """
    from toolformer_dag.tools.mcp_options import McpOptions
    from toolformer_dag.tools.options import explain_options

    try:
        options = {"server": name, "tool": "", **(server.model_extra or {})}
        return McpOptions.model_validate(options, context={"root": root})
    except ValidationError as error:
        raise UserError(explain_options(name, error, McpOptions).replace("[tools.", "[servers.")) from error


def _build_tool_entry(tool: "Tool") -> dict[str, Any]:
    """Return the entry of a tool in mcp_tools.json."""
    from toolformer_dag.texts.arguments import find_schema_fault

    entry = {"name": tool.name, "description": tool.description or "", "input_schema": tool.input_schema}
    fault = find_schema_fault(tool.input_schema)
    if fault:
        entry[FAULT] = fault
    return entry


def _print_server(server: str, tools: Listed, listed_before: Listed) -> None:
    """Print the tools of a server, and what changed since the last list."""
    typer.echo(f"{server}: {len(tools)} tools")
    for line in _iter_tool_lines(tools, listed_before):
        typer.echo(f"  {_to_one_line(line)}")


def _iter_tool_lines(tools: Listed, listed_before: Listed) -> Iterator[str]:
    """Yield a line per tool of a server, then a line per tool that is gone since the last list."""
    before = {tool["name"]: tool for tool in listed_before}
    for tool in tools:
        yield _format_tool_line(tool, before.get(tool["name"]))
    names = {tool["name"] for tool in tools}
    for name in sorted(before.keys() - names):
        yield f"{lane_key(name)}: {name}  gone"


def _format_tool_line(tool: Mapping[str, Any], before: Mapping[str, Any] | None) -> str:
    """Return a tool's lane, name, arguments and change. `before`: its entry in the last list, if any."""
    from toolformer_dag.texts.arguments import list_argument_names

    head = f"{lane_key(tool['name'])}: {tool['name']}"
    change = _describe_change(tool, before)
    fault = tool.get(FAULT)
    if fault:
        return f"{head}  {change}; its calls cannot be written: {fault}"
    arguments = ", ".join(list_argument_names(tool["input_schema"]))
    return f"{head}({arguments})  {change}"


def _to_one_line(text: str) -> str:
    """Make text of a server safe for the terminal, on one line: after a line end it could look like another tool."""
    return escape_controls(text.replace("\n", "\ufffd"))


def _describe_change(tool: Mapping[str, Any], before: Mapping[str, Any] | None) -> str:
    """Return how a tool differs from its entry in the last list; a change of arguments outweighs one of words."""
    if before is None:
        return "new"
    if before == tool:
        return "as before"
    return "changed" if before.get("input_schema") != tool["input_schema"] else "described otherwise"
