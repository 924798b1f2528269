"""`toolformer-dag embedded evaluate` and `scaling`: the paper's effect on the made world, over seeds and sizes."""

import os
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    import polars as pl

    from embedded_model.effect_study import Measured, Study


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

    from embedded_model.effect_study import Study
    from embedded_model.probes import as_markdown
    from embedded_model.probes import evaluate as probe
    from embedded_model.real_text import load_real_text
    from toolformer_dag.checkpoints import model_name
    from toolformer_dag.orphan import end_with_parent
    from toolformer_dag.settings.sections import Model

    paths = tuple(path.absolute() for path in real_text or ())
    named = str(Path(model).absolute()) if Path(model).is_dir() else model
    study = Study(named, seeds, documents, questions, paths)
    load_real_text(paths, held_out=True)  # a wrong path is told now, not after hours
    with ProcessPoolExecutor(processes, get_context("spawn"), initializer=end_with_parent) as pool:
        pending = [pool.submit(_seed, folder.absolute(), study, seed) for seed in range(seeds)]
        typer.echo(as_markdown(probe(Path(model_name(Model(name=named))), paths, texts)))
        found = [one.result() for one in pending]
    outcomes = pl.concat([one.outcomes for one in found])
    _show(outcomes, pl.concat([one.plain for one in found]))


def scaling(
    figure: Annotated[Path, typer.Argument(help="Where the SVG is written.")],
    studies: Annotated[list[Path], typer.Argument(help="Folders of `embedded evaluate`, one for each size.")],
) -> None:
    """Draw what models of several sizes answer with tools and without.

    Example: toolformer-dag embedded scaling scaling.svg study-small/ study/
    """
    from embedded_model.study_tables import scaling_figure, scaling_table
    from toolformer_dag.evaluation.accuracy_tables import markdown

    table = scaling_table(studies)
    figure.write_text(scaling_figure(table), "utf-8")
    typer.echo(markdown(table.pivot("tool", index=["parameters", "condition"], values="accuracy")))


def _seed(folder: Path, study: "Study", seed: int) -> "Measured":
    """In a process of its own: a line has its own Dagster instance."""
    from embedded_model.effect_study import measure
    from resources.line import Line

    settings = study.line(folder, seed)
    os.environ["DAGSTER_HOME"] = str(settings.root / ".dagster")
    line = Line.of(settings)
    line.raise_for(line.bring_up_to_date(training=True))
    return measure(settings, study, seed)


def _show(outcomes: "pl.DataFrame", plain: "pl.DataFrame") -> None:
    from embedded_model.study_tables import accuracy_table, calls_table, perplexity_table, right_tool_table
    from toolformer_dag.evaluation.accuracy_tables import markdown

    tables = {
        "Questions answered right, in per cent (95 % interval)": accuracy_table(outcomes),
        "The right tool was called, in per cent": right_tool_table(outcomes),
        "Any tool was called, in per cent": calls_table(outcomes),
        "Held-out text, tools disabled": perplexity_table(plain),
    }
    for title, table in tables.items():
        typer.echo(f"{title}\n\n{markdown(table)}")
