"""Measure accuracy and perplexity: the settings that the tables depend on, and why they are out of date.

Imports torch only to measure. A lane is a tool with its settings.
"""

import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

import polars as pl

from toolformer_dag.computing.plan import Plan, map_tool_to_start_threshold
from toolformer_dag.computing.stage import REJECTIONS, encoded
from toolformer_dag.decoding.generation import DECODING
from toolformer_dag.evaluation.benchmark import Benchmark
from toolformer_dag.evaluation.benchmark_files import content, wikitext
from toolformer_dag.evaluation.catalogue import READING, build_questions_identity, collect_chosen_benchmarks
from toolformer_dag.evaluation.outcomes import (
    BASELINES,
    OUTCOME_SCHEMA,
    Condition,
    QuestionOutcome,
    Weights,
    build_outcome_table,
    build_score_table,
    check_outage,
    format_accuracy_by_condition,
    judge_baselines,
)
from toolformer_dag.evaluation.question_overlap import question_overlap
from toolformer_dag.files import StorageError
from toolformer_dag.identity import fingerprint
from toolformer_dag.lake.record import STORES, changes, record
from toolformer_dag.lake.table import WHOLE, Lake
from toolformer_dag.model.weights import checkpoint_folder, format_model_name, read_model_identity
from toolformer_dag.pipeline.augmented_corpus import iter_corpus_batches
from toolformer_dag.pipeline.heldout_texts import draw_heldout_documents, heldout_texts, read_document_texts
from toolformer_dag.pipeline.tool_results import result_settings
from toolformer_dag.settings.setting_types import determining
from toolformer_dag.synthetic.phenomena import TOOLS, TWO_HOP
from toolformer_dag.texts.shared_passages import MATCHING
from toolformer_dag.tools.routing import build_offer_identity
from toolformer_dag.training.checkpoints import checkpoints
from toolformer_dag.training.training_report import read_report

if TYPE_CHECKING:
    from toolformer_dag.evaluation.asking import BenchmarkOutcomes
    from toolformer_dag.model.loading import LanguageModel

ACCURACY = "evaluation/accuracy"
"""The table of scores (`build_score_table`)."""
OUTCOMES = "evaluation/outcomes"
"""The table of judged answers (`build_outcome_table`)."""
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
    """A table that was measured and published.

    - `version`: of the content of `rows`
    - `rows`: the table
    - `shown`: the same in the form that people read
    - `left_out`: benchmark -> reason -> number of records without a question
    - `tokens`, `calls`: spent now, without what an earlier run had stored
    """

    version: str
    rows: pl.DataFrame
    shown: pl.DataFrame
    left_out: Mapping[str, Mapping[str, int]]
    tokens: int
    calls: int


def build_accuracy_settings(plan: Plan) -> dict[str, Any]:
    """Collect all settings on which the stored accuracies depend. If one changes, they are measured again.

    Checkpoints are not among them, because they are inputs.

    Raises:
        BenchmarkError: The files of a benchmark cannot be read.
    """
    evaluation = plan.settings.evaluation
    return {
        "columns": fingerprint({name: str(kind) for name, kind in OUTCOME_SCHEMA.items()}),
        "questions": build_questions_identity(evaluation),
        "baselines": list(BASELINES),
        "decoding_k": sorted(set(evaluation.decoding_k)),
        "models": _read_model_identities(plan),
        "overlap": MATCHING,
        "model": dict(plan.model),
        **_build_decoding_identity(plan),
    }


def _build_decoding_identity(plan: Plan) -> dict[str, Any]:
    """Collect the settings of decoding and of the tools that a model may call, for the record of a table.

    If one of them changes, the table is out of date. A setting that older records lack is left out while it has the
    value under which nothing changes.
    """
    decoding = determining(plan.settings.decoding, but=("min_probability",))  # which is added by tool instead
    # tool -> least probability of ` [`; empty if no setting has it
    thresholds = map_tool_to_start_threshold(plan.lanes)

    tools = [lane.tool for lane in plan.inference_lanes]
    return {
        "decoding": {**decoding, "version": DECODING},
        **build_offer_identity(tools, plan.settings.decoding.tools),
        **({"min_probability": thresholds} if thresholds else {}),
        "max_call_tokens": plan.settings.sampling.max_call_tokens,
        "lanes": {lane.tool.key: result_settings(lane) for lane in plan.inference_lanes},
    }


