"""`serve`: answer clients of OpenAI's protocol with a checkpoint that calls its tools."""

import gc
import os
import socket
from typing import TYPE_CHECKING, Annotated

import typer

from toolformer_dag.cli.terminal import Config, Profile, Set, load_command_settings
from toolformer_dag.cli.web_server import HOST, LOOPBACK
from toolformer_dag.files import UserError
from toolformer_dag.settings.sections import Settings

if TYPE_CHECKING:
    from starlette.applications import Starlette

    from toolformer_dag.cli.generate_command import ChosenModel
    from toolformer_dag.computing.plan import Lane

KEY = "TOOLFORMER_DAG_API_KEY"
"""The environment variable with the key that clients must send."""


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
    from toolformer_dag.cli.generate_command import find_model

    settings = load_command_settings(config, profile, set)
    key = _read_api_key(host)
    chosen = find_model(settings, model, k=None)
    calls_tools = chosen.k > 0
    from toolformer_dag.cli.web_server import bound

    with bound(port, "serve", host) as listening:  # raises UserError where the port is taken, before the model loads
        lanes = _prepare_lanes(settings, calls_tools)  # a lane is a tool with its settings
        name = _choose_served_name(settings, chosen)
        app = _load_app(settings, chosen, lanes, name=name, key=key)
        tools = ", ".join(lane.tool.name for lane in lanes) if calls_tools else "no tools"
        typer.echo(f"{name} at http://{host}:{_get_port(listening)}/v1 with {tools}  (Ctrl-C stops it)")
        _answer_requests(app, listening, host)


def _answer_requests(app: "Starlette", listening: socket.socket, host: str) -> None:
    """Answer requests until Ctrl-C; on this machine only those that name it as their host."""
    from toolformer_dag.cli.web_server import OwnPages, answer

    accepted_hosts = LOOPBACK if host in LOOPBACK else ()
    answer(OwnPages(app, _get_port(listening), accepted_hosts), listening)
    typer.echo("stopped")


def _get_port(listening: socket.socket) -> int:
    """Return the port of a listening socket."""
    port: int = listening.getsockname()[1]
    return port


def _load_app(
    settings: Settings, chosen: "ChosenModel", lanes: "list[Lane]", *, name: str, key: str | None
) -> "Starlette":
    """Load the model, and return the application that serves it.

    - `name`: the model's name for clients.
    - `key`: the key that clients must send, if any.
    """
    from toolformer_dag.serving.server import serving_app
    from toolformer_dag.serving.shared_decoder import SharedDecoder

    decoder = SharedDecoder(chosen.load(settings), lanes, settings, chosen.k)
    app = serving_app(decoder, name, key)
    _exclude_loaded_objects_from_gc()
    return app


def _prepare_lanes(settings: Settings, calls_tools: bool) -> "list[Lane]":
    """Return the lanes (tools with their settings) for decoding; prepare their tools if the model calls them."""
    from toolformer_dag.computing.plan import lanes
    from toolformer_dag.tools.tool import blame_tool

    serving_lanes = [lane.at_inference() for lane in lanes(settings)]
    if calls_tools:
        for lane in serving_lanes:
            with blame_tool(lane.tool, "prepare"):
                lane.tool.prepare(lambda done: None)
    return serving_lanes


def _choose_served_name(settings: Settings, chosen: "ChosenModel") -> str:
    """Return the model's name for clients, without the path to its folder."""
    from toolformer_dag.model.weights import format_model_name

    default_name = settings.model.name if chosen.is_own(settings) else "finetuned_checkpoint"
    return format_model_name(chosen.name or default_name)


def _exclude_loaded_objects_from_gc() -> None:
    """Make Python's garbage collector skip the objects that exist now: with a model, a collection takes .3 seconds."""
    gc.collect()
    gc.freeze()


def _read_api_key(host: str) -> str | None:
    """Return the key that clients must send, or None if the environment sets none.

    Raises UserError where `host` is open to other machines without a key, or no header can hold the key.
    """
    key = os.environ.get(KEY)
    if host not in LOOPBACK and not key:
        raise UserError(f"--host {host} is open to other machines; set {KEY} to a key that clients must show")
    if key and not _fits_header(key):
        raise UserError(f"{KEY} has characters that no header can hold; set it to ASCII without spaces around it")
    return key


def _fits_header(key: str) -> bool:
    """Return whether a header can hold a key: printable ASCII without spaces around it."""
    return key.isascii() and key.isprintable() and key == key.strip()
