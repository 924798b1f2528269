"""Moto's server: S3 over HTTP on the loopback, with the bucket `bucket`, for tests of lakes in an object store."""

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any

import httpx
import pytest
from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import make_server

from toolformer_dag.lake.table import Lake

_numbers = count()


class S3:
    """A running server, and lakes on it. `address`: http://127.0.0.1:PORT; `requests`: what it was asked so far.

    `away`: how many of the next requests it answers with 503.
    """

    away = 0

    def __init__(self, address: str, requests: list[str]) -> None:
        self.address = address
        self.requests = requests
        self.variables = {
            "AWS_ENDPOINT_URL": address,
            "AWS_ACCESS_KEY_ID": "test",
            "AWS_SECRET_ACCESS_KEY": "test",
            "AWS_REGION": "us-east-1",
        }

    def new_place(self) -> str:
        """Return an address of a lake that nobody has used."""
        return f"s3://bucket/lake-{next(_numbers)}"

    def objects(self, lake: Lake) -> dict[str, int]:
        """Return the bytes of every object of a lake by its key below the lake."""
        return {file.path.relative_to(lake.root).as_posix(): file.size_bytes for file in lake.storage.iter_files()}

    def overwrite(self, lake: Lake, path: Path, content: bytes) -> None:
        """Put other bytes in the place of an object, and drop this machine's copy."""
        lake.storage.mark(path, content)
        path.unlink(missing_ok=True)

    def uploads_under_way(self) -> bool:
        """Return whether somebody has begun an upload in parts and not ended it."""
        return "<Upload>" in httpx.get(f"{self.address}/bucket?uploads").text


@contextmanager
def s3_server() -> Iterator[S3]:
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    moto = DomainDispatcherApplication(create_backend_app)
    requests = list[str]()

    def counted(environ: dict[str, Any], answer: Any) -> Any:
        requests.append(f"{environ['REQUEST_METHOD']} {environ['PATH_INFO']}")
        if found.away:
            found.away -= 1
            answer("503 Service Unavailable", [])
            return []
        return moto(environ, answer)

    server = make_server("127.0.0.1", 0, counted, threaded=True)
    serving = threading.Thread(target=server.serve_forever)
    serving.start()
    try:
        found = S3(f"http://127.0.0.1:{server.port}", requests)
        httpx.put(f"{found.address}/bucket").raise_for_status()
        yield found
    finally:
        server.shutdown()
        serving.join()


@pytest.fixture(scope="session")
def s3_running() -> Iterator[S3]:
    with s3_server() as server:
        yield server


@pytest.fixture
def s3(s3_running: S3, monkeypatch: pytest.MonkeyPatch) -> S3:
    """The server, named in the variables of this process."""
    for name, value in s3_running.variables.items():
        monkeypatch.setenv(name, value)
    return s3_running
