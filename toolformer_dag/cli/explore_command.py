"""`explore`: the page over the warehouse, served on this machine alone or written to a file."""

import threading
import webbrowser
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from toolformer_dag.cli.terminal import ConfigOption, ForceOption, ProfileOption, SetOption, load_command_settings, path
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
    force: ForceOption = False,
    config: ConfigOption = None,
    profile: ProfileOption = None,
    set: SetOption = None,
) -> None:
    """Look at the calls in a browser: thresholds, verdicts, texts, losses. Stop it with Ctrl-C.

    The page reads the warehouse and changes nothing. An exported file works offline.

    Example: toolformer-dag explore; toolformer-dag explore --export calls.html
    """
    settings = load_command_settings(config, profile, set)
    from toolformer_dag.computing.plan import Plan
    from toolformer_dag.explorer.explorer_server import build_explorer_app
    from toolformer_dag.explorer.exported_page import export_page
    from toolformer_dag.explorer.live_model import LiveModel
    from toolformer_dag.explorer.warehouse_reader import WarehouseReader
    from toolformer_dag.lake.warehouse import receive_warehouse
    from toolformer_dag.traces.judgement import get_traces_database_path

    reader = WarehouseReader(receive_warehouse(settings), _format_page_heading(settings))
    traces_heading = _format_page_heading(settings, includes_model_name=False)
    traces = WarehouseReader(get_traces_database_path(settings), traces_heading)
    if not traces.database_path.is_file():
        reader.get_version()  # a missing file is reported before anything is started
    if export is not None:
        if export.suffix.lower() not in (".html", ".htm"):
            raise UserError(f"--export {export}: end the name with .html")
        call_count = export_page(reader, traces, export, force)
        typer.echo(f"{call_count:,} calls in {export}")
        return
    model = LiveModel(lambda: Plan.from_settings(load_command_settings(config, profile, set)))
    _serve_page(build_explorer_app(reader, model, traces), port, opens_browser=not no_open)


def _serve_page(app: "Starlette", port: int, opens_browser: bool) -> None:
    """Serve the page on this machine alone until Ctrl-C.

    Args:
        app: The page's application.
        port: The port, or 0 to take a free one.
        opens_browser: Whether to open the page in the user's browser.

    Raises:
        UserError: The port is in use.
    """
    from toolformer_dag.cli.web_server import (
        LOOPBACK_ADDRESS,
        SameOriginGuard,
        open_listening_socket,
        serve_until_interrupted,
    )

    with open_listening_socket(port, "explore") as listening_socket:
        listening_port = listening_socket.getsockname()[1]
        address = f"http://{LOOPBACK_ADDRESS}:{listening_port}"
        typer.echo(f"{address}  (Ctrl-C stops it)")
        if opens_browser:
            # The browser is opened a little later, when the server below answers.
            threading.Timer(0.5, webbrowser.open, (address,)).start()

        serve_until_interrupted(SameOriginGuard(app, listening_port), listening_socket)
        typer.echo("stopped")


def _format_page_heading(settings: Settings, includes_model_name: bool = True) -> str:
    """Return the heading of the page, such as `mine · model gpt2 · toolformer-dag 1.0, commit 0123456ab`.

    It names the project's folder, the model unless `includes_model_name` is False, and the version of this package.
    """
    from toolformer_dag.explorer.trace_queries import shorten_model_name
    from toolformer_dag.lake.record import find_git_commit, get_installed_version

    parts = [settings.root.absolute().name]
    if includes_model_name:
        parts.append(f"model {shorten_model_name(settings.model.name)}")

    package_version = f"toolformer-dag {get_installed_version('toolformer-dag')}"
    commit_hash = find_git_commit()  # None outside of a git repository
    if commit_hash:
        package_version += f", commit {commit_hash[:9]}"
    parts.append(package_version)
    return " · ".join(parts)
