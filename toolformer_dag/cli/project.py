"""A project as the commands see it: its plan, its runs, and the Dagster instance that it shares with the UI."""

import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import dagster as dg

from toolformer_dag.assets import ASSETS_IN_BOTH_JOBS, COMPUTING_JOB, TRAINING_JOB, list_outputs, report_lake
from toolformer_dag.assets.checkpoint_assets import list_checkpoint_asset_names
from toolformer_dag.assets.declaration import build_asset_key
from toolformer_dag.assets.measurement_assets import list_manual_asset_names
from toolformer_dag.assets.metadata import UNCHANGED_LABEL
from toolformer_dag.assets.staleness import (
    SHARD_LIST_ASSET,
    find_stale_assets,
    list_with_descendants,
    report_shard_files,
)
from toolformer_dag.assets.warehouse_assets import PAPER_TABLE_ASSETS, PAPER_TABLES_STEP
from toolformer_dag.cli.job_runs import JobResult, StepCallback, run_job_to_completion, was_job_interrupted
from toolformer_dag.cli.terminal import explain_damaged_history, is_history_error
from toolformer_dag.computing.plan import Plan
from toolformer_dag.computing.reasons import Reasons
from toolformer_dag.computing.spending import Spent
from toolformer_dag.exports.verify_project import set_aside_damaged_project_files
from toolformer_dag.files import UserError, hold_file_lock, write_file_atomically
from toolformer_dag.lake.session import enter_session
from toolformer_dag.lake.storage import CheckedFile
from toolformer_dag.lake.table import DamagedPart, MissingPart
from toolformer_dag.model.weights import DamagedCheckpoint
from toolformer_dag.pipeline.raw_shards import TABLE_NAME as RAW_SHARDS
from toolformer_dag.resources.live_runs import (
    UNFINISHED_STATUSES,
    end_dead_runs,
    pop_run_spending,
    pop_spending_of_failed_runs,
)
from toolformer_dag.settings.sections import Settings
from toolformer_dag.settings.setting_types import expand_home, to_printable
from toolformer_dag.settings.training_settings import TrainingSettings
from toolformer_dag.training.checkpoint_outputs import explain_too_few_training_texts
from toolformer_dag.training.checkpoints import build_checkpoints_by_name

