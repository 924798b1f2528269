"""`export`: C* in a form that others train on, or the warehouse, as a Hugging Face data set."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from toolformer_dag.cli.terminal import Config, Profile, Set, load_checked_settings, path
from toolformer_dag.exports import FORMS_SAID, TOKENIZED, FormName
from toolformer_dag.files import UserError

if TYPE_CHECKING:
    from toolformer_dag.computing.plan import Plan
    from toolformer_dag.exports.dataset_folder import Exported

DEFAULT_FORM: FormName = "text"
FORMS_HELP = "; ".join(f"{name}: {said}" for name, said in FORMS_SAID.items()) + "."


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
    config: Config = None,
    profile: Profile = None,
    set: Set = None,
) -> None:
    """Write C* to a folder that `datasets.load_dataset` reads and `push_to_hub` takes.

    Example: toolformer-dag export data; toolformer-dag export pairs --form preference --license odc-by;
    toolformer-dag export tables --warehouse
    """
    _refuse_contradictions(warehouse, form, tokenizer)
    overrides = list(set or ())
    if license is not None:
        overrides.append(f"export.license={license!r}")
    settings = load_checked_settings(config, profile, overrides)
    from toolformer_dag.computing.plan import Plan
    from toolformer_dag.evaluation.evaluated_tables import list_all_tables
    from toolformer_dag.exports.corpus_export import FORMS, export_corpus
    from toolformer_dag.exports.warehouse_export import export_warehouse
    from toolformer_dag.method.warehouse_views import build_views_sql
    from toolformer_dag.pipeline.stages import list_table_outputs

    plan = Plan.of(settings)
    _refuse_stale(plan)
    if warehouse:
        views = build_views_sql(list_all_tables(list_table_outputs(plan)))
        exported = export_warehouse(plan.settings.warehouse, folder, plan.settings.export.license, views)
    else:
        exported = export_corpus(plan, folder, FORMS[form](plan, tokenizer))
    _print_summary(folder, exported)


def _print_summary(folder: Path, exported: "Exported") -> None:
    """Print the rows of each part, the longest row, and the size of the export."""
    for name, rows in exported.rows.items():
        typer.echo(f"{name}: {rows:,} rows")
    longest = exported.made_from.get("longest")
    if longest:
        typer.echo(
            f"the longest row has some {longest:,} tokens with its tools; a trainer cuts what is above its limit"
        )
    typer.echo(f"{folder}: {_sum_file_sizes(exported):,} bytes in {len(exported.files)} files")


def _sum_file_sizes(exported: "Exported") -> int:
    """Return the size of all files of an export."""
    return sum(file.size for file in exported.files.values())


def _refuse_contradictions(warehouse: bool, form: FormName, tokenizer: str | None) -> None:
    """Raise UserError for options that do not go together."""
    if warehouse and form != DEFAULT_FORM:
        raise UserError(f"--warehouse writes tables, which have no form {form}; leave one of the two options out")
    if tokenizer is not None and form not in TOKENIZED:
        forms = " and ".join(TOKENIZED)
        raise UserError(f"--tokenizer counts for --form {forms} alone; leave it out, or add one of them")


def _refuse_stale(plan: "Plan") -> None:
    """Raise UserError where the warehouse is missing or older than the settings and the tables."""
    from toolformer_dag.lake.warehouse import query, received

    database = received(plan.settings)
    query(database, "SELECT 1")  # raises where there is no warehouse
    changes = [*_iter_changed_settings(plan), *_list_outdated_tables(plan, database)]
    if changes:
        more = f", and {len(changes) - 1} more" if len(changes) > 1 else ""
        raise UserError(
            f"the tables are not what the settings say ({changes[0]}{more}); run `toolformer-dag run` first"
        )


def _iter_changed_settings(plan: "Plan") -> Iterator[str]:
    """Yield each setting that has changed since a table was made, after the table's name."""
    from toolformer_dag.computing.reasons import differences
    from toolformer_dag.pipeline.stages import list_table_outputs

    for output in list_table_outputs(plan):
        for change in differences(output).settings():
            yield f"{output.name}: {change}"


def _list_outdated_tables(plan: "Plan", database: Path) -> Sequence[str]:
    """Return what the warehouse holds in an older version than the lake."""
    from toolformer_dag.evaluation.evaluated_tables import list_all_tables
    from toolformer_dag.lake.warehouse_building import explain_out_of_date
    from toolformer_dag.method.call_warehouse import CallWarehouse
    from toolformer_dag.pipeline.stages import list_shown_outputs

    warehouse = CallWarehouse(list_all_tables(list_shown_outputs(plan)), plan.lane_names)
    return explain_out_of_date(plan.lake, warehouse, database)