def build_perplexity_settings(plan: Plan) -> dict[str, Any]:
    """Collect all settings on which the stored perplexities depend. If one changes, they are measured again.

    Checkpoints and held-out texts are not among them, because they are inputs.

    Raises:
        BenchmarkError: The file of WikiText cannot be read.
    """
    evaluation = plan.settings.evaluation
    wikitext_file = evaluation.wikitext
    return {
        "columns": list(PERPLEXITY_COLUMNS),
        "models": _read_model_identities(plan),
        "texts": evaluation.perplexity_texts,
        **determining(evaluation, "perplexity_on"),  # {} at the default, which older records lack
        "model": dict(plan.model),
        "wikitext": [content(wikitext_file), READING] if wikitext_file else None,  # READING: the reader's version
    }


def _read_model_identities(plan: Plan) -> dict[str, Any]:
    """Return what determines each model of [evaluation.models], by name. Raises ModelError."""
    identities = {}
    for name, model in plan.settings.evaluation.models.items():
        identities[name] = {**read_model_identity(model.name, model.revision), "tools": model.tools}
    return identities


SETTINGS: Mapping[str, Callable[[Plan], dict[str, Any]]] = {
    ACCURACY: build_accuracy_settings,
    PERPLEXITY: build_perplexity_settings,
}
"""Table -> the function that returns all settings that its rows depend on."""


def read_checkpoint_versions(plan: Plan) -> dict[str, str]:
    """Return the fingerprints of the checkpoints that exist, by name."""
    versions = {}
    for name in checkpoints(plan.settings):
        report = read_report(checkpoint_folder(plan.settings, name))
        if report:
            versions[name] = report.fingerprint
    return versions


def find_measurement_reasons(plan: Plan, name: str) -> list[str]:
    """Find out why a measurement is missing or out of date.

    Args:
        name: ACCURACY or PERPLEXITY.

    Returns:
        A sentence per reason. The list is empty if the measurement is up to date.
    """
    for table_name in TABLES[name]:
        damage = _find_damage(plan.lake, table_name)
        if damage is not None:
            return [damage]

    stored_record = plan.lake.table(name).record(WHOLE)
    return [str(change) for change in changes(stored_record, _build_current_record(plan, name))]


def _find_damage(lake: Lake, table_name: str) -> str | None:
    """Check that a table is there and whole.

    Returns:
        "never made", or a description of the damage. None if the table is whole.
    """
    table = lake.table(table_name)
    if not table.has(WHOLE):
        return "never made"

    try:
        table.files(WHOLE)
    except StorageError as error:
        reason, _, _remedy = str(error).partition(";")
        return reason
    return None


def _build_current_record(plan: Plan, name: str) -> dict[str, Any]:
    """Return the record that a measurement would have with the present settings, checkpoints and texts."""
    inputs = {**read_checkpoint_versions(plan), **_read_texts_version(plan, name)}
    record_now = record(SETTINGS[name](plan), inputs)
    as_read_from_file: dict[str, Any] = json.loads(json.dumps(record_now))  # lists for tuples
    return as_read_from_file


def _read_texts_version(plan: Plan, name: str) -> dict[str, str]:
    """Return {MEASURED_ON: the fingerprint of the texts} for PERPLEXITY; {} for ACCURACY, which reads no texts."""
    if name != PERPLEXITY:
        return {}
    try:
        return {MEASURED_ON: _choose_measured_texts(plan).fingerprint}
    except StorageError:  # reported elsewhere; must not count as a change of the texts
        return _read_recorded_texts_version(plan)


def _read_recorded_texts_version(plan: Plan) -> dict[str, str]:
    """Return {MEASURED_ON: the fingerprint in the record of PERPLEXITY}; {} without one."""
    inputs = plan.lake.table(PERPLEXITY).record(WHOLE)["inputs"]
    return {MEASURED_ON: inputs[MEASURED_ON]} if MEASURED_ON in inputs else {}


class _MeasuredTexts(NamedTuple):
    """The texts of C that perplexity is measured on.

    - `fingerprint`: of all texts
    - `read`: returns the texts. Raises MissingPart, DamagedPart
    """

    fingerprint: str
    read: Callable[[], list[str]]


