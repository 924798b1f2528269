"""Assets that show the lake to people and programs: the warehouse, C* as a data set, the paper's tables.

The warehouse is a DuckDB file with all tables of the lake; C* are the texts with their tool calls.
"""

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import dagster as dg
import polars as pl

from toolformer_dag.assets.declaration import (
    OWNERS,
    AssetDeclaration,
    asset_key,
    build_explorer_address,
    receive_and_find_reasons,
)
from toolformer_dag.assets.metadata import (
    CALLS,
    ROWS,
    TOKENS,
    UNCHANGED,
    find_last_materialization,
    format_code_cell,
    format_counts_table,
    format_frame_table,
    read_last_metadata,
)
from toolformer_dag.assets.plots import PLOTTED, bars, draw_start_curves
from toolformer_dag.assets.running import tag_outcome
from toolformer_dag.assets.staleness import CODE, VERSION, build_input_version_tags, is_known, report_materialization
from toolformer_dag.computing.plan import Plan
from toolformer_dag.computing.reasons import Reasons
from toolformer_dag.evaluation.evaluated_tables import list_all_tables, withdraw_damaged
from toolformer_dag.evaluation.paper_tables import (
    PAPER_TABLES,
    PaperTable,
    notes,
    query_over_min_probability,
    query_tool_shares,
)
from toolformer_dag.exports.corpus_export import (
    build_dataset_output,
    corpus_settings,
    export_corpus,
    find_corpus_reasons,
    get_dataset_folder,
    has_current_card,
)
from toolformer_dag.exports.dataset_folder import Exported, read_exported
from toolformer_dag.exports.export_forms import ExportForm, text_form
from toolformer_dag.identity import fingerprint
from toolformer_dag.lake.table import Lake
from toolformer_dag.lake.warehouse import CLOSED, build_warehouse_output, open_warehouse
from toolformer_dag.lake.warehouse_building import build, explain_out_of_date, version
from toolformer_dag.method.call_warehouse import CallWarehouse
from toolformer_dag.pipeline.stages import list_shown_outputs
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
    """The warehouse of a plan: its file, and the tables and lanes (one per tool) that it holds."""

    def __init__(self, plan: Plan) -> None:
        labels = {"profile": plan.settings.profile, "model.name": plan.settings.model.name}
        self._plan = plan
        self._declared = CallWarehouse(list_all_tables(list_shown_outputs(plan)), plan.lane_names, labels)
        self._database = plan.settings.warehouse
        self.settings = self._declared.settings

    def reasons(self) -> Reasons:
        """Return why the file is missing or out of date. Another machine may have made it."""
        files = build_warehouse_output(self._plan.lake, self._database)
        check = partial(explain_out_of_date, self._plan.lake, self._declared, self._database)
        return receive_and_find_reasons(files, check)

    def version(self) -> str:
        """Return the version that a file built from the lake now would have."""
        return version(self._plan.lake, self._declared)

    def make(self, context: dg.AssetExecutionContext, lake: Lake) -> dg.MaterializeResult:
        """Build the file if it is out of date, or if this Dagster instance has not shown it yet.

        Returns:
            What the asset's page shows: the number of rows of each table. If nothing changed, the same as last time.
        """
        lake.storage.wait_for_writes()  # the costs of the steps before
        _withdraw_damaged_tables(context, lake)

        shown_last = read_last_metadata(context)
        if self.reasons() or not shown_last:
            shown = self._build_database(lake)
        else:
            shown = {**shown_last, UNCHANGED: True}

        return dg.MaterializeResult(
            data_version=dg.DataVersion(version(lake, self._declared)),
            metadata={**shown, TOKENS: 0, CALLS: 0},  # building needs no model and no tool
        )

    def _build_database(self, lake: Lake) -> dict[str, Any]:
        """Build the file, and send it to the object store if there is one.

        Returns:
            What the asset's page shows: the number of rows of each table, and the path of the file.
        """
        row_counts = build(lake, self._declared, self._database)
        build_warehouse_output(lake, self._database).send()

        return {
            ROWS: row_counts["loss_deltas"],  # the table that people ask for
            "rows": dg.MetadataValue.md(format_counts_table("table", row_counts)),
            "file": dg.MetadataValue.path(str(self._database)),
            UNCHANGED: False,
        }


def _withdraw_damaged_tables(context: dg.AssetExecutionContext, lake: Lake) -> None:
    """Withdraw damaged measurements, which can only be made again, and log a warning for each."""
    for name, damage in withdraw_damaged(lake).items():
        context.log.warning(f"{name} is left out until it is made again: {damage}")


