"""What the lake holds, for people and programs: the warehouse, C* as a data set, the paper's tables (as one step).

The warehouse is a DuckDB file with all tables of the lake. C* are the texts with their calls in them. The tables of the
paper are read from the warehouse and stored nowhere else.
"""

import sys
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import dagster as dg

from toolformer_dag.assets.declaration import OWNERS, AssetDeclaration, asset_key, explorer_address, shared_reasons
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
from toolformer_dag.assets.staleness import CODE, VERSION, input_version_tags, is_known, report_materialization
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
from toolformer_dag.exports.export_forms import ExportForm, text_form
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
WAREHOUSE = "warehouse/toolformer_duckdb"
"""The asset of the warehouse."""
DATASET = "warehouse/dataset"
"""The asset of C* as a Hugging Face data set."""
STEP = "tables"
"""The step that shows all tables of the paper: a step each would cost seconds where nothing changed."""
TABLES = {table.view: table for table in PAPER_TABLES}
"""The tables of the paper, by the view of the warehouse that they are read from."""
SHOWN = tuple(f"tables/{view}" for view in TABLES)
"""The assets of the tables of the paper."""
SHOWN_AS = 2
"""Raise this when the same rows are shown in another way."""
EXAMPLE_CHARACTERS = 320
"""Characters of a cell that the tables of the paper show, for their examples of calls."""


class _Warehouse:
    """The warehouse of a plan: its file, and the tables and lanes that it holds."""

    def __init__(self, plan: Plan) -> None:
        named = {"profile": plan.settings.profile, "model.name": plan.settings.model.name}
        self._plan = plan
        self._declared = CallWarehouse(all_tables(shown_outputs(plan)), plan.lane_names, named)
        self._database = plan.settings.warehouse
        self.settings = self._declared.settings

    def reasons(self) -> Reasons:
        """Return why the file is missing or out of date. Another machine may have made it."""
        files = warehouse_files(self._plan.lake, self._database)
        check = partial(out_of_date, self._plan.lake, self._declared, self._database)
        return shared_reasons(files, check)

    def version(self) -> str:
        """Return the version of the file that would be built of the lake now."""
        return version(self._plan.lake, self._declared)

    def make(self, context: dg.AssetExecutionContext, lake: Lake) -> dg.MaterializeResult:
        """Build the file where it is out of date, or where this Dagster instance has not seen it. Show its tables."""
        lake.storage.wait_for_writes()  # the costs of the steps before
        for name, damage in withdraw_damaged(lake).items():
            context.log.warning(f"{name} is left out until it is made again: {damage}")
        last_shown = last_metadata(context)
        if self.reasons() or not last_shown:
            shown = self._build(lake)
        else:
            shown = {**last_shown, UNCHANGED: True}
        return dg.MaterializeResult(
            data_version=dg.DataVersion(version(lake, self._declared)),
            metadata={**shown, TOKENS: 0, CALLS: 0},
        )

    def _build(self, lake: Lake) -> dict[str, Any]:
        """Build the file, and return what its page shows: how many rows each table has."""
        row_counts = build(lake, self._declared, self._database)
        warehouse_files(lake, self._database).send()
        return {
            ROWS: row_counts["loss_deltas"],  # the table that people ask for
            "rows": dg.MetadataValue.md(counts_table("table", row_counts)),
            "file": dg.MetadataValue.path(str(self._database)),
            UNCHANGED: False,
        }


def warehouse(plan: Plan, above: Sequence[str]) -> AssetDeclaration:
    """Return the asset of the DuckDB file: all tables of the lake, with the views of views.sql.

    `above`: the assets whose rows it holds.
    """
    content = _Warehouse(plan)
    return AssetDeclaration(
        name=plan.named(WAREHOUSE),
        settings=content.settings,
        depends_on=tuple(above),
        description="Every scored call in one DuckDB file: loss_deltas, the other tables, the views.",
        kinds={"duckdb"},
        pool="lake",
        reasons=content.reasons,
        version=content.version,
        make=content.make,
    )