DEFAULT_DAGSTER_YAML = b"""\
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
CRASHED_PROCESS_ERROR_NAME = "ChildProcessCrashException"
NOT_RUN_REASON = "not run: an asset before it failed"
REPAIRABLE_ERROR_NAMES = (DamagedPart.__name__, DamagedCheckpoint.__name__)
"""Errors of damaged files, which are set aside when they are met: the next attempt makes them again."""
MAX_ROUND_ATTEMPTS = 10
"""How often the jobs of a round start at most; they start again after a damaged file."""


@dataclass
class RunReport:
    """The outcome of running a project.

    Attributes:
        made_assets: The assets that were made anew.
        failure_by_asset: The assets that were not made, each with its error, or with NOT_RUN_REASON.
        spending: The tokens and tool calls of this run.
        unfinished_spending: The tokens and tool calls of earlier runs that were killed, failed or interrupted, if no
            report has named them yet.
        damaged_files: The files that were found damaged before anything ran.
        met_damaged_file: Whether an asset failed because a file that it read was damaged.
        untrained_reason: Why finetuning was not begun. None if it was begun, or was not wanted.
    """

    made_assets: list[str] = field(default_factory=list)
    failure_by_asset: dict[str, str] = field(default_factory=dict)
    spending: Spent = field(default_factory=Spent)
    unfinished_spending: Spent = field(default_factory=Spent)
    damaged_files: Sequence[CheckedFile] = ()
    met_damaged_file: bool = False
    untrained_reason: str | None = None

    def raise_for_failures(self) -> None:
        """Raise an error if an asset failed or nothing could be trained; otherwise do nothing.

        Raises:
            UserError: An asset failed; the message names each one with its reason. Or nothing was trained; the message
                says why.
        """
        if self.failure_by_asset:
            failure_lines = []
            for asset_name, reason in self.failure_by_asset.items():
                if reason != NOT_RUN_REASON:
                    failure_lines.append(f"{asset_name}: {reason}")

            remedy = "What comes after them did not run (`stale` lists it). Mend the cause and run again."
            raise UserError("\n".join(("some assets failed:", *failure_lines, remedy)))

        if self.untrained_reason:
            raise UserError(self.untrained_reason)

    def add_made_asset(self, asset_name: str) -> None:
        """Add an asset that was made anew. The list of shard files is left out: people do not know it as an asset."""
        if asset_name != SHARD_LIST_ASSET and asset_name not in self.made_assets:
            self.made_assets.append(asset_name)

    def add_failed_asset(self, asset_name: str, error_chain: Sequence[Any]) -> None:
        """Add an asset that was not made, and note whether a damaged file was the cause.

        Args:
            asset_name: The name of the asset.
            error_chain: The error of its step, then its cause, and so on. Empty if the step did not run.
        """
        self.failure_by_asset[asset_name] = _explain_asset_failure(error_chain)
        if any(error.cls_name in REPAIRABLE_ERROR_NAMES for error in error_chain):
            self.met_damaged_file = True


@dataclass(frozen=True)
class Project:
    """A settings file as the commands see it.

    A project can annotate its texts in several rounds. Each later round looks at the texts in which no call was kept
    yet, and proposes calls with the checkpoint that the round before has trained.

    Attributes:
        plan: The plan of the last round. It holds the plan of the round before it.
    """

    plan: Plan

    @staticmethod
    def from_settings(settings: Settings) -> "Project":
        """Load the tools of the settings, and return the project.

        Raises:
            ToolError: A tool cannot be loaded.
            ModelError: The model is missing or unusable.
            StorageError: The lake cannot be opened.
        """
        return Project(Plan.from_settings(settings))

    @cached_property
    def dagster_instance(self) -> dg.DagsterInstance:
        """The Dagster instance that the commands and the UI share: $DAGSTER_HOME, or `.dagster` beside toolformer.toml.

        It is opened on first use, which takes about a second.
        """
        return open_shared_instance(self.plan.settings.root)

    def iter_round_plans(self) -> Iterator[Plan]:
        """Yield the plan of each round, the first round's first.

        A later round's plan is built when it is its turn, so that it knows the checkpoint that was trained meanwhile.
        """
        for plan in self.plan.plans_by_round:
            yield Plan.from_settings(plan.settings) if plan.previous_plan else plan

    def list_stale_assets(self) -> dict[str, Reasons]:
        """Return the missing and stale assets of all rounds with the reasons; each comes after its inputs."""
        reasons: dict[str, Reasons] = {}
        for plan in self.iter_round_plans():
            reasons |= list_stale_assets_of_round(plan)
        return reasons

    def list_running_jobs(self) -> list[str]:
        """Return the names of the jobs that other processes run now; steps that compute the same rows wait for them."""
        end_dead_runs(self.dagster_instance)
        unfinished_runs = self.dagster_instance.get_runs(dg.RunsFilter(statuses=UNFINISHED_STATUSES))
        return [run.job_name for run in unfinished_runs]

    def run_rounds(self, includes_training: bool, on_step: StepCallback = lambda step: None) -> RunReport:
        """Make everything that is missing or stale, round by round.

        A failed asset stops only what depends on it, and the later rounds.

        Args:
            includes_training: Whether to finetune and evaluate too.
            on_step: Receives the progress of each step.

        Returns:
            What was made, what failed, and what it cost.

        Raises:
            TrainingError: Finetuning cannot run here or does not fit into memory. Raised before anything runs.
            KeyboardInterrupt: A signal or the UI ended the run.
        """
        if includes_training:
            self._check_finetuning()

        run_report = self._begin_run_report()
        for plan in self.iter_round_plans():
            self._run_round(plan, includes_training, run_report, on_step)

            has_failed = bool(run_report.failure_by_asset or run_report.untrained_reason)
            if has_failed:  # a later round needs the checkpoint of this one
                break

        # Now Dagster's pages show what the lake holds. In the session, the lake's records are read only once.
        with enter_session():
            report_lake(self.plan, self.dagster_instance)

        run_report.unfinished_spending = pop_spending_of_failed_runs(self.dagster_instance)
        return run_report

    def _begin_run_report(self) -> RunReport:
        """Prepare a run, and return its report, which names the files that were found damaged.

        Runs whose processes are gone are ended, and Dagster learns of changed shard files. Damaged files are set aside,
        so that the run makes them again.
        """
        end_dead_runs(self.dagster_instance)
        report_shard_files(self.dagster_instance, self.plan)
        with enter_session():
            damaged_files = set_aside_damaged_project_files(self.plan)
        return RunReport(damaged_files=damaged_files)

    def _check_finetuning(self) -> None:
        """Check that finetuning can run here, if a checkpoint has to be made.

        Raises:
            TrainingError: Finetuning cannot run, or does not fit into memory.
        """
        must_train = any(
            _has_stale_checkpoint(plan, list_stale_assets_of_round(plan)) for plan in self.iter_round_plans()
        )
        if not must_train:
            return

        from toolformer_dag.training.launch import check_finetuning

        for training_settings in self._list_training_settings():
            check_finetuning(self.plan.settings.model, training_settings)

    def _list_training_settings(self) -> list[TrainingSettings]:
        """Return the different settings under which checkpoints are trained, without regard to their seeds."""
        distinct_settings: list[TrainingSettings] = []
        for checkpoint in build_checkpoints_by_name(self.plan.settings).values():
            # Whether a training fits into memory does not depend on its seed.
            settings = checkpoint.get_training_settings(self.plan).model_copy(update={"seed": 0})
            if settings not in distinct_settings:
                distinct_settings.append(settings)
        return distinct_settings

    def _run_round(self, plan: Plan, includes_training: bool, run_report: RunReport, on_step: StepCallback) -> None:
        """Run the jobs of a round, and add the outcome to the report.

        If a job meets a damaged file, the file is set aside, and the jobs start again to make it anew. The report then
        names the failures of the last attempt only.

        Args:
            plan: The plan of the round.
            includes_training: Whether to finetune and evaluate too.
            run_report: The report of the run, which is changed.
            on_step: Receives the progress of each step.
        """
        for _ in range(MAX_ROUND_ATTEMPTS):
            run_report.failure_by_asset = {}
            run_report.met_damaged_file = False

            # Each job adds its failures to the report, and notes there whether it met a damaged file.
            self._run_job(plan, COMPUTING_JOB, run_report, on_step)
            if includes_training and not run_report.failure_by_asset:
                self._run_training_job(plan, run_report, on_step)

            if not run_report.met_damaged_file:
                break

    def _run_training_job(self, plan: Plan, run_report: RunReport, on_step: StepCallback) -> None:
        """Run the job that finetunes and evaluates, unless there are too few texts to train a checkpoint on.

        The outcome is added to the report. If training texts are damaged or missing, nothing runs, and the report notes
        a damaged file: then the computing job has to make the texts again.
        """
        refusal = None
        try:
            must_train = _has_stale_checkpoint(plan, list_stale_assets_of_round(plan))
            if must_train:
                refusal = explain_too_few_training_texts(plan)
        except (DamagedPart, MissingPart):
            run_report.met_damaged_file = True
            return

        if refusal:
            run_report.untrained_reason = f"nothing was finetuned: {refusal}"
        else:
            self._run_job(plan, TRAINING_JOB, run_report, on_step)

    def _run_job(self, plan: Plan, job_name: str, run_report: RunReport, on_step: StepCallback) -> None:
        """Run a job for its stale assets and for what depends on them, and add the outcome to the report.

        A step skips itself if its inputs turn out unchanged. The training job does not run if data that it reads was
        damaged: the report notes it, so that the computing job runs again.

        Args:
            plan: The plan of the round.
            job_name: COMPUTING_JOB or TRAINING_JOB.
            run_report: The report of the run, which is changed.
            on_step: Receives the progress of each step.

        Raises:
            KeyboardInterrupt: A signal or the UI ended the run.
        """
        reasons_by_stale_asset = list_stale_assets_of_round(plan)
        if job_name == TRAINING_JOB and _has_lost_data_asset(plan, reasons_by_stale_asset):
            run_report.met_damaged_file = True
            return

        asset_names = _list_assets_to_make(plan, job_name, reasons_by_stale_asset)
        if asset_names:
            job_result = self._run_job_to_completion(plan, job_name, asset_names, run_report, on_step)
            _add_job_outcome(run_report, plan, asset_names, job_result)

    def _run_job_to_completion(
        self, plan: Plan, job_name: str, asset_names: Sequence[str], run_report: RunReport, on_step: StepCallback
    ) -> JobResult:
        """Run a job for these assets, add what it spent to the report, and return Dagster's result.

        Args:
            plan: The plan of the round.
            job_name: The name of the job, without the suffix of the round.
            asset_names: The assets to make.
            run_report: The report of the run, whose spending is changed.
            on_step: Receives the progress of each step.

        Raises:
            KeyboardInterrupt: A signal or the UI ended the run.
        """
        asset_keys = [build_asset_key(asset_name) for asset_name in asset_names]
        full_job_name = f"{job_name}{plan.round_suffix}"

        # The job runs before the block begins. To other processes the run is alive until the block ends.
        with run_job_to_completion(plan, self.dagster_instance, full_job_name, asset_keys, on_step) as ended_job:
            job_result, cost_folder = ended_job
            run_report.spending += pop_run_spending(cost_folder)  # reads the costs of the steps, and removes the folder

        if was_job_interrupted(job_result):
            raise KeyboardInterrupt
        return job_result


def list_stale_assets_of_round(plan: Plan) -> dict[str, Reasons]:
    """Return the missing and stale assets of a round, and of what all rounds share."""
    with enter_session():
        return find_stale_assets(list_outputs(plan))


def _list_assets_to_make(plan: Plan, job_name: str, stale_assets: Iterable[str]) -> list[str]:
    """Return the names of the assets that a job has to make, each after its dependencies.

    These are the job's stale assets and what depends on them. If the raw shards are among them, the list of the shard
    files is made first.
    """
    scope = _build_job_scope(plan, job_name)
    stale_names = [name for name in stale_assets if name in scope.triggering_assets]

    names_with_descendants = list_with_descendants(list_outputs(plan), stale_names)
    names_to_make = [name for name in names_with_descendants if name in scope.allowed_assets]

    if RAW_SHARDS in names_to_make:
        return [SHARD_LIST_ASSET, *names_to_make]
    return names_to_make


class _JobScope(NamedTuple):
    """The assets that belong to a job.

    Attributes:
        triggering_assets: The job runs if one of these is stale.
        allowed_assets: The assets that the job may make.
    """

    triggering_assets: set[str]
    allowed_assets: set[str]


def _build_job_scope(plan: Plan, job_name: str) -> _JobScope:
    """Return the names of the assets that belong to COMPUTING_JOB or TRAINING_JOB."""
    manual_names = set(list_manual_asset_names(plan))
    if job_name == TRAINING_JOB:
        return _JobScope(triggering_assets=manual_names, allowed_assets=_list_training_job_assets(plan))

    computed_names = {output.name for output in list_outputs(plan)} - manual_names
    return _JobScope(triggering_assets=computed_names, allowed_assets=computed_names)


def _list_training_job_assets(plan: Plan) -> set[str]:
    """Return the names of the assets that the training job may make: checkpoints, measurements and what shows them."""
    shared = [plan.add_round_suffix(name) for name in ASSETS_IN_BOTH_JOBS]
    return {*list_manual_asset_names(plan), *shared}


def _has_lost_data_asset(plan: Plan, stale_assets: Mapping[str, Reasons]) -> bool:
    """Return whether a stale asset has to be made by the computing job before the training job can run.

    An asset that is stale only because some of its rows are to be tried again does not count.
    """
    training_job_names = _list_training_job_assets(plan)
    reasons_of_data = [reasons for name, reasons in stale_assets.items() if name not in training_job_names]
    return any(not reasons.is_retry_only for reasons in reasons_of_data)


def _has_stale_checkpoint(plan: Plan, stale_assets: Mapping[str, Reasons]) -> bool:
    """Return whether a checkpoint of the round is among the stale assets."""
    return any(name in stale_assets for name in list_checkpoint_asset_names(plan))


def _add_job_outcome(run_report: RunReport, plan: Plan, asset_names: Sequence[str], job_result: JobResult) -> None:
    """Add to a report which assets a job has made, and which have failed.

    Args:
        run_report: The report of the run, which is changed.
        plan: The plan of the round.
        asset_names: All assets that the job was to make.
        job_result: Dagster's result of the job.
    """
    outcome = _JobOutcome(job_result)
    for asset_name in asset_names:
        if not outcome.is_materialized(asset_name):
            step_name = _get_step_name(plan, asset_name)
            run_report.add_failed_asset(asset_name, outcome.list_error_chain(step_name))
        elif not outcome.is_unchanged(asset_name):
            run_report.add_made_asset(asset_name)


def _get_step_name(plan: Plan, asset_name: str) -> str:
    """Return Dagster's name of the step that makes an asset. All tables of the paper are made by the same step."""
    paper_tables = [plan.add_round_suffix(table) for table in PAPER_TABLE_ASSETS]
    if asset_name in paper_tables:
        return f"{PAPER_TABLES_STEP}{plan.round_suffix}"
    return build_asset_key(asset_name).to_python_identifier()


