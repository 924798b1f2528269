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
    ASSET_OWNERS,
    AssetDeclaration,
    build_asset_key,
    build_explorer_url,
    receive_and_find_reasons,
)
from toolformer_dag.assets.metadata import (
    CALLS_LABEL,
    ROW_COUNT_LABEL,
    TOKENS_LABEL,
    UNCHANGED_LABEL,
    find_last_materialization,
    format_code_cell,
    format_counts_table,
    format_frame_table,
    read_last_metadata,
)
from toolformer_dag.assets.plots import BAR_COLUMNS_BY_VIEW, draw_bar_chart, draw_start_curves
from toolformer_dag.assets.running import tag_run_with_outcome
from toolformer_dag.assets.staleness import (
    CODE_VERSION_TAG,
    VERSION_TAG,
    build_input_version_tags,
    is_known_to_dagster,
    report_materialization,
)
from toolformer_dag.computing.plan import Plan
from toolformer_dag.computing.reasons import Reasons
from toolformer_dag.evaluation.evaluated_tables import list_all_tables, withdraw_damaged_measurements
from toolformer_dag.evaluation.paper_tables import (
    PAPER_TABLES,
    PaperTable,
    list_table_notes,
    query_over_min_probability,
    query_tool_shares,
)
from toolformer_dag.exports.corpus_export import (
    build_dataset_output,
    collect_corpus_settings,
    export_corpus,
    find_corpus_stale_reasons,
    get_dataset_folder,
    has_current_card,
)
from toolformer_dag.exports.dataset_folder import ExportRecord, read_export_record
from toolformer_dag.exports.export_forms import ExportForm, build_text_form
from toolformer_dag.identity import fingerprint
from toolformer_dag.lake.table import Lake
from toolformer_dag.lake.warehouse import NO_EXTERNAL_ACCESS_CONFIG, build_warehouse_output, open_warehouse
from toolformer_dag.lake.warehouse_building import build_warehouse, compute_warehouse_version, explain_out_of_date
from toolformer_dag.method.call_warehouse import CallWarehouse
from toolformer_dag.pipeline.stages import list_shown_outputs
from toolformer_dag.resources.step_processes import build_step_tags

if TYPE_CHECKING:
    from duckdb import DuckDBPyConnection  # Dagster keeps annotations, and DuckDB reports what is left at the end

THIS_MODULE = sys.modules[__name__]
"""Dagster keeps functions of this module; since they see the module, Python clears it, and DuckDB reports no leak."""
WAREHOUSE_ASSET = "warehouse/toolformer_duckdb"
"""The asset of the warehouse."""
DATASET_ASSET = "warehouse/dataset"
"""The asset of C* as a Hugging Face data set."""
PAPER_TABLES_STEP = "tables"
"""The step that shows all tables of the paper: a step each would cost seconds where nothing changed."""
PAPER_TABLE_BY_VIEW = {table.view_name: table for table in PAPER_TABLES}
"""The tables of the paper, by the view of the warehouse that they are read from."""
PAPER_TABLE_ASSETS = tuple(f"tables/{view}" for view in PAPER_TABLE_BY_VIEW)
"""The assets of the tables of the paper."""
LAYOUT_VERSION = 2
"""Raise this when the same rows are shown in another way."""
MAX_EXAMPLE_CHARACTERS = 320
"""Characters of a cell that the tables of the paper show, for their examples of calls."""


