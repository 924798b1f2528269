"""`toolformer-dag ui`: the Dagster UI over the same instance as the command line."""

import os
import signal
import subprocess
import sys
from typing import Annotated

import typer

from toolformer_dag.cli.options import Config, settings_of


def ui(
    port: Annotated[int, typer.Option(help="Port of the page on 127.0.0.1.")] = 3000,
    config: Config = None,
) -> None:
    """Start the Dagster UI and stop it with Ctrl-C; SIGTERM stops it alike. Runs that were killed are ended first.

    Example: toolformer-dag ui --port 3000
    """
    from resources.instance import home, shared_instance
    from resources.processes import end_dead_runs
    from toolformer_dag.settings.sources import settings_file

    root = settings_of(config, None, None).root
    instance = shared_instance(root)  # webserver and daemon start at once and would both make its databases
    end_dead_runs(instance, home(root))
    for stop in (signal.SIGINT, signal.SIGTERM):  # a shell that starts this with `&` hands on an ignored Ctrl-C
        signal.signal(stop, signal.default_int_handler)
    file = settings_file(config)
    named = {"TOOLFORMER_CONFIG": str(file)} if file.exists() else {}
    server = subprocess.Popen(
        [sys.executable, "-m", "dagster", "dev", "-m", "toolformer_dag.definitions", "-p", str(port)],
        cwd=root,
        env=os.environ | named,
        start_new_session=True,  # Ctrl-C reaches it once, from here
    )
    try:
        code = server.wait()
    except KeyboardInterrupt:
        server.send_signal(signal.SIGINT)
        code = server.wait()
    raise typer.Exit(code)