class _JobOutcome:
    """What Dagster's events say of the assets and steps of a job."""

    def __init__(self, job_result: JobResult) -> None:
        """Read from the events of a job which assets it has made, and which steps have failed."""
        self._metadata_by_asset_key = {}
        for event in job_result.get_asset_materialization_events():
            self._metadata_by_asset_key[event.asset_key] = event.materialization.metadata

        self._failure_by_step = {event.step_key: event for event in job_result.all_events if event.is_step_failure}

    def is_materialized(self, asset_name: str) -> bool:
        """Return whether the step of an asset ended well."""
        return build_asset_key(asset_name) in self._metadata_by_asset_key

    def is_unchanged(self, asset_name: str) -> bool:
        """Return whether the step of a materialized asset found nothing to do."""
        metadata = self._metadata_by_asset_key[build_asset_key(asset_name)]
        return metadata.get(UNCHANGED_LABEL) == dg.MetadataValue.bool(True)

    def list_error_chain(self, step_name: str) -> list[Any]:
        """Return the error with which a step ended, then its cause, and so on. Empty if the step did not begin.

        The errors are Dagster's SerializableErrorInfo.
        """
        failure = self._failure_by_step.get(step_name)
        error = failure.step_failure_data.error if failure else None

        error_chain = []
        while error is not None:
            error_chain.append(error)
            error = error.cause
        return error_chain