class _Warehouse:
    """The file of a plan's warehouse, with all tables of the lake; a lane in it is one tool with its settings."""

    def __init__(self, plan: Plan) -> None:
        """Declare which tables the file holds, by the settings of the plan."""
        stage_outputs = list_shown_outputs(plan)
        labels = {"profile": plan.settings.profile, "model.name": plan.settings.model.name}
        self._plan = plan
        self._declared_warehouse = CallWarehouse(list_all_tables(stage_outputs), plan.tool_name_by_lane_key, labels)
        self._database_path = plan.settings.warehouse_file
        self.settings = self._declared_warehouse.settings

    def find_reasons(self) -> Reasons:
        """Find out why the warehouse file is missing or out of date, after downloading a newer one if there is one."""
        shared_file = build_warehouse_output(self._plan.lake, self._database_path)
        find_local_reasons = partial(
            explain_out_of_date, self._plan.lake, self._declared_warehouse, self._database_path
        )
        return receive_and_find_reasons(shared_file, find_local_reasons)

    def compute_version(self) -> str:
        """Return the version that a file built from the lake now would have."""
        return compute_warehouse_version(self._plan.lake, self._declared_warehouse)

    def make_asset(self, context: dg.AssetExecutionContext, lake: Lake) -> dg.MaterializeResult:
        """Build the warehouse file if it is out of date, or if this Dagster instance has not shown it yet.

        Returns:
            The version of the file, and what the asset's page shows: the number of rows of each table. If nothing was
            built, the page shows the same as last time.
        """
        # The steps before this one may still be writing their costs, which are rows of the warehouse too.
        lake.storage.wait_for_background_write()
        _withdraw_damaged_tables(context, lake)

        last_metadata = read_last_metadata(context)
        if self.find_reasons() or not last_metadata:
            metadata = self._build_database(lake)
        else:
            metadata = {**last_metadata, UNCHANGED_LABEL: True}

        version = compute_warehouse_version(lake, self._declared_warehouse)
        return dg.MaterializeResult(
            data_version=dg.DataVersion(version),
            metadata={**metadata, TOKENS_LABEL: 0, CALLS_LABEL: 0},  # building needs no model and no tool
        )

    def _build_database(self, lake: Lake) -> dict[str, Any]:
        """Build the file, and send it to the object store if there is one.

        Returns:
            What the asset's page shows: the number of rows of each table, and the path of the file.
        """
        row_counts = build_warehouse(lake, self._declared_warehouse, self._database_path)
        build_warehouse_output(lake, self._database_path).send()

        return {
            ROW_COUNT_LABEL: row_counts["loss_deltas"],  # the table that people ask for
            "rows": dg.MetadataValue.md(format_counts_table("table", row_counts)),
            "file": dg.MetadataValue.path(str(self._database_path)),
            UNCHANGED_LABEL: False,
        }


def _withdraw_damaged_tables(context: dg.AssetExecutionContext, lake: Lake) -> None:
    """Withdraw damaged measurements from the lake, and log a warning for each.

    Their rows cannot be repaired. A measurement that is withdrawn is shown as missing until somebody makes it again.
    """
    for name, damage in withdraw_damaged_measurements(lake).items():
        context.log.warning(f"{name} is left out until it is made again: {damage}")


def declare_warehouse(plan: Plan, input_names: Sequence[str]) -> AssetDeclaration:
    """Declare the asset of the warehouse: a DuckDB file with all tables of the lake, and with views over them.

    Args:
        input_names: The names of the assets whose rows the file holds.
    """
    content = _Warehouse(plan)
    return AssetDeclaration(
        name=plan.add_round_suffix(WAREHOUSE_ASSET),
        settings=content.settings,
        depends_on=tuple(input_names),
        description="Every scored call in one DuckDB file: loss_deltas, the other tables, the views.",
        kinds={"duckdb"},
        pool="lake",
        find_reasons=content.find_reasons,
        get_version=content.compute_version,
        make_asset=content.make_asset,
    )


def declare_dataset(plan: Plan) -> AssetDeclaration:
    """Declare the asset of the data set of C*: the texts with their tool calls, in Hugging Face's format."""
    form = build_text_form()  # the columns of the data set: texts with and without their calls
    return AssetDeclaration(
        name=plan.add_round_suffix(DATASET_ASSET),
        settings=collect_corpus_settings(plan, form),
        depends_on=(plan.add_round_suffix(WAREHOUSE_ASSET),),
        description="C* as a Hugging Face data set.",
        kinds={"parquet", "huggingface"},
        pool="lake",
        find_reasons=partial(_find_dataset_reasons, plan, form),
        get_version=partial(_read_exported_version, get_dataset_folder(plan)),
        make_asset=partial(_export_if_stale, plan, form),  # the step of a run adds `context` and `lake`
    )


