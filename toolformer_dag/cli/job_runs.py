"""Running a job to its end: its steps in this process, or several at once in processes of their own."""

import os
import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from multiprocessing import forkserver
from pathlib import Path
from tempfile import TemporaryDirectory
from uuid import uuid4

import dagster as dg

from assets.running import CANCELLED
from assets.step_watch import TOLD_TO, heard
from resources.live_runs import HOME, alive, free_slots_of_ended_runs, home_name
from resources.step_processes import PRELOADED
from toolformer_dag.definitions import definitions_of
from toolformer_dag.pipeline.plan import Plan

QUIET = {"loggers": {"console": {"config": {"log_level": "CRITICAL"}}}}
INTERRUPTIONS = ("DagsterExecutionInterruptedError", "KeyboardInterrupt")
LOOK_EVERY_SECONDS = 1.0
Result = dg.ExecuteInProcessResult | dg.JobExecutionResult


@contextmanager
def completed(plan: Plan, instance: dg.DagsterInstance, name: str, assets: Sequence[dg.AssetKey]) -> Iterator[Result]:
    """Run a job for these assets, whatever fails; others see the run as alive until the block has ended."""
    if plan.settings.execution.steps_at_once > 1:
        yield from _in_processes(plan, instance, name, assets)
        return
    job, run_id = definitions_of(plan).resolve_job_def(name), str(uuid4())
    with alive(instance, run_id):
        yield job.execute_in_process(
            instance=instance,
            asset_selection=assets,
            raise_on_error=False,
            run_config=QUIET,
            tags={HOME: home_name(instance)},
            run_id=run_id,
        )


def _in_processes(
    plan: Plan, instance: dg.DagsterInstance, name: str, assets: Sequence[dg.AssetKey]
) -> Iterator[Result]:
    _prepare_processes()
    with TemporaryDirectory() as folder:  # nobody else may read it: an option of a tool may be a secret
        settings, address = Path(folder, "settings.json"), str(Path(folder, "told"))
        settings.write_text(plan.settings.model_dump_json())
        job = dg.build_reconstructable_job("toolformer_dag.definitions", "job_of", (str(settings), name))  # type: ignore[arg-type]
        try:
            with heard(address), _kept_alive(instance, address):
                yield dg.execute_job(
                    job,
                    instance=instance,
                    asset_selection=assets,
                    run_config=QUIET,
                    tags={HOME: home_name(instance), TOLD_TO: address},
                )
        finally:
            free_slots_of_ended_runs(instance)


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
def _kept_alive(instance: dg.DagsterInstance, address: str) -> Iterator[None]:
    """Mark the run that has the address as alive, as soon as there is one, and interrupt it where it was cancelled."""
    ended = threading.Event()

    def watch() -> None:
        runs: Sequence[dg.DagsterRun] = []
        while not runs and not ended.wait(LOOK_EVERY_SECONDS / 4):
            runs = instance.get_runs(dg.RunsFilter(tags={TOLD_TO: address}))
        for run in runs:
            with alive(instance, run.run_id):
                while not ended.wait(LOOK_EVERY_SECONDS):
                    now = instance.get_run_by_id(run.run_id)
                    if now is not None and now.status in CANCELLED:
                        os.kill(os.getpid(), signal.SIGINT)  # as Ctrl-C: Dagster ends the steps
                        break
                ended.wait()

    watching = threading.Thread(target=watch, daemon=True)
    watching.start()
    try:
        yield
    finally:
        ended.set()
        watching.join()


def was_interrupted(result: Result) -> bool:
    """Return whether Ctrl-C, another signal or the UI ended the run."""
    return any(map(_interrupts, result.all_events))


def _interrupts(event: dg.DagsterEvent) -> bool:
    if event.event_type is dg.DagsterEventType.RUN_FAILURE:
        error = event.job_failure_data.error
    else:
        error = event.step_failure_data.error if event.is_step_failure else None
    canceled = event.event_type is dg.DagsterEventType.RUN_CANCELED
    return canceled or (error is not None and error.cls_name in INTERRUPTIONS)
