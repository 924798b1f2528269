"""`serve`: answer clients of OpenAI's protocol with a checkpoint that calls its tools."""

import gc
import os
import socket
from typing import TYPE_CHECKING, Annotated

import typer

from toolformer_dag.cli.terminal import ConfigOption, ProfileOption, SetOption, load_command_settings
from toolformer_dag.cli.web_server import LOOPBACK_ADDRESS, LOOPBACK_HOSTS
from toolformer_dag.files import UserError
from toolformer_dag.settings.sections import Settings

if TYPE_CHECKING:
    from starlette.applications import Starlette

    from toolformer_dag.cli.generate_command import ChosenModel
    from toolformer_dag.computing.plan import Lane

API_KEY_VARIABLE = "TOOLFORMER_DAG_API_KEY"
"""The environment variable with the key that clients must send."""


def serve(
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port; 0 takes a free one.")] = 8000,
    host: Annotated[
        str,
        typer.Option(help=f"Address to listen on. Beyond this machine, clients need the key in ${API_KEY_VARIABLE}."),
    ] = LOOPBACK_ADDRESS,
    model: Annotated[str, typer.Option(help="As for `generate`; default: the finetuned checkpoint, if any.")] = "",
    config: ConfigOption = None,
    profile: ProfileOption = None,
    set: SetOption = None,
) -> None:
    """Complete texts for clients of OpenAI's protocol; tools are called inside the answers. Stop it with Ctrl-C.

    Where the variable TOOLFORMER_DAG_API_KEY is set, clients must show its value.

    Example: toolformer-dag serve; toolformer-dag serve --model base --port 8001
    """
    from toolformer_dag.cli.generate_command import resolve_chosen_model

    settings = load_command_settings(config, profile, set)
    api_key = _read_api_key(host)
    chosen_model = resolve_chosen_model(settings, model, top_k=None)
    calls_tools = chosen_model.top_k > 0
    from toolformer_dag.cli.web_server import open_listening_socket

    # The socket is opened first: if the port is taken, the user learns it before the model loads.
    with open_listening_socket(port, "serve", host) as listening_socket:
        lanes = _prepare_lanes(settings, calls_tools)  # a lane is a tool with its settings
        model_name = _choose_served_model_name(settings, chosen_model)
        app = _load_app(settings, chosen_model, lanes, model_name=model_name, api_key=api_key)

        tool_names = ", ".join(lane.tool.name for lane in lanes) if calls_tools else "no tools"
        address = f"http://{host}:{_get_port(listening_socket)}/v1"
        typer.echo(f"{model_name} at {address} with {tool_names}  (Ctrl-C stops it)")
        _answer_requests(app, listening_socket, host)


def _answer_requests(app: "Starlette", listening_socket: socket.socket, host: str) -> None:
    """Answer requests until Ctrl-C.

    On an address of this machine only, requests must name this machine as their host, so that no page of another
    site can send any.

    Args:
        app: The application.
        listening_socket: The socket on which requests arrive.
        host: The address that the socket is bound to.
    """
    from toolformer_dag.cli.web_server import SameOriginGuard, serve_until_interrupted

    accepted_hosts = LOOPBACK_HOSTS if host in LOOPBACK_HOSTS else ()
    serve_until_interrupted(SameOriginGuard(app, _get_port(listening_socket), accepted_hosts), listening_socket)
    typer.echo("stopped")


def _get_port(listening_socket: socket.socket) -> int:
    """Return the port of a listening socket."""
    port: int = listening_socket.getsockname()[1]
    return port


def _load_app(
    settings: Settings, chosen_model: "ChosenModel", lanes: "list[Lane]", *, model_name: str, api_key: str | None
) -> "Starlette":
    """Load the model, and return the application that serves it to clients.

    Args:
        settings: The settings of the project.
        chosen_model: The model.
        lanes: The tools that it may call, each with its settings.
        model_name: The name by which clients know the model.
        api_key: The key that clients must send. None if they need none.
    """
    from toolformer_dag.serving.server import build_serving_app
    from toolformer_dag.serving.shared_decoder import SharedDecoder

    language_model = chosen_model.load_language_model(settings)
    decoder = SharedDecoder(language_model, lanes, settings, chosen_model.top_k)
    app = build_serving_app(decoder, model_name, api_key)
    _exclude_loaded_objects_from_gc()
    return app


def _prepare_lanes(settings: Settings, calls_tools: bool) -> "list[Lane]":
    """Load the lanes (tools with their settings) that the served model calls.

    A lane may have another tool than when texts are annotated (`build_inference_lane`).

    Args:
        settings: All settings.
        calls_tools: Whether tools are called at all. Then each tool makes what it needs first, such as an index.
    """
    from toolformer_dag.computing.plan import load_lanes
    from toolformer_dag.tools.tool import wrap_tool_errors

    serving_lanes = [lane.build_inference_lane() for lane in load_lanes(settings)]
    if calls_tools:
        for lane in serving_lanes:
            with wrap_tool_errors(lane.tool, "prepare"):
                lane.tool.prepare(lambda passage_count: None)  # its progress is not shown
    return serving_lanes


def _choose_served_model_name(settings: Settings, chosen_model: "ChosenModel") -> str:
    """Return the name by which clients know the model: as it was typed or as the settings have it, without a folder."""
    from toolformer_dag.model.weights import format_model_name

    default_name = settings.model.name if chosen_model.is_settings_model(settings) else "finetuned_checkpoint"
    return format_model_name(chosen_model.typed_name or default_name)


def _exclude_loaded_objects_from_gc() -> None:
    """Make Python's garbage collector skip the objects that exist now.

    With a loaded model, a collection would take 0.3 seconds, in which no request is answered.
    """
    gc.collect()
    gc.freeze()


def _read_api_key(host: str) -> str | None:
    """Return the key that clients must send, or None if the environment variable with it is not set.

    Args:
        host: The address to listen on.

    Raises:
        UserError: Other machines can reach the address, and there is no key. Or no HTTP header can hold the key.
    """
    api_key = os.environ.get(API_KEY_VARIABLE)

    is_open_to_others = host not in LOOPBACK_HOSTS
    if is_open_to_others and not api_key:
        raise UserError(
            f"--host {host} is open to other machines; set {API_KEY_VARIABLE} to a key that clients must show"
        )
    if api_key and not _can_be_header_value(api_key):
        raise UserError(
            f"{API_KEY_VARIABLE} has characters that no header can hold; set it to ASCII without spaces around it"
        )
    return api_key


def _can_be_header_value(api_key: str) -> bool:
    """Return whether an HTTP header can hold a key: it is printable ASCII without spaces around it."""
    return api_key.isascii() and api_key.isprintable() and api_key == api_key.strip()
