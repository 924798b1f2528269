"""`toolformer-dag embedded`: write the small web; train, evaluate and question the embedded model."""

import os
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from toolformer_dag.cli.terminal import Config, ModelName, Set, settings_of
from toolformer_dag.files import UserError
from toolformer_dag.markdown import rounded, table
from toolformer_dag.settings.model_settings import ModelSettings
from toolformer_dag.settings.sections import Settings

if TYPE_CHECKING:
    import polars as pl  # imported where rows are, so that a mistake in the settings is told at once

app = typer.Typer(help="The small web and the embedded model: write, train, evaluate.", no_args_is_help=True)


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
    size: Annotated[
        Literal["0.1M", "0.3M", "0.9M", "2M", "5M"], typer.Option(help="0.1M, 0.3M, 0.9M, 2M or 5M parameters.")
    ] = "2M",
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

    if size != "2M" and start is not None:
        raise UserError(f"--size {size} and --start contradict each other: the size is that of {start}")

    def show(line: PretrainingProgress) -> None:
        typer.echo(f"{line.step:>6}/{line.steps}  loss {line.loss:.3f}  {line.tokens_per_second:,.0f} tokens/s")

    settings = EmbeddedTraining(shape=SHAPES[size], steps=steps, seed=seed)
    begin = None if start is None else _folder_of(start)
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

    typer.echo(mean_model([_folder_of(name) for name in models], folder))


@app.command()
def evaluate(
    folder: Annotated[
        Path, typer.Argument(help="Where the lines of the seeds are kept; what ran there is not run again.")
    ],
    model: Annotated[str, typer.Option(help="`embedded`, or a base model made by `embedded train`.")] = "embedded",
    seeds: Annotated[int, typer.Option(min=1, help="Whole lines, each with pages and questions of its own.")] = 3,
    documents: Annotated[int, typer.Option(min=1, help="Pages of each line.")] = 3600,
    questions: Annotated[int, typer.Option(min=1, help="Per tool and set of wordings, for each seed.")] = 100,
    texts: Annotated[int, typer.Option(min=2, help="Texts per tool for the probes of the base model.")] = 200,
    real_text: Annotated[list[Path] | None, typer.Option(help="CCNet shards and passages, held out in part.")] = None,
    processes: Annotated[int, typer.Option(min=1, help="Seeds at a time.")] = 2,
) -> None:
    """Probe the base model, run the line for every seed, and print what the finetuned models answer.

    Example: toolformer-dag embedded evaluate study/ --seeds 1 --documents 400 --questions 50 --texts 50
    """
    import polars as pl

    from embedded_model.effect_study import study_settings, study_tables
    from embedded_model.probes import evaluate as probe
    from embedded_model.real_text import load_real_text
    from toolformer_dag.computing.chunks import end_with_parent

    paths = tuple(path.absolute() for path in real_text or ())
    named = str(Path(model).absolute()) if Path(model).is_dir() else model
    load_real_text(paths, held_out=True)  # a wrong path is told now, not after hours
    lines = [study_settings(folder.absolute(), seed, named, documents, questions) for seed in range(seeds)]
    with ProcessPoolExecutor(processes, get_context("spawn"), initializer=end_with_parent) as pool:
        measured = pool.map(_run_and_measure, lines)
        _show(probe(_folder_of(named), paths, texts))
        outcomes, perplexities = zip(*measured, strict=True)
    _show(study_tables(pl.concat(outcomes), pl.concat(perplexities)))


@app.command()
def visitor(
    model: ModelName = None,
    each: Annotated[int, typer.Option(min=1, help="Questions per wording.")] = 4,
    wordings: Annotated[
        Literal["measured", "fresh", "guide", "typed"], typer.Option(help="The part of the file.")
    ] = "measured",
    config: Config = None,
    set: Set = None,
) -> None:
    """Ask a checkpoint what a visitor would type.

    No training text has the wordings `measured`. `fresh` was written without a look at them; some are like old ones.
    `guide` may guide the small web. `typed` has arithmetic and dates as they stand, also what no tool answers. Each
    question is asked as it is typed, and led: with `The answer is` behind it.

    Example: toolformer-dag embedded visitor --each 4
    """
    from embedded_model.visitor_study import visitor_outcomes, visitor_table
    from toolformer_dag.model.loading import load_identified
    from toolformer_dag.training.training_report import finetuned_or_base

    settings = settings_of(config, "embedded", set)
    asked = load_identified(settings.model, model or finetuned_or_base(settings))
    _show({f"A visitor's questions, {wordings}": visitor_table(visitor_outcomes(settings, asked, wordings, each))})


def _folder_of(model: str) -> Path:
    from toolformer_dag.model.weights import model_name

    return Path(model_name(ModelSettings(name=model)))


def _run_and_measure(settings: Settings) -> "tuple[pl.DataFrame, pl.DataFrame]":
    """In a process of its own: a line has its own Dagster instance."""
    from embedded_model.effect_study import measure
    from toolformer_dag.cli.project import Project

    os.environ["DAGSTER_HOME"] = str(settings.root / ".dagster")
    Project.of(settings).run(training=True).raise_for_failures()
    return measure(settings)


def _show(tables: "dict[str, pl.DataFrame]") -> None:
    for title, rows in tables.items():
        typer.echo(f"{title}\n\n{table(rows.columns, rows.iter_rows(), rounded)}")