def warehouse(plan: Plan, inputs: Sequence[str]) -> AssetDeclaration:
    """Declare the asset of the warehouse, a DuckDB file with all tables of the lake and the views of views.sql.

    Args:
        inputs: The names of the assets whose rows it holds.
    """
    content = _Warehouse(plan)
    return AssetDeclaration(
        name=plan.named(WAREHOUSE),
        settings=content.settings,
        depends_on=tuple(inputs),
        description="Every scored call in one DuckDB file: loss_deltas, the other tables, the views.",
        kinds={"duckdb"},
        pool="lake",
        reasons=content.reasons,
        version=content.version,
        make=content.make,
    )


def dataset(plan: Plan) -> AssetDeclaration:
    """Declare the asset of C*, the texts with their tool calls, as a Hugging Face data set."""
    form = text_form()  # the columns of the data set: texts with and without their calls
    return AssetDeclaration(
        name=plan.named(DATASET),
        settings=corpus_settings(plan, form),
        depends_on=(plan.named(WAREHOUSE),),
        description="C* as a Hugging Face data set.",
        kinds={"parquet", "huggingface"},
        pool="lake",
        reasons=partial(_find_dataset_reasons, plan, form),
        version=partial(_read_exported_version, get_dataset_folder(plan)),
        make=partial(_export_if_stale, plan, form),  # the step of a run adds `context` and `lake`
    )


def _find_dataset_reasons(plan: Plan, form: ExportForm) -> Reasons:
    """Return why the data set is missing or out of date. Another machine may have made it."""
    return receive_and_find_reasons(
        build_dataset_output(plan), partial(find_corpus_reasons, plan, get_dataset_folder(plan), form)
    )


def _read_exported_version(folder: Path) -> str | None:
    """Return the version of an exported data set; None if there is none."""
    exported = read_exported(folder)
    return exported.version if exported else None


def _export_if_stale(
    plan: Plan, form: ExportForm, context: dg.AssetExecutionContext, lake: Lake
) -> dg.MaterializeResult:
    """Write the data set if its rows are out of date, or what its card says about the project.

    Args:
        lake: Not used here. A step that takes this resource waits until no other step of the pool uses the lake.
    """
    current = _find_current_dataset(plan, form)
    exported = current or _export_and_send(plan, form)

    shown = {**_build_dataset_metadata(plan, exported), UNCHANGED: current is not None}
    return dg.MaterializeResult(data_version=dg.DataVersion(exported.version), metadata=shown)


def _build_dataset_metadata(plan: Plan, exported: Exported) -> dict[str, Any]:
    """Build what the page of the data set shows: the rows by split, and the folder."""
    split_table = format_counts_table("split", exported.rows)
    return {
        ROWS: sum(exported.rows.values()),
        "rows": dg.MetadataValue.md(split_table),
        "folder": dg.MetadataValue.path(str(get_dataset_folder(plan))),
        TOKENS: 0,
        CALLS: 0,
    }


def _find_current_dataset(plan: Plan, form: ExportForm) -> Exported | None:
    """Return the stored data set if its rows and its card are up to date, else None."""
    if _find_dataset_reasons(plan, form):
        return None
    folder = get_dataset_folder(plan)
    return read_exported(folder) if has_current_card(plan, folder) else None


def _export_and_send(plan: Plan, form: ExportForm) -> Exported:
    """Write the data set, and upload it if there is an object store."""
    exported = export_corpus(plan, get_dataset_folder(plan), form, of_the_lake=True)
    build_dataset_output(plan).send()
    return exported


def paper_table(plan: Plan, name: str) -> AssetDeclaration:
    """Declare the asset of a table of the paper.

    Nothing is stored, because the table is read from each new warehouse. The asset has no version of its own
    and is never out of date.
    """
    return AssetDeclaration(
        name=plan.named(name),
        settings={"shown": SHOWN_AS},
        depends_on=(plan.named(WAREHOUSE),),
        description=f"{_get_paper_table(name).title}; ours and the paper's.",
        kinds={"duckdb", "sql"},
        pool="lake",
        reasons=Reasons,  # none, always
        version=lambda: None,
        make=_build_table_result,
    )


