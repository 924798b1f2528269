"""Which runs are alive, and what the dead ones had spent.

A killed run must not hold a pool's slot, or look as if it went on, forever. Every run locks a file that is named after
it, from before its first step to its end. The kernel releases the lock when the process ends, however it ends. A run
that ends well removes its file before it releases the lock, so a file that nobody locks is a killed run's. A run that
was re-executed has another id, and so another file. A run that was killed before it had a file is told by the process
that Dagster noted in its log. Where several machines share Dagster's storage, each looks after the runs that carry the
name of its own DAGSTER_HOME; runs of other machines are left alone.
"""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from uuid import uuid4

import dagster as dg

from toolformer_dag.files import beside, locked, write_whole
from toolformer_dag.pipeline.spending import Spent, take_spent

UNFINISHED = [dg.DagsterRunStatus.STARTING, dg.DagsterRunStatus.STARTED, dg.DagsterRunStatus.CANCELING]
HOME = ".dagster/toolformer_home"
"""The tag of a run that names the DAGSTER_HOME whose lock files tell whether it is alive; the UI shows no such tag."""
NEVER_BEGUN = timedelta(minutes=10)
"""How long a run may be starting without a process of its own."""


@contextmanager
def alive(instance: dg.DagsterInstance, run_id: str) -> Iterator[None]:
    """Hold the run's lock inside the block; within such a block of the same run do nothing."""
    file = _file(instance, run_id)
    if instance.is_ephemeral or file in _held:
        yield
        return
    fresh = beside(file)
    with locked(fresh):
        fresh.rename(file)  # locked before anybody can see it
        _held.add(file)
        try:
            yield
        finally:
            file.unlink(missing_ok=True)
            _held.discard(file)


_held: set[Path] = set()
"""The files that this process has locked."""


def home_name(instance: dg.DagsterInstance) -> str:
    """Return the name of this DAGSTER_HOME, which it keeps when it moves; made on first use."""
    file = Path(instance.root_directory) / "home_name"
    if not file.exists():
        with locked(file.with_suffix(".lock")):
            if not file.exists():
                write_whole(file, uuid4().hex.encode())
    return file.read_text("ascii")


def end_dead_runs(instance: dg.DagsterInstance) -> list[str]:
    """Mark runs as failed whose process is gone, and free the slots that they hold; return their ids."""
    dead, home = [], home_name(instance)
    for record in instance.get_run_records(dg.RunsFilter(statuses=UNFINISHED)):
        run, file = record.dagster_run, _file(instance, record.dagster_run.run_id)
        if run.tags.get(HOME, home) != home:
            continue
        if _left_behind(file) if file.exists() else _without_process(instance, record):
            instance.report_run_failed(run, "its process was killed; what it had committed is kept")
            instance.event_log_storage.free_concurrency_slots_for_run(run.run_id)
            dead.append(run.run_id)
            file.unlink(missing_ok=True)
    free_slots_of_ended_runs(instance)
    return dead


def free_slots_of_ended_runs(instance: dg.DagsterInstance) -> None:
    """Free the slots of pools that ended runs hold: a step interrupted in its own process leaves its slot taken."""
    storage = instance.event_log_storage
    for pool in storage.get_concurrency_keys():
        for run_id in {slot.run_id for slot in storage.get_concurrency_info(pool).claimed_slots}:
            run = instance.get_run_by_id(run_id)
            if run is None or run.is_finished:
                storage.free_concurrency_slots_for_run(run_id)


def ledger(instance: dg.DagsterInstance, run_id: str) -> Path:
    """Return the folder in which a run writes down what it spends."""
    return Path(instance.root_directory) / "spending" / run_id


def take_unfinished(instance: dg.DagsterInstance) -> Spent:
    """Return what runs that did not finish had spent, since somebody asked last; runs that go on are left out.

    What a run spent that succeeded stands in the metadata of its assets, and is forgotten here.
    """
    folder = ledger(instance, "")
    found = sorted(path.name for path in folder.glob("[!.]*")) if folder.is_dir() else []
    total = Spent()
    for run_id in found:
        run = instance.get_run_by_id(run_id)
        if (run is None or run.is_finished) and not _file(instance, run_id).exists():
            spent = take_spent(folder / run_id)
            total += Spent() if run is None or run.is_success else spent
    return total


def _without_process(instance: dg.DagsterInstance, record: dg.RunRecord) -> bool:
    """Whether a run without a lock file has lost the process that it began in, or never got one.

    Not covered: another process that has got the number of the lost one.
    """
    run_id = record.dagster_run.run_id
    noted = [entry.dagster_event for entry in instance.all_logs(run_id, of_type=dg.DagsterEventType.ENGINE_EVENT)]
    metadata = [event.engine_event_data.metadata for event in noted if event is not None]
    processes = [int(str(one["pid"].value)) for one in metadata if "pid" in one]
    if processes:
        return not any(map(_exists, processes))
    starting = record.dagster_run.status is dg.DagsterRunStatus.STARTING
    return starting and datetime.now(UTC) - record.update_timestamp.astimezone(UTC) > NEVER_BEGUN


def _exists(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


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
