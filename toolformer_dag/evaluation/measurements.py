"""The tables of evaluation: their settings, their measurement, and why they are out of date.

Imports torch only to measure.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import polars as pl

from toolformer_dag.decoding.generation import DECODING
from toolformer_dag.evaluation.accuracy_tables import accuracy_by_condition, outcome_table, score_table
from toolformer_dag.evaluation.benchmark import Benchmark
from toolformer_dag.evaluation.benchmark_files import content, wikitext
from toolformer_dag.evaluation.catalogue import READING, chosen_benchmarks, chosen_identity
from toolformer_dag.evaluation.scores import Condition, check_outage, score
from toolformer_dag.files import StorageError
from toolformer_dag.lake.record import STORES, changes, record
from toolformer_dag.lake.table import WHOLE, Lake
from toolformer_dag.pipeline.augmented_corpus import NAME as CORPUS
from toolformer_dag.pipeline.merging import HELDOUT, heldout_texts
from toolformer_dag.pipeline.plan import Plan
from toolformer_dag.pipeline.tool_results import result_settings
from toolformer_dag.synthetic.phenomena import TOOLS
from toolformer_dag.training.checkpoint_outputs import CHECKPOINTS
from toolformer_dag.training.training_report import checkpoint_folder, read_report

if TYPE_CHECKING:
    from toolformer_dag.evaluation.asking import AskedBenchmark
    from toolformer_dag.model.loading import LanguageModel

ACCURACY, OUTCOMES, PERPLEXITY = "evaluation/accuracy", "evaluation/outcomes", "evaluation/perplexity"
"""Tables: scores (`score_table`), outcomes (`outcome_table`), and perplexity per source and condition."""
PERPLEXITY_COLUMNS = {
    "source": pl.String,
    "condition": pl.String,
    "texts": pl.Int64,
    "perplexity": pl.Float64,
    "bits_per_byte": pl.Float64,
}
TABLES = {ACCURACY: (ACCURACY, OUTCOMES), PERPLEXITY: (PERPLEXITY,)}
"""The tables of each asset; the asset has the version of the first."""


def accuracy_settings(plan: Plan) -> dict[str, Any]:
    """Return what determines the answers besides the checkpoints. Raises BenchmarkError."""
    return {
        "questions": chosen_identity(plan.settings.evaluation),
        "decoding": {**plan.settings.decoding.model_dump(), "version": DECODING},
        "max_call_tokens": plan.sampling.max_call_tokens,
        "model": dict(plan.model),
        "lanes": {lane.key: result_settings(lane) for lane in plan.lanes},
    }


def perplexity_settings(plan: Plan) -> dict[str, Any]:
    """Return what determines the perplexities besides the checkpoints and C. Raises BenchmarkError."""
    file = plan.settings.evaluation.wikitext
    return {
        "chosen_on": plan.settings.training.heldout_texts,
        "model": dict(plan.model),
        "wikitext": [content(file), READING] if file else None,
    }


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
    now = record(SETTINGS[name](plan), checkpoint_versions(plan))
    return [str(change) for change in changes(plan.lake.table(name).record(WHOLE), _plain(now))]


def publish(
    lake: Lake,
    table: str,
    rows: pl.DataFrame,
    settings: Mapping[str, object],
    checkpoints: Mapping[str, str],
    stores: Sequence[str] = (),
) -> str:
    """Replace a table of measurements; return the version of its content. Raises WriteError.

    `checkpoints`: the fingerprints of the measured checkpoints, by name. `stores`: the names of the row stores behind
    the table, which `clean` then keeps.
    """
    written = record(settings, checkpoints, **{STORES: list(stores)})
    return lake.table(table).publish(WHOLE, [rows], lambda: written).data_version


def read_accuracy(lake: Path) -> pl.DataFrame:
    """Return a row per benchmark and a column per condition. Raises MissingPart where nothing was measured."""
    return accuracy_by_condition(Lake(lake).table(ACCURACY).read(WHOLE))


def measure_accuracy(plan: Plan, progress: Callable[[int, int], None]) -> tuple[str, pl.DataFrame, list[Benchmark]]:
    """Ask all questions under four conditions and publish outcomes and scores (paper, section 4.2).

    Returns the version of the scores, the scores, and the benchmarks. Raises ToolDown where a tool was down.
    """
    benchmarks = chosen_benchmarks(plan.settings.evaluation, [lane.key for lane in plan.lanes if lane.key in TOOLS])
    versions = checkpoint_versions(plan)  # first: replacing a checkpoint meanwhile makes the table stale
    groups = _ask(plan, benchmarks, progress)
    table = score_table([score(group.outcomes) for group in groups])
    outcomes = outcome_table([outcome for group in groups for outcome in group.outcomes])
    settings, stores = accuracy_settings(plan), sorted({group.store for group in groups})
    publish(plan.lake, OUTCOMES, outcomes, settings, versions, stores)
    return publish(plan.lake, ACCURACY, table, settings, versions), table, benchmarks


def _ask(plan: Plan, benchmarks: Sequence[Benchmark], progress: Callable[[int, int], None]) -> "list[AskedBenchmark]":
    from toolformer_dag.evaluation.asking import benchmark_outcomes, compared

    def ask(model: "LanguageModel", conditions: list[Condition]) -> "Iterator[AskedBenchmark]":
        for condition in conditions:
            for benchmark in benchmarks:
                yield benchmark_outcomes(plan.settings, plan.lanes, model, condition, benchmark)

    groups: list[AskedBenchmark] = []
    for group in compared(plan.settings, ask):
        check_outage(group.outcomes)
        groups.append(group)
        progress(len(groups), 4 * len(benchmarks))
    return groups


def measure_perplexity(plan: Plan) -> tuple[str, pl.DataFrame]:
    """Publish the perplexity, with calls disabled, of held-out texts of C and WikiText (paper, section 4.3).

    Returns the version of the table and the table. WikiText is measured where the settings name its file.
    """
    from toolformer_dag.evaluation.asking import compared
    from toolformer_dag.evaluation.language_modeling import perplexity

    versions = checkpoint_versions(plan)  # first: replacing a checkpoint meanwhile makes the table stale
    corpus = plan.lake.table(CORPUS).read(WHOLE).filter(pl.col("split") == HELDOUT)["text"].to_list()
    file = plan.settings.evaluation.wikitext
    sources = {"C, held out": heldout_texts(corpus, plan.settings.training.heldout_texts).measuring}
    sources |= {"WikiText": wikitext(file)} if file else {}

    def rows(model: "LanguageModel", conditions: list[Condition]) -> Iterator[tuple[str, str, int, float, float]]:
        for source, texts in sources.items():
            found = perplexity(model, texts)
            yield source, conditions[0].name, len(texts), found.perplexity, found.bits_per_byte

    table = pl.DataFrame(list(compared(plan.settings, rows)), schema=PERPLEXITY_COLUMNS, orient="row")
    return publish(plan.lake, PERPLEXITY, table, perplexity_settings(plan), versions), table


def _plain(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """Convert values to the form that JSON returns."""
    return dict(json.loads(json.dumps(values)))
