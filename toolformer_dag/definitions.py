"""What Dagster loads: the assets, jobs, sensor and resources of toolformer.toml."""

import json
from pathlib import Path
from typing import Any

import dagster as dg
from pydantic import BaseModel, Field

from toolformer_dag.assets import graph, jobs, shard_sensor
from toolformer_dag.computing.plan import Plan
from toolformer_dag.resources import RESOURCES, LakeResource, compute_resource
from toolformer_dag.resources.step_processes import executor_of
from toolformer_dag.settings.sections import Settings
from toolformer_dag.settings.settings_file import load_settings


def definitions_of(plan: Plan, within_another: bool = False) -> dg.Definitions:
    """Build the asset graph of a plan and of those that it starts from. Loads no weights and imports no torch.

    `within_another`: the project around it sets the executor of whatever is no job of ours, so that a step may be a
    process of its own.
    """
    steps_at_once = plan.settings.execution.steps_at_once
    apart, projects = within_another or steps_at_once > 1, plan.projects
    return dg.Definitions(
        assets=[asset for one in projects for asset in graph(one)],
        jobs=[job for one in projects for job in jobs(one)],
        sensors=[shard_sensor(projects[0])],
        resources={name: made for one in projects for name, made in _resources(one, apart).items()},
        executor=None if within_another else executor_of(steps_at_once),
    )


def _resources(plan: Plan, steps_apart: bool) -> dict[str, Any]:
    """Return what the assets of a plan take, by the names by which Dagster knows it."""
    lake, copies = str(plan.settings.paths.lake), str(plan.settings.paths.local)
    made = {
        "lake": LakeResource(root=lake, copies=copies, steps_apart=steps_apart, suffix=plan.suffix),
        "compute": compute_resource(plan),
    }
    return {f"{RESOURCES[name]}{plan.suffix}": resource for name, resource in made.items()}


def definitions_to_merge(settings_file: str | Path) -> dg.Definitions:
    """Load the definitions of a settings file for `dagster.Definitions.merge` with those of another project.

    Raises what `defs` raises.
    """
    return definitions_of(Plan.of(load_settings(Path(settings_file))), within_another=True)


class LineParameters(BaseModel):
    """Hold what `dg scaffold defs toolformer_dag.ToolformerLine` takes."""

    settings: str = Field("toolformer.toml", description="Settings file, seen from the project's folder.")


class LineScaffolder(dg.Scaffolder[LineParameters]):
    """Write a defs.yaml that names the settings file."""

    @classmethod
    def get_scaffold_params(cls) -> type[LineParameters]:
        """Return the options of `dg scaffold defs`."""
        return LineParameters

    def scaffold(self, request: dg.ScaffoldRequest[LineParameters]) -> None:
        """Write the file; the settings need not be there yet."""
        dg.scaffold_component(request, {"settings": str(Path("{{ project_root }}", request.params.settings))})


@dg.scaffold_with(LineScaffolder)
class ToolformerLine(dg.Component, dg.Model, dg.Resolvable):
    """The line of a settings file, within another project: from shards of text to a model that calls tools."""

    settings: str = Field(description="The settings file, seen from the folder of defs.yaml.")

    def build_defs(self, context: dg.ComponentLoadContext) -> dg.Definitions:
        """Return assets, jobs, sensor and resources; raises what `defs` raises."""
        return definitions_to_merge(context.component_path.file_path / self.settings)


def job_of(file: str, name: str) -> dg.JobDefinition:
    """Build a job of the settings in a JSON file, as the process of each step of a run of the command line does."""
    settings = Settings.model_validate(json.loads(Path(file).read_bytes()))
    return definitions_of(Plan.of(settings)).resolve_job_def(name)


@dg.definitions
def defs() -> dg.Definitions:
    """Load the definitions of ./toolformer.toml, or of $TOOLFORMER_CONFIG.

    Raises SettingsError, ModelError, ToolError, BenchmarkError and StorageError, which name the setting and the remedy.
    """
    return definitions_of(Plan.of(load_settings()))
