"""A Ray cluster of processes of this machine, on a loopback of its own: Ray listens on every address otherwise."""

import fcntl
import logging
import os
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import psutil

from tests.processes import processes_with

SPACE = ("unshare", "--map-root-user", "--net", "--pid", "--fork", "--kill-child", "--mount-proc")
"""Runs a command in a network of its own, and ends what it leaves behind."""
HEAD = "127.0.0.1:6379"
QUIET = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_DISABLE_IMPORT_WARNING": "1", "RAY_enable_metrics_collection": "0"}
EVERY_MACHINE = ("--node-ip-address=127.0.0.1", "--object-store-memory=100000000")
IFF_UP = 1
SIOCSIFFLAGS = 0x8914
Machine = subprocess.Popen[bytes]


@cache
def why_no_namespace() -> str:
    """Return why `SPACE` runs nothing on this machine; empty where it does."""
    try:
        done = subprocess.run([*SPACE, "true"], capture_output=True, text=True)
    except FileNotFoundError:
        return "unshare is not installed"
    return done.stderr.strip()


@contextmanager
def cluster() -> Iterator[Callable[..., Machine]]:
    """Run a head at `HEAD` without a core; what it yields starts a machine. To be called within `SPACE`."""
    import ray

    _raise_loopback()
    os.environ |= QUIET
    with ExitStack() as running:
        temporary = running.enter_context(TemporaryDirectory(dir="/tmp", prefix="r"))  # sockets allow no long path
        head = ("--head", "--num-cpus=0", "--port=6379", "--include-dashboard=false", f"--temp-dir={temporary}")
        running.enter_context(_machine(*head))
        _connect(1)

        def start(cores: int = 1, gpus: int = 0) -> Machine:
            known = len(ray.nodes())
            ports = 20000 + 1000 * known  # of one address, so that two machines would take each other's
            of_worker = (f"--min-worker-port={ports}", f"--max-worker-port={ports + 99}")
            machine = running.enter_context(
                _machine(f"--address={HEAD}", f"--num-cpus={cores}", f"--num-gpus={gpus}", *of_worker)
            )
            _connect(known + 1)
            return machine

        running.callback(ray.shutdown)  # who is still connected would tell the head, which is gone, of an error
        yield start


def kill(machine: Machine) -> None:
    """Kill every process of a machine, as a loss of power would."""
    for process in psutil.process_iter():
        with suppress(OSError, psutil.Error):  # it has just ended
            if os.getsid(process.pid) == machine.pid:
                process.kill()
    machine.wait()


def actors(machine: Machine) -> list[psutil.Process]:
    """Return the processes of a machine that are actors of a run."""
    return [psutil.Process(pid) for pid in processes_with("ray::ChunkServer") if os.getsid(pid) == machine.pid]


def _raise_loopback() -> None:
    """Bring up `lo`, which is down in a new namespace."""
    with socket.socket() as any_socket:
        fcntl.ioctl(any_socket, SIOCSIFFLAGS, struct.pack("16sh14x", b"lo", IFF_UP))


@contextmanager
def _machine(*options: str) -> Iterator[Machine]:
    """Run a machine of the cluster as processes of a session of their own; killed at the end."""
    command = [str(Path(sys.executable).with_name("ray")), "start", "--block", *EVERY_MACHINE, *options]
    machine = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)
    try:
        yield machine
    finally:
        kill(machine)


def _connect(machines: int) -> None:
    """Wait until so many machines have been there."""
    import ray

    while not ray.is_initialized():
        try:
            ray.init(address=HEAD, log_to_driver=False, logging_level=logging.CRITICAL)
        except (ConnectionError, RuntimeError):
            time.sleep(0.5)
    while len(ray.nodes()) < machines:
        time.sleep(0.2)
