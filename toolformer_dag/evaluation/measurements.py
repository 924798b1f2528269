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
from toolformer_dag.computing.stage import REJECTIONS_FIELD, encode_rejections
from toolformer_dag.decoding.generation import DECODING_VERSION
from toolformer_dag.evaluation.benchmark import Benchmark
from toolformer_dag.evaluation.benchmark_files import hash_benchmark_files, read_wikitext_articles
from toolformer_dag.evaluation.catalogue import READING_VERSION, build_questions_identity, collect_chosen_benchmarks
from toolformer_dag.evaluation.outcomes import (
    BASELINES_BY_NAME,
    OUTCOME_SCHEMA,
    Condition,
    QuestionOutcome,
    Weights,
    build_outcome_table,
    build_score_table,
    check_tool_outage,
    format_accuracy_by_condition,
    judge_baselines,
)
from toolformer_dag.evaluation.question_overlap import find_question_overlap
from toolformer_dag.files import StorageError
from toolformer_dag.identity import fingerprint
from toolformer_dag.lake.record import STORES_FIELD, build_record, list_record_changes
from toolformer_dag.lake.table import WHOLE_TABLE_PART, Lake
from toolformer_dag.model.weights import format_model_name, get_checkpoint_folder, read_model_identity
from toolformer_dag.pipeline.augmented_corpus import iter_corpus_batches
from toolformer_dag.pipeline.heldout_texts import draw_heldout_documents, draw_heldout_texts, read_document_texts
from toolformer_dag.pipeline.tool_results import collect_result_settings
from toolformer_dag.settings.setting_types import select_determining_settings
from toolformer_dag.synthetic.phenomena import SYNTHETIC_TOOLS, TWO_HOP_KIND
from toolformer_dag.texts.shared_passages import MATCHING_VERSION
from toolformer_dag.tools.routing import build_offer_identity
from toolformer_dag.training.checkpoints import build_checkpoints_by_name
from toolformer_dag.training.training_report import read_training_report

if TYPE_CHECKING:
    from toolformer_dag.evaluation.asking import BenchmarkOutcomes
    from toolformer_dag.model.loading import LanguageModel

ACCURACY_TABLE = "evaluation/accuracy"
"""The table of scores (`build_score_table`)."""
OUTCOMES_TABLE = "evaluation/outcomes"
"""The table of judged answers (`build_outcome_table`)."""
PERPLEXITY_TABLE = "evaluation/perplexity"
"""The table of perplexity, a row per source and condition (PERPLEXITY_COLUMNS)."""
OVERLAP_TABLE = "evaluation/question_overlap"
"""The table of the questions that occur in C*'s training texts (`find_question_overlap`)."""
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
"""Columns of PERPLEXITY_TABLE, described in evaluated_tables.py."""
HELDOUT_SOURCE = "C, held out"
"""The source of perplexity that is drawn from C."""
MEASURED_TEXTS_INPUT = "heldout_texts"
"""The name, in the record of PERPLEXITY_TABLE, of the texts of C that were measured."""
TABLES_BY_MEASUREMENT = {
    ACCURACY_TABLE: (ACCURACY_TABLE, OUTCOMES_TABLE, OVERLAP_TABLE),
    PERPLEXITY_TABLE: (PERPLEXITY_TABLE,),
}
"""The tables of each asset; the asset has the version of the first."""
ProgressCallback = Callable[[int, int], None]
"""Called as (units done, total units)."""


@dataclass(frozen=True, slots=True)
class Measurement:
    """A table that was measured and published, with what the measurement cost.

    Attributes:
        content_version: The version of the content of `rows`.
        rows: The table.
        display_table: The same figures in the form that people read.
        left_out_counts: For each benchmark and reason, the number of records without a question.
        token_count: The number of tokens that were generated or read now. Those that an earlier run had stored do not
            count.
        call_count: The number of calls that were made now.
    """

    content_version: str
    rows: pl.DataFrame
    display_table: pl.DataFrame
    left_out_counts: Mapping[str, Mapping[str, int]]
    token_count: int
    call_count: int


