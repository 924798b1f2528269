"""What an asset is: what determines it, why it is out of date, what makes it; and the Dagster asset of that."""

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from inspect import signature
from typing import Any

import dagster as dg

from toolformer_dag.assets.running import Running, note_failure, runs_alone, step, tag_outcome
from toolformer_dag.computing.reasons import Reasons
from toolformer_dag.files import UserError, limit_met
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
class Output:
    """An asset. `settings`: what determines it beside the assets that it depends on.

    - `reasons`: why what is stored is missing, damaged or out of date; `version`: the data version of what is stored,
      None where nothing is.
    - `make`: takes the context and, by name, the resources that it needs: `lake`, `compute`.
    - `checks`: its blocking checks, and what each promises.
    - `group`: what it stands under in the graph, collapsed; by default its lane.
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
        return fingerprint(self.settings)

    @property
    def group_name(self) -> str:
        return self.group or self.name.partition("/")[0]


def shared_reasons(files: LocalOutput, reasons: Callable[[], Sequence[str]]) -> Reasons:
    """Ask about what another machine may have made; what is only on this one has yet to be sent."""
    files.receive()
    return Reasons({WHOLE: reasons() or (["it is not in the object store yet"] if files.unsent() else [])})


def asset_key(name: str) -> dg.AssetKey:
    """Return the key of "calculator/loss_deltas"."""
    return dg.AssetKey(name.split("/"))


def asset_of(output: Output, suffix: str) -> dg.AssetsDefinition:
    """Return the Dagster asset. Whoever watches its run learns how the step ended, also from a process of its own."""

    needs = _needed(output, suffix)

    def make(context: dg.AssetExecutionContext) -> dg.MaterializeResult:
        resources = {name: getattr(context.resources, key) for name, key in needs.items()}
        if runs_alone(context):
            end_with_parent()
        with step(context, output.name) as made, _claimed(made, output.pool, resources.get("lake")), session():
            try:
                result: dg.MaterializeResult = output.make(context, **resources)
            except BaseException as error:
                if "lake" in resources:
                    note_failure(context, resources["lake"], made)
                if not isinstance(error, UserError) and (limit := limit_met(error)):
                    raise UserError(f"{error}: {limit}; what was committed is kept") from error
                raise
            made.end(result.metadata or {})
            tag_outcome(context, output.name, result.metadata or {})
            return result

    key = asset_key(output.name)
    return dg.asset(
        key=key,
        group_name=output.group_name,
        deps=[asset_key(name) for name in output.depends_on],
        code_version=output.code_version,
        kinds=set(output.kinds),
        owners=OWNERS,
        pool=output.pool,
        op_tags=step_tags(output.pool),
        required_resource_keys=set(needs.values()),
        check_specs=[
            dg.AssetCheckSpec(name, asset=key, blocking=True, description=promise)
            for name, promise in output.checks.items()
        ],
        description=output.description,
        metadata={"explore": dg.MetadataValue.url(explored(output.name, suffix))},
    )(make)


def _needed(output: Output, suffix: str) -> dict[str, str]:
    """Return the resources that an asset takes by name, and the names by which Dagster knows them."""
    taken = signature(output.make).parameters
    return {name: f"{key}{suffix}" for name, key in RESOURCES.items() if name in taken}


def _claimed(made: Running, pool: str, lake: Lake | None) -> AbstractContextManager[None]:
    """Let runs over one lake take turns, of other instances too: Dagster's pools know those of its own."""
    return nullcontext() if lake is None else lake.storage.claimed(pool, made.wait)


def explored(name: str, suffix: str) -> str:
    """Return where the page of `toolformer-dag explore` shows what an asset made, while it is served."""
    group, _, stage = name.partition("/")
    group = group.removesuffix(suffix)
    if group in MEASURED_GROUPS and stage != "table_2":
        return f"{EXPLORER}#view=runs"
    if group in ASSET_GROUPS:
        return f"{EXPLORER}#view=thresholds"
    return f"{EXPLORER}#tool={group}{'&verdict=kept' * (stage == 'filtered_calls')}&view=calls"
