"""Running a job to its end, and watching it: steps in this process, or several at once in processes of their own."""

import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from multiprocessing import forkserver
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from uuid import uuid4

import dagster as dg

from toolformer_dag.assets.running import Step
from toolformer_dag.computing.plan import Plan
from toolformer_dag.definitions import definitions_of
from toolformer_dag.resources.live_runs import (
    FOLDER,
    HOME,
    alive,
    dead_runs_ended,
    free_slots_of_ended_runs,
    home_name,
    run_folders,
)
from toolformer_dag.resources.step_processes import PRELOADED

QUIET = {"loggers": {"console": {"config": {"log_level": "CRITICAL"}}}}
INTERRUPTIONS = ("DagsterExecutionInterruptedError", "KeyboardInterrupt")
CANCELLED = (dg.DagsterRunStatus.CANCELING, dg.DagsterRunStatus.CANCELED)
LOOK_EVERY_SECONDS, REPEAT_EVERY_SECONDS = 0.25, 5.0
Result = dg.ExecuteInProcessResult | dg.JobExecutionResult
Sink = Callable[[Step], None]
"""Called whenever a step got on, now and then while it does not, and once when it has ended."""


@contextmanager
def completed(
    plan: Plan, instance: dg.DagsterInstance, name: str, assets: Sequence[dg.AssetKey], sink: Sink
) -> Iterator[tuple[Result, Path]]:
    """Run a job for these assets, whatever fails; yield what came of it, and the folder with what its steps spent.

    Others see the run as alive until the block has ended.
    """
    folder = run_folders(instance) / uuid4().hex
    asked: dict[str, Any] = {
        "instance": instance,
        "asset_selection": assets,
        "run_config": QUIET,
        "raise_on_error": False,
        "tags": {HOME: home_name(instance), FOLDER: folder.name},
    }
    with alive(folder):
        with _watched(instance, folder, sink), dead_runs_ended(instance):
            if plan.settings.execution.steps_at_once == 1:
                result: Result = definitions_of(plan).resolve_job_def(name).execute_in_process(**asked)
            else:
                result = _in_processes(plan, name, asked)
            plan.lake.storage.wait_for_writes()
        yield result, folder


def _in_processes(plan: Plan, name: str, asked: dict[str, Any]) -> Result:
    _prepare_processes()
    with TemporaryDirectory() as folder:  # nobody else may read it: an option of a tool may be a secret
        settings = Path(folder, "settings.json")
        settings.write_text(plan.settings.model_dump_json())
        job = dg.build_reconstructable_job("toolformer_dag.definitions", "job_of", (str(settings), name))  # type: ignore[arg-type]
        try:
            return dg.execute_job(job, **asked)
        finally:
            free_slots_of_ended_runs(asked["instance"])


def _prepare_processes() -> None:
    """Start the process from which those of the steps are forked, without the terminal: Dagster writes there.

    What a step writes is in the run's log, as it is for steps of this process.
    """
    terminal = os.dup(2)
    try:
        with Path(os.devnull).open("wb") as nowhere:
            os.dup2(nowhere.fileno(), 2)
        forkserver.set_forkserver_preload(list(PRELOADED))
        forkserver.ensure_running()
    finally:
        os.dup2(terminal, 2)
        os.close(terminal)


@contextmanager
def _watched(instance: dg.DagsterInstance, folder: Path, sink: Sink) -> Iterator[None]:
    """Pass on how the steps of a run get on, and interrupt it as Ctrl-C does where the UI cancelled it.

    Raises what the sink raised, when the block has ended.
    """
    ended, seen, passed_at = threading.Event(), dict[Path, bytes](), dict[Path, float]()

    def look() -> None:
        with suppress(FileNotFoundError):  # replaced meanwhile: seen the next time
            for file in sorted(folder.glob("[!.]*.json"), key=lambda file: file.stat().st_mtime_ns):
                content, now = file.read_bytes(), time.monotonic()
                step = Step(**json.loads(content))
                quiet = step.outcome is None and now - passed_at.get(file, now) > REPEAT_EVERY_SECONDS
                if content != seen.get(file) or quiet:
                    seen[file], passed_at[file] = content, now
                    sink(step)

    def watch() -> None:
        over = cancelled = False
        while not over:
            over = ended.wait(LOOK_EVERY_SECONDS)
            look()
            runs = () if over or cancelled else instance.get_runs(dg.RunsFilter(tags={FOLDER: folder.name}))
            if any(run.status in CANCELLED for run in runs):
                cancelled = True
                os.kill(os.getpid(), signal.SIGINT)

    with ThreadPoolExecutor(1) as threads:
        watching = threads.submit(watch)
        try:
            yield
        finally:
            ended.set()
    watching.result()


def was_interrupted(result: Result) -> bool:
    """Return whether Ctrl-C, another signal or the UI ended the run."""
    return any(map(_interrupts, result.all_events))


def _interrupts(event: dg.DagsterEvent) -> bool:
    error = getattr(event.event_specific_data, "error", None)
    canceled = event.event_type is dg.DagsterEventType.RUN_CANCELED
    return canceled or (error is not None and error.cls_name in INTERRUPTIONS)