def build_accuracy_settings(plan: Plan) -> dict[str, Any]:
    """Return all settings on which the stored accuracies depend. If one changes, they are measured again.

    Checkpoints are not among them, because they are inputs.

    Raises:
        BenchmarkError: The files of a benchmark cannot be read.
    """
    evaluation = plan.settings.evaluation
    dtype_by_column = {column: str(dtype) for column, dtype in OUTCOME_SCHEMA.items()}
    return {
        "columns": fingerprint(dtype_by_column),
        "questions": build_questions_identity(evaluation),
        "baselines": list(BASELINES_BY_NAME),
        "decoding_k": sorted(set(evaluation.decoding_k)),
        "models": _read_model_identities(plan),  # those of [evaluation.models], which are compared
        "overlap": MATCHING_VERSION,  # of the rule that finds questions in the training texts
        "model": dict(plan.model_identity),  # the base model
        **_build_decoding_identity(plan),
    }


def _build_decoding_identity(plan: Plan) -> dict[str, Any]:
    """Return the settings of decoding and of the tools that a model may call, for the record of the accuracies.

    If one of them changes, the accuracies are measured again. A setting that a later release added is left out while
    its value leaves everything as it was before, so that records of earlier releases still match.

    Returns:
        Such as {"decoding": {"k": 10, ...}, "max_call_tokens": 64, "lanes": {the key of a tool: its settings}}. The
        keys "min_probability" and "offered" are there only if a tool has such a limit, and if not all tools are offered
        to the model.
    """
    # min_probability is left out here, because it is added by tool below.
    decoding_settings = select_determining_settings(plan.settings.decoding, excluded_keys=("min_probability",))

    # tool -> least probability of ` [`; empty if no setting has it
    start_thresholds = map_tool_to_start_threshold(plan.lanes)
    threshold_settings = {"min_probability": start_thresholds} if start_thresholds else {}

    tools = [lane.tool for lane in plan.inference_lanes]
    result_settings_by_tool = {lane.tool.key: collect_result_settings(lane) for lane in plan.inference_lanes}
    return {
        "decoding": {**decoding_settings, "version": DECODING_VERSION},
        **build_offer_identity(tools, plan.settings.decoding.tools),
        **threshold_settings,
        "max_call_tokens": plan.settings.sampling.max_call_tokens,
        "lanes": result_settings_by_tool,
    }


def build_perplexity_settings(plan: Plan) -> dict[str, Any]:
    """Return all settings on which the stored perplexities depend. If one changes, they are measured again.

    Checkpoints and held-out texts are not among them, because they are inputs.

    Raises:
        BenchmarkError: The file of WikiText cannot be read.
    """
    evaluation = plan.settings.evaluation
    identity_without_wikitext = {
        "columns": list(PERPLEXITY_COLUMNS),
        "models": _read_model_identities(plan),
        "texts": evaluation.perplexity_texts,
        **select_determining_settings(evaluation, "perplexity_on"),  # {} at the default, which older records lack
        "model": dict(plan.model_identity),
    }

    wikitext_identity = None
    if evaluation.wikitext:
        wikitext_identity = [hash_benchmark_files(evaluation.wikitext), READING_VERSION]
    return {**identity_without_wikitext, "wikitext": wikitext_identity}


def _read_model_identities(plan: Plan) -> dict[str, Any]:
    """Return for each model of [evaluation.models] what determines its answers, by the name it has there.

    Raises:
        ModelError: A model cannot be found.
    """
    identity_by_name = {}
    for name, model in plan.settings.evaluation.models.items():
        weights_identity = read_model_identity(model.name, model.revision)
        identity_by_name[name] = {**weights_identity, "tools": model.tools}
    return identity_by_name


SETTINGS_BUILDERS: Mapping[str, Callable[[Plan], dict[str, Any]]] = {
    ACCURACY_TABLE: build_accuracy_settings,
    PERPLEXITY_TABLE: build_perplexity_settings,
}
"""Table -> the function that returns all settings that its rows depend on."""


def read_checkpoint_versions(plan: Plan) -> dict[str, str]:
    """Return the fingerprint of each checkpoint that exists, by its name. It tells one training run from another."""
    fingerprint_by_checkpoint = {}
    for checkpoint_name in build_checkpoints_by_name(plan.settings):
        report = read_training_report(get_checkpoint_folder(plan.settings, checkpoint_name))
        if report:
            fingerprint_by_checkpoint[checkpoint_name] = report.fingerprint
    return fingerprint_by_checkpoint


