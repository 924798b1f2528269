"""`export`: C* in a form that others train on, or the warehouse, as a Hugging Face data set."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from toolformer_dag.cli.terminal import ConfigOption, ProfileOption, SetOption, load_checked_settings, path
from toolformer_dag.exports import FORM_DESCRIPTIONS, TOKENIZED_FORMS, FormName
from toolformer_dag.files import UserError

if TYPE_CHECKING:
    from toolformer_dag.computing.plan import Plan
    from toolformer_dag.exports.dataset_folder import ExportRecord

DEFAULT_FORM: FormName = "text"
FORMS_HELP = "; ".join(f"{name}: {said}" for name, said in FORM_DESCRIPTIONS.items()) + "."


def export(
    folder: Annotated[Path, typer.Argument(parser=path, help="Folder to write: new, empty, or of an earlier export.")],
    form: Annotated[FormName, typer.Option(help=FORMS_HELP)] = DEFAULT_FORM,
    warehouse: Annotated[bool, typer.Option("--warehouse", help="Export the tables of the warehouse instead.")] = False,
    tokenizer: Annotated[
        str | None,
        typer.Option(
            help="For `masked`, and to count in `chat`: folder, hub id or `embedded`; default: the settings' model."
        ),
    ] = None,
    license: Annotated[
        str | None, typer.Option(help="Licence for the card, as the hub names it; default: `export.license`.")
    ] = None,
    config: ConfigOption = None,
    profile: ProfileOption = None,
    set: SetOption = None,
) -> None:
    """Write C* to a folder that `datasets.load_dataset` reads and `push_to_hub` takes.

    Example: toolformer-dag export data; toolformer-dag export pairs --form preference --license odc-by;
    toolformer-dag export tables --warehouse
    """
    _refuse_conflicting_options(warehouse, form, tokenizer)
    overrides = list(set or ())
    if license is not None:
        overrides.append(f"export.license={license!r}")
    settings = load_checked_settings(config, profile, overrides)
    from toolformer_dag.computing.plan import Plan
    from toolformer_dag.evaluation.evaluated_tables import list_all_tables
    from toolformer_dag.exports.corpus_export import FORM_BUILDERS, export_corpus
    from toolformer_dag.exports.warehouse_export import export_warehouse
    from toolformer_dag.method.warehouse_views import build_views_sql
    from toolformer_dag.pipeline.stages import list_table_outputs

    plan = Plan.from_settings(settings)
    _refuse_stale_tables(plan)
    if warehouse:
        views = build_views_sql(list_all_tables(list_table_outputs(plan)))
        exported = export_warehouse(plan.settings.warehouse_file, folder, plan.settings.export.license, views)
    else:
        exported = export_corpus(plan, folder, FORM_BUILDERS[form](plan, tokenizer))
    _print_export_summary(folder, exported)


def _print_export_summary(folder: Path, export_record: "ExportRecord") -> None:
    """Print how many rows each part of an export has, how long its longest row is, and how large the export is."""
    for part_name, row_count in export_record.row_counts.items():
        typer.echo(f"{part_name}: {row_count:,} rows")

    longest_token_count = export_record.made_from.get("longest")  # only some forms count tokens
    if longest_token_count:
        typer.echo(
            f"the longest row has some {longest_token_count:,} tokens with its tools; a trainer cuts what is above its "
            "limit"
        )

    byte_count = sum(file.byte_count for file in export_record.file_by_path.values())
    typer.echo(f"{folder}: {byte_count:,} bytes in {len(export_record.file_by_path)} files")


def _refuse_conflicting_options(exports_warehouse: bool, form_name: FormName, tokenizer_name: str | None) -> None:
    """Check that the options of `export` go together.

    Raises:
        UserError: A form is named for the warehouse, or a tokenizer for a form that needs none.
    """
    if exports_warehouse and form_name != DEFAULT_FORM:
        raise UserError(f"--warehouse writes tables, which have no form {form_name}; leave one of the two options out")
    if tokenizer_name is not None and form_name not in TOKENIZED_FORMS:
        forms = " and ".join(TOKENIZED_FORMS)
        raise UserError(f"--tokenizer counts for --form {forms} alone; leave it out, or add one of them")


def _refuse_stale_tables(plan: "Plan") -> None:
    """Check that the warehouse shows the tables as the settings say they are.

    Raises:
        UserError: The warehouse is missing, or older than the settings or the tables.
    """
    from toolformer_dag.lake.warehouse import query, receive_warehouse

    database = receive_warehouse(plan.settings)
    query(database, "SELECT 1")  # raises an error if there is no warehouse

    changes = [*_iter_changed_settings(plan), *_list_outdated_tables(plan, database)]
    if changes:
        more = f", and {len(changes) - 1} more" if len(changes) > 1 else ""
        raise UserError(
            f"the tables are not what the settings say ({changes[0]}{more}); run `toolformer-dag run` first"
        )


def _iter_changed_settings(plan: "Plan") -> Iterator[str]:
    """Yield each setting that has changed since a table was made, as `calculator/filtered_calls: tau_f 0.5 -> 0.8`."""
    from toolformer_dag.computing.reasons import find_differences
    from toolformer_dag.pipeline.stages import list_table_outputs

    for output in list_table_outputs(plan):
        for change in find_differences(output).format_setting_changes():
            yield f"{output.name}: {change}"


def _list_outdated_tables(plan: "Plan", database: Path) -> Sequence[str]:
    """Return a line for each reason why the warehouse file is older than the tables of the lake."""
    from toolformer_dag.evaluation.evaluated_tables import list_all_tables
    from toolformer_dag.lake.warehouse_building import explain_out_of_date
    from toolformer_dag.method.call_warehouse import CallWarehouse
    from toolformer_dag.pipeline.stages import list_shown_outputs

    tables = list_all_tables(list_shown_outputs(plan))
    declared_warehouse = CallWarehouse(tables, plan.tool_name_by_lane_key)
    return explain_out_of_date(plan.lake, declared_warehouse, database)