def _find_dataset_reasons(plan: Plan, form: ExportForm) -> Reasons:
    """Find out why the data set is missing or out of date, after downloading a newer one if there is one."""
    folder = get_dataset_folder(plan)
    find_local_reasons = partial(find_corpus_stale_reasons, plan, folder, form)
    return receive_and_find_reasons(build_dataset_output(plan), find_local_reasons)


def _read_exported_version(folder: Path) -> str | None:
    """Return the version of the data set in a folder, or None if there is no data set."""
    export_record = read_export_record(folder)
    return export_record.content_fingerprint if export_record else None


def _export_if_stale(
    plan: Plan, form: ExportForm, context: dg.AssetExecutionContext, lake: Lake
) -> dg.MaterializeResult:
    """Write the data set of C*, unless its rows and its card are up to date.

    The card (README.md) says what the project knows of the data set, so it can change without the rows.

    Args:
        form: The columns of the data set.
        context: Not used here, but every step passes it.
        lake: Not used here. A step that takes this resource waits until no other step of the pool uses the lake.

    Returns:
        The version of the rows, and what the asset's page shows.
    """
    current_dataset = _find_current_dataset(plan, form)
    is_unchanged = current_dataset is not None
    dataset = current_dataset or _export_and_send(plan, form)

    metadata = {**_build_dataset_metadata(plan, dataset), UNCHANGED_LABEL: is_unchanged}
    return dg.MaterializeResult(data_version=dg.DataVersion(dataset.content_fingerprint), metadata=metadata)


def _build_dataset_metadata(plan: Plan, exported: ExportRecord) -> dict[str, Any]:
    """Build what the page of the data set shows: its number of rows, in all and by split, its folder, and its cost."""
    split_table = format_counts_table("split", exported.row_counts)
    return {
        ROW_COUNT_LABEL: sum(exported.row_counts.values()),
        "rows": dg.MetadataValue.md(split_table),
        "folder": dg.MetadataValue.path(str(get_dataset_folder(plan))),
        TOKENS_LABEL: 0,  # writing the data set needs no model and no tool
        CALLS_LABEL: 0,
    }


def _find_current_dataset(plan: Plan, form: ExportForm) -> ExportRecord | None:
    """Return the record of the stored data set, or None if its rows or its card are out of date."""
    if _find_dataset_reasons(plan, form):
        return None
    folder = get_dataset_folder(plan)
    return read_export_record(folder) if has_current_card(plan, folder) else None


def _export_and_send(plan: Plan, form: ExportForm) -> ExportRecord:
    """Write the data set, upload it if there is an object store, and return its record."""
    exported = export_corpus(plan, get_dataset_folder(plan), form, is_lake_dataset=True)
    build_dataset_output(plan).send()
    return exported


def declare_paper_table(plan: Plan, asset_name: str) -> AssetDeclaration:
    """Declare the asset of a table of the paper, which shows our numbers beside the paper's.

    Nothing is stored, because the table is read from each new warehouse. So the asset has no version before it is
    made, and it is never out of date by itself.

    Args:
        asset_name: One of PAPER_TABLE_ASSETS, such as "tables/table_3".
    """
    return AssetDeclaration(
        name=plan.add_round_suffix(asset_name),
        settings={"shown": LAYOUT_VERSION},
        depends_on=(plan.add_round_suffix(WAREHOUSE_ASSET),),
        description=f"{_get_paper_table(asset_name).title}; ours and the paper's.",
        kinds={"duckdb", "sql"},
        pool="lake",
        find_reasons=Reasons,  # none, always
        get_version=lambda: None,
        make_asset=_build_table_result,
    )


