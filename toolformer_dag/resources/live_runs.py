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
from toolformer_dag.files import build_temporary_path, hold_file_lock, write_file_atomically
from toolformer_dag.processes import is_process_running

BEGINNING_STATUSES = (dg.DagsterRunStatus.NOT_STARTED, dg.DagsterRunStatus.STARTING)
"""States of a run that may not have a process yet."""
UNFINISHED_STATUSES = [*BEGINNING_STATUSES, dg.DagsterRunStatus.STARTED, dg.DagsterRunStatus.CANCELING]
"""States of a run that has begun and not ended."""
HOME_TAG = ".dagster/toolformer_home"
"""The tag of a run, which the UI does not show, with the name of the DAGSTER_HOME that looks after it."""
RUN_FOLDER_TAG = ".dagster/toolformer_folder"
"""Another such tag, with the name of the run's folder if it is not the run's id.

A command locks the folder before Dagster has given the run an id.
"""
NEVER_BEGUN = timedelta(minutes=10)
"""The longest time that a run may be starting without a process."""
CHECK_INTERVAL_SECONDS = 5.0
"""Dagster gives a free slot away at most 15 seconds later."""
LOCK_FILE_NAME = "lock"
"""The file in a run's folder whose lock its process holds."""
log = logging.getLogger(__name__)


def get_run_folder(instance: dg.DagsterInstance, run: dg.DagsterRun) -> Path:
    """Return the folder of a run, which may not exist."""
    return get_live_runs_folder(instance) / run.tags.get(RUN_FOLDER_TAG, run.run_id)


def get_live_runs_folder(instance: dg.DagsterInstance) -> Path:
    """Return the folder that holds the folders of all runs."""
    return Path(instance.root_directory) / "live_runs"


@contextmanager
def hold_run_lock(run_folder: Path) -> Iterator[None]:
    """Hold the lock of a run's folder during the `with` block, which marks the run as alive.

    At the end the lock file is removed. If the process is killed, the file stays without anybody holding its lock.
    """
    lock_path = run_folder / LOCK_FILE_NAME
    temporary_path = build_temporary_path(lock_path)
    with hold_file_lock(temporary_path):
        # The file gets its name only now, so that nobody can see it before it is locked.
        temporary_path.rename(lock_path)
        try:
            yield
        finally:
            lock_path.unlink(missing_ok=True)


def get_or_create_home_name(instance: dg.DagsterInstance) -> str:
    """Return the name of this DAGSTER_HOME (Dagster's folder), which stays the same if the folder is moved.

    On first use, a random name is written into the folder.
    """
    name_path = Path(instance.root_directory) / "home_name"
    with hold_file_lock(name_path.with_suffix(".lock")):
        if not name_path.exists():
            write_file_atomically(name_path, uuid4().hex.encode())
    return name_path.read_text("utf-8", "backslashreplace")


def end_dead_runs(instance: dg.DagsterInstance) -> list[str]:
    """Mark unfinished runs whose process is gone as failed, and free their slots of pools.

    Only runs of this DAGSTER_HOME are looked at, because other machines may share Dagster's storage.

    Returns:
        The ids of the runs that were marked as failed.
    """
    dead_run_ids = []
    home_name = get_or_create_home_name(instance)
    for run_record in instance.get_run_records(dg.RunsFilter(statuses=UNFINISHED_STATUSES)):
        run = run_record.dagster_run
        belongs_to_this_home = run.tags.get(HOME_TAG, home_name) == home_name
        if belongs_to_this_home and _end_run_if_dead(instance, run_record):
            dead_run_ids.append(run.run_id)

    free_slots_of_ended_runs(instance)
    return dead_run_ids


def _end_run_if_dead(instance: dg.DagsterInstance, run_record: dg.RunRecord) -> bool:
    """Mark an unfinished run as failed if its process is gone. Return whether it was marked."""
    run = run_record.dagster_run
    lock_file = get_run_folder(instance, run) / LOCK_FILE_NAME
    if not _is_run_dead(instance, run_record, lock_file):
        return False

    # Read the run again: it may have ended well while its lock was looked at.
    present_run = instance.get_run_by_id(run.run_id)
    if present_run is None or present_run.is_finished:
        return False

    instance.report_run_failed(run, "its process was killed; what it had committed is kept")
    lock_file.unlink(missing_ok=True)
    return True


def _is_run_dead(instance: dg.DagsterInstance, run_record: dg.RunRecord, lock_file: Path) -> bool:
    """Return whether the process of an unfinished run is gone.

    Args:
        instance: The instance of Dagster.
        run_record: The run.
        lock_file: The lock file that the process holds. It may not exist; then the ids of processes in Dagster's log
            decide.
    """
    if lock_file.exists():
        return _is_lock_free(lock_file)
    return _is_dead_by_process_ids(instance, run_record)


