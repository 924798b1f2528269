"""`toolformer-dag run`: the whole line, or what of it is not fresh yet."""

import typer

from toolformer_dag.cli.options import Config, Profile, Set, Shards, settings_of


def run(config: Config = None, profile: Profile = None, shards: Shards = None, set: Set = None) -> None:
    """Materialize everything that is missing or stale, training and evaluation included.

    Example: toolformer-dag run --profile embedded --shards 'crawl/en_head_*.json.gz' --set tools.calculator.tau_f=0.8
    """
    from resources.line import Line
    from toolformer_dag.cli.progress import shown

    line = Line.of(settings_of(config, profile, set, shards))
    with shown() as announce:
        outcome = line.bring_up_to_date(training=True, announce=announce)
    line.raise_for(outcome)
    spent = f"{outcome.spent.tokens:,} tokens went through the model, {outcome.spent.calls:,} tool calls were made."
    typer.echo(f"{len(outcome.ran)} assets ran; {spent}" if outcome.ran else "Everything is fresh: nothing ran.")
