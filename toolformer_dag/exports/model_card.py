"""Write the card of a checkpoint: README.md next to its weights, with the hub's YAML header."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from string import Template
from typing import Any, NamedTuple

import polars as pl

from toolformer_dag.computing.plan import Lane, Plan
from toolformer_dag.exports.dataset_folder import CITATION, TOOL_COLUMN_TITLES, build_lane_cells
from toolformer_dag.files import unseal_record
from toolformer_dag.identity import fingerprint
from toolformer_dag.lake.queries import read_sql_file
from toolformer_dag.markdown import format_markdown_table, format_rounded_cell
from toolformer_dag.model.weights import format_model_name, get_checkpoint_folder
from toolformer_dag.pipeline.augmented_corpus import TABLE_NAME as CORPUS
from toolformer_dag.pipeline.augmented_corpus import scan_corpus_rows
from toolformer_dag.pipeline.heldout_texts import build_few_texts_warning
from toolformer_dag.pipeline.merging import TRAIN
from toolformer_dag.settings.evaluation_settings import DecodingSettings
from toolformer_dag.texts.calls import parse_placed_calls
from toolformer_dag.training.checkpoints import Checkpoint, build_checkpoints_by_name
from toolformer_dag.training.training_report import RECORD_FILE_NAME, TrainingReport, read_card, write_card

CARD_TEMPLATE = Template(read_sql_file(__package__, "model_card.md"))
"""The card between its header and the figures of evaluation."""
EVALUATION_HEADING = "\n## Evaluation\n"
"""The heading of the last part of a card."""
UNMEASURED_LIMIT = (
    "Only what stands under Figures and Evaluation was measured; safety, bias and other languages were not."
)
"""The last of the limits."""


def add_evaluation_figures(folder: Path, accuracy: pl.DataFrame | None, perplexity: pl.DataFrame | None) -> None:
    """Replace the figures of evaluation, which are the last part of a checkpoint's card.

    In a folder without a whole card, nothing is done.

    Args:
        folder: The folder of the checkpoint.
        accuracy: A row per benchmark. None if accuracy was not measured.
        perplexity: A row per source and condition. None if perplexity was not measured.

    Raises:
        WriteError: The card cannot be written.
    """
    card = read_card(folder)
    if card is None:
        return

    new_card, _, _ = card.partition(EVALUATION_HEADING)
    sections = _format_evaluation_sections(accuracy, perplexity)
    if sections:
        new_card += EVALUATION_HEADING + "\n" + "\n".join(sections)

    write_card(folder, new_card)


def _format_evaluation_sections(accuracy: pl.DataFrame | None, perplexity: pl.DataFrame | None) -> list[str]:
    """Format a section for each table that was measured."""
    sections = []
    if accuracy is not None:
        title = "Right answers in per cent, with 95 % intervals (Wilson)."
        sections.append(_format_evaluation_section(title, accuracy))
    if perplexity is not None:
        sections.append(_format_evaluation_section("Perplexity, calls disabled.", perplexity))
    return sections


def _format_evaluation_section(title: str, rows: pl.DataFrame) -> str:
    """Format a title with a Markdown table below it, in which numbers are rounded."""
    table = format_markdown_table(rows.columns, rows.iter_rows(), format_rounded_cell)
    return f"{title}\n\n{table}"


def write_model_card(plan: Plan, checkpoint_name: str, report: TrainingReport, choosing_text_count: int) -> None:
    """Write the card (README.md) of a trained checkpoint into its folder, without figures of evaluation.

    Args:
        plan: The settings with the tables and the model that follow from them.
        checkpoint_name: The name of the checkpoint.
        report: What the finetuning measured.
        choosing_text_count: The number of held-out texts by which the step of the checkpoint was chosen.

    Raises:
        MissingPart: A part of a table that is read does not exist.
        DamagedPart: A part of a table that is read is damaged.
        WriteError: The card cannot be written.
    """
    folder = get_checkpoint_folder(plan.settings, checkpoint_name)
    checkpoint = build_checkpoints_by_name(plan.settings)[checkpoint_name]

    # The record holds the settings and data with which the checkpoint was trained.
    training_record = unseal_record((folder / RECORD_FILE_NAME).read_bytes())

    card = _TrainedCard(plan, checkpoint, report, training_record, choosing_text_count)
    write_card(folder, _format_yaml_header(plan) + card.format_card())


@dataclass(frozen=True, slots=True)
class _TrainedCard:
    """The card of a checkpoint between its header and the figures of evaluation.

    Attributes:
        plan: The settings with the tables and the model that follow from them.
        checkpoint: Which checkpoint it is.
        report: What the finetuning measured.
        training_record: The content of training.json next to the weights.
        choosing_text_count: The number of held-out texts by which the step was chosen.
    """

    plan: Plan
    checkpoint: Checkpoint
    report: TrainingReport
    training_record: Mapping[str, Any]
    choosing_text_count: int

    def format_card(self) -> str:
        """Format the text of a checkpoint's card (its README on the hub), without header and figures of evaluation.

        Raises:
            MissingPart: A part of a table that is read does not exist.
            DamagedPart: A part of a table that is read is damaged.
        """
        model_name = format_model_name(self.plan.settings.model.name)
        return CARD_TEMPLATE.substitute(
            title=f"{model_name} {self.checkpoint.card_text.title}",
            about=self._format_about(),
            use=self.checkpoint.card_text.use,
            data=self._format_data_table(),
            tools=format_markdown_table((*TOOL_COLUMN_TITLES, "training texts"), _build_tool_rows(self.plan)),
            objective=self._describe_objective(),
            settings=_format_settings_table(self.training_record["settings"]),
            figures=self._format_figures_table(),
            metric=self.report.best_point.measure,
            choosing=self.choosing_text_count,
            curve=_format_curve_table(self.report),
            limits=self._format_limits(),
            license=self.plan.settings.export.model_license,
            citation=CITATION.strip(),
        )

    def _describe_objective(self) -> str:
        """Return a sentence about the loss that the training minimizes."""
        from toolformer_dag.training.recipe import objective_of

        training_settings = self.checkpoint.get_training_settings(self.plan)
        return objective_of(training_settings).description

    def _format_about(self) -> str:
        """Describe the checkpoint, with the markers that the settings have around a call."""
        markers = {field: marker.rstrip() for field, marker in self.plan.settings.model.markers}
        return self.checkpoint.card_text.about.format(**markers)

    def _format_data_table(self) -> str:
        """Format a Markdown table of the training data: the number of texts and tokens, and fingerprints."""
        lines = [
            ("training texts", self._format_training_texts()),
            ("tokens", f"{self.report.tokens:,}"),
            ("fingerprint of the training texts", f"`{self.training_record['texts']}`"),
            ("fingerprint of the texts that chose the step", f"`{self.training_record['heldout']}`"),
            ("fingerprint of the documents and kept calls", f"`{self._compute_corpus_fingerprint()}`"),
            *self._build_document_lines(),
        ]
        return format_markdown_table(("data", "value"), lines)

    def _build_document_lines(self) -> list[tuple[str, str]]:
        """Return the lines of the data table about which documents were used, as pairs of a label and a value."""
        corpus = self.plan.settings.corpus
        return [
            ("shards of documents", f"{len(self.plan.shards_by_name):,}"),
            ("equal documents left out", "yes" if corpus.deduplicate else "no"),
            ("documents of benchmarks left out", "yes" if corpus.decontaminate else "no"),
        ]

    def _format_training_texts(self) -> str:
        """Format the number of training texts: "1,200", or "1,200, 30 of them without calls"."""
        rows = scan_corpus_rows(self.plan.lake, ["calls", "split"])
        rows_without_calls = rows.filter(pl.col("split") == TRAIN, pl.col("calls") == 0)
        count_without_calls = rows_without_calls.select(pl.len()).collect().item()

        text_count = f"{self.report.texts:,}"
        if not count_without_calls:
            return text_count
        return f"{text_count}, {count_without_calls:,} of them without calls"

    def _compute_corpus_fingerprint(self) -> str:
        """Compute the fingerprint of the documents and kept calls from which the training texts were made."""
        pointers_by_part = self.plan.lake.get_table(CORPUS).read_pointers_by_part()
        inputs_by_part = {part: pointer.record["inputs"] for part, pointer in pointers_by_part.items()}
        return fingerprint(inputs_by_part)

    def _format_figures_table(self) -> str:
        """Format a Markdown table of held-out measures, steps, time and fingerprints."""
        report = self.report
        lines = [
            (f"held-out {report.best_point.measure}", f"{report.best_point.value:.3f}"),
            ("of the base model", self._format_base_value()),
            ("step, of all steps", f"{report.best_step:,} of {report.steps:,}"),
            ("sequences", f"{report.examples:,}"),
            ("seconds, processes", f"{report.seconds:,.0f}, {report.processes}"),
            ("fingerprint of the training", f"`{report.fingerprint}`"),
            ("fingerprint of the base model", f"`{fingerprint(self.training_record['base'])}`"),
        ]
        return format_markdown_table(("figure", "value"), lines)

    def _format_base_value(self) -> str:
        """Format the held-out measure of the base model, which is step 0: "12.345", or "not measured"."""
        for point in self.report.heldout:
            if point.step == 0:
                return f"{point.value:.3f}"
        return "not measured"

    def _format_limits(self) -> str:
        """Format the limits of the checkpoint as a Markdown list."""
        limits = describe_call_limits(self.plan) if self.checkpoint.calls_tools else []
        limits += [*self.checkpoint.card_text.limits, UNMEASURED_LIMIT]
        warning = build_few_texts_warning(self.choosing_text_count, "choose the checkpoint")
        if warning:
            limits.append(f"{warning}.")
        return "\n".join(f"- {limit}" for limit in limits)


def _format_settings_table(training_settings: Mapping[str, Any]) -> str:
    """Format the settings of training as a Markdown table."""
    lines = []
    for key, value in training_settings.items():
        shown_value = "not set" if value is None else value
        lines.append((f"`training.{key}`", shown_value))
    return format_markdown_table(("setting", "value"), lines)


def _format_curve_table(report: TrainingReport) -> str:
    """Format the held-out measure by step as a Markdown table."""
    lines = [(point.step, f"{point.value:.3f}") for point in report.heldout]
    return format_markdown_table(("step", f"held-out {report.best_point.measure}"), lines)


class TextsOfCalls(NamedTuple):
    """Counts of training texts with several calls.

    Attributes:
        several_calls_count: The number of texts with more than one call.
        chain_count: The number of texts with a chain: calls that follow each other at one place.
    """

    several_calls_count: int
    chain_count: int


def describe_call_limits(plan: Plan) -> list[str]:
    """Describe in two sentences how many calls training texts have, and how many an answer of the model may have.

    Raises:
        MissingPart: A part of the table of training texts does not exist.
        DamagedPart: A part of the table is damaged.
    """
    return [
        _describe_training_limit(count_texts_with_several_calls(plan)),
        _describe_decoding_limit(plan.settings.decoding),
    ]


def _describe_training_limit(text_counts: TextsOfCalls) -> str:
    """Describe in a sentence how many training texts have more than one call."""
    if not text_counts.several_calls_count:
        return "No training text holds more than one call."
    return (
        f"{text_counts.several_calls_count:,} training texts hold more than one call, "
        f"{text_counts.chain_count:,} of them a chain: calls that follow each other at one place."
    )


def _describe_decoding_limit(decoding_settings: DecodingSettings) -> str:
    """Describe in a sentence how many calls and which chains an answer may have."""
    calls = "one call" if decoding_settings.calls == 1 else f"up to {decoding_settings.calls} calls"
    if decoding_settings.depth == 1:
        chains = "no chained calls, and no second look at results"
    else:
        chains = f"chains of up to {decoding_settings.depth} calls"

    is_as_in_paper = decoding_settings.calls == 1 and decoding_settings.depth == 1
    comparison = ", as in the paper" if is_as_in_paper else "; the paper has one call and no chain"
    return f"An answer has {calls}, {chains}{comparison} (`decoding.calls`, `decoding.depth`)."


def count_texts_with_several_calls(plan: Plan) -> TextsOfCalls:
    """Count the training texts with several calls, and those of them with a chain (calls at one place).

    Raises:
        MissingPart: A part of the table of training texts does not exist.
        DamagedPart: A part of the table is damaged.
    """
    rows = scan_corpus_rows(plan.lake, ["text_with_calls", "calls", "split"])
    rows_with_several_calls = rows.filter(pl.col("split") == TRAIN, pl.col("calls") > 1)
    texts = rows_with_several_calls.collect()["text_with_calls"]

    chain_count = sum(_has_chain(text, plan) for text in texts)
    return TextsOfCalls(several_calls_count=texts.len(), chain_count=chain_count)


def _has_chain(text: str, plan: Plan) -> bool:
    """Check whether a text has several calls before the same character."""
    tool_names = plan.tool_name_by_lane_key.values()
    calls = parse_placed_calls(text, tool_names, plan.settings.model.markers)
    offsets = [call.offset for call in calls]
    return len(set(offsets)) < len(offsets)


def _format_yaml_header(plan: Plan) -> str:
    """Format the YAML header of a checkpoint's card, which tells the hub the license, the base model and tags."""
    from huggingface_hub import ModelCardData

    hub_id = plan.model_identity.get("id")
    data = ModelCardData(
        license=plan.settings.export.model_license,
        base_model=str(hub_id) if hub_id else None,
        library_name="transformers",
        pipeline_tag="text-generation",
        tags=["toolformer", "tool-use"],
    )
    return f"---\n{data.to_yaml()}\n---\n"


