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
    HOME_TAG,
    RUN_FOLDER_TAG,
    end_dead_runs_regularly,
    free_slots_of_ended_runs,
    get_live_runs_folder,
    get_or_create_home_name,
    hold_run_lock,
)
from toolformer_dag.resources.step_processes import PRELOADED_MODULES

QUIET_RUN_CONFIG = {"loggers": {"console": {"config": {"log_level": "CRITICAL"}}}}
"""The configuration of a run that logs nothing on the terminal; the UI has its log."""
INTERRUPTION_ERROR_NAMES = ("DagsterExecutionInterruptedError", "KeyboardInterrupt")
"""Errors of steps that were interrupted."""
CANCELLED_STATUSES = (dg.DagsterRunStatus.CANCELING, dg.DagsterRunStatus.CANCELED)
"""States of a run that was cancelled in the UI."""
CHECK_INTERVAL_SECONDS = 0.25
"""How often the steps' progress files and the state of the run are read."""
REPEAT_INTERVAL_SECONDS = 5.0
"""How often a step without progress is reported again."""
JobResult = dg.ExecuteInProcessResult | dg.JobExecutionResult
StepCallback = Callable[[Step], None]
"""Receives a step whenever it made progress, every few seconds while it makes none, and once when it has ended."""


@contextmanager
def run_job_to_completion(
    plan: Plan, instance: dg.DagsterInstance, job_name: str, asset_keys: Sequence[dg.AssetKey], on_step: StepCallback
) -> Iterator[tuple[JobResult, Path]]:
    """Run a job for some assets; the block begins when the job has ended.

    Other processes see the run as alive until the block ends too.

    Args:
        plan: The plan that the assets belong to.
        instance: The Dagster instance that records the run.
        job_name: Dagster's name of the job.
        asset_keys: The assets to make.
        on_step: Receives the progress of each step, in another thread.

    Yields:
        Dagster's result of the job, and the folder in which its steps have left their costs.
    """
    run_folder = get_live_runs_folder(instance) / uuid4().hex
    job_options = _build_job_options(instance, asset_keys, run_folder)

    with hold_run_lock(run_folder):  # other processes see by the lock that the run is alive
        # Runs whose processes are gone are ended meanwhile: this run may wait for what they occupy.
        with _watch_run(instance, run_folder, on_step), end_dead_runs_regularly(instance):
            job_result = _run_job(plan, job_name, job_options)
            plan.lake.storage.wait_for_background_write()
        yield job_result, run_folder


def _build_job_options(
    instance: dg.DagsterInstance, asset_keys: Sequence[dg.AssetKey], run_folder: Path
) -> dict[str, Any]:
    """Return the arguments with which Dagster runs a job for some assets.

    Args:
        instance: The Dagster instance that records the run.
        asset_keys: The assets to make.
        run_folder: The folder of the run. A tag of the run names it, so that other processes find it.
    """
    return {
        "instance": instance,
        "asset_selection": asset_keys,
        "run_config": QUIET_RUN_CONFIG,
        "raise_on_error": False,
        "tags": {HOME_TAG: get_or_create_home_name(instance), RUN_FOLDER_TAG: run_folder.name},
    }


def _run_job(plan: Plan, job_name: str, job_options: dict[str, Any]) -> JobResult:
    """Run a job in this process, or, if the settings allow several steps at once, with a process for each step."""
    if plan.settings.execution.steps_at_once == 1:
        job = build_definitions(plan).resolve_job_def(job_name)
        return job.execute_in_process(**job_options)
    return _run_job_in_processes(plan, job_name, job_options)


def _run_job_in_processes(plan: Plan, job_name: str, job_options: dict[str, Any]) -> JobResult:
    """Run a job with a process for each step.

    Each process builds the job again (`definitions.job_of`), from the settings in a file.

    Args:
        plan: The plan that the job belongs to.
        job_name: Dagster's name of the job.
        job_options: The arguments of Dagster's `execute_job`.
    """
    _start_quiet_forkserver()

    # An option of a tool may be a secret; only this user may read a temporary directory.
    with TemporaryDirectory() as folder:
        settings_file = Path(folder, "settings.json")
        settings_file.write_text(plan.settings.model_dump_json())
        job_arguments = (str(settings_file), job_name)
        job = dg.build_reconstructable_job("toolformer_dag.definitions", "job_of", job_arguments)  # type: ignore[arg-type]
        try:
            return dg.execute_job(job, **job_options)
        finally:
            free_slots_of_ended_runs(job_options["instance"])


