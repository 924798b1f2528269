"""The commands of this package: `python -m benchmarks.embedded_model train FOLDER`, in the root of a checkout."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from benchmarks.embedded_model.network import SHAPES, EmbeddedTraining
from benchmarks.embedded_model.train import PretrainingProgress
from benchmarks.embedded_model.train import train as run
from toolformer_dag.cli import Commands
from toolformer_dag.files import UserError
from toolformer_dag.model.weights import resolve_model_name
from toolformer_dag.settings.model_settings import ModelSettings

app = Commands(no_args_is_help=True, pretty_exceptions_enable=False, rich_markup_mode=None)


@app.callback()
def main() -> None:
    """Train the embedded model."""


@app.command()
def train(
    folder: Annotated[Path, typer.Argument(help="Where the model is written; a run broken off there goes on.")],
    size: Annotated[
        Literal["0.1M", "0.3M", "0.9M", "2M", "5M"], typer.Option(help="0.1M, 0.3M, 0.9M, 2M or 5M parameters.")
    ] = "2M",
    start: Annotated[str | None, typer.Option(help="`embedded`, or a folder made here, to be trained on.")] = None,
    steps: Annotated[int, typer.Option(min=1, help="Steps of 4,096 tokens.")] = 10000,
    seed: Annotated[int, typer.Option(help="The same seed gives the same weights.")] = 0,
) -> None:
    """Train a base model, from scratch or on: copy boot camp, then plain texts, notes and demonstrations.

    Example: python -m benchmarks.embedded_model train my_model --size 0.9M --steps 2400
    """
    if size != "2M" and start is not None:
        raise UserError(f"--size {size} and --start contradict each other: the size is that of {start}")

    def show(line: PretrainingProgress) -> None:
        typer.echo(f"{line.step:>6}/{line.steps}  loss {line.loss:.3f}  {line.tokens_per_second:,.0f} tokens/s")

    settings = EmbeddedTraining(shape=SHAPES[size], steps=steps, seed=seed)
    begin = None if start is None else Path(resolve_model_name(ModelSettings(name=start)))
    typer.echo(run(settings, folder, show, begin))


if __name__ == "__main__":
    app(prog_name="python -m benchmarks.embedded_model")
