"""A pool of worker processes: the rows of one process, whatever dies."""

import multiprocessing
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from functools import partial
from pathlib import Path

import pytest

from tests.pipeline.conftest import (
    NewLine,
    OneProcess,
    TableOutput,
    Task,
    ThisProcess,
    Worker,
    WorkerError,
    Workers,
    choose_worker_count,
    executor_of,
    local_processes,
)
from tests.processes import at_work, wait_until_ended
from toolformer_dag.computing.chunks import ALREADY_STARTED, ChunkAnswer, Executor
from toolformer_dag.computing.spending import Spent
from toolformer_dag.computing.stage import Work
from toolformer_dag.files import UserError

ROOT = Path(__file__).parents[2]
RAW = "raw_shards"
Pool = Callable[[TableOutput, int], Workers]


def endless(path: Path) -> None:
    """Make a shard of 2 TiB of nothing, which takes no room and minutes to read."""
    path.touch()
    os.truncate(path, 2**41)


def kill_all() -> None:
    """Kill every worker as the kernel would where memory runs out."""
    for child in multiprocessing.active_children():
        assert child.pid is not None
        os.kill(child.pid, signal.SIGKILL)


@pytest.fixture
def pool() -> Iterator[Pool]:
    """Return what starts pools, which are closed after the test."""
    pools: list[Workers] = []

    def start(output: TableOutput, count: int) -> Workers:
        pools.append(Workers(Worker(output.plan), {}, partial(local_processes, count)))
        return pools[-1]

    yield start
    for one in pools:
        one.close()
    assert multiprocessing.active_children() == []


def task(output: TableOutput, shard: str) -> Task:
    return Task(output.name, output.code_version, shard)


def test_a_killed_worker_s_chunk_is_computed_by_another(new_line: NewLine, pool: Pool) -> None:
    line = new_line("one", "two", "three")
    names = ["one", "two", "three"]
    output = line.output(RAW)

    def tasks() -> Iterator[Task]:
        yield task(output, "one")
        kill_all()
        yield from (task(output, name) for name in names[1:])

    ended = dict(found for found in pool(output, 2).map_chunks(tasks()) if found)
    assert sorted(ended) == [0, 1, 2]
    for work in ended.values():
        line.lake.apply_news(work.news)
    other = new_line(*names)
    other.update(RAW)
    assert line.output(RAW).table.list_part_names() == other.output(RAW).table.list_part_names()
    assert line.read(RAW).equals(other.read(RAW))


@pytest.mark.long
@pytest.mark.parametrize("count", [1, 2])
def test_the_chunk_of_a_worker_that_hangs_is_given_to_another(
    new_line: NewLine, pool: Pool, caplog: pytest.LogCaptureFixture, count: int
) -> None:
    line = new_line("one", "two", "three")
    line.set(execution__chunk_hours=20 / 3600)
    output = line.output(RAW)
    stopped = list[int]()

    def tasks() -> Iterator[Task]:
        yield task(output, "one")
        for child in multiprocessing.active_children():
            assert child.pid is not None
            stopped.append(child.pid)
            os.kill(child.pid, signal.SIGSTOP)
        yield from (task(output, name) for name in ("two", "three"))

    ended = [found[0] for found in pool(output, count).map_chunks(tasks()) if found]
    assert sorted(ended) == [0, 1, 2]
    [process] = stopped
    [said] = [record.getMessage() for record in caplog.records]
    assert said.startswith("ccnet/raw_shards, chunk 1: worker <") and f"pid={process} " in said
    assert said.endswith("has not answered for 0:00:20 (execution.chunk_hours); another worker gets the chunk")
    assert not at_work(process)


class ByHand:
    """A place whose answers a test gives. `given`: payloads and their answers, of all places, in order."""

    start_future = ALREADY_STARTED

    def __init__(self, given: list[tuple[object, Future[ChunkAnswer]]]) -> None:
        self._given = given

    def submit(self, task: Task) -> Future[ChunkAnswer]:
        """See ChunkWorker."""
        self._given.append((task.payload, Future()))
        return self._given[-1][1]

    def kill(self) -> None:
        """See ChunkWorker."""


