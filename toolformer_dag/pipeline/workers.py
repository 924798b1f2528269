"""The workers of a run: how many and where, as `[execution]` says; the loop that gives them chunks."""

import logging
import os
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import cached_property
from pathlib import Path

from toolformer_dag.files import UserError
from toolformer_dag.model.weights import is_small
from toolformer_dag.pipeline.chunks import Answer, Crew, Here, NoRoom, OneProcess, Place, Tables, Task, WorkerError
from toolformer_dag.pipeline.ray_actors import ray_crew
from toolformer_dag.pipeline.spending import Spent
from toolformer_dag.pipeline.stage import Work
from toolformer_dag.pipeline.worker import Worker
from toolformer_dag.settings.sections import Settings

log = logging.getLogger(__name__)

Ended = Generator[tuple[int, Work] | None, None, None]
"""Numbers of tasks that ended and what each cost, in any order; None about once a second."""
TRIES = 2
"""How many workers may die over one chunk."""
QUOTA = Path("/sys/fs/cgroup/cpu.max")


Crews = Callable[[Worker, Tables], Crew]


def in_process(worker: Worker, tables: Tables) -> Crew:
    """Return the crew that computes here, one chunk after the other."""
    return Crew(1, lambda: Here(worker, tables))


def local_processes(count: int, worker: Worker, tables: Tables) -> Crew:
    """Return processes of this machine, each with a model of its own: where one dies, the others go on."""
    return Crew(count, lambda: OneProcess(worker.plan.settings), (BrokenProcessPool,))


def crew_of(worker: Worker, tables: Tables) -> Crew:
    """Return the crew that the settings name. Raises ClusterError where the cluster cannot be reached."""
    settings = worker.plan.settings
    if settings.execution.engine == "ray":
        return ray_crew(settings)
    count = worker_count(settings)
    return in_process(worker, tables) if count == 1 else local_processes(count, worker, tables)


@dataclass(frozen=True, slots=True)
class _Given:
    number: int
    task: Task
    tries: int = 1
    since: float = 0.0


class Workers:
    """Workers with a chunk at a time each: started when there is work for them, kept until `close`.

    The first chunk decides how many there may be: a run that has nothing to compute starts none.
    """

    def __init__(self, worker: Worker, tables: Tables, crews: Crews = crew_of) -> None:
        self._here, self._tables, self._crews = worker, tables, crews
        self._idle: list[Place] = []
        self._busy: dict[Future[Answer], tuple[Place, _Given]] = {}
        self._next = deque[_Given]()
        self._elsewhere = Spent()

    @property
    def spent(self) -> Spent:
        """Return what was spent here and by other processes."""
        return self._here.spent() + self._elsewhere

    def map_chunks(self, tasks: Iterable[Task]) -> Ended:
        """Yield as tasks end. Closing the generator ends the tasks that are under way.

        Tasks are taken from the iterable as workers become free, and one more for each worker while all compute. A
        worker that dies loses its chunk, which is given to another one once. Raises WorkerError, and UserError as the
        task raised it.
        """
        waiting = (_Given(*one) for one in enumerate(tasks))
        try:
            while self._employ(waiting):
                self._plan_ahead(waiting)
                ended, _ = wait(self._busy, 1.0, FIRST_COMPLETED)
                for future in ended:
                    yield from self._received(future)
                self._end_late()
                if not ended:
                    yield None
        finally:
            self._next.clear()
            self._kill_busy()

    def close(self) -> None:
        """End the workers, and let go of the model of this process: what was committed is kept."""
        self._kill_busy()
        while self._idle:
            self._idle.pop().kill()
        vars(self).pop("_crew", None)  # the next chunk decides anew
        self._here.release()

    @cached_property
    def _crew(self) -> Crew:
        return self._crews(self._here, self._tables)

    def _kill_busy(self) -> None:
        while self._busy:
            self._busy.popitem()[1][0].kill()

    def _employ(self, waiting: Iterator[_Given]) -> bool:
        """Give chunks while there are some and places for them; return whether any place has one."""
        while "_crew" not in vars(self) or len(self._busy) < self._crew.count:
            given = self._next.popleft() if self._next else next(waiting, None)
            if given is None:
                break
            self._give(given)
        return bool(self._busy)

    def _plan_ahead(self, waiting: Iterator[_Given]) -> None:
        """Take tasks while no worker is free: what is planned now need not be waited for."""
        while len(self._next) < self._crew.count and not any(future.done() for future in self._busy):
            given = next(waiting, None)
            if given is None:
                break
            self._next.append(given)

    def _give(self, given: _Given) -> None:
        try:
            place = self._idle.pop() if self._idle else self._crew.start()
        except NoRoom as error:
            self._crew.count -= 1
            if not self._crew.count:
                raise WorkerError(f"{given.task.table}: {error}") from error
            self._next.append(given)
            return
        try:
            self._busy[place.submit(given.task)] = place, replace(given, since=time.monotonic())
        except self._crew.deaths:  # it died while it had nothing to do
            place.kill()
            self._next.append(given)

    def _received(self, future: "Future[Answer]") -> Iterator[tuple[int, Work]]:
        place, given = self._busy.pop(future)
        try:
            answer, spent = future.result()
        except self._crew.deaths as died:
            self._lost(given, place.kill() or " ".join(str(died).split()))
            return
        self._idle.append(place)
        self._elsewhere += spent
        if isinstance(answer, UserError):
            raise answer
        yield given.number, answer

    def _lost(self, given: _Given, how: str) -> None:
        """Give a chunk again. Raises WorkerError where it was given twice."""
        if given.tries == TRIES:
            raise WorkerError(
                f"{given.task.table}: {TRIES} workers died over one chunk, the last with {how}; what was committed is "
                "kept; run again, with fewer execution.workers or a smaller model.token_budget where memory is short"
            ) from None
        self._next.append(replace(given, tries=given.tries + 1))

    def _end_late(self) -> None:
        """End workers that are busy with a chunk for longer than `execution.chunk_hours`."""
        limit = timedelta(hours=self._here.plan.settings.execution.chunk_hours)
        for future, (place, given) in list(self._busy.items()):
            if time.monotonic() - given.since > limit.total_seconds() and not future.done():
                del self._busy[future]
                place.kill()
                log.warning("%s: a worker has not answered for %s; another gets its chunk", given.task.table, limit)
                self._lost(given, f"no answer in {limit} (execution.chunk_hours)")


def worker_count(settings: Settings) -> int:
    """Return `execution.workers`, else one per GPU, or one per core for a model that computes on one thread, else 1."""
    if settings.execution.workers is not None:
        return settings.execution.workers
    import torch

    if settings.model.device in ("auto", "cuda") and torch.cuda.is_available():
        return torch.cuda.device_count()
    return cores() if settings.model.device in ("auto", "cpu") and is_small(settings.model) else 1


def cores() -> int:
    """Return the cores this process may use: hardware threads of one core count once, a container's share is kept."""
    allowed = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))
    return max(1, min(len({_core(cpu) for cpu in allowed}), _quota()))


def _core(cpu: int) -> str:
    """The hardware threads that share the core of one of them."""
    file = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
    return file.read_text() if file.is_file() else str(cpu)


def _quota() -> int:
    """Whole cores that a container's limit leaves; a large number where there is none."""
    share, _, period = QUOTA.read_text().partition(" ") if QUOTA.is_file() else ("max", "", "")
    return 1_000_000 if share == "max" else int(share) // int(period)
