"""The tables of evaluation: what determines them, their measurement, and why they are out of date.

Imports torch only to measure. A plan is the settings with the tables and the model that follow from them; a lane is a
tool with its settings.
"""

import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

import polars as pl

from toolformer_dag.computing.plan import Plan, start_thresholds
from toolformer_dag.computing.stage import REJECTIONS, encoded
from toolformer_dag.decoding.generation import DECODING
from toolformer_dag.evaluation.benchmark import Benchmark
from toolformer_dag.evaluation.benchmark_files import content, wikitext
from toolformer_dag.evaluation.catalogue import READING, chosen_benchmarks, chosen_identity
from toolformer_dag.evaluation.outcomes import (
    BASELINES,
    OUTCOME_SCHEMA,
    Condition,
    QuestionOutcome,
    Weights,
    accuracy_by_condition,
    baseline_outcomes,
    check_outage,
    outcome_table,
    score_table,
)
from toolformer_dag.evaluation.question_overlap import question_overlap
from toolformer_dag.files import StorageError
from toolformer_dag.identity import fingerprint
from toolformer_dag.lake.record import STORES, changes, record
from toolformer_dag.lake.table import WHOLE, Lake
from toolformer_dag.model.weights import checkpoint_folder, folder_name, model_identity
from toolformer_dag.pipeline.augmented_corpus import corpus_batches
from toolformer_dag.pipeline.heldout_texts import document_texts, heldout_documents, heldout_texts
from toolformer_dag.pipeline.tool_results import result_settings
from toolformer_dag.settings.setting_types import determining
from toolformer_dag.synthetic.phenomena import TOOLS, TWO_HOP
from toolformer_dag.texts.shared_passages import MATCHING
from toolformer_dag.tools.routing import offer_identity
from toolformer_dag.training.checkpoint_outputs import CHECKPOINTS
from toolformer_dag.training.training_report import read_report

if TYPE_CHECKING:
    from toolformer_dag.evaluation.asking import BenchmarkOutcomes
    from toolformer_dag.model.loading import LanguageModel

ACCURACY = "evaluation/accuracy"
"""The table of scores (`score_table`)."""
OUTCOMES = "evaluation/outcomes"
"""The table of judged answers (`outcome_table`)."""
PERPLEXITY = "evaluation/perplexity"
"""The table of perplexity, a row per source and condition (PERPLEXITY_COLUMNS)."""
OVERLAP = "evaluation/question_overlap"
"""The table of the questions that occur in C*'s training texts (`question_overlap`)."""
PERPLEXITY_COLUMNS = {
    "source": pl.String,
    "condition": pl.String,
    "texts": pl.Int64,
    "tokens": pl.Int64,
    "perplexity": pl.Float64,
    "low": pl.Float64,
    "high": pl.Float64,
    "bits_per_byte": pl.Float64,
    "model": pl.String,
}
"""Columns of PERPLEXITY, described in evaluated_tables.py."""
HELDOUT_C = "C, held out"
"""The source of perplexity that is drawn from C."""
MEASURED_ON = "heldout_texts"
"""The name, in the record of PERPLEXITY, of the texts of C that were measured."""
TABLES = {ACCURACY: (ACCURACY, OUTCOMES, OVERLAP), PERPLEXITY: (PERPLEXITY,)}
"""The tables of each asset; the asset has the version of the first."""
Progress = Callable[[int, int], None]
"""Called as (units done, total units)."""


@dataclass(frozen=True, slots=True)
class Measurement:
    """What was measured and published.

    - `version`: the version of the content of `rows`.
    - `rows`: the table. `shown`: the same in the form that people read.
    - `left_out`: by benchmark, the number of records without a question by reason.
    - `tokens`, `calls`: what it took now, without what an earlier run had stored.
    """

    version: str
    rows: pl.DataFrame
    shown: pl.DataFrame
    left_out: Mapping[str, Mapping[str, int]]
    tokens: int
    calls: int


def accuracy_settings(plan: Plan) -> dict[str, Any]:
    """Return everything that the stored accuracies depend on, but for the checkpoints; a change measures them anew.

    Questions, models, decoding, tools. Raises BenchmarkError where the files of a benchmark cannot be read.
    """
    evaluation = plan.settings.evaluation
    thresholds = start_thresholds(plan.lanes)
    return {
        "columns": fingerprint({name: str(kind) for name, kind in OUTCOME_SCHEMA.items()}),
        "questions": chosen_identity(evaluation),
        "baselines": list(BASELINES),
        "decoding_k": sorted(set(evaluation.decoding_k)),
        "models": _models(plan),
        "overlap": MATCHING,
        "decoding": {**determining(plan.settings.decoding, but=("min_probability",)), "version": DECODING},
        **offer_identity([lane.tool for lane in plan.inference_lanes], plan.settings.decoding.tools),
        **({"min_probability": thresholds} if thresholds else {}),
        "max_call_tokens": plan.settings.sampling.max_call_tokens,
        "model": dict(plan.model),
        "lanes": {lane.tool.key: result_settings(lane) for lane in plan.inference_lanes},
    }