def list_outdated_reasons(plan: Plan, measurement_name: str) -> list[str]:
    """List the reasons why a measurement is missing or out of date.

    Args:
        measurement_name: ACCURACY_TABLE or PERPLEXITY_TABLE.

    Returns:
        A sentence per reason. The list is empty if the measurement is up to date.
    """
    for table_name in TABLES_BY_MEASUREMENT[measurement_name]:
        damage = _find_damage(plan.lake, table_name)
        if damage is not None:
            return [damage]

    stored_record = plan.lake.get_table(measurement_name).read_record(WHOLE_TABLE_PART)
    current_record = _build_current_record(plan, measurement_name)
    return [str(change) for change in list_record_changes(stored_record, current_record)]


def _find_damage(lake: Lake, table_name: str) -> str | None:
    """Describe what is missing or damaged of a table.

    Returns:
        "never made", or a description of the damage. None if the table is whole.
    """
    table = lake.get_table(table_name)
    if not table.has_part(WHOLE_TABLE_PART):
        return "never made"

    try:
        table.list_part_files(WHOLE_TABLE_PART)
    except StorageError as error:
        reason, _, _remedy = str(error).partition(";")  # "what is damaged; what to do"
        return reason
    return None


def _build_current_record(plan: Plan, measurement_name: str) -> dict[str, Any]:
    """Return the record that a measurement would have with the present settings, checkpoints and texts."""
    inputs = {**read_checkpoint_versions(plan), **_read_texts_version(plan, measurement_name)}
    settings = SETTINGS_BUILDERS[measurement_name](plan)
    record = build_record(settings, inputs)

    # As it would be read from a file, with lists in place of tuples, so that it can be compared with the stored one.
    record_as_read: dict[str, Any] = json.loads(json.dumps(record))
    return record_as_read


def _read_texts_version(plan: Plan, measurement_name: str) -> dict[str, str]:
    """Return the fingerprint of the texts that a measurement would read now.

    It becomes an input in the record of the measurement, which says what it was made from. If the texts have changed
    since, the measurement is out of date.

    Returns:
        {"heldout_texts": the fingerprint} for PERPLEXITY_TABLE. Empty for ACCURACY_TABLE, which reads no texts.
    """
    if measurement_name != PERPLEXITY_TABLE:
        return {}

    try:
        return {MEASURED_TEXTS_INPUT: _choose_measured_texts(plan).fingerprint}
    except StorageError:
        # The damage is reported elsewhere. It must not count as a change of the texts, so the fingerprint stays.
        return _read_recorded_texts_version(plan)


def _read_recorded_texts_version(plan: Plan) -> dict[str, str]:
    """Return the fingerprint of the texts in the record of PERPLEXITY_TABLE, as {"heldout_texts": the fingerprint}.

    It is empty if the record has none.
    """
    inputs = plan.lake.get_table(PERPLEXITY_TABLE).read_record(WHOLE_TABLE_PART)["inputs"]
    if MEASURED_TEXTS_INPUT not in inputs:
        return {}
    return {MEASURED_TEXTS_INPUT: inputs[MEASURED_TEXTS_INPUT]}


class _MeasuredTexts(NamedTuple):
    """The texts of C that perplexity is measured on.

    Attributes:
        fingerprint: The fingerprint of all texts.
        read_texts: Returns the texts. It raises MissingPart or DamagedPart if a table cannot be read.
    """

    fingerprint: str
    read_texts: Callable[[], list[str]]


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
            read_texts=lambda: read_document_texts(plan, documents),
        )

    texts = draw_heldout_texts(plan).measuring_texts
    return _MeasuredTexts(fingerprint=fingerprint(texts), read_texts=lambda: texts)