def _explain_asset_failure(error_chain: Sequence[Any]) -> str:
    """Return why an asset was not made: the message of the error that it raised itself.

    Dagster wraps this error in errors of its own, which say nothing to the user. The traceback is in the run's log.

    Args:
        error_chain: The step's error as Dagster's SerializableErrorInfo, then its cause, and so on. Empty if the step
            did not run; then NOT_RUN_REASON is returned.
    """
    if not error_chain:
        return NOT_RUN_REASON

    error = _find_outermost_own_error(error_chain)
    if error.cls_name == CRASHED_PROCESS_ERROR_NAME:
        return "its process was killed, as where memory runs out; what it had committed is kept"

    # Our own errors begin with their full class name, such as "toolformer_dag.files.UserError: ".
    return re.sub(r"^toolformer_dag\.[\w.]+: ", "", error.message.strip())


def _find_outermost_own_error(error_chain: Sequence[Any]) -> Any:
    """Return the first error of a chain that is not one of Dagster's, or the innermost if all are Dagster's."""
    for error in error_chain:
        class_name = error.cls_name or ""
        if not class_name.startswith("Dagster"):
            return error
    return error_chain[-1]


def get_or_create_dagster_home(root: Path) -> Path:
    """Return the folder of the Dagster instance: $DAGSTER_HOME if it is set, else `.dagster` in the project's folder.

    On first use the folder is made, with a dagster.yaml that holds our defaults.

    Args:
        root: The folder of the project.

    Raises:
        OSError: The path leads to something that is no folder.
        UserError: The path is not UTF-8, or its `~` leads nowhere.
    """
    home_path = Path(os.environ.get("DAGSTER_HOME") or root / ".dagster")
    dagster_home = expand_home(home_path).absolute()

    printable_path = to_printable(dagster_home)  # with bytes that are not UTF-8 escaped
    if printable_path != str(dagster_home):
        raise UserError(f"{printable_path}: the path is not UTF-8; set DAGSTER_HOME to another folder")

    config_file = dagster_home / "dagster.yaml"
    with hold_file_lock(dagster_home / "instance.lock"):  # also makes the folder
        if not config_file.exists():
            write_file_atomically(config_file, DEFAULT_DAGSTER_YAML)
    return dagster_home