def perplexity_settings(plan: Plan) -> dict[str, Any]:
    """Return everything that the stored perplexities depend on, but for the checkpoints and the held-out texts.

    Raises BenchmarkError where the file of WikiText cannot be read.
    """
    file = plan.settings.evaluation.wikitext
    return {
        "columns": list(PERPLEXITY_COLUMNS),
        "models": _models(plan),
        "texts": plan.settings.evaluation.perplexity_texts,
        **determining(plan.settings.evaluation, "perplexity_on"),
        "model": dict(plan.model),
        "wikitext": [content(file), READING] if file else None,
    }


def _models(plan: Plan) -> dict[str, Any]:
    """Return what determines the models of [evaluation.models], by name. Raises ModelError."""
    identities = {}
    for name, model in plan.settings.evaluation.models.items():
        identities[name] = {**model_identity(model.name, model.revision), "tools": model.tools}
    return identities


SETTINGS: Mapping[str, Callable[[Plan], dict[str, Any]]] = {
    ACCURACY: accuracy_settings,
    PERPLEXITY: perplexity_settings,
}
"""By table, what determines it besides checkpoints and texts."""


def checkpoint_versions(plan: Plan) -> dict[str, str]:
    """Return the fingerprints of the checkpoints that exist, by name."""
    versions = {}
    for name in CHECKPOINTS:
        report = read_report(checkpoint_folder(plan.settings, name))
        if report:
            versions[name] = report.fingerprint
    return versions


def measurement_reasons(plan: Plan, name: str) -> list[str]:
    """Return why a measurement is missing or out of date, a sentence per reason; empty if it is up to date.

    name: ACCURACY or PERPLEXITY. Its record is compared with the settings, checkpoints and texts of now.
    """
    for table_name in TABLES[name]:
        table = plan.lake.table(table_name)
        if not table.has(WHOLE):
            return ["never made"]
        try:
            table.files(WHOLE)
        except StorageError as error:
            return [str(error).partition(";")[0]]
    inputs = {**checkpoint_versions(plan), **_texts_version(plan, name)}
    record_now = json.loads(json.dumps(record(SETTINGS[name](plan), inputs)))  # as it is read from a file
    return [str(change) for change in changes(plan.lake.table(name).record(WHOLE), record_now)]


def _texts_version(plan: Plan, name: str) -> dict[str, str]:
    """Return the fingerprint of the texts that perplexity is measured on, under MEASURED_ON; empty for ACCURACY.

    Where the texts are missing, which has a reason of its own, it is the recorded fingerprint, if there is one.
    """
    if name != PERPLEXITY:
        return {}
    try:
        return {MEASURED_ON: _measured_texts(plan).fingerprint}
    except StorageError:
        inputs = plan.lake.table(name).record(WHOLE)["inputs"]
        return {MEASURED_ON: inputs[MEASURED_ON]} if MEASURED_ON in inputs else {}


class _MeasuredTexts(NamedTuple):
    """The texts of C that perplexity is measured on: their fingerprint, and a function that reads them."""

    fingerprint: str
    read: Callable[[], list[str]]


def _measured_texts(plan: Plan) -> _MeasuredTexts:
    """Choose the held-out texts or whole documents that perplexity is measured on.

    Raises MissingPart, DamagedPart; so does `read`.
    """
    if plan.settings.evaluation.perplexity_on == "documents":
        documents = heldout_documents(plan)
        return _MeasuredTexts(fingerprint(documents.rows()), lambda: document_texts(plan, documents))
    texts = heldout_texts(plan).measuring
    return _MeasuredTexts(fingerprint(texts), lambda: texts)


def publish(
    lake: Lake,
    table: str,
    rows: pl.DataFrame,
    settings: Mapping[str, object],
    inputs: Mapping[str, str],
    stores: Sequence[str] = (),
    left_out: Mapping[str, Mapping[str, int]] = MappingProxyType({}),
) -> str:
    """Replace a table of measurements; return the version of its content. Raises WriteError.

    settings: what determines the rows, as SETTINGS computes it.
    inputs: the fingerprints of the measured checkpoints and texts, by name.
    stores: the names of the row stores of the generations, which `clean` keeps as long as the table is there.
    left_out: by benchmark, the number of records without a question by reason.
    """
    left_out_counts: Counter[tuple[str, str]] = Counter()
    for benchmark, reasons in left_out.items():
        for reason, count in reasons.items():
            left_out_counts[benchmark, reason] = count
    facts = {
        "stage": table.rpartition("/")[2],
        "tool": None,
        STORES: list(stores),
        REJECTIONS: encoded(left_out_counts),
    }
    table_record = record(settings, inputs, **facts)
    return lake.table(table).publish(WHOLE, [rows], lambda: table_record).data_version


