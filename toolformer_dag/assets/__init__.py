"""The asset graph and its two jobs; the sensor that observes the shard files and starts the first job."""

from collections.abc import Mapping, Sequence
from typing import Any

import dagster as dg

from toolformer_dag.assets.checkpoint_assets import declare_checkpoint
from toolformer_dag.assets.declaration import AssetDeclaration, build_asset, build_asset_key
from toolformer_dag.assets.measurement_assets import declare_measurement, list_manual_asset_names
from toolformer_dag.assets.staleness import (
    SHARD_LIST_ASSET,
    build_shard_list_asset,
    find_stale_assets,
    report_shard_files,
    report_stored_assets,
)
from toolformer_dag.assets.tables import declare_prepared_tool, declare_table, needs_preparation
from toolformer_dag.assets.traces import list_trace_outputs
from toolformer_dag.assets.warehouse_assets import (
    DATASET_ASSET,
    PAPER_TABLE_ASSETS,
    WAREHOUSE_ASSET,
    build_paper_assets,
    declare_dataset,
    declare_paper_table,
    declare_warehouse,
    report_paper_tables,
)
from toolformer_dag.computing.plan import Plan
from toolformer_dag.evaluation.measurements import TABLES_BY_MEASUREMENT
from toolformer_dag.identity import fingerprint
from toolformer_dag.lake.session import enter_session
from toolformer_dag.pipeline.stages import list_shown_outputs, list_table_outputs
from toolformer_dag.resources.live_runs import UNFINISHED_STATUSES, free_slots_of_ended_runs
from toolformer_dag.resources.step_processes import build_executor
from toolformer_dag.traces.trace_stages import build_trace_tables
from toolformer_dag.training.checkpoints import build_checkpoints_by_name

ASSETS_IN_BOTH_JOBS = (WAREHOUSE_ASSET, DATASET_ASSET, *PAPER_TABLE_ASSETS)
"""The assets that both jobs make: they show the first job's rows and the second job's measurements."""


def list_outputs(plan: Plan) -> list[AssetDeclaration]:
    """Return the declared assets of a plan, each after its dependencies. The list of shard files is not among them."""
    return [
        *_build_stage_assets(plan),
        *_build_training_assets(plan),
        *_build_warehouse_assets(plan),
        *_build_conversation_assets(plan),
    ]


def _build_stage_assets(plan: Plan) -> list[AssetDeclaration]:
    """Return the assets of prepared tools (what tools make before their first call) and of the stages' tables."""
    prepared_tools = [declare_prepared_tool(lane) for lane in plan.lanes if needs_preparation(lane.tool)]
    tables = [declare_table(output) for output in list_table_outputs(plan)]
    return prepared_tools + tables


def _build_training_assets(plan: Plan) -> list[AssetDeclaration]:
    """Return the assets of the finetuned checkpoints, and of the measurements that compare them."""
    checkpoints = [declare_checkpoint(plan, name) for name in build_checkpoints_by_name(plan.settings)]
    measurements = [declare_measurement(plan, name) for name in TABLES_BY_MEASUREMENT]
    return checkpoints + measurements


def _build_warehouse_assets(plan: Plan) -> list[AssetDeclaration]:
    """Return the assets that show the others: the warehouse, C* as a data set, and the paper's tables."""
    warehouse = declare_warehouse(plan, _list_warehouse_inputs(plan))
    dataset = declare_dataset(plan)
    paper_tables = [declare_paper_table(plan, name) for name in PAPER_TABLE_ASSETS]
    return [warehouse, dataset, *paper_tables]


def _build_conversation_assets(plan: Plan) -> list[AssetDeclaration]:
    """Return the assets of recorded conversations. Empty if the settings name none."""
    tables = [declare_table(output) for output in build_trace_tables(plan)]
    return tables + list_trace_outputs(plan)


def _list_warehouse_inputs(plan: Plan) -> list[str]:
    """Return the names of the assets whose rows the warehouse holds."""
    stage_tables = [output.name for output in list_shown_outputs(plan)]
    return stage_tables + list_manual_asset_names(plan)


def build_outputs_of_all_rounds(plan: Plan) -> list[AssetDeclaration]:
    """Return the declared assets of a plan and of the earlier rounds that it starts from, in the order of making.

    A later round of annotation reads the calls and the checkpoint of the round before. Assets that rounds share are
    listed once.
    """
    output_by_name: dict[str, AssetDeclaration] = {}
    for round_plan in plan.plans_by_round:
        output_by_name |= {output.name: output for output in list_outputs(round_plan)}
    return list(output_by_name.values())