def publish_measurement(
    lake: Lake,
    table_name: str,
    rows: pl.DataFrame,
    settings: Mapping[str, object],
    inputs: Mapping[str, str],
    stores: Sequence[str] = (),
    left_out: Mapping[str, Mapping[str, int]] = MappingProxyType({}),
) -> str:
    """Replace a table of measurements by new rows.

    The settings and inputs are recorded with the table, to tell later whether it is out of date.

    Args:
        table_name: The name of the table, such as "evaluation/accuracy".
        settings: All settings on which the rows depend.
        inputs: The fingerprints of the checkpoints and texts, by name.
        stores: The names of the row stores of generated texts. `clean` keeps them as long as the table exists.
        left_out: For each benchmark and reason, the number of records without a question.

    Returns:
        The version of the table's content.

    Raises:
        WriteError: The rows cannot be written.
    """
    _, _, stage_name = table_name.rpartition("/")  # "accuracy" of "evaluation/accuracy"
    further_fields = {
        "stage": stage_name,
        "tool": None,
        STORES_FIELD: list(stores),
        REJECTIONS_FIELD: encode_rejections(_flatten_counts(left_out)),
    }
    table_record = build_record(settings, inputs, **further_fields)

    # A table takes its record from a function: in other stages it is only known once all rows are written.
    published_part = lake.get_table(table_name).publish(WHOLE_TABLE_PART, [rows], lambda: table_record)
    return published_part.data_version


def _flatten_counts(left_out_counts: Mapping[str, Mapping[str, int]]) -> Counter[tuple[str, str]]:
    """Return nested counts under pairs: {"SVAMP": {"no_answer": 2}} becomes {("SVAMP", "no_answer"): 2}."""
    count_by_benchmark_and_reason: Counter[tuple[str, str]] = Counter()
    for benchmark_name, count_by_reason in left_out_counts.items():
        for reason, count in count_by_reason.items():
            count_by_benchmark_and_reason[benchmark_name, reason] = count
    return count_by_benchmark_and_reason


def read_accuracy_by_condition(lake: Lake) -> pl.DataFrame:
    """Return the measured accuracies for people, with a row per benchmark and a column per condition.

    Raises:
        MissingPart: Nothing was measured.
        DamagedPart: The stored rows are damaged.
    """
    scores = lake.get_table(ACCURACY_TABLE).read_part(WHOLE_TABLE_PART)
    return format_accuracy_by_condition(scores)


class CheckpointTables(NamedTuple):
    """The tables that were measured on a checkpoint.

    Attributes:
        accuracy: The accuracies, as `format_accuracy_by_condition` returns them. None if they were not measured.
        perplexity: The perplexities, with PERPLEXITY_COLUMNS. None if they were not measured.
    """

    accuracy: pl.DataFrame | None
    perplexity: pl.DataFrame | None


def read_checkpoint_tables(plan: Plan, checkpoint_name: str) -> CheckpointTables:
    """Return the tables that were measured on the present version of a checkpoint.

    If the checkpoint does not exist, they are the tables that were measured without it.

    Args:
        checkpoint_name: The name of the checkpoint's asset, such as "finetuned_checkpoint".

    Raises:
        DamagedPart: The stored rows are damaged.
    """
    version = read_checkpoint_versions(plan).get(checkpoint_name)  # None if it does not exist

    accuracy = None
    scores = _read_table_of_version(plan.lake, ACCURACY_TABLE, checkpoint_name, version)
    if scores is not None:
        accuracy = format_accuracy_by_condition(scores)

    perplexity = _read_table_of_version(plan.lake, PERPLEXITY_TABLE, checkpoint_name, version)
    return CheckpointTables(accuracy, perplexity)


def _read_table_of_version(
    lake: Lake, table_name: str, checkpoint_name: str, version: str | None
) -> pl.DataFrame | None:
    """Return the rows of a table, or None if it is missing or was measured on another version of the checkpoint.

    Args:
        checkpoint_name: The name of the checkpoint among the inputs in the table's record.
        version: The fingerprint of the checkpoint. None if there is no checkpoint: then the table has to be measured
            without it.
    """
    table = lake.get_table(table_name)
    # The pointer has the record of the stored rows, which says what they were made from.
    pointer = table.find_checked_pointer(WHOLE_TABLE_PART)
    if pointer is None:
        return None

    measured_version = pointer.record["inputs"].get(checkpoint_name)
    if measured_version != version:
        return None
    return table.read_part(WHOLE_TABLE_PART)