def read_accuracy(lake: Lake) -> pl.DataFrame:
    """Return a row per benchmark and a column per condition. Raises MissingPart where nothing was measured."""
    return accuracy_by_condition(lake.table(ACCURACY).read(WHOLE))


class CheckpointTables(NamedTuple):
    """The tables as they were measured on a checkpoint, None where they were not.

    - `accuracy`: as `accuracy_by_condition` returns it.
    - `perplexity`: with PERPLEXITY_COLUMNS.
    """

    accuracy: pl.DataFrame | None
    perplexity: pl.DataFrame | None


def measured_on(plan: Plan, checkpoint: str) -> CheckpointTables:
    """Return the tables that were measured on a checkpoint as it is now. Raises DamagedPart."""
    version = checkpoint_versions(plan).get(checkpoint)
    scores = _table_of(plan.lake, ACCURACY, checkpoint, version)
    return CheckpointTables(
        accuracy=None if scores is None else accuracy_by_condition(scores),
        perplexity=_table_of(plan.lake, PERPLEXITY, checkpoint, version),
    )


def _table_of(lake: Lake, name: str, checkpoint: str, version: str | None) -> pl.DataFrame | None:
    """Return the rows of a table; None where it is missing or was measured on another version of the checkpoint."""
    table = lake.table(name)
    pointer = table.whole_pointer(WHOLE)
    if pointer is None or pointer.record["inputs"].get(checkpoint) != version:
        return None
    return table.read(WHOLE)


def measure_accuracy(plan: Plan, progress: Progress) -> Measurement:
    """Let all models answer all benchmarks, under each condition (with and without calls), and publish the results.

    Three tables are published: the outcome of every question, the accuracies, and which questions occur in the texts
    of C* that were trained on (paper, section 4.2). Beside the models stand baselines that answer without one.

    Returns the accuracies and what they cost. Raises ToolDown where a tool was down, and BenchmarkError.
    """
    benchmarks = chosen_benchmarks(plan.settings.evaluation, _synthetic_kinds(plan))
    versions = checkpoint_versions(plan)  # first: replacing a checkpoint meanwhile makes the table stale
    questioning = _Questioning(plan, benchmarks, progress)
    questioning.ask_all_models()
    answers = questioning.answers

    outcomes: list[QuestionOutcome] = []
    for of_model in answers:
        outcomes += of_model.outcomes
    for benchmark in benchmarks:
        outcomes += baseline_outcomes(benchmark)
    outcome_rows = outcome_table(outcomes)
    score_rows = score_table(outcome_rows, questioning.weights)

    settings = accuracy_settings(plan)
    stores = sorted({of_model.store for of_model in answers})
    left_out = {benchmark.name: benchmark.left_out for benchmark in benchmarks if benchmark.left_out}
    publish(plan.lake, OUTCOMES, outcome_rows, settings, versions, stores=stores, left_out=left_out)
    overlap = question_overlap(benchmarks, corpus_batches(plan.lake))  # follows from C*, as the checkpoints do
    publish(plan.lake, OVERLAP, overlap, settings, versions)
    version = publish(plan.lake, ACCURACY, score_rows, settings, versions)
    return Measurement(
        version=version,
        rows=score_rows,
        shown=accuracy_by_condition(score_rows),
        left_out=left_out,
        tokens=sum(of_model.tokens for of_model in answers),
        calls=sum(of_model.calls for of_model in answers),
    )


def _synthetic_kinds(plan: Plan) -> list[str]:
    """Return the kinds of questions of the synthetic world that are asked.

    These are the tools of the lanes that it has questions for, and TWO_HOP where question answering has chains.
    """
    kinds = [lane.tool.key for lane in plan.lanes if lane.tool.key in TOOLS]
    if any(lane.tool.key == "question_answering" and lane.depth > 1 for lane in plan.lanes):
        kinds.append(TWO_HOP)
    return kinds


