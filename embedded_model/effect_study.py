"""Measure the paper's effect on the synthetic world: seeds, conditions, held-out questions and text."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random

import polars as pl

from embedded_model.real_text import load_real_text
from toolformer_dag.evaluation.asking import DISABLED, benchmark_outcomes, compared
from toolformer_dag.evaluation.catalogue import synthetic_benchmark
from toolformer_dag.evaluation.language_modeling import perplexity
from toolformer_dag.evaluation.measurements import OUTCOMES
from toolformer_dag.evaluation.scores import Condition, QuestionOutcome, outcome_table
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
from toolformer_dag.synthetic.web import records
from toolformer_dag.synthetic.wordings import WordingSet
from toolformer_dag.texts.segments import Segment
from toolformer_dag.training.finetune import finetune

DECODING = (1, 3)  # k beside 0 (disabled) and the settings' own
PLAIN_TEXTS = 150  # of each kind, for perplexity
PAGE_CHARACTERS = 2000  # read of each
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
"""


@dataclass(frozen=True, slots=True)
class Study:
    """Configure `seeds` pipeline runs over `documents` synthetic pages each, with `questions` per tool and wording set.

    Base and finetuned models answer the same questions; each seed has its own pages, samples, batches and questions.
    `real_text` adds perplexity on real pages.
    """

    model: str = "embedded"
    seeds: int = 3
    documents: int = 3600
    questions: int = 100
    real_text: tuple[Path, ...] = ()

    def line(self, folder: Path, seed: int) -> Settings:
        """Write the settings of a run into its own folder, where the UI and `sql` can read it, and return them.

        Raises SettingsError.
        """
        file = folder / f"seed{seed}" / "toolformer.toml"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(
            LINE.format(
                model=json.dumps(self.model),
                documents=self.documents,
                questions=self.questions,
                web=seed + 1,
                seed=seed,
                ask=seed + 7,
            )
        )
        return load_settings(file, environment={})


TEXT = ("digest", "segment")


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


def plain_texts(seed: int, real_text: Sequence[Path]) -> dict[str, list[str]]:
    """Return held-out texts by kind. Raises RealTextError."""
    found = {"synthetic pages": [record["raw_content"] for record in records(seed, "evaluation", PLAIN_TEXTS)]}
    if real_text:
        pages = load_real_text(real_text, held_out=True).web
        some = pages[:: max(1, len(pages) // PLAIN_TEXTS)]
        texts = ["\n".join(text for _, text in page.passages)[:PAGE_CHARACTERS] for page in some]
        found["real pages"] = [text for text in texts if text.strip()]
    return found


def plain_text_table(settings: Settings, texts: Mapping[str, Sequence[str]]) -> pl.DataFrame:
    """Measure texts with calls disabled; columns text, condition, perplexity, bits_per_byte."""

    def rows(model: LanguageModel, conditions: list[Condition]) -> Iterator[tuple[str, str, float, float]]:
        for kind, some in texts.items():
            measured = perplexity(model, some)
            yield kind, conditions[0].name, measured.perplexity, measured.bits_per_byte

    return pl.DataFrame(
        list(compared(settings, rows)), schema=["text", "condition", "perplexity", "bits_per_byte"], orient="row"
    )


UNFILTERED = "unfiltered corpus"


def ask(settings: Settings, lanes: Sequence[Lane], unfiltered: str) -> Iterator[list[QuestionOutcome]]:
    """Yield the outcomes of a tool's questions under a condition; `unfiltered` is a model folder."""

    def asked(model: LanguageModel, condition: Condition, *wordings: WordingSet) -> Iterator[list[QuestionOutcome]]:
        for some in wordings:
            for tool in TOOLS:
                questions = synthetic_benchmark(tool, settings.evaluation.questions, settings.evaluation.seed, some)
                yield benchmark_outcomes(settings, lanes, model, condition, questions).outcomes

    def of_model(model: LanguageModel, conditions: list[Condition]) -> Iterator[list[QuestionOutcome]]:
        for condition in conditions:
            yield from asked(model, condition, "unseen")
        if DISABLED in conditions:
            for k in DECODING:
                yield from asked(model, Condition(f"Toolformer, k = {k}", k), "seen")

    yield from compared(settings, of_model)
    without_filter = Condition(UNFILTERED, settings.decoding.k)
    yield from asked(load_identified(settings.model, unfiltered), without_filter, "seen", "unseen")


@dataclass(frozen=True, slots=True)
class Measured:
    """Hold the tables of a run: `outcomes` as of `outcome_table`, `plain` as of `plain_text_table`."""

    outcomes: pl.DataFrame
    plain: pl.DataFrame


def measure(settings: Settings, study: Study, seed: int) -> Measured:
    """Finetune on the unfiltered corpus and ask all conditions; the pipeline of `settings` must have run."""
    lake, tools = Lake.of(settings.paths), lanes(settings)
    unfiltered = finetune_unfiltered(settings, unfiltered_texts(lake, tools, seed))
    own = lake.table(OUTCOMES).read(WHOLE).filter(pl.col("k").is_not_null())  # without what needs no model
    asked = [outcome_table(found) for found in ask(settings, tools, str(unfiltered))]
    plain = plain_text_table(settings, plain_texts(settings.corpus.small_web.seed, study.real_text))
    return Measured(pl.concat([own, *asked]), plain)


def finetune_unfiltered(settings: Settings, texts: list[str]) -> Path:
    """Finetune M on these texts as on the filtered corpus; return the model folder."""
    out = settings.paths.local / "training" / "unfiltered"
    finetune(settings.model, texts, heldout_texts(Plan.of(settings)).choosing, settings.training, out)
    return out
