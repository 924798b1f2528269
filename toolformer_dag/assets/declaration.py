"""An asset of the graph: what determines it, why it is out of date and what makes it.

`AssetDeclaration` holds this without knowing any run; `build_asset` makes Dagster's asset of it.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from inspect import signature
from typing import Any

import dagster as dg

from toolformer_dag.assets.running import Running, note_failure, runs_alone, step, tag_outcome
from toolformer_dag.computing.reasons import Reasons
from toolformer_dag.files import UserError, explain_limit_met
from toolformer_dag.identity import fingerprint
from toolformer_dag.lake.local_outputs import LocalOutput
from toolformer_dag.lake.session import session
from toolformer_dag.lake.table import WHOLE, Lake
from toolformer_dag.processes import end_with_parent
from toolformer_dag.resources import RESOURCES
from toolformer_dag.resources.step_processes import step_tags
from toolformer_dag.settings.setting_types import ASSET_GROUPS

OWNERS = ["team:data"]
EXPLORER = "http://127.0.0.1:3001/"
"""The page of `toolformer-dag explore` on its usual port."""
MEASURED_GROUPS = ("training", "evaluation", "tables")
"""The groups whose assets the page shows as evaluation, training and costs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AssetDeclaration:
    """An asset of the graph.

    - `name`: such as "calculator/loss_deltas"
    - `settings`: what determines the asset, besides the assets that it depends on
    - `depends_on`: the names of the assets that it depends on
    - `description`, `kinds`: shown on the asset's page
    - `pool`: steps with the same pool run one after another
    - `reasons`: returns why what is stored is missing, damaged or out of date
    - `version`: returns the data version of what is stored; None if nothing is
    - `make`: makes the asset; it takes the context and, by name, the resources that it needs: `lake`, `compute`
    - `checks`: name -> promise of each check. If one fails, nothing that depends on the asset runs
    - `group`: the asset's group in the graph; empty for the first part of its name
    """

    name: str
    settings: Mapping[str, Any]
    depends_on: tuple[str, ...]
    description: str
    kinds: Collection[str]
    pool: str
    reasons: Callable[[], Reasons]
    version: Callable[[], str | None]
    make: Callable[..., Any]
    checks: Mapping[str, str] = field(default_factory=dict)
    group: str = ""

    @property
    def code_version(self) -> str:
        """The fingerprint of the settings, which Dagster compares."""
        return fingerprint(self.settings)

    @property
    def group_name(self) -> str:
        """The group of the asset in the graph."""
        return self.group or self.name.partition("/")[0]


def receive_and_find_reasons(files: LocalOutput, find_reasons: Callable[[], Sequence[str]]) -> Reasons:
    """Download newer files of other machines, and find out why the files here are out of date.

    Files that the object store lacks count as out of date.

    Args:
        files: The files that machines share.
        find_reasons: Called after the download. Returns other reasons why the files are out of date.

    Returns:
        The reasons. They are empty if the files are up to date.
    """
    files.receive()

    lines = find_reasons()
    if not lines and files.has_unsent_files():
        lines = ["it is not in the object store yet"]
    return Reasons({WHOLE: lines})  # of the files as a whole; other assets have reasons by shard


def asset_key(name: str) -> dg.AssetKey:
    """Return the key of "calculator/loss_deltas"."""
    return dg.AssetKey(name.split("/"))


def build_asset(output: AssetDeclaration, suffix: str) -> dg.AssetsDefinition:
    """Build the Dagster asset of a declared asset, with its checks.

    Args:
        output: The declared asset.
        suffix: The end of the names of the plan's resources. It allows two plans to share a code location, and is
            empty for most.
    """
    # parameter of `output.make` -> name of the resource in Dagster
    resource_keys = _map_parameter_to_resource(output, suffix)

    def make(context: dg.AssetExecutionContext) -> dg.MaterializeResult:
        resources = {parameter: getattr(context.resources, key) for parameter, key in resource_keys.items()}
        return _run_step(output, context, resources)

    declared: dg.AssetsDefinition = dg.asset(
        **_build_page_options(output, suffix),  # group, kinds, owners, description, a link
        key=asset_key(output.name),
        deps=[asset_key(name) for name in output.depends_on],
        code_version=output.code_version,
        pool=output.pool,
        op_tags=step_tags(output.pool),
        required_resource_keys=set(resource_keys.values()),
        check_specs=_build_check_specs(output),
    )(make)
    return declared


