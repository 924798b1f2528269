"""Measure when a finetuned model calls: finetune on C* with more and fewer texts without calls, and ask each model.

    python -m embedded_model.restraint_study STUDY REAL_TEXT BENCHMARKS

REAL_TEXT: CCNet shards, of which sentences are held out. BENCHMARKS: a folder with `webquestions/test.json`,
`nq_open/NQ-open.dev.jsonl`, `triviaqa/triviaqa_sm_sub.jsonl` and `lama/`. What ran in STUDY is not run again.
"""

import re
import sys
from collections.abc import Iterator
from pathlib import Path

import polars as pl
import typer

from embedded_model.real_text import load_real_text
from toolformer_dag.evaluation.asking import benchmark_outcomes
from toolformer_dag.evaluation.benchmark import Benchmark, BenchmarkQuestion
from toolformer_dag.evaluation.catalogue import read_benchmark, sampled, synthetic_benchmark
from toolformer_dag.evaluation.scores import Condition, outcome_table, wilson
from toolformer_dag.markdown import rounded, table
from toolformer_dag.model.loading import load_identified
from toolformer_dag.pipeline.plan import Plan, lanes
from toolformer_dag.pipeline.stages import table_outputs
from toolformer_dag.pipeline.update import update
from toolformer_dag.pipeline.worker import Worker
from toolformer_dag.pipeline.workers import Workers, in_process
from toolformer_dag.settings.sections import Settings
from toolformer_dag.settings.settings_file import load_settings
from toolformer_dag.synthetic.phenomena import TOOLS
from toolformer_dag.training.checkpoint_outputs import training_texts

SHARES = (0.0, 0.25, 0.5, 1.0)
SEEDS = (0, 1, 2)
SENTENCES, OWN, OPEN = 200, 60, 60
"""Questions: plain sentences; of each tool in seen wordings; of each benchmark."""
SEARCHING = ("WikiSearch", "QA")
FILES = {
    "webquestions": "webquestions/test.json",
    "nq": "nq_open/NQ-open.dev.jsonl",
    "triviaqa": "triviaqa/triviaqa_sm_sub.jsonl",
    "lama": "lama",
}
PLAIN = re.compile(r"(?<=[.!?] )[A-Z][a-z]+(?:,? [a-z]+){9,24}\.(?= )")
"""A sentence of small words behind another one: no number, name, quotation or foreign letter."""


def plain_sentences(paths: list[Path], count: int) -> Benchmark:
    """Return the first halves of held-out real sentences, one per page, as prompts of no tool."""
    found = (PLAIN.search(page.passages[0][1]) for page in load_real_text(paths, held_out=True).web)
    words = [sentence[0].split() for sentence in found if sentence]
    prompts = dict.fromkeys(" ".join(some[: len(some) // 2]) for some in words)
    questions = [BenchmarkQuestion(prompt, ()) for prompt in list(prompts)[:count]]
    return Benchmark("plain sentences", tuple(questions), lambda written, answers: False)


def study_settings(folder: Path, seed: int, share: float) -> Settings:
    """Return the demo's settings with pages, samples and batches of a seed."""
    values: dict[str, float] = {"corpus.small_web.seed": seed + 1, "sampling.seed": seed, "training.seed": seed}
    values |= {"evaluation.seed": seed + 7, "training.plain_texts": share, "execution.workers": 1}
    file = folder / f"seed{seed}" / "toolformer.toml"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text('profile = "embedded"\n')
    return load_settings(file, environment={}, overrides=[f"{name}={value}" for name, value in values.items()])


def finetuned(settings: Settings, share: float) -> tuple[Path, int, int]:
    """Bring C* up to date, finetune on it; return the checkpoint, and the texts with and without calls."""
    from toolformer_dag.training.finetune import finetune

    plan = Plan.of(settings)
    outputs = {output.name: output for output in table_outputs(plan) if output.stage.name != "swapped_results"}
    worker = Worker(plan)
    workers = Workers(worker, outputs, in_process)
    for output in outputs.values():
        update(worker, workers, output, lambda done, total: None)
    workers.close()
    texts, choosing = training_texts(plan, "finetuned_checkpoint")
    plain = plan.lake.table("training/augmented_corpus").scan().filter(calls=0, split="train").collect().height
    out = settings.root / f"plain{share:g}" / "model"
    finetune(settings.model, texts, choosing, settings.training.over(len(texts)), out)
    return out, len(texts) - plain, plain


def asked(settings: Settings, checkpoint: Path, benchmarks: list[Benchmark]) -> pl.DataFrame:
    """Ask a checkpoint with tools; return its outcomes as of `outcome_table`."""
    model, known = load_identified(settings.model, str(checkpoint)), lanes(settings)
    condition = Condition("Toolformer", settings.decoding.k)
    groups = (benchmark_outcomes(settings, known, model, condition, one).outcomes for one in benchmarks)
    return pl.concat(map(outcome_table, groups))


def restraint_table(outcomes: pl.DataFrame) -> pl.DataFrame:
    """Return a row per share and kind of question: questions, right answers and calls in per cent, with intervals.

    `outcomes`: of `outcome_table`, with `share` beside. A call to another tool than search and QA is a wrong one of an
    open question.
    """
    named = outcomes.with_columns(
        kind=pl.col("benchmark").str.extract(r"^(\w+ \(\w+\)|plain|LAMA)").fill_null("open questions"),
        wrong_tool=pl.col("called").is_in(SEARCHING).not_().fill_null(value=False),
    )
    counts = named.group_by("share", "kind", maintain_order=True).agg(
        pl.len().alias("n"),
        right=pl.col("correct").sum(),
        called=pl.col("called").is_not_null().sum(),
        another_tool=pl.col("wrong_tool").sum(),
    )
    shares = [
        pl.struct(hits=name, n="n").map_elements(_percent, return_dtype=pl.String).alias(name)
        for name in ("right", "called", "another_tool")
    ]
    return counts.with_columns(shares).sort("kind", "share", maintain_order=True)


def _percent(counts: dict[str, int]) -> str:
    low, high = wilson(counts["hits"], counts["n"])
    return f"{100 * counts['hits'] / counts['n']:.1f} ({100 * low:.1f}-{100 * high:.1f})"


def main(folder: Path, real_text: Path, benchmarks: Path) -> None:
    """Run the study and print its table."""
    read = [one for name, file in FILES.items() for one in read_benchmark(name, benchmarks / file)]
    open_questions = [sampled(one, OPEN) for one in read]

    def rows() -> Iterator[pl.DataFrame]:
        for seed in SEEDS:
            questions = [synthetic_benchmark(tool, OWN, seed + 7, "seen") for tool in TOOLS]
            questions += [*open_questions, plain_sentences([real_text], SENTENCES)]
            for share in SHARES:
                settings = study_settings(folder, seed, share)
                checkpoint, with_calls, plain = finetuned(settings, share)
                typer.echo(f"seed {seed}, plain_texts {share:g}: {with_calls} texts with calls, {plain} without")
                yield asked(settings, checkpoint, questions).with_columns(share=pl.lit(share), seed=pl.lit(seed))

    outcomes = pl.concat(rows())
    outcomes.write_parquet(folder / "outcomes.parquet")
    found = restraint_table(outcomes)
    typer.echo(table(found.columns, found.iter_rows(), rounded))


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
