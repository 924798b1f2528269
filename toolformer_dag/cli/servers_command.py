"""`servers`: list the tools of MCP servers, and tell what changed."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import typer
from pydantic import ValidationError

from toolformer_dag.cli.terminal import Config, harmless
from toolformer_dag.files import UserError, write_whole
from toolformer_dag.settings.servers import FAULT, LISTING, ServerSettings, lane_key, read_listing
from toolformer_dag.settings.settings_file import load_servers, load_settings

Listed = list[dict[str, Any]]
"""Tools of a server as mcp_tools.json has them: name, description, input_schema; FAULT where no call can be written."""


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
    before = read_listing(root)
    listed = {name: tools for name, tools in before.items() if name in tables}
    some_failed = False
    for name, server in tables.items():
        try:
            listed[name] = _listed(name, server, root)
            _tell(name, listed[name], before.get(name, []))
        except UserError as error:
            typer.echo(f"error: {harmless(str(error))}", err=True)
            some_failed = True
    write_whole(root / LISTING, (json.dumps(listed, ensure_ascii=False, indent=1) + "\n").encode())
    _tell_what_lacks(config)
    if some_failed:
        raise typer.Exit(1)


def _tell_what_lacks(config: Path | None) -> None:
    """Say of each lane of a server why it cannot be loaded: most lack examples, which a person has to give."""
    from toolformer_dag.tools.registry import load_tool

    try:
        settings = load_settings(config)
    except UserError as error:
        typer.echo(f"error: {harmless(str(error))}", err=True)
        return
    for key, section in settings.tools.items():
        options = section.options()
        if not section.enabled or options.get("use") != "mcp":
            continue
        try:
            load_tool(key, options, root=settings.root)
        except UserError as error:
            typer.echo(f"\n{harmless(str(error))}")


def _listed(name: str, server: ServerSettings, root: Path) -> Listed:
    """Ask a server for its tools, sorted by name. Raises UserError for wrong options, or where it cannot be asked."""
    from toolformer_dag.texts.arguments import schema_fault
    from toolformer_dag.tools.mcp_options import McpOptions
    from toolformer_dag.tools.mcp_session import list_tools
    from toolformer_dag.tools.options import explain_options

    try:
        connection = {"server": name, "tool": "", **(server.model_extra or {})}
        options = McpOptions.model_validate(connection, context={"root": root})
    except ValidationError as error:
        raise UserError(explain_options(name, error, McpOptions).replace("[tools.", "[servers.")) from error
    listed = []
    for tool in sorted(list_tools(options), key=lambda tool: tool.name):
        entry = {"name": tool.name, "description": tool.description or "", "input_schema": tool.input_schema}
        fault = schema_fault(tool.input_schema)
        if fault:
            entry[FAULT] = fault
        listed.append(entry)
    return listed


def _tell(server: str, tools: Listed, before: Listed) -> None:
    """Print the tools of a server with their arguments, and what changed since they were listed `before`."""
    from toolformer_dag.texts.arguments import argument_names

    listed_before: Mapping[str, Any] = {tool["name"]: tool for tool in before}
    typer.echo(f"{server}: {len(tools)} tools")
    for tool in tools:
        name = tool["name"]
        fault = tool.get(FAULT)
        arguments = "" if fault else f"({', '.join(argument_names(tool['input_schema']))})"
        line = f"{lane_key(name)}: {name}{arguments}  {_change(tool, listed_before.get(name))}"
        if fault:
            line += f"; its calls cannot be written: {fault}"
        typer.echo("  " + _line(line))
    for name in sorted(listed_before.keys() - {tool["name"] for tool in tools}):
        typer.echo("  " + _line(f"{lane_key(name)}: {name}  gone"))


def _line(text: str) -> str:
    """Return text of a server for one line of the terminal: a line end in a name would look like another tool."""
    return harmless(text.replace("\n", "\ufffd"))


def _change(tool: Mapping[str, Any], before: Mapping[str, Any] | None) -> str:
    """Say how a tool differs from what was listed `before`, None where it was not: arguments count more than words."""
    if before is None:
        return "new"
    if before == tool:
        return "as before"
    return "changed" if before.get("input_schema") != tool["input_schema"] else "described otherwise"
