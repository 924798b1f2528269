"""`toolformer-dag embedded`: the made web and the model that come with the package."""

from pathlib import Path
from typing import Annotated

import typer

from toolformer_dag.cli.study import evaluate, scaling
from toolformer_dag.errors import UserError

app = typer.Typer(help="The made web and the embedded model: write, train, evaluate.", no_args_is_help=True)


@app.command()
def web(
    folder: Annotated[Path, typer.Argument(help="Where the shards are written.")],
    shards: Annotated[int, typer.Option(help="Files to write.")] = 2,
    documents: Annotated[int, typer.Option(help="Documents in all.")] = 1200,
    seed: Annotated[int, typer.Option(help="The same seed gives the same bytes.")] = 1,
) -> None:
    """Write the small web as CCNet shards.

    Example: toolformer-dag embedded web web/ --shards 4 --documents 10000
    """
    from toolformer_dag.embedded.web import write_shards

    for path in write_shards(folder, shards, documents, seed):
        typer.echo(path)


@app.command()
def train(
    folder: Annotated[Path, typer.Argument(help="Where the model is written; a run broken off there goes on.")],
    size: Annotated[str, typer.Option(help="0.1M, 0.3M, 0.9M, 2M or 5M parameters.")] = "2M",
    steps: Annotated[int, typer.Option(help="Steps of 4,096 tokens.")] = 10000,
    seed: Annotated[int, typer.Option(help="The same seed gives the same weights.")] = 0,
    real_text: Annotated[list[Path] | None, typer.Option(help="CCNet shards, passages, translated phrases.")] = None,
    processes: Annotated[int, typer.Option(help="One thread each.")] = 2,
) -> None:
    """Train a base model from scratch: copy boot camp, then the mix of plain texts, notes and demonstrations.

    Example: toolformer-dag embedded train my_model --size 0.9M --steps 2400
    """
    from toolformer_dag.embedded.training.settings import EmbeddedTraining
    from toolformer_dag.embedded.training.shape import SHAPES
    from toolformer_dag.embedded.training.train import Progress
    from toolformer_dag.embedded.training.train import train as run

    if size not in SHAPES:
        raise UserError(f"there is no size {size!r}; take one of {', '.join(SHAPES)}")

    def show(line: Progress) -> None:
        typer.echo(f"{line.step:>6}/{line.steps}  loss {line.loss:.3f}  {line.tokens_per_second:,.0f} tokens/s")

    settings = EmbeddedTraining(shape=SHAPES[size], steps=steps, seed=seed)
    typer.echo(run(settings, folder, real_text or (), show, processes))


app.command()(evaluate)
app.command()(scaling)
