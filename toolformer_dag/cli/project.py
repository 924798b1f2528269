"""A project as the commands see it: its plan, its definitions, the Dagster instance shared with the UI, its runs."""

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import dagster as dg

from assets import JOB, TRAINING_JOB
from assets.metadata import CALLS, TOKENS, UNCHANGED
from assets.outputs import BY_HAND, SHARD_LIST, outputs
from assets.shard_list import observe
from assets.staleness import StaleAsset, stale_assets, with_descendants
from assets.tables import asset_key
from resources.live_runs import UNFINISHED, end_dead_runs
from toolformer_dag.definitions import definitions_of
from toolformer_dag.files import UserError, locked, write_whole
from toolformer_dag.lake.table import DamagedPart
from toolformer_dag.pipeline.plan import Plan
from toolformer_dag.pipeline.raw_shards import NAME as RAW_SHARDS
from toolformer_dag.settings.sections import Settings

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
QUIET = {"loggers": {"console": {"config": {"log_level": "CRITICAL"}}}}
INTERRUPTED = "DagsterExecutionInterruptedError"
NOT_RUN = "not run: an asset before it failed"
REPAIRS = 10
"""How often the job starts again because it met a damaged file, which is set aside then."""


class RunError(UserError):
    """Assets that failed, each with its reason."""


@dataclass
class RunReport:
    """What ran, what it cost, and what failed with which error. Finetuning and evaluation count no tokens.

    `damaged`: whether something failed because a file that it read was damaged.
    """

    ran: list[str] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)
    tokens: int = 0
    calls: int = 0
    damaged: bool = False

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
        return stale_assets(outputs(self.plan), self.instance)

    def others(self) -> list[str]:
        """Return the names of other runs that are going on; steps that would compute the same rows wait for them."""
        end_dead_runs(self.instance)
        return [run.job_name for run in self.instance.get_runs(dg.RunsFilter(statuses=UNFINISHED))]

    def run(self, training: bool) -> RunReport:
        """Run the job that brings everything up to date; with `training` also the one that finetunes and evaluates.

        Both run in this process and show in the UI. A failed asset stops what depends on it and nothing else.
        """
        end_dead_runs(self.instance)
        observe(self.instance, self.plan)
        report = RunReport()
        for _ in range(REPAIRS):
            report.failed, report.damaged = {}, False  # what was damaged is set aside by now, and made by this job
            self._run_job(JOB, [one.name for one in self.stale() if not one.by_hand], report)
            if not report.damaged:
                break
        if training and not report.failed:
            self._run_job(TRAINING_JOB, [one.name for one in self.stale() if one.by_hand], report)
        return report

    def _run_job(self, name: str, stale: Sequence[str], report: RunReport) -> None:
        """Run what is stale and what depends on it; its steps skip themselves where nothing changed."""
        everything = with_descendants(outputs(self.plan), stale)
        chosen = [one for one in everything if (one in BY_HAND) == (name == TRAINING_JOB)]
        if not chosen:
            return
        if RAW_SHARDS in chosen:
            chosen.insert(0, SHARD_LIST)
        job = definitions_of(self.plan).resolve_job_def(name)
        result = job.execute_in_process(
            instance=self.instance,
            asset_selection=list(map(asset_key, chosen)),
            raise_on_error=False,
            run_config=QUIET,
        )
        _add(report, chosen, result)


def _add(report: RunReport, chosen: Sequence[str], result: dg.ExecuteInProcessResult) -> None:
    landed = {event.asset_key: event.materialization for event in result.get_asset_materialization_events()}
    errors = {event.step_key: event for event in result.all_events if event.is_step_failure}
    for name in chosen:
        key = asset_key(name)
        if (failure := errors.get(key.to_python_identifier())) is not None:
            report.failed[name] = _reason(failure)
            report.damaged |= _is_damage(failure)
        elif key not in landed:
            report.failed[name] = NOT_RUN
        else:
            metadata = landed[key].metadata
            report.tokens += _number(metadata.get(TOKENS))
            report.calls += _number(metadata.get(CALLS))
            if name not in (SHARD_LIST, *report.ran) and not _is_true(metadata.get(UNCHANGED)):
                report.ran.append(name)


def _reason(event: dg.DagsterEvent) -> str:
    """Return what the asset raised, without Dagster's wrapping; the run's log in the UI has its traceback.

    Raises KeyboardInterrupt where a signal or the UI ended the run.
    """
    failure = event.step_failure_data
    error = failure.error
    while error is not None and error.cause is not None and (error.cls_name or "").startswith("Dagster"):
        error = error.cause
    if error is None:
        return failure.error_display_string
    if error.cls_name in (INTERRUPTED, "KeyboardInterrupt"):
        raise KeyboardInterrupt
    return re.sub(r"^toolformer_dag\.[\w.]+: ", "", error.message.strip())


def _is_damage(event: dg.DagsterEvent) -> bool:
    error = event.step_failure_data.error
    while error is not None and error.cls_name != DamagedPart.__name__:
        error = error.cause
    return error is not None


def _number(value: dg.MetadataValue | None) -> int:
    return value.value or 0 if isinstance(value, dg.IntMetadataValue) else 0


def _is_true(value: dg.MetadataValue | None) -> bool:
    return isinstance(value, dg.BoolMetadataValue) and bool(value.value)


def home(root: Path) -> Path:
    """Return $DAGSTER_HOME, or `.dagster` beside toolformer.toml, made ready on first use."""
    folder = Path(os.environ.get("DAGSTER_HOME") or root / ".dagster").absolute()
    os.environ["DAGSTER_HOME"] = str(folder)  # Dagster takes no relative path
    with locked(folder / "instance.lock"):
        if not (folder / "dagster.yaml").exists():
            write_whole(folder / "dagster.yaml", DAGSTER_YAML)
    return folder


def shared_instance(root: Path) -> dg.DagsterInstance:
    """Open the instance of `home(root)`; runs of the command line show in the UI and the other way round."""
    folder = home(root)
    with locked(folder / "instance.lock"):  # two first openings at once would each make Dagster's databases
        return dg.DagsterInstance.get()
