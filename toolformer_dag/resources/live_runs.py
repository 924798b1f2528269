"""Files of a run: whether it is alive, the progress of its steps, and what killed runs had spent.

    <DAGSTER_HOME>/live_runs/<run>/lock         held from before the first step to the end of the run
    <DAGSTER_HOME>/live_runs/<run>/<step>.json  the progress of a step, replaced as a whole while it runs

A killed run must not hold a pool's slot, or look as if it went on, forever. The kernel releases the lock when the
process ends, however it ends. A run that ends well removes the lock file before it releases the lock, so one that
nobody holds is a killed run's. A run that was killed before it had a file is detected by the PID in Dagster's
log. Where several machines share Dagster's storage, each looks after the runs that carry the name of its own
DAGSTER_HOME.
"""

import json
import logging
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from uuid import uuid4

import dagster as dg

from toolformer_dag.computing.spending import Spent
from toolformer_dag.files import build_temporary_path, locked, write_whole
from toolformer_dag.processes import exists

BEGINNING = (dg.DagsterRunStatus.NOT_STARTED, dg.DagsterRunStatus.STARTING)
"""States of a run that may not have a process yet."""
UNFINISHED = [*BEGINNING, dg.DagsterRunStatus.STARTED, dg.DagsterRunStatus.CANCELING]
"""States of a run that has begun and not ended."""
HOME = ".dagster/toolformer_home"
"""The tag of a run, which the UI does not show, with the name of the DAGSTER_HOME that looks after it."""
FOLDER = ".dagster/toolformer_folder"
"""Another such tag, with the name of the run's folder if it is not the run's id.

A command locks the folder before Dagster has given the run an id.
"""
NEVER_BEGUN = timedelta(minutes=10)
"""The longest time that a run may be starting without a process."""
LOOK_EVERY_SECONDS = 5.0
"""Dagster gives a free slot away at most 15 seconds later."""
LOCK = "lock"
"""The file in a run's folder whose lock its process holds."""
log = logging.getLogger(__name__)


def run_folder(instance: dg.DagsterInstance, run: dg.DagsterRun) -> Path:
    """Return the folder of a run, which may not exist."""
    return run_folders(instance) / run.tags.get(FOLDER, run.run_id)


def run_folders(instance: dg.DagsterInstance) -> Path:
    """Return the folder that holds the folders of all runs."""
    return Path(instance.root_directory) / "live_runs"


@contextmanager
def alive(folder: Path) -> Iterator[None]:
    """Hold the lock of a run's folder inside the block."""
    fresh = build_temporary_path(folder / LOCK)
    with locked(fresh):
        fresh.rename(folder / LOCK)  # locked before anybody can see it
        try:
            yield
        finally:
            (folder / LOCK).unlink(missing_ok=True)


def home_name(instance: dg.DagsterInstance) -> str:
    """Return the name of this DAGSTER_HOME, which stays when the folder moves; it is drawn on first use."""
    file = Path(instance.root_directory) / "home_name"
    with locked(file.with_suffix(".lock")):
        if not file.exists():
            write_whole(file, uuid4().hex.encode())
    return file.read_text("utf-8", "backslashreplace")


def end_dead_runs(instance: dg.DagsterInstance) -> list[str]:
    """Mark this home's unfinished runs whose process is gone as failed, and free their slots; return their ids."""
    dead = []
    home = home_name(instance)
    for record in instance.get_run_records(dg.RunsFilter(statuses=UNFINISHED)):
        run = record.dagster_run
        is_ours = run.tags.get(HOME, home) == home
        if is_ours and _end_if_dead(instance, record):
            dead.append(run.run_id)
    free_slots_of_ended_runs(instance)
    return dead


def _end_if_dead(instance: dg.DagsterInstance, record: dg.RunRecord) -> bool:
    """Mark an unfinished run as failed if its process is gone; return whether it was."""
    run = record.dagster_run
    lock = run_folder(instance, run) / LOCK
    if not _is_dead(instance, record, lock):
        return False
    run_now = instance.get_run_by_id(run.run_id)
    if run_now is None or run_now.is_finished:  # it ended while its lock was looked at
        return False
    instance.report_run_failed(run, "its process was killed; what it had committed is kept")
    lock.unlink(missing_ok=True)
    return True


def _is_dead(instance: dg.DagsterInstance, record: dg.RunRecord, lock: Path) -> bool:
    """Return whether the process of an unfinished run is gone. lock: the run's lock file, which may not exist."""
    return _is_free(lock) if lock.exists() else _is_without_process(instance, record)


