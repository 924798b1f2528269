"""`toolformer-dag embedded`: the made web and the model that come with the package."""

import inspect
from pathlib import Path
from typing import Annotated

import typer

from toolformer_dag.cli.options import Config, ModelName, settings_of
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
    steps: Annotated[int, typer.Option(help="Steps of 4,096 tokens.")] = 7200,
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


@app.command()
def evaluate(
    model: ModelName = None,
    texts: Annotated[int, typer.Option(help="Texts per tool, about the facts of evaluation.")] = 200,
    unseen: Annotated[bool, typer.Option("--unseen", help="In wordings that training never showed.")] = False,
    paper_prompts: Annotated[bool, typer.Option("--paper-prompts", help="The prompts of appendix A.2.")] = False,
    config: Config = None,
) -> None:
    """Probe a base model: does it begin calls where they belong, and do right results lower its loss?

    Example: toolformer-dag embedded evaluate --texts 200 --paper-prompts
    """
    from toolformer_dag.checkpoints import load_engine
    from toolformer_dag.embedded.folder import PROMPTS
    from toolformer_dag.embedded.training.probe import made_golds, probe_gains, probe_places
    from toolformer_dag.lane import lanes

    settings = settings_of(config, "embedded", None)
    engine = load_engine(settings.model, model)
    typer.echo(f"{'tool':<20}{'p at place':>12}{'elsewhere':>12}{'right':>9}{'wrong':>9}{'other':>9}{'ordered':>9}")
    for lane in lanes(settings):
        paper = (Path(inspect.getfile(type(lane.tool))).parent / "prompt.txt").read_text("utf-8")
        prompt = paper if paper_prompts else (PROMPTS / f"{lane.key}.txt").read_text("utf-8")
        golds = made_golds(lane.key, texts, "evaluation", "unseen" if unseen else "seen")
        places, gains = probe_places(engine, prompt, golds), probe_gains(engine, golds)
        shares = f"{places.at_place:>12.3f}{places.elsewhere:>12.4f}"
        typer.echo(
            f"{lane.key:<20}{shares}{gains.right:>9.2f}{gains.wrong:>9.2f}{gains.other:>9.2f}{gains.ordered:>9.2f}"
        )
