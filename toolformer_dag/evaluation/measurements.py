"""The tables of evaluation: their settings, their measurement, and why they are out of date.

Imports torch only to measure.
"""

import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import polars as pl

from toolformer_dag.computing.plan import Plan, start_thresholds
from toolformer_dag.computing.stage import REJECTIONS, encoded
from toolformer_dag.decoding.generation import DECODING
from toolformer_dag.evaluation.benchmark import Benchmark
from toolformer_dag.evaluation.benchmark_files import content, wikitext
from toolformer_dag.evaluation.catalogue import READING, chosen_benchmarks, chosen_identity
from toolformer_dag.evaluation.question_overlap import question_overlap
from toolformer_dag.evaluation.scores import (
    BASELINES,
    OUTCOME_SCHEMA,
    Condition,
    Weights,
    accuracy_by_condition,
    baseline_outcomes,
    check_outage,
    outcome_table,
    score_table,
)
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
    from toolformer_dag.evaluation.asking import AskedBenchmark
    from toolformer_dag.model.loading import LanguageModel

ACCURACY, OUTCOMES, PERPLEXITY = "evaluation/accuracy", "evaluation/outcomes", "evaluation/perplexity"
"""Tables: scores (`score_table`), outcomes (`outcome_table`), and perplexity per source and condition."""
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
HELDOUT_C = "C, held out"
"""The source of perplexity that is drawn from C."""
MEASURED_ON = "heldout_texts"
TABLES = {ACCURACY: (ACCURACY, OUTCOMES, OVERLAP), PERPLEXITY: (PERPLEXITY,)}
"""The tables of each asset; the asset has the version of the first."""
Progress = Callable[[int, int], None]
"""Called with the units done and the units there are."""


@dataclass(frozen=True, slots=True)
class Measurement:
    """What was measured and published.

    - `version`: of the content of `rows`; `shown`: the same for people.
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
    """Return what determines the answers besides the checkpoints. Raises BenchmarkError."""
    return {
        "columns": fingerprint({name: str(kind) for name, kind in OUTCOME_SCHEMA.items()}),
        "questions": chosen_identity(plan.settings.evaluation),
        "baselines": list(BASELINES),
        "decoding_k": sorted(set(plan.settings.evaluation.decoding_k)),
        "models": _models(plan),
        "overlap": MATCHING,
        "decoding": {**determining(plan.settings.decoding, but=("min_probability",)), "version": DECODING},
        **offer_identity([lane.tool for lane in plan.inference_lanes], plan.settings.decoding.tools),
        **({"min_probability": least} if (least := start_thresholds(plan.lanes)) else {}),
        "max_call_tokens": plan.settings.sampling.max_call_tokens,
        "model": dict(plan.model),
        "lanes": {lane.tool.key: result_settings(lane) for lane in plan.inference_lanes},
    }


def perplexity_settings(plan: Plan) -> dict[str, Any]:
    """Return what determines the perplexities besides the checkpoints and the texts of C. Raises BenchmarkError."""
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
    """Identify the further models. Raises ModelError."""
    named = plan.settings.evaluation.models.items()
    return {name: {**model_identity(model.name, model.revision), "tools": model.tools} for name, model in named}


SETTINGS: Mapping[str, Callable[[Plan], dict[str, Any]]] = {
    ACCURACY: accuracy_settings,
    PERPLEXITY: perplexity_settings,
}


def checkpoint_versions(plan: Plan) -> dict[str, str]:
    """Return the fingerprints of the checkpoints that exist."""
    reports = {name: read_report(checkpoint_folder(plan.settings, name)) for name in CHECKPOINTS}
    return {name: report.fingerprint for name, report in reports.items() if report}


def measurement_reasons(plan: Plan, name: str) -> list[str]:
    """Return why a table of evaluation is missing or out of date; empty if it is up to date."""
    for table in map(plan.lake.table, TABLES[name]):
        if not table.has(WHOLE):
            return ["never made"]
        try:
            table.files(WHOLE)
        except StorageError as error:
            return [str(error).partition(";")[0]]
    now = record(SETTINGS[name](plan), {**checkpoint_versions(plan), **_texts_version(plan, name)})
    return [str(change) for change in changes(plan.lake.table(name).record(WHOLE), json.loads(json.dumps(now)))]


def _texts_version(plan: Plan, name: str) -> dict[str, str]:
    """Return the fingerprint of the texts that perplexity is measured on; the recorded one where they are missing."""
    if name != PERPLEXITY:
        return {}
    try:
        return {MEASURED_ON: _measured_on(plan)[0]}
    except StorageError:  # their own reasons say so
        inputs = plan.lake.table(name).record(WHOLE)["inputs"]
        return {MEASURED_ON: inputs[MEASURED_ON]} if MEASURED_ON in inputs else {}


def _measured_on(plan: Plan) -> tuple[str, Callable[[], list[str]]]:
    """Return the fingerprint of the held-out texts or documents that perplexity is measured on, and what reads them."""
    if plan.settings.evaluation.perplexity_on == "documents":
        documents = heldout_documents(plan)
        return fingerprint(documents.rows()), lambda: document_texts(plan, documents)
    measuring = heldout_texts(plan).measuring
    return fingerprint(measuring), lambda: measuring


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

    `inputs`: the fingerprints of the measured checkpoints and texts, by name. `stores`: the names of the row stores
    after the table, which `clean` then keeps. `left_out`: by benchmark, the number of records without a question by
    reason.
    """
    counts = Counter({(name, reason): n for name, reasons in left_out.items() for reason, n in reasons.items()})
    facts = {"stage": table.rpartition("/")[2], "tool": None, STORES: list(stores), REJECTIONS: encoded(counts)}
    written = record(settings, inputs, **facts)
    return lake.table(table).publish(WHOLE, [rows], lambda: written).data_version


