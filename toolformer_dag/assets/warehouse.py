"""What the lake holds, for people and programs: the warehouse, C* as a data set, the paper's tables (as one step)."""

import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import dagster as dg

from toolformer_dag.assets.declaration import OWNERS, Output, asset_key, explored, shared_reasons
from toolformer_dag.assets.metadata import (
    CALLS,
    ROWS,
    TOKENS,
    UNCHANGED,
    as_text,
    counts_table,
    frame_table,
    last_materialization,
    last_metadata,
)
from toolformer_dag.assets.plots import PLOTTED, bars, start_curves
from toolformer_dag.assets.running import tag_outcome
from toolformer_dag.assets.staleness import CODE, VERSION, is_known, read_versions, tell_state
from toolformer_dag.computing.plan import Plan
from toolformer_dag.computing.reasons import Reasons
from toolformer_dag.evaluation.evaluated_tables import all_tables, withdraw_damaged
from toolformer_dag.evaluation.paper_tables import PAPER_TABLES, PaperTable, notes, over_min_probability, tools_called
from toolformer_dag.exports.corpus_export import (
    asset_files,
    asset_folder,
    corpus_reasons,
    corpus_settings,
    export_corpus,
    tells_the_same,
)
from toolformer_dag.exports.dataset_folder import read_exported
from toolformer_dag.exports.forms import text_form
from toolformer_dag.identity import fingerprint
from toolformer_dag.lake.table import Lake
from toolformer_dag.lake.warehouse import CLOSED, opened, warehouse_files
from toolformer_dag.lake.warehouse_building import build, out_of_date, version
from toolformer_dag.method.call_warehouse import CallWarehouse
from toolformer_dag.pipeline.stages import shown_outputs
from toolformer_dag.resources.step_processes import step_tags

if TYPE_CHECKING:
    from duckdb import DuckDBPyConnection  # Dagster keeps annotations, and DuckDB reports what is left at the end

THIS = sys.modules[__name__]
"""Dagster keeps functions of this module; since they see the module, Python clears it, and DuckDB reports no leak."""
WAREHOUSE, DATASET = "warehouse/toolformer_duckdb", "warehouse/dataset"
STEP = "tables"
"""The step that makes all of them: a step each would cost seconds where nothing changed."""
TABLES = {table.view: table for table in PAPER_TABLES}
SHOWN = tuple(f"tables/{view}" for view in TABLES)
SHOWN_AS = 2
"""Raise this when the same rows are shown in another way."""
EXAMPLE_CHARACTERS = 320


def warehouse(plan: Plan, above: Sequence[str]) -> Output:
    """Return the asset of the DuckDB file: all tables of the lake, with the views of views.sql.

    `above`: the assets whose rows it holds.
    """
    named = {"profile": plan.settings.profile, "model.name": plan.settings.model.name}
    declared = CallWarehouse(all_tables(shown_outputs(plan)), plan.lane_names, named)
    database = plan.settings.warehouse

    def reasons() -> Reasons:
        files = warehouse_files(plan.lake, database)
        return shared_reasons(files, lambda: out_of_date(plan.lake, declared, database))

    def file(context: dg.AssetExecutionContext, lake: Lake) -> dg.MaterializeResult:
        lake.storage.wait_for_writes()  # the costs of the steps before
        for name, damage in withdraw_damaged(lake).items():
            context.log.warning(f"{name} is left out until it is made again: {damage}")
        shown = {} if reasons() else {**last_metadata(context), UNCHANGED: True}
        if len(shown) < 2:
            rows = build(lake, declared, database)
            warehouse_files(lake, database).send()
            shown = {
                ROWS: rows["loss_deltas"],
                "rows": dg.MetadataValue.md(counts_table("table", rows)),
                "file": dg.MetadataValue.path(str(database)),
                UNCHANGED: False,
            }
        return dg.MaterializeResult(
            data_version=dg.DataVersion(version(lake, declared)), metadata={**shown, TOKENS: 0, CALLS: 0}
        )

    return Output(
        name=plan.named(WAREHOUSE),
        settings=declared.settings,
        depends_on=tuple(above),
        description="Every scored call in one DuckDB file: loss_deltas, the other tables, the views.",
        kinds={"duckdb"},
        pool="lake",
        reasons=reasons,
        version=lambda: version(plan.lake, declared),
        make=file,
    )


def dataset(plan: Plan) -> Output:
    """Return the asset of C* as a Hugging Face data set, in the form `text`."""
    form, folder, files = text_form(), asset_folder(plan), asset_files(plan)

    def reasons() -> Reasons:
        return shared_reasons(files, lambda: corpus_reasons(plan, folder, form))

    def stored_version() -> str | None:
        exported = read_exported(folder)
        return exported.version if exported else None

    def export(context: dg.AssetExecutionContext, lake: Lake) -> dg.MaterializeResult:  # `lake`: for the step's claim
        unchanged = not reasons() and tells_the_same(plan, folder)
        exported = read_exported(folder) if unchanged else None
        if exported is None:
            exported = export_corpus(plan, folder, form, of_the_lake=True)
            files.send()
        return dg.MaterializeResult(
            data_version=dg.DataVersion(exported.version),
            metadata={
                ROWS: sum(exported.rows.values()),
                "rows": dg.MetadataValue.md(counts_table("split", exported.rows)),
                "folder": dg.MetadataValue.path(str(folder)),
                UNCHANGED: unchanged,
                TOKENS: 0,
                CALLS: 0,
            },
        )

    return Output(
        name=plan.named(DATASET),
        settings=corpus_settings(plan, form),
        depends_on=(plan.named(WAREHOUSE),),
        description="C* as a Hugging Face data set.",
        kinds={"parquet", "huggingface"},
        pool="lake",
        reasons=reasons,
        version=stored_version,
        make=export,
    )