@contextmanager
def end_dead_runs_regularly(instance: dg.DagsterInstance) -> Iterator[None]:
    """Call `end_dead_runs` every few seconds during the `with` block, in a thread.

    Otherwise a run in the block could wait forever for a slot that a dead run holds.
    """
    stop_event = threading.Event()

    def check_repeatedly() -> None:
        while not stop_event.wait(CHECK_INTERVAL_SECONDS):
            # After an error, such as a locked database, the next check may succeed.
            try:
                end_dead_runs(instance)
            except Exception as error:  # noqa: BLE001 - any error of Dagster's storage
                log.warning("dead runs could not be ended: %s", error)

    checking_thread = threading.Thread(target=check_repeatedly, daemon=True)
    checking_thread.start()
    try:
        yield
    finally:
        stop_event.set()
        checking_thread.join()


def free_slots_of_ended_runs(instance: dg.DagsterInstance) -> None:
    """Free the slots of pools that ended runs still hold or wait for.

    A pool limits how many steps run at once, each in a slot. A step that was interrupted in its own process leaves its
    slot taken. A killed run may leave a waiting step, to which Dagster would give the next free slot.
    """
    storage = instance.event_log_storage
    for pool in storage.get_concurrency_keys():
        for run_id in _list_run_ids_of_pool(instance, pool):
            run = instance.get_run_by_id(run_id)
            if run is None or run.is_finished:
                storage.free_concurrency_slots_for_run(run_id)


def _list_run_ids_of_pool(instance: dg.DagsterInstance, pool: str) -> set[str]:
    """Return the ids of the runs that hold a slot of a pool or wait for one."""
    pool_info = instance.event_log_storage.get_concurrency_info(pool)
    holding_run_ids = {slot.run_id for slot in pool_info.claimed_slots}
    waiting_run_ids = {step.run_id for step in pool_info.pending_steps}
    return holding_run_ids | waiting_run_ids


def pop_run_spending(run_folder: Path) -> Spent:
    """Return what the steps of a run have spent (tokens and calls), and remove the folder of the run.

    If several processes call this at once, one gets the cost and the others get zeros.
    """
    # Rename the folder first, so that only one process reads it.
    renamed_folder = run_folder.with_name(f".{run_folder.name}.{uuid4().hex}")
    with suppress(FileNotFoundError):  # another process was faster
        run_folder.rename(renamed_folder)

    total_spent = Spent()
    for progress_path in renamed_folder.glob("[!.]*.json"):
        step_progress = json.loads(progress_path.read_bytes())
        total_spent += Spent(step_progress["tokens"], step_progress["calls"])

    shutil.rmtree(renamed_folder, ignore_errors=True)
    return total_spent


def pop_spending_of_failed_runs(instance: dg.DagsterInstance) -> Spent:
    """Return what failed and killed runs have spent (tokens and calls), and remove the folders of all ended runs.

    Runs that succeeded do not count, because their cost is in the metadata of their assets.
    """
    total_spent = Spent()
    for run_folder in get_live_runs_folder(instance).glob("[!.]*"):
        run = _find_run_of_folder(instance, run_folder)  # None if Dagster has no such run, or not yet
        is_unfinished = run is not None and not run.is_finished
        has_lock = (run_folder / LOCK_FILE_NAME).exists()  # a command locks it before Dagster has created the run
        if is_unfinished or has_lock:
            continue

        run_spent = pop_run_spending(run_folder)
        if run is not None and not run.is_success:
            total_spent += run_spent
    return total_spent


def _find_run_of_folder(instance: dg.DagsterInstance, run_folder: Path) -> dg.DagsterRun | None:
    """Find the run that a folder belongs to.

    A folder has the name of the run's id, or a name that is in a tag of the run.

    Returns:
        None if Dagster has forgotten the run, or has not created it yet.
    """
    run = instance.get_run_by_id(run_folder.name)
    if run is not None:
        return run

    tagged_runs = instance.get_runs(dg.RunsFilter(tags={RUN_FOLDER_TAG: run_folder.name}))
    return next(iter(tagged_runs), None)


def _is_dead_by_process_ids(instance: dg.DagsterInstance, run_record: dg.RunRecord) -> bool:
    """Return whether an unfinished run without a lock file is dead, by the ids of processes in Dagster's log.

    It is dead if none of these processes exists, or if it has been starting for longer than NEVER_BEGUN without any.
    A dead run is not noticed if another process has got the id of its process.
    """
    process_ids = _list_process_ids(instance, run_record.dagster_run.run_id)
    if process_ids:
        return not any(is_process_running(process_id) for process_id in process_ids)

    # A run that begins may not have a process yet.
    is_beginning = run_record.dagster_run.status in BEGINNING_STATUSES
    waiting_time = datetime.now(UTC) - run_record.update_timestamp.astimezone(UTC)
    return is_beginning and waiting_time > NEVER_BEGUN


def _list_process_ids(instance: dg.DagsterInstance, run_id: str) -> list[int]:
    """Return the ids of the processes that a run began in, from the engine events in Dagster's log."""
    process_ids = []
    for log_entry in instance.all_logs(run_id, of_type=dg.DagsterEventType.ENGINE_EVENT):
        event = log_entry.dagster_event
        if event is None:
            continue
        metadata = event.engine_event_data.metadata
        if "pid" in metadata:
            process_ids.append(int(str(metadata["pid"].value)))
    return process_ids


def _is_lock_free(lock_file: Path) -> bool:
    """Return whether a lock file exists and nobody holds its lock."""
    with hold_file_lock(lock_file, wait=False) as is_held_here:
        return is_held_here and lock_file.exists()
