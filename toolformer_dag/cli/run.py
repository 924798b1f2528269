"""The commands that start Dagster: `run`, `stale` and `ui`."""

import os
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Annotated

import typer

from toolformer_dag.cli.terminal import (
    ConfigOption,
    ProfileOption,
    SetOption,
    ShardsOption,
    add_config_option,
    load_checked_settings,
    load_command_settings,
)
from toolformer_dag.files import UserError

if TYPE_CHECKING:
    from toolformer_dag.assets.running import Step
    from toolformer_dag.cli.project import Project, RunReport
    from toolformer_dag.computing.plan import Plan


RoundOption = Annotated[
    int | None,
    typer.Option(
        "--round",
        min=1,
        help="Run the rounds up to this one; each after the first annotates the texts in which the one before kept no "
        "call, with its checkpoint.",
    ),
]
FirstOption = Annotated[
    int | None, typer.Option(min=1, help="Take only the first N shards through the line, for a look.")
]
AgainOption = Annotated[list[str] | None, typer.Option(help="Make the rows of this shard anew, from its file on.")]


def run(
    config: ConfigOption = None,
    profile: ProfileOption = None,
    shards: ShardsOption = None,
    set: SetOption = None,
    first: FirstOption = None,
    again: AgainOption = None,
    round: RoundOption = None,
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
        from toolformer_dag.cli.forecast import forecast_cost_as_table

        _warn_of_rare_tool_names(project.plan)
        typer.echo(forecast_cost_as_table(project.plan))
        return

    includes_training = train or first is None
    report = run_project(project, again or (), includes_training)
    if report.failure_by_asset:
        report.raise_for_failures()
    typer.echo(format_run_summary(report))

    if first is not None:
        options = [
            _format_option("--config", [config]),
            _format_option("--profile", [profile]),
            _format_option("--set", set),
        ]
        _print_first_look(project.plan, first, "".join(options), _format_option("--shards", shards))
    elif project.plan.previous_plan:
        _print_round_report(project.plan)
    report.raise_for_failures()  # too few texts to train on


def _print_first_look(plan: "Plan", first_shard_count: int, command_options: str, shards_option: str) -> None:
    """Print the report of `run --first N`: what was kept, what all shards would cost, and how to go on.

    Args:
        plan: The plan of the first shards.
        first_shard_count: N.
        command_options: The options of the command, to repeat them in the commands to go on with. A space stands
            before each.
        shards_option: Its option `--shards`, to repeat it too. Empty if it was not typed.
    """
    from toolformer_dag.cli.run_reports import format_first_look

    typer.echo(format_first_look(plan, first_shard_count, command_options, shards_option))


def _print_round_report(plan: "Plan") -> None:
    """Print the report of a later round of annotation: the calls kept so far, and each round's right answers."""
    from toolformer_dag.cli.run_reports import format_round_report

    typer.echo(add_config_option(format_round_report(plan)))


def _format_option(option_name: str, values: Sequence[object] | None) -> str:
    """Format an option as it has to be typed again: ` --set a=1 --set b=2`. Empty if it has no value."""
    return "".join(f" {option_name} {quote(str(value))}" for value in values or () if value)


def stale(
    run: Annotated[bool, typer.Option("--run", help="Run what is stale, then only what truly changed.")] = False,
    why: Annotated[bool, typer.Option("--why", help="Say what changed since the stored rows were made.")] = False,
    config: ConfigOption = None,
    profile: ProfileOption = None,
    shards: ShardsOption = None,
    set: SetOption = None,
    first: FirstOption = None,
    again: AgainOption = None,
) -> None:
    """List the stale assets, one key per line.

    `--run` leaves training and evaluation to `toolformer-dag run`: that is a person's decision.

    Example: toolformer-dag stale --why
    """
    if again and not run:
        raise UserError(f"--again {again[0]}: only --run makes a shard anew; write `stale --run --again {again[0]}`")
    project = open_project(config, profile, shards, set, first)
    if run:
        _run_stale_assets(project, again or ())
    else:
        _print_stale_assets(project, why)


def _run_stale_assets(project: "Project", shards_to_remake: Sequence[str]) -> None:
    """Make what is stale, without training, and print the names of the assets that were made.

    Args:
        project: The project.
        shards_to_remake: The names of shards whose rows are made anew, stale or not.

    Raises:
        UserError: An asset failed, or there is no such shard.
    """
    report = run_project(project, shards_to_remake, includes_training=False)
    for name in report.made_assets:
        typer.echo(f"ran {name}")
    report.raise_for_failures()
    typer.echo(format_run_summary(report))


def _print_stale_assets(project: "Project", shows_reasons: bool) -> None:
    """Print the name of each stale asset, with the reasons below it if `shows_reasons` is set."""
    reasons_by_asset = project.list_stale_assets()
    if not reasons_by_asset:
        typer.echo("Nothing is stale.")
        return

    for asset_name, reasons in reasons_by_asset.items():
        typer.echo(asset_name)
        if shows_reasons:
            for reason in reasons.lines:
                typer.echo(f"    {reason}")


def format_run_summary(run_report: "RunReport") -> str:
    """Return a sentence that says how many assets were made and what that cost."""
    if not run_report.made_assets:
        return "Everything is fresh: nothing ran."
    return f"{len(run_report.made_assets)} assets ran; {run_report.spending}."


def open_project(
    config_file: Path | None,
    profile_name: str | None,
    shard_patterns: list[str] | None,
    override_pairs: list[str] | None,
    first_shard_count: int | None,
    round_count: int | None = None,
) -> "Project":
    """Load the settings and the tools, and return the project.

    Mistakes in them are found before anything heavy is imported.

    Args:
        config_file: The settings file. None for the usual one.
        profile_name: The profile, such as "embedded". None for that of the settings file.
        shard_patterns: Paths or patterns of the corpus. None for those of the settings.
        override_pairs: Settings as `--set` takes them, such as "tools.calculator.tau_f=0.8".
        first_shard_count: Take only so many shards. None to take all.
        round_count: Run the rounds of annotation up to this one. None for the number in the settings.

    Raises:
        SettingsError: A setting is wrong.
        ToolError: A tool cannot be loaded.
        ModelError: The model is missing or unusable.
    """
    overrides = list(override_pairs or ())
    if first_shard_count is not None:
        overrides.append(f"corpus.first={first_shard_count}")
    if round_count is not None:
        overrides.append(f"rounds.count={round_count}")
    settings = load_checked_settings(config_file, profile_name, overrides, shard_patterns)
    from toolformer_dag.cli.project import Project

    return Project.from_settings(settings)


def run_project(
    project: "Project",
    shards_to_remake: Sequence[str],
    includes_training: bool,
    describe_ended_step: "Callable[[Step], str | None]" = lambda step: None,
) -> "RunReport":
    """Run a project, and print its progress and what the user should know about it.

    Progress and warnings go to standard error, the thresholds that were chosen to standard output.

    Args:
        project: The project.
        shards_to_remake: The names of shards whose rows are made anew, stale or not.
        includes_training: Whether to finetune and evaluate too.
        describe_ended_step: Returns a line to print after a step has ended, or None for nothing.

    Raises:
        UserError: There is no such shard, or finetuning cannot run here.
    """
    from toolformer_dag.cli.run_display import show_steps

    _withdraw_shards(project.plan, shards_to_remake)
    _warn_of_rare_tool_names(project.plan)

    running_jobs = project.list_running_jobs()
    if running_jobs:
        job_names = ", ".join(running_jobs)
        typer.echo(f"{job_names} is running; steps that would compute the same rows wait for it.", err=True)

    with show_steps(describe_ended_step) as show_step:
        run_report = project.run_rounds(includes_training, show_step)

    _print_run_incidents(run_report)
    _print_chosen_thresholds(project.plan)
    return run_report


def _print_run_incidents(run_report: "RunReport") -> None:
    """Print on standard error which files were damaged, what unfinished runs have spent, and what a failed run has."""
    from toolformer_dag.computing.spending import Spent

    for damaged in run_report.damaged_files:
        typer.echo(f"damaged and made again: {damaged.path} {damaged.reason}", err=True)
    if run_report.unfinished_spending != Spent():
        typer.echo(f"Runs before this one that did not finish: {run_report.unfinished_spending}.", err=True)
    if run_report.failure_by_asset:
        typer.echo(f"This run: {run_report.spending}.", err=True)


def _print_chosen_thresholds(plan: "Plan") -> None:
    """Print the threshold that was chosen for each tool, and on standard error the tools that kept no call.

    A threshold is chosen if the settings name none: so that few of the kept calls are kept by chance.
    """
    from toolformer_dag.lake.session import enter_session
    from toolformer_dag.pipeline.chance import describe_thresholds_of_lanes, explain_lanes_without_calls

    with enter_session():  # inside, the lake's records are read only once
        for line in describe_thresholds_of_lanes(plan):
            typer.echo(add_config_option(line))
        for line in explain_lanes_without_calls(plan):
            typer.echo(add_config_option(line), err=True)


def _warn_of_rare_tool_names(plan: "Plan") -> None:
    """Print a warning for each tool whose calls the embedded model hardly ever writes."""
    from toolformer_dag.pipeline.proposals import list_rare_call_warnings

    for line in list_rare_call_warnings(plan, plan.lanes):
        typer.echo(f"warning: {line}.", err=True)


def _withdraw_shards(plan: "Plan", shards: Sequence[str]) -> None:
    """Remove the rows of some shards from every table of all rounds, so that a run makes them anew.

    A shard is one file of the corpus, and one part of each table.

    Raises:
        UserError: There is no shard of such a name. Then nothing is removed.
    """
    from toolformer_dag.computing.update import withdraw_shard
    from toolformer_dag.pipeline.stages import list_table_outputs

    for shard in shards:
        if shard not in plan.shards_by_name:
            raise UserError(f"--again {shard}: no such shard; `select distinct shard from documents` names them")

    for round_plan in plan.plans_by_round:
        for shard in shards:
            withdraw_shard(list_table_outputs(round_plan), shard)


def ui(
    port: Annotated[int, typer.Option(min=1, max=65535, help="Port of the page on 127.0.0.1.")] = 3000,
    config: ConfigOption = None,
) -> None:
    """Start the Dagster UI and stop it with Ctrl-C; SIGTERM stops it alike. Runs that were killed are ended.

    Example: toolformer-dag ui --port 3000
    """
    from toolformer_dag.cli.project import open_shared_instance
    from toolformer_dag.cli.web_server import serve_dagster_ui
    from toolformer_dag.resources.live_runs import end_dead_runs, end_dead_runs_regularly

    root = load_command_settings(config, profile_name=None, override_pairs=None).root
    # The instance is opened here first, because webserver and daemon would both make its databases.
    instance = open_shared_instance(root)
    end_dead_runs(instance)

    _interrupt_at_signals()
    try:
        with end_dead_runs_regularly(instance):
            exit_code = serve_dagster_ui(root, port, _build_dagster_environment(root, config))
    except KeyboardInterrupt:
        exit_code = 0
    raise typer.Exit(exit_code)


def _interrupt_at_signals() -> None:
    """Make Ctrl-C (SIGINT) and SIGTERM raise KeyboardInterrupt in this process.

    A shell starts a command in the background with SIGINT ignored, so this is not always the case.
    """
    for signal_number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signal_number, signal.default_int_handler)


def _build_dagster_environment(root: Path, config_file: Path | None) -> dict[str, str]:
    """Return the environment variables for Dagster's processes, which name its home folder and the settings file.

    Args:
        root: The folder of the project.
        config_file: The settings file of `--config`. None for the usual one.
    """
    from toolformer_dag.cli.project import get_or_create_dagster_home
    from toolformer_dag.settings.settings_file import resolve_settings_path

    dagster_home = get_or_create_dagster_home(root)
    environment = os.environ | {"DAGSTER_HOME": str(dagster_home)}

    settings_file = resolve_settings_path(config_file)
    if settings_file.exists():
        environment["TOOLFORMER_CONFIG"] = str(settings_file)
    return environment
