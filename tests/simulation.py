"""A simulated machine room for runs over one lake: a clock, processes, a disk and an object store that fail by a seed.

One task runs at a time. It gives up its turn at every operation of the store, at locks and while it sleeps. Who goes
on and what fails is drawn from a seed, so that a seed plays the same schedule again. A process may be killed before or
after an operation, or have one arrive after its death; operations may be late, be refused (503, a full disk), be torn,
be applied though their answer is lost, or be sent twice, which a condition then answers with 412.
"""

import errno
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from math import inf
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch
from uuid import UUID

from obstore.exceptions import AlreadyExistsError, GenericError, PreconditionError
from xxhash import xxh3_64

from toolformer_dag.computing import spending, update
from toolformer_dag.files import WriteError, write_file_atomically
from toolformer_dag.lake import cleaning, manifest, object_storage, row_store, session, storage, table
from toolformer_dag.lake.object_storage import ObjectStorage
from toolformer_dag.lake.storage import Storage, StoredFile

MOST_STEPS = 20_000
"""Turns after which a schedule counts as endless."""


class Crashed(BaseException):
    """Unwinds the tasks of a process that was killed: nothing that they still do has an effect."""


class Endless(Exception):
    """A schedule that does not end."""


@dataclass(eq=False)
class Process:
    """`crash_at`: the operation at which it is killed; `rate`: how often its operations fail; `skew`: of its clock."""

    name: str
    crash_at: int = 0
    rate: float = 0.0
    skew: float = 0.0
    operations: int = 0
    faults: int = 0
    dead: bool = False

    def die(self) -> None:
        self.dead = True
        self.faults = self.faults + 1
        raise Crashed


@dataclass(eq=False)
class Task:
    """What a process does in a thread of its own; `ready` or `until`: when it gets a turn."""

    sim: "Simulation"
    process: Process
    go: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    ready: Callable[[], bool] = lambda: True
    until: float = inf
    done: bool = False
    value: Any = None
    error: BaseException | None = None

    def result(self) -> Any:
        """Wait for what it returns or raises."""
        self.sim.wait(lambda: self.done)
        if self.error is not None:
            raise self.error
        return self.value