def measure_accuracy(plan: Plan, progress_callback: ProgressCallback) -> Measurement:
    """Let all models answer all benchmarks, with and without calls, and publish the accuracies.

    The judged answers are published too, and which questions occur in the training texts.

    Raises:
        ToolDown: A tool was down, or too many of its calls were lost.
        BenchmarkError: A benchmark cannot be read.
    """
    benchmarks = collect_chosen_benchmarks(plan.settings.evaluation, _list_synthetic_kinds(plan))

    # Read before the models: if a checkpoint is replaced meanwhile, the tables are out of date.
    checkpoint_versions = read_checkpoint_versions(plan)
    questioning = _Questioning(plan, benchmarks, progress_callback)
    questioning.ask_all_models()  # keeps their answers in `questioning`

    outcomes = build_outcome_table(questioning.collect_outcomes())
    scores = build_score_table(outcomes, questioning.weights_by_model)

    publish_table = partial(
        publish_measurement, plan.lake, settings=build_accuracy_settings(plan), inputs=checkpoint_versions
    )
    publish_table(
        OUTCOMES_TABLE, outcomes, stores=questioning.list_store_names(), left_out=questioning.collect_left_out_counts()
    )
    question_overlap = find_question_overlap(benchmarks, iter_corpus_batches(plan.lake))  # paper, section 4.2
    publish_table(OVERLAP_TABLE, question_overlap)

    # Published last, because the asset with all three tables has the version of this one.
    content_version = publish_table(ACCURACY_TABLE, scores)
    return _build_accuracy_measurement(content_version, scores, questioning)


def _build_accuracy_measurement(content_version: str, scores: pl.DataFrame, questioning: "_Questioning") -> Measurement:
    """Return the accuracies, which were just published, with what it cost now to get the models' answers.

    Args:
        content_version: The version under which `scores` were published.
        scores: The accuracy of each model on each benchmark.
        questioning: Has counted the tokens and calls, and the records without a question.
    """
    return Measurement(
        content_version=content_version,
        rows=scores,
        display_table=format_accuracy_by_condition(scores),
        left_out_counts=questioning.collect_left_out_counts(),
        token_count=questioning.token_count,
        call_count=questioning.call_count,
    )


def _list_synthetic_kinds(plan: Plan) -> list[str]:
    """List the kinds of synthetic questions that the models answer, such as ["calculator", "calendar"].

    They are the tools in the settings for which there are synthetic questions. TWO_HOP_KIND (questions that take two
    calls) is added if the question answering tool may be called in chains.
    """
    question_kinds = []
    can_chain_questions = False
    for lane in plan.lanes:
        if lane.tool.key in SYNTHETIC_TOOLS:
            question_kinds.append(lane.tool.key)
        if lane.tool.key == "question_answering" and lane.max_chain_calls > 1:
            can_chain_questions = True

    if can_chain_questions:
        question_kinds.append(TWO_HOP_KIND)
    return question_kinds


