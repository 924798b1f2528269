"""The card of a checkpoint: README.md beside its weights, with the hub's YAML header."""

from collections.abc import Mapping
from pathlib import Path
from string import Template
from typing import Any, NamedTuple

import polars as pl

from toolformer_dag.computing.plan import Lane, Plan
from toolformer_dag.exports.dataset_folder import CITATION, TOOL_TITLES, lane_cells
from toolformer_dag.files import unsealed
from toolformer_dag.identity import fingerprint
from toolformer_dag.lake.queries import sql_text
from toolformer_dag.markdown import rounded, table
from toolformer_dag.model.weights import checkpoint_folder, folder_name
from toolformer_dag.pipeline.augmented_corpus import NAME as CORPUS
from toolformer_dag.pipeline.augmented_corpus import corpus_rows
from toolformer_dag.pipeline.heldout_texts import too_few
from toolformer_dag.pipeline.merging import TRAIN
from toolformer_dag.settings.evaluation_settings import DecodingSettings
from toolformer_dag.texts.calls import placed_calls
from toolformer_dag.training.checkpoint_outputs import CHECKPOINTS, Checkpoint
from toolformer_dag.training.training_report import RECORD, TrainingReport, read_card, write_card

CARD_TEXT = Template(sql_text(__package__, "model_card.md"))
"""The card between its header and the figures of evaluation."""
EVALUATION = "\n## Evaluation\n"
"""The heading of the last part of a card."""
NO_FIGURES = "Only what stands under Figures and Evaluation was measured; safety, bias and other languages were not."
"""The last of the limits."""


def add_evaluation(folder: Path, accuracy: pl.DataFrame | None, perplexity: pl.DataFrame | None) -> None:
    """Replace the last part of a card, the figures of evaluation; a folder without a whole card is left alone.

    accuracy: a row per benchmark; None where nothing was measured.
    perplexity: a row per source and condition; None where nothing was measured.

    Raises WriteError.
    """
    card = read_card(folder)
    if card is None:
        return
    sections = []
    if accuracy is not None:
        sections.append(_section("Right answers in per cent, with 95 % intervals (Wilson).", accuracy))
    if perplexity is not None:
        sections.append(_section("Perplexity, calls disabled.", perplexity))
    text = card.partition(EVALUATION)[0]
    if sections:
        text += EVALUATION + "\n" + "\n".join(sections)
    write_card(folder, text)


def _section(title: str, rows: pl.DataFrame) -> str:
    return f"{title}\n\n{table(rows.columns, rows.iter_rows(), rounded)}"


def write_model_card(plan: Plan, name: str, report: TrainingReport, choosing: int) -> None:
    """Write the card (README.md) of a trained checkpoint into its folder, without figures of evaluation.

    - name: the checkpoint's name in CHECKPOINTS.
    - report: what the finetuning measured.
    - choosing: how many held-out texts the step of the checkpoint was chosen by.

    Raises MissingPart, DamagedPart, WriteError.
    """
    from toolformer_dag.training.recipe import objective_of

    folder = checkpoint_folder(plan.settings, name)
    checkpoint = CHECKPOINTS[name]
    card_words = checkpoint.card
    markers = {field: marker.rstrip() for field, marker in plan.settings.model.markers}
    record = unsealed((folder / RECORD).read_bytes())  # the settings and data that the checkpoint was trained with
    license = plan.settings.export.model_license
    text = CARD_TEXT.substitute(
        title=f"{folder_name(plan.settings.model.name)} {card_words.title}",
        about=card_words.about.format(**markers),
        use=card_words.use,
        data=_data(plan, record, report),
        tools=table((*TOOL_TITLES, "training texts"), _tools(plan)),
        objective=objective_of(checkpoint.recipe(plan)).described,
        settings=_settings_table(record["settings"]),
        figures=table(("figure", "value"), _figures(record, report)),
        metric=report.best.measure,
        choosing=choosing,
        curve=_curve_table(report),
        limits="\n".join(f"- {limit}" for limit in _limits(plan, checkpoint, choosing)),
        license=license,
        citation=CITATION.strip(),
    )
    write_card(folder, _header(plan, license) + text)


def _settings_table(settings: Mapping[str, Any]) -> str:
    """Return the settings of training as a table."""
    lines = []
    for key, value in settings.items():
        lines.append((f"`training.{key}`", "not set" if value is None else value))
    return table(("setting", "value"), lines)


def _curve_table(report: TrainingReport) -> str:
    """Return the curve of the held-out metric as a table."""
    lines = [(point.step, f"{point.value:.3f}") for point in report.heldout]
    return table(("step", f"held-out {report.best.measure}"), lines)


def _limits(plan: Plan, checkpoint: Checkpoint, choosing: int) -> list[str]:
    """Return the limits of a checkpoint, a sentence each. choosing: how many held-out texts its step was chosen by."""
    limits = call_limits(plan) if checkpoint.calls else []
    limits += [*checkpoint.card.limits, NO_FIGURES]
    warning = too_few(choosing, "choose the checkpoint")
    if warning:
        limits.append(f"{warning}.")
    return limits


class TextsOfCalls(NamedTuple):
    """Counts of the training texts of C*: with more than one call (`several`), and of these with a chain (`chained`).

    A chain is calls that follow each other at one place.
    """

    several: int
    chained: int


def call_limits(plan: Plan) -> list[str]:
    """Return how many calls a text may hold, as the model was trained and as it decodes, in two sentences.

    C* decides the first, `[decoding]` as it is now the second. Raises MissingPart, DamagedPart.
    """
    return [_limit_of_training(texts_of_calls(plan)), _limit_of_decoding(plan.settings.decoding)]