class Simulation:
    """`now`: seconds since 1970; `locks`: those that are held; `trace`: a hash of everything that happened."""

    def __init__(self, seed: int) -> None:
        self.draw = Random(seed)
        self.now = 1.7e9
        self.steps = 0
        self.locks = set[str]()
        self.trace = xxh3_64()
        self._tasks: list[Task] = []
        self._current = Task(self, Process("nobody"))
        self._back = threading.Semaphore(0)

    @property
    def process(self) -> Process:
        """The process whose turn it is."""
        return self._current.process

    def spawn(self, process: Process, work: Callable[[], Any]) -> Task:
        """Begin a task; it gets turns while `run` goes on."""
        task = Task(self, process)

        def body() -> None:
            task.go.acquire()
            try:
                if not process.dead:
                    task.value = work()
            except BaseException as error:  # noqa: BLE001 - raised where the task is asked
                task.error = error
            task.done = True
            self._back.release()

        self._tasks.append(task)
        threading.Thread(target=body, daemon=True).start()
        return task

    def run(self) -> None:
        """Give turns until every task has ended. Raises Endless."""
        try:
            while self._tasks:
                self.steps += 1
                able = [one for one in self._tasks if one.process.dead or one.until <= self.now or one.ready()]
                if not able:
                    self.now = min(one.until for one in self._tasks)
                if self.steps > MOST_STEPS or self.now == inf:
                    raise Endless(f"{len(self._tasks)} tasks after {self.steps} steps")
                if able:
                    self._turn(self.draw.choice(able))
        finally:
            while self._tasks:  # of an endless schedule
                self._tasks[0].process.dead = True
                self._turn(self._tasks[0])

    def _turn(self, task: Task) -> None:
        self._current = task
        task.go.release()
        self._back.acquire()
        self.now += self.draw.random() / 10
        if task.done:
            self._tasks.remove(task)

    def wait(self, ready: Callable[[], bool] = lambda: True, seconds: float = inf) -> bool:
        """Give up the turn until `ready`, or so long; return whether it is. Raises Crashed in a dead process."""
        task = self._current
        if not task.process.dead:
            task.ready = ready
            task.until = self.now + seconds
            self._back.release()
            task.go.acquire()
        if task.process.dead:
            raise Crashed
        return ready()

    def operation(
        self, name: str, apply: Callable[[], Any], refused: Callable[[], Exception] | None = None, remote: bool = False
    ) -> Any:
        """Do an operation of a store, or fail. `refused`: makes the error of one that may; others are never refused.

        `remote`: whether it may arrive after the death of who asked for it.
        """
        process = self.process
        draw = self.draw
        self.wait(lambda: True) if draw.random() < 0.95 else self.wait(lambda: False, draw.expovariate(0.05))
        process.operations += 1
        self.trace.update(f"{process.name} {name} {self.now}\n".encode())
        crash = draw.choice(("before", "after", "late")) if process.operations == process.crash_at else ""
        fault = draw.choice(("refused", "lost", "doubled")) if refused and draw.random() < process.rate else ""
        process.faults += bool(fault)
        if crash == "late" and remote:
            self.spawn(Process("network"), lambda: self.wait(lambda: False, draw.expovariate(0.1)) or apply())
        if crash in ("before", "late"):
            process.die()
        if fault == "refused" and refused:
            raise refused()
        result = apply()
        if crash == "after":
            process.die()
        if fault == "lost" and refused:
            raise refused()
        return apply() if fault == "doubled" else result

    @contextmanager
    def locked(self, path: Path, wait: bool = True) -> Iterator[bool]:
        """Hold a lock as `files.hold_file_lock` does."""
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
        place = os.path.realpath(path)
        if self.wait(lambda: place not in self.locks, inf if wait else 0):
            self.locks.add(place)
            try:
                yield True
            finally:
                self.locks.discard(place)
        else:
            yield False

    def write_whole(self, path: Path, content: bytes) -> None:
        """Write a file as `files.write_whole` does; who is killed may leave half of it under another name."""

        def write() -> None:
            write_file_atomically(path, content)
            os.utime(path, (self.now, self.now))

        try:
            self.operation(f"write {path.name}", write, lambda: WriteError(path, OSError(errno.ENOSPC, "full")))
        except Crashed:
            if self.draw.random() < 0.5:
                path.parent.mkdir(parents=True, exist_ok=True)
                path.with_name(f".tmp-{self.draw.randbytes(16).hex()}").write_bytes(content[: len(content) // 2])
            raise

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Let the package's clocks, chances, threads, locks and writes be those of the simulation."""
        sim = self
        draw = self.draw
        clock = SimpleNamespace(
            time=lambda: sim.now + sim.process.skew,
            time_ns=lambda: int((sim.now + sim.process.skew) * 1e9),
            monotonic=lambda: sim.now,
            sleep=lambda seconds: sim.wait(lambda: False, seconds),
        )
        threads = SimpleNamespace(Thread=partial(thread, sim), Event=partial(event, sim))
        dates = SimpleNamespace(now=lambda zone: datetime.fromtimestamp(clock.time(), zone))
        with ExitStack() as stack:
            for module in (manifest, row_store, object_storage, update):
                stack.enter_context(patch.object(module, "time", clock))
            for module in (table, update, object_storage):
                stack.enter_context(patch.object(module, "uuid4", lambda: UUID(bytes=draw.randbytes(16))))
            for module in (session, object_storage):
                stack.enter_context(patch.object(module, "ThreadPoolExecutor", lambda most=16: Executor(sim, most)))
            for module, name, value in (
                (manifest, "random", draw),
                (row_store, "MERGE_AT", 3),
                (session, "wait", lambda futures: sim.wait(lambda: all(one.done for one in futures))),
                (object_storage, "threading", threads),
                (storage, "hold_file_lock", sim.locked),
                (storage, "write_file_atomically", sim.write_whole),
                (cleaning, "datetime", dates),
                (spending, "datetime", dates),
            ):
                stack.enter_context(patch.object(module, name, value))
            yield


class Executor:
    """A pool of threads: tasks of the process that submits them, at most `most` at once, in their order."""

    def __init__(self, sim: Simulation, most: int) -> None:
        self._sim = sim
        self._most = most
        self._given = list[Task]()

    def submit(self, work: Callable[..., Any], *arguments: Any) -> Task:
        def when_free() -> Any:
            self._sim.wait(lambda: sum(not one.done for one in before) < self._most)
            return work(*arguments)

        before = list(self._given)
        self._given.append(self._sim.spawn(self._sim.process, when_free))
        return self._given[-1]

    def map(self, work: Callable[..., Any], values: Sequence[Any]) -> list[Any]:
        return [one.result() for one in [self.submit(work, value) for value in values]]

    def __enter__(self) -> "Executor":
        return self

    def __exit__(self, *error: object) -> None:
        self._sim.wait(lambda: all(one.done for one in self._given))


def event(sim: Simulation) -> Any:
    """Return what `threading.Event` does."""
    told: list[bool] = []
    return SimpleNamespace(set=lambda: told.append(True), wait=lambda seconds: sim.wait(lambda: bool(told), seconds))


def thread(sim: Simulation, target: Callable[..., Any], args: Sequence[Any], daemon: bool) -> Any:
    """Return what `threading.Thread` does."""
    begun: list[Task] = []
    return SimpleNamespace(
        start=lambda: begun.append(sim.spawn(sim.process, lambda: target(*args))), join=lambda: begun[0].result()
    )


def step(name: str) -> Any:
    """Return an operation of a folder as one that can fail."""
    plain = getattr(Storage, name)
    return lambda disk, path, *more: disk.sim.operation(f"{name} {path.name}", lambda: plain(disk, path, *more))


class Disk(Storage):
    """A folder; each process has a name of its own for it, by which it remembers what it read."""

    read, manifest, fetch, exists, set_aside = map(step, ("read", "manifest", "fetch", "exists", "set_aside"))

    def __init__(self, sim: Simulation, root: Path) -> None:
        super().__init__(root)
        self.sim = sim

    def list_file_names(self, folder: Path) -> Any:
        return self.sim.operation(f"list {folder.name}", lambda: sorted(Storage.list_file_names(self, folder)))

    def iter_files(self, include_all_parts: bool = True) -> Iterator[StoredFile]:
        return iter(self.sim.operation("walk", lambda: sorted(Storage.iter_files(self, include_all_parts), key=str)))

    def mark(self, path: Path, content: bytes, run_in_background: Any = None) -> None:
        super().mark(path, content, run_in_background)
        os.utime(path, (self.sim.now, self.sim.now))

    def remove(self, *paths: Path) -> None:
        for path in paths:
            self.sim.operation(f"remove {path.name}", partial(Storage.remove, self, path))


@dataclass
class Objects:
    """An object store that all machines share, as obstore has it: key -> (content, e_tag, time of change)."""

    sim: Simulation
    there: dict[str, tuple[bytes, str, float]] = field(default_factory=dict)

    def storage(self, root: Path) -> ObjectStorage:
        """Return a machine's storage with copies in `root`."""
        return ObjectStorage("s3://simulated", root, self, self)  # type: ignore[arg-type]

    def put(self, key: str, content: bytes, mode: Any = "overwrite") -> Any:
        def apply() -> Any:
            before = self.there.get(key)
            if mode == "create" and before:
                raise AlreadyExistsError(key)
            if isinstance(mode, dict) and (before is None or before[1] != mode["e_tag"]):
                raise PreconditionError(key)
            self.there[key] = content, f"{len(self.there)}-{self.sim.draw.random()}", self.sim.now
            return {"e_tag": self.there[key][1], "version": None}

        return self._asked(f"put {key}", apply)

    def get(self, key: str) -> Any:
        content, e_tag, _ = self._asked(f"get {key}", lambda: self._found(key))
        torn = self.sim.draw.random() < self.sim.process.rate / 4

        def stream(min_chunk_size: int) -> Iterator[bytes]:
            yield content[: len(content) // 2]
            if torn:
                self.sim.process.faults += 1
                raise _away()
            yield content[len(content) // 2 :]

        return SimpleNamespace(bytes=lambda: content, meta={"e_tag": e_tag, "version": None}, stream=stream)

    def head(self, key: str) -> Any:
        return self._asked(f"head {key}", lambda: self._meta(key))

    def list(self, prefix: str | None) -> Any:
        below = "" if prefix is None else f"{prefix}/"
        return [self._asked(f"list {below}", lambda: [self._meta(key) for key in self.there if key.startswith(below)])]

    def delete(self, keys: Sequence[str]) -> None:
        self._asked(f"delete {len(keys)}", lambda: [self.there.pop(key, None) for key in keys])

    def copy(self, key: str, other: str) -> None:
        def apply() -> None:
            content, e_tag, _ = self._found(key)
            self.there[other] = content, f"{e_tag}-copy", self.sim.now

        self._asked(f"copy {key}", apply)

    def _asked(self, name: str, apply: Callable[[], Any]) -> Any:
        return self.sim.operation(name, apply, _away, remote=True)

    def _found(self, key: str) -> tuple[bytes, str, float]:
        if key not in self.there:
            raise FileNotFoundError(errno.ENOENT, "no such object", key)
        return self.there[key]

    def _meta(self, key: str) -> dict[str, Any]:
        content, e_tag, changed = self._found(key)
        when = datetime.fromtimestamp(changed, UTC)
        return {"path": key, "size": len(content), "e_tag": e_tag, "version": None, "last_modified": when}


def _away() -> Exception:
    return GenericError("status code: 503 Service Unavailable")