def build_paper_assets(outputs: Sequence[AssetDeclaration], plan: Plan) -> dg.AssetsDefinition:
    """Build the assets of the paper's tables as a single step, which opens the warehouse once for all selected tables.

    As separate steps of the pool "lake", they would have to wait for each other.
    """
    step_name = f"{STEP}{plan.suffix}"
    specs = [_build_paper_spec(output, plan.suffix) for output in outputs]

    @dg.multi_asset(name=step_name, specs=specs, can_subset=True, pool="lake", op_tags=step_tags("lake"))
    def tables(context: dg.AssetExecutionContext) -> Iterator[dg.MaterializeResult]:
        selected_keys = context.selected_asset_keys  # a run may make some of the tables only (can_subset)
        selected = [output for output in outputs if asset_key(output.name) in selected_keys]
        yield from _iter_table_results(context, plan, selected)

    return tables


def _iter_table_results(
    context: dg.AssetExecutionContext, plan: Plan, outputs: Sequence[AssetDeclaration]
) -> Iterator[dg.MaterializeResult]:
    """Read tables of the paper from the warehouse, and yield the result of each asset."""
    with open_warehouse(plan.settings.warehouse, CLOSED) as connection:
        for output in outputs:
            result = output.make(context, output=output, warehouse=connection)
            tag_outcome(context, output.name, result.metadata or {})
            yield result


def _build_paper_spec(output: AssetDeclaration, suffix: str) -> dg.AssetSpec:
    """Build Dagster's specification of a table of the paper.

    Args:
        suffix: Distinguishes the assets of a later round of annotation, such as "_round_2". Empty for the first round.
    """
    explorer = dg.MetadataValue.url(build_explorer_address(output.name, suffix))

    return dg.AssetSpec(
        asset_key(output.name),
        group_name=f"{STEP}{suffix}",
        deps=[asset_key(name) for name in output.depends_on],
        code_version=output.code_version,
        kinds=set(output.kinds),
        owners=OWNERS,
        description=output.description,
        metadata={"explore": explorer},  # a link on the asset's page
    )


def tell_tables(outputs: Sequence[AssetDeclaration], plan: Plan, instance: dg.DagsterInstance) -> None:
    """Report the tables of the paper to Dagster, if it does not know them as they are in the stored warehouse.

    Call `tell_dagster` first. Nothing is reported if the warehouse is missing or out of date.

    Args:
        outputs: All assets of the plan.
    """
    output_by_name = {output.name: output for output in outputs}
    stored_warehouse = output_by_name[plan.named(WAREHOUSE)]
    warehouse_version = stored_warehouse.version()
    if warehouse_version is None:
        return

    versions = {stored_warehouse.name: warehouse_version}
    paper_tables = [output_by_name[plan.named(name)] for name in SHOWN]
    unknown_tables = _select_unknown_tables(instance, paper_tables, versions)
    if not unknown_tables:
        return

    is_up_to_date = not stored_warehouse.reasons()  # asked last, since it looks at the files
    if is_up_to_date:
        _report_tables(instance, plan, unknown_tables, versions)


def _select_unknown_tables(
    instance: dg.DagsterInstance, tables: Sequence[AssetDeclaration], versions: Mapping[str, str]
) -> list[AssetDeclaration]:
    """Return the tables of the paper that Dagster does not know as they are shown now.

    versions: asset name -> version of what they are read from.
    """
    return [table for table in tables if not _is_known_table(instance, table, versions)]


def _report_tables(
    instance: dg.DagsterInstance, plan: Plan, tables: Sequence[AssetDeclaration], versions: Mapping[str, str]
) -> None:
    """Read tables of the paper from the warehouse, and report them to Dagster as materializations without a run.

    Args:
        versions: The version of each asset from which the tables are read, by its name.
    """
    with open_warehouse(plan.settings.warehouse, CLOSED) as warehouse:  # CLOSED: no query reaches another file
        for table in tables:
            last = find_last_materialization(instance, asset_key(table.name))
            shown_last = last.metadata if last else {}  # it is reported again if the content is the same
            shown = _build_shown_table(table, warehouse, shown_last)

            tags = {VERSION: shown.version, CODE: table.code_version, **build_input_version_tags(table, versions)}
            report_materialization(instance, table, tags, shown.metadata)


def _is_known_table(instance: dg.DagsterInstance, table: AssetDeclaration, versions: Mapping[str, str]) -> bool:
    """Check whether Dagster knows a table of the paper as it is shown now.

    Args:
        versions: The version of each asset from which the table is read, by its name.
    """
    return is_known(
        instance,
        asset_key(table.name),
        tags={CODE: table.code_version},
        input_tags=build_input_version_tags(table, versions),
    )


