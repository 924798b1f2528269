"""A project as the commands see it: its plan, its runs, and the Dagster instance that it shares with the UI."""

import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import dagster as dg

from toolformer_dag.assets import IN_BOTH_JOBS, JOB, TRAINING_JOB, outputs, tell_of_lake
from toolformer_dag.assets.checkpoint_assets import list_checkpoint_assets
from toolformer_dag.assets.declaration import asset_key
from toolformer_dag.assets.measurement_assets import list_manual_assets
from toolformer_dag.assets.metadata import UNCHANGED
from toolformer_dag.assets.staleness import SHARD_LIST, list_stale_assets, observe, with_descendants
from toolformer_dag.assets.warehouse_assets import SHOWN, STEP
from toolformer_dag.cli.job_runs import Result, Sink, completed, was_interrupted
from toolformer_dag.cli.terminal import explain_damaged_history, is_history_error
from toolformer_dag.computing.plan import Plan
from toolformer_dag.computing.reasons import Reasons
from toolformer_dag.computing.spending import Spent
from toolformer_dag.exports.verify_project import set_aside
from toolformer_dag.files import UserError, locked, write_whole
from toolformer_dag.lake.session import session
from toolformer_dag.lake.storage import CheckedFile
from toolformer_dag.lake.table import DamagedPart, MissingPart
from toolformer_dag.model.weights import DamagedCheckpoint
from toolformer_dag.pipeline.raw_shards import NAME as RAW_SHARDS
from toolformer_dag.resources.live_runs import UNFINISHED, end_dead_runs, take_spent, take_unfinished
from toolformer_dag.settings.sections import Settings
from toolformer_dag.settings.setting_types import expand_home, to_printable
from toolformer_dag.settings.training_settings import TrainingSettings
from toolformer_dag.training.checkpoint_outputs import explain_too_few_to_train
from toolformer_dag.training.checkpoints import checkpoints

DAGSTER_YAML = b"""\
# Settings of the Dagster instance that the command line and the UI share.
telemetry:
  enabled: false
nux:
  enabled: false
concurrency:
  pools:
    granularity: op
    default_limit: 1  # runs that would compute the same rows take turns, whoever started them
code_servers:
  local_startup_timeout: 3600  # definitions hash weights and passages once: minutes for KILT's 35 GB
"""
CRASHED = "ChildProcessCrashException"
NOT_RUN = "not run: an asset before it failed"
MENDED = (DamagedPart.__name__, DamagedCheckpoint.__name__)
"""Errors of damaged files, which are set aside when they are met: the next attempt makes them again."""
REPAIRS = 10
"""How often the jobs of a round start at most; they start again after a damaged file."""


@dataclass
class RunReport:
    """The outcome of running a project.

    - `ran`: the assets that were made anew
    - `failed`: the assets that were not made, each with its error, or with NOT_RUN
    - `spent`: tokens and calls of this run
    - `unfinished`: tokens and calls of earlier runs that were killed, failed or interrupted, if not yet reported
    - `set_aside`: files that were found damaged before anything ran
    - `damaged`: whether something failed because a file that it read was damaged
    - `untrained`: why finetuning was not begun; None where it was, or was not asked for
    """

    ran: list[str] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)
    spent: Spent = field(default_factory=Spent)
    unfinished: Spent = field(default_factory=Spent)
    set_aside: Sequence[CheckedFile] = ()
    damaged: bool = False
    untrained: str | None = None

    def raise_for_failures(self) -> None:
        """Raise UserError naming each failed asset with its reason, or saying why nothing was trained."""
        if self.failed:
            failures = [f"{name}: {reason}" for name, reason in self.failed.items() if reason != NOT_RUN]
            remedy = "What comes after them did not run (`stale` lists it). Mend the cause and run again."
            raise UserError("\n".join(("some assets failed:", *failures, remedy)))
        if self.untrained:
            raise UserError(self.untrained)

    def add_made(self, name: str) -> None:
        """Count an asset that was made anew; the list of shards is no asset that people know."""
        if name != SHARD_LIST and name not in self.ran:
            self.ran.append(name)

    def add_failed(self, name: str, causes: Sequence[Any]) -> None:
        """Count an asset that was not made. `causes`: the errors of its step, the outermost first."""
        self.failed[name] = _explain_failure(causes)
        if any(error.cls_name in MENDED for error in causes):
            self.damaged = True


