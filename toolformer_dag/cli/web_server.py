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

DEFINITIONS_MODULE = "toolformer_dag.definitions"
"""The module whose assets Dagster's programs load."""
LOOPBACK_ADDRESS = "127.0.0.1"
LOOPBACK_HOSTS = (LOOPBACK_ADDRESS, "localhost")
"""The names of this machine for itself."""
DAGSTER_PROGRAM = str(Path(sys.executable).with_name("dagster"))
WEBSERVER_PROGRAM = str(Path(sys.executable).with_name("dagster-webserver"))
"""Dagster's programs, beside this Python."""
DEFAULT_HTTP_PORT = 80
"""The port that a browser leaves out of the Host header."""
SHUTDOWN_GRACE_SECONDS = 10
"""Seconds to answer open requests after a signal to stop."""
KILL_DELAY_SECONDS = 20.0
"""Seconds that a child process has to end after SIGINT, before it is killed."""
OTHER_ORIGIN_REFUSAL = "refused: the request comes from a page of another origin"
Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Any]]
Send = Callable[[Any], Awaitable[None]]
AsgiApp = Callable[[Scope, Receive, Send], Awaitable[None]]


class SameOriginGuard:
    """An ASGI application that answers only to its own address, and lets no GET request change anything.

    Any page in the user's browser can send requests to this machine. The guard recognizes such requests by the Host
    header, if another site's name was pointed to this machine, or by the Origin header. Dagster would also run GraphQL
    mutations from the address of a GET request, which a mere link can send.
    """

    def __init__(self, app: AsgiApp, port: int, host_names: Sequence[str] = LOOPBACK_HOSTS) -> None:
        """Guard an application.

        Args:
            app: The application that answers the accepted requests.
            port: The port on which it is reached.
            host_names: The host names to answer to. Empty for every name, for servers whose clients send a key.
        """
        self._app = app
        self._accepted_hosts = {f"{name}:{port}" for name in host_names}
        if port == DEFAULT_HTTP_PORT:  # browsers leave it out of the Host header
            self._accepted_hosts |= set(host_names)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on to the application, or refuse it with status 403 or 404."""
        if scope["type"] == "lifespan":  # the start or the end of the server, no request
            await self._app(scope, receive, send)
            return

        refusal = self._find_refusal(scope)
        if refusal is not None:
            await _send_refusal(scope, send, 403, refusal)
        elif _leaves_log_folder(scope):
            reason = f"{scope['path']}: there is no such log; a path of a log has no `..`"
            await _send_refusal(scope, send, 404, reason)
        else:
            await self._app(scope, receive, send)

    def _find_refusal(self, scope: Scope) -> str | None:
        """Return why a request is refused, or None if it is answered.

        Pages of other sites, open in the user's browser, may neither read from this server nor change anything here.
        """
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        host = headers.get("host", "")
        accepted_hosts = self._accepted_hosts or {host}  # a server without names of its own accepts any

        # The name of another site may have been pointed to this machine.
        if "host" not in headers or host not in accepted_hosts:
            return f"refused: the Host header must be one of {', '.join(sorted(accepted_hosts))}"

        if _has_other_origin(headers, accepted_hosts) or _is_cross_site(headers):
            return OTHER_ORIGIN_REFUSAL

        if _has_graphql_query(scope):  # a link could run it
            return "refused: GraphQL is asked by POST, in the body"
        return None


async def _send_refusal(scope: Scope, send: Send, status_code: int, reason: str) -> None:
    """Answer a request with an HTTP status and the reason as text. A WebSocket is closed without a text.

    Args:
        scope: ASGI's description of the request.
        send: Sends ASGI's messages.
        status_code: The HTTP status, such as 403.
        reason: Why the request is refused.
    """
    if scope["type"] == "websocket":
        policy_violation = 1008
        await send({"type": "websocket.close", "code": policy_violation})
        return

    headers = [(b"content-type", b"text/plain; charset=utf-8")]
    await send({"type": "http.response.start", "status": status_code, "headers": headers})
    await send({"type": "http.response.body", "body": f"{reason}\n".encode()})


def _has_other_origin(headers: Mapping[str, str], accepted_hosts: Collection[str]) -> bool:
    """Return whether the browser says that the request was sent by a page of another host than these."""
    if "origin" not in headers:
        return False
    origin_host = headers["origin"].partition("://")[2]
    return origin_host not in accepted_hosts


def _is_cross_site(headers: Mapping[str, str]) -> bool:
    """Return whether the browser says that the request was sent by a page of another site.

    A page on another port of this machine is of the same site. Only links to whole pages are accepted from there.
    """
    accepted_sites = ["same-origin", "none"]  # "none": the user typed the address

    is_link_to_page = headers.get("sec-fetch-dest") == "document"
    if is_link_to_page:
        accepted_sites.append("same-site")
    return headers.get("sec-fetch-site", "none") not in accepted_sites


def _has_graphql_query(scope: Scope) -> bool:
    """Return whether the address holds a GraphQL query, which Dagster would run for GET and POST alike."""
    query_string = scope.get("query_string", b"").decode("latin-1")
    parameters = dict(parse_qsl(query_string, keep_blank_values=True))
    return "graphql" in scope["path"] and "query" in parameters


def _leaves_log_folder(scope: Scope) -> bool:
    """Return whether the path of a log leads out of the folder of logs. Dagster would answer it with status 500."""
    folders = scope["path"].split("/")
    return folders[:2] == ["", "logs"] and ".." in folders


def serve_dagster_ui(root: Path, port: int, environment: Mapping[str, str]) -> int:
    """Serve Dagster's UI until it is interrupted. No process is left behind.

    Three child processes run: the code server, which tells the others about the assets, Dagster's daemon, which starts
    runs, and the webserver.

    Args:
        root: The folder of the project.
        port: The port of the page on this machine.
        environment: The environment variables of Dagster's processes.

    Returns:
        The exit code of the webserver.

    Raises:
        UserError: The port is in use.
    """
    open_listening_socket(port, "ui").close()  # only to find out whether the port is free

    run_child = partial(_run_child_process, root=root, environment=environment)
    with TemporaryDirectory() as folder:
        code_socket = Path(folder, "code")
        workspace_file = _write_workspace_file(Path(folder), code_socket)

        with run_child(_build_code_server_command(root, code_socket)) as code_server:
            _wait_until_ready(code_server, code_socket)

            daemon_command = [f"{DAGSTER_PROGRAM}-daemon", "run", "-w", workspace_file]
            webserver_command = [WEBSERVER_PROGRAM, "-w", workspace_file, "-h", LOOPBACK_ADDRESS, "-p", str(port)]
            with run_child(daemon_command), run_child(webserver_command) as webserver:
                return webserver.wait()


def _wait_until_ready(code_server: subprocess.Popen[bytes], code_socket: Path) -> None:
    """Wait until the code server has opened its socket, or has ended."""
    while code_server.poll() is None and not code_socket.exists():
        time.sleep(0.1)


def _build_code_server_command(root: Path, code_socket: Path) -> list[str]:
    """Return the command of the code server, which tells Dagster's other processes about the assets.

    Args:
        root: The folder of the project, in which the server runs.
        code_socket: The Unix socket on which it is asked.
    """
    return [
        DAGSTER_PROGRAM,
        "code-server",
        "start",
        "-m",
        DEFINITIONS_MODULE,
        "-d",
        str(root),
        "--socket",
        str(code_socket),
    ]


def _write_workspace_file(folder: Path, code_socket: Path) -> str:
    """Write workspace.yaml, which tells Dagster's other processes where the code server is, and return its path."""
    workspace_file = folder / "workspace.yaml"
    code_location = {"socket": str(code_socket), "location_name": DEFINITIONS_MODULE}
    content = json.dumps({"load_from": [{"grpc_server": code_location}]})  # JSON is YAML
    workspace_file.write_text(content, "utf-8")
    return str(workspace_file)