class _Questioning:
    """Asks every compared model all benchmarks, and keeps the answers.

    Both attributes are empty at first, and complete once `ask_all_models` has returned.

    Attributes:
        benchmark_outcomes: The answers to each benchmark under each condition.
        weights_by_model: The underlying model and its size, by the model's name in `Condition`.
    """

    def __init__(self, plan: Plan, benchmarks: Sequence[Benchmark], progress_callback: ProgressCallback) -> None:
        self.benchmark_outcomes: list[BenchmarkOutcomes] = []
        self.weights_by_model: dict[str, Weights] = {}
        self._plan = plan
        self._benchmarks = benchmarks
        self._progress_callback = progress_callback
        self._total_questions = 0  # questions under all conditions

    def ask_all_models(self) -> None:
        """Let every model answer every benchmark under each of its conditions, and keep the answers.

        Raises:
            ToolDown: A tool was down, or too many of its calls were lost.
        """
        from toolformer_dag.evaluation.asking import iter_model_results

        self._total_questions = self._count_questions()
        # One model is loaded at a time. It answers one benchmark after another, and `_ask_model` reports the progress.
        for answers in iter_model_results(self._plan.settings, self._ask_model):
            check_tool_outage(answers.outcomes)  # raises ToolDown
            self.benchmark_outcomes.append(answers)
            # `_report_progress` itself adds the answers in `benchmark_outcomes` to those of the benchmark in progress.
            self._report_progress(answered_count=0)

    def _count_questions(self) -> int:
        """Return how many questions are asked in all, since every condition of a model is asked all questions."""
        from toolformer_dag.evaluation.asking import list_compared_models

        condition_count = sum(len(model.conditions) for model in list_compared_models(self._plan.settings))
        question_count = sum(len(benchmark.questions) for benchmark in self._benchmarks)
        return condition_count * question_count

    @property
    def token_count(self) -> int:
        """The number of tokens that were generated now, not read from a store."""
        return sum(answers.new_token_count for answers in self.benchmark_outcomes)

    @property
    def call_count(self) -> int:
        """The number of tool calls that were made now, not read from a store."""
        return sum(answers.new_call_count for answers in self.benchmark_outcomes)

    def collect_outcomes(self) -> list[QuestionOutcome]:
        """Return the outcomes of all models, and those of the baselines, which answer without a model."""
        outcomes: list[QuestionOutcome] = []
        for answers in self.benchmark_outcomes:
            outcomes += answers.outcomes
        for benchmark in self._benchmarks:
            outcomes += judge_baselines(benchmark)
        return outcomes

    def list_store_names(self) -> list[str]:
        """Return the names of the row stores that hold the generated texts, sorted."""
        return sorted({answers.store_name for answers in self.benchmark_outcomes})

    def collect_left_out_counts(self) -> dict[str, Mapping[str, int]]:
        """Return how many records have no question, by benchmark and reason: {"SVAMP": {"no_answer": 2}}.

        Benchmarks without such records are missing.
        """
        counts_by_benchmark = {}
        for benchmark in self._benchmarks:
            if benchmark.left_out_counts:
                counts_by_benchmark[benchmark.name] = benchmark.left_out_counts
        return counts_by_benchmark

    def _ask_model(self, language_model: "LanguageModel", conditions: list[Condition]) -> "Iterator[BenchmarkOutcomes]":
        """Ask a loaded model all benchmarks under each condition, and record its size in `weights_by_model`.

        Yields:
            The answers to one benchmark under one condition.
        """
        from toolformer_dag.evaluation.asking import ask_benchmark

        settings = self._plan.settings
        lanes = self._plan.inference_lanes
        for condition in conditions:
            self._record_weights(condition.model_name, language_model.parameter_count)
            for benchmark in self._benchmarks:
                yield ask_benchmark(settings, lanes, language_model, condition, benchmark, self._report_progress)

    def _record_weights(self, model_name: str, parameter_count: int) -> None:
        """Record in `weights_by_model` the number of a model's weights, and from which model they come.

        That is the model of [evaluation.models] with this name. Any other name, such as "base", belongs to the
        settings' base model or to a model that was finetuned from it.

        Args:
            model_name: The name of the model in the tables (`Condition.model_name`).
            parameter_count: The number of its weights.
        """
        settings = self._plan.settings
        model_settings = settings.evaluation.models.get(model_name, settings.model)
        underlying_name = format_model_name(model_settings.name)
        self.weights_by_model[model_name] = Weights(underlying_name, parameter_count)

    def _report_progress(self, answered_count: int) -> None:
        """Report how many questions are answered.

        Args:
            answered_count: The number of answered questions of the present benchmark, whose answers are not kept yet.
        """
        kept_count = sum(len(answers.outcomes) for answers in self.benchmark_outcomes)
        self._progress_callback(kept_count + answered_count, self._total_questions)


