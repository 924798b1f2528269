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
from toolformer_dag.texts.calls import placed_calls
from toolformer_dag.training.checkpoint_outputs import CHECKPOINTS
from toolformer_dag.training.training_report import RECORD, TrainingReport, read_card, write_card

CARD_TEXT = Template(sql_text(__package__, "model_card.md"))
EVALUATION = "\n## Evaluation\n"
NO_FIGURES = "Only what stands under Figures and Evaluation was measured; safety, bias and other languages were not."


def add_evaluation(folder: Path, accuracy: pl.DataFrame | None, perplexity: pl.DataFrame | None) -> None:
    """Replace the last part of a card, the figures of evaluation; a folder without a whole card is left alone.

    `accuracy`: a row per benchmark; `perplexity`: a row per source and condition; None where nothing was measured.
    Raises WriteError.
    """
    card = read_card(folder)
    if card is None:
        return
    sections = [
        f"{title}\n\n{table(frame.columns, frame.iter_rows(), rounded)}"
        for title, frame in (
            ("Right answers in per cent, with 95 % intervals (Wilson).", accuracy),
            ("Perplexity, calls disabled.", perplexity),
        )
        if frame is not None
    ]
    kept = card.partition(EVALUATION)[0]
    write_card(folder, kept + EVALUATION + "\n" + "\n".join(sections) if sections else kept)


def write_model_card(plan: Plan, name: str, report: TrainingReport, choosing: int) -> None:
    """Write the card of a trained checkpoint. `choosing`: how many texts chose its step. Raises WriteError."""
    from toolformer_dag.training.recipe import objective_of

    folder = checkpoint_folder(plan.settings, name)
    checkpoint = CHECKPOINTS[name]
    words = checkpoint.card
    markers = {name: marker.rstrip() for name, marker in plan.settings.model.markers}
    record = unsealed((folder / RECORD).read_bytes())
    base = folder_name(plan.settings.model.name)
    warning = too_few(choosing, "choose the checkpoint")
    license = plan.settings.export.model_license
    limits = [*(call_limits(plan) if checkpoint.calls else ()), *words.limits, NO_FIGURES]
    if warning:
        limits.append(f"{warning}.")
    text = CARD_TEXT.substitute(
        title=f"{base} {words.title}",
        about=words.about.format(**markers),
        use=words.use,
        data=_data(plan, record, report),
        tools=table((*TOOL_TITLES, "training texts"), _tools(plan)),
        objective=objective_of(checkpoint.recipe(plan)).described,
        settings=table(
            ("setting", "value"),
            [(f"`training.{key}`", "not set" if value is None else value) for key, value in record["settings"].items()],
        ),
        figures=table(("figure", "value"), _figures(record, report)),
        metric=report.best.measure,
        choosing=choosing,
        curve=table(
            ("step", f"held-out {report.best.measure}"), [(at.step, f"{at.value:.3f}") for at in report.heldout]
        ),
        limits="\n".join(f"- {limit}" for limit in limits),
        license=license,
        citation=CITATION.strip(),
    )
    write_card(folder, _header(plan, license) + text)


class TextsOfCalls(NamedTuple):
    """Of the training texts of C*: those that hold more than one call, and those in which calls follow each other."""

    several: int
    chained: int


def call_limits(plan: Plan) -> list[str]:
    """Return how many calls a text may hold, as the model was trained and as it decodes, in sentences.

    Of the first C* decides, of the second `[decoding]`, as it is now. Raises MissingPart, DamagedPart.
    """
    texts = texts_of_calls(plan)
    rules = plan.settings.decoding
    trained = "No training text holds more than one call."
    if texts.several:
        trained = f"{texts.several:,} training texts hold more than one call, "
        trained += f"{texts.chained:,} of them a chain: calls that follow each other at one place."
    places = "one call" if rules.calls == 1 else f"up to {rules.calls} calls"
    chains = "no chained calls" if rules.depth == 1 else f"chains of up to {rules.depth} calls"
    second_look = ", and no second look at results" if rules.depth == 1 else ""
    as_published = ", as in the paper" if rules.calls == rules.depth == 1 else "; the paper has one call and no chain"
    decoded = f"An answer has {places}, {chains}{second_look}{as_published} (`decoding.calls`, `decoding.depth`)."
    return [trained, decoded]


def texts_of_calls(plan: Plan) -> TextsOfCalls:
    """Count the training texts of C* with several calls. Raises MissingPart, DamagedPart."""
    corpus = corpus_rows(plan.lake, ["text_with_calls", "calls", "split"])
    several = corpus.filter(pl.col("split") == TRAIN, pl.col("calls") > 1).collect()["text_with_calls"]
    tools = plan.lane_names.values()
    chained = 0
    for text in several:
        offsets = [call.offset for call in placed_calls(text, tools, plan.settings.model.markers)]
        chained += len(set(offsets)) < len(offsets)  # the calls of a chain stand before the same character
    return TextsOfCalls(several.len(), chained)


def _header(plan: Plan, license: str) -> str:
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
    parts = plan.lake.table(CORPUS).pointers()
    versions = {part: pointer.record["inputs"] for part, pointer in parts.items()}
    trained_on = corpus_rows(plan.lake, ["calls", "split"]).filter(pl.col("split") == TRAIN)
    plain = trained_on.filter(pl.col("calls") == 0).select(pl.len()).collect().item()
    rows = [
        ("training texts", f"{report.texts:,}" + (f", {plain:,} of them without calls" if plain else "")),
        ("tokens", f"{report.tokens:,}"),
        ("fingerprint of the training texts", f"`{record['texts']}`"),
        ("fingerprint of the texts that chose the step", f"`{record['heldout']}`"),
        ("fingerprint of the documents and kept calls", f"`{fingerprint(versions)}`"),
        ("shards of documents", f"{len(plan.shards):,}"),
        ("equal documents left out", "yes" if plan.settings.corpus.deduplicate else "no"),
        ("documents of benchmarks left out", "yes" if plan.settings.corpus.decontaminate else "no"),
    ]
    return table(("data", "value"), rows)


def _tools(plan: Plan) -> list[tuple[object, ...]]:
    """Return a line per lane: thresholds, and in how many training texts its calls stood."""
    corpus = corpus_rows(plan.lake, ["tools", "split"]).filter(pl.col("split") == TRAIN)
    called = corpus.select(pl.col("tools").list.unique().explode())
    texts = dict(called.group_by("tools").len().collect().iter_rows())
    return [(*lane_cells(lane), _threshold(plan, lane), f"{texts.get(lane.key, 0):,}") for lane in plan.lanes]


def _threshold(plan: Plan, lane: Lane) -> object:
    """Return the tau_f that the kept calls passed; in words where none was kept."""
    table = plan.lane_table(lane, "filtered_calls")
    kept = table.scan().select("tau_f").head(1).collect() if table.parts() else pl.DataFrame()
    return "no call kept" if kept.is_empty() else kept.item()


def _figures(record: Mapping[str, Any], report: TrainingReport) -> list[tuple[str, object]]:
    base = next((point.value for point in report.heldout if point.step == 0), None)
    return [
        (f"held-out {report.best.measure}", f"{report.best.value:.3f}"),
        ("of the base model", "not measured" if base is None else f"{base:.3f}"),
        ("step, of all steps", f"{report.best_step:,} of {report.steps:,}"),
        ("sequences", f"{report.examples:,}"),
        ("seconds, processes", f"{report.seconds:,.0f}, {report.processes}"),
        ("fingerprint of the training", f"`{report.fingerprint}`"),
        ("fingerprint of the base model", f"`{fingerprint(record['base'])}`"),
    ]