def build_assets(plan: Plan) -> list[dg.AssetsDefinition]:
    """Build the Dagster assets of a plan, without those of the earlier rounds of annotation that it starts from.

    All tables of the paper are made together, by a single step. Each other asset is made by a step of its own.
    """
    new_outputs = _build_new_outputs(plan)
    paper_names = {plan.add_round_suffix(name) for name in PAPER_TABLE_ASSETS}
    paper_outputs = [output for output in new_outputs if output.name in paper_names]
    other_outputs = [output for output in new_outputs if output.name not in paper_names]

    single_assets = [build_asset(output, plan.round_suffix) for output in other_outputs]
    return [*_build_first_round_assets(plan), *single_assets, build_paper_assets(paper_outputs, plan)]


def _build_first_round_assets(plan: Plan) -> list[dg.AssetsDefinition]:
    """Return the asset of the list of shard files for a first round. Empty for later rounds, which share it."""
    if plan.previous_plan is not None:
        return []
    return [build_shard_list_asset(plan)]


def _build_new_outputs(plan: Plan) -> list[AssetDeclaration]:
    """Return the declared assets of a plan that no earlier round has."""
    if plan.previous_plan is None:
        return list_outputs(plan)
    earlier_names = {output.name for output in build_outputs_of_all_rounds(plan.previous_plan)}
    return [output for output in list_outputs(plan) if output.name not in earlier_names]


def report_lake(plan: Plan, instance: dg.DagsterInstance) -> None:
    """Report to a Dagster instance what the lake holds, whoever has made it, and the current shard files.

    Then the instance's pages show assets that the command line or another machine has made.
    """
    report_shard_files(instance, plan)
    report_stored_assets(build_outputs_of_all_rounds(plan), instance)
    for round_plan in plan.plans_by_round:
        report_paper_tables(list_outputs(round_plan), round_plan, instance)


COMPUTING_JOB = "bring_up_to_date"
"""Computes what is out of date and skips the rest: the UI's button, `run` and `stale --run`."""
TRAINING_JOB = "finetune_and_evaluate"
"""Finetunes and evaluates: `run`, and a person's button in the UI."""
UNFINISHED_OR_QUEUED = (*UNFINISHED_STATUSES, dg.DagsterRunStatus.QUEUED)
"""States of a run that has not ended, one that waits for its turn included."""


def build_jobs(plan: Plan) -> Sequence[Any]:  # Dagster does not export their type
    """Return the computing job and the training job for the assets of a plan. Earlier rounds have jobs of their own."""
    return [_build_computing_job(plan), _build_training_job(plan)]


def _build_computing_job(plan: Plan) -> Any:
    """Return the job that makes all assets except checkpoints and their measurements, which only a person starts."""
    manual_names = list_manual_asset_names(plan)
    computed_names = [output.name for output in list_outputs(plan) if output.name not in manual_names]

    return _build_job(
        plan,
        job_name=COMPUTING_JOB,
        asset_names=[SHARD_LIST_ASSET, *computed_names],
        description="Compute what is out of date, from shards to C* and the warehouse; skip the rest.",
    )


def _build_training_job(plan: Plan) -> Any:
    """Return the job that makes checkpoints, their measurements, and the assets that show these."""
    showing_names = [plan.add_round_suffix(name) for name in ASSETS_IN_BOTH_JOBS]
    return _build_job(
        plan,
        job_name=TRAINING_JOB,
        asset_names=[*list_manual_asset_names(plan), *showing_names],
        description="Finetune on C* and on C, measure both against the base model, and show it: warehouse, tables.",
    )


def _build_job(plan: Plan, *, job_name: str, asset_names: Sequence[str], description: str) -> Any:
    """Return Dagster's job that makes the assets of these names."""
    return dg.define_asset_job(
        f"{job_name}{plan.round_suffix}",
        [build_asset_key(asset) for asset in asset_names],
        description=description,
        executor_def=build_executor(plan.settings.execution.steps_at_once),
    )


def build_shard_sensor(plan: Plan) -> dg.SensorDefinition:
    """Build the sensor that reports changed shard files to Dagster, every `execution.sensor_seconds`.

    A sensor is a function that Dagster calls again and again. If `execution.automation` is on, this one also requests
    a run of the computing job for what is out of date.
    """
    execution = plan.settings.execution
    starts = f"starts {COMPUTING_JOB}" if execution.automation else "starts nothing: execution.automation is off"

    @dg.sensor(
        name="shard_files",
        job_name=COMPUTING_JOB if execution.automation else None,  # the job's page names the sensors that start it
        minimum_interval_seconds=execution.sensor_seconds,
        default_status=dg.DefaultSensorStatus.RUNNING,
        description=f"Observes the shard files, which shows what they make unsynced; {starts}.",
    )
    def check_shard_files(context: dg.SensorEvaluationContext) -> dg.SensorResult | dg.SkipReason:
        return _report_and_request_run(context, plan)

    return check_shard_files


def _report_and_request_run(context: dg.SensorEvaluationContext, plan: Plan) -> dg.SensorResult | dg.SkipReason:
    """Report changed shard files; with automation on, request a run of the computing job if something is out of date.

    Returns:
        The request, or the reason why no run is requested.
    """
    # A run that was killed still occupies its place: the next run from the UI would wait for ever.
    free_slots_of_ended_runs(context.instance)

    has_changed = _report_changed_files(context.instance, plan)
    if plan.settings.execution.automation:
        return _request_run_or_skip(context, plan.copy_without_cache())
    return dg.SkipReason("observed" if has_changed else "no shard file changed; automation is off")


