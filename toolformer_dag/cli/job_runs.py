"""Run a Dagster job to its end and report its progress; its steps run in this process, or each in a child process."""

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
from toolformer_dag.definitions import build_definitions
from toolformer_dag.resources.live_runs import (
    FOLDER,
    HOME,
    alive,
    end_dead_runs_regularly,
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
"""How often the steps' progress files and the state of the run are read."""
REPEAT_EVERY_SECONDS = 5.0
"""How often a step without progress is reported again."""
Result = dg.ExecuteInProcessResult | dg.JobExecutionResult
Sink = Callable[[Step], None]
"""Receives a step whenever it made progress, every few seconds while it makes none, and once when it has ended."""


@contextmanager
def completed(
    plan: Plan, instance: dg.DagsterInstance, name: str, assets: Sequence[dg.AssetKey], sink: Sink
) -> Iterator[tuple[Result, Path]]:
    """Run a job for these assets to its end; then yield Dagster's result and the folder with the costs of its steps.

    Other processes see the run as alive until the block ends.

    - `name`: of the job
    - `sink`: receives the progress of each step, in another thread
    """
    folder = run_folders(instance) / uuid4().hex
    options = _build_job_options(instance, assets, folder)
    with alive(folder):  # locks the folder
        # Meanwhile, runs whose processes are gone are ended: this one may wait for what they occupy.
        with _watch_run(instance, folder, sink), end_dead_runs_regularly(instance):
            result = _run_job(plan, name, options)
            plan.lake.storage.wait_for_writes()
        yield result, folder


def _build_job_options(instance: dg.DagsterInstance, assets: Sequence[dg.AssetKey], folder: Path) -> dict[str, Any]:
    """Return the arguments for Dagster to run a job for these assets. folder: of the run, which a tag names."""
    return {
        "instance": instance,
        "asset_selection": assets,
        "run_config": QUIET,
        "raise_on_error": False,
        "tags": {HOME: home_name(instance), FOLDER: folder.name},
    }


def _run_job(plan: Plan, name: str, options: dict[str, Any]) -> Result:
    """Run the job in this process, or with a process per step if the settings allow several steps at once."""
    if plan.settings.execution.steps_at_once == 1:
        return build_definitions(plan).resolve_job_def(name).execute_in_process(**options)
    return _run_in_processes(plan, name, options)


def _run_in_processes(plan: Plan, name: str, options: dict[str, Any]) -> Result:
    """Run a job with a process per step. `options`: arguments of Dagster's `execute_job`.

    Each process builds the job again, from the settings in a file (`definitions.job_of`).
    """
    _start_quiet_forkserver()
    with TemporaryDirectory() as folder:  # nobody else may read it: an option of a tool may be a secret
        settings = Path(folder, "settings.json")
        settings.write_text(plan.settings.model_dump_json())
        job = dg.build_reconstructable_job("toolformer_dag.definitions", "job_of", (str(settings), name))  # type: ignore[arg-type]
        try:
            return dg.execute_job(job, **options)
        finally:
            free_slots_of_ended_runs(options["instance"])


def _start_quiet_forkserver() -> None:
    """Start the process that the steps' processes are forked from, so that Dagster writes nothing to the terminal.

    It inherits the standard error of this process, which leads nowhere while it starts.
    """
    standard_error = 2  # the descriptor
    terminal = os.dup(standard_error)
    try:
        with Path(os.devnull).open("wb") as nowhere:
            os.dup2(nowhere.fileno(), standard_error)
        forkserver.set_forkserver_preload(list(PRELOADED))
        forkserver.ensure_running()
    finally:
        os.dup2(terminal, standard_error)
        os.close(terminal)


class _Watch:
    """Watches a run: reports the progress of its steps to a sink, and notices when the UI cancels it.

    Each step writes its progress to a file in the run's folder.
    """

    def __init__(self, instance: dg.DagsterInstance, folder: Path, sink: Sink) -> None:
        self._instance = instance
        self._folder = folder
        self._sink = sink
        self._reported: dict[Path, bytes] = {}  # the content of each file when it was last reported
        self._reported_at: dict[Path, float] = {}

    def until(self, ended: threading.Event) -> None:
        """Report steps until the event is set, and once more after it.

        Sends SIGINT to this process, once, if the UI cancelled the run.
        """
        is_interrupted = False
        is_over = False
        while not is_over:
            is_over = ended.wait(LOOK_EVERY_SECONDS)
            self._report_steps()
            if not is_over and not is_interrupted and self._is_cancelled():
                is_interrupted = True
                os.kill(os.getpid(), signal.SIGINT)

    def _report_steps(self) -> None:
        """Report the steps with news, the least recently written first."""
        with suppress(FileNotFoundError):  # a file was replaced meanwhile: it is read the next time
            for file in sorted(self._folder.glob("[!.]*.json"), key=lambda file: file.stat().st_mtime_ns):
                self._report_step(file)

    def _report_step(self, file: Path) -> None:
        """Report a step if its file has changed, or if it is overdue."""
        content = file.read_bytes()
        step = Step(**json.loads(content))
        if content != self._reported.get(file) or self._is_overdue(file, step):
            self._reported[file] = content
            self._reported_at[file] = time.monotonic()
            self._sink(step)

    def _is_overdue(self, file: Path, step: Step) -> bool:
        """Return whether a running step was last reported more than REPEAT_EVERY_SECONDS ago."""
        now = time.monotonic()
        return step.outcome is None and now - self._reported_at.get(file, now) > REPEAT_EVERY_SECONDS

    def _is_cancelled(self) -> bool:
        """Return whether the run was cancelled in the UI."""
        runs = self._instance.get_runs(dg.RunsFilter(tags={FOLDER: self._folder.name}))
        return any(run.status in CANCELLED for run in runs)


@contextmanager
def _watch_run(instance: dg.DagsterInstance, folder: Path, sink: Sink) -> Iterator[None]:
    """Report the steps of a run to a sink while the block runs, and interrupt the block if the UI cancels the run.

    A thread reads the files in the run's folder to which the steps write their progress.
    """
    block_ended = threading.Event()
    watch = _Watch(instance, folder, sink)
    with ThreadPoolExecutor(1) as threads:
        try:  # around the start too: Ctrl-C there would leave a thread that nobody ends
            watching = threads.submit(watch.until, block_ended)  # sends SIGINT if the UI cancels the run
            yield
        finally:
            block_ended.set()
    watching.result()  # raises an error of the thread


def was_interrupted(result: Result) -> bool:
    """Return whether Ctrl-C, another signal or the UI ended the run."""
    return any(map(_is_interruption, result.all_events))


def _is_interruption(event: dg.DagsterEvent) -> bool:
    """Return whether an event says that a step was interrupted or the run cancelled."""
    if event.event_type is dg.DagsterEventType.RUN_CANCELED:
        return True
    error = getattr(event.event_specific_data, "error", None)
    return error is not None and error.cls_name in INTERRUPTIONS
