"""A server beside clients that ask too much: how long another client waits for a short request meanwhile.

Each trial starts `toolformer-dag serve` with the embedded model. Called by `benchmarks.soak`.
"""

import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import httpx

MOST_WAIT = 0.5
"""Seconds that the short request may wait at worst."""
UNREAD_CONNECTIONS = 600
PIPELINED = 1000
"""Requests that each of these sends at once, whose answers it never reads."""
SHORT_REQUESTS = 20
PROMPT = "Jack had 17 nails and bought 25 more. In total he has"


def wrong_when_served(folder: Path) -> list[str]:
    """Try both faults, print the worst waits, and return what was wrong."""
    folder.mkdir(parents=True)
    (folder / "toolformer.toml").write_text("[tools.calculator]\n")
    wrong = []
    for name, disturb in (("connections unread", _unread_connections), ("stream with logprobs", _logprobs_stream)):
        with _served(folder) as address, disturb(address):
            worst = max(_seconds_of_short_request(address) for _ in range(SHORT_REQUESTS))
        print(f"{name}: a short request beside it waits {worst:.2f} s at worst", flush=True)
        if worst > MOST_WAIT:
            wrong.append(f"{name}: {worst:.2f} s, more than {MOST_WAIT}")
    return wrong


@contextmanager
def _served(folder: Path) -> Iterator[str]:
    command = [sys.executable, "-m", "toolformer_dag.cli", "serve", "--port", "0"]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(command, cwd=folder, env=environment, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        try:
            yield server.stdout.readline().split(" at ")[1].partition("/v1")[0]
        finally:
            server.kill()


@contextmanager
def _unread_connections(address: str) -> Iterator[None]:
    """Open connections that send many requests at once and read nothing, until the block ends."""
    port = int(address.rpartition(":")[2])
    request = b"GET /health HTTP/1.1\r\nHost: 127.0.0.1:%d\r\n\r\n" % port
    with ExitStack() as stack:
        for _ in range(UNREAD_CONNECTIONS):
            with suppress(OSError):
                client = stack.enter_context(socket.create_connection(("127.0.0.1", port)))
                client.setblocking(False)
                client.send(request * PIPELINED)
        yield


@contextmanager
def _logprobs_stream(address: str) -> Iterator[None]:
    """Read a long stream with log probabilities in a thread, until the block ends."""
    body = {"model": "embedded", "prompt": PROMPT, "max_tokens": 400, "logprobs": 5, "stream": True}
    has_ended = threading.Event()

    def read() -> None:
        while not has_ended.is_set():
            with httpx.stream("POST", f"{address}/v1/completions", json=body, timeout=60) as response:
                for _ in response.iter_lines():
                    if has_ended.is_set():
                        return

    thread = threading.Thread(target=read)
    thread.start()
    try:
        yield
    finally:
        has_ended.set()
        thread.join()


def _seconds_of_short_request(address: str) -> float:
    """Return how long `/health` and a text of one token take; connections that are refused are tried again."""
    body = {"model": "embedded", "prompt": PROMPT, "max_tokens": 1}
    begin = time.monotonic()
    while True:
        try:
            httpx.get(f"{address}/health", timeout=60).raise_for_status()
            httpx.post(f"{address}/v1/completions", json=body, timeout=60).raise_for_status()
            return time.monotonic() - begin
        except httpx.TransportError:
            time.sleep(0.05)