def build_paper_assets(outputs: Sequence[AssetDeclaration], plan: Plan) -> dg.AssetsDefinition:
    """Build the Dagster assets of the paper's tables, which one step makes together.

    The step opens the warehouse once for all tables. As steps of their own in the pool "lake", they would have to
    wait for each other.

    Args:
        outputs: The declared assets of the tables.
    """
    step_name = f"{PAPER_TABLES_STEP}{plan.round_suffix}"
    specs = [_build_paper_table_spec(output, plan.round_suffix) for output in outputs]

    @dg.multi_asset(name=step_name, specs=specs, can_subset=True, pool="lake", op_tags=build_step_tags("lake"))
    def tables(context: dg.AssetExecutionContext) -> Iterator[dg.MaterializeResult]:
        # A run may select some of the tables only (`can_subset`).
        selected_keys = context.selected_asset_keys
        selected_outputs = [output for output in outputs if build_asset_key(output.name) in selected_keys]
        yield from _iter_paper_table_results(context, plan, selected_outputs)

    return tables


def _iter_paper_table_results(
    context: dg.AssetExecutionContext, plan: Plan, outputs: Sequence[AssetDeclaration]
) -> Iterator[dg.MaterializeResult]:
    """Read tables of the paper from the warehouse, and yield the result of each table's asset.

    Each result is also counted in the tags of the run: the table was computed, or it was unchanged.
    """
    with open_warehouse(plan.settings.warehouse_file, NO_EXTERNAL_ACCESS_CONFIG) as connection:
        for output in outputs:
            result = output.make_asset(context, output=output, warehouse=connection)
            tag_run_with_outcome(context, output.name, result.metadata or {})
            yield result


def _build_paper_table_spec(output: AssetDeclaration, round_suffix: str) -> dg.AssetSpec:
    """Build Dagster's specification of the asset of a paper's table.

    Args:
        output: The declared asset.
        round_suffix: The end of all names of a later round of annotation, such as "_round_2". Empty for the first.
    """
    explorer_link = dg.MetadataValue.url(build_explorer_url(output.name, round_suffix))

    return dg.AssetSpec(
        build_asset_key(output.name),
        group_name=f"{PAPER_TABLES_STEP}{round_suffix}",
        deps=[build_asset_key(name) for name in output.depends_on],
        code_version=output.code_version,
        kinds=set(output.kinds),
        owners=ASSET_OWNERS,
        description=output.description,
        metadata={"explore": explorer_link},
    )


def report_paper_tables(outputs: Sequence[AssetDeclaration], plan: Plan, instance: dg.DagsterInstance) -> None:
    """Report the tables of the paper to a Dagster instance that has not shown them as they are now.

    The warehouse may have been built elsewhere, for example on another machine; then this instance has no run that
    showed the tables. Call `report_stored_assets` first, so that the instance knows the warehouse itself. Nothing is
    reported if the stored warehouse is missing or out of date.

    Args:
        outputs: All assets of the plan.
    """
    output_by_name = {output.name: output for output in outputs}
    warehouse = output_by_name[plan.add_round_suffix(WAREHOUSE_ASSET)]
    warehouse_version = warehouse.get_version()
    if warehouse_version is None:
        return

    version_by_asset = {warehouse.name: warehouse_version}
    paper_tables = [output_by_name[plan.add_round_suffix(name)] for name in PAPER_TABLE_ASSETS]
    unknown_tables = _select_unknown_paper_tables(instance, paper_tables, version_by_asset)
    if not unknown_tables:
        return

    # Checked last, because it has to look at the files.
    is_up_to_date = not warehouse.find_reasons()
    if is_up_to_date:
        _report_unknown_paper_tables(instance, plan, unknown_tables, version_by_asset)