def test_a_worker_that_is_done_gets_its_next_chunk_before_the_caller_hears_of_the_last(new_line: NewLine) -> None:
    given: list[tuple[object, Future[ChunkAnswer]]] = []
    worker = Worker(new_line().plan())
    workers = Workers(worker, {}, lambda *_: Executor(lambda: 2, lambda: ByHand(given)))
    run = workers.map_chunks(Task("t", "", number) for number in range(6))
    assert next(run) is None and [payload for payload, _ in given] == [0, 1]
    for _, answer in given[:2]:
        answer.set_result(ChunkAnswer(Work(), Spent()))
    assert next(run) == (0, Work()) and [payload for payload, _ in given] == [0, 1, 2, 3]
    given[2][1].set_result(ChunkAnswer(Work(), Spent()))
    assert next(run) == (1, Work())
    given[3][1].set_result(ChunkAnswer(UserError("no"), Spent()))
    assert next(run) == (2, Work()) and len(given) == 5, "one was done while an answer was looked at"
    with pytest.raises(UserError, match="no"):
        next(run)


def test_two_workers_that_die_over_one_chunk_end_the_update(new_line: NewLine, pool: Pool) -> None:
    line = new_line("one")
    endless(line.web / "endless.json")
    line.set(corpus__shards='["web/*"]')
    output = line.output(RAW)
    with pytest.raises(
        WorkerError, match=r"ccnet/raw_shards, chunk 1: 2 workers died over.*SIGKILL.*fewer execution.workers"
    ):
        for _ in pool(output, 1).map_chunks([task(output, "endless")]):
            kill_all()


def test_errors_arrive_with_their_message_and_the_same_worker_goes_on_and_gets_no_interrupt(
    new_line: NewLine, pool: Pool
) -> None:
    line = new_line("one")
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    output = line.output(RAW)
    lent = pool(output, 1)
    with pytest.raises(WorkerError, match="a worker failed: KeyError: 'none'"):
        list(lent.map_chunks([task(output, "none")]))
    with pytest.raises(UserError, match="ccnet/raw_shards: settings, prompts or tools changed while the run went on"):
        list(lent.map_chunks([Task(output.name, "other", "one")]))
    line.lake.root.mkdir()
    (line.lake.root / "ccnet").touch()
    with pytest.raises(UserError, match=r"cannot write .*ccnet.*: .*; free space or correct the rights and run again"):
        list(lent.map_chunks([task(output, "one")]))
    (line.lake.root / "ccnet").unlink()
    [child] = multiprocessing.active_children()
    assert [found[0] for found in lent.map_chunks([task(output, "one")]) if found] == [0]
    assert multiprocessing.active_children() == [child]  # warm: the same worker all along
    status = Path(f"/proc/{child.pid}/status").read_text()
    blocked = int(status.partition("SigBlk:")[2].split()[0], 16)
    assert blocked & 1 << signal.SIGINT - 1  # from its first instruction on
    assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == before


@pytest.mark.long
def test_what_others_still_compute_after_an_error_is_no_answer_to_the_next_call(new_line: NewLine, pool: Pool) -> None:
    line = new_line("one")
    endless(line.web / "endless.json")
    line.set(corpus__shards='["web/*"]')
    output = line.output(RAW)
    lent = pool(output, 2)
    with pytest.raises(WorkerError, match="KeyError"):
        list(lent.map_chunks([task(output, "endless"), task(output, "none")]))
    ended = [found[0] for found in lent.map_chunks([task(output, "one")] * 3) if found]
    assert ended.count(0) == ended.count(1) == ended.count(2) == 1


@pytest.mark.long
def test_workers_end_when_their_parent_is_killed(new_line: NewLine) -> None:
    line = new_line("one", "two")
    for name in ("one", "two"):
        endless(line.web / f"{name}.json.gz")
    command = [sys.executable, "-m", "tests.pipeline.pool_child", str(line.folder)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) as parent:
        assert parent.stdout is not None
        workers = [int(pid) for pid in parent.stdout.readline().split()]
        parent.kill()
    assert len(workers) == 2
    wait_until_ended(workers)


@pytest.mark.parametrize(("workers", "kind"), [(1, ThisProcess), (3, OneProcess)])
def test_the_settings_say_how_many_workers(new_line: NewLine, workers: int, kind: type) -> None:
    line = new_line("one")
    line.set(execution__workers=workers)
    plan = line.plan()
    assert choose_worker_count(plan.settings) == workers
    executor = executor_of(Worker(plan), {})
    assert executor.count_workers() == workers and isinstance(executor.start_worker(), kind)
    assert multiprocessing.active_children() == []  # started with the first chunk
