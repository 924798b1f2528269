"""`judge`: find out which tool calls of recorded conversations help, and write the conversations without the others."""

import sys
import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from toolformer_dag.cli.terminal import (
    ConfigOption,
    ForceOption,
    ModelOption,
    ProfileOption,
    SetOption,
    escape_control_characters,
    load_command_settings,
    path,
)
from toolformer_dag.files import UserError
from toolformer_dag.traces import DropChoice

if TYPE_CHECKING:
    from toolformer_dag.computing.stage import TableOutput
    from toolformer_dag.settings.sections import Settings
    from toolformer_dag.traces.cleaned import CleaningCounts
    from toolformer_dag.traces.judgement import Judgement


def judge(
    source: Annotated[
        list[str] | None,
        typer.Argument(help="Files, folders or data sets of the hub with conversations; default: `traces.source`."),
    ] = None,
    model: ModelOption = None,
    out: Annotated[
        Path | None, typer.Option(parser=path, help="Folder for the conversations in the form they came in.")
    ] = None,
    drop: Annotated[
        DropChoice,
        typer.Option(
            help="What is left out of --out: `conversations` with a call that does not help (recommended), `calls` "
            "that do not help, or `failed` calls. A call goes with its result and with the answer that rests on no "
            "other call; later messages may still rest on it."
        ),
    ] = "nothing",
    share: Annotated[
        float | None, typer.Option(help="Share of swapped results that may pass for help; default: `traces.share`.")
    ] = None,
    forms: Annotated[
        bool, typer.Option("--forms", help="List the forms of conversations that are read, with an example each.")
    ] = False,
    labels: Annotated[
        Path | None,
        typer.Option(
            parser=path,
            help='JSON lines of people who say whether answers rest on results, such as {"conversation": '
            '"traces.jsonl:12", "turn": 1, "label": true}: says how verdicts agree, and which share fits them.',
        ),
    ] = None,
    estimate: Annotated[
        bool,
        typer.Option("--estimate", help="Judge a sample of the calls, forecast what the others will cost, and stop."),
    ] = False,
    force: ForceOption = False,
    config: ConfigOption = None,
    profile: ProfileOption = None,
    set: SetOption = None,
) -> None:
    """Say of every recorded tool call whether the answer rests on its result: `sql --traces "from trace_calls"`.

    No tool is run. Losses are stored in the lake, and a second `judge` computes none of them. Once a judge has written
    the file, another one replaces it only where --model names it.

    Example: toolformer-dag judge traces.jsonl --model HuggingFaceTB/SmolLM2-135M-Instruct --set model.dtype=bfloat16;
    toolformer-dag judge traces --out cleaned --drop conversations --share 0.01
    """
    if forms:
        _print_conversation_forms()
        return
    overrides = _build_overrides(set or (), model, share)
    settings = load_command_settings(config, profile, overrides, needs_project=False)
    from toolformer_dag.traces.cleaned import write_cleaned_conversations
    from toolformer_dag.traces.judgement import get_traces_database_path, open_judgement, require_same_judge
    from toolformer_dag.traces.label_agreement import format_agreement_lines, measure_label_agreement, read_labels

    sources = _choose_sources(source, settings)
    labels_of_people = read_labels(labels) if labels is not None else []
    database = get_traces_database_path(settings)

    names_judge = any(override.startswith("model.name=") for override in overrides)
    if not names_judge and not estimate:
        require_same_judge(settings, database)
    _warn_of_embedded_judge(settings)
    if estimate:
        _print_judging_forecast(settings, sources)
        return

    with open_judgement(settings, sources, database, _Progress().show_progress) as judgement:
        if out is not None:
            cleaning_counts = write_cleaned_conversations(judgement, out, drop, force)
            _print_left_out_counts(cleaning_counts, out)
        agreement = measure_label_agreement(judgement.database, labels_of_people) if labels_of_people else None

    _print_judgement(judgement, database)
    if agreement is not None:
        for line in format_agreement_lines(agreement):
            typer.echo(line)


def _choose_sources(typed_sources: list[str] | None, settings: "Settings") -> list[str]:
    """Return where the conversations are: the typed files, folders and data sets, or those of the settings.

    Raises:
        UserError: Neither names any.
    """
    sources = typed_sources or list(settings.traces.source)
    if not sources:
        raise UserError("name a file, a folder or a data set of the hub with conversations, or set traces.source")
    return sources


def _build_overrides(override_pairs: Sequence[str], model_name: str | None, share: float | None) -> list[str]:
    """Return the settings that the options replace, such as `model.name=VALUE`: of `--set`, `--model` and `--share`."""
    overrides = list(override_pairs)
    if model_name is not None:
        overrides.append(f"model.name={model_name}")
    if share is not None:
        overrides.append(f"traces.share={share}")
    return overrides