def _start_quiet_forkserver() -> None:
    """Start the process from which Python forks a process for each step, with a standard error that leads nowhere.

    The steps' processes inherit it, so that Dagster, which logs there, writes nothing to the terminal.
    """
    standard_error = 2  # its file descriptor
    saved_descriptor = os.dup(standard_error)
    try:
        with Path(os.devnull).open("wb") as devnull:
            os.dup2(devnull.fileno(), standard_error)
        forkserver.set_forkserver_preload(list(PRELOADED_MODULES))
        forkserver.ensure_running()
    finally:
        # From here on, this process itself writes to the terminal again.
        os.dup2(saved_descriptor, standard_error)
        os.close(saved_descriptor)


class _RunWatcher:
    """Watches a run: it reports the progress of the steps, and notices when the run is canceled in the UI.

    Each step writes its progress to a file in the run's folder, and the watcher reads these files.
    """

    def __init__(self, instance: dg.DagsterInstance, run_folder: Path, on_step: StepCallback) -> None:
        """Watch the run whose steps write to a folder; `on_step` receives each step that made progress."""
        self._instance = instance
        self._run_folder = run_folder
        self._on_step = on_step
        # For each progress file, its content and the time when its step was last reported.
        self._reported_content_by_file: dict[Path, bytes] = {}
        self._reported_at_by_file: dict[Path, float] = {}

    def report_until(self, ended_event: threading.Event) -> None:
        """Report steps that made progress, until the event is set and once more after that.

        If the run is canceled in the UI, this process gets the signal SIGINT, once, as if the user had typed Ctrl-C.
        """
        is_interrupted = False
        has_ended = False
        while not has_ended:
            has_ended = ended_event.wait(CHECK_INTERVAL_SECONDS)
            self._report_steps_with_news()

            must_interrupt = not has_ended and not is_interrupted and self._is_run_cancelled()
            if must_interrupt:
                is_interrupted = True
                os.kill(os.getpid(), signal.SIGINT)

    def _report_steps_with_news(self) -> None:
        """Report the steps that made progress, first the one whose file was written longest ago."""
        # A step replaces its file when it writes it, so that a file may be missing now. It is read the next time.
        with suppress(FileNotFoundError):
            progress_files = self._run_folder.glob("[!.]*.json")
            for progress_file in sorted(progress_files, key=lambda file: file.stat().st_mtime_ns):
                self._report_step_if_due(progress_file)

    def _report_step_if_due(self, progress_file: Path) -> None:
        """Report a step if its file has changed, or if it has not been reported for some seconds."""
        content = progress_file.read_bytes()
        step = Step(**json.loads(content))

        has_changed = content != self._reported_content_by_file.get(progress_file)
        if has_changed or self._is_step_overdue(progress_file, step):
            self._reported_content_by_file[progress_file] = content
            self._reported_at_by_file[progress_file] = time.monotonic()
            self._on_step(step)

    def _is_step_overdue(self, progress_file: Path, step: Step) -> bool:
        """Return whether a running step was last reported more than REPEAT_INTERVAL_SECONDS ago."""
        if step.outcome is not None:  # it has ended
            return False
        now = time.monotonic()
        last_reported_at = self._reported_at_by_file.get(progress_file, now)
        return now - last_reported_at > REPEAT_INTERVAL_SECONDS

    def _is_run_cancelled(self) -> bool:
        """Return whether the run was cancelled in the UI."""
        runs = self._instance.get_runs(dg.RunsFilter(tags={RUN_FOLDER_TAG: self._run_folder.name}))
        return any(run.status in CANCELLED_STATUSES for run in runs)


@contextmanager
def _watch_run(instance: dg.DagsterInstance, run_folder: Path, on_step: StepCallback) -> Iterator[None]:
    """Report the steps of a run while the block runs, and interrupt the block if the run is canceled in the UI.

    Another thread does this. It reads the files in the run's folder to which the steps write their progress.

    Args:
        instance: The Dagster instance that records the run.
        run_folder: The folder of the run.
        on_step: Receives a step that made progress, in the other thread.
    """
    block_ended = threading.Event()
    watcher = _RunWatcher(instance, run_folder, on_step)
    with ThreadPoolExecutor(1) as executor:
        # The thread starts inside the `try`: Ctrl-C before it would leave a thread that nobody ends.
        try:
            watching = executor.submit(watcher.report_until, block_ended)
            yield
        finally:
            block_ended.set()
    watching.result()  # raises the error of the thread, if there was one


def was_job_interrupted(job_result: JobResult) -> bool:
    """Return whether Ctrl-C, another signal or a person in the UI ended the run before it was done."""
    return any(map(_is_interruption_event, job_result.all_events))


def _is_interruption_event(event: dg.DagsterEvent) -> bool:
    """Return whether one of Dagster's events says that a step was interrupted, or that the run was canceled."""
    if event.event_type is dg.DagsterEventType.RUN_CANCELED:
        return True
    error = getattr(event.event_specific_data, "error", None)
    return error is not None and error.cls_name in INTERRUPTION_ERROR_NAMES
