"""Dagster's pages on this machine alone: code server, daemon and webserver, guarded against pages of other origins.

`main` runs one of Dagster's programs, which ends with the one that started it.
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
from collections.abc import Awaitable, Callable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from urllib.parse import parse_qsl

from toolformer_dag.files import UserError

MODULE = "toolformer_dag.definitions"
HOST = "127.0.0.1"
LOOPBACK = (HOST, "localhost")
DAGSTER = str(Path(sys.executable).with_name("dagster"))
WEBSERVER = str(Path(sys.executable).with_name("dagster-webserver"))
HTTP = 80
"""The port that a browser leaves out of the header Host."""
GRACE = 10
"""Seconds for answering open requests after the command was asked to stop."""
PATIENCE = 20.0
"""Seconds that a process has to end when it is asked to."""
Scope = MutableMapping[str, Any]
App = Callable[[Scope, Callable[[], Awaitable[Any]], Callable[[Any], Awaitable[None]]], Awaitable[None]]


class OwnPages:
    """An ASGI application that answers only to its own address, and changes nothing by GET.

    A page of another site can make the browser send requests here; what gives it away is the header Host (where the
    site's name was pointed to this machine) or Origin. Dagster's GraphQL would run mutations that come by GET.
    `names`: those of this machine; without any, every Host will do, as where only a key opens.
    """

    def __init__(self, app: App, port: int, names: Sequence[str] = LOOPBACK) -> None:
        self._app = app
        self._hosts = {f"{name}:{port}" for name in names}
        if port == HTTP:
            self._hosts |= set(names)

    async def __call__(
        self, scope: Scope, receive: Callable[[], Awaitable[Any]], send: Callable[[Any], Awaitable[None]]
    ) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        status = 403
        reason = self._refusal(scope)
        if reason is None and _leaves_logs(scope):
            status = 404
            reason = f"{scope['path']}: there is no such log; a path of a log has no `..`"
        if reason is None:
            await self._app(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
        else:
            headers = [(b"content-type", b"text/plain; charset=utf-8")]
            await send({"type": "http.response.start", "status": status, "headers": headers})
            await send({"type": "http.response.body", "body": f"{reason}\n".encode()})

    def _refusal(self, scope: Scope) -> str | None:
        """Return why a request is not answered; None where it is."""
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        hosts = self._hosts or {headers.get("host", "")}
        if headers.get("host") not in hosts:
            return f"refused: the Host header must be one of {', '.join(sorted(hosts))}"
        if "origin" in headers and headers["origin"].partition("://")[2] not in hosts:
            return "refused: the request comes from a page of another origin"
        allowed_sites = ["same-origin", "none"]
        if headers.get("sec-fetch-dest") == "document":  # a link that was followed, as in Dagster's UI on another port
            allowed_sites.append("same-site")
        if headers.get("sec-fetch-site", "none") not in allowed_sites:
            return "refused: the request comes from a page of another origin"
        parameters = dict(parse_qsl(scope.get("query_string", b"").decode("latin-1"), keep_blank_values=True))
        if "graphql" in scope["path"] and "query" in parameters:  # Dagster reads it there for POST too
            return "refused: GraphQL is asked by POST, in the body"
        return None


def _leaves_logs(scope: Scope) -> bool:
    """Return whether a path names a file outside of the logs; Dagster's page answers that with status 500."""
    folders = scope["path"].split("/")
    return folders[:2] == ["", "logs"] and ".." in folders


def serve(root: Path, port: int, environment: Mapping[str, str]) -> int:
    """Serve the UI until it is interrupted; return the exit code of the webserver.

    Raises UserError where the port is in use. No process is left behind.
    """
    bound(port, "ui").close()  # only to find out whether the port is free
    with ExitStack() as stack:
        folder = Path(stack.enter_context(TemporaryDirectory()))
        code_socket = folder / "code"
        workspace = folder / "workspace.yaml"
        location = {"socket": str(code_socket), "location_name": MODULE}
        workspace.write_text(json.dumps({"load_from": [{"grpc_server": location}]}), "utf-8")  # JSON is YAML
        code_command = [DAGSTER, "code-server", "start", "-m", MODULE, "-d", str(root), "--socket", str(code_socket)]
        code_server = stack.enter_context(_running(code_command, root, environment))
        while code_server.poll() is None and not code_socket.exists():
            time.sleep(0.1)
        stack.enter_context(_running([f"{DAGSTER}-daemon", "run", "-w", str(workspace)], root, environment))
        webserver_command = [WEBSERVER, "-w", str(workspace), "-h", HOST, "-p", str(port)]
        return stack.enter_context(_running(webserver_command, root, environment)).wait()


@contextmanager
def _running(command: list[str], root: Path, environment: Mapping[str, str]) -> Iterator[subprocess.Popen[bytes]]:
    """Start a process in a session of its own, so that Ctrl-C reaches it once, from here; end it with the block.

    The child's standard input closes when this process dies, even by SIGKILL; `main`, which the child runs, then ends
    the command.
    """
    command = [sys.executable, "-c", f"from {__name__} import main; main()", *command]
    process = subprocess.Popen(command, cwd=root, env=environment, stdin=subprocess.PIPE, start_new_session=True)
    try:
        yield process
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
        try:
            process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def bound(port: int, command: str, host: str = HOST) -> socket.socket:
    """Return a socket on `port` of this machine, 0 for a free one. Raises UserError where it cannot be had.

    `command`: what would listen there.
    """
    try:
        return socket.create_server((host, port))
    except OSError as error:
        raise UserError(
            f"port {port}: {error.strerror}; end what listens there, perhaps another `toolformer-dag {command}`, or "
            f"choose another port: `toolformer-dag {command} --port PORT`"
        ) from error


def answer(app: App, listening: socket.socket) -> None:
    """Answer requests by an application until Ctrl-C, or a signal to end. Those that came before it are answered."""
    import uvicorn

    from toolformer_dag.cli.connections import bounded_config

    for stop in (signal.SIGINT, signal.SIGTERM):
        signal.signal(stop, signal.default_int_handler)
    server = uvicorn.Server(bounded_config(app, timeout_graceful_shutdown=GRACE))
    with suppress(KeyboardInterrupt):  # how uvicorn ends once it has answered what was asked
        server.run(sockets=[listening])


def main() -> None:
    """Run one of Dagster's programs, the webserver behind the guard, until this process's input ends."""
    threading.Thread(target=_end_with_input, daemon=True).start()
    sys.argv = sys.argv[1:]
    if sys.argv[0] == WEBSERVER:
        import uvicorn

        unguarded = uvicorn.run

        def run(app: App, **options: Any) -> None:
            unguarded(OwnPages(app, options["port"]), **options)

        uvicorn.run = run  # type: ignore[assignment]
    runpy.run_path(sys.argv[0], run_name="__main__")


def _end_with_input() -> None:
    """End this process and all that it started when the process at the other end of its input is gone."""
    while os.read(0, 1):
        pass
    os.killpg(0, signal.SIGKILL)