def _warn_of_embedded_judge(settings: "Settings") -> None:
    """Print a warning on standard error if the judge is the embedded model, which knows only the demo's texts."""
    from toolformer_dag.model.weights import is_packaged_model, read_model_identity, resolve_model_name

    folder_or_id = resolve_model_name(settings.model)
    model_identity = read_model_identity(folder_or_id, settings.model.revision)
    if is_packaged_model(model_identity):
        typer.echo(
            "the embedded model knows the synthetic world of the demo alone; name another judge with --model", err=True
        )


def _print_judgement(judgement: "Judgement", database: Path) -> None:
    """Print how many calls help, and on standard error what judging took.

    Args:
        judgement: The outcome.
        database: The file with the verdicts, which is named to the user.
    """
    computed_count = judgement.loss_counts["computed"]
    reused_count = judgement.loss_counts["reused"]
    typer.echo(
        f"{judgement.conversation_count:,} conversations, {judgement.rejection_count:,} rejections; "
        f"{computed_count:,} losses computed with {judgement.model_token_count:,} tokens, {reused_count:,} reused; "
        f"{database}",
        err=True,
    )
    typer.echo(escape_control_characters(judgement.summary_line))


def _print_conversation_forms() -> None:
    """Print each form in which conversations can be recorded: its name, its source, and an example."""
    from toolformer_dag.conversations.forms import ALL_FORMS
    from toolformer_dag.conversations.forms.form import format_example

    for form in ALL_FORMS:
        typer.echo(f"{form.name}\n  {form.source}")
        for line in format_example(form).splitlines():
            typer.echo(f"  {line}")
        typer.echo()


def _print_judging_forecast(settings: "Settings", sources: Sequence[str]) -> None:
    """Judge a sample of the calls, and print what judging the others will cost."""
    from toolformer_dag.cli.judge_forecast import format_judging_forecast
    from toolformer_dag.traces.judgement import build_conversation_plan
    from toolformer_dag.traces.judging_forecast import forecast_judging

    plan = build_conversation_plan(settings, sources)
    forecast = forecast_judging(plan, _Progress().show_progress)
    typer.echo(format_judging_forecast(forecast, plan.settings))


def _print_left_out_counts(cleaning_counts: "CleaningCounts", output_folder: Path) -> None:
    """Print on standard error which files of conversations were written, and how much they leave out."""
    for file_name, line_count in cleaning_counts.line_count_by_file.items():
        typer.echo(f"{output_folder}/{file_name}: {line_count:,} lines", err=True)

    conversation_count = cleaning_counts.left_out_conversation_count
    if conversation_count:
        typer.echo(f"left out: {conversation_count:,} conversations with a call that does not help", err=True)

    call_count = cleaning_counts.left_out_call_count
    answer_count = cleaning_counts.left_out_answer_count
    if call_count:
        typer.echo(
            f"left out: {call_count:,} calls with their results, and {answer_count:,} messages of the assistant "
            "that rested on no other call. What was said later may still rest on them and would be invented: "
            "`--drop conversations` leaves out whole conversations",
            err=True,
        )


PRINT_INTERVAL_SECONDS = 30.0
"""How often progress is printed where standard error is no terminal."""


class _Progress:
    """Prints the progress of tables on standard error.

    On a terminal it is one line, which is overwritten. Elsewhere a new line is printed now and then. All times are in
    seconds of the monotonic clock.
    """

    def __init__(self) -> None:
        self._table_name = ""  # the table that is being made
        self._began_at = time.monotonic()  # when the table was begun
        self._printed_at = self._began_at  # when the last line was printed

    def show_progress(self, table_output: "TableOutput", done_count: int, total_count: int) -> None:
        """Print how many units of a table are done, of how many, and how much time is left."""
        is_next_table = table_output.name != self._table_name
        if is_next_table:
            self._table_name = table_output.name
            self._began_at = time.monotonic()

        unit = table_output.stage.progress_unit
        time_left = self._format_time_left(done_count, total_count)
        line = f"{table_output.name}: {done_count:,} of {total_count:,} {unit}{time_left}"
        self._print_line(line, is_last=done_count == total_count)

    def _print_line(self, line: str, is_last: bool) -> None:
        """Print a line: on a terminal over the line before, elsewhere only if it is due.

        Args:
            line: The text.
            is_last: Whether it is the last line of its table. Then the next table gets a line of its own.
        """
        if sys.stderr.isatty():
            typer.echo(f"\r\x1b[K{line}", nl=is_last, err=True)  # back to the start of the line, and erase it
        else:
            self._print_line_if_due(line)

    def _print_line_if_due(self, line: str) -> None:
        """Print the line, unless another was printed in the last PRINT_INTERVAL_SECONDS."""
        now = time.monotonic()
        if now - self._printed_at >= PRINT_INTERVAL_SECONDS:
            self._printed_at = now
            typer.echo(line, err=True)

    def _format_time_left(self, done_count: int, total_count: int) -> str:
        """Return the time left at the pace so far, as `, 0:01:30 left`; empty before the first unit and at the end."""
        if not 0 < done_count < total_count:
            return ""
        seconds_per_unit = (time.monotonic() - self._began_at) / done_count
        seconds_left = seconds_per_unit * (total_count - done_count)
        return f", {timedelta(seconds=round(seconds_left))} left"
