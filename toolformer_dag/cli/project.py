"""A project as the commands see it: its plan, its definitions, the Dagster instance shared with the UI, its runs."""

import os
import re
import sqlite3
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path

import dagster as dg

from assets import JOB, TRAINING_JOB
from assets.by_hand import BY_HAND
from assets.declaration import asset_key
from assets.metadata import UNCHANGED
from assets.outputs import IN_BOTH_JOBS, SHARD_LIST, outputs
from assets.staleness import StaleAsset, observe, stale_assets, tell_dagster, with_descendants
from assets.warehouse import SHOWN, STEP
from resources.live_runs import UNFINISHED, end_dead_runs, take_spent, take_unfinished
from toolformer_dag.cli.job_runs import Result, Sink, completed, was_interrupted
from toolformer_dag.files import UserError, locked, write_whole
from toolformer_dag.lake.table import DamagedPart
from toolformer_dag.lake.verification import DamagedFile
from toolformer_dag.pipeline.plan import Plan
from toolformer_dag.pipeline.raw_shards import NAME as RAW_SHARDS
from toolformer_dag.pipeline.spending import Spent
from toolformer_dag.settings.sections import Settings
from toolformer_dag.settings.setting_types import printable
from toolformer_dag.training.checkpoint_outputs import CHECKPOINTS
from toolformer_dag.training.verify_project import set_aside

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
CHECKPOINT_NAMES = {f"training/{name}" for name in CHECKPOINTS}
NOT_RUN = "not run: an asset before it failed"
REPAIRS = 10
"""How often the job starts again because it met a damaged file, which is set aside then."""


class RunError(UserError):
    """Assets that failed, each with its reason."""


@dataclass
class RunReport:
    """What ran, what it cost, and what failed with which error.

    `unfinished`: what runs before had spent that were killed, failed or interrupted, since a report counted them.
    `set_aside`: files that were found damaged before anything ran. `damaged`: whether something failed because a file
    that it read was damaged.
    """

    ran: list[str] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)
    spent: Spent = field(default_factory=Spent)
    unfinished: Spent = field(default_factory=Spent)
    set_aside: list[DamagedFile] = field(default_factory=list)
    damaged: bool = False

    @property
    def tokens(self) -> int:
        return self.spent.tokens

    @property
    def calls(self) -> int:
        return self.spent.calls

    def raise_for_failures(self) -> None:
        """Raise RunError where something failed."""
        if self.failed:
            failures = [f"{name}: {reason}" for name, reason in self.failed.items() if reason != NOT_RUN]
            rest = "What comes after them did not run (`stale` lists it). Mend the cause and run again."
            raise RunError("\n".join(("some assets failed:", *failures, rest)))


@dataclass(frozen=True)
class Project:
    """`instance`: that of $DAGSTER_HOME, or `.dagster` beside toolformer.toml."""

    plan: Plan
    instance: dg.DagsterInstance

    @staticmethod
    def of(settings: Settings) -> "Project":
        """Load tools and open the instance. Raises ToolError, ModelError, OldLake."""
        return Project(Plan.of(settings), shared_instance(settings.root))

    def stale(self) -> list[StaleAsset]:
        """Return missing and stale assets, upstream first."""
        with self.plan.lake.storage.at_a_glance():
            return stale_assets(outputs(self.plan))

    def others(self) -> list[str]:
        """Return the names of other runs that are going on; steps that would compute the same rows wait for them."""
        end_dead_runs(self.instance)
        return [run.job_name for run in self.instance.get_runs(dg.RunsFilter(statuses=UNFINISHED))]

    def run(self, training: bool, sink: Sink = lambda step: None) -> RunReport:
        """Run the job that brings everything up to date; with `training` also the one that finetunes and evaluates.

        Both end before this returns, and show in the UI. A failed asset stops what depends on it and nothing else.
        `sink` is told how each step gets on. Raises TrainingError before anything runs where finetuning cannot run or
        fit into memory.
        """
        if training and CHECKPOINT_NAMES & {one.name for one in self.stale()}:
            from toolformer_dag.training.launch import check_finetuning

            check_finetuning(self.plan.settings.model, self.plan.settings.training)
        end_dead_runs(self.instance)
        observe(self.instance, self.plan)
        with self.plan.lake.storage.at_a_glance():
            report = RunReport(set_aside=set_aside(self.plan))
        for _ in range(REPAIRS):
            report.failed, report.damaged = {}, False  # what was damaged is set aside by now, and made by this job
            self._run_job(JOB, report, sink)
            if not report.damaged:
                break
        if training and not report.failed:
            self._run_job(TRAINING_JOB, report, sink)
        with self.plan.lake.storage.at_a_glance():
            tell_dagster(outputs(self.plan), self.instance)
        report.unfinished = take_unfinished(self.instance)
        return report

    def _run_job(self, name: str, report: RunReport, sink: Sink) -> None:
        """Run what is stale and what depends on it; its steps skip themselves where nothing changed."""
        by_hand = name == TRAINING_JOB
        stale = [one.name for one in self.stale() if one.by_hand == by_hand]
        everything = with_descendants(outputs(self.plan), stale)
        chosen = [one for one in everything if one in IN_BOTH_JOBS or (one in BY_HAND) == by_hand]
        if not chosen:
            return
        if RAW_SHARDS in chosen:
            chosen.insert(0, SHARD_LIST)
        with completed(self.plan, self.instance, name, list(map(asset_key, chosen)), sink) as (result, folder):
            report.spent += take_spent(folder)
        _add(report, chosen, result)


