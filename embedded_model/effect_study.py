"""Measure the paper's effect on the synthetic world: seeds, conditions, held-out questions and text; tabulate it."""

import json
from collections.abc import Iterator
from pathlib import Path

import polars as pl

from toolformer_dag.computing.plan import lanes
from toolformer_dag.evaluation.asking import BASE_C, DISABLED, TOOLFORMER, benchmark_outcomes, compared
from toolformer_dag.evaluation.catalogue import synthetic_benchmark
from toolformer_dag.evaluation.measurements import OUTCOMES, PERPLEXITY
from toolformer_dag.evaluation.scores import Condition, outcome_table, wilson
from toolformer_dag.lake.table import WHOLE, Lake
from toolformer_dag.model.loading import LanguageModel
from toolformer_dag.settings.sections import Settings
from toolformer_dag.settings.settings_file import load_settings
from toolformer_dag.synthetic.phenomena import TOOLS

LINE = """profile = "embedded"
[model]
name = {model}
[corpus]
small_web = {{ shards = 2, documents = {documents}, seed = {web} }}
texts_per_shard = {documents}
[sampling]
seed = {seed}
[training]
seed = {seed}
max_steps = 300
min_texts = 1
eval_steps = 100
[evaluation]
questions = {questions}
benchmark_questions = 1
seed = {ask}
decoding_k = [1, 3]
"""
BENCHMARK = r"^(?<tool>\w+) \((?<wordings>\w+)\)$"


def study_settings(folder: Path, seed: int, model: str, documents: int, questions: int) -> Settings:
    """Write the settings of a run into its own folder, where the UI and `sql` can read it, and return them.

    The run has `documents` synthetic pages, and `questions` per tool and wording set. Base and finetuned models answer
    the same questions; each seed has its own pages, samples, batches and questions. Raises SettingsError.
    """
    file = folder / f"seed{seed}" / "toolformer.toml"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(
        LINE.format(
            model=json.dumps(model), documents=documents, web=seed + 1, seed=seed, questions=questions, ask=seed + 7
        )
    )
    return load_settings(file, environment={})


def measure(settings: Settings) -> tuple[pl.DataFrame, pl.DataFrame]:
    """Ask every condition questions in unseen wordings; the pipeline of `settings` must have run.

    Return these outcomes and the pipeline's, as of `outcome_table`, and the pipeline's table of perplexity.
    """
    tools = lanes(settings)
    asking = settings.evaluation
    unseen = [synthetic_benchmark(tool, asking.questions, asking.seed, "unseen") for tool in TOOLS]

    def ask(model: LanguageModel, conditions: list[Condition]) -> Iterator[pl.DataFrame]:
        for condition in conditions:
            for questions in unseen:
                yield outcome_table(benchmark_outcomes(settings, tools, model, condition, questions).outcomes)

    lake = Lake.of(settings.paths)
    asked = pl.col("k").is_not_null() & pl.col("benchmark").str.contains(BENCHMARK)  # of a model, about the small world
    own = lake.table(OUTCOMES).read(WHOLE).filter(asked)
    return pl.concat([own, *compared(settings, ask)]), lake.table(PERPLEXITY).read(WHOLE)


def study_tables(outcomes: pl.DataFrame, perplexities: pl.DataFrame) -> dict[str, pl.DataFrame]:
    """Return tables by title over what `measure` found for all seeds.

    Shares of questions have a row per wordings and condition and a column per tool: `96.2 (94.3-97.5)`, per cent with
    95 % interval. The right tool counts only where tools may be called. Perplexities are means over the seeds.
    """
    with_tools = pl.col("condition").str.starts_with(TOOLFORMER) & (pl.col("condition") != DISABLED.name)
    return {
        "Questions answered right, in per cent (95 % interval)": _shares(outcomes, pl.col("correct")),
        "The right tool was called, in per cent": _shares(outcomes.filter(with_tools), pl.col("right_tool")),
        "Any tool was called, in per cent": _shares(outcomes, pl.col("called").is_not_null()),
        "Held-out text, tools disabled": _perplexities(perplexities),
    }


def _perplexities(perplexities: pl.DataFrame) -> pl.DataFrame:
    groups = perplexities.group_by("source", "condition", maintain_order=True)
    means = groups.agg(pl.col("perplexity", "bits_per_byte").mean())
    baseline = means.filter(condition=BASE_C.name).select("source", baseline="perplexity")
    larger = ((pl.col("perplexity") / pl.col("baseline") - 1) * 100).alias("against base + C, %")
    return means.join(baseline, on="source", how="left", maintain_order="left").with_columns(larger).drop("baseline")


def _shares(outcomes: pl.DataFrame, what: pl.Expr) -> pl.DataFrame:
    named = outcomes.with_columns(pl.col("benchmark").str.extract_groups(BENCHMARK).alias("parts")).unnest("parts")
    counts = named.group_by("wordings", "condition", "tool", maintain_order=True).agg(hits=what.sum(), n=pl.len())
    cells = counts.with_columns(cell=pl.struct("hits", "n").map_elements(percent, return_dtype=pl.String))
    wide = cells.pivot("tool", index=["wordings", "condition"], values="cell", maintain_order=True)
    tools = [tool for tool in TOOLS if tool in wide.columns]
    return wide.select("wordings", "condition", *tools).sort("wordings", maintain_order=True)


def percent(counts: dict[str, int]) -> str:
    """Return `hits` of `n` in per cent with the 95 % interval: `96.2 (94.3-97.5)`."""
    low, high = wilson(counts["hits"], counts["n"])
    return f"{100 * counts['hits'] / counts['n']:.1f} ({100 * low:.1f}-{100 * high:.1f})"