@contextmanager
def _run_child_process(
    command: list[str], root: Path, environment: Mapping[str, str]
) -> Iterator[subprocess.Popen[bytes]]:
    """Run a program of Dagster in a child process while the block runs.

    The child also ends if this process dies: `main` of this module runs in it, and watches its standard input.

    Args:
        command: The program with its arguments.
        root: The folder in which it runs.
        environment: Its environment variables.

    Yields:
        The child process.
    """
    watched_command = [sys.executable, "-c", f"from {__name__} import main; main()", *command]
    process = subprocess.Popen(
        watched_command, cwd=root, env=environment, stdin=subprocess.PIPE, start_new_session=True
    )
    try:
        yield process
    finally:
        _end_child_process(process)


def _end_child_process(process: subprocess.Popen[bytes]) -> None:
    """Interrupt a child process, and wait until it has ended.

    If it goes on for KILL_DELAY_SECONDS, it is killed together with its own children.
    """
    is_running = process.poll() is None
    if is_running:
        process.send_signal(signal.SIGINT)

    try:
        process.wait(KILL_DELAY_SECONDS)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def open_listening_socket(port: int, command_name: str, host: str = LOOPBACK_ADDRESS) -> socket.socket:
    """Return a socket that listens on a port.

    Args:
        port: The port, or 0 for a free one.
        command_name: The command that listens, such as "ui", for the error message.
        host: The address to listen on.

    Raises:
        UserError: The port is not available.
    """
    try:
        return socket.create_server((host, port))
    except OSError as error:
        raise UserError(
            f"port {port}: {error.strerror}; end what listens there, perhaps another `toolformer-dag {command_name}`, "
            f"or choose another port: `toolformer-dag {command_name} --port PORT`"
        ) from error


