"""A project as the commands see it: its plan, its definitions, the Dagster instance shared with the UI, its runs."""

import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import dagster as dg

from toolformer_dag.assets import IN_BOTH_JOBS, JOB, TRAINING_JOB, outputs, tell_of_lake
from toolformer_dag.assets.by_hand import BY_HAND, TRAINED
from toolformer_dag.assets.declaration import asset_key
from toolformer_dag.assets.metadata import UNCHANGED
from toolformer_dag.assets.staleness import SHARD_LIST, observe, stale_assets, with_descendants
from toolformer_dag.assets.warehouse_assets import SHOWN, STEP
from toolformer_dag.cli.job_runs import Result, Sink, completed, was_interrupted
from toolformer_dag.cli.terminal import damaged_history, of_history
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
from toolformer_dag.settings.setting_types import expanded, printable
from toolformer_dag.training.checkpoint_outputs import too_few_to_train

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
"""Errors of damaged files that the next attempt makes again."""
REPAIRS = 10
"""How often the jobs start at most: again where one met a damaged file, which is set aside then."""


@dataclass
class RunReport:
    """What came of a run of a project.

    - `ran`: the assets that were made anew
    - `failed`: the assets that were not made, each with its error, or with NOT_RUN
    - `spent`: tokens and calls of this run
    - `unfinished`: those of runs before it that were killed, failed or interrupted, since a report counted them
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
        """Raise UserError where something failed: the assets, each with its reason; or where nothing was trained."""
        if self.failed:
            failures = [f"{name}: {reason}" for name, reason in self.failed.items() if reason != NOT_RUN]
            remedy = "What comes after them did not run (`stale` lists it). Mend the cause and run again."
            raise UserError("\n".join(("some assets failed:", *failures, remedy)))
        if self.untrained:
            raise UserError(self.untrained)


@dataclass(frozen=True)
class Project:
    """A settings file as the commands see it.

    `plan`: that of the last round. A round annotates the texts in which the round before kept no call, with the
    checkpoint of that round; its plan starts from the plan of the round before.
    """

    plan: Plan

    @staticmethod
    def of(settings: Settings) -> "Project":
        """Load tools. Raises ToolError, ModelError, StorageError."""
        return Project(Plan.of(settings))

    @cached_property
    def instance(self) -> dg.DagsterInstance:
        """The instance of $DAGSTER_HOME, or `.dagster` beside toolformer.toml; opening it takes a second."""
        return shared_instance(self.plan.settings.root)

    def rounds(self) -> Iterator[Plan]:
        """Yield the plan of each round; one that comes after a training knows its checkpoint."""
        for plan in self.plan.projects:
            yield Plan.of(plan.settings) if plan.start else plan

    def stale(self) -> dict[str, Reasons]:
        """Return missing and stale assets of all rounds, upstream first, and why."""
        reasons: dict[str, Reasons] = {}
        for plan in self.rounds():
            reasons |= stale_in_round(plan)
        return reasons

    def others(self) -> list[str]:
        """Return the names of other runs that are going on; steps that would compute the same rows wait for them."""
        end_dead_runs(self.instance)
        return [run.job_name for run in self.instance.get_runs(dg.RunsFilter(statuses=UNFINISHED))]

    def run(self, training: bool, sink: Sink = lambda step: None) -> RunReport:
        """Run the job that brings everything up to date; with `training` also the one that finetunes and evaluates.

        Round by round. All end before this returns, and show in the UI. A failed asset stops what depends on it and
        nothing else. `sink` learns how each step gets on. Raises TrainingError before anything runs where finetuning
        cannot run or fit into memory, and KeyboardInterrupt where a signal or the UI ended the run.
        """
        if training:
            self._check_finetuning()
        end_dead_runs(self.instance)
        observe(self.instance, self.plan)
        with session():
            report = RunReport(set_aside=set_aside(self.plan))
        for plan in self.rounds():
            self._run_round(plan, training, report, sink)
            if report.failed or report.untrained:
                break
        with session():
            tell_of_lake(self.plan, self.instance)
        report.unfinished = take_unfinished(self.instance)
        return report

    def _check_finetuning(self) -> None:
        """Raise TrainingError where a checkpoint is to be made, and finetuning cannot run or fit into memory."""
        if any(_is_untrained(plan, stale_in_round(plan)) for plan in self.rounds()):
            from toolformer_dag.training.launch import check_finetuning

            check_finetuning(self.plan.settings.model, self.plan.settings.training)

    def _run_round(self, plan: Plan, training: bool, report: RunReport, sink: Sink) -> None:
        """Run the jobs of a round, again while one meets a damaged file: by then it is set aside, and made again."""
        for _ in range(REPAIRS):
            report.failed = {}
            report.damaged = False
            self._run_job(plan, JOB, report, sink)
            if training and not report.failed:
                self._train(plan, report, sink)
            if not report.damaged:
                break

    def _train(self, plan: Plan, report: RunReport, sink: Sink) -> None:
        """Run the job that finetunes and evaluates, unless a checkpoint is to be made of too few texts."""
        try:
            refusal = too_few_to_train(plan) if _is_untrained(plan, stale_in_round(plan)) else None
        except (DamagedPart, MissingPart):  # C*: the first job makes it again
            report.damaged = True
            return
        if refusal:
            report.untrained = f"nothing was finetuned: {refusal}"
        else:
            self._run_job(plan, TRAINING_JOB, report, sink)

    def _run_job(self, plan: Plan, name: str, report: RunReport, sink: Sink) -> None:
        """Run what is stale and what depends on it; its steps skip themselves where nothing changed.

        Raises KeyboardInterrupt where a signal or the UI ended the run.
        """
        stale = stale_in_round(plan)
        if name == TRAINING_JOB and _is_data_lost(plan, stale):
            report.damaged = True  # the first job makes it again before
            return
        chosen = _of_job(plan, name, stale)
        if not chosen:
            return
        if RAW_SHARDS in chosen:
            chosen.insert(0, SHARD_LIST)
        keys = [asset_key(asset) for asset in chosen]
        with completed(plan, self.instance, f"{name}{plan.suffix}", keys, sink) as (result, folder):
            report.spent += take_spent(folder)
        if was_interrupted(result):
            raise KeyboardInterrupt
        _add(report, plan, chosen, result)


def stale_in_round(plan: Plan) -> dict[str, Reasons]:
    """Return the missing and stale assets of a round, and of what all rounds share."""
    with session():
        return stale_assets(outputs(plan))


def _of_job(plan: Plan, name: str, stale: Iterable[str]) -> list[str]:
    """Return the assets that a job has to make: its stale ones, and those of it that depend on them, in order."""
    by_hand = set(map(plan.named, BY_HAND))
    in_both_jobs = set(map(plan.named, IN_BOTH_JOBS))
    if name == TRAINING_JOB:
        changed = with_descendants(outputs(plan), [asset for asset in stale if asset in by_hand])
        return [asset for asset in changed if asset in by_hand or asset in in_both_jobs]
    changed = with_descendants(outputs(plan), [asset for asset in stale if asset not in by_hand])
    return [asset for asset in changed if asset not in by_hand]


def _is_data_lost(plan: Plan, stale: Mapping[str, Reasons]) -> bool:
    """Return whether what the first job has made turned out to be damaged since. `stale`: what is stale, and why."""
    in_second_job = set(map(plan.named, (*BY_HAND, *IN_BOTH_JOBS)))
    return any(not why.retry_only for name, why in stale.items() if name not in in_second_job)


def _is_untrained(plan: Plan, stale: Mapping[str, Reasons]) -> bool:
    """Return whether a checkpoint of a round is among what is stale."""
    return any(plan.named(name) in stale for name in TRAINED)


def _add(report: RunReport, plan: Plan, chosen: Sequence[str], result: Result) -> None:
    """Add to a report what a job made and what failed.

    - `chosen`: the assets that it was to make
    - `result`: what Dagster says came of the job
    """
    metadata = {event.asset_key: event.materialization.metadata for event in result.get_asset_materialization_events()}
    failures = {event.step_key: event for event in result.all_events if event.is_step_failure}
    step_of = dict.fromkeys(map(plan.named, SHOWN), f"{STEP}{plan.suffix}")  # one step makes them all
    for name in chosen:
        key = asset_key(name)
        if key not in metadata:
            causes = list(_causes(failures.get(step_of.get(name, key.to_python_identifier()))))
            report.failed[name] = _reason(causes)
            report.damaged |= any(error.cls_name in MENDED for error in causes)
            continue
        was_skipped = metadata[key].get(UNCHANGED) == dg.MetadataValue.bool(True)
        if not was_skipped and name != SHARD_LIST and name not in report.ran:
            report.ran.append(name)


def _causes(failure: dg.DagsterEvent | None) -> Iterator[Any]:
    """Yield the error that a step ended with, then what caused it; nothing where it did not begin."""
    error = failure.step_failure_data.error if failure else None
    while error is not None:
        yield error
        error = error.cause


def _reason(causes: Sequence[Any]) -> str:
    """Return what the asset raised, without Dagster's wrapping; the run's log in the UI has its traceback."""
    if not causes:
        return NOT_RUN
    raised_by_asset = (cause for cause in causes if not (cause.cls_name or "").startswith("Dagster"))
    error = next(raised_by_asset, causes[-1])
    if error.cls_name == CRASHED:
        return "its process was killed, as where memory runs out; what it had committed is kept"
    return re.sub(r"^toolformer_dag\.[\w.]+: ", "", error.message.strip())


def home(root: Path) -> Path:
    """Return $DAGSTER_HOME, or `.dagster` beside toolformer.toml, made ready on first use; `~` is the home folder.

    Raises OSError where it is no folder, and UserError where its name is not UTF-8 or `~` leads nowhere.
    """
    folder = expanded(Path(os.environ.get("DAGSTER_HOME") or root / ".dagster")).absolute()
    if printable(folder) != str(folder):
        raise UserError(f"{printable(folder)}: the path is not UTF-8; set DAGSTER_HOME to another folder")
    with locked(folder / "instance.lock"):
        if not (folder / "dagster.yaml").exists():
            write_whole(folder / "dagster.yaml", DAGSTER_YAML)
    return folder


def shared_instance(root: Path) -> dg.DagsterInstance:
    """Open the instance of `home(root)`; runs of the command line show in the UI and the other way round."""
    folder = home(root)
    with locked(folder / "instance.lock"):  # two at once would each make Dagster's databases
        try:
            return dg.DagsterInstance.from_config(str(folder))
        except Exception as error:  # of Dagster's checks, of YAML, of its databases
            if isinstance(error, OSError) or of_history(error):
                raise
            reason = " ".join(str(error).split())[:200]
            raise UserError(
                f"{folder / 'dagster.yaml'} cannot be used ({reason}); correct it, or move it away: it is made anew. "
                f"Or {damaged_history('another file of it is damaged')}"
            ) from error
