"""The commands that start Dagster: `run`, `stale` and `ui`."""

import os
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Annotated

import typer

from toolformer_dag.cli.terminal import (
    Config,
    Profile,
    Set,
    Shards,
    load_checked_settings,
    load_command_settings,
    with_config,
)
from toolformer_dag.files import UserError

if TYPE_CHECKING:
    from toolformer_dag.assets.running import Step
    from toolformer_dag.cli.project import Project, RunReport
    from toolformer_dag.computing.plan import Plan


Round = Annotated[
    int | None,
    typer.Option(
        "--round",
        min=1,
        help="Run the rounds up to this one; each after the first annotates the texts in which the one before kept no "
        "call, with its checkpoint.",
    ),
]
First = Annotated[int | None, typer.Option(min=1, help="Take only the first N shards through the line, for a look.")]
Again = Annotated[list[str] | None, typer.Option(help="Make the rows of this shard anew, from its file on.")]


def run(
    config: Config = None,
    profile: Profile = None,
    shards: Shards = None,
    set: Set = None,
    first: First = None,
    again: Again = None,
    round: Round = None,
    train: Annotated[bool, typer.Option("--train", help="Finetune and evaluate after --first too.")] = False,
    estimate: Annotated[
        bool,
        typer.Option("--estimate", help="Annotate a sample of the texts, forecast what the rest will cost, and stop."),
    ] = False,
) -> None:
    """Materialize everything that is missing or stale, training and evaluation included.

    With --first it ends with the data: what was kept, how much of that by chance, what all shards would cost.

    Example: toolformer-dag run --profile embedded --shards 'crawl/en_head_*.json.gz' --set tools.calculator.tau_f=0.8
    """
    project = open_project(config, profile, shards, set, first, round)
    if estimate:
        from toolformer_dag.cli.forecast import forecast

        _warn_of_names(project.plan)
        typer.echo(forecast(project.plan))
        return
    report = completed(project, again or (), training=train or first is None)
    if report.failed:
        report.raise_for_failures()
    typer.echo(summary(report))
    if first is not None:
        from toolformer_dag.cli.run_reports import format_first_look

        options = (
            _format_option("--config", [config]) + _format_option("--profile", [profile]) + _format_option("--set", set)
        )
        typer.echo(format_first_look(project.plan, first, options=options, corpus=_format_option("--shards", shards)))
    elif project.plan.start:
        from toolformer_dag.cli.run_reports import format_round_report

        typer.echo(with_config(format_round_report(project.plan)))
    report.raise_for_failures()  # too few texts to train on


def _format_option(option: str, values: Sequence[object] | None) -> str:
    """Return an option as it has to be typed again, ` --set a=1 --set b=2`; empty without a value."""
    return "".join(f" {option} {quote(str(value))}" for value in values or () if value)


def stale(
    run: Annotated[bool, typer.Option("--run", help="Run what is stale, then only what truly changed.")] = False,
    why: Annotated[bool, typer.Option("--why", help="Say what changed since the stored rows were made.")] = False,
    config: Config = None,
    profile: Profile = None,
    shards: Shards = None,
    set: Set = None,
    first: First = None,
    again: Again = None,
) -> None:
    """List the stale assets, one key per line.

    `--run` leaves training and evaluation to `toolformer-dag run`: that is a person's decision.

    Example: toolformer-dag stale --why
    """
    if again and not run:
        raise UserError(f"--again {again[0]}: only --run makes a shard anew; write `stale --run --again {again[0]}`")
    project = open_project(config, profile, shards, set, first)
    if run:
        _run_stale(project, again or ())
    else:
        _list_stale(project, why)


def _run_stale(project: "Project", again: Sequence[str]) -> None:
    """Run what is stale, without training, and name the assets that were made."""
    report = completed(project, again, training=False)
    for name in report.ran:
        typer.echo(f"ran {name}")
    report.raise_for_failures()
    typer.echo(summary(report))


def _list_stale(project: "Project", why: bool) -> None:
    """Print the stale assets, each with the reasons if `why` is set."""
    outdated = project.stale()
    for name, reasons in outdated.items():
        typer.echo(name)
        if why:
            for reason in reasons.lines:
                typer.echo(f"    {reason}")
    if not outdated:
        typer.echo("Nothing is stale.")


def summary(report: "RunReport") -> str:
    """Return how many assets ran and what that cost."""
    if not report.ran:
        return "Everything is fresh: nothing ran."
    return f"{len(report.ran)} assets ran; {report.spent}."


