"""Who is running: so that a killed run does not hold the GPU's slot, or look as if it went on, forever."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from uuid import uuid4

import dagster as dg

from toolformer_dag.storage.lock import locked

PROCESS = "toolformer/process"
"""The tag of a run that names its process's lock file; the lock goes with the process, however it ends."""
UNFINISHED = [dg.DagsterRunStatus.NOT_STARTED, dg.DagsterRunStatus.STARTING, dg.DagsterRunStatus.STARTED]


@contextmanager
def alive(home: Path) -> Iterator[Mapping[str, str]]:
    """The tags of this process's runs, good inside the block. `home`: that of the instance."""
    file = _file(home, uuid4().hex)
    try:
        with locked(file):
            yield {PROCESS: file.name}
    finally:
        file.unlink(missing_ok=True)


@contextmanager
def tagged(instance: dg.DagsterInstance, run: dg.DagsterRun | None) -> Iterator[None]:
    """Names this process in a run that nobody has tagged, as those of the UI are not, inside the block."""
    if run is None or PROCESS in run.tags:
        yield
        return
    with alive(Path(instance.root_directory)) as tags:
        instance.add_run_tags(run.run_id, tags)
        yield


def end_dead_runs(instance: dg.DagsterInstance, home: Path) -> list[str]:
    """Marks runs as failed whose process is gone, and frees the slots that they hold; returns their ids.

    Runs without a tag, such as those that the UI has queued and not begun, are left to Dagster's own monitoring.
    """
    dead = []
    for run in instance.get_runs(dg.RunsFilter(statuses=UNFINISHED)):
        process = run.tags.get(PROCESS)
        if process is not None and _is_gone(_file(home, process)):
            instance.report_run_failed(run, "its process was killed; what it had committed is kept")
            instance.event_log_storage.free_concurrency_slots_for_run(run.run_id)
            dead.append(run.run_id)
            _file(home, process).unlink(missing_ok=True)
    return dead


def _is_gone(file: Path) -> bool:
    if not file.exists():
        return True
    with locked(file, wait=False) as mine:
        return mine


def _file(home: Path, name: str) -> Path:
    folder = home / "processes"
    folder.mkdir(exist_ok=True)
    return folder / name