def _build_page_options(output: AssetDeclaration, suffix: str) -> dict[str, Any]:
    """Build the arguments of `dg.asset` that only determine what the asset's page shows."""
    explorer = dg.MetadataValue.url(build_explorer_address(output.name, suffix))
    return {
        "group_name": output.group_name,
        "kinds": set(output.kinds),
        "owners": OWNERS,
        "description": output.description,
        "metadata": {"explore": explorer},
    }


def _build_check_specs(output: AssetDeclaration) -> list[dg.AssetCheckSpec]:
    """Return the checks of an output; a failed check stops what depends on it."""
    key = asset_key(output.name)
    specs = []
    for name, promise in output.checks.items():
        specs.append(dg.AssetCheckSpec(name, asset=key, blocking=True, description=promise))
    return specs


def _run_step(
    output: AssetDeclaration, context: dg.AssetExecutionContext, resources: Mapping[str, Any]
) -> dg.MaterializeResult:
    """Make an asset as a step of a run, and show its progress.

    Returns:
        The result of the step.

    Raises:
        UserError: The disk or the memory is full.
        Exception: Any other error of making the asset.
    """
    if runs_alone(context):  # this process has no other step, and nobody else ends it
        end_with_parent()

    lake: Lake | None = resources.get("lake")
    with (
        step(context, output.name) as running,  # shows the progress
        _hold_pool(running, output.pool, lake),  # makes runs of other Dagster instances wait
        session(),  # what is read of the lake's manifests is cached
    ):
        with _note_step_failure(context, lake, running):
            result: dg.MaterializeResult = output.make(context, **resources)

        _note_end(context, output, running, result)
        return result


def _note_end(
    context: dg.AssetExecutionContext, output: AssetDeclaration, running: Running, result: dg.MaterializeResult
) -> None:
    """Write down how the step ended, and tag its run with that."""
    metadata = result.metadata or {}
    running.end(metadata)
    tag_outcome(context, output.name, metadata)


@contextmanager
def _note_step_failure(context: dg.AssetExecutionContext, lake: Lake | None, running: Running) -> Iterator[None]:
    """Note what the step has spent if the block fails.

    Raises:
        UserError: The block failed because the disk or the memory is full.
        BaseException: Any other error of the block.
    """
    try:
        yield
    except BaseException as error:
        if lake is not None:
            note_failure(context, lake, running)

        if isinstance(error, UserError):
            raise

        limit = explain_limit_met(error)  # such as "the disk is full"
        if limit:
            raise UserError(f"{error}: {limit}; what was committed is kept") from error
        raise


def _map_parameter_to_resource(output: AssetDeclaration, suffix: str) -> dict[str, str]:
    """Return the parameters of `output.make` that take a resource, each with the resource's name in Dagster."""
    parameters = signature(output.make).parameters
    return {name: f"{key}{suffix}" for name, key in RESOURCES.items() if name in parameters}


def _hold_pool(running: Running, pool: str, lake: Lake | None) -> AbstractContextManager[None]:
    """Hold a pool of the lake inside the block; without a lake, do nothing.

    Dagster's own pools know the runs of one instance only; this one makes runs of other instances wait too.
    """
    return nullcontext() if lake is None else lake.storage.claimed(pool, running.wait)


def build_explorer_address(name: str, suffix: str) -> str:
    """Build the address at which `toolformer-dag explore` shows an asset, while it is running.

    Args:
        name: The name of the asset, such as "calculator/loss_deltas".
        suffix: The end of the names of the plan's groups. Empty for most plans.
    """
    group, _, stage = name.partition("/")
    group = group.removesuffix(suffix)

    counts_calls_by_threshold = stage == "table_2"  # though it is a table of the paper
    if group in MEASURED_GROUPS and not counts_calls_by_threshold:  # training/finetuned_checkpoint
        return f"{EXPLORER}#view=runs"
    if group in ASSET_GROUPS:  # warehouse/dataset
        return f"{EXPLORER}#view=thresholds"

    # Other groups are tools: calculator/loss_deltas.
    verdict = "&verdict=kept" if stage == "filtered_calls" else ""
    return f"{EXPLORER}#tool={group}{verdict}&view=calls"
