"""`toolformer-dag clean`: remove files that nothing points to any more."""

from datetime import timedelta
from typing import Annotated

import typer

from toolformer_dag.cli.options import Config, settings_of
from toolformer_dag.errors import UserError

CENTURY = 876_600.0  # hours; much more has no date


def clean(
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would go; remove nothing.")] = False,
    grace_hours: Annotated[float, typer.Option(help="Younger files stay: a reader may still use them.")] = 24.0,
    config: Config = None,
) -> None:
    """Remove part files that no partition names, and abandoned temporary files, after a grace period.

    Example: toolformer-dag clean --dry-run
    """
    from toolformer_dag.storage.clean import clean as remove
    from toolformer_dag.storage.lake import Lake

    lake = Lake(settings_of(config, None, None).paths.lake)
    gone = remove(lake, _grace(grace_hours), dry_run=dry_run)
    for file in gone:
        typer.echo(f"{file.bytes:>12,}  {file.path}")
    verb = "would go" if dry_run else "gone"
    typer.echo(f"{len(gone)} files, {sum(file.bytes for file in gone):,} bytes {verb}")


def _grace(hours: float) -> timedelta:
    if not 0 <= hours <= CENTURY:  # nan neither
        raise UserError(f"--grace-hours {hours:g}: no such time; write hours from 0 to {CENTURY:,.0f}")
    return timedelta(hours=hours)
