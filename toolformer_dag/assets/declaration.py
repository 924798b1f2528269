"""An asset of the graph: what determines it, why it is out of date and what makes it.

`AssetDeclaration` holds this without knowing any run; `build_asset` makes Dagster's asset of it.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from inspect import signature
from typing import Any

import dagster as dg

from toolformer_dag.assets.running import (
    Running,
    is_single_step_process,
    record_failure,
    tag_run_with_outcome,
    track_step,
)
from toolformer_dag.computing.reasons import Reasons
from toolformer_dag.files import UserError, explain_exceeded_limit
from toolformer_dag.identity import fingerprint
from toolformer_dag.lake.local_outputs import LocalOutput
from toolformer_dag.lake.session import enter_session
from toolformer_dag.lake.table import WHOLE_TABLE_PART, Lake
from toolformer_dag.processes import end_with_parent
from toolformer_dag.resources import DAGSTER_RESOURCE_NAMES
from toolformer_dag.resources.step_processes import build_step_tags
from toolformer_dag.settings.setting_types import NON_LANE_GROUPS

ASSET_OWNERS = ["team:data"]
EXPLORER_URL = "http://127.0.0.1:3001/"
"""The page of `toolformer-dag explore` on its usual port."""
GROUPS_SHOWN_AS_RUNS = ("training", "evaluation", "tables")
"""The groups whose assets the page shows as evaluation, training and costs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AssetDeclaration:
    """An asset of the graph, as it is declared before Dagster knows it.

    Attributes:
        name: The name, such as "calculator/loss_deltas".
        settings: What determines the asset, besides the assets that it depends on.
        depends_on: The names of the assets that it depends on.
        description: A sentence for the asset's page.
        kinds: Labels for the asset's page, such as "duckdb".
        pool: The pool of its step. Steps with the same pool run one after another.
        find_reasons: Returns why what is stored is missing, damaged or out of date.
        get_version: Returns the data version of what is stored. None if nothing is.
        make_asset: Makes the asset. It takes the context and, by name, the resources that it needs: `lake`, `compute`.
        promise_by_check: What each check of the asset promises. If a check fails, nothing that depends on the asset
            runs.
        group: The asset's group in the graph. Empty for the first part of its name.
    """

    name: str
    settings: Mapping[str, Any]
    depends_on: tuple[str, ...]
    description: str
    kinds: Collection[str]
    pool: str
    find_reasons: Callable[[], Reasons]
    get_version: Callable[[], str | None]
    make_asset: Callable[..., Any]
    promise_by_check: Mapping[str, str] = field(default_factory=dict)
    group: str = ""

    @property
    def code_version(self) -> str:
        """The fingerprint of the settings, which Dagster compares."""
        return fingerprint(self.settings)

    @property
    def group_name(self) -> str:
        """The group of the asset in the graph."""
        return self.group or self.name.partition("/")[0]


def receive_and_find_reasons(local_output: LocalOutput, find_reasons: Callable[[], Sequence[str]]) -> Reasons:
    """Download newer files of other machines, and find out why the files here are out of date.

    Files that the object store lacks count as out of date too, so that the next run sends them.

    Args:
        local_output: Files on this machine that machines share through an object store.
        find_reasons: Called after the download. Returns a line for each other reason why the files are out of date.

    Returns:
        The reasons. They are false if the files are up to date.
    """
    local_output.receive_files()

    lines = find_reasons()
    if not lines and local_output.has_unsent_files():
        lines = ["it is not in the object store yet"]
    # The reasons are those of the files as a whole, while tables have reasons by shard. Without lines they are false.
    return Reasons({WHOLE_TABLE_PART: lines})


def build_asset_key(asset_name: str) -> dg.AssetKey:
    """Return Dagster's key of an asset, of the parts "calculator" and "loss_deltas" for "calculator/loss_deltas"."""
    return dg.AssetKey(asset_name.split("/"))


def build_asset(output: AssetDeclaration, round_suffix: str) -> dg.AssetsDefinition:
    """Build the Dagster asset of a declared asset, with its checks.

    Args:
        output: The declared asset.
        round_suffix: The end of the names of the plan's resources, which distinguishes two plans that share a code
            location. Empty for most plans.
    """
    # The parameters of `output.make_asset` that take a resource, with the resource's name in Dagster.
    resource_name_by_parameter = _map_parameter_to_resource(output, round_suffix)

    def make(context: dg.AssetExecutionContext) -> dg.MaterializeResult:
        resource_by_parameter = {}
        for parameter, resource_name in resource_name_by_parameter.items():
            resource_by_parameter[parameter] = getattr(context.resources, resource_name)
        return _run_step(output, context, resource_by_parameter)

    decorate = dg.asset(
        **_build_page_options(output, round_suffix),
        key=build_asset_key(output.name),
        deps=[build_asset_key(name) for name in output.depends_on],
        code_version=output.code_version,
        pool=output.pool,
        op_tags=build_step_tags(output.pool),
        required_resource_keys=set(resource_name_by_parameter.values()),
        check_specs=_build_check_specs(output),
    )
    asset: dg.AssetsDefinition = decorate(make)
    return asset