def _report_changed_files(instance: dg.DagsterInstance, plan: Plan) -> bool:
    """Tell Dagster's pages if shard files (files of the corpus) have changed, and then also what tables the lake holds.

    The first look at the shard files counts as a change. The lake may then have been moved here, with tables that this
    Dagster instance does not know.

    Returns:
        Whether the files have changed.
    """
    has_changed = report_shard_files(instance, plan)
    if has_changed:
        with enter_session():  # inside, the lake's records are read only once
            report_lake(plan.copy_without_cache(), instance)
    return has_changed


def _request_run_or_skip(context: dg.SensorEvaluationContext, plan: Plan) -> dg.SensorResult | dg.SkipReason:
    """Request a run of the computing job, or return why none is needed.

    The sensor's cursor, which Dagster stores, is a hash of the project's state at the last request. So a failed run is
    not repeated in the same state.
    """
    if _has_unfinished_run(context.instance):
        return dg.SkipReason("the job is running already")

    all_outputs = list_outputs(plan)
    project_state = _hash_project_state(plan, all_outputs)
    last_run = _find_last_run(context.instance)
    is_same_state = context.cursor == project_state
    if is_same_state and _is_unsuccessful_run(last_run):
        return dg.SkipReason("the last run did not succeed, and nothing changed since")

    reasons_by_asset = _list_reasons_to_run(plan, all_outputs)
    if not reasons_by_asset:
        return dg.SkipReason("nothing is out of date")
    return _build_run_request(project_state, reasons_by_asset, last_run)


def _build_run_request(
    project_state: str, reasons_by_asset: Mapping[str, Sequence[str]], last_run: dg.DagsterRun | None
) -> dg.SensorResult:
    """Return a request to run the computing job. It also makes the project's state the sensor's cursor.

    Args:
        project_state: The hash of the project's state.
        reasons_by_asset: Why each stale asset is stale.
        last_run: The newest run of the job. None if there was none.
    """
    run_key = _build_run_key(project_state, reasons_by_asset, last_run)
    return dg.SensorResult([dg.RunRequest(run_key=run_key)], cursor=project_state)


def _has_unfinished_run(instance: dg.DagsterInstance) -> bool:
    """Return whether a run of the computing job has not ended yet, or waits for its turn."""
    unfinished = dg.RunsFilter(job_name=COMPUTING_JOB, statuses=list(UNFINISHED_OR_QUEUED))
    return instance.get_runs_count(unfinished) > 0


def _find_last_run(instance: dg.DagsterInstance) -> dg.DagsterRun | None:
    """Return the newest run of the computing job, or None if there was none."""
    newest_runs = instance.get_runs(dg.RunsFilter(job_name=COMPUTING_JOB), limit=1)
    return next(iter(newest_runs), None)


def _hash_project_state(plan: Plan, all_outputs: Sequence[AssetDeclaration]) -> str:
    """Return a hash of everything that can make assets stale: settings, tools, shard files, recorded conversations."""
    code_version_by_asset = {output.name: output.code_version for output in all_outputs}
    return fingerprint([code_version_by_asset, plan.stamp_by_shard, plan.stamp_by_conversation_shard])


def _is_unsuccessful_run(run: dg.DagsterRun | None) -> bool:
    """Return whether there is a run and it did not succeed."""
    return run is not None and run.status is not dg.DagsterRunStatus.SUCCESS


def _build_run_key(
    project_state: str, reasons_by_asset: Mapping[str, Sequence[str]], last_run: dg.DagsterRun | None
) -> str:
    """Return the key of a requested run. Dagster starts no second run with the same key.

    The last run is part of the key: if rows are lost twice in the same state, two runs are needed.

    Args:
        project_state: The hash of the project's state.
        reasons_by_asset: Why each stale asset is stale.
        last_run: The newest run of the job. None if there was none.
    """
    last_run_id = last_run.run_id if last_run else ""
    return fingerprint([project_state, reasons_by_asset, last_run_id])


def _list_reasons_to_run(plan: Plan, all_outputs: Sequence[AssetDeclaration]) -> dict[str, list[str]]:
    """Return the stale assets for which automation starts the computing job, each with the reasons as lines.

    Training, measurements and retries of lost rows are left to a person.
    """
    with enter_session():  # inside, the lake's records are read only once
        reasons_by_asset = find_stale_assets(all_outputs)

    manual_names = list_manual_asset_names(plan)
    lines_by_asset = {}
    for asset_name, reasons in reasons_by_asset.items():
        if asset_name not in manual_names and not reasons.is_retry_only:
            lines_by_asset[asset_name] = list(reasons.lines)

    return lines_by_asset
