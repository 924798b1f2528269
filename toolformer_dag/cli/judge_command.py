"""`judge`: find out which tool calls of recorded conversations help, and write the conversations without the others."""

import sys
import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from toolformer_dag.cli.terminal import (
    Config,
    Force,
    ModelName,
    Profile,
    Set,
    escape_controls,
    load_command_settings,
    path,
)
from toolformer_dag.files import UserError
from toolformer_dag.traces import Dropped

if TYPE_CHECKING:
    from toolformer_dag.computing.stage import TableOutput
    from toolformer_dag.settings.sections import Settings
    from toolformer_dag.traces.cleaned import Cleaned
    from toolformer_dag.traces.judgement import Judgement


def judge(
    source: Annotated[
        list[str] | None,
        typer.Argument(help="Files, folders or data sets of the hub with conversations; default: `traces.source`."),
    ] = None,
    model: ModelName = None,
    out: Annotated[
        Path | None, typer.Option(parser=path, help="Folder for the conversations in the form they came in.")
    ] = None,
    drop: Annotated[
        Dropped,
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
    force: Force = False,
    config: Config = None,
    profile: Profile = None,
    set: Set = None,
) -> None:
    """Say of every recorded tool call whether the answer rests on its result: `sql --traces "from trace_calls"`.

    No tool is run. Losses are stored in the lake, and a second `judge` computes none of them. Once a judge has written
    the file, another one replaces it only where --model names it.

    Example: toolformer-dag judge traces.jsonl --model HuggingFaceTB/SmolLM2-135M-Instruct --set model.dtype=bfloat16;
    toolformer-dag judge traces --out cleaned --drop conversations --share 0.01
    """
    if forms:
        _list_forms()
        return
    overrides = _build_overrides(set or (), model, share)
    settings = load_command_settings(config, profile, overrides, needs_project=False)
    from toolformer_dag.traces.cleaned import write_cleaned
    from toolformer_dag.traces.judgement import judged, refuse_other_judge, traces_database
    from toolformer_dag.traces.label_agreement import format_agreement_lines, label_agreement, read_labels

    sources = _choose_sources(source, settings)
    labels_of_people = read_labels(labels) if labels is not None else []
    names_judge = any(override.startswith("model.name=") for override in overrides)
    database = traces_database(settings)
    if not names_judge and not estimate:
        refuse_other_judge(settings, database)
    _warn_of_embedded_judge(settings)
    if estimate:
        _print_forecast(settings, sources)
        return
    with judged(settings, sources, database, _Progress().show) as judgement:
        if out is not None:
            _report_cleaned(write_cleaned(judgement, out, drop, force), out)
        agreement = label_agreement(judgement.database, labels_of_people) if labels_of_people else None
    _print_judgement(judgement, database)
    if agreement is not None:
        for line in format_agreement_lines(agreement):
            typer.echo(line)


def _choose_sources(named: list[str] | None, settings: "Settings") -> list[str]:
    """Return the named sources of conversations, by default those of the settings. Raises UserError without any."""
    sources = named or list(settings.traces.source)
    if not sources:
        raise UserError("name a file, a folder or a data set of the hub with conversations, or set traces.source")
    return sources


def _build_overrides(pairs: Sequence[str], model: str | None, share: float | None) -> list[str]:
    """Return the settings of `--set`, then those of `--model` and `--share`, as `model.name=VALUE`."""
    overrides = list(pairs)
    if model is not None:
        overrides.append(f"model.name={model}")
    if share is not None:
        overrides.append(f"traces.share={share}")
    return overrides


def _warn_of_embedded_judge(settings: "Settings") -> None:
    """Say on standard error where the judge is the embedded model."""
    from toolformer_dag.model.weights import is_packaged, model_name, read_model_identity

    if is_packaged(read_model_identity(model_name(settings.model), settings.model.revision)):
        typer.echo(
            "the embedded model knows the synthetic world of the demo alone; name another judge with --model", err=True
        )


def _print_judgement(judgement: "Judgement", database: Path) -> None:
    """Print which calls help, and on standard error what judging took. `database`: the file with the verdicts."""
    computed = judgement.losses["computed"]
    reused = judgement.losses["reused"]
    typer.echo(
        f"{judgement.conversations:,} conversations, {judgement.rejected:,} rejections; {computed:,} losses computed "
        f"with {judgement.tokens:,} tokens, {reused:,} reused; {database}",
        err=True,
    )
    typer.echo(escape_controls(judgement.summary))


def _list_forms() -> None:
    """Print each form of conversations with its source and an example, a record per line."""
    from toolformer_dag.conversations.forms import ALL_FORMS
    from toolformer_dag.conversations.forms.form import format_example

    for form in ALL_FORMS:
        typer.echo(f"{form.name}\n  {form.source}")
        for line in format_example(form).splitlines():
            typer.echo(f"  {line}")
        typer.echo()


def _print_forecast(settings: "Settings", sources: Sequence[str]) -> None:
    """Judge a sample of the calls, and print what the others will cost."""
    from toolformer_dag.cli.judge_forecast import format_judging_forecast
    from toolformer_dag.traces.judgement import build_conversation_plan
    from toolformer_dag.traces.judging_forecast import forecast_judging

    plan = build_conversation_plan(settings, sources)
    forecast = forecast_judging(plan, _Progress().show)
    typer.echo(format_judging_forecast(forecast, plan.settings))


def _report_cleaned(cleaned: "Cleaned", out: Path) -> None:
    """Say on standard error which files were written and what they leave out."""
    for name, lines in cleaned.lines.items():
        typer.echo(f"{out}/{name}: {lines:,} lines", err=True)
    if cleaned.conversations:
        typer.echo(f"left out: {cleaned.conversations:,} conversations with a call that does not help", err=True)
    if cleaned.calls:
        typer.echo(
            f"left out: {cleaned.calls:,} calls with their results, and {cleaned.answers:,} messages of the assistant "
            "that rested on no other call. What was said later may still rest on them and would be invented: "
            "`--drop conversations` leaves out whole conversations",
            err=True,
        )


PRINT_EVERY_SECONDS = 30.0
"""How often progress is printed where standard error is no terminal."""


class _Progress:
    """Prints the progress of tables: on a terminal in a line that is overwritten, elsewhere in a new line now and then.

    Times are in seconds of the monotonic clock.
    """

    def __init__(self) -> None:
        self._table = ""  # the table that is being made
        self._began = time.monotonic()  # when the table was begun
        self._printed = self._began  # when the last line was printed

    def show(self, table: "TableOutput", done: int, total: int) -> None:
        """Print that `done` of `total` units of a table are done."""
        if table.name != self._table:
            self._table = table.name
            self._began = time.monotonic()
        time_left = self._format_time_left(done, total)
        line = f"{table.name}: {done:,} of {total:,} {table.stage.unit}{time_left}"
        self._print(line, is_last=done == total)

    def _print(self, line: str, is_last: bool) -> None:
        """Print a line: on a terminal over the line before, elsewhere now and then. is_last: of its table."""
        if sys.stderr.isatty():
            typer.echo(f"\r\x1b[K{line}", nl=is_last, err=True)
        else:
            self._print_now_and_then(line)

    def _print_now_and_then(self, line: str) -> None:
        """Print the line, unless another was printed in the last PRINT_EVERY_SECONDS."""
        now = time.monotonic()
        if now - self._printed >= PRINT_EVERY_SECONDS:
            self._printed = now
            typer.echo(line, err=True)

    def _format_time_left(self, done: int, total: int) -> str:
        """Return the time left at the pace so far, as `, 0:01:30 left`; empty before the first unit and at the end."""
        if not 0 < done < total:
            return ""
        seconds_per_unit = (time.monotonic() - self._began) / done
        seconds_left = timedelta(seconds=round(seconds_per_unit * (total - done)))
        return f", {seconds_left} left"
