"""Care of the stored data: `verify` reads everything, `clean` removes files that nothing needs."""

from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from toolformer_dag.cli.terminal import ConfigOption, ProfileOption, SetOption, load_command_settings, path
from toolformer_dag.files import UserError

if TYPE_CHECKING:
    from toolformer_dag.lake.cleaning import RemovedFile

MAX_GRACE_HOURS = 876_600.0
"""Hours in a century, the longest grace period: dates cannot express much more."""


def verify(
    folder: Annotated[
        Path | None, typer.Argument(parser=path, help="Read this export or checkpoint alone, wherever it lies.")
    ] = None,
    config: ConfigOption = None,
    profile: ProfileOption = None,
    set: SetOption = None,
) -> None:
    """Read everything that runs rely on and people take away; name each damaged file. Exit code 1 where there is one.

    `run` makes again what is damaged, at the cost of what was lost. A lake that may only be read is verified too.

    Example: toolformer-dag verify; toolformer-dag verify my_export
    """
    from toolformer_dag.computing.plan import Plan
    from toolformer_dag.exports.verify_project import verify_folder, verify_project_files
    from toolformer_dag.lake.table import Lake

    settings = load_command_settings(config, profile, set)
    if folder is None:
        plan = Plan.from_settings_for_reading(settings)  # runs no code of the user, and hashes no model
        report = verify_project_files(plan)
    else:
        report = verify_folder(folder)

    for damaged_file in report.damaged_files:
        location = Lake.from_settings(settings.paths).format_location(damaged_file.path)
        typer.echo(f"{location}: {damaged_file.reason}")
    typer.echo(f"{len(report.damaged_files)} damaged; {report.checked_byte_count:,} bytes verified", err=True)
    if report.damaged_files:
        raise typer.Exit(1)


def clean(
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would go; remove nothing.")] = False,
    grace_hours: Annotated[float, typer.Option(help="Younger files stay: a reader may still use them.")] = 24.0,
    config: ConfigOption = None,
    profile: ProfileOption = None,
    set: SetOption = None,
) -> None:
    """Remove what nothing points to any more, after a grace period.

    That is replaced, damaged and unfinished files, and stored rows of models, prompts and tools that no table is made
    with: going back to those costs again.

    Example: toolformer-dag clean --dry-run
    """
    from toolformer_dag.lake.cleaning import clean_lake
    from toolformer_dag.lake.table import Lake

    grace_period = _parse_grace_period(grace_hours)
    settings = load_command_settings(config, profile, set)

    removed_files = clean_lake(Lake.from_settings(settings.paths), grace_period, dry_run=dry_run)
    _print_removed_files(removed_files, "would go" if dry_run else "gone")


def _print_removed_files(removed_files: "Sequence[RemovedFile]", verb: str) -> None:
    """Print each removed file with its size in bytes, then how many there are.

    Args:
        removed_files: The files.
        verb: What became of them: "gone", or "would go".
    """
    for file in removed_files:
        typer.echo(f"{file.size_bytes:>12,}  {file.path}")
    total_bytes = sum(file.size_bytes for file in removed_files)
    typer.echo(f"{len(removed_files)} files, {total_bytes:,} bytes {verb}")


def _parse_grace_period(grace_hours: float) -> timedelta:
    """Return a number of hours as a duration.

    Raises:
        UserError: The hours are negative, more than MAX_GRACE_HOURS, or not a number.
    """
    if not 0 <= grace_hours <= MAX_GRACE_HOURS:  # also refuses nan
        raise UserError(f"--grace-hours {grace_hours:g}: no such time; write hours from 0 to {MAX_GRACE_HOURS:,.0f}")
    return timedelta(hours=grace_hours)
