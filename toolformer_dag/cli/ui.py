"""`toolformer-dag ui`: the Dagster UI over the same instance as the command line."""

import signal
import subprocess
import sys
from pathlib import Path
from typing import Annotated

import typer

from toolformer_dag.cli.options import Config, settings_of


def ui(
    port: Annotated[int, typer.Option(help="Port of the page on 127.0.0.1.")] = 3000,
    config: Config = None,
) -> None:
    """Start the Dagster UI and stop it with Ctrl-C.

    Example: toolformer-dag ui --port 3000
    """
    from resources.instance import shared_instance

    settings = settings_of(config, None, None)
    shared_instance(settings.root)  # webserver and daemon start at once and would both make its databases
    workspace = Path(settings.root) / "workspace.yaml"
    server = subprocess.Popen(
        [sys.executable, "-m", "dagster", "dev", "-w", str(workspace), "-p", str(port)],
        cwd=settings.root,
        start_new_session=True,  # a shell that starts this with `&` would hand on an ignored Ctrl-C
    )
    try:
        code = server.wait()
    except KeyboardInterrupt:
        server.send_signal(signal.SIGINT)
        code = server.wait()
    raise typer.Exit(code)