def dataset(plan: Plan) -> AssetDeclaration:
    """Return the asset of C*, the texts with their calls, as a Hugging Face data set in the form `text`.

    It is out of date where C* or what its card says of the project has changed.
    """
    form = text_form()
    return AssetDeclaration(
        name=plan.named(DATASET),
        settings=corpus_settings(plan, form),
        depends_on=(plan.named(WAREHOUSE),),
        description="C* as a Hugging Face data set.",
        kinds={"parquet", "huggingface"},
        pool="lake",
        reasons=partial(_dataset_reasons, plan, form),
        version=partial(_exported_version, asset_folder(plan)),
        make=partial(_export, plan, form),
    )


def _dataset_reasons(plan: Plan, form: ExportForm) -> Reasons:
    """Return why the data set is missing or out of date. Another machine may have made it."""
    return shared_reasons(asset_files(plan), partial(corpus_reasons, plan, asset_folder(plan), form))


def _exported_version(folder: Path) -> str | None:
    """Return the version of an exported data set; None where there is none."""
    exported = read_exported(folder)
    return exported.version if exported else None


def _export(plan: Plan, form: ExportForm, context: dg.AssetExecutionContext, lake: Lake) -> dg.MaterializeResult:
    """Write the data set where its rows, or what its card says of the project, are out of date.

    lake: not read here; a step that takes this resource waits until no other step of the pool uses the lake.
    """
    folder = asset_folder(plan)
    has_current_rows = not _dataset_reasons(plan, form)
    unchanged = has_current_rows and tells_the_same(plan, folder)
    exported = read_exported(folder) if unchanged else None
    if exported is None:
        exported = export_corpus(plan, folder, form, of_the_lake=True)
        asset_files(plan).send()
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


def paper_table(plan: Plan, name: str) -> AssetDeclaration:
    """Return the asset of a table of the paper, such as "tables/gsm8k".

    Nothing is stored: the table is read again whenever the warehouse is another one. So it has no version of its own,
    and never a reason to be out of date.
    """
    return AssetDeclaration(
        name=plan.named(name),
        settings={"shown": SHOWN_AS},
        depends_on=(plan.named(WAREHOUSE),),
        description=f"{_table(name).title}; ours and the paper's.",
        kinds={"duckdb", "sql"},
        pool="lake",
        reasons=Reasons,  # none, always
        version=lambda: None,
        make=_shown,
    )


def paper_assets(outputs: Sequence[AssetDeclaration], plan: Plan) -> dg.AssetsDefinition:
    """Return the assets of the paper's tables as one step, which opens the warehouse once for all of them.

    Dagster may select some of the tables; only these are read.
    """
    step_name = f"{STEP}{plan.suffix}"
    specs = [
        dg.AssetSpec(
            asset_key(output.name),
            group_name=step_name,
            deps=[asset_key(above) for above in output.depends_on],
            code_version=output.code_version,
            kinds=set(output.kinds),
            owners=OWNERS,
            description=output.description,
            metadata={"explore": dg.MetadataValue.url(explorer_address(output.name, plan.suffix))},
        )
        for output in outputs
    ]

    @dg.multi_asset(name=step_name, specs=specs, can_subset=True, pool="lake", op_tags=step_tags("lake"))
    def tables(context: dg.AssetExecutionContext) -> Iterator[dg.MaterializeResult]:
        selected = [output for output in outputs if asset_key(output.name) in context.selected_asset_keys]
        with opened(plan.settings.warehouse, CLOSED) as connection:
            for output in selected:
                result = output.make(context, output=output, warehouse=connection)
                tag_outcome(context, output.name, result.metadata or {})
                yield result

    return tables