def _choose_measured_texts(plan: Plan) -> _MeasuredTexts:
    """Choose the texts on which perplexity is measured.

    They are held-out texts of C or, if the settings say so, whole documents.

    Raises:
        MissingPart: A part of a table that is read does not exist.
        DamagedPart: A part of a table that is read is damaged.
    """
    if plan.settings.evaluation.perplexity_on == "documents":
        documents = draw_heldout_documents(plan)
        return _MeasuredTexts(
            fingerprint=fingerprint(documents.rows()),
            read=lambda: read_document_texts(plan, documents),
        )

    texts = heldout_texts(plan).measuring
    return _MeasuredTexts(fingerprint=fingerprint(texts), read=lambda: texts)


def publish(
    lake: Lake,
    table: str,
    rows: pl.DataFrame,
    settings: Mapping[str, object],
    inputs: Mapping[str, str],
    stores: Sequence[str] = (),
    left_out: Mapping[str, Mapping[str, int]] = MappingProxyType({}),
) -> str:
    """Replace a table of measurements by new rows.

    The settings and inputs are recorded with the table, to tell later whether it is out of date.

    Args:
        table: The name of the table, such as "evaluation/accuracy".
        settings: All settings on which the rows depend.
        inputs: The fingerprints of the checkpoints and texts, by name.
        stores: The names of the row stores of generated texts. `clean` keeps them as long as the table exists.
        left_out: For each benchmark and reason, the number of records without a question.

    Returns:
        The version of the table's content.

    Raises:
        WriteError: The rows cannot be written.
    """
    facts = {
        "stage": table.rpartition("/")[2],
        "tool": None,
        STORES: list(stores),
        REJECTIONS: encoded(_flatten_counts(left_out)),
    }
    table_record = record(settings, inputs, **facts)

    # A table takes its record from a function: in other stages it is only known once all rows are written.
    published = lake.table(table).publish(WHOLE, [rows], lambda: table_record)
    return published.data_version


def _flatten_counts(left_out: Mapping[str, Mapping[str, int]]) -> Counter[tuple[str, str]]:
    """Return benchmark -> reason -> count as (benchmark, reason) -> count."""
    counts: Counter[tuple[str, str]] = Counter()
    for benchmark, reasons in left_out.items():
        for reason, count in reasons.items():
            counts[benchmark, reason] = count
    return counts


def read_accuracy(lake: Lake) -> pl.DataFrame:
    """Return a row per benchmark with a column per condition. Raises MissingPart if nothing was measured."""
    return format_accuracy_by_condition(lake.table(ACCURACY).read(WHOLE))


class CheckpointTables(NamedTuple):
    """The tables that were measured on a checkpoint; None for a table that was not.

    - `accuracy`: as `format_accuracy_by_condition` returns it
    - `perplexity`: with PERPLEXITY_COLUMNS
    """

    accuracy: pl.DataFrame | None
    perplexity: pl.DataFrame | None


def read_checkpoint_tables(plan: Plan, checkpoint: str) -> CheckpointTables:
    """Return the tables that were measured on the present version of a checkpoint. Raises DamagedPart."""
    version = read_checkpoint_versions(plan).get(checkpoint)
    scores = _read_table_of_version(plan.lake, ACCURACY, checkpoint, version)
    return CheckpointTables(
        accuracy=None if scores is None else format_accuracy_by_condition(scores),
        perplexity=_read_table_of_version(plan.lake, PERPLEXITY, checkpoint, version),
    )


def _read_table_of_version(lake: Lake, name: str, checkpoint: str, version: str | None) -> pl.DataFrame | None:
    """Return the rows of a table; None if it is missing or was measured on another version of the checkpoint."""
    table = lake.table(name)
    pointer = table.find_whole_pointer(WHOLE)
    if pointer is None or pointer.record["inputs"].get(checkpoint) != version:
        return None
    return table.read(WHOLE)


def measure_accuracy(plan: Plan, progress: Progress) -> Measurement:
    """Let all models answer all benchmarks, with and without calls, and publish the accuracies.

    The judged answers are published too, and which questions occur in the training texts.

    Raises:
        ToolDown: A tool was down, or too many of its calls were lost.
        BenchmarkError: A benchmark cannot be read.
    """
    benchmarks = collect_chosen_benchmarks(plan.settings.evaluation, _list_synthetic_kinds(plan))

    # Read before the models: if a checkpoint is replaced meanwhile, the tables are out of date.
    versions = read_checkpoint_versions(plan)
    questioning = _Questioning(plan, benchmarks, progress)
    questioning.ask_all_models()  # collects their answers

    outcomes = build_outcome_table(questioning.outcomes())
    scores = build_score_table(outcomes, questioning.weights)

    publish_table = partial(publish, plan.lake, settings=build_accuracy_settings(plan), inputs=versions)
    publish_table(OUTCOMES, outcomes, stores=questioning.stores(), left_out=questioning.left_out())
    publish_table(OVERLAP, question_overlap(benchmarks, iter_corpus_batches(plan.lake)))  # paper, section 4.2
    version = publish_table(ACCURACY, scores)
    return _build_accuracy_measurement(version, scores, questioning)


