"""Connections that ask too much, or never read what they are answered, end; others are answered meanwhile."""

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import httpx
import pytest
import uvicorn

from toolformer_dag.cli import connections
from toolformer_dag.cli.connections import MAX_READ_BYTES, BoundedConnection, build_server_config
from toolformer_dag.cli.web_server import open_listening_socket

LARGE = 32 << 20
"""Bytes of an answer that no buffer of the system holds."""


async def app(scope: Any, receive: Any, send: Any) -> None:
    """Answer `ok`, or at /large with LARGE bytes, once the body has come."""
    if scope["type"] != "http":
        return
    while (await receive()).get("more_body"):
        pass
    body = b" " * LARGE if scope["path"] == "/large" else b"ok"
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"%d" % len(body))]})
    await send({"type": "http.response.body", "body": body})


@contextmanager
def served() -> Iterator[tuple[int, uvicorn.Server]]:
    with open_listening_socket(0, "serve") as listening:
        server = uvicorn.Server(build_server_config(app))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
        thread.start()
        try:
            yield listening.getsockname()[1], server
        finally:
            server.should_exit = True
            thread.join()


def connected(port: int) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port), timeout=30)


def request(path: str, more: bytes = b"") -> bytes:
    return b"GET %s HTTP/1.1\r\nHost: here\r\n%s\r\n" % (path.encode(), more)


def is_ended(client: socket.socket) -> bool:
    """Read until the connection ends; return whether it did within the client's timeout."""
    try:
        while client.recv(1 << 20):
            pass
    except TimeoutError:
        return False
    except ConnectionError:
        return True
    return True


@pytest.mark.parametrize("count", [1, 2])
def test_a_client_that_reads_nothing_is_let_go(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    monkeypatch.setattr(connections, "HEAD_SECONDS", 0.2)
    with served() as (port, server), connected(port) as client:
        client.sendall(request("/large") * count)
        while not server.server_state.connections:
            pass
        while server.server_state.connections:  # for ever, if it were not let go
            pass
        assert httpx.get(f"http://127.0.0.1:{port}/").text == "ok"


def test_a_client_that_reads_slowly_gets_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "HEAD_SECONDS", 0.5)
    with served() as (port, _), connected(port) as client:
        client.sendall(request("/large", b"Connection: close\r\n"))
        received = 0
        while part := client.recv(1 << 20):
            received += len(part)
            threading.Event().wait(0.02)
        assert received > LARGE


def test_a_few_requests_may_come_early_and_more_end_the_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "PIPELINE_SECONDS", 0.0)
    for count, least, most in ((5, 5, 5), (1000, 0, connections.MAX_PIPELINED_REQUESTS + 1)):
        with served() as (port, _), connected(port) as client:
            client.sendall(request("/") * (count - 1) + request("/", b"Connection: close\r\n"))
            received = b""
            with suppress(ConnectionError):
                while part := client.recv(1 << 20):
                    received += part
            assert least <= received.count(b"200 OK") <= most


def test_a_body_in_parts_of_a_byte_is_read_in_turns_with_others(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = []

    def data_received(self: BoundedConnection, data: bytes) -> None:
        sizes.append(len(data))
        super(BoundedConnection, self).data_received(data)

    monkeypatch.setattr(BoundedConnection, "data_received", data_received, raising=False)
    head = b"POST / HTTP/1.1\r\nHost: here\r\nTransfer-Encoding: chunked\r\nConnection: close\r\n\r\n"
    with served() as (port, _), connected(port) as client:
        client.sendall(head + b"1\r\na\r\n" * 30_000 + b"0\r\n\r\n")
        assert client.recv(100).startswith(b"HTTP/1.1 200")
    assert max(sizes) <= MAX_READ_BYTES and sum(sizes) > 180_000


def test_one_address_has_half_of_the_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "MOST", 6)
    with served() as (port, server):
        clients = [connected(port) for _ in range(4)]
        try:
            for client in clients[:3]:
                client.settimeout(0.5)
            assert any(is_ended(client) for client in clients[:3])  # one that had asked for nothing
            assert len(server.server_state.connections) == 3
            clients[3].sendall(request("/"))
            assert clients[3].recv(100).startswith(b"HTTP/1.1 200")
        finally:
            for client in clients:
                client.close()