def open_project(
    config: Path | None,
    profile: str | None,
    shards: list[str] | None,
    pairs: list[str] | None,
    first: int | None,
    round: int | None = None,
) -> "Project":
    """Return the project of the options, once its settings and tools load. Raises SettingsError, ToolError, ModelError.

    `pairs`: settings as `--set` takes them. Everything heavy is imported after these were checked.
    """
    overrides = list(pairs or ())
    if first is not None:
        overrides.append(f"corpus.first={first}")
    if round is not None:
        overrides.append(f"rounds.count={round}")
    settings = load_checked_settings(config, profile, overrides, shards)
    from toolformer_dag.cli.project import Project

    return Project.of(settings)


def completed(
    project: "Project",
    again: Sequence[str],
    training: bool,
    after_step: "Callable[[Step], str | None]" = lambda step: None,
) -> "RunReport":
    """Run a project with its progress on standard error, and say what was damaged, unfinished, chosen and kept.

    again: shards that are made anew. after_step: returns what to print after a step.
    """
    from toolformer_dag.cli.run_display import shown

    _withdraw_shards(project.plan, again)
    _warn_of_names(project.plan)
    others = project.others()
    if others:
        typer.echo(f"{', '.join(others)} is running; steps that would compute the same rows wait for it.", err=True)
    with shown(after_step) as sink:
        report = project.run(training, sink)
    _print_incidents(report)
    _print_thresholds(project.plan)
    return report


def _print_incidents(report: "RunReport") -> None:
    """Print on standard error the damaged files, and what unfinished runs and a failed run have spent."""
    from toolformer_dag.computing.spending import Spent

    for damaged in report.set_aside:
        typer.echo(f"damaged and made again: {damaged.path} {damaged.reason}", err=True)
    if report.unfinished != Spent():
        typer.echo(f"Runs before this one that did not finish: {report.unfinished}.", err=True)
    if report.failed:
        typer.echo(f"This run: {report.spent}.", err=True)


def _print_thresholds(plan: "Plan") -> None:
    """Print the thresholds that were chosen, and on standard error the tools that kept no call."""
    from toolformer_dag.lake.session import session
    from toolformer_dag.pipeline.chance import describe_thresholds_of_lanes, explain_lanes_without_calls

    with session():
        for line in describe_thresholds_of_lanes(plan):
            typer.echo(with_config(line))
        for line in explain_lanes_without_calls(plan):
            typer.echo(with_config(line), err=True)


def _warn_of_names(plan: "Plan") -> None:
    """Warn of tools whose calls the embedded model hardly writes."""
    from toolformer_dag.pipeline.proposals import list_rare_call_warnings

    for line in list_rare_call_warnings(plan, plan.lanes):
        typer.echo(f"warning: {line}.", err=True)


def _withdraw_shards(plan: "Plan", shards: Sequence[str]) -> None:
    """Remove the parts of these shards from every table of all rounds. Raises UserError for an unknown shard."""
    from toolformer_dag.computing.update import withdraw
    from toolformer_dag.pipeline.stages import list_table_outputs

    for shard in shards:
        if shard not in plan.shards:
            raise UserError(f"--again {shard}: no such shard; `select distinct shard from documents` names them")
    for project in plan.projects:
        for shard in shards:
            withdraw(list_table_outputs(project), shard)


def ui(
    port: Annotated[int, typer.Option(min=1, max=65535, help="Port of the page on 127.0.0.1.")] = 3000,
    config: Config = None,
) -> None:
    """Start the Dagster UI and stop it with Ctrl-C; SIGTERM stops it alike. Runs that were killed are ended.

    Example: toolformer-dag ui --port 3000
    """
    from toolformer_dag.cli.project import open_shared_instance
    from toolformer_dag.cli.web_server import serve
    from toolformer_dag.resources.live_runs import end_dead_runs, end_dead_runs_regularly

    root = load_command_settings(config, profile=None, pairs=None).root
    instance = open_shared_instance(root)  # opened here: webserver and daemon would both make its databases
    end_dead_runs(instance)
    _interrupt_at_signals()
    try:
        with end_dead_runs_regularly(instance):
            exit_code = serve(root, port, _build_environment(root, config))
    except KeyboardInterrupt:
        exit_code = 0
    raise typer.Exit(exit_code)


def _interrupt_at_signals() -> None:
    """Let Ctrl-C and SIGTERM raise KeyboardInterrupt; background shells start this with SIGINT ignored."""
    for stop in (signal.SIGINT, signal.SIGTERM):
        signal.signal(stop, signal.default_int_handler)


def _build_environment(root: Path, config: Path | None) -> dict[str, str]:
    """Return the environment of Dagster's processes, which names its home and the settings file."""
    from toolformer_dag.cli.project import home
    from toolformer_dag.settings.settings_file import settings_file

    environment = os.environ | {"DAGSTER_HOME": str(home(root))}
    file = settings_file(config)
    if file.exists():
        environment["TOOLFORMER_CONFIG"] = str(file)
    return environment