@dataclass(frozen=True)
class Project:
    """A settings file as the commands see it.

    `plan`: the plan of the last round. A round annotates, with the checkpoint of the round before, the texts in which
    that round kept no call; its plan starts from that round's plan.
    """

    plan: Plan

    @staticmethod
    def of(settings: Settings) -> "Project":
        """Load tools. Raises ToolError, ModelError, StorageError."""
        return Project(Plan.of(settings))

    @cached_property
    def instance(self) -> dg.DagsterInstance:
        """The instance of $DAGSTER_HOME, or of `.dagster` beside toolformer.toml; opening it takes a second."""
        return open_shared_instance(self.plan.settings.root)

    def rounds(self) -> Iterator[Plan]:
        """Yield the plan of each round; a plan made after a training knows the trained checkpoint."""
        for plan in self.plan.projects:
            yield Plan.of(plan.settings) if plan.start else plan

    def stale(self) -> dict[str, Reasons]:
        """Return the missing and stale assets of all rounds with the reasons, upstream first."""
        reasons: dict[str, Reasons] = {}
        for plan in self.rounds():
            reasons |= list_stale_assets_of_round(plan)
        return reasons

    def others(self) -> list[str]:
        """Return the names of other running jobs; steps that would compute the same rows wait for them."""
        end_dead_runs(self.instance)
        return [run.job_name for run in self.instance.get_runs(dg.RunsFilter(statuses=UNFINISHED))]

    def run(self, training: bool, sink: Sink = lambda step: None) -> RunReport:
        """Bring everything up to date, round by round; with `training`, finetune and evaluate too.

        A failed asset stops only what depends on it. `sink` receives the progress of each step. Raises TrainingError at
        once if finetuning cannot run or does not fit into memory, and KeyboardInterrupt if a signal or the UI ended it.
        """
        if training:
            self._check_finetuning()
        report = self._begin_report()
        for plan in self.rounds():
            self._run_round(plan, training, report, sink)  # adds to the report
            if report.failed or report.untrained:  # a later round needs the checkpoint of this one
                break
        with session():  # what is read of the lake is read once
            tell_of_lake(self.plan, self.instance)  # so that Dagster shows what the lake holds
        report.unfinished = take_unfinished(self.instance)
        return report

    def _begin_report(self) -> RunReport:
        """End dead runs, tell Dagster of changed inputs, set damaged files aside; return the report of the new run."""
        end_dead_runs(self.instance)
        observe(self.instance, self.plan)
        with session():
            return RunReport(set_aside=set_aside(self.plan))

    def _check_finetuning(self) -> None:
        """Raise TrainingError if a checkpoint has to be made and finetuning cannot run or does not fit into memory."""
        if any(_is_untrained(plan, list_stale_assets_of_round(plan)) for plan in self.rounds()):
            from toolformer_dag.training.launch import check_finetuning

            for recipe in self._list_recipes():
                check_finetuning(self.plan.settings.model, recipe)

    def _list_recipes(self) -> list[TrainingSettings]:
        """Return the settings that checkpoints are trained under, each once; seeds change nothing that is checked."""
        recipes: list[TrainingSettings] = []
        for checkpoint in checkpoints(self.plan.settings).values():
            recipe = checkpoint.recipe(self.plan).model_copy(update={"seed": 0})
            if recipe not in recipes:
                recipes.append(recipe)
        return recipes

    def _run_round(self, plan: Plan, training: bool, report: RunReport, sink: Sink) -> None:
        """Run the jobs of a round; start again when one meets a damaged file, which has been set aside by then.

        Adds the outcome to the report; failures are those of the last attempt.
        """
        for _ in range(REPAIRS):
            report.failed = {}
            report.damaged = False
            self._run_job(plan, JOB, report, sink)  # sets `failed` and `damaged`
            if training and not report.failed:
                self._train(plan, report, sink)  # sets them too
            if not report.damaged:
                break

    def _train(self, plan: Plan, report: RunReport, sink: Sink) -> None:
        """Run the job that finetunes and evaluates, unless there are too few texts to train a checkpoint on.

        Adds the outcome to the report. Where training texts are damaged or missing, nothing runs, and `report.damaged`
        is set: then the job before this one makes them again.
        """
        too_few = None  # a message
        try:
            if _is_untrained(plan, list_stale_assets_of_round(plan)):  # a checkpoint has to be made
                too_few = explain_too_few_to_train(plan)
        except (DamagedPart, MissingPart):
            report.damaged = True
            return
        if too_few:
            report.untrained = f"nothing was finetuned: {too_few}"
        else:
            self._run_job(plan, TRAINING_JOB, report, sink)

    def _run_job(self, plan: Plan, name: str, report: RunReport, sink: Sink) -> None:
        """Run a job for its stale assets and what depends on them, and add the outcome to the report.

        TRAINING_JOB does not run where an asset that only the first job makes was damaged: `report.damaged` is set, so
        that the first job runs again. A step skips itself if nothing changed. Raises KeyboardInterrupt if a signal or
        the UI ended the run.
        """
        stale = list_stale_assets_of_round(plan)  # assets with the reasons why they are stale
        if name == TRAINING_JOB and _is_data_lost(plan, stale):
            report.damaged = True
            return
        assets = _list_assets_to_make(plan, name, stale)
        if assets:
            result = self._complete_job(plan, name, assets, report, sink)  # adds to `report.spent`
            _add_outcome(report, plan, assets, result)  # which assets were made, and which failed

    def _complete_job(self, plan: Plan, name: str, assets: Sequence[str], report: RunReport, sink: Sink) -> Result:
        """Run a job for these assets, add what it spent to the report, and return its result.

        Raises KeyboardInterrupt if a signal or the UI ended the run.

        - name: of the job, without the suffix of the round
        - sink: receives the progress of each step
        """
        keys = [asset_key(asset) for asset in assets]
        job = f"{name}{plan.suffix}"
        with completed(plan, self.instance, job, keys, sink) as (result, cost_folder):  # the block follows the job
            report.spent += take_spent(cost_folder)  # reads what the steps spent, and removes the folder
        if was_interrupted(result):
            raise KeyboardInterrupt
        return result


