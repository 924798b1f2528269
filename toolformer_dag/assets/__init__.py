"""The asset graph and its two jobs; the sensor that observes the shard files and starts the first job."""

from collections.abc import Mapping, Sequence
from typing import Any

import dagster as dg

from toolformer_dag.assets.checkpoint_assets import checkpoint
from toolformer_dag.assets.declaration import AssetDeclaration, asset_key, build_asset
from toolformer_dag.assets.measurement_assets import list_manual_assets, measurement
from toolformer_dag.assets.staleness import SHARD_LIST, list_stale_assets, observe, shard_list, tell_dagster
from toolformer_dag.assets.tables import needs_preparation, prepared_tool, table
from toolformer_dag.assets.traces import build_trace_outputs
from toolformer_dag.assets.warehouse_assets import (
    DATASET,
    SHOWN,
    WAREHOUSE,
    build_paper_assets,
    dataset,
    paper_table,
    tell_tables,
    warehouse,
)
from toolformer_dag.computing.plan import Plan
from toolformer_dag.evaluation.measurements import TABLES
from toolformer_dag.identity import fingerprint
from toolformer_dag.lake.session import session
from toolformer_dag.pipeline.stages import list_shown_outputs, list_table_outputs
from toolformer_dag.resources.live_runs import UNFINISHED, free_slots_of_ended_runs
from toolformer_dag.resources.step_processes import executor_of
from toolformer_dag.traces.trace_stages import trace_tables
from toolformer_dag.training.checkpoints import checkpoints

IN_BOTH_JOBS = (WAREHOUSE, DATASET, *SHOWN)
"""The assets that both jobs make: they show the first job's rows and the second job's measurements."""


def outputs(plan: Plan) -> list[AssetDeclaration]:
    """Return the assets of a plan, each after its dependencies; ccnet/shard_list is not among them."""
    return [
        *_build_stage_assets(plan),
        *_build_training_assets(plan),
        *_build_warehouse_assets(plan),
        *_build_conversation_assets(plan),
    ]


def _build_stage_assets(plan: Plan) -> list[AssetDeclaration]:
    """Return the assets of prepared tools and of the stages' tables."""
    prepared_tools = [prepared_tool(lane) for lane in plan.lanes if needs_preparation(lane.tool)]
    tables = [table(output) for output in list_table_outputs(plan)]
    return prepared_tools + tables


def _build_training_assets(plan: Plan) -> list[AssetDeclaration]:
    """Return the assets of checkpoints and of their measurements."""
    trained = [checkpoint(plan, name) for name in checkpoints(plan.settings)]
    measured = [measurement(plan, name) for name in TABLES]
    return trained + measured


def _build_warehouse_assets(plan: Plan) -> list[AssetDeclaration]:
    """Return the assets that show the others: the warehouse, C* as a data set, the paper's tables."""
    paper_tables = [paper_table(plan, name) for name in SHOWN]
    return [warehouse(plan, _list_warehouse_inputs(plan)), dataset(plan), *paper_tables]


def _build_conversation_assets(plan: Plan) -> list[AssetDeclaration]:
    """Return the assets of recorded conversations; empty if the settings name none."""
    tables = [table(output) for output in trace_tables(plan)]
    return tables + build_trace_outputs(plan)


def _list_warehouse_inputs(plan: Plan) -> list[str]:
    """Return the names of the assets whose rows the warehouse holds."""
    stage_tables = [output.name for output in list_shown_outputs(plan)]
    return stage_tables + list_manual_assets(plan)


def build_outputs_of_all_rounds(plan: Plan) -> list[AssetDeclaration]:
    """Return the assets of a plan and of the earlier rounds that it starts from, once each, in the order of making.

    A later round reads the tool calls and the checkpoint of the round before.
    """
    by_name: dict[str, AssetDeclaration] = {}
    for project in plan.projects:
        by_name |= {output.name: output for output in outputs(project)}
    return list(by_name.values())


