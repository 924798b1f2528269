"""Runs of a small world with its lake in a folder and in an object store on the loopback, side by side.

    python -m benchmarks.object_lake [--documents 16] [--delay 0.03]

`--delay` adds so many seconds to every request, as a distant store does. Needs moto, of the extra `dev`.
"""

import argparse
import logging
import os
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Thread
from typing import Any

import httpx
from moto.server import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import make_server

from benchmarks.worlds import World

PLACE = ('paths.lake="s3://bucket/lake"', 'paths.cache="copies"', 'paths.warehouse="copies/toolformer.duckdb"')
RUNS = {"first run": (), "nothing changed": (), "another tau_f": ("tools.calculator.tau_f=0.0",)}


@contextmanager
def store(delay: float = 0.0) -> Iterator[list[str]]:
    """Run moto's S3 in this process, named in its variables; yield the requests, each answered so much later."""
    asked: list[str] = []
    answer = DomainDispatcherApplication(create_backend_app)

    def slower(request: dict[str, Any], respond: Any) -> Iterable[bytes]:
        asked.append(request["REQUEST_METHOD"])
        time.sleep(delay)
        found: Iterable[bytes] = answer(request, respond)
        return found

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = make_server("127.0.0.1", 0, slower, threaded=True)
    Thread(target=server.serve_forever, daemon=True).start()
    address = f"http://127.0.0.1:{server.server_port}"
    httpx.put(f"{address}/bucket").raise_for_status()
    os.environ |= {"AWS_ENDPOINT_URL": address, "AWS_ACCESS_KEY_ID": "k", "AWS_SECRET_ACCESS_KEY": "s"}
    try:
        yield asked
    finally:
        server.shutdown()


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--documents", type=int, default=16)
    options.add_argument("--delay", type=float, default=0.0)
    given = options.parse_args()
    with TemporaryDirectory() as scratch, store(given.delay) as asked:
        worlds = {name: World.make(Path(scratch) / name, given.documents) for name in ("warm", "folder", "store")}
        worlds.pop("warm").run()  # libraries are loaded, the model is compiled
        for name, overrides in RUNS.items():
            seconds = {}
            asked.clear()
            for kind, world in worlds.items():
                began = time.monotonic()
                ended = world.run(*overrides, *(PLACE if kind == "store" else ()))
                seconds[kind] = time.monotonic() - began
                assert ended.error is None, ended.error
            ratio = seconds["store"] / seconds["folder"]
            print(
                f"{name}: folder {seconds['folder']:.1f} s, store {seconds['store']:.1f} s ({ratio:.2f}); "
                f"{len(asked):,} requests",
                flush=True,
            )


if __name__ == "__main__":
    main()
