"""`explore`: the page over the warehouse, served on this machine alone or written to a file."""

import threading
import webbrowser
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from toolformer_dag.cli.terminal import Config, Force, Profile, Set, load_command_settings, path
from toolformer_dag.files import UserError
from toolformer_dag.settings.sections import Settings

if TYPE_CHECKING:
    from starlette.applications import Starlette


def explore(
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="Port of the page on 127.0.0.1; 0 takes a free one.")
    ] = 3001,
    export: Annotated[Path | None, typer.Option(parser=path, help="Write the page to this .html file instead.")] = None,
    no_open: Annotated[bool, typer.Option("--no-open", help="Open no browser.")] = False,
    force: Force = False,
    config: Config = None,
    profile: Profile = None,
    set: Set = None,
) -> None:
    """Look at the calls in a browser: thresholds, verdicts, texts, losses. Stop it with Ctrl-C.

    The page reads the warehouse and changes nothing. An exported file works offline.

    Example: toolformer-dag explore; toolformer-dag explore --export calls.html
    """
    settings = load_command_settings(config, profile, set)
    from toolformer_dag.computing.plan import Plan
    from toolformer_dag.explorer.explorer_server import explorer_app
    from toolformer_dag.explorer.exported_page import export_page
    from toolformer_dag.explorer.live_model import LiveModel
    from toolformer_dag.explorer.warehouse_reader import WarehouseReader
    from toolformer_dag.lake.warehouse import received
    from toolformer_dag.traces.judgement import traces_database

    reader = WarehouseReader(received(settings), _format_heading(settings))
    traces = WarehouseReader(traces_database(settings), _format_heading(settings, names_model=False))
    if not traces.database.is_file():
        reader.version()  # a missing file is reported before anything is started
    if export is not None:
        if export.suffix.lower() not in (".html", ".htm"):
            raise UserError(f"--export {export}: end the name with .html")
        typer.echo(f"{export_page(reader, traces, export, force):,} calls in {export}")
        return
    model = LiveModel(lambda: Plan.of(load_command_settings(config, profile, set)))
    _serve_page(explorer_app(reader, model, traces), port, opens_browser=not no_open)


def _serve_page(app: "Starlette", port: int, opens_browser: bool) -> None:
    """Serve the page on this machine alone until Ctrl-C. Raises UserError if the port is in use."""
    from toolformer_dag.cli.web_server import HOST, OwnPages, answer, bound

    with bound(port, "explore") as listening:
        listening_port = listening.getsockname()[1]
        address = f"http://{HOST}:{listening_port}"
        typer.echo(f"{address}  (Ctrl-C stops it)")
        if opens_browser:
            threading.Timer(0.5, webbrowser.open, (address,)).start()
        answer(OwnPages(app, listening_port), listening)
        typer.echo("stopped")


def _format_heading(settings: Settings, names_model: bool = True) -> str:
    """Return the page's heading: the project's folder name, perhaps its model, and the version of this package."""
    from toolformer_dag.explorer.trace_queries import shorten_model_name
    from toolformer_dag.lake.record import commit, get_installed_version

    parts = [settings.root.absolute().name]
    if names_model:
        parts.append(f"model {shorten_model_name(settings.model.name)}")
    code = f"toolformer-dag {get_installed_version('toolformer-dag')}"
    commit_hash = commit()
    if commit_hash:
        code += f", commit {commit_hash[:9]}"
    parts.append(code)
    return " · ".join(parts)
