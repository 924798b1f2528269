"""Runs of a small world with its lake in a folder and in an object store on the loopback, side by side.

    python -m benchmarks.object_lake [--documents 16] [--delay 0.03]
    python -m benchmarks.object_lake --shards 1 16 64 [--documents 10] [--delay 0.03]

`--delay` adds so many seconds to every request, as a distant store does. With `--shards`: one lane over so many shards,
in the store alone, each run in a process that has its imports. Needs moto, of the extra `dev`.
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

from benchmarks.worlds import LANE, World

PLACE = ('paths.lake="s3://bucket/lake"', 'paths.cache="copies"', 'paths.warehouse="copies/toolformer.duckdb"')
RUNS = {"first run": (), "nothing changed": (), "another tau_f": ("tools.calculator.tau_f=0.0",)}
ONE_LANE = f"{LANE}[execution]\nworkers = 1\n"
MORE = "one shard added"


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


def shards(folder: Path, count: int, documents: int, asked: list[str]) -> None:
    """Print the seconds and requests of each run of one lane over so many shards; `asked`: what the store was asked."""
    world = World.make(folder, documents * (count + 1), ONE_LANE, count + 1)
    with_one_more = sorted((folder / "web").iterdir())[-1]
    aside = with_one_more.rename(folder / with_one_more.name)
    place = (f'paths.lake="s3://bucket/{count}"', *PLACE[1:])
    for name, overrides in ({**RUNS, MORE: RUNS["another tau_f"]}).items():
        if name == MORE:
            aside.rename(with_one_more)
        asked.clear()
        began = time.monotonic()
        ended = world.finish(*overrides, *place)
        seconds = time.monotonic() - began
        assert ended.error is None, ended.error
        print(f"{count} shards, {name}: {seconds:.1f} s, {len(asked):,} requests", flush=True)


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--documents", type=int)
    options.add_argument("--delay", type=float, default=0.0)
    options.add_argument("--shards", type=int, nargs="*", default=())
    given = options.parse_args()
    if given.shards:
        with TemporaryDirectory() as scratch, store(given.delay) as asked:
            for count in given.shards:
                shards(Path(scratch) / str(count), count, given.documents or 10, asked)
        return
    with TemporaryDirectory() as scratch, store(given.delay) as asked:
        worlds = {name: World.make(Path(scratch) / name, given.documents or 16) for name in ("warm", "folder", "store")}
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
