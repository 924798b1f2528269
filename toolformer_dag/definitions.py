"""What Dagster loads: the assets, jobs, sensor and resources of toolformer.toml."""

import json
import re
from pathlib import Path
from typing import Any

import dagster as dg
from pydantic import BaseModel, Field

from toolformer_dag.assets import build_shard_sensor, graph, jobs
from toolformer_dag.computing.plan import Plan
from toolformer_dag.files import UserError
from toolformer_dag.resources import RESOURCES, LakeResource, build_compute_resource
from toolformer_dag.resources.step_processes import executor_of
from toolformer_dag.settings.sections import Settings
from toolformer_dag.settings.settings_file import load_settings


def build_definitions(plan: Plan, within_another: bool = False) -> dg.Definitions:
    """Build the asset graph of a plan and of the earlier rounds that it starts from, without weights and torch.

    within_another: whether they will be merged into the definitions of another project, whose executor then runs the
        assets, perhaps each step in a process of its own.
    """
    steps_at_once = plan.settings.execution.steps_at_once
    steps_have_processes = within_another or steps_at_once > 1
    first_plan = plan.projects[0]  # the one that reads the shard files
    assets: list[dg.AssetsDefinition] = []
    all_jobs: list[Any] = []
    resources: dict[str, Any] = {}
    for project in plan.projects:
        assets += graph(project)
        all_jobs += jobs(project)
        resources |= _build_resources(project, steps_apart=steps_have_processes)
    return dg.Definitions(
        assets=assets,
        jobs=all_jobs,
        sensors=[build_shard_sensor(first_plan)],
        resources=resources,
        executor=None if within_another else executor_of(steps_at_once),
    )


def _build_resources(plan: Plan, steps_apart: bool) -> dict[str, Any]:
    """Return the resources that the assets of a plan take, by the names by which Dagster knows them.

    `steps_apart`: whether a step may be a process of its own.
    """
    paths = plan.settings.paths
    lake = LakeResource(root=str(paths.lake), copies=str(paths.local), steps_apart=steps_apart, suffix=plan.suffix)
    return {
        f"{RESOURCES['lake']}{plan.suffix}": lake,
        f"{RESOURCES['compute']}{plan.suffix}": build_compute_resource(plan),
    }


def definitions_to_merge(settings_file: str | Path) -> dg.Definitions:
    """Load the definitions of a settings file for `dagster.Definitions.merge` with those of another project.

    Raises what `defs` raises.
    """
    return build_definitions(Plan.of(load_settings(Path(settings_file))), within_another=True)


LINE = "toolformer_dag.ToolformerLine"
LINE_COMPONENT = re.compile(r"^type:[ \t]*['\"]?toolformer_dag(?:\.definitions)?\.ToolformerLine\b", re.MULTILINE)
"""The line of a defs.yaml that names the component below."""


class LineParameters(BaseModel):
    """Hold the options of `dg scaffold defs toolformer_dag.ToolformerLine`."""

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
        """Return assets, jobs, sensor and resources.

        Raises what `defs` raises, and UserError where another component of the project is a line too.
        """
        _refuse_second_line(context.defs_module_path)
        return definitions_to_merge(context.component_path.file_path / self.settings)


def _refuse_second_line(folder: Path) -> None:
    """Raise UserError where the defs.yaml files below a folder name more than one ToolformerLine component."""
    files_of_components = []
    for file in sorted(folder.rglob("defs.yaml")):
        text = file.read_text("utf-8", errors="replace")
        for _ in LINE_COMPONENT.findall(text):
            files_of_components.append(str(file))
    if len(files_of_components) > 1:
        raise UserError(
            f"{' and '.join(files_of_components)}: a project holds one {LINE}, since the assets of two would have the "
            "same keys; write both corpora or tools into one settings file, or give the second line a project of its "
            "own"
        )


def job_of(file: str, name: str) -> dg.JobDefinition:
    """Build the job of this name from the settings in a JSON file, for a step that is a process of its own."""
    settings = Settings.model_validate(json.loads(Path(file).read_bytes()))
    return build_definitions(Plan.of(settings)).resolve_job_def(name)


@dg.definitions
def defs() -> dg.Definitions:
    """Load the definitions of ./toolformer.toml, or of $TOOLFORMER_CONFIG.

    Raises SettingsError, ModelError, ToolError, BenchmarkError and StorageError, which name the setting and the remedy.
    """
    return build_definitions(Plan.of(load_settings()))