def _get_paper_table(name: str) -> PaperTable:
    """Return the table of the paper for the name of its asset."""
    return TABLES[name.rpartition("/")[2]]


def _build_table_result(
    context: dg.AssetExecutionContext, output: AssetDeclaration, warehouse: "DuckDBPyConnection"
) -> dg.MaterializeResult:
    """Return the result of the asset of a paper's table."""
    key = asset_key(output.name)
    shown = _build_shown_table(output, warehouse, read_last_metadata(context, key))
    return dg.MaterializeResult(asset_key=key, data_version=dg.DataVersion(shown.version), metadata=shown.metadata)


class ShownTable(NamedTuple):
    """What the page shows of a table of the paper. `version`: of its rows, its notes and how they are shown."""

    version: str
    metadata: Mapping[str, Any]


def _build_shown_table(
    output: AssetDeclaration, warehouse: "DuckDBPyConnection", last: Mapping[str, Any]
) -> ShownTable:
    """Build what the page of a paper's table shows.

    Args:
        last: The metadata that was shown last. If the content is still the same, it is shown again, marked UNCHANGED.
    """
    content = _TableContent.read(_get_paper_table(output.name), warehouse)
    version = fingerprint([output.code_version, content.identity()])

    last_version = getattr(last.get("content"), "value", None)  # the text in Dagster's metadata value, if there is one
    if last_version == version:
        return ShownTable(version, {**last, UNCHANGED: True})

    return ShownTable(version, {**content.metadata(), "content": version, UNCHANGED: False})


@dataclass(frozen=True, slots=True)
class _TableContent:
    """The content of a table of the paper.

    - `table`: which table it is
    - `rows`: its rows
    - `notes`: the sentences below it
    - `called`: which tools were called, for tables of benchmarks, else None
    - `start_rates`: calls and right answers by `decoding.min_probability`, for Table 9, else None
    """

    table: PaperTable
    rows: pl.DataFrame
    notes: list[str]
    called: pl.DataFrame | None
    start_rates: pl.DataFrame | None

    @staticmethod
    def read(table: PaperTable, warehouse: "DuckDBPyConnection") -> "_TableContent":
        """Read the content of a table from the warehouse."""
        return _TableContent(
            table=table,
            rows=table.rows(warehouse),
            notes=notes(warehouse, table),
            called=query_tool_shares(warehouse, table),
            start_rates=query_over_min_probability(warehouse, table),
        )

    def identity(self) -> list[Any]:
        """Return the content in a form that can be fingerprinted."""
        called_json = None if self.called is None else self.called.write_json()
        start_rates_json = None if self.start_rates is None else self.start_rates.write_json()
        return [self.rows.write_json(), self.notes, called_json, start_rates_json]

    def metadata(self) -> dict[str, Any]:
        """Build what the asset's page in Dagster shows: the table, its notes, its numbers, and a bar chart.

        For tables of benchmarks it also shows which tools were called, and for Table 9 curves over
        `decoding.min_probability`.
        """
        return {
            ROWS: self.rows.height,
            "table": dg.MetadataValue.md(self._format_markdown_table()),
            **self._build_benchmark_metadata(),
            "notes": dg.MetadataValue.md(self._format_notes()),
            "numbers": dg.MetadataValue.json({"rows": self.rows.to_dicts()}),
            "plot": dg.MetadataValue.md(self._draw_plot()),
        }

    def _format_markdown_table(self) -> str:
        """Return all rows in the paper's layout."""
        wide = self.table.wide(self.rows)
        return format_frame_table(wide, rows=self.rows.height, characters=EXAMPLE_CHARACTERS)

    def _draw_plot(self) -> str:
        """Return a bar chart of the rows, as Markdown."""
        plotted = PLOTTED[self.table.view]
        return bars(self.rows, plotted.named, plotted.figure)

    def _build_benchmark_metadata(self) -> dict[str, dg.MetadataValue]:
        """Return what only tables of benchmarks and Table 9 show; empty for the other tables."""
        shown: dict[str, dg.MetadataValue] = {}
        if self.called is not None:
            shown["tools called"] = dg.MetadataValue.md(format_frame_table(self.called, self.called.height))
        if self.start_rates is not None:
            shown["over min_probability"] = dg.MetadataValue.md(draw_start_curves(self.start_rates))
        return shown

    def _format_notes(self) -> str:
        """Return the notes as a Markdown list."""
        return "\n".join(f"- {format_code_cell(note, EXAMPLE_CHARACTERS)}" for note in self.notes)
