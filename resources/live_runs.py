"""Which runs are alive: a killed run must not hold a pool's slot, or look as if it went on, forever.

Every run locks a file that is named after it, from its first resource to its last. The kernel releases the lock when
the process ends, however it ends. A run that ends well removes its file before it releases the lock, so a file that
nobody locks is a killed run's. A run that was re-executed has another id, and so another file.
"""

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import dagster as dg

from toolformer_dag.files import locked

UNFINISHED = [dg.DagsterRunStatus.STARTING, dg.DagsterRunStatus.STARTED, dg.DagsterRunStatus.CANCELING]


@contextmanager
def alive(instance: dg.DagsterInstance, run_id: str) -> Iterator[None]:
    """Hold the run's lock inside the block."""
    if instance.is_ephemeral:
        yield
        return
    file = _file(instance, run_id)
    with locked(file):
        try:
            yield
        finally:
            file.unlink(missing_ok=True)


def end_dead_runs(instance: dg.DagsterInstance) -> list[str]:
    """Mark runs as failed whose process is gone, and free the slots that they hold; return their ids.

    Runs without a lock file, such as those that have not begun, are left alone.
    """
    dead = []
    for run in instance.get_runs(dg.RunsFilter(statuses=UNFINISHED)):
        file = _file(instance, run.run_id)
        if _left_behind(file):
            instance.report_run_failed(run, "its process was killed; what it had committed is kept")
            instance.event_log_storage.free_concurrency_slots_for_run(run.run_id)
            dead.append(run.run_id)
            file.unlink(missing_ok=True)
    return dead


def _left_behind(file: Path) -> bool:
    """Whether the lock file is there and nobody holds its lock."""
    try:
        stream = file.open("rb")
    except FileNotFoundError:
        return False
    with stream:
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return file.exists()


def _file(instance: dg.DagsterInstance, run_id: str) -> Path:
    return Path(instance.root_directory) / "live_runs" / run_id
