"""The asset graph and its two jobs; the sensor that observes the shard files and starts the first job."""

from collections.abc import Mapping, Sequence
from typing import Any

import dagster as dg

from toolformer_dag.assets.by_hand import BY_HAND, checkpoint, measurement
from toolformer_dag.assets.declaration import AssetDeclaration, asset_key, asset_of
from toolformer_dag.assets.staleness import SHARD_LIST, observe, shard_list, stale_assets, tell_dagster
from toolformer_dag.assets.tables import prepared_tool, prepares, table
from toolformer_dag.assets.traces import trace_outputs
from toolformer_dag.assets.warehouse_assets import (
    DATASET,
    SHOWN,
    WAREHOUSE,
    dataset,
    paper_assets,
    paper_table,
    tell_tables,
    warehouse,
)
from toolformer_dag.computing.plan import Plan
from toolformer_dag.computing.reasons import Reasons
from toolformer_dag.evaluation.measurements import TABLES
from toolformer_dag.identity import fingerprint
from toolformer_dag.lake.session import session
from toolformer_dag.pipeline.stages import shown_outputs, table_outputs
from toolformer_dag.resources.live_runs import UNFINISHED, free_slots_of_ended_runs
from toolformer_dag.resources.step_processes import executor_of
from toolformer_dag.traces.trace_stages import trace_tables
from toolformer_dag.training.checkpoint_outputs import CHECKPOINTS

IN_BOTH_JOBS = (WAREHOUSE, DATASET, *SHOWN)
"""What is made of the first job's rows and of the second job's measurements."""


def outputs(plan: Plan) -> list[AssetDeclaration]:
    """Return every asset of a plan but ccnet/shard_list, each after those that it depends on.

    In this order: prepared tools, the tables of the stages, checkpoints, measurements, the warehouse with all of these,
    C* as a data set, the tables of the paper, and what recorded conversations give.
    """
    by_hand = [plan.named(name) for name in BY_HAND]
    in_warehouse = [*(output.name for output in shown_outputs(plan)), *by_hand]
    return [
        *(prepared_tool(lane) for lane in plan.lanes if prepares(lane.tool)),
        *map(table, table_outputs(plan)),
        *(checkpoint(plan, name) for name in CHECKPOINTS),
        *(measurement(plan, name) for name in TABLES),
        warehouse(plan, in_warehouse),
        dataset(plan),
        *(paper_table(plan, name) for name in SHOWN),
        *map(table, trace_tables(plan)),
        *trace_outputs(plan),
    ]


def outputs_so_far(plan: Plan) -> list[AssetDeclaration]:
    """Return every asset of a plan and of those that it starts from, once each, in the order in which they are made.

    A plan of a later round starts from that of the round before: it reads its lanes and its checkpoint.
    """
    by_name: dict[str, AssetDeclaration] = {}
    for project in plan.projects:
        by_name |= {output.name: output for output in outputs(project)}
    return list(by_name.values())


def graph(plan: Plan) -> list[dg.AssetsDefinition]:
    """Return every asset that a plan has beside those of the plans that it starts from."""
    before = {output.name for output in outputs_so_far(plan.start)} if plan.start else set()
    added = [output for output in outputs(plan) if output.name not in before]
    paper_names = set(map(plan.named, SHOWN))
    assets = [asset_of(output, plan.suffix) for output in added if output.name not in paper_names]
    assets.append(paper_assets([output for output in added if output.name in paper_names], plan))
    return assets if plan.start else [shard_list(plan), *assets]


def tell_of_lake(plan: Plan, instance: dg.DagsterInstance) -> None:
    """Let the page of an instance show what the lake holds, whoever made it, and the shard files as they are now."""
    observe(instance, plan)
    tell_dagster(outputs_so_far(plan), instance)
    for project in plan.projects:
        tell_tables(outputs(project), project, instance)


JOB = "bring_up_to_date"
"""Computes what is out of date and skips the rest: the UI's button, `run` and `stale --run`."""
TRAINING_JOB = "finetune_and_evaluate"
"""Finetunes and evaluates: `run`, and a person's button in the UI."""
QUEUED = (*UNFINISHED, dg.DagsterRunStatus.QUEUED)
"""States of a run that has not ended, one that waits for its turn included."""


