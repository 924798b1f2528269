"""The commands that start Dagster: `run`, `stale`, `demo` and `ui`."""

import os
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from toolformer_dag.cli.terminal import Config, Profile, Set, Shards, settings_of
from toolformer_dag.files import UserError

if TYPE_CHECKING:
    from toolformer_dag.cli.project import Project, RunReport


First = Annotated[int | None, typer.Option(min=1, help="Take only the first N shards through the line, for a look.")]
Again = Annotated[list[str] | None, typer.Option(help="Make the rows of this shard anew, from its file on.")]


def run(
    config: Config = None,
    profile: Profile = None,
    shards: Shards = None,
    set: Set = None,
    first: First = None,
    again: Again = None,
    estimate: Annotated[
        bool,
        typer.Option("--estimate", help="Annotate a sample of the texts, forecast what the rest will cost, and stop."),
    ] = False,
) -> None:
    """Materialize everything that is missing or stale, training and evaluation included.

    Example: toolformer-dag run --profile embedded --shards 'crawl/en_head_*.json.gz' --set tools.calculator.tau_f=0.8
    """
    project = _project(config, profile, shards, set, first)
    if estimate:
        from toolformer_dag.cli.forecast import forecast

        typer.echo(forecast(project.plan))
        return
    report = _run(project, again or (), training=True)
    report.raise_for_failures()
    typer.echo(f"{len(report.ran)} assets ran; {report.spent}." if report.ran else "Everything is fresh: nothing ran.")


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
    project = _project(config, profile, shards, set, first)
    if run:
        report = _run(project, again or (), training=False)
        for name in report.ran:
            typer.echo(f"ran {name}")
        report.raise_for_failures()
        return
    found = project.stale()
    for name, reasons in found.items():
        typer.echo(name)
        for reason in reasons.lines if why else ():
            typer.echo(f"    {reason}")
    if not found:
        typer.echo("Nothing is stale.")


def _project(
    config: Path | None, profile: str | None, shards: list[str] | None, pairs: list[str] | None, first: int | None
) -> "Project":
    from toolformer_dag.cli.project import Project

    limit = [] if first is None else [f"corpus.first={first}"]
    return Project.of(settings_of(config, profile, [*(pairs or ()), *limit], shards))


def _run(project: "Project", again: Sequence[str], training: bool) -> "RunReport":
    from toolformer_dag.cli.run_display import shown
    from toolformer_dag.lake.session import session
    from toolformer_dag.pipeline.chance import kept_nothing, thresholds_told
    from toolformer_dag.pipeline.spending import Spent
    from toolformer_dag.pipeline.stages import table_outputs
    from toolformer_dag.pipeline.update import withdraw

    for shard in again:
        if shard not in project.plan.shards:
            raise UserError(f"--again {shard}: no such shard; `select distinct shard from documents` names them")
    for shard in again:
        withdraw(table_outputs(project.plan), shard)
    if others := project.others():
        typer.echo(f"{', '.join(others)} is running; steps that would compute the same rows wait for it.", err=True)
    with shown() as sink:
        report = project.run(training, sink)
    for damaged in report.set_aside:
        typer.echo(f"damaged and made again: {damaged.path} {damaged.reason}", err=True)
    if report.unfinished != Spent():
        typer.echo(f"Runs before this one that did not finish: {report.unfinished}.", err=True)
    if report.failed:
        typer.echo(f"This run: {report.spent}.", err=True)
    with session():
        for line in thresholds_told(project.plan):
            typer.echo(line)
        for line in kept_nothing(project.plan):
            typer.echo(line, err=True)
    return report