def read_accuracy(lake: Lake) -> pl.DataFrame:
    """Return a row per benchmark and a column per condition. Raises MissingPart where nothing was measured."""
    return accuracy_by_condition(lake.table(ACCURACY).read(WHOLE))


def measured_on(plan: Plan, checkpoint: str) -> tuple[pl.DataFrame | None, pl.DataFrame | None]:
    """Return accuracy (`accuracy_by_condition`) and perplexity; None for what was not measured on this checkpoint."""
    version = checkpoint_versions(plan).get(checkpoint)
    pointers = {name: plan.lake.table(name).whole_pointer(WHOLE) for name in TABLES}
    tables = {
        name: plan.lake.table(name).read(WHOLE)
        if pointer and pointer.record["inputs"].get(checkpoint) == version
        else None
        for name, pointer in pointers.items()
    }
    accuracy = tables[ACCURACY]
    return None if accuracy is None else accuracy_by_condition(accuracy), tables[PERPLEXITY]


def measure_accuracy(plan: Plan, progress: Progress) -> Measurement:
    """Ask all questions under all conditions; publish outcomes, scores and overlap with C* (paper, section 4.2).

    Arithmetic questions are answered by the baselines without a model too. Raises ToolDown where a tool was down.
    """
    benchmarks = chosen_benchmarks(plan.settings.evaluation, _synthetic_kinds(plan))
    versions = checkpoint_versions(plan)  # first: replacing a checkpoint meanwhile makes the table stale
    weights: dict[str, Weights] = {}
    asked = _ask(plan, benchmarks, weights, progress)
    groups = [*(one.outcomes for one in asked), *map(baseline_outcomes, benchmarks)]
    outcomes = outcome_table(list(chain.from_iterable(groups)))
    table = score_table(outcomes, weights)
    settings, stores = accuracy_settings(plan), sorted({one.store for one in asked})
    left_out = {one.name: one.left_out for one in benchmarks if one.left_out}
    publish(plan.lake, OUTCOMES, outcomes, settings, versions, stores, left_out)
    overlap = question_overlap(benchmarks, corpus_batches(plan.lake))  # the checkpoints' versions tell of C*
    publish(plan.lake, OVERLAP, overlap, settings, versions)
    version = publish(plan.lake, ACCURACY, table, settings, versions)
    tokens, calls = sum(one.tokens for one in asked), sum(one.calls for one in asked)
    return Measurement(version, table, accuracy_by_condition(table), left_out, tokens, calls)