def _select_unknown_paper_tables(
    instance: dg.DagsterInstance, paper_tables: Sequence[AssetDeclaration], version_by_asset: Mapping[str, str]
) -> list[AssetDeclaration]:
    """Return the tables of the paper that Dagster has not yet shown with today's settings and inputs.

    Args:
        paper_tables: The declared assets of the tables.
        version_by_asset: The version of each asset from which the tables are read, by its name.
    """
    return [table for table in paper_tables if not _is_known_paper_table(instance, table, version_by_asset)]


def _report_unknown_paper_tables(
    instance: dg.DagsterInstance,
    plan: Plan,
    paper_tables: Sequence[AssetDeclaration],
    version_by_asset: Mapping[str, str],
) -> None:
    """Read tables of the paper from the warehouse, and report them to Dagster as made, although no run made them.

    Args:
        paper_tables: The declared assets of the tables that Dagster has not yet shown with today's settings and inputs.
        version_by_asset: The version of each asset from which the tables are read, by its name.
    """
    with open_warehouse(plan.settings.warehouse_file, NO_EXTERNAL_ACCESS_CONFIG) as connection:
        for table in paper_tables:
            # If the content of the table is still the same, `_build_shown_table` returns the last metadata again.
            last_materialization = find_last_materialization(instance, build_asset_key(table.name))
            last_metadata = last_materialization.metadata if last_materialization else {}
            shown_table = _build_shown_table(table, connection, last_metadata)

            tags = {
                VERSION_TAG: shown_table.version,
                CODE_VERSION_TAG: table.code_version,
                **build_input_version_tags(table, version_by_asset),
            }
            report_materialization(instance, table, tags, shown_table.metadata)


def _is_known_paper_table(
    instance: dg.DagsterInstance, table: AssetDeclaration, version_by_asset: Mapping[str, str]
) -> bool:
    """Check whether the last thing that Dagster knows of a table is made with today's settings and inputs.

    Args:
        version_by_asset: The version of each asset from which the table is read, by its name.
    """
    return is_known_to_dagster(
        instance,
        build_asset_key(table.name),
        required_tags={CODE_VERSION_TAG: table.code_version},
        input_tags=build_input_version_tags(table, version_by_asset),
    )


def _get_paper_table(asset_name: str) -> PaperTable:
    """Return the table of the paper that an asset shows: Table 3 for "tables/table_3"."""
    view_name = asset_name.rpartition("/")[2]
    return PAPER_TABLE_BY_VIEW[view_name]


def _build_table_result(
    context: dg.AssetExecutionContext, output: AssetDeclaration, warehouse: "DuckDBPyConnection"
) -> dg.MaterializeResult:
    """Read a table of the paper from the warehouse, and return it as the result of its asset."""
    asset_key = build_asset_key(output.name)
    last_metadata = read_last_metadata(context, asset_key)
    shown_table = _build_shown_table(output, warehouse, last_metadata)
    return dg.MaterializeResult(
        asset_key=asset_key,
        data_version=dg.DataVersion(shown_table.version),
        metadata=shown_table.metadata,
    )


class ShownTable(NamedTuple):
    """A table of the paper as the page of its asset shows it.

    Attributes:
        version: The fingerprint of its rows, its notes and the way they are shown.
        metadata: What the page shows, by label.
    """

    version: str
    metadata: Mapping[str, Any]


def _build_shown_table(
    output: AssetDeclaration, warehouse: "DuckDBPyConnection", last_metadata: Mapping[str, Any]
) -> ShownTable:
    """Read a table of the paper from the warehouse, and build what the page of its asset shows.

    Args:
        output: The declared asset of the table.
        last_metadata: What the page showed last. If the content is still the same, it is shown again, marked as
            unchanged.
    """
    content = _TableContent.read_from_warehouse(_get_paper_table(output.name), warehouse)
    version = fingerprint([output.code_version, content.build_identity()])

    # The version stands under "content", as the text inside one of Dagster's metadata values.
    last_version_value = last_metadata.get("content")
    last_version = getattr(last_version_value, "value", None)
    if last_version == version:
        return ShownTable(version, {**last_metadata, UNCHANGED_LABEL: True})

    metadata = {**content.build_metadata(), "content": version, UNCHANGED_LABEL: False}
    return ShownTable(version, metadata)


