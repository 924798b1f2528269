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
"""The configuration of a run that logs nothing on the terminal; the UI has its log."""
INTERRUPTIONS = ("DagsterExecutionInterruptedError", "KeyboardInterrupt")
"""Errors of steps that were interrupted."""
CANCELLED = (dg.DagsterRunStatus.CANCELING, dg.DagsterRunStatus.CANCELED)
"""States of a run that was cancelled in the UI."""
LOOK_EVERY_SECONDS = 0.25
"""How often the files of the steps, and the state of the run, are looked at."""
REPEAT_EVERY_SECONDS = 5.0
"""How often a step is passed on that does not get on."""
Result = dg.ExecuteInProcessResult | dg.JobExecutionResult
Sink = Callable[[Step], None]
"""Called whenever a step got on, now and then while it does not, and once when it has ended."""


@contextmanager
def completed(
    plan: Plan, instance: dg.DagsterInstance, name: str, assets: Sequence[dg.AssetKey], sink: Sink
) -> Iterator[tuple[Result, Path]]:
    """Run a job for these assets, whatever fails; yield what came of it, and the folder with what its steps spent.

    Others see the run as alive until the block has ended. `sink` is called from another thread.
    """
    folder = run_folders(instance) / uuid4().hex
    options: dict[str, Any] = {
        "instance": instance,
        "asset_selection": assets,
        "run_config": QUIET,
        "raise_on_error": False,
        "tags": {HOME: home_name(instance), FOLDER: folder.name},
    }
    with alive(folder):
        with _watched(instance, folder, sink), dead_runs_ended(instance):
            if plan.settings.execution.steps_at_once == 1:
                result: Result = definitions_of(plan).resolve_job_def(name).execute_in_process(**options)
            else:
                result = _in_processes(plan, name, options)
            plan.lake.storage.wait_for_writes()
        yield result, folder


def _in_processes(plan: Plan, name: str, options: dict[str, Any]) -> Result:
    """Run a job whose steps are processes of their own. `options`: those of Dagster's `execute_job`.

    Each process builds the job from the settings in a file (`definitions.job_of`).
    """
    _prepare_processes()
    with TemporaryDirectory() as folder:  # nobody else may read it: an option of a tool may be a secret
        settings = Path(folder, "settings.json")
        settings.write_text(plan.settings.model_dump_json())
        job = dg.build_reconstructable_job("toolformer_dag.definitions", "job_of", (str(settings), name))  # type: ignore[arg-type]
        try:
            return dg.execute_job(job, **options)
        finally:
            free_slots_of_ended_runs(options["instance"])


def _prepare_processes() -> None:
    """Start the process from which the processes of steps are forked, with a standard error that goes nowhere.

    Dagster would write on the terminal there. What a step writes is in the run's log all the same.
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


class _Watch:
    """What is seen of a run by whoever started it: its steps, by the files in its folder, and whether it was cancelled.

    The sink gets each step when its file changed, and now and then while it does not.
    """

    def __init__(self, instance: dg.DagsterInstance, folder: Path, sink: Sink) -> None:
        self._instance = instance
        self._folder = folder
        self._sink = sink
        self._seen: dict[Path, bytes] = {}  # what a file held when it was passed on
        self._passed_at: dict[Path, float] = {}

    def until(self, ended: threading.Event) -> None:
        """Look until the event is set, and once more. Interrupt this process, once, where the UI cancelled the run."""
        is_interrupted = False
        is_over = False
        while not is_over:
            is_over = ended.wait(LOOK_EVERY_SECONDS)
            self._look()
            if not is_over and not is_interrupted and self._is_cancelled():
                is_interrupted = True
                os.kill(os.getpid(), signal.SIGINT)

    def _look(self) -> None:
        """Pass on the steps that got on, in the order in which they did."""
        with suppress(FileNotFoundError):  # replaced meanwhile: seen the next time
            for file in sorted(self._folder.glob("[!.]*.json"), key=lambda file: file.stat().st_mtime_ns):
                self._pass_on(file)

    def _pass_on(self, file: Path) -> None:
        content = file.read_bytes()
        step = Step(**json.loads(content))
        now = time.monotonic()
        is_changed = content != self._seen.get(file)
        is_quiet = step.outcome is None and now - self._passed_at.get(file, now) > REPEAT_EVERY_SECONDS
        if is_changed or is_quiet:
            self._seen[file] = content
            self._passed_at[file] = now
            self._sink(step)

    def _is_cancelled(self) -> bool:
        runs = self._instance.get_runs(dg.RunsFilter(tags={FOLDER: self._folder.name}))
        return any(run.status in CANCELLED for run in runs)


@contextmanager
def _watched(instance: dg.DagsterInstance, folder: Path, sink: Sink) -> Iterator[None]:
    """Pass on how the steps of a run get on, and interrupt it as Ctrl-C does where the UI cancelled it.

    Raises what the sink raised, when the block has ended.
    """
    ended = threading.Event()
    with ThreadPoolExecutor(1) as threads:
        watching = threads.submit(_Watch(instance, folder, sink).until, ended)
        try:
            yield
        finally:
            ended.set()
    watching.result()


def was_interrupted(result: Result) -> bool:
    """Return whether Ctrl-C, another signal or the UI ended the run."""
    return any(map(_interrupts, result.all_events))


def _interrupts(event: dg.DagsterEvent) -> bool:
    """Return whether an event of a run tells that it was interrupted or cancelled."""
    error = getattr(event.event_specific_data, "error", None)
    canceled = event.event_type is dg.DagsterEventType.RUN_CANCELED
    return canceled or (error is not None and error.cls_name in INTERRUPTIONS)
