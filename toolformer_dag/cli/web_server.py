"""Web pages of this machine only, guarded against requests of other origins, and Dagster's UI served that way.

`main` runs in a child process: it runs one of Dagster's programs and ends with the process that started it.
"""

import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from urllib.parse import parse_qsl

from toolformer_dag.files import UserError

MODULE = "toolformer_dag.definitions"
"""The module whose assets Dagster's programs load."""
HOST = "127.0.0.1"
LOOPBACK = (HOST, "localhost")
"""The names of this machine for itself."""
DAGSTER = str(Path(sys.executable).with_name("dagster"))
WEBSERVER = str(Path(sys.executable).with_name("dagster-webserver"))
"""Dagster's programs, beside this Python."""
HTTP = 80
"""The port that a browser leaves out of the Host header."""
GRACE = 10
"""Seconds to answer open requests after a signal to stop."""
PATIENCE = 20.0
"""Seconds that a child process has to end after SIGINT, before it is killed."""
OTHER_ORIGIN = "refused: the request comes from a page of another origin"
Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Any]]
Send = Callable[[Any], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]


class OwnPages:
    """An ASGI application that answers only to its own address and changes nothing by GET.

    A page of another site can make the browser send requests here. They are recognised by the Host header (if the
    site's name was pointed to this machine) or the Origin header. Dagster's GraphQL would run mutations sent by GET.

    `names`: the host names to answer to; without any, every host, for servers that need a key.
    """

    def __init__(self, app: App, port: int, names: Sequence[str] = LOOPBACK) -> None:
        self._app = app
        self._hosts = {f"{name}:{port}" for name in names}
        if port == HTTP:
            self._hosts |= set(names)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, or refuse it with status 403 or 404."""
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        refusal = self._find_refusal(scope)
        if refusal is not None:
            await _refuse(scope, send, 403, refusal)
        elif _leaves_logs(scope):
            reason = f"{scope['path']}: there is no such log; a path of a log has no `..`"
            await _refuse(scope, send, 404, reason)
        else:
            await self._app(scope, receive, send)

    def _find_refusal(self, scope: Scope) -> str | None:
        """Return why a request is refused, or None if it is answered.

        Pages of other sites, open in the user's browser, may neither read from this server nor change anything here.
        """
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        host = headers.get("host", "")
        accepted_hosts = self._hosts or {host}  # without names of this server, any host that a request names
        if "host" not in headers or host not in accepted_hosts:  # another site's name may lead to this machine
            return f"refused: the Host header must be one of {', '.join(sorted(accepted_hosts))}"
        if _has_other_origin(headers, accepted_hosts) or _is_cross_site(headers):
            return OTHER_ORIGIN
        if _is_graphql_in_address(scope):  # a link could run it
            return "refused: GraphQL is asked by POST, in the body"
        return None


async def _refuse(scope: Scope, send: Send, status: int, reason: str) -> None:
    """Answer a request with an HTTP status and the reason; close a WebSocket."""
    if scope["type"] == "websocket":
        await send({"type": "websocket.close", "code": 1008})
        return
    headers = [(b"content-type", b"text/plain; charset=utf-8")]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": f"{reason}\n".encode()})


def _has_other_origin(headers: Mapping[str, str], hosts: Collection[str]) -> bool:
    """Return whether the browser says that a page of none of these hosts sent the request."""
    if "origin" not in headers:
        return False
    origin_host = headers["origin"].partition("://")[2]
    return origin_host not in hosts


def _is_cross_site(headers: Mapping[str, str]) -> bool:
    """Return whether the browser says that a page of another site sent the request; another port is the same site."""
    allowed = ["same-origin", "none"]
    if headers.get("sec-fetch-dest") == "document":  # a link that was followed
        allowed.append("same-site")
    return headers.get("sec-fetch-site", "none") not in allowed


def _is_graphql_in_address(scope: Scope) -> bool:
    """Return whether the address holds a GraphQL query, which Dagster would run for GET and POST alike."""
    parameters = dict(parse_qsl(scope.get("query_string", b"").decode("latin-1"), keep_blank_values=True))
    return "graphql" in scope["path"] and "query" in parameters


def _leaves_logs(scope: Scope) -> bool:
    """Return whether a path of a log leads out of the logs' folder; Dagster would answer it with status 500."""
    folders = scope["path"].split("/")
    return folders[:2] == ["", "logs"] and ".." in folders


