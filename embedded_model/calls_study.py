"""Ask a finetuned model what takes several calls, and what takes named arguments.

python -m embedded_model.calls_study chains FOLDER    # FOLDER: a project that ran, such as that of `make demo`
python -m embedded_model.calls_study write FOLDER     # writes a project of two tools, to be run
python -m embedded_model.calls_study named FOLDER     # asks it, when it ran
"""

import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import polars as pl
import typer

from embedded_model.effect_study import percent
from toolformer_dag.evaluation.asking import TOOLFORMER, benchmark_outcomes, compared
from toolformer_dag.evaluation.catalogue import synthetic_benchmark
from toolformer_dag.evaluation.scores import Condition, outcome_table
from toolformer_dag.markdown import rounded, table
from toolformer_dag.model.loading import LanguageModel
from toolformer_dag.pipeline.plan import lanes
from toolformer_dag.settings.sections import Settings
from toolformer_dag.settings.settings_file import load_settings
from toolformer_dag.synthetic import PROMPTS
from toolformer_dag.synthetic.phenomena import NAMED_TOOLS, TWO_HOP
from toolformer_dag.synthetic.web import write_shards

QUESTIONS, SEED = 300, 11
NAMED = f"""profile = "embedded"
[corpus]
shards = ["web"]
[tools.distance]
use = "embedded_model.named_tools:Distance"
prompt = "{PROMPTS / "distance.txt"}"
[tools.price]
use = "embedded_model.named_tools:Price"
prompt = "{PROMPTS / "price.txt"}"
[evaluation]
benchmarks = {{ dateset = "made" }}
benchmark_questions = 1
"""
DOCUMENTS = 384


def write_named_project(folder: Path) -> None:
    """Write a web about distances and prices, and the settings of its two lanes."""
    folder.mkdir(parents=True, exist_ok=True)
    write_shards(folder / "web", 2, DOCUMENTS, 1, NAMED_TOOLS)
    (folder / "toolformer.toml").write_text(NAMED)


def with_depth(settings: Settings, depth: int) -> Settings:
    """Return the settings with another `decoding.depth`."""
    return settings.model_copy(update={"decoding": settings.decoding.model_copy(update={"depth": depth})})


def answers(settings: Settings, asked: Mapping[str, Settings], kinds: tuple[str, ...]) -> pl.DataFrame:
    """Ask base, base + C, and Toolformer without tools and, by name, under each settings of `asked`.

    Returns the columns of `outcome_table`; the `condition` of a model with tools is the name in `asked`.
    """
    questions = [synthetic_benchmark(kind, QUESTIONS, SEED, worded) for kind in kinds for worded in ("seen", "unseen")]

    def ask(model: LanguageModel, conditions: list[Condition]) -> Iterator[pl.DataFrame]:
        plain, *others = conditions
        ways = [(plain, settings)] + [(Condition(name, settings.decoding.k), own) for name, own in asked.items()]
        for condition, own in ways if others else ways[:1]:
            for one in questions:
                yield outcome_table(benchmark_outcomes(own, lanes(own), model, condition, one).outcomes)

    return pl.concat(compared(settings, ask))


def shares(outcomes: pl.DataFrame) -> pl.DataFrame:
    """Return per benchmark and condition: questions, the per cent that are right with a 95 % interval, and calls each.

    `unfit`: the per cent of the calls that were written and have no result.
    """
    groups = outcomes.group_by("benchmark", "condition", maintain_order=True).agg(
        n=pl.len(),
        hits=pl.col("correct").sum(),
        calls=pl.col("calls").list.len().mean(),
        unfit=100
        * pl.col("calls").list.explode(keep_nulls=False, empty_as_null=False).struct.field("result").is_null().mean(),
    )
    return groups.with_columns(right=pl.struct("hits", "n").map_elements(percent, return_dtype=pl.String)).drop("hits")


def main(what: str, folder: Path) -> None:
    """Write the project, or ask one and print the table."""
    if what == "write":
        write_named_project(folder)
        return
    settings = load_settings(folder / "toolformer.toml", environment={})
    if what == "named":
        found = answers(settings, {TOOLFORMER: settings}, NAMED_TOOLS)
    else:
        ways = {f"depth {depth}": with_depth(settings, depth) for depth in (1, 2, 3)}
        found = answers(settings, ways, (TWO_HOP,))
    told = shares(found)
    typer.echo(table(told.columns, told.iter_rows(), rounded))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