TABLES = {
    "Funnel: what is left after each stage": """
select tool, "1" as documents, "2" as texts, "3" as samples, "4" as calls, "5" as "with a result", "6" as "not ahead",
       "7" as "that help", "8" as kept, "10" as "texts in C*"
from (
    pivot (select tool, step, count from funnel)
    on step in (1, 2, 3, 4, 5, 6, 7, 8, 10) using sum(count) group by tool
) order by tool
""",
    "Table 2: examples with calls at tau_f 0.5 / 1.0 / 2.0": """
pivot (select tool, tau_f, examples from filter_statistics where tau_f in (0.5, 1.0, 2.0))
on tau_f using sum(examples) group by tool order by tool
""",
    "Calls kept at tau_f 0.5 / 1.0 / 2.0 (by chance, with results of other documents)": """
pivot (
    select tool, tau_f, places, calls || case
        when swaps = 0 then ' (not measured)'
        when too_few_swaps then ' (too few swaps to tell)'
        else format(' ({}, {}-{})', by_chance, by_chance_low, by_chance_high)
    end as kept
    from swapped_statistics where tau_f in (0.5, 1.0, 2.0)
)
on tau_f using any_value(kept) group by tool, places order by tool
""",
    "The smallest tau_f at which at most 5 % of the kept calls are kept by chance": """
select tool, places, swapped, round(tau_f, 3) as tau_f, kept, round(100 * fdr, 1) as "% by chance",
       round(100 * fdr_high, 1) as "at most (95 %)",
       coalesce('about ' || swaps_needed || ' swapped places would do', '') as note
from chance_thresholds where by_chance = 0.05 order by tool
""",
    "Three kept and three rejected calls, with their losses": """
with judged as (
    select loss.*, kept.tool is not null as kept
    from loss_deltas as loss left join filtered_calls as kept using (tool, digest, segment, position, sample)
        join lanes using (tool)
    where kept.tool is not null or loss.delta < lanes.tau_f
), ranked as (
    select *, row_number() over (partition by tool, kept order by hash(digest, position, sample)) as number from judged
)
select kept, tool, input, left(result, 40) as result, round(loss_empty, 2) as "L(empty)", round(loss_call, 2) as "L(c)",
       round(loss_result, 2) as "L(c, r)", round(delta, 2) as delta
from ranked where number = 1 qualify row_number() over (partition by kept order by hash(digest, position)) <= 3
order by kept desc, delta desc
""",
}
"""The tables of `demo`, by title, as queries over the warehouse."""
NEXT = """Where to go next
  make ui                                        the asset graph, its plots and its runs: http://127.0.0.1:3000
  {bin}/toolformer-dag sql "from filter_statistics"
  {bin}/toolformer-dag sql "from kept_at(0.8)"
  change tau_f under [tools.calculator] in toolformer.toml, then {bin}/toolformer-dag stale --run
  {bin}/toolformer-dag run --shards 'my/ccnet/*.json.gz'"""


def demo(config: Config = None, set: Set = None) -> None:
    """Run the whole line with the embedded profile, then print its tables. A second time nothing runs.

    Example: toolformer-dag demo
    """
    from toolformer_dag.cli.query_results import drawn
    from toolformer_dag.evaluation.measurements import read_accuracy
    from toolformer_dag.lake.table import Lake
    from toolformer_dag.lake.warehouse import query

    run(config=config, profile="embedded", shards=None, set=set)
    paths = settings_of(config, "embedded", set).paths
    tables = {title: query(paths.warehouse, text) for title, text in TABLES.items()}
    tables["Held-out questions answered right, in per cent (95 % interval)"] = read_accuracy(Lake.of(paths))
    for title, rows in tables.items():
        typer.echo(f"\n{title}")
        typer.echo(drawn(rows, 44, 160, tbl_hide_column_data_types=True, tbl_formatting="ASCII_HORIZONTAL_ONLY"))
    typer.echo("\n" + NEXT.format(bin=Path(".venv/bin")))


def ui(
    port: Annotated[int, typer.Option(min=1, max=65535, help="Port of the page on 127.0.0.1.")] = 3000,
    config: Config = None,
) -> None:
    """Start the Dagster UI and stop it with Ctrl-C; SIGTERM stops it alike. Runs that were killed are ended first.

    Example: toolformer-dag ui --port 3000
    """
    from toolformer_dag.cli.project import home, shared_instance
    from toolformer_dag.cli.web_server import serve
    from toolformer_dag.resources.live_runs import end_dead_runs
    from toolformer_dag.settings.settings_file import settings_file

    root = settings_of(config, None, None).root
    end_dead_runs(shared_instance(root))  # opened here: webserver and daemon would both make its databases
    for stop in (signal.SIGINT, signal.SIGTERM):  # a shell that starts this with `&` hands on an ignored Ctrl-C
        signal.signal(stop, signal.default_int_handler)
    file = settings_file(config)
    named = {"TOOLFORMER_CONFIG": str(file)} if file.exists() else {}
    try:
        code = serve(root, port, os.environ | named | {"DAGSTER_HOME": str(home(root))})
    except KeyboardInterrupt:
        code = 0
    raise typer.Exit(code)