def _build_accuracy_measurement(version: str, scores: pl.DataFrame, questioning: "_Questioning") -> Measurement:
    """Return the accuracies with what their answers cost."""
    return Measurement(
        version=version,
        rows=scores,
        shown=format_accuracy_by_condition(scores),
        left_out=questioning.left_out(),
        tokens=questioning.tokens,
        calls=questioning.calls,
    )


def _list_synthetic_kinds(plan: Plan) -> list[str]:
    """List the kinds of synthetic questions that the models answer, such as ["calculator", "calendar"].

    They are the tools in the settings for which there are synthetic questions. TWO_HOP (questions that take two
    calls) is added if the question answering tool may be called in chains.
    """
    kinds = [lane.tool.key for lane in plan.lanes if lane.tool.key in TOOLS]
    if any(lane.tool.key == "question_answering" and lane.depth > 1 for lane in plan.lanes):
        kinds.append(TWO_HOP)
    return kinds


class _Questioning:
    """Asks every compared model all benchmarks, and keeps the answers.

    Both attributes are empty at first and complete once `ask_all_models` has returned:

    - `answers`: an entry per condition and benchmark
    - `weights`: the underlying model and its size, by the model's name in `Condition`
    """

    def __init__(self, plan: Plan, benchmarks: Sequence[Benchmark], progress: Progress) -> None:
        self.answers: list[BenchmarkOutcomes] = []
        self.weights: dict[str, Weights] = {}
        self._plan = plan
        self._benchmarks = benchmarks
        self._progress = progress
        self._total = 0  # questions under all conditions

    def ask_all_models(self) -> None:
        """Let every model answer every benchmark under each of its conditions, and add the answers to `answers`.

        Raises:
            ToolDown: A tool was down, or too many of its calls were lost.
        """
        from toolformer_dag.evaluation.asking import compared

        self._total = self._count_questions()
        # One model is loaded at a time. It answers a benchmark after another, whose progress `_ask` reports.
        for answers in compared(self._plan.settings, self._ask):
            check_outage(answers.outcomes)  # raises ToolDown
            self.answers.append(answers)
            # none yet of the next benchmark; those in `self.answers` are counted anyway
            self._report_progress(answered=0)

    def _count_questions(self) -> int:
        """Return the number of questions under all conditions of all models."""
        from toolformer_dag.evaluation.asking import list_compared_models

        conditions = sum(len(model.conditions) for model in list_compared_models(self._plan.settings))
        questions = sum(len(benchmark.questions) for benchmark in self._benchmarks)
        return conditions * questions

    @property
    def tokens(self) -> int:
        """The number of tokens that were generated now, not read from a store."""
        return sum(answers.tokens for answers in self.answers)

    @property
    def calls(self) -> int:
        """The number of tool calls that were made now, not read from a store."""
        return sum(answers.calls for answers in self.answers)

    def outcomes(self) -> list[QuestionOutcome]:
        """Return the outcomes of all answers, and of the baselines, which answer without a model."""
        outcomes: list[QuestionOutcome] = []
        for answers in self.answers:
            outcomes += answers.outcomes
        for benchmark in self._benchmarks:
            outcomes += judge_baselines(benchmark)
        return outcomes

    def stores(self) -> list[str]:
        """Return the names of the row stores that hold the generated texts, sorted."""
        return sorted({answers.store for answers in self.answers})

    def left_out(self) -> dict[str, Mapping[str, int]]:
        """Return benchmark -> reason -> number of records without a question, for benchmarks that have such."""
        return {benchmark.name: benchmark.left_out for benchmark in self._benchmarks if benchmark.left_out}

    def _ask(self, model: "LanguageModel", conditions: list[Condition]) -> "Iterator[BenchmarkOutcomes]":
        """Ask a loaded model all benchmarks under each condition, and note its size in `weights`.

        Yields:
            The answers to one benchmark under one condition.
        """
        from toolformer_dag.evaluation.asking import ask_benchmark

        settings = self._plan.settings
        lanes = self._plan.inference_lanes
        for condition in conditions:
            self._note_weights(condition.of_model, model.parameters)
            for benchmark in self._benchmarks:
                yield ask_benchmark(settings, lanes, model, condition, benchmark, self._report_progress)

    def _note_weights(self, model_name: str, parameters: int) -> None:
        """Add the size of a model to `weights`. model_name: as in `Condition`."""
        settings = self._plan.settings
        model_settings = settings.evaluation.models.get(model_name, settings.model)
        self.weights[model_name] = Weights(format_model_name(model_settings.name), parameters)

    def _report_progress(self, answered: int) -> None:
        """Report progress. answered: questions of the benchmark at hand, which is not in `answers` yet."""
        done = sum(len(answers.outcomes) for answers in self.answers)
        self._progress(done + answered, self._total)


