"""Care of the stored data: `verify` reads everything, `clean` removes files that nothing needs."""

from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from toolformer_dag.cli.terminal import Config, Profile, Set, load_command_settings, path
from toolformer_dag.files import UserError

if TYPE_CHECKING:
    from toolformer_dag.lake.cleaning import RemovedFile

CENTURY = 876_600.0
"""Hours in a century, the longest grace period: dates cannot express much more."""


def verify(
    folder: Annotated[
        Path | None, typer.Argument(parser=path, help="Read this export or checkpoint alone, wherever it lies.")
    ] = None,
    config: Config = None,
    profile: Profile = None,
    set: Set = None,
) -> None:
    """Read everything that runs rely on and people take away; name each damaged file. Exit code 1 where there is one.

    `run` makes again what is damaged, at the cost of what was lost. A lake that may only be read is verified too.

    Example: toolformer-dag verify; toolformer-dag verify my_export
    """
    from toolformer_dag.computing.plan import Plan
    from toolformer_dag.exports.verify_project import verify_files, verify_folder
    from toolformer_dag.lake.table import Lake

    settings = load_command_settings(config, profile, set)
    if folder is None:
        report = verify_files(Plan.to_read(settings))  # a plan that runs no code of the user and hashes no model
    else:
        report = verify_folder(folder)
    for damaged in report.damaged:
        file = Lake.of(settings.paths).shown(damaged.path)
        typer.echo(f"{file}: {damaged.reason}")
    typer.echo(f"{len(report.damaged)} damaged; {report.bytes:,} bytes verified", err=True)
    if report.damaged:
        raise typer.Exit(1)


def clean(
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would go; remove nothing.")] = False,
    grace_hours: Annotated[float, typer.Option(help="Younger files stay: a reader may still use them.")] = 24.0,
    config: Config = None,
    profile: Profile = None,
    set: Set = None,
) -> None:
    """Remove what nothing points to any more, after a grace period.

    That is replaced, damaged and unfinished files, and stored rows of models, prompts and tools that no table is made
    with: going back to those costs again.

    Example: toolformer-dag clean --dry-run
    """
    from toolformer_dag.lake.cleaning import clean as remove
    from toolformer_dag.lake.table import Lake

    grace = _parse_grace_period(grace_hours)
    settings = load_command_settings(config, profile, set)
    removed = remove(Lake.of(settings.paths), grace, dry_run=dry_run)
    _print_removed(removed, "would go" if dry_run else "gone")


def _print_removed(removed: "Sequence[RemovedFile]", verb: str) -> None:
    """Print each removed file with its size, then how many there are. verb: what became of them."""
    for file in removed:
        typer.echo(f"{file.bytes:>12,}  {file.path}")
    total_bytes = sum(file.bytes for file in removed)
    typer.echo(f"{len(removed)} files, {total_bytes:,} bytes {verb}")


def _parse_grace_period(hours: float) -> timedelta:
    """Return the hours as a duration. Raises UserError unless they are between 0 and CENTURY."""
    if not 0 <= hours <= CENTURY:  # also refuses nan
        raise UserError(f"--grace-hours {hours:g}: no such time; write hours from 0 to {CENTURY:,.0f}")
    return timedelta(hours=hours)