def _add(report: RunReport, chosen: Sequence[str], result: Result) -> None:
    """Add what a job made and what failed. Raises KeyboardInterrupt where a signal or the UI ended the run."""
    if was_interrupted(result):
        raise KeyboardInterrupt
    landed = {event.asset_key: event.materialization.metadata for event in result.get_asset_materialization_events()}
    errors = {event.step_key: event for event in result.all_events if event.is_step_failure}
    for name in chosen:
        key = asset_key(name)
        if key not in landed:
            _add_failure(report, name, errors.get(STEP if name in SHOWN else key.to_python_identifier()))
        elif name not in (SHARD_LIST, *report.ran) and landed[key].get(UNCHANGED) != dg.MetadataValue.bool(True):
            report.ran.append(name)


def _add_failure(report: RunReport, name: str, failure: dg.DagsterEvent | None) -> None:
    """Add why an asset was not made; without a `failure` an asset before it is what failed."""
    report.failed[name] = NOT_RUN if failure is None else _reason(failure)
    report.damaged |= failure is not None and _is_damage(failure)


def _reason(failure: dg.DagsterEvent) -> str:
    """Return what the asset raised, without Dagster's wrapping; the run's log in the UI has its traceback."""
    error = failure.step_failure_data.error
    while error is not None and error.cause is not None and (error.cls_name or "").startswith("Dagster"):
        error = error.cause
    if error is None:
        return failure.step_failure_data.error_display_string
    if error.cls_name == CRASHED:
        return "its process was killed, as where memory runs out; what it had committed is kept"
    return re.sub(r"^toolformer_dag\.[\w.]+: ", "", error.message.strip())


def _is_damage(failure: dg.DagsterEvent) -> bool:
    error = failure.step_failure_data.error
    while error is not None and error.cls_name != DamagedPart.__name__:
        error = error.cause
    return error is not None


def home(root: Path) -> Path:
    """Return $DAGSTER_HOME, or `.dagster` beside toolformer.toml, made ready on first use.

    Raises UserError where it is no folder, or its name is not UTF-8.
    """
    folder = Path(os.environ.get("DAGSTER_HOME") or root / ".dagster").absolute()
    if folder.exists() and not folder.is_dir():
        raise UserError(f"{printable(folder)} is a file; set DAGSTER_HOME to a folder, or remove it")
    if printable(folder) != str(folder):
        raise UserError(f"{printable(folder)}: the path is not UTF-8; set DAGSTER_HOME to another folder")
    with locked(folder / "instance.lock"):
        if not (folder / "dagster.yaml").exists():
            write_whole(folder / "dagster.yaml", DAGSTER_YAML)
    return folder


def shared_instance(root: Path) -> dg.DagsterInstance:
    """Open the instance of `home(root)`; runs of the command line show in the UI and the other way round."""
    global _opened
    _opened = folder = home(root)
    with locked(folder / "instance.lock"):  # two at once would each make Dagster's databases
        try:
            return dg.DagsterInstance.from_config(str(folder))
        except Exception as error:  # of Dagster's checks, of YAML, of its databases
            if isinstance(error, OSError) or isinstance(error.__cause__, sqlite3.Error):
                raise
            reason = " ".join(str(error).split())[:200]
            raise UserError(
                f"{folder / 'dagster.yaml'} cannot be used ({reason}); correct it, or move it away: it is written anew"
            ) from error


_opened = Path(".dagster")
"""The home that this process opened last, for errors of Dagster's databases, which name no file."""


def history_error(error: sqlite3.Error) -> UserError:
    """Return what to tell of an error of Dagster's databases, on which the lake does not depend."""
    folder = _opened
    damaged = ", ".join(str(file) for file in sorted(folder.rglob("*.db")) if not _is_database(file))
    if damaged:
        return UserError(
            f"Dagster's history is damaged: {damaged}; move {folder} away and run again: the lake keeps every row, "
            "only the list of runs begins anew"
        )
    return UserError(
        f"Dagster's history under {folder} cannot be used ({error}); free space or correct the rights and run again"
    )


def _is_database(file: Path) -> bool:
    try:
        with closing(sqlite3.connect(f"{file.absolute().as_uri()}?mode=ro", uri=True)) as database:
            database.execute("select count(*) from sqlite_master").fetchall()
            return bool(database.execute("pragma quick_check").fetchone() == ("ok",))
    except sqlite3.OperationalError:  # no rights, or in use
        return True
    except sqlite3.DatabaseError:
        return False