@contextmanager
def end_dead_runs_regularly(instance: dg.DagsterInstance) -> Iterator[None]:
    """Call `end_dead_runs` every few seconds inside the block: a waiting run may wait for a slot of a dead one."""
    block_ended = threading.Event()

    def look() -> None:
        while not block_ended.wait(LOOK_EVERY_SECONDS):
            try:
                end_dead_runs(instance)
            except Exception as error:  # noqa: BLE001 - such as a database that another process holds: the next look may do
                log.warning("dead runs could not be ended: %s", error)

    looking = threading.Thread(target=look, daemon=True)
    looking.start()
    try:
        yield
    finally:
        block_ended.set()
        looking.join()


def free_slots_of_ended_runs(instance: dg.DagsterInstance) -> None:
    """Free the slots of pools that ended runs hold or wait for.

    A step that was interrupted in its own process leaves its slot taken. A killed run may leave a step that waits for a
    slot; Dagster would give it the next free one.
    """
    storage = instance.event_log_storage
    for pool in storage.get_concurrency_keys():
        for run_id in _list_runs_of_pool(instance, pool):
            run = instance.get_run_by_id(run_id)
            if run is None or run.is_finished:
                storage.free_concurrency_slots_for_run(run_id)


def _list_runs_of_pool(instance: dg.DagsterInstance, pool: str) -> set[str]:
    """Return the ids of the runs that hold a slot of a pool or wait for one."""
    info = instance.event_log_storage.get_concurrency_info(pool)
    holding = {slot.run_id for slot in info.claimed_slots}
    waiting = {step.run_id for step in info.pending_steps}
    return holding | waiting


def take_spent(folder: Path) -> Spent:
    """Return what the steps of a run spent, and remove its folder.

    If several processes call this at once, one gets the cost and the others get zeros.
    """
    taken = folder.with_name(f".{folder.name}.{uuid4().hex}")
    with suppress(FileNotFoundError):  # another process has taken it
        folder.rename(taken)
    total = Spent()
    for file in taken.glob("[!.]*.json"):
        step = json.loads(file.read_bytes())
        total += Spent(step["tokens"], step["calls"])
    shutil.rmtree(taken, ignore_errors=True)
    return total


def take_unfinished(instance: dg.DagsterInstance) -> Spent:
    """Return what failed and killed runs have spent, and remove the folders of all ended runs.

    Runs that succeeded do not count: their cost is in the metadata of their assets.
    """
    total = Spent()
    for folder in run_folders(instance).glob("[!.]*"):
        run = _find_run(instance, folder)  # None if Dagster has forgotten the run, or has not created it yet
        is_unfinished = run is not None and not run.is_finished
        has_lock = (folder / LOCK).exists()  # a command locks it before Dagster has created the run
        if is_unfinished or has_lock:
            continue
        spent = take_spent(folder)
        if run is not None and not run.is_success:
            total += spent
    return total


def _find_run(instance: dg.DagsterInstance, folder: Path) -> dg.DagsterRun | None:
    """Return the run of a folder; None if Dagster has forgotten it, or has not created it yet."""
    run = instance.get_run_by_id(folder.name)
    if run is not None:
        return run
    return next(iter(instance.get_runs(dg.RunsFilter(tags={FOLDER: folder.name}))), None)


def _is_without_process(instance: dg.DagsterInstance, record: dg.RunRecord) -> bool:
    """Return whether an unfinished run without a lock file is dead, by the ids of processes in Dagster's log.

    It is dead if none of these processes exists, or if it has been starting for longer than NEVER_BEGUN without any.
    Not covered: another process that has got the id of a lost one.
    """
    processes = _list_process_ids(instance, record.dagster_run.run_id)
    if processes:
        return not any(map(exists, processes))
    is_beginning = record.dagster_run.status in BEGINNING  # may not have a process yet
    waited = datetime.now(UTC) - record.update_timestamp.astimezone(UTC)
    return is_beginning and waited > NEVER_BEGUN


def _list_process_ids(instance: dg.DagsterInstance, run_id: str) -> list[int]:
    """Return the ids of the processes that a run began in, from Dagster's engine events."""
    processes = []
    for entry in instance.all_logs(run_id, of_type=dg.DagsterEventType.ENGINE_EVENT):
        event = entry.dagster_event
        metadata = event.engine_event_data.metadata if event is not None else {}
        if "pid" in metadata:
            processes.append(int(str(metadata["pid"].value)))
    return processes


def _is_free(lock: Path) -> bool:
    """Return whether the lock file exists and nobody holds its lock."""
    with locked(lock, wait=False) as is_held_here:
        return is_held_here and lock.exists()
