"""A Ray cluster on a loopback of its own, and a line that computes in it; prints what was found as JSON.

Arguments: what to do (`killed`, `unnoticed`, `cancelled` or `orphaned`), the folder of a line. Runs in a network
namespace: Ray listens on every address.
"""

import fcntl
import json
import logging
import os
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import ray

from tests.pipeline.conftest import Line
from toolformer_dag.pipeline.execution import workers_of
from toolformer_dag.pipeline.ray_actors import RayActors, Share

HEAD = "127.0.0.1:6379"
QUIET = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_DISABLE_IMPORT_WARNING": "1", "RAY_enable_metrics_collection": "0"}
EVERY_MACHINE = ("--node-ip-address=127.0.0.1", "--object-store-memory=100000000")
IFF_UP, SIOCSIFFLAGS = 1, 0x8914


def raise_loopback() -> None:
    """Bring up `lo`, which is down in a new namespace."""
    with socket.socket() as any_socket:
        fcntl.ioctl(any_socket, SIOCSIFFLAGS, struct.pack("16sh14x", b"lo", IFF_UP))


@contextmanager
def node(*options: str) -> "Iterator[subprocess.Popen[bytes]]":
    """Run a machine of the cluster as processes of a session of their own; killed at the end."""
    command = [str(Path(sys.executable).with_name("ray")), "start", "--block", *EVERY_MACHINE, *options]
    machine = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)
    try:
        yield machine
    finally:
        kill(machine)


def kill(machine: "subprocess.Popen[bytes]") -> None:
    """Kill every process of a machine, as a loss of power would."""
    sessions = (path for path in Path("/proc").glob("[0-9]*/stat"))
    for path in sessions:
        try:
            pid, session = int(path.parent.name), int(path.read_text().rpartition(")")[2].split()[3])
        except (OSError, ValueError):
            continue
        if session == machine.pid:
            os.kill(pid, signal.SIGKILL)
    machine.wait()


def connect(machines: int) -> None:
    """Wait until so many machines are there."""
    while not ray.is_initialized():
        try:
            ray.init(address=HEAD, log_to_driver=False, logging_level=logging.CRITICAL)
        except (ConnectionError, RuntimeError):
            time.sleep(0.5)
    while sum(one["Alive"] for one in ray.nodes()) < machines:
        time.sleep(0.2)


def alive() -> int:
    """Count the actors' processes of this machine."""
    found = 0
    for command in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            found += command.read_bytes().startswith(b"ray::ChunkActor")
    return found


def until(count: int) -> int:
    """Wait until at most so many actors live, half a minute long; return how many do."""
    for _ in range(300):
        if (found := alive()) <= count:
            return found
        time.sleep(0.1)
    return alive()


def lose_a_machine(line: Line, machines: "list[subprocess.Popen[bytes]]") -> dict[str, object]:
    """Kill one of two machines while positions and samples are computed there; then run the rest of the line."""
    lost: list[int] = []

    def lose(done: int, total: int) -> None:
        if not lost and 0 < done < total:
            lost.append(machines[1].pid)
            kill(machines[1])

    line.update("raw_shards", "heuristic_subset")
    reports = line.update("scored_candidates", workers=workers_of, progress=lose)
    for stage in line.outputs():
        line.update(stage, workers=workers_of)
    tokens = reports["scored_candidates"].work.tokens["positions"]
    return {"lost": len(lost), "tokens": tokens, "actors": until(0), "engine": line.plan().settings.execution.engine}


def lose_unnoticed(line: Line) -> dict[str, object]:
    """Run a line that takes a lost machine for alive at first, as Ray does for some seconds."""
    fitting, late = RayActors._fitting, [1]

    def believed(self: RayActors) -> Share:
        found = fitting(self)
        return replace(found, count=found.count + (late.pop() if late else 0))

    RayActors._fitting = believed  # type: ignore[method-assign]
    for stage in line.outputs():
        line.update(stage, workers=workers_of)
    return {"actors": until(0)}


def cancel(line: Line) -> dict[str, object]:
    """Raise, as a cancelled run does, in the middle of a stage."""

    def interrupt(done: int, total: int) -> None:
        if done:
            raise KeyboardInterrupt

    line.update("raw_shards", "heuristic_subset")
    try:
        line.update("scored_candidates", workers=workers_of, progress=interrupt)
    except KeyboardInterrupt:
        return {"cancelled": True, "actors": until(0)}
    return {"cancelled": False}


def orphan(line: Line) -> dict[str, object]:
    """Kill a run, which then ends nothing by itself."""
    line.update("raw_shards", "heuristic_subset")
    command = [sys.executable, "-m", "tests.pipeline.ray_child", "run", str(line.folder)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as run:
        assert run.stdout is not None
        started = any(alive() for _ in run.stdout)  # its first line may come before the first actor
        run.kill()
    return {"started": started, "actors": until(0)}


def main(what: str, line: Line) -> dict[str, object]:
    """Return what was found."""
    line.set(execution__engine='"ray"', execution__address=f'"{HEAD}"')
    if what == "run":
        line.update("scored_candidates", workers=workers_of, progress=lambda done, total: print(done, flush=True))  # noqa: T201
        return {}
    raise_loopback()
    os.environ |= QUIET
    with ExitStack() as cluster:
        temporary = cluster.enter_context(TemporaryDirectory(dir="/tmp", prefix="r"))  # sockets allow no long path
        cluster.enter_context(
            node("--head", "--num-cpus=0", "--port=6379", "--include-dashboard=false", f"--temp-dir={temporary}")
        )
        connect(1)
        machines = []
        for ports in (20000, 21000):  # of one address, so that two machines would take each other's
            of_worker = [f"--min-worker-port={ports}", f"--max-worker-port={ports + 99}"]
            machines.append(cluster.enter_context(node(f"--address={HEAD}", "--num-cpus=1", *of_worker)))
            connect(1 + len(machines))
        ray.shutdown()
        return (
            lose_a_machine(line, machines)
            if what == "killed"
            else {"unnoticed": lose_unnoticed, "cancelled": cancel, "orphaned": orphan}[what](line)
        )


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1], Line(Path(sys.argv[2])))), flush=True)  # noqa: T201