@dataclass(frozen=True, slots=True)
class _TableContent:
    """What a table of the paper says, as read from the warehouse.

    Attributes:
        table: Which table of the paper it is.
        rows: Its rows.
        notes: The sentences below it.
        tool_shares: How often each tool was called. None for a table that shows no benchmark.
        rates_by_min_probability: The shares of calls and of right answers by `decoding.min_probability`, for Table 9.
            None for the other tables.
    """

    table: PaperTable
    rows: pl.DataFrame
    notes: list[str]
    tool_shares: pl.DataFrame | None
    rates_by_min_probability: pl.DataFrame | None

    @staticmethod
    def read_from_warehouse(table: PaperTable, warehouse: "DuckDBPyConnection") -> "_TableContent":
        """Read the content of a table from the warehouse."""
        return _TableContent(
            table=table,
            rows=table.query_rows(warehouse),
            notes=list_table_notes(warehouse, table),
            tool_shares=query_tool_shares(warehouse, table),
            rates_by_min_probability=query_over_min_probability(warehouse, table),
        )

    def build_identity(self) -> list[Any]:
        """Return the content as plain values, which can be fingerprinted."""
        tool_shares_json = None if self.tool_shares is None else self.tool_shares.write_json()
        rates_json = None if self.rates_by_min_probability is None else self.rates_by_min_probability.write_json()
        return [self.rows.write_json(), self.notes, tool_shares_json, rates_json]

    def build_metadata(self) -> dict[str, Any]:
        """Build what the asset's page in Dagster shows: the table, its notes, its numbers, and a bar chart.

        For tables of benchmarks it also shows which tools were called, and for Table 9 curves over
        `decoding.min_probability`.
        """
        table = dg.MetadataValue.md(self._format_markdown_table())
        notes = dg.MetadataValue.md(self._format_notes())
        bar_chart = dg.MetadataValue.md(self._draw_plot())
        return {
            ROW_COUNT_LABEL: self.rows.height,
            "table": table,
            **self._build_benchmark_metadata(),
            "notes": notes,
            "numbers": dg.MetadataValue.json({"rows": self.rows.to_dicts()}),
            "plot": bar_chart,
        }

    def _format_markdown_table(self) -> str:
        """Return all rows as a Markdown table in the paper's layout."""
        wide = self.table.format_rows(self.rows)
        return format_frame_table(wide, max_rows=self.rows.height, max_characters=MAX_EXAMPLE_CHARACTERS)

    def _draw_plot(self) -> str:
        """Return a bar chart of the rows as a Markdown image."""
        plotted = BAR_COLUMNS_BY_VIEW[self.table.view_name]
        return draw_bar_chart(self.rows, plotted.label_columns, plotted.length_column)

    def _build_benchmark_metadata(self) -> dict[str, dg.MetadataValue]:
        """Build what only tables of benchmarks and Table 9 show; return nothing for the other tables."""
        metadata: dict[str, dg.MetadataValue] = {}
        if self.tool_shares is not None:
            shares_table = format_frame_table(self.tool_shares, self.tool_shares.height)
            metadata["tools called"] = dg.MetadataValue.md(shares_table)

        if self.rates_by_min_probability is not None:
            curves = draw_start_curves(self.rates_by_min_probability)
            metadata["over min_probability"] = dg.MetadataValue.md(curves)
        return metadata

    def _format_notes(self) -> str:
        """Return the notes as a Markdown list."""
        return "\n".join(f"- {format_code_cell(note, MAX_EXAMPLE_CHARACTERS)}" for note in self.notes)