def list_stale_assets_of_round(plan: Plan) -> dict[str, Reasons]:
    """Return the missing and stale assets of a round, and of what all rounds share."""
    with session():
        return list_stale_assets(outputs(plan))


def _list_assets_to_make(plan: Plan, job: str, stale: Iterable[str]) -> list[str]:
    """Return the stale assets of a job and what depends on them, in order.

    Before the raw shards, the list of their files is made.
    """
    scope = _build_job_scope(plan, job)  # which assets the job begins with if they are stale, and which it may make
    stale_in_job = [asset for asset in stale if asset in scope.begins]
    stale_or_downstream = with_descendants(outputs(plan), stale_in_job)
    assets = [asset for asset in stale_or_downstream if asset in scope.makes]
    list_of_shards = [SHARD_LIST] if RAW_SHARDS in assets else []
    return list_of_shards + assets


class _JobScope(NamedTuple):
    """The assets of a job.

    - `begins`: stale assets for which the job runs
    - `makes`: assets that it may make
    """

    begins: set[str]
    makes: set[str]


def _build_job_scope(plan: Plan, job: str) -> _JobScope:
    """Return the assets of JOB or TRAINING_JOB."""
    by_hand = set(list_manual_assets(plan))
    if job == TRAINING_JOB:
        return _JobScope(begins=by_hand, makes=_list_training_job_assets(plan))
    computed = {output.name for output in outputs(plan)} - by_hand
    return _JobScope(begins=computed, makes=computed)


def _list_training_job_assets(plan: Plan) -> set[str]:
    """Return the names of the assets that the job TRAINING_JOB may make."""
    shared = [plan.named(name) for name in IN_BOTH_JOBS]
    return {*list_manual_assets(plan), *shared}


def _is_data_lost(plan: Plan, stale: Mapping[str, Reasons]) -> bool:
    """Return whether an asset that only the first job makes has been damaged since that job ran."""
    in_second_job = _list_training_job_assets(plan)
    return any(not reasons.retry_only for name, reasons in stale.items() if name not in in_second_job)


def _is_untrained(plan: Plan, stale: Mapping[str, Reasons]) -> bool:
    """Return whether a checkpoint of the round is among the stale assets."""
    return any(name in stale for name in list_checkpoint_assets(plan))


