"""Runs of a small world with its lake in a folder and in an object store on the loopback, side by side.

    python -m benchmarks.object_lake [--documents 16] [--delay 0.03]

`--delay` adds so many seconds to every request, as a distant store does. Needs moto, of the extra `dev`.
"""

import argparse
import logging
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import httpx
from moto.server import ThreadedMotoServer

from benchmarks.soak_world import SoakWorld
from toolformer_dag.lake.object_storage import ObjectStorage

PLACE = ('paths.lake="s3://bucket/lake"', 'paths.cache="copies"', 'paths.warehouse="copies/toolformer.duckdb"')
RUNS = {"first run": (), "nothing changed": (), "another tau_f": ("tools.calculator.tau_f=0.0",)}


@contextmanager
def store() -> Iterator[None]:
    """Run moto's server in this process, named in its variables."""
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    address = "http://{}:{}".format(*server.get_host_and_port())
    httpx.put(f"{address}/bucket").raise_for_status()
    os.environ |= {"AWS_ENDPOINT_URL": address, "AWS_ACCESS_KEY_ID": "k", "AWS_SECRET_ACCESS_KEY": "s"}
    try:
        yield
    finally:
        server.stop()


@contextmanager
def counted(delay: float) -> Iterator[list[str]]:
    """Note every request inside the block, and wait before each."""
    asked, told = [], ObjectStorage._errors

    @contextmanager
    def slower(self: ObjectStorage, verb: str, path: Path) -> Iterator[None]:
        asked.append(verb)
        time.sleep(delay)
        with told(self, verb, path):  # type: ignore[arg-type]
            yield

    ObjectStorage._errors = slower  # type: ignore[method-assign, assignment]
    try:
        yield asked
    finally:
        ObjectStorage._errors = told  # type: ignore[method-assign]


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--documents", type=int, default=16)
    options.add_argument("--delay", type=float, default=0.0)
    given = options.parse_args()
    with TemporaryDirectory() as scratch, store():
        worlds = {name: SoakWorld.make(Path(scratch) / name, given.documents) for name in ("folder", "store")}
        worlds["folder"].run()  # libraries are loaded, the model is compiled
        worlds["folder"] = SoakWorld.make(Path(scratch) / "folder again", given.documents)
        for name, overrides in RUNS.items():
            seconds = {}
            for kind, world in worlds.items():
                with counted(given.delay) as asked:
                    began = time.monotonic()
                    ended = world.run(*overrides, *(PLACE if kind == "store" else ()))
                    seconds[kind] = time.monotonic() - began
                assert ended.error is None, ended.error
            ratio = seconds["store"] / seconds["folder"]
            print(
                f"{name}: folder {seconds['folder']:.1f} s, store {seconds['store']:.1f} s ({ratio:.2f}); "
                f"{len(asked):,} requests"
            )


if __name__ == "__main__":
    main()
