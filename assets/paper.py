"""tables/table_2 to tables/table_10 and tables/figure_4: the paper's tables over the warehouse, as one step."""

from collections.abc import Iterator, Mapping
from typing import Any

import dagster as dg

from assets.metadata import UNCHANGED, as_text, frame_table, image, last_metadata
from assets.outputs import SHOWN, Output
from assets.plots import PLOTS
from assets.tables import OWNERS, asset_key, explored
from resources import WarehouseResource
from resources.step_processes import step_tags
from toolformer_dag.evaluation.paper_tables import PAPER_TABLES, PaperTable, notes, tools_called
from toolformer_dag.identity import fingerprint

STEP = "tables"
"""The step that makes all of them: a step each would cost seconds where nothing changed."""
EXAMPLE_CHARACTERS = 320


def paper_assets(outputs: Mapping[str, Output]) -> dg.AssetsDefinition:
    """Return the assets of the paper's tables; `outputs` by name."""
    specs = [
        dg.AssetSpec(
            asset_key(name),
            group_name="tables",
            deps=[asset_key(above) for above in outputs[name].depends_on],
            code_version=outputs[name].code_version,
            kinds={"duckdb", "sql"},
            owners=OWNERS,
            description=f"{table.title}; ours and the paper's.",
            metadata={"explore": dg.MetadataValue.url(explored(name))},
        )
        for name, table in zip(SHOWN, PAPER_TABLES, strict=True)
    ]

    @dg.multi_asset(name=STEP, specs=specs, can_subset=True, pool="lake", op_tags=step_tags("lake"))
    def tables(context: dg.AssetExecutionContext, warehouse: WarehouseResource) -> Iterator[dg.MaterializeResult]:
        for name, table in zip(SHOWN, PAPER_TABLES, strict=True):
            if asset_key(name) in context.selected_asset_keys:
                yield _result(context, table, asset_key(name), outputs[name].code_version, warehouse)

    return tables


def _result(
    context: dg.AssetExecutionContext,
    table: PaperTable,
    key: dg.AssetKey,
    code_version: str,
    warehouse: WarehouseResource,
) -> dg.MaterializeResult:
    """Show the rows as numbers, Markdown and a plot; what was shown last is shown again where nothing changed."""
    rows, told = table.rows(warehouse.path), notes(warehouse.path, table)
    called = tools_called(warehouse.path, table)
    parts = [rows.write_json(), told, None if called is None else called.write_json()]
    version = fingerprint([code_version, parts])
    last = last_metadata(context, key)
    shown: Mapping[str, Any] = {
        "dagster/row_count": dg.MetadataValue.int(rows.height),
        "table": dg.MetadataValue.md(frame_table(table.wide(rows), rows.height, EXAMPLE_CHARACTERS)),
        **({} if called is None else {"tools called": dg.MetadataValue.md(frame_table(called, called.height))}),
        "notes": dg.MetadataValue.md("\n".join(f"- {as_text(note, EXAMPLE_CHARACTERS)}" for note in told)),
        "content": dg.MetadataValue.text(version),
        UNCHANGED: dg.MetadataValue.bool(False),
    }
    content = last.get("content")
    if isinstance(content, dg.TextMetadataValue) and content.value == version:
        shown = {**last, UNCHANGED: dg.MetadataValue.bool(True)}
    else:
        numbers = dg.MetadataValue.json({"rows": rows.to_dicts()})
        shown = {**shown, "numbers": numbers, "plot": image(PLOTS[table.view](rows))}
    return dg.MaterializeResult(asset_key=key, data_version=dg.DataVersion(version), metadata=shown)
