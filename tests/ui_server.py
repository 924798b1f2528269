"""The UI as a person starts it, on a free port, and what its GraphQL answers."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

LAUNCH = """
mutation ($job: String!) {
  launchRun(executionParams: {mode: "default", runConfigData: {}, selector: {
    repositoryLocationName: "toolformer_dag.definitions", repositoryName: "__repository__", jobName: $job}}) {
    __typename ... on LaunchRunSuccess { run { runId } } ... on PythonError { message }
  }
}"""


@contextmanager
def served(
    folder: Path,
    options: Sequence[str] = (),
    variables: Mapping[str, str] | None = None,
    stop: signal.Signals = signal.SIGTERM,
) -> Iterator[str]:
    """Run `toolformer-dag ui` in `folder` until the block ends; yield its address, such as http://127.0.0.1:4000."""
    port = free_port()
    command = [sys.executable, "-m", "toolformer_dag.cli", "ui", "--port", str(port), *options]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)} | dict(variables or {})
    server = subprocess.Popen(command, cwd=folder, env=environment)
    try:
        address = f"http://127.0.0.1:{port}"
        while server.poll() is None and not _answers(address):
            time.sleep(0.3)
        assert server.poll() is None, f"the UI ended with exit code {server.returncode}"
        yield address
    finally:
        server.send_signal(stop)
        server.wait()


def free_port() -> int:
    """Return a port of the loopback that nothing listens on."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def asked(address: str, query: str, **variables: Any) -> dict[str, Any]:
    """Return the data of a GraphQL answer, which must have no errors."""
    reply = httpx.post(f"{address}/graphql", json={"query": query, "variables": variables}, timeout=60)
    answer: dict[str, Any] = reply.json()
    assert "errors" not in answer, answer["errors"]
    data: dict[str, Any] = answer["data"]
    return data


def launched(address: str, job: str) -> str:
    """Start a job as the UI's button does; return the id of its run."""
    answer = asked(address, LAUNCH, job=job)["launchRun"]
    assert answer["__typename"] == "LaunchRunSuccess", answer
    return str(answer["run"]["runId"])


def _answers(address: str) -> bool:
    """Whether the definitions are loaded."""
    try:
        return bool(asked(address, "{ assetNodes { id } }")["assetNodes"])
    except httpx.TransportError:
        return False