def serve(root: Path, port: int, environment: Mapping[str, str]) -> int:
    """Serve Dagster's UI until it is interrupted, and return the webserver's exit code.

    Raises UserError where the port is in use. No process is left behind.
    """
    bound(port, "ui").close()  # only to find out whether the port is free
    running = partial(
        _run_child_process, root=root, environment=environment
    )  # runs a command while its `with` block runs
    with TemporaryDirectory() as folder:
        code_socket = Path(folder, "code")
        workspace = _write_workspace(Path(folder), code_socket)
        with running(_build_code_server_command(root, code_socket)) as code_server:
            _wait_until_ready(code_server, code_socket)
            daemon_command = [f"{DAGSTER}-daemon", "run", "-w", workspace]
            webserver_command = [WEBSERVER, "-w", workspace, "-h", HOST, "-p", str(port)]
            with running(daemon_command), running(webserver_command) as webserver:
                return webserver.wait()


def _wait_until_ready(code_server: subprocess.Popen[bytes], code_socket: Path) -> None:
    """Wait until the code server has opened its socket, or has ended."""
    while code_server.poll() is None and not code_socket.exists():
        time.sleep(0.1)


def _build_code_server_command(root: Path, code_socket: Path) -> list[str]:
    """Return the command of the server that tells Dagster's other processes about the assets, over a socket."""
    return [DAGSTER, "code-server", "start", "-m", MODULE, "-d", str(root), "--socket", str(code_socket)]


def _write_workspace(folder: Path, code_socket: Path) -> str:
    """Write the file that names the code server to Dagster's other processes, and return its path."""
    file = folder / "workspace.yaml"
    location = {"socket": str(code_socket), "location_name": MODULE}
    file.write_text(json.dumps({"load_from": [{"grpc_server": location}]}), "utf-8")  # JSON is YAML
    return str(file)


@contextmanager
def _run_child_process(
    command: list[str], root: Path, environment: Mapping[str, str]
) -> Iterator[subprocess.Popen[bytes]]:
    """Run a command in a child process while the block runs, then end it; it also ends when this process dies."""
    command = [sys.executable, "-c", f"from {__name__} import main; main()", *command]
    process = subprocess.Popen(command, cwd=root, env=environment, stdin=subprocess.PIPE, start_new_session=True)
    try:
        yield process
    finally:
        _end_process(process)


def _end_process(process: subprocess.Popen[bytes]) -> None:
    """Interrupt a child process; kill it and its children if it goes on for PATIENCE seconds."""
    if process.poll() is None:
        process.send_signal(signal.SIGINT)
    try:
        process.wait(PATIENCE)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def bound(port: int, command: str, host: str = HOST) -> socket.socket:
    """Return a socket that listens on `port`, 0 for a free port. Raises UserError if the port is not available.

    `command`: the command that listens, for the message.
    """
    try:
        return socket.create_server((host, port))
    except OSError as error:
        raise UserError(
            f"port {port}: {error.strerror}; end what listens there, perhaps another `toolformer-dag {command}`, or "
            f"choose another port: `toolformer-dag {command} --port PORT`"
        ) from error


def answer(app: App, listening: socket.socket) -> None:
    """Answer requests until Ctrl-C or SIGTERM, then those that are still open, for up to GRACE seconds."""
    import uvicorn

    from toolformer_dag.cli.connections import build_bounded_config

    for stop in (signal.SIGINT, signal.SIGTERM):
        signal.signal(stop, signal.default_int_handler)
    server = uvicorn.Server(build_bounded_config(app, timeout_graceful_shutdown=GRACE))
    with suppress(KeyboardInterrupt):  # how uvicorn ends after answering the open requests
        server.run(sockets=[listening])


def main() -> None:
    """Run the Dagster program in this process's arguments until its standard input ends; guard the webserver."""
    threading.Thread(target=_end_with_input, daemon=True).start()
    sys.argv = sys.argv[1:]
    if sys.argv[0] == WEBSERVER:
        _guard_webserver()
    runpy.run_path(sys.argv[0], run_name="__main__")


def _guard_webserver() -> None:
    """Make uvicorn, which Dagster's webserver uses, wrap its application in OwnPages."""
    import uvicorn

    unguarded = uvicorn.run

    def run(app: App, **options: Any) -> None:
        unguarded(OwnPages(app, options["port"]), **options)

    uvicorn.run = run  # type: ignore[assignment]


def _end_with_input() -> None:
    """Wait for the end of standard input, which means that the parent is gone; then kill this process group."""
    while os.read(0, 1):
        pass
    os.killpg(0, signal.SIGKILL)