def graph(plan: Plan) -> list[dg.AssetsDefinition]:
    """Return Dagster's assets of a plan, without those of the earlier rounds that it starts from."""
    new_outputs = _build_new_outputs(plan)
    paper_names = {plan.named(name) for name in SHOWN}
    paper_outputs = [output for output in new_outputs if output.name in paper_names]
    other_outputs = [output for output in new_outputs if output.name not in paper_names]
    assets = [build_asset(output, plan.suffix) for output in other_outputs]
    return [*_build_first_round_assets(plan), *assets, build_paper_assets(paper_outputs, plan)]


def _build_first_round_assets(plan: Plan) -> list[dg.AssetsDefinition]:
    """Return the list of shard files for a first round; empty for later rounds, which share it."""
    return [shard_list(plan)] if plan.start is None else []


def _build_new_outputs(plan: Plan) -> list[AssetDeclaration]:
    """Return the assets of a plan that no earlier round has."""
    if plan.start is None:
        return outputs(plan)
    earlier_names = {output.name for output in build_outputs_of_all_rounds(plan.start)}
    return [output for output in outputs(plan) if output.name not in earlier_names]


def tell_of_lake(plan: Plan, instance: dg.DagsterInstance) -> None:
    """Report to a Dagster instance what the lake holds, whoever made it, and the current shard files."""
    observe(instance, plan)
    tell_dagster(build_outputs_of_all_rounds(plan), instance)
    for project in plan.projects:
        tell_tables(outputs(project), project, instance)


JOB = "bring_up_to_date"
"""Computes what is out of date and skips the rest: the UI's button, `run` and `stale --run`."""
TRAINING_JOB = "finetune_and_evaluate"
"""Finetunes and evaluates: `run`, and a person's button in the UI."""
QUEUED = (*UNFINISHED, dg.DagsterRunStatus.QUEUED)
"""States of a run that has not ended, one that waits for its turn included."""


def jobs(plan: Plan) -> Sequence[Any]:  # Dagster does not export their type
    """Return the jobs JOB and TRAINING_JOB for the assets of this plan; earlier rounds have jobs of their own."""
    return [_build_computing_job(plan), _build_training_job(plan)]


def _build_computing_job(plan: Plan) -> Any:
    """Build the job that makes all assets except checkpoints and their measurements."""
    by_hand = list_manual_assets(plan)
    computed = [output.name for output in outputs(plan) if output.name not in by_hand]

    return _build_job(
        plan,
        name=JOB,
        assets=[SHARD_LIST, *computed],
        description="Compute what is out of date, from shards to C* and the warehouse; skip the rest.",
    )


def _build_training_job(plan: Plan) -> Any:
    """Return the job that makes checkpoints, their measurements and what shows these."""
    shared = [plan.named(name) for name in IN_BOTH_JOBS]
    return _build_job(
        plan,
        name=TRAINING_JOB,
        assets=[*list_manual_assets(plan), *shared],
        description="Finetune on C* and on C, measure both against the base model, and show it: warehouse, tables.",
    )


def _build_job(plan: Plan, *, name: str, assets: Sequence[str], description: str) -> Any:
    """Return a job that makes the assets of these names."""
    return dg.define_asset_job(
        f"{name}{plan.suffix}",
        [asset_key(asset) for asset in assets],
        description=description,
        executor_def=executor_of(plan.settings.execution.steps_at_once),
    )


def build_shard_sensor(plan: Plan) -> dg.SensorDefinition:
    """Build the sensor that reports changed shard files to Dagster, every `execution.sensor_seconds`.

    If `execution.automation` is on, it also requests a run of JOB for what is out of date.
    """
    execution = plan.settings.execution
    starts = f"starts {JOB}" if execution.automation else "starts nothing: execution.automation is off"

    @dg.sensor(
        name="shard_files",
        job_name=JOB if execution.automation else None,  # the job's page names the sensors that start it
        minimum_interval_seconds=execution.sensor_seconds,
        default_status=dg.DefaultSensorStatus.RUNNING,
        description=f"Observes the shard files, which shows what they make unsynced; {starts}.",
    )
    def check_shard_files(context: dg.SensorEvaluationContext) -> dg.SensorResult | dg.SkipReason:
        return _observe_and_request_run(context, plan)

    return check_shard_files