def jobs(plan: Plan) -> Sequence[Any]:  # Dagster does not export their type
    """Return the jobs JOB and TRAINING_JOB for the assets of this plan.

    Plans that it starts from have jobs of their own. What is made of the assets of both is in both.
    """
    executor = executor_of(plan.settings.execution.steps_at_once)
    by_hand = list(map(plan.named, BY_HAND))
    job_assets = [SHARD_LIST, *(output.name for output in outputs(plan) if output.name not in by_hand)]
    training_job_assets = [*by_hand, *map(plan.named, IN_BOTH_JOBS)]
    return [
        dg.define_asset_job(
            f"{JOB}{plan.suffix}",
            list(map(asset_key, job_assets)),
            description="Compute what is out of date, from shards to C* and the warehouse; skip the rest.",
            executor_def=executor,
        ),
        dg.define_asset_job(
            f"{TRAINING_JOB}{plan.suffix}",
            list(map(asset_key, training_job_assets)),
            description="Finetune on C* and on C, measure both against the base model, and show it: warehouse, tables.",
            executor_def=executor,
        ),
    ]


def shard_sensor(plan: Plan) -> dg.SensorDefinition:
    """Return the sensor that looks at the shard files every `execution.sensor_seconds`. Each time it

    1. frees the slots of pools that killed runs still hold, since the next run would wait for them
    2. reports the files to Dagster where they changed, so that what reads them shows as unsynced
    3. with `execution.automation`, requests JOB where something is out of date, once per change (`_requested`)

    Without automation it names no job, so that the page of the job does not say that it would be started.
    """
    automation = plan.settings.execution.automation
    starts = f"starts {JOB}" if automation else "starts nothing: execution.automation is off"

    @dg.sensor(
        name="shard_files",
        job_name=JOB if automation else None,
        minimum_interval_seconds=plan.settings.execution.sensor_seconds,
        default_status=dg.DefaultSensorStatus.RUNNING,
        description=f"Observes the shard files, which shows what they make unsynced; {starts}.",
    )
    def notice(context: dg.SensorEvaluationContext) -> dg.SensorResult | dg.SkipReason:
        free_slots_of_ended_runs(context.instance)  # or the next run from the UI would wait for ever
        changed = observe(context.instance, plan)
        if changed:  # a lake that was moved here is seen for the first time, and so are the files of a first run
            with session():
                tell_of_lake(plan.fresh(), context.instance)
        if automation:
            return _requested(context, plan.fresh())
        return dg.SkipReason("observed" if changed else "no shard file changed; automation is off")

    return notice


def _requested(context: dg.SensorEvaluationContext, plan: Plan) -> dg.SensorResult | dg.SkipReason:
    """Return a request to run JOB, or the reason for none: it runs already, failed on this state, has nothing to do.

    The state is a hash of settings, tools and shard files; the sensor's cursor holds that of the last request. So what
    failed, or was ended by a person, is not tried again until one of them changes.
    """
    instance = context.instance
    if instance.get_runs_count(dg.RunsFilter(job_name=JOB, statuses=list(QUEUED))):
        return dg.SkipReason("the job is running already")
    all_outputs = outputs(plan)
    state = fingerprint(
        [{output.name: output.code_version for output in all_outputs}, plan.stamps, plan.conversation_stamps]
    )
    last_run = next(iter(instance.get_runs(dg.RunsFilter(job_name=JOB), limit=1)), None)
    did_not_succeed = last_run is not None and last_run.status is not dg.DagsterRunStatus.SUCCESS
    if did_not_succeed and context.cursor == state:
        return dg.SkipReason("the last run did not succeed, and nothing changed since")
    with session():
        wanted = wanted_runs(stale_assets(all_outputs))
    if not wanted:
        return dg.SkipReason("nothing is out of date")
    # Dagster starts no second run with the same key. The last run is part of it, since rows may be lost twice.
    last_run_id = last_run.run_id if last_run else ""
    request = dg.RunRequest(run_key=fingerprint([state, wanted, last_run_id]))
    return dg.SensorResult([request], cursor=state)


def wanted_runs(stale: Mapping[str, Reasons]) -> dict[str, list[str]]:
    """Return for which assets automation starts the job, and why: not for training, nor to retry what was lost."""
    return {name: list(why.lines) for name, why in stale.items() if name not in BY_HAND and not why.retry_only}
