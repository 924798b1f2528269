"""Options that several commands share."""

from pathlib import Path
from typing import Annotated

import typer

from toolformer_dag.settings.load import load_settings
from toolformer_dag.settings.settings import Settings
from toolformer_dag.settings.values import rooted

Config = Annotated[
    Path | None, typer.Option("--config", help="Settings file; default: $TOOLFORMER_CONFIG, else ./toolformer.toml.")
]
Profile = Annotated[str | None, typer.Option("--profile", help="A profile: embedded, gpt2, gptj, or one of your own.")]
Set = Annotated[list[str] | None, typer.Option("--set", help="One setting: tools.calculator.tau_f=0.8.")]
Shards = Annotated[list[str] | None, typer.Option("--shards", help="CCNet shards, a path or a quoted glob.")]
ModelName = Annotated[str | None, typer.Option("--model", help="A folder, an id of the hub, or `embedded`.")]


def settings_of(
    config: Path | None, profile: str | None, pairs: list[str] | None, shards: list[str] | None = None
) -> Settings:
    """Settings as the command line asks for them; shard patterns count from the current folder."""
    patterns = [rooted(pattern, Path.cwd()) for pattern in shards or ()]
    return load_settings(config, profile=profile, overrides=pairs or (), shards=patterns)
