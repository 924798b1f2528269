"""`serve`: answer clients of OpenAI's protocol with a checkpoint that calls its tools."""

import gc
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
    from toolformer_dag.cli.generate_command import named_model

    settings = settings_of(config, profile, set)
    key = _key(host)
    named = named_model(settings, model, None)
    from toolformer_dag.cli.web_server import OwnPages, answer, bound
    from toolformer_dag.computing.plan import lanes
    from toolformer_dag.model.weights import folder_name
    from toolformer_dag.serving.server import serving_app
    from toolformer_dag.serving.shared_decoder import SharedDecoder
    from toolformer_dag.tools.tool import blamed

    with bound(port, "serve", host) as listening:
        serving_lanes = [lane.at_inference() for lane in lanes(settings)]
        if named.k:  # else no call is made
            for lane in serving_lanes:
                with blamed(lane.tool, "prepare"):
                    lane.tool.prepare(lambda done: None)
        loaded = named.load(settings)
        own_name = settings.model.name if named.is_own(settings) else "finetuned_checkpoint"
        name = folder_name(named.name or own_name)
        app = serving_app(SharedDecoder(loaded, serving_lanes, settings, named.k), name, key)
        # Python looks through all objects for garbage now and then, which takes a third of a second with a model loaded
        # and keeps every client waiting; from now on it passes over those that are there already.
        gc.collect()
        gc.freeze()
        listening_port = listening.getsockname()[1]
        tools = ", ".join(lane.tool.name for lane in serving_lanes) if named.k else "no tools"
        typer.echo(f"{name} at http://{host}:{listening_port}/v1 with {tools}  (Ctrl-C stops it)")
        answer(OwnPages(app, listening_port, LOOPBACK if host in LOOPBACK else ()), listening)
        typer.echo("stopped")


def _key(host: str) -> str | None:
    """Return the key that clients must show; None where none is set.

    Raises UserError where `host` is open to other machines and none is set, and where no header can hold it.
    """
    key = os.environ.get(KEY)
    if host not in LOOPBACK and not key:
        raise UserError(f"--host {host} is open to other machines; set {KEY} to a key that clients must show")
    if key and not (key.isascii() and key.isprintable() and key == key.strip()):
        raise UserError(f"{KEY} has characters that no header can hold; set it to ASCII without spaces around it")
    return key