def measure_perplexity(plan: Plan, progress_callback: ProgressCallback) -> Measurement:
    """Measure and publish the perplexity of all models, with calls disabled, on held-out texts of C (section 4.3).

    C is the corpus of web texts from which the training texts are taken. If the settings name a file of WikiText,
    perplexity is measured on it too.

    Raises:
        MissingPart: A part of a table that is read does not exist.
        DamagedPart: A part of a table that is read is damaged.
        BenchmarkError: The file of WikiText cannot be read.
    """
    # Read before the models: if a checkpoint is replaced meanwhile, the table is out of date.
    checkpoint_versions = read_checkpoint_versions(plan)

    measured_texts = _choose_measured_texts(plan)
    texts_by_source = {HELDOUT_SOURCE: measured_texts.read_texts(), **_read_wikitext_source(plan)}
    perplexities = _build_perplexity_table(plan, texts_by_source, progress_callback)

    settings = build_perplexity_settings(plan)
    inputs = {**checkpoint_versions, MEASURED_TEXTS_INPUT: measured_texts.fingerprint}
    content_version = publish_measurement(plan.lake, PERPLEXITY_TABLE, perplexities, settings, inputs)

    return Measurement(
        content_version=content_version,
        rows=perplexities,
        display_table=perplexities,
        left_out_counts={},
        token_count=int(perplexities["tokens"].sum()),
        call_count=0,
    )


def _read_wikitext_source(plan: Plan) -> dict[str, list[str]]:
    """Return {"WikiText": its articles} if the settings name its file, otherwise an empty dictionary.

    Raises:
        BenchmarkError: The file cannot be read, or holds no text.
    """
    wikitext_file = plan.settings.evaluation.wikitext
    if not wikitext_file:
        return {}
    return {"WikiText": read_wikitext_articles(wikitext_file)}


def _build_perplexity_table(
    plan: Plan, texts_by_source: Mapping[str, list[str]], progress_callback: ProgressCallback
) -> pl.DataFrame:
    """Measure the perplexity of each model on each source of texts. Only one model at a time is in memory.

    Returns:
        A row per model and source, in the columns PERPLEXITY_COLUMNS.
    """
    from toolformer_dag.evaluation.asking import iter_model_results, list_compared_models

    measure_model = partial(_iter_perplexity_rows, texts_by_source)
    total_row_count = len(list_compared_models(plan.settings)) * len(texts_by_source)

    rows: list[dict[str, object]] = []
    for row in iter_model_results(plan.settings, measure_model):
        rows.append(row)
        progress_callback(len(rows), total_row_count)
    return pl.DataFrame(rows, schema=PERPLEXITY_COLUMNS)


def _iter_perplexity_rows(
    texts_by_source: Mapping[str, list[str]], language_model: "LanguageModel", conditions: list[Condition]
) -> Iterator[dict[str, object]]:
    """Measure the perplexity of a model on each source of texts.

    Args:
        texts_by_source: The texts of each source, by its name.
        conditions: The conditions of the model. Only the first, which is without calls, is used.

    Yields:
        A row per source, in the columns PERPLEXITY_COLUMNS.
    """
    from toolformer_dag.evaluation.language_modeling import compute_perplexity

    condition_without_calls = conditions[0]
    for source, texts in texts_by_source.items():
        result = compute_perplexity(language_model, texts)
        low, high = result.confidence_interval
        yield {
            "source": source,
            "condition": condition_without_calls.name,
            "texts": len(texts),
            "tokens": result.token_count,
            "perplexity": result.perplexity,
            "low": low,
            "high": high,
            "bits_per_byte": result.bits_per_byte,
            "model": condition_without_calls.model_name,
        }


def read_stored_measurement(lake: Lake, measurement_name: str) -> Measurement:
    """Read a stored measurement. Its cost is 0, because nothing is measured now.

    Args:
        measurement_name: ACCURACY_TABLE or PERPLEXITY_TABLE.

    Raises:
        MissingPart: It was never measured.
        DamagedPart: The stored rows are damaged.
    """
    table = lake.get_table(measurement_name)
    rows = table.read_part(WHOLE_TABLE_PART)

    display_table = rows
    if measurement_name == ACCURACY_TABLE:
        display_table = format_accuracy_by_condition(rows)

    return Measurement(
        content_version=table.read_pointer(WHOLE_TABLE_PART).data_version,
        rows=rows,
        display_table=display_table,
        left_out_counts={},
        token_count=0,
        call_count=0,
    )


MEASURE_FUNCTIONS: Mapping[str, Callable[[Plan, ProgressCallback], Measurement]] = {
    ACCURACY_TABLE: measure_accuracy,
    PERPLEXITY_TABLE: measure_perplexity,
}
"""By table, the function that measures it."""