def _build_tool_rows(plan: Plan) -> list[tuple[object, ...]]:
    """Build a table row for each lane (a tool with its settings).

    Its cells are the settings, the threshold that was applied, and the number of training texts with its calls.
    """
    text_count_by_lane = _count_texts_by_lane(plan)

    rows = []
    for lane in plan.lanes:
        text_count = text_count_by_lane.get(lane.key, 0)
        applied_tau_f = _read_applied_tau_f(plan, lane)
        rows.append((*build_lane_cells(lane), applied_tau_f, f"{text_count:,}"))
    return rows


def _count_texts_by_lane(plan: Plan) -> dict[str, int]:
    """Count the training texts with a call of each lane (a tool with its settings). Lanes without any are left out."""
    rows = scan_corpus_rows(plan.lake, ["tools", "split"])
    train_rows = rows.filter(pl.col("split") == TRAIN)

    texts_and_lanes = train_rows.select(pl.col("tools").list.unique().explode())  # a row per text and lane
    counts = texts_and_lanes.group_by("tools").len().collect()
    return dict(counts.iter_rows())


def _read_applied_tau_f(plan: Plan, lane: Lane) -> object:
    """Read the threshold tau_f by which the calls of a lane (a tool with its settings) were kept.

    Returns:
        The threshold, or "no call kept" if there are none.
    """
    filtered_calls = plan.get_lane_table(lane, "filtered_calls")
    if not filtered_calls.list_part_names():
        return "no call kept"

    first_row = filtered_calls.scan_parts().select("tau_f").head(1).collect()
    return "no call kept" if first_row.is_empty() else first_row.item()