def _synthetic_kinds(plan: Plan) -> list[str]:
    """Return what the synthetic world is asked: the lanes' tools, and chains where question answering has them."""
    chained = any(lane.tool.key == "question_answering" and lane.depth > 1 for lane in plan.lanes)
    return [lane.tool.key for lane in plan.lanes if lane.tool.key in TOOLS] + [TWO_HOP] * chained


def _ask(
    plan: Plan, benchmarks: Sequence[Benchmark], weights: dict[str, Weights], progress: Progress
) -> "list[AskedBenchmark]":
    """Ask every model; note in `weights` what each is."""
    from toolformer_dag.evaluation.asking import benchmark_outcomes, compared, compared_models

    settings, lanes = plan.settings, plan.inference_lanes
    asked_as = sum(len(conditions) for _, _, conditions in compared_models(settings))
    total = asked_as * sum(len(benchmark.questions) for benchmark in benchmarks)
    asked: list[AskedBenchmark] = []

    def advance(answered: int) -> None:
        progress(sum(len(group.outcomes) for group in asked) + answered, total)

    def ask(model: "LanguageModel", conditions: list[Condition]) -> "Iterator[AskedBenchmark]":
        for condition in conditions:
            named = settings.evaluation.models.get(condition.of_model, settings.model)
            weights[condition.of_model] = folder_name(named.name), model.parameters
            for benchmark in benchmarks:
                yield benchmark_outcomes(settings, lanes, model, condition, benchmark, advance)

    for group in compared(settings, ask):
        check_outage(group.outcomes)
        asked.append(group)
        advance(0)
    return asked


def measure_perplexity(plan: Plan, progress: Progress) -> Measurement:
    """Publish the perplexity, with calls disabled, of held-out texts of C and WikiText (paper, section 4.3).

    WikiText is measured where the settings name its file.
    """
    from toolformer_dag.evaluation.asking import compared, compared_models
    from toolformer_dag.evaluation.language_modeling import perplexity

    versions = checkpoint_versions(plan)  # first: replacing a checkpoint meanwhile makes the table stale
    file = plan.settings.evaluation.wikitext
    measured_on, read = _measured_on(plan)
    sources = {HELDOUT_C: read()}
    sources |= {"WikiText": wikitext(file)} if file else {}

    def rows(model: "LanguageModel", conditions: list[Condition]) -> Iterator[tuple[object, ...]]:
        plainly = conditions[0]
        for source, texts in sources.items():
            measure = perplexity(model, texts)
            low, high = measure.interval
            figures = (measure.tokens, measure.perplexity, low, high, measure.bits_per_byte)
            yield source, plainly.name, len(texts), *figures, plainly.of_model

    measured: list[tuple[object, ...]] = []
    for row in compared(plan.settings, rows):
        measured.append(row)
        progress(len(measured), len(compared_models(plan.settings)) * len(sources))
    table = pl.DataFrame(measured, schema=PERPLEXITY_COLUMNS, orient="row")
    inputs = {**versions, MEASURED_ON: measured_on}
    version = publish(plan.lake, PERPLEXITY, table, perplexity_settings(plan), inputs)
    return Measurement(version, table, table, {}, int(table["tokens"].sum()), 0)


def stored_measurement(lake: Lake, name: str) -> Measurement:
    """Return what a table holds, as if it had been measured for nothing. Raises MissingPart, DamagedPart."""
    rows = lake.table(name).read(WHOLE)
    shown = accuracy_by_condition(rows) if name == ACCURACY else rows
    return Measurement(lake.table(name).pointer(WHOLE).data_version, rows, shown, {}, 0, 0)


MEASURES: Mapping[str, Callable[[Plan, Progress], Measurement]] = {
    ACCURACY: measure_accuracy,
    PERPLEXITY: measure_perplexity,
}
