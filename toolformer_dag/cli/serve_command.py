"""`serve`: answer clients of OpenAI's protocol with a checkpoint that calls its tools."""

import os
from typing import Annotated

import typer

from toolformer_dag.cli.terminal import Config, Profile, Set, settings_of
from toolformer_dag.cli.web_server import HOST, LOOPBACK
from toolformer_dag.files import UserError

KEY = "TOOLFORMER_DAG_API_KEY"


def serve(
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port; 0 takes a free one.")] = 8000,
    host: Annotated[
        str, typer.Option(help=f"Address to listen on. Beyond this machine, clients need the key in ${KEY}.")
    ] = HOST,
    model: Annotated[str, typer.Option(help="As for `generate`; default: the finetuned checkpoint, if any.")] = "",
    config: Config = None,
    profile: Profile = None,
    set: Set = None,
) -> None:
    """Complete texts for clients of OpenAI's protocol; tools are called inside the answers. Stop it with Ctrl-C.

    Where the variable TOOLFORMER_DAG_API_KEY is set, clients must show its value.

    Example: toolformer-dag serve; toolformer-dag serve --model base --port 8001
    """
    from toolformer_dag.cli.generate_command import asked_model

    settings = settings_of(config, profile, set)
    key = _key(host)
    asked = asked_model(settings, model, None)
    from toolformer_dag.cli.web_server import OwnPages, answer, bound
    from toolformer_dag.computing.plan import lanes
    from toolformer_dag.model.weights import folder_name
    from toolformer_dag.serving.server import serving_app
    from toolformer_dag.serving.shared_decoder import SharedDecoder
    from toolformer_dag.tools.tool import blamed

    with bound(port, "serve", host) as listening:
        known = [lane.at_inference() for lane in lanes(settings)]
        for lane in known if asked.k else ():
            with blamed(lane.tool, "prepare"):
                lane.tool.prepare(lambda done: None)
        loaded = asked.load(settings)
        name = folder_name(asked.name or (settings.model.name if asked.is_own(settings) else "finetuned_checkpoint"))
        app = serving_app(SharedDecoder(loaded, known, settings, asked.k), name, key)
        taken = listening.getsockname()[1]
        tools = ", ".join(lane.tool.name for lane in known) if asked.k else "no tools"
        typer.echo(f"{name} at http://{host}:{taken}/v1 with {tools}  (Ctrl-C stops it)")
        answer(OwnPages(app, taken, LOOPBACK if host in LOOPBACK else ()), listening)
        typer.echo("stopped")


def _key(host: str) -> str | None:
    """The key that clients must show. Raises UserError where one is lacking, or no header can hold it."""
    key = os.environ.get(KEY)
    if host not in LOOPBACK and not key:
        raise UserError(f"--host {host} is open to other machines; set {KEY} to a key that clients must show")
    if key and not (key.isascii() and key.isprintable() and key == key.strip()):
        raise UserError(f"{KEY} has characters that no header can hold; set it to ASCII without spaces around it")
    return key
