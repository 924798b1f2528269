"""What Dagster loads: the assets, jobs, sensor and resources of toolformer.toml."""

import json
import re
from pathlib import Path
from typing import Any

import dagster as dg
from pydantic import BaseModel, Field

from toolformer_dag.assets import build_assets, build_jobs, build_shard_sensor
from toolformer_dag.computing.plan import Plan
from toolformer_dag.files import UserError
from toolformer_dag.resources import DAGSTER_RESOURCE_NAMES, LakeResource, build_compute_resource
from toolformer_dag.resources.step_processes import build_executor
from toolformer_dag.settings.sections import Settings
from toolformer_dag.settings.settings_file import load_settings


def build_definitions(plan: Plan, is_merged: bool = False) -> dg.Definitions:
    """Build what Dagster shows and runs: the assets, jobs, sensor and resources of a plan and of its earlier rounds.

    Neither torch nor a model is loaded for this.

    Args:
        plan: The plan of the last round.
        is_merged: Whether the definitions will be merged into those of another project. The executor of that project
            then runs the assets, perhaps each step in a process of its own.
    """
    steps_at_once = plan.settings.execution.steps_at_once
    steps_have_processes = is_merged or steps_at_once > 1

    assets: list[dg.AssetsDefinition] = []
    jobs: list[Any] = []
    resources: dict[str, Any] = {}
    for plan_of_round in plan.plans_by_round:
        assets += build_assets(plan_of_round)
        jobs += build_jobs(plan_of_round)
        resources |= _build_resources(plan_of_round, steps_apart=steps_have_processes)

    # Only the first round reads the shard files, which the sensor watches.
    first_plan = plan.plans_by_round[0]
    return dg.Definitions(
        assets=assets,
        jobs=jobs,
        sensors=[build_shard_sensor(first_plan)],
        resources=resources,
        executor=None if is_merged else build_executor(steps_at_once),
    )


def _build_resources(plan: Plan, steps_apart: bool) -> dict[str, Any]:
    """Return the resources that Dagster passes to the assets of a plan: the lake (its folder of tables) and compute.

    Args:
        plan: The plan of a round, whose suffix ends the names of the resources.
        steps_apart: Whether a step may be a process of its own.

    Returns:
        The resources, by the names by which Dagster knows them.
    """
    paths = plan.settings.paths
    lake = LakeResource(
        root=str(paths.lake),
        copies=str(paths.local_folder),
        steps_apart=steps_apart,
        suffix=plan.round_suffix,
    )
    return {
        f"{DAGSTER_RESOURCE_NAMES['lake']}{plan.round_suffix}": lake,
        f"{DAGSTER_RESOURCE_NAMES['compute']}{plan.round_suffix}": build_compute_resource(plan),
    }


def definitions_to_merge(settings_file: str | Path) -> dg.Definitions:
    """Load the definitions of a settings file, for `dagster.Definitions.merge` with those of another project.

    Raises:
        UserError: Whatever `defs` raises.
    """
    settings = load_settings(Path(settings_file))
    return build_definitions(Plan.from_settings(settings), is_merged=True)


LINE_TYPE_NAME = "toolformer_dag.ToolformerLine"
LINE_TYPE_PATTERN = re.compile(r"^type:[ \t]*['\"]?toolformer_dag(?:\.definitions)?\.ToolformerLine\b", re.MULTILINE)
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
        """Write the file. The settings need not be there yet."""
        settings_path = Path("{{ project_root }}", request.params.settings)
        dg.scaffold_component(request, {"settings": str(settings_path)})


@dg.scaffold_with(LineScaffolder)
class ToolformerLine(dg.Component, dg.Model, dg.Resolvable):
    """The line of a settings file, within another project: from shards of text to a model that calls tools."""

    settings: str = Field(description="The settings file, seen from the folder of defs.yaml.")

    def build_defs(self, context: dg.ComponentLoadContext) -> dg.Definitions:
        """Return assets, jobs, sensor and resources.

        Raises:
            UserError: Another component of the project is a ToolformerLine too, or whatever `defs` raises.
        """
        _refuse_second_line(context.defs_module_path)
        return definitions_to_merge(context.component_path.file_path / self.settings)


def _refuse_second_line(folder: Path) -> None:
    """Check that a Dagster project has only one ToolformerLine, the component that holds all assets of a settings file.

    Args:
        folder: The folder of the project's components. Its defs.yaml files name them.

    Raises:
        UserError: The defs.yaml files name more than one.
    """
    files_of_components = []
    for file in sorted(folder.rglob("defs.yaml")):
        text = file.read_text("utf-8", errors="replace")
        # A file may hold several components, and is then listed once for each.
        for _ in LINE_TYPE_PATTERN.findall(text):
            files_of_components.append(str(file))

    if len(files_of_components) > 1:
        raise UserError(
            f"{' and '.join(files_of_components)}: a project holds one {LINE_TYPE_NAME}, since the assets of two would "
            "have the same keys; write both corpora or tools into one settings file, or give the second line a project "
            "of its own"
        )


def job_of(file: str, name: str) -> dg.JobDefinition:
    """Build a Dagster job again from settings in a file. Each process that runs a step of the job calls this.

    Args:
        file: The path of a JSON file with the settings.
        name: The name of the job.
    """
    settings = Settings.model_validate(json.loads(Path(file).read_bytes()))
    definitions = build_definitions(Plan.from_settings(settings))
    return definitions.resolve_job_def(name)


@dg.definitions
def defs() -> dg.Definitions:
    """Load the definitions of ./toolformer.toml, or of the settings file named by $TOOLFORMER_CONFIG.

    Raises:
        SettingsError, ModelError, ToolError, BenchmarkError, StorageError: The settings cannot be used. The message
            names the setting and the remedy.
    """
    return build_definitions(Plan.from_settings(load_settings()))