def tell_tables(outputs: Sequence[AssetDeclaration], plan: Plan, instance: dg.DagsterInstance) -> None:
    """Report the paper's tables to Dagster where this instance does not know them as the stored warehouse has them.

    Nothing is reported of a warehouse that is missing or out of date.
    outputs: all assets of the plan. Call `tell_dagster` before, so that the warehouse is known.
    """
    output_by_name = {output.name: output for output in outputs}
    stored_warehouse = output_by_name[plan.named(WAREHOUSE)]
    warehouse_version = stored_warehouse.version()
    if warehouse_version is None:
        return
    versions = {stored_warehouse.name: warehouse_version}
    tables = [output_by_name[plan.named(name)] for name in SHOWN]
    unknown_tables = [table for table in tables if not _is_known_table(instance, table, versions)]
    if not unknown_tables or stored_warehouse.reasons():
        return
    with opened(plan.settings.warehouse, CLOSED) as connection:
        for table in unknown_tables:
            last = last_materialization(instance, asset_key(table.name))
            shown = _shown_table(table, connection, last.metadata if last else {})
            tags = {VERSION: shown.version, CODE: table.code_version, **input_version_tags(table, versions)}
            report_materialization(instance, table, tags, shown.metadata)


def _is_known_table(instance: dg.DagsterInstance, table: AssetDeclaration, versions: Mapping[str, str]) -> bool:
    """Return whether Dagster knows a table of the paper, as it is shown now, of the warehouse of these versions."""
    return is_known(
        instance,
        asset_key(table.name),
        tags={CODE: table.code_version},
        input_tags=input_version_tags(table, versions),
    )


def _table(name: str) -> PaperTable:
    """Return the table of the paper of an asset's name."""
    return TABLES[name.rpartition("/")[2]]


def _shown(
    context: dg.AssetExecutionContext, output: AssetDeclaration, warehouse: "DuckDBPyConnection"
) -> dg.MaterializeResult:
    """Show a table of the paper as the result of its asset."""
    key = asset_key(output.name)
    shown = _shown_table(output, warehouse, last_metadata(context, key))
    return dg.MaterializeResult(asset_key=key, data_version=dg.DataVersion(shown.version), metadata=shown.metadata)


class ShownTable(NamedTuple):
    """What the page shows of a table of the paper. `version`: of its rows, its notes and the way they are shown."""

    version: str
    metadata: Mapping[str, Any]


def _shown_table(output: AssetDeclaration, warehouse: "DuckDBPyConnection", last: Mapping[str, Any]) -> ShownTable:
    """Return a table of the paper as numbers, Markdown and a plot.

    last: the metadata that was shown last; it is shown again, marked UNCHANGED, where nothing has changed.
    """
    table = _table(output.name)
    rows = table.rows(warehouse)
    remarks = notes(warehouse, table)
    called = tools_called(warehouse, table)  # None for most tables
    start_rates = over_min_probability(warehouse, table)  # None for most tables
    called_json = None if called is None else called.write_json()
    start_rates_json = None if start_rates is None else start_rates.write_json()
    content = [rows.write_json(), remarks, called_json, start_rates_json]
    version = fingerprint([output.code_version, content])
    if getattr(last.get("content"), "value", None) == version:
        return ShownTable(version, {**last, UNCHANGED: True})
    shown = {
        ROWS: rows.height,
        "table": dg.MetadataValue.md(frame_table(table.wide(rows), rows.height, EXAMPLE_CHARACTERS)),
    }
    if called is not None:
        shown["tools called"] = dg.MetadataValue.md(frame_table(called, called.height))
    if start_rates is not None:
        shown["over min_probability"] = dg.MetadataValue.md(start_curves(start_rates))
    shown |= {
        "notes": dg.MetadataValue.md("\n".join(f"- {as_text(note, EXAMPLE_CHARACTERS)}" for note in remarks)),
        "content": version,
        UNCHANGED: False,
        "numbers": dg.MetadataValue.json({"rows": rows.to_dicts()}),
        "plot": dg.MetadataValue.md(bars(rows, *PLOTTED[table.view])),
    }
    return ShownTable(version, shown)