def serve_until_interrupted(app: AsgiApp, listening_socket: socket.socket) -> None:
    """Answer requests until Ctrl-C or SIGTERM.

    Requests that are still open then have SHUTDOWN_GRACE_SECONDS to be answered.

    Args:
        app: The application.
        listening_socket: The socket on which requests arrive.
    """
    import uvicorn

    from toolformer_dag.cli.connections import build_server_config

    for signal_number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signal_number, signal.default_int_handler)

    server = uvicorn.Server(build_server_config(app, timeout_graceful_shutdown=SHUTDOWN_GRACE_SECONDS))
    with suppress(KeyboardInterrupt):  # uvicorn raises it after it has answered the open requests
        server.run(sockets=[listening_socket])


def main() -> None:
    """Run the program of Dagster that this process's arguments name. A webserver is guarded against other pages.

    The process is killed when its standard input ends, which means that the parent process is gone.
    """
    threading.Thread(target=_end_with_standard_input, daemon=True).start()
    sys.argv = sys.argv[1:]
    if sys.argv[0] == WEBSERVER_PROGRAM:
        _guard_webserver()
    runpy.run_path(sys.argv[0], run_name="__main__")


def _guard_webserver() -> None:
    """Protect Dagster's webserver, which runs on uvicorn, from other pages in the user's browser.

    `uvicorn.run` is replaced by a function that wraps every application in a SameOriginGuard.
    """
    import uvicorn

    run_unguarded = uvicorn.run

    def run_guarded(app: AsgiApp, **options: Any) -> None:
        run_unguarded(SameOriginGuard(app, options["port"]), **options)

    uvicorn.run = run_guarded  # type: ignore[assignment]


def _end_with_standard_input() -> None:
    """Wait for the end of standard input, which means that the parent process is gone, then kill this process group."""
    while os.read(0, 1):  # nobody writes there, so this returns at the end only
        pass
    os.killpg(0, signal.SIGKILL)
