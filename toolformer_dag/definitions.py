"""What Dagster loads: the assets, jobs, sensor and resources of toolformer.toml."""

import json
from pathlib import Path

import dagster as dg

from toolformer_dag.assets import graph, jobs, shard_sensor
from toolformer_dag.pipeline.plan import Plan
from toolformer_dag.resources import RESOURCES, LakeResource, compute_resource
from toolformer_dag.resources.step_processes import executor_of
from toolformer_dag.settings.sections import Settings
from toolformer_dag.settings.settings_file import load_settings


def definitions_of(plan: Plan, within_another: bool = False) -> dg.Definitions:
    """Build the asset graph of a plan. Loads no weights and imports no torch.

    `within_another`: the project around it sets the executor of whatever is no job of ours, so that a step may be a
    process of its own.
    """
    paths, steps_at_once = plan.settings.paths, plan.settings.execution.steps_at_once
    steps_apart = within_another or steps_at_once > 1
    return dg.Definitions(
        assets=graph(plan),
        jobs=jobs(plan),
        sensors=[shard_sensor(plan)],
        resources={
            RESOURCES["lake"]: LakeResource(root=str(paths.lake), copies=str(paths.local), steps_apart=steps_apart),
            RESOURCES["compute"]: compute_resource(plan),
        },
        executor=None if within_another else executor_of(steps_at_once),
    )


def definitions_to_merge(settings_file: str | Path) -> dg.Definitions:
    """Load the definitions of a settings file for `dagster.Definitions.merge` with those of another project.

    Raises what `defs` raises.
    """
    return definitions_of(Plan.of(load_settings(Path(settings_file))), within_another=True)


def job_of(file: str, name: str) -> dg.JobDefinition:
    """Build a job of the settings in a JSON file, as the process of each step of a run of the command line does."""
    settings = Settings.model_validate(json.loads(Path(file).read_bytes()))
    return definitions_of(Plan.of(settings)).resolve_job_def(name)


@dg.definitions
def defs() -> dg.Definitions:
    """Load the definitions of ./toolformer.toml, or of $TOOLFORMER_CONFIG.

    Raises SettingsError, ModelError, ToolError, BenchmarkError and OldLake, which name the setting and the remedy.
    """
    return definitions_of(Plan.of(load_settings()))
