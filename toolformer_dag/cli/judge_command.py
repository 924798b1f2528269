"""`judge`: whether the tool calls of recorded conversations help, and the conversations without those that do not."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from toolformer_dag.cli.terminal import Config, Force, ModelName, Profile, Set, harmless, path, settings_of
from toolformer_dag.files import UserError
from toolformer_dag.traces import Dropped

if TYPE_CHECKING:
    from toolformer_dag.traces.cleaned import Cleaned


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
    given = {"model.name": model, "traces.share": share}
    pairs = [f"{key}={value}" for key, value in given.items() if value is not None]
    settings = settings_of(config, profile, [*(set or ()), *pairs], needs_project=False)
    from toolformer_dag.model.weights import is_packaged, model_identity, model_name
    from toolformer_dag.traces.cleaned import write_cleaned
    from toolformer_dag.traces.judgement import judge_traces, refuse_other_judge, told, traces_database

    sources = source or list(settings.traces.source)
    if not sources:
        raise UserError("name a file, a folder or a data set of the hub with conversations, or set traces.source")
    names_judge = any(pair.startswith("model.name=") for pair in (*(set or ()), *pairs))
    if not names_judge:
        refuse_other_judge(settings, traces_database(settings))
    if is_packaged(model_identity(model_name(settings.model), settings.model.revision)):
        typer.echo(
            "the embedded model knows the synthetic world of the demo alone; name another judge with --model", err=True
        )
    judgement = judge_traces(settings, sources, traces_database(settings), _show)
    if out is not None:
        _say_cleaned(write_cleaned(judgement, out, drop, force), out)
    computed, reused = (judgement.losses.get(key, 0) for key in ("computed", "reused"))
    typer.echo(
        f"{len(judgement.conversations):,} conversations, {judgement.rejected:,} rejections; {computed:,} losses "
        f"computed with {judgement.tokens:,} tokens, {reused:,} reused; {judgement.database}",
        err=True,
    )
    typer.echo(harmless(told(judgement)))


def _say_cleaned(cleaned: "Cleaned", out: Path) -> None:
    """Say what was written, what was left out, and what may still rest on it."""
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


def _show(done: int, of: int) -> None:
    typer.echo(f"\r{done:,} of {of:,} calls", nl=done == of, err=True)