def _limit_of_training(texts: TextsOfCalls) -> str:
    if not texts.several:
        return "No training text holds more than one call."
    return (
        f"{texts.several:,} training texts hold more than one call, "
        f"{texts.chained:,} of them a chain: calls that follow each other at one place."
    )


def _limit_of_decoding(rules: DecodingSettings) -> str:
    places = "one call" if rules.calls == 1 else f"up to {rules.calls} calls"
    if rules.depth == 1:
        chains = "no chained calls, and no second look at results"
    else:
        chains = f"chains of up to {rules.depth} calls"
    is_papers = rules.calls == 1 and rules.depth == 1
    compared = ", as in the paper" if is_papers else "; the paper has one call and no chain"
    return f"An answer has {places}, {chains}{compared} (`decoding.calls`, `decoding.depth`)."


def texts_of_calls(plan: Plan) -> TextsOfCalls:
    """Count the training texts with several calls, and those with a chain (several calls before one character).

    The texts are those of C*, the corpus with the tool calls that the filter kept. Raises MissingPart, DamagedPart.
    """
    corpus = corpus_rows(plan.lake, ["text_with_calls", "calls", "split"])
    texts = corpus.filter(pl.col("split") == TRAIN, pl.col("calls") > 1).collect()["text_with_calls"]
    tools = plan.lane_names.values()
    chained = 0
    for text in texts:
        offsets = [call.offset for call in placed_calls(text, tools, plan.settings.model.markers)]
        has_chain = len(set(offsets)) < len(offsets)  # the calls of a chain stand before the same character
        chained += has_chain
    return TextsOfCalls(several=texts.len(), chained=chained)


def _header(plan: Plan, license: str) -> str:
    """Return the YAML header of a card, which the hub reads."""
    from huggingface_hub import ModelCardData

    hub_id = plan.model.get("id")
    data = ModelCardData(
        license=license,
        base_model=str(hub_id) if hub_id else None,
        library_name="transformers",
        pipeline_tag="text-generation",
        tags=["toolformer", "tool-use"],
    )
    return f"---\n{data.to_yaml()}\n---\n"


def _data(plan: Plan, record: Mapping[str, Any], report: TrainingReport) -> str:
    """Return a Markdown table of what a checkpoint was trained on: texts, tokens, fingerprints of the data.

    record: the content of training.json beside its weights. report: what the finetuning measured.
    """
    corpus_parts = plan.lake.table(CORPUS).pointers()
    corpus_inputs = {part: pointer.record["inputs"] for part, pointer in corpus_parts.items()}
    train_rows = corpus_rows(plan.lake, ["calls", "split"]).filter(pl.col("split") == TRAIN)
    without_calls = train_rows.filter(pl.col("calls") == 0).select(pl.len()).collect().item()
    texts = f"{report.texts:,}"
    if without_calls:
        texts += f", {without_calls:,} of them without calls"
    lines = [
        ("training texts", texts),
        ("tokens", f"{report.tokens:,}"),
        ("fingerprint of the training texts", f"`{record['texts']}`"),
        ("fingerprint of the texts that chose the step", f"`{record['heldout']}`"),
        ("fingerprint of the documents and kept calls", f"`{fingerprint(corpus_inputs)}`"),
        ("shards of documents", f"{len(plan.shards):,}"),
        ("equal documents left out", "yes" if plan.settings.corpus.deduplicate else "no"),
        ("documents of benchmarks left out", "yes" if plan.settings.corpus.decontaminate else "no"),
    ]
    return table(("data", "value"), lines)


def _tools(plan: Plan) -> list[tuple[object, ...]]:
    """Return a row of cells per lane (a tool with its settings): thresholds, and how many training texts call it."""
    train_rows = corpus_rows(plan.lake, ["tools", "split"]).filter(pl.col("split") == TRAIN)
    called = train_rows.select(pl.col("tools").list.unique().explode())  # a row per text and tool
    texts_of = dict(called.group_by("tools").len().collect().iter_rows())
    lines = []
    for lane in plan.lanes:
        texts = texts_of.get(lane.key, 0)
        lines.append((*lane_cells(lane), _threshold(plan, lane), f"{texts:,}"))
    return lines


def _threshold(plan: Plan, lane: Lane) -> object:
    """Return the tau_f that a lane's kept calls passed; in words where none was kept."""
    filtered_calls = plan.lane_table(lane, "filtered_calls")
    if not filtered_calls.parts():
        return "no call kept"
    kept = filtered_calls.scan().select("tau_f").head(1).collect()
    return "no call kept" if kept.is_empty() else kept.item()


def _figures(record: Mapping[str, Any], report: TrainingReport) -> list[tuple[str, object]]:
    """Return the (name, value) lines of the card's table of figures: held-out measures, steps, time, fingerprints.

    record: the content of training.json beside the weights. report: what the finetuning measured.
    """
    of_base = [point.value for point in report.heldout if point.step == 0]
    return [
        (f"held-out {report.best.measure}", f"{report.best.value:.3f}"),
        ("of the base model", f"{of_base[0]:.3f}" if of_base else "not measured"),
        ("step, of all steps", f"{report.best_step:,} of {report.steps:,}"),
        ("sequences", f"{report.examples:,}"),
        ("seconds, processes", f"{report.seconds:,.0f}, {report.processes}"),
        ("fingerprint of the training", f"`{report.fingerprint}`"),
        ("fingerprint of the base model", f"`{fingerprint(record['base'])}`"),
    ]