def _observe_and_request_run(context: dg.SensorEvaluationContext, plan: Plan) -> dg.SensorResult | dg.SkipReason:
    """Report changed shard files; with automation, return a request to run JOB if something is out of date."""
    free_slots_of_ended_runs(context.instance)  # or the next run from the UI would wait for ever
    changed = _report_changed_files(context.instance, plan)
    if plan.settings.execution.automation:
        return _request_run_or_skip(context, plan.fresh())
    return dg.SkipReason("observed" if changed else "no shard file changed; automation is off")


def _report_changed_files(instance: dg.DagsterInstance, plan: Plan) -> bool:
    """Report the shard files to Dagster if they changed.

    The first look at the shard files counts as a change too. The lake may have been moved here, with tables that this
    Dagster instance does not know, so everything that it holds is reported.

    Returns:
        Whether the files changed.
    """
    changed = observe(instance, plan)
    if changed:
        with session():  # what is read of the lake is cached in the block
            tell_of_lake(plan.fresh(), instance)
    return changed


def _request_run_or_skip(context: dg.SensorEvaluationContext, plan: Plan) -> dg.SensorResult | dg.SkipReason:
    """Request a run of JOB, or say why none is needed.

    The sensor's cursor holds the project's state at the last request, so that a failed run is not repeated in the same
    state.
    """
    if _is_queued_or_running(context.instance):
        return dg.SkipReason("the job is running already")

    all_outputs = outputs(plan)
    state = _hash_project_state(plan, all_outputs)
    last_run = _find_last_run(context.instance)
    if context.cursor == state and _did_not_succeed(last_run):
        return dg.SkipReason("the last run did not succeed, and nothing changed since")

    to_compute = _list_reasons_to_run(plan, all_outputs)
    if not to_compute:
        return dg.SkipReason("nothing is out of date")
    return _build_request(state, to_compute, last_run)


def _build_request(
    state: str, to_compute: Mapping[str, Sequence[str]], last_run: dg.DagsterRun | None
) -> dg.SensorResult:
    """Return a request to run JOB, which makes the project's state the sensor's cursor."""
    request = dg.RunRequest(run_key=_build_run_key(state, to_compute, last_run))
    return dg.SensorResult([request], cursor=state)


def _is_queued_or_running(instance: dg.DagsterInstance) -> bool:
    """Return whether a run of JOB has not ended yet."""
    return instance.get_runs_count(dg.RunsFilter(job_name=JOB, statuses=list(QUEUED))) > 0


def _find_last_run(instance: dg.DagsterInstance) -> dg.DagsterRun | None:
    """Return the newest run of JOB; None if there was none."""
    return next(iter(instance.get_runs(dg.RunsFilter(job_name=JOB), limit=1)), None)


def _hash_project_state(plan: Plan, all_outputs: Sequence[AssetDeclaration]) -> str:
    """Return a hash of a project's settings, tools, shard files and recorded conversations."""
    code_versions = {output.name: output.code_version for output in all_outputs}
    return fingerprint([code_versions, plan.stamps, plan.conversation_stamps])


def _did_not_succeed(run: dg.DagsterRun | None) -> bool:
    """Return whether there is a run and it did not succeed."""
    return run is not None and run.status is not dg.DagsterRunStatus.SUCCESS


def _build_run_key(state: str, to_compute: Mapping[str, Sequence[str]], last_run: dg.DagsterRun | None) -> str:
    """Return the key of a requested run; Dagster starts no second run with the same key.

    The last run is part of it: rows that are lost twice in the same state need two runs.
    """
    last_run_id = last_run.run_id if last_run else ""
    return fingerprint([state, to_compute, last_run_id])


def _list_reasons_to_run(plan: Plan, all_outputs: Sequence[AssetDeclaration]) -> dict[str, list[str]]:
    """List the stale assets for which automation starts JOB, with the reasons.

    Training, measurements and retries of lost rows are left to a person.
    """
    with session():
        stale = list_stale_assets(all_outputs)

    by_hand = list_manual_assets(plan)
    lines_by_name = {}
    for name, reasons in stale.items():
        if name not in by_hand and not reasons.retry_only:
            lines_by_name[name] = list(reasons.lines)

    return lines_by_name