def open_shared_instance(root: Path) -> dg.DagsterInstance:
    """Open the Dagster instance that the command line and the UI share.

    Args:
        root: The folder of the project, in which the instance lies unless $DAGSTER_HOME names another folder.

    Raises:
        UserError: The instance cannot be used, for example because its dagster.yaml is faulty.
        OSError: A file cannot be read or written.
        Exception: An error of Dagster's databases, which `is_history_error` recognizes.
    """
    dagster_home = get_or_create_dagster_home(root)
    # Without the lock, two processes that start at once would each make Dagster's databases.
    with hold_file_lock(dagster_home / "instance.lock"):
        try:
            return dg.DagsterInstance.from_config(str(dagster_home))
        except Exception as error:
            has_message_elsewhere = isinstance(error, OSError) or is_history_error(error)
            if has_message_elsewhere:
                raise
            raise UserError(_explain_unusable_instance(dagster_home, error)) from error


def _explain_unusable_instance(dagster_home: Path, error: Exception) -> str:
    """Return a message that says why the instance in a folder cannot be opened, and how to repair it."""
    reason = " ".join(str(error).split())[:200]
    return (
        f"{dagster_home / 'dagster.yaml'} cannot be used ({reason}); correct it, or move it away: it is made anew. "
        f"Or {explain_damaged_history('another file of it is damaged')}"
    )