class _Questioning:
    """Asks every compared model all benchmarks, and keeps the answers.

    Both are empty at first and complete once `ask_all_models` has returned:

    - `answers`: an entry per condition and benchmark.
    - `weights`: what each model is, by its name in `Condition`.
    """

    def __init__(self, plan: Plan, benchmarks: Sequence[Benchmark], progress: Progress) -> None:
        self.answers: list[BenchmarkOutcomes] = []
        self.weights: dict[str, Weights] = {}
        self._plan = plan
        self._benchmarks = benchmarks
        self._progress = progress
        self._total = 0  # questions under all conditions

    def ask_all_models(self) -> None:
        """Let every model answer every benchmark under each of its conditions; the answers are added to `answers`.

        Raises ToolDown where a tool was down, or too many of its calls were lost.
        """
        from toolformer_dag.evaluation.asking import compared, compared_models

        settings = self._plan.settings
        conditions = sum(len(model.conditions) for model in compared_models(settings))
        self._total = conditions * sum(len(benchmark.questions) for benchmark in self._benchmarks)
        for answers in compared(settings, self._ask):
            check_outage(answers.outcomes)
            self.answers.append(answers)
            self._advance(0)

    def _ask(self, model: "LanguageModel", conditions: list[Condition]) -> "Iterator[BenchmarkOutcomes]":
        """Let a loaded model answer: yield the outcomes of each benchmark under each condition (a name and a k).

        The model's size is noted in `weights`.
        """
        from toolformer_dag.evaluation.asking import benchmark_outcomes

        settings = self._plan.settings
        for condition in conditions:
            model_settings = settings.evaluation.models.get(condition.of_model, settings.model)
            self.weights[condition.of_model] = Weights(folder_name(model_settings.name), model.parameters)
            for benchmark in self._benchmarks:
                yield benchmark_outcomes(
                    settings, self._plan.inference_lanes, model, condition, benchmark, self._advance
                )

    def _advance(self, answered: int) -> None:
        """Report progress; `answered` questions were answered beside those of `answers`."""
        done = sum(len(answers.outcomes) for answers in self.answers)
        self._progress(done + answered, self._total)


def measure_perplexity(plan: Plan, progress: Progress) -> Measurement:
    """Publish the perplexity, with calls disabled, of held-out texts of C and WikiText (paper, section 4.3).

    WikiText is measured where the settings name its file. Raises MissingPart, DamagedPart, BenchmarkError.
    """
    from toolformer_dag.evaluation.asking import compared, compared_models

    versions = checkpoint_versions(plan)  # first: replacing a checkpoint meanwhile makes the table stale
    measured_texts = _measured_texts(plan)
    sources = {HELDOUT_C: measured_texts.read()}
    wikitext_file = plan.settings.evaluation.wikitext
    if wikitext_file:
        sources["WikiText"] = wikitext(wikitext_file)

    rows: list[dict[str, object]] = []
    total = len(compared_models(plan.settings)) * len(sources)
    for row in compared(plan.settings, partial(_perplexities, sources)):
        rows.append(row)
        progress(len(rows), total)
    table = pl.DataFrame(rows, schema=PERPLEXITY_COLUMNS)
    inputs = {**versions, MEASURED_ON: measured_texts.fingerprint}
    version = publish(plan.lake, PERPLEXITY, table, perplexity_settings(plan), inputs)
    return Measurement(
        version=version,
        rows=table,
        shown=table,
        left_out={},
        tokens=int(table["tokens"].sum()),
        calls=0,
    )


def _perplexities(
    sources: Mapping[str, list[str]], model: "LanguageModel", conditions: list[Condition]
) -> Iterator[dict[str, object]]:
    """Measure the perplexity of a model on each source of texts; yield a row (PERPLEXITY_COLUMNS) for each.

    sources: name -> texts. conditions: those of the model, of which the first is without calls and counts here.
    """
    from toolformer_dag.evaluation.language_modeling import perplexity

    without_calls = conditions[0]
    for source, texts in sources.items():
        measure = perplexity(model, texts)
        low, high = measure.interval
        yield {
            "source": source,
            "condition": without_calls.name,
            "texts": len(texts),
            "tokens": measure.tokens,
            "perplexity": measure.perplexity,
            "low": low,
            "high": high,
            "bits_per_byte": measure.bits_per_byte,
            "model": without_calls.of_model,
        }


def stored_measurement(lake: Lake, name: str) -> Measurement:
    """Return a measurement as the lake holds it, ACCURACY or PERPLEXITY; nothing is measured, so its cost is 0.

    Raises MissingPart, DamagedPart.
    """
    table = lake.table(name)
    rows = table.read(WHOLE)
    return Measurement(
        version=table.pointer(WHOLE).data_version,
        rows=rows,
        shown=accuracy_by_condition(rows) if name == ACCURACY else rows,
        left_out={},
        tokens=0,
        calls=0,
    )


MEASURES: Mapping[str, Callable[[Plan, Progress], Measurement]] = {
    ACCURACY: measure_accuracy,
    PERPLEXITY: measure_perplexity,
}
"""By table, the function that measures it."""
