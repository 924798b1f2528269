"""What files tell of a run: whether it is alive, how each of its steps gets on, and what the dead ones had spent.

    <DAGSTER_HOME>/live_runs/<run>/lock         held from before the first step to the end of the run
    <DAGSTER_HOME>/live_runs/<run>/<step>.json  how a step gets on, replaced as a whole while it runs

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
from toolformer_dag.files import beside, locked, write_whole
from toolformer_dag.processes import exists

BEGINNING = (dg.DagsterRunStatus.NOT_STARTED, dg.DagsterRunStatus.STARTING)
UNFINISHED = [*BEGINNING, dg.DagsterRunStatus.STARTED, dg.DagsterRunStatus.CANCELING]
HOME, FOLDER = ".dagster/toolformer_home", ".dagster/toolformer_folder"
"""Tags of a run, which the UI does not show: the DAGSTER_HOME that looks after it, and the name of its folder where it
is not the run's id: a command locks the folder before Dagster has named the run."""
NEVER_BEGUN = timedelta(minutes=10)
"""How long a run may be starting without a process of its own."""
LOOK_EVERY_SECONDS = 5.0
"""Dagster gives a free slot away at most 15 seconds later."""
LOCK = "lock"
log = logging.getLogger(__name__)


def run_folder(instance: dg.DagsterInstance, run: dg.DagsterRun) -> Path:
    """Return the folder of a run, which may not be there."""
    return run_folders(instance) / run.tags.get(FOLDER, run.run_id)


def run_folders(instance: dg.DagsterInstance) -> Path:
    """Return where the folders of runs lie."""
    return Path(instance.root_directory) / "live_runs"


@contextmanager
def alive(folder: Path) -> Iterator[None]:
    """Hold the lock of a run's folder inside the block."""
    fresh = beside(folder / LOCK)
    with locked(fresh):
        fresh.rename(folder / LOCK)  # locked before anybody can see it
        try:
            yield
        finally:
            (folder / LOCK).unlink(missing_ok=True)


def home_name(instance: dg.DagsterInstance) -> str:
    """Return the name of this DAGSTER_HOME, which it keeps when it moves; made on first use."""
    file = Path(instance.root_directory) / "home_name"
    with locked(file.with_suffix(".lock")):
        if not file.exists():
            write_whole(file, uuid4().hex.encode())
    return file.read_text("utf-8", "backslashreplace")


def end_dead_runs(instance: dg.DagsterInstance) -> list[str]:
    """Mark runs as failed whose process is gone, and free the slots that they hold; return their ids."""
    dead, home = [], home_name(instance)
    for record in instance.get_run_records(dg.RunsFilter(statuses=UNFINISHED)):
        run = record.dagster_run
        lock = run_folder(instance, run) / LOCK
        if run.tags.get(HOME, home) == home and (
            _is_free(lock) if lock.exists() else _without_process(instance, record)
        ):
            if (now := instance.get_run_by_id(run.run_id)) is None or now.is_finished:  # it ended meanwhile
                continue
            instance.report_run_failed(run, "its process was killed; what it had committed is kept")
            lock.unlink(missing_ok=True)
            dead.append(run.run_id)
    free_slots_of_ended_runs(instance)
    return dead


@contextmanager
def dead_runs_ended(instance: dg.DagsterInstance) -> Iterator[None]:
    """Call `end_dead_runs` every few seconds inside the block: a run that waits may wait for a slot of a dead one."""
    over = threading.Event()

    def look() -> None:
        while not over.wait(LOOK_EVERY_SECONDS):
            try:
                end_dead_runs(instance)
            except Exception as error:  # noqa: BLE001 - such as a database that another process holds: the next look may do
                log.warning("dead runs could not be ended: %s", error)

    looking = threading.Thread(target=look, daemon=True)
    looking.start()
    try:
        yield
    finally:
        over.set()
        looking.join()


def free_slots_of_ended_runs(instance: dg.DagsterInstance) -> None:
    """Free the slots of pools that ended runs hold: a step interrupted in its own process leaves its slot taken.

    A run that was killed while it freed one leaves a step that waits, to which Dagster would keep the slot.
    """
    storage = instance.event_log_storage
    for pool in storage.get_concurrency_keys():
        info = storage.get_concurrency_info(pool)
        waiting = {step.run_id for step in info.pending_steps}
        for run_id in {slot.run_id for slot in info.claimed_slots} | waiting:
            run = instance.get_run_by_id(run_id)
            if run is None or run.is_finished:
                storage.free_concurrency_slots_for_run(run_id)


def take_spent(folder: Path) -> Spent:
    """Return what the steps of a run spent, and remove its folder: of several who ask, one gets it."""
    mine = folder.with_name(f".{folder.name}.{uuid4().hex}")
    with suppress(FileNotFoundError):
        folder.rename(mine)
    steps = [json.loads(file.read_bytes()) for file in mine.glob("[!.]*.json")]
    shutil.rmtree(mine, ignore_errors=True)
    return sum((Spent(one["tokens"], one["calls"]) for one in steps), Spent())


def take_unfinished(instance: dg.DagsterInstance) -> Spent:
    """Return what runs that did not finish had spent, since somebody asked last; runs that go on are left out.

    What a run spent that succeeded stands in the metadata of its assets, and is forgotten here.
    """
    total = Spent()
    for folder in run_folders(instance).glob("[!.]*"):
        named = instance.get_run_by_id(folder.name)
        run = named or next(iter(instance.get_runs(dg.RunsFilter(tags={FOLDER: folder.name}))), None)
        if (run is None or run.is_finished) and not (folder / LOCK).exists():
            spent = take_spent(folder)
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
        return not any(map(exists, processes))
    starting = record.dagster_run.status in BEGINNING
    return starting and datetime.now(UTC) - record.update_timestamp.astimezone(UTC) > NEVER_BEGUN


def _is_free(lock: Path) -> bool:
    """Whether the lock file is there and nobody holds its lock."""
    with locked(lock, wait=False) as mine:
        return mine and lock.exists()