def measure_perplexity(plan: Plan, progress: Progress) -> Measurement:
    """Measure and publish the perplexity of all models, with calls disabled, on held-out texts of C (section 4.3).

    C is the corpus of web texts from which the training texts are taken. If the settings name a file of WikiText,
    perplexity is measured on it too.

    Raises:
        MissingPart: A part of a table that is read does not exist.
        DamagedPart: A part of a table that is read is damaged.
        BenchmarkError: The file of WikiText cannot be read.
    """
    # Read before the models: if a checkpoint is replaced meanwhile, the table is out of date.
    versions = read_checkpoint_versions(plan)

    measured_texts = _choose_measured_texts(plan)
    sources = {HELDOUT_C: measured_texts.read(), **_read_wikitext_source(plan)}
    table = _build_perplexity_table(plan, sources, progress)

    inputs = {**versions, MEASURED_ON: measured_texts.fingerprint}
    version = publish(plan.lake, PERPLEXITY, table, build_perplexity_settings(plan), inputs)

    return Measurement(
        version=version,
        rows=table,
        shown=table,
        left_out={},
        tokens=int(table["tokens"].sum()),
        calls=0,
    )


def _read_wikitext_source(plan: Plan) -> dict[str, list[str]]:
    """Return {"WikiText": its texts} if the settings name its file, else {}. Raises BenchmarkError."""
    wikitext_file = plan.settings.evaluation.wikitext
    return {"WikiText": wikitext(wikitext_file)} if wikitext_file else {}


def _build_perplexity_table(plan: Plan, sources: Mapping[str, list[str]], progress: Progress) -> pl.DataFrame:
    """Measure the perplexity of each model on each source of texts. Only one model at a time is in memory.

    Returns:
        A row per model and source, in the columns PERPLEXITY_COLUMNS.
    """
    from toolformer_dag.evaluation.asking import compared, list_compared_models

    measure = partial(_iter_perplexity_rows, sources)
    total = len(list_compared_models(plan.settings)) * len(sources)

    rows: list[dict[str, object]] = []
    for row in compared(plan.settings, measure):
        rows.append(row)
        progress(len(rows), total)
    return pl.DataFrame(rows, schema=PERPLEXITY_COLUMNS)


def _iter_perplexity_rows(
    sources: Mapping[str, list[str]], model: "LanguageModel", conditions: list[Condition]
) -> Iterator[dict[str, object]]:
    """Measure the perplexity of a model on each source of texts.

    Args:
        sources: The texts of each source, by its name.
        conditions: The conditions of the model. Only the first, which is without calls, is used.

    Yields:
        A row per source, in the columns PERPLEXITY_COLUMNS.
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


def read_stored_measurement(lake: Lake, name: str) -> Measurement:
    """Read a stored measurement. Its cost is 0, because nothing is measured now.

    Args:
        name: ACCURACY or PERPLEXITY.

    Raises:
        MissingPart: It was never measured.
        DamagedPart: The stored rows are damaged.
    """
    table = lake.table(name)
    rows = table.read(WHOLE)
    return Measurement(
        version=table.pointer(WHOLE).data_version,
        rows=rows,
        shown=format_accuracy_by_condition(rows) if name == ACCURACY else rows,
        left_out={},
        tokens=0,
        calls=0,
    )


MEASURES: Mapping[str, Callable[[Plan, Progress], Measurement]] = {
    ACCURACY: measure_accuracy,
    PERPLEXITY: measure_perplexity,
}
"""By table, the function that measures it."""