def _add_outcome(report: RunReport, plan: Plan, assets: Sequence[str], result: Result) -> None:
    """Add to a report which assets of a job were made and which failed. `assets`: all that it was to make."""
    outcome = _JobOutcome(result)
    for name in assets:
        if not outcome.is_materialized(name):
            report.add_failed(name, outcome.causes(_name_step(plan, name)))
        elif not outcome.is_unchanged(name):
            report.add_made(name)


def _name_step(plan: Plan, name: str) -> str:
    """Return the name of the step that makes an asset; one step makes all tables of the paper."""
    paper_tables = [plan.named(table) for table in SHOWN]
    if name in paper_tables:
        return f"{STEP}{plan.suffix}"
    return asset_key(name).to_python_identifier()


class _JobOutcome:
    """What Dagster's events say of the assets and steps of a job."""

    def __init__(self, result: Result) -> None:
        self._metadata = {
            event.asset_key: event.materialization.metadata for event in result.get_asset_materialization_events()
        }
        self._failures = {event.step_key: event for event in result.all_events if event.is_step_failure}

    def is_materialized(self, name: str) -> bool:
        """Return whether the step of an asset ended well."""
        return asset_key(name) in self._metadata

    def is_unchanged(self, name: str) -> bool:
        """Return whether the step of an asset found nothing to do."""
        return self._metadata[asset_key(name)].get(UNCHANGED) == dg.MetadataValue.bool(True)

    def causes(self, step: str) -> list[Any]:
        """Return the error that a step ended with, then its causes; nothing if the step did not begin."""
        failure = self._failures.get(step)
        error = failure.step_failure_data.error if failure else None
        causes = []
        while error is not None:
            causes.append(error)
            error = error.cause
        return causes


def _explain_failure(causes: Sequence[Any]) -> str:
    """Return why an asset was not made: the message of its own error, without Dagster's wrapping.

    The traceback is in the run's log in the UI.

    `causes`: the step's error as Dagster's SerializableErrorInfo, then its cause, and so on; empty for NOT_RUN
    """
    if not causes:
        return NOT_RUN
    raised_by_asset = (cause for cause in causes if not (cause.cls_name or "").startswith("Dagster"))
    innermost = causes[-1]
    error = next(raised_by_asset, innermost)  # the outermost that is not Dagster's
    if error.cls_name == CRASHED:
        return "its process was killed, as where memory runs out; what it had committed is kept"
    return re.sub(r"^toolformer_dag\.[\w.]+: ", "", error.message.strip())  # without the name of our class of error


def home(root: Path) -> Path:
    """Return the folder of the Dagster instance, and make it on first use: $DAGSTER_HOME, or `.dagster` in `root`.

    Raises OSError where it is no folder, and UserError where its name is not UTF-8 or `~` leads nowhere.
    """
    path = Path(os.environ.get("DAGSTER_HOME") or root / ".dagster")
    folder = expand_home(path).absolute()
    if to_printable(folder) != str(folder):  # `to_printable` escapes bytes that are not UTF-8
        raise UserError(f"{to_printable(folder)}: the path is not UTF-8; set DAGSTER_HOME to another folder")
    config_file = folder / "dagster.yaml"
    with locked(folder / "instance.lock"):  # also makes the folder
        if not config_file.exists():
            write_whole(config_file, DAGSTER_YAML)
    return folder


def open_shared_instance(root: Path) -> dg.DagsterInstance:
    """Open the Dagster instance in `home(root)`, which the command line and the UI share. Raises UserError."""
    folder = home(root)
    with locked(folder / "instance.lock"):  # two processes at once would each make Dagster's databases
        try:
            return dg.DagsterInstance.from_config(str(folder))
        except Exception as error:  # of Dagster's checks, of YAML, of its databases
            if isinstance(error, OSError) or is_history_error(
                error
            ):  # of files or databases: these get a message elsewhere
                raise
            raise UserError(_explain_unusable_instance(folder, error)) from error


def _explain_unusable_instance(folder: Path, error: Exception) -> str:
    """Return why the instance in a folder cannot be opened, and the remedies."""
    reason = " ".join(str(error).split())[:200]
    return (
        f"{folder / 'dagster.yaml'} cannot be used ({reason}); correct it, or move it away: it is made anew. "
        f"Or {explain_damaged_history('another file of it is damaged')}"
    )
