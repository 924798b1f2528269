"""Write the card of a checkpoint: README.md next to its weights, with the hub's YAML header."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from string import Template
from typing import Any, NamedTuple

import polars as pl

from toolformer_dag.computing.plan import Lane, Plan
from toolformer_dag.exports.dataset_folder import CITATION, TOOL_TITLES, build_lane_cells
from toolformer_dag.files import unseal_record
from toolformer_dag.identity import fingerprint
from toolformer_dag.lake.queries import read_sql_file
from toolformer_dag.markdown import rounded, table
from toolformer_dag.model.weights import checkpoint_folder, format_model_name
from toolformer_dag.pipeline.augmented_corpus import NAME as CORPUS
from toolformer_dag.pipeline.augmented_corpus import scan_corpus_rows
from toolformer_dag.pipeline.heldout_texts import too_few
from toolformer_dag.pipeline.merging import TRAIN
from toolformer_dag.settings.evaluation_settings import DecodingSettings
from toolformer_dag.texts.calls import placed_calls
from toolformer_dag.training.checkpoints import Checkpoint, checkpoints
from toolformer_dag.training.training_report import RECORD, TrainingReport, read_card, write_card

CARD_TEXT = Template(read_sql_file(__package__, "model_card.md"))
"""The card between its header and the figures of evaluation."""
EVALUATION = "\n## Evaluation\n"
"""The heading of the last part of a card."""
NO_FIGURES = "Only what stands under Figures and Evaluation was measured; safety, bias and other languages were not."
"""The last of the limits."""


def add_evaluation(folder: Path, accuracy: pl.DataFrame | None, perplexity: pl.DataFrame | None) -> None:
    """Replace the last part of a card, the figures of evaluation. Do nothing in a folder without a whole card.

    Args:
        accuracy: A row per benchmark. None if accuracy was not measured.
        perplexity: A row per source and condition. None if perplexity was not measured.

    Raises:
        WriteError: The card cannot be written.
    """
    card = read_card(folder)
    if card is None:
        return

    text = card.partition(EVALUATION)[0]
    sections = _format_evaluation_sections(accuracy, perplexity)
    if sections:
        text += EVALUATION + "\n" + "\n".join(sections)

    write_card(folder, text)


def _format_evaluation_sections(accuracy: pl.DataFrame | None, perplexity: pl.DataFrame | None) -> list[str]:
    """Return a section per table that was measured."""
    sections = []
    if accuracy is not None:
        sections.append(_format_section("Right answers in per cent, with 95 % intervals (Wilson).", accuracy))
    if perplexity is not None:
        sections.append(_format_section("Perplexity, calls disabled.", perplexity))
    return sections


def _format_section(title: str, rows: pl.DataFrame) -> str:
    """Return a title with a Markdown table below it."""
    return f"{title}\n\n{table(rows.columns, rows.iter_rows(), rounded)}"


def write_model_card(plan: Plan, name: str, report: TrainingReport, choosing: int) -> None:
    """Write the card (README.md) of a trained checkpoint into its folder, without figures of evaluation.

    Args:
        choosing: The number of held-out texts that chose the step of the checkpoint.

    Raises:
        MissingPart: A part of a table that is read does not exist.
        DamagedPart: A part of a table that is read is damaged.
        WriteError: The card cannot be written.
    """
    folder = checkpoint_folder(plan.settings, name)
    record = unseal_record((folder / RECORD).read_bytes())  # the settings and data that the checkpoint was trained with
    card = _TrainedCard(plan, checkpoints(plan.settings)[name], report, record, choosing)
    write_card(folder, _format_header(plan) + card.text())


@dataclass(frozen=True, slots=True)
class _TrainedCard:
    """The card of a checkpoint after its header, before the figures of evaluation.

    - `plan`: the project
    - `checkpoint`: which checkpoint it is
    - `report`: what the finetuning measured
    - `record`: the content of training.json next to the weights
    - `choosing`: the number of held-out texts that chose the step
    """

    plan: Plan
    checkpoint: Checkpoint
    report: TrainingReport
    record: Mapping[str, Any]
    choosing: int

    def text(self) -> str:
        """Return the card. Raises MissingPart, DamagedPart."""
        return CARD_TEXT.substitute(
            title=f"{format_model_name(self.plan.settings.model.name)} {self.checkpoint.card.title}",
            about=self._format_about(),
            use=self.checkpoint.card.use,
            data=self._format_data_table(),
            tools=table((*TOOL_TITLES, "training texts"), _build_tool_rows(self.plan)),
            objective=self._describe_objective(),
            settings=_format_settings_table(self.record["settings"]),
            figures=self._format_figures_table(),
            metric=self.report.best.measure,
            choosing=self.choosing,
            curve=_format_curve_table(self.report),
            limits=self._format_limits(),
            license=self.plan.settings.export.model_license,
            citation=CITATION.strip(),
        )

    def _describe_objective(self) -> str:
        """Return a sentence that says what the training minimizes."""
        from toolformer_dag.training.recipe import objective_of

        return objective_of(self.checkpoint.recipe(self.plan)).described

    def _format_about(self) -> str:
        """Return what the checkpoint is, with the markers around a call as the settings have them."""
        markers = {field: marker.rstrip() for field, marker in self.plan.settings.model.markers}
        return self.checkpoint.card.about.format(**markers)

    def _format_data_table(self) -> str:
        """Return a Markdown table of what the checkpoint was trained on: texts, tokens, fingerprints of the data."""
        lines = [
            ("training texts", self._format_training_texts()),
            ("tokens", f"{self.report.tokens:,}"),
            ("fingerprint of the training texts", f"`{self.record['texts']}`"),
            ("fingerprint of the texts that chose the step", f"`{self.record['heldout']}`"),
            ("fingerprint of the documents and kept calls", f"`{self._compute_corpus_fingerprint()}`"),
            *self._build_document_lines(),
        ]
        return table(("data", "value"), lines)

    def _build_document_lines(self) -> list[tuple[str, str]]:
        """Return the lines of the table of data that say which documents were taken."""
        corpus = self.plan.settings.corpus
        return [
            ("shards of documents", f"{len(self.plan.shards):,}"),
            ("equal documents left out", "yes" if corpus.deduplicate else "no"),
            ("documents of benchmarks left out", "yes" if corpus.decontaminate else "no"),
        ]

    def _format_training_texts(self) -> str:
        """Return `1,200`, or `1,200, 30 of them without calls`."""
        train_rows = scan_corpus_rows(self.plan.lake, ["calls", "split"]).filter(pl.col("split") == TRAIN)
        without_calls = train_rows.filter(pl.col("calls") == 0).select(pl.len()).collect().item()
        texts = f"{self.report.texts:,}"
        return f"{texts}, {without_calls:,} of them without calls" if without_calls else texts

    def _compute_corpus_fingerprint(self) -> str:
        """Return the fingerprint of the documents and kept calls that C* was made from."""
        corpus_parts = self.plan.lake.table(CORPUS).pointers()
        return fingerprint({part: pointer.record["inputs"] for part, pointer in corpus_parts.items()})

    def _format_figures_table(self) -> str:
        """Return a Markdown table of held-out measures, steps, time and fingerprints."""
        report = self.report
        lines = [
            (f"held-out {report.best.measure}", f"{report.best.value:.3f}"),
            ("of the base model", self._format_base_value()),
            ("step, of all steps", f"{report.best_step:,} of {report.steps:,}"),
            ("sequences", f"{report.examples:,}"),
            ("seconds, processes", f"{report.seconds:,.0f}, {report.processes}"),
            ("fingerprint of the training", f"`{report.fingerprint}`"),
            ("fingerprint of the base model", f"`{fingerprint(self.record['base'])}`"),
        ]
        return table(("figure", "value"), lines)

    def _format_base_value(self) -> str:
        """Return the held-out metric of the base model, which is step 0."""
        for point in self.report.heldout:
            if point.step == 0:
                return f"{point.value:.3f}"
        return "not measured"

    def _format_limits(self) -> str:
        """Return the limits of the checkpoint as a Markdown list."""
        limits = describe_call_limits(self.plan) if self.checkpoint.calls else []
        limits += [*self.checkpoint.card.limits, NO_FIGURES]
        warning = too_few(self.choosing, "choose the checkpoint")
        if warning:
            limits.append(f"{warning}.")
        return "\n".join(f"- {limit}" for limit in limits)


def _format_settings_table(settings: Mapping[str, Any]) -> str:
    """Return the settings of training as a Markdown table."""
    lines = []
    for key, value in settings.items():
        lines.append((f"`training.{key}`", "not set" if value is None else value))
    return table(("setting", "value"), lines)


def _format_curve_table(report: TrainingReport) -> str:
    """Return the held-out measure by step as a Markdown table."""
    lines = [(point.step, f"{point.value:.3f}") for point in report.heldout]
    return table(("step", f"held-out {report.best.measure}"), lines)


class TextsOfCalls(NamedTuple):
    """Counts of the training texts of C*.

    - `several`: texts with more than one call
    - `chained`: texts with a chain, calls that follow each other before one character
    """

    several: int
    chained: int


def describe_call_limits(plan: Plan) -> list[str]:
    """Return two sentences: the most calls of a training text of C*, and of a text that the model decodes now.

    Raises MissingPart, DamagedPart.
    """
    return [_describe_training_limit(count_texts_of_calls(plan)), _describe_decoding_limit(plan.settings.decoding)]


def _describe_training_limit(texts: TextsOfCalls) -> str:
    """Return how many training texts hold more than one call, as a sentence."""
    if not texts.several:
        return "No training text holds more than one call."
    return (
        f"{texts.several:,} training texts hold more than one call, "
        f"{texts.chained:,} of them a chain: calls that follow each other at one place."
    )


def _describe_decoding_limit(rules: DecodingSettings) -> str:
    """Describe in a sentence how many calls and which chains an answer may have."""
    calls = "one call" if rules.calls == 1 else f"up to {rules.calls} calls"
    if rules.depth == 1:
        chains = "no chained calls, and no second look at results"
    else:
        chains = f"chains of up to {rules.depth} calls"

    is_as_in_paper = rules.calls == 1 and rules.depth == 1
    comparison = ", as in the paper" if is_as_in_paper else "; the paper has one call and no chain"
    return f"An answer has {calls}, {chains}{comparison} (`decoding.calls`, `decoding.depth`)."


def count_texts_of_calls(plan: Plan) -> TextsOfCalls:
    """Return how many training texts of C* have several calls or a chain. Raises MissingPart, DamagedPart."""
    corpus = scan_corpus_rows(plan.lake, ["text_with_calls", "calls", "split"])
    texts = corpus.filter(pl.col("split") == TRAIN, pl.col("calls") > 1).collect()["text_with_calls"]
    chained = sum(_has_chain(text, plan) for text in texts)
    return TextsOfCalls(several=texts.len(), chained=chained)


def _has_chain(text: str, plan: Plan) -> bool:
    """Return whether several calls of a text are before the same character."""
    calls = placed_calls(text, plan.lane_names.values(), plan.settings.model.markers)
    offsets = [call.offset for call in calls]
    return len(set(offsets)) < len(offsets)


def _format_header(plan: Plan) -> str:
    """Return the YAML header of a card, which the hub reads."""
    from huggingface_hub import ModelCardData

    hub_id = plan.model.get("id")
    data = ModelCardData(
        license=plan.settings.export.model_license,
        base_model=str(hub_id) if hub_id else None,
        library_name="transformers",
        pipeline_tag="text-generation",
        tags=["toolformer", "tool-use"],
    )
    return f"---\n{data.to_yaml()}\n---\n"


def _build_tool_rows(plan: Plan) -> list[tuple[object, ...]]:
    """Return a row of cells per lane (a tool with its settings): thresholds, and the training texts with its calls."""
    texts_of = _count_texts_by_lane(plan)
    lines = []
    for lane in plan.lanes:
        texts = texts_of.get(lane.key, 0)
        lines.append((*build_lane_cells(lane), _read_threshold(plan, lane), f"{texts:,}"))
    return lines


def _count_texts_by_lane(plan: Plan) -> dict[str, int]:
    """Return lane -> number of training texts with a call of its tool."""
    train_rows = scan_corpus_rows(plan.lake, ["tools", "split"]).filter(pl.col("split") == TRAIN)
    called = train_rows.select(pl.col("tools").list.unique().explode())  # a row per text and tool
    return dict(called.group_by("tools").len().collect().iter_rows())


def _read_threshold(plan: Plan, lane: Lane) -> object:
    """Return the tau_f that a lane's kept calls passed; "no call kept" if there is none."""
    filtered_calls = plan.lane_table(lane, "filtered_calls")
    if not filtered_calls.parts():
        return "no call kept"
    kept = filtered_calls.scan().select("tau_f").head(1).collect()
    return "no call kept" if kept.is_empty() else kept.item()