def paper_table(plan: Plan, name: str) -> Output:
    """Return the asset of a table: nothing is stored, it is read again whenever there is another warehouse."""
    return Output(
        name=plan.named(name),
        settings={"shown": SHOWN_AS},
        depends_on=(plan.named(WAREHOUSE),),
        description=f"{_table(name).title}; ours and the paper's.",
        kinds={"duckdb", "sql"},
        pool="lake",
        reasons=Reasons,
        version=lambda: None,
        make=_shown,
    )


def paper_assets(outputs: Sequence[Output], plan: Plan) -> dg.AssetsDefinition:
    """Return the assets of the paper's tables; the warehouse is opened once for all."""
    step, database = f"{STEP}{plan.suffix}", plan.settings.warehouse
    specs = [
        dg.AssetSpec(
            asset_key(output.name),
            group_name=step,
            deps=[asset_key(above) for above in output.depends_on],
            code_version=output.code_version,
            kinds=set(output.kinds),
            owners=OWNERS,
            description=output.description,
            metadata={"explore": dg.MetadataValue.url(explored(output.name, plan.suffix))},
        )
        for output in outputs
    ]

    @dg.multi_asset(name=step, specs=specs, can_subset=True, pool="lake", op_tags=step_tags("lake"))
    def tables(context: dg.AssetExecutionContext) -> Iterator[dg.MaterializeResult]:
        with opened(database, CLOSED) as connection:
            for output in outputs:
                if asset_key(output.name) in context.selected_asset_keys:
                    result = output.make(context, output=output, warehouse=connection)
                    tag_outcome(context, output.name, result.metadata or {})
                    yield result

    return tables


def tell_tables(outputs: Sequence[Output], plan: Plan, instance: dg.DagsterInstance) -> None:
    """Let the page show the paper's tables of the stored warehouse, where this instance has not seen them.

    `outputs`: those of the plan; call `tell_dagster` before, so that the warehouse is known. The file is opened where a
    table is not known, and left alone where it is out of date.
    """
    by_name = {output.name: output for output in outputs}
    stored = by_name[plan.named(WAREHOUSE)]
    version = stored.version()
    if version is None:
        return
    unknown = []
    for name in map(plan.named, SHOWN):
        read = read_versions(by_name[name], {stored.name: version})
        if not is_known(instance, asset_key(name), {CODE: by_name[name].code_version}, read):
            unknown.append(by_name[name])
    if not unknown or stored.reasons():
        return
    with opened(plan.settings.warehouse, CLOSED) as connection:
        for output in unknown:
            last = last_materialization(instance, asset_key(output.name))
            shown = _shown_table(output, connection, last.metadata if last else {})
            state = {VERSION: shown.version, CODE: output.code_version}
            tell_state(instance, output, state | read_versions(output, {stored.name: version}), shown.metadata)


def _table(name: str) -> PaperTable:
    return TABLES[name.rpartition("/")[2]]


def _shown(context: dg.AssetExecutionContext, output: Output, warehouse: "DuckDBPyConnection") -> dg.MaterializeResult:
    """Show a table of the paper as the result of its asset."""
    key = asset_key(output.name)
    shown = _shown_table(output, warehouse, last_metadata(context, key))
    return dg.MaterializeResult(asset_key=key, data_version=dg.DataVersion(shown.version), metadata=shown.metadata)


class ShownTable(NamedTuple):
    """What the page shows of a table of the paper. `version`: of its rows, its notes and the way they are shown."""

    version: str
    metadata: Mapping[str, Any]


def _shown_table(output: Output, warehouse: "DuckDBPyConnection", last: Mapping[str, Any]) -> ShownTable:
    """Return the rows as numbers, Markdown and a plot. `last`: what was shown last, again where nothing changed."""
    table = _table(output.name)
    rows, remarks, called = table.rows(warehouse), notes(warehouse, table), tools_called(warehouse, table)
    started = over_min_probability(warehouse, table)
    content = [None if frame is None else frame.write_json() for frame in (called, started)]
    version = fingerprint([output.code_version, [rows.write_json(), remarks, *content]])
    if getattr(last.get("content"), "value", None) == version:
        shown: Mapping[str, Any] = {**last, UNCHANGED: True}
    else:
        shown = {
            ROWS: rows.height,
            "table": dg.MetadataValue.md(frame_table(table.wide(rows), rows.height, EXAMPLE_CHARACTERS)),
            **({} if called is None else {"tools called": dg.MetadataValue.md(frame_table(called, called.height))}),
            **({} if started is None else {"over min_probability": dg.MetadataValue.md(start_curves(started))}),
            "notes": dg.MetadataValue.md("\n".join(f"- {as_text(note, EXAMPLE_CHARACTERS)}" for note in remarks)),
            "content": version,
            UNCHANGED: False,
            "numbers": dg.MetadataValue.json({"rows": rows.to_dicts()}),
            "plot": dg.MetadataValue.md(bars(rows, *PLOTTED[table.view])),
        }
    return ShownTable(version, shown)