def _build_page_options(output: AssetDeclaration, round_suffix: str) -> dict[str, Any]:
    """Build the arguments of `dg.asset` that only determine what the asset's page shows, such as its description."""
    explorer_link = dg.MetadataValue.url(build_explorer_url(output.name, round_suffix))
    return {
        "group_name": output.group_name,
        "kinds": set(output.kinds),
        "owners": ASSET_OWNERS,
        "description": output.description,
        "metadata": {"explore": explorer_link},
    }


def _build_check_specs(output: AssetDeclaration) -> list[dg.AssetCheckSpec]:
    """Return Dagster's specification of each check of an asset. A failed check stops what depends on the asset."""
    key = build_asset_key(output.name)
    specs = []
    for name, promise in output.promise_by_check.items():
        specs.append(dg.AssetCheckSpec(name, asset=key, blocking=True, description=promise))
    return specs


def _run_step(
    output: AssetDeclaration, context: dg.AssetExecutionContext, resource_by_parameter: Mapping[str, Any]
) -> dg.MaterializeResult:
    """Make an asset as a step of a run, and show its progress meanwhile.

    Args:
        output: The declared asset.
        context: The context of the step.
        resource_by_parameter: The resources, by the parameter of `output.make_asset` that takes them.

    Returns:
        The result of the step.

    Raises:
        UserError: The disk or the memory is full.
        Exception: Any other error of making the asset.
    """
    if is_single_step_process(context):  # this process has no other step, and nobody else ends it
        end_with_parent()

    lake: Lake | None = resource_by_parameter.get("lake")
    with (
        track_step(context, output.name) as running_step,  # shows the progress
        _hold_pool(running_step, output.pool, lake),  # makes runs of other Dagster instances wait
        enter_session(),  # inside, the lake's records are read only once
    ):
        with _record_step_failure(context, lake, running_step):
            result: dg.MaterializeResult = output.make_asset(context, **resource_by_parameter)

        _record_end(context, output, running_step, result)
        return result


def _record_end(
    context: dg.AssetExecutionContext, output: AssetDeclaration, running_step: Running, result: dg.MaterializeResult
) -> None:
    """Write down how the step ended: as the outcome of the running step, and in the tags of the run."""
    metadata = result.metadata or {}
    running_step.set_outcome(metadata)
    tag_run_with_outcome(context, output.name, metadata)


@contextmanager
def _record_step_failure(context: dg.AssetExecutionContext, lake: Lake | None, running_step: Running) -> Iterator[None]:
    """If the block fails, record in the lake what the step has spent, and raise the error again.

    Args:
        context: The context of the step.
        lake: The lake. None for a step that uses none; then nothing is recorded.
        running_step: The step.

    Raises:
        UserError: The block raised a UserError itself, or failed because the disk or the memory is full.
        BaseException: Any other error of the block.
    """
    try:
        yield
    except BaseException as error:
        if lake is not None:
            record_failure(context, lake, running_step)

        if isinstance(error, UserError):
            raise

        limit_and_remedy = explain_exceeded_limit(error)  # such as "the disk is full"
        if limit_and_remedy:
            raise UserError(f"{error}: {limit_and_remedy}; what was committed is kept") from error
        raise


def _map_parameter_to_resource(output: AssetDeclaration, round_suffix: str) -> dict[str, str]:
    """Return the parameters of `output.make_asset` that take a resource, each with the resource's name in Dagster."""
    parameters = signature(output.make_asset).parameters

    resource_name_by_parameter = {}
    for parameter, resource_name in DAGSTER_RESOURCE_NAMES.items():
        if parameter in parameters:
            resource_name_by_parameter[parameter] = f"{resource_name}{round_suffix}"
    return resource_name_by_parameter


def _hold_pool(running_step: Running, pool_name: str, lake: Lake | None) -> AbstractContextManager[None]:
    """Return a context in which this step alone uses a pool of the lake, whichever Dagster instance runs others.

    Dagster's own pools only make runs of the same instance wait. Without a lake, the context does nothing.

    Args:
        running_step: Takes the name of the process for which it waits.
        pool_name: The pool, such as "gpu".
        lake: The lake.
    """
    if lake is None:
        return nullcontext()
    return lake.storage.hold_claim(pool_name, running_step.record_wait)


def build_explorer_url(asset_name: str, round_suffix: str) -> str:
    """Return the address at which `toolformer-dag explore` shows an asset, while it is running.

    Args:
        asset_name: The name of the asset, such as "calculator/loss_deltas".
        round_suffix: The end of the names of the plan's groups. Empty for most plans.
    """
    group, _, stage = asset_name.partition("/")
    group = group.removesuffix(round_suffix)

    # Table 2 of the paper is in the group of the other tables, which show results of runs. But it counts calls by
    # threshold, so the page of thresholds shows it.
    is_about_runs = group in GROUPS_SHOWN_AS_RUNS and stage != "table_2"
    if is_about_runs:  # such as training/finetuned_checkpoint
        return f"{EXPLORER_URL}#view=runs"
    if group in NON_LANE_GROUPS:  # such as warehouse/dataset
        return f"{EXPLORER_URL}#view=thresholds"

    # Other groups are tools: calculator/loss_deltas.
    verdict = "&verdict=kept" if stage == "filtered_calls" else ""
    return f"{EXPLORER_URL}#tool={group}{verdict}&view=calls"
