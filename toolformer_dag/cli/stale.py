"""`toolformer-dag stale`: what the last change made stale, why, and the runs that mend it."""

from typing import Annotated

import typer

from toolformer_dag.cli.options import Config, Profile, Set, Shards, settings_of


def stale(
    run: Annotated[bool, typer.Option("--run", help="Run what is stale, then only what truly changed.")] = False,
    why: Annotated[bool, typer.Option("--why", help="Say what changed since the stored rows were made.")] = False,
    config: Config = None,
    profile: Profile = None,
    shards: Shards = None,
    set: Set = None,
) -> None:
    """List the stale assets, one key per line, with [partition] where there is one.

    `--run` leaves training and evaluation to `toolformer-dag run`: that is a person's decision.

    Example: toolformer-dag stale --why
    """
    from resources.line import Line

    line = Line.of(settings_of(config, profile, set, shards))
    if run:
        outcome = line.bring_up_to_date(training=False)
        for asset in outcome.ran:
            typer.echo(f"ran {asset}")
        line.raise_for(outcome)
        return
    for asset in line.stale():
        typer.echo(str(asset))
        for reason in line.why(asset) if why else ():
            typer.echo(f"    {reason}")
