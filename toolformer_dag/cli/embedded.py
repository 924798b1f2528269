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
    shards: Annotated[int, typer.Option(min=1, help="Files to write.")] = 2,
    documents: Annotated[int, typer.Option(min=1, help="Documents in all.")] = 1200,
    seed: Annotated[int, typer.Option(help="The same seed gives the same bytes.")] = 1,
) -> None:
    """Write the small web as CCNet shards.

    Example: toolformer-dag embedded web web/ --shards 4 --documents 10000
    """
    from toolformer_dag.synthetic.web import write_shards

    for path in write_shards(folder, shards, documents, seed):
        typer.echo(path)


@app.command()
def train(
    folder: Annotated[Path, typer.Argument(help="Where the model is written; a run broken off there goes on.")],
    size: Annotated[str | None, typer.Option(help="0.1M, 0.3M, 0.9M, 2M or 5M parameters.", show_default="2M")] = None,
    start: Annotated[str | None, typer.Option(help="`embedded`, or a folder made here, to be trained on.")] = None,
    steps: Annotated[int, typer.Option(min=1, help="Steps of 4,096 tokens.")] = 10000,
    seed: Annotated[int, typer.Option(help="The same seed gives the same weights.")] = 0,
    real_text: Annotated[list[Path] | None, typer.Option(help="CCNet shards, passages, translated phrases.")] = None,
    processes: Annotated[int, typer.Option(min=1, help="One thread each.")] = 2,
) -> None:
    """Train a base model, from scratch or on: copy boot camp, then the mix of plain texts, notes and demonstrations.

    Example: toolformer-dag embedded train my_model --size 0.9M --steps 2400
    """
    from embedded_model.network import SHAPES, EmbeddedTraining
    from embedded_model.train import PretrainingProgress
    from embedded_model.train import train as run
    from toolformer_dag.checkpoints import model_name
    from toolformer_dag.settings.sections import Model

    if size is not None and start is not None:
        raise UserError(f"--size {size} and --start contradict each other: the size is that of {start}")
    if (size or "2M") not in SHAPES:
        raise UserError(f"there is no size {size!r}; take one of {', '.join(SHAPES)}")

    def show(line: PretrainingProgress) -> None:
        typer.echo(f"{line.step:>6}/{line.steps}  loss {line.loss:.3f}  {line.tokens_per_second:,.0f} tokens/s")

    settings = EmbeddedTraining(shape=SHAPES[size or "2M"], steps=steps, seed=seed)
    begin = None if start is None else Path(model_name(Model(name=start)))
    typer.echo(run(settings, folder, real_text or (), show, processes, begin))


@app.command()
def mean(
    folder: Annotated[Path, typer.Argument(help="Where the model is written.")],
    models: Annotated[list[str], typer.Argument(help="`embedded`, or folders made here; one began as another.")],
) -> None:
    """Write the mean of the weights of models: often better than each of them.

    Example: toolformer-dag embedded mean better/ embedded my_model/
    """
    from embedded_model.export import mean_model
    from toolformer_dag.checkpoints import model_name
    from toolformer_dag.settings.sections import Model

    typer.echo(mean_model([Path(model_name(Model(name=name))) for name in models], folder))


app.command()(evaluate)
app.command()(scaling)
