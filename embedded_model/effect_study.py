"""Measure the paper's effect on the synthetic world: seeds, conditions, held-out questions and text; tabulate it."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from random import Random

import polars as pl

from toolformer_dag.evaluation.asking import BASE_C, DISABLED, TOOLFORMER, benchmark_outcomes, compared
from toolformer_dag.evaluation.catalogue import synthetic_benchmark
from toolformer_dag.evaluation.measurements import OUTCOMES, PERPLEXITY
from toolformer_dag.evaluation.scores import Condition, QuestionOutcome, outcome_table, wilson
from toolformer_dag.lake.table import WHOLE, Lake
from toolformer_dag.model.loading import LanguageModel, load_identified
from toolformer_dag.pipeline.augmented_corpus import corpus_rows
from toolformer_dag.pipeline.heldout_texts import heldout_texts
from toolformer_dag.pipeline.merging import TRAIN, Example, KeptCall, examples, split_of
from toolformer_dag.pipeline.plan import Lane, Plan, lanes
from toolformer_dag.pipeline.raw_shards import NAME as RAW_SHARDS
from toolformer_dag.settings.sections import Settings
from toolformer_dag.settings.settings_file import load_settings
from toolformer_dag.synthetic.phenomena import TOOLS
from toolformer_dag.synthetic.wordings import WordingSet
from toolformer_dag.texts.segments import Segment
from toolformer_dag.training.finetune import finetune

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
eval_steps = 100
[evaluation]
questions = {questions}
seed = {ask}
decoding_k = [1, 3]
"""
UNFILTERED = "unfiltered corpus"
TEXT = ("digest", "segment")
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


def unfiltered_texts(lake: Lake, lanes: Sequence[Lane], seed: int) -> list[str]:
    """Return training texts with one call each, as many per tool as the filtered corpus has.

    Raises MissingPart where the pipeline has not run.
    """
    corpus = corpus_rows(lake, ["tools", "split"]).filter(pl.col("split") == TRAIN).collect()
    random, found = Random(f"unfiltered {seed}"), []
    for lane in lanes:
        wanted = corpus.filter(pl.col("tools").list.contains(lane.key)).height
        rows = list(_one_call_per_text(lake, lane, random))
        random.shuffle(rows)
        found += rows[:wanted]
    return found


def _one_call_per_text(lake: Lake, lane: Lane, random: Random) -> Iterator[str]:
    texts = lake.table(f"{lane.key}/heuristic_subset").scan().select(*TEXT, "offset", "text").collect()
    calls = (
        lake.table(f"{lane.key}/loss_deltas").scan().collect().join(texts, on=TEXT).sort(*TEXT, "position", "sample")
    )
    documents = dict(lake.table(RAW_SHARDS).scan().select("digest", "text").collect().iter_rows())
    for (digest, _), rows in sorted(calls.partition_by(*TEXT, as_dict=True).items()):
        if split_of(documents[digest]) != TRAIN:
            continue
        row = rows.row(random.randrange(rows.height), named=True)
        piece = Segment(0, row["offset"], row["text"])
        call = KeptCall(lane.key, lane.tool.name, row["char_offset"], row["input"], row["result"], row["delta"])
        merged = examples([piece], [call], [lane.tool.name])
        yield from (example.text_with_calls for example in merged if isinstance(example, Example))


def measure(settings: Settings, seed: int) -> tuple[pl.DataFrame, pl.DataFrame]:
    """Finetune on the unfiltered corpus and ask all conditions; the pipeline of `settings` must have run.

    Return outcomes as of `outcome_table`, and the pipeline's table of perplexity.
    """
    lake, tools = Lake.of(settings.paths), lanes(settings)
    unfiltered = settings.paths.local / "training" / "unfiltered"
    choosing = heldout_texts(Plan.of(settings)).choosing
    finetune(settings.model, unfiltered_texts(lake, tools, seed), choosing, settings.training, unfiltered)
    asked = [outcome_table(found) for found in ask(settings, tools, str(unfiltered))]
    own = lake.table(OUTCOMES).read(WHOLE).filter(pl.col("k").is_not_null())  # without what needs no model
    return pl.concat([own, *asked]), lake.table(PERPLEXITY).read(WHOLE)


def ask(settings: Settings, lanes: Sequence[Lane], unfiltered: str) -> Iterator[list[QuestionOutcome]]:
    """Yield the outcomes of a tool's questions in unseen wordings under each condition.

    `unfiltered`, a model folder, is asked in seen wordings too.
    """

    def asked(model: LanguageModel, condition: Condition, wordings: WordingSet) -> Iterator[list[QuestionOutcome]]:
        for tool in TOOLS:
            questions = synthetic_benchmark(tool, settings.evaluation.questions, settings.evaluation.seed, wordings)
            yield benchmark_outcomes(settings, lanes, model, condition, questions).outcomes

    def in_unseen(model: LanguageModel, conditions: list[Condition]) -> Iterator[list[QuestionOutcome]]:
        for condition in conditions:
            yield from asked(model, condition, "unseen")

    yield from compared(settings, in_unseen)
    model = load_identified(settings.model, unfiltered)
    for wordings in ("seen", "unseen"):
        yield from asked(model, Condition(UNFILTERED, settings.decoding.k), wordings)


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
    cells = counts.with_columns(cell=pl.struct("hits", "n").map_elements(_percent, return_dtype=pl.String))
    wide = cells.pivot("tool", index=["wordings", "condition"], values="cell", maintain_order=True)
    tools = [tool for tool in TOOLS if tool in wide.columns]
    return wide.select("wordings", "condition", *tools).sort("wordings", maintain_order=True)


def _percent(counts: dict[str, int]) -> str:
    low, high = wilson(counts["hits"], counts["n"])
    return f"{100 * counts['hits'] / counts['n']:.1f} ({100 * low:.1f}-{100 * high:.1f})"
