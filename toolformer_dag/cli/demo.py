"""`toolformer-dag demo`: the whole method on the small web, and what came out of it."""

from pathlib import Path
from typing import TYPE_CHECKING

import typer

from toolformer_dag.cli.options import Config, Set, settings_of

if TYPE_CHECKING:
    import polars as pl

    from toolformer_dag.settings.settings import Settings

FUNNEL = """
pivot (select tool, step, what, count from funnel)
on step in (1, 2, 3, 4, 5, 6, 7, 9) using sum(count) group by tool order by tool
"""
STEPS = ("tool", "documents", "texts", "samples", "calls", "with a result", "that help", "kept", "texts in C*")
TABLE_2 = """
pivot (select tool, tau_f, examples from filter_statistics where tau_f in (0.5, 1.0, 2.0))
on tau_f using coalesce(sum(examples), 0) group by tool order by tool
"""
CHANCE = """
pivot (
    select tool, tau_f, calls || ' (' || coalesce(by_chance::varchar, 'not measured') || ')' as kept
    from swapped_statistics where tau_f in (0.5, 1.0, 2.0)
)
on tau_f using any_value(kept) group by tool order by tool
"""
EXAMPLES = """
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
"""
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
    from toolformer_dag.cli.run import run

    run(config=config, profile="embedded", shards=None, set=set)
    settings = settings_of(config, "embedded", set)
    for title, rows in _tables(settings):
        typer.echo(f"\n{title}")
        typer.echo(_plain(rows))
    typer.echo("\n" + NEXT.format(bin=Path(".venv/bin")))


def _tables(settings: "Settings") -> "list[tuple[str, pl.DataFrame]]":
    from toolformer_dag.evaluation.accuracy_tables import read_accuracy
    from toolformer_dag.storage.warehouse import query

    warehouse = settings.paths.warehouse
    return [
        ("Funnel: what is left after each stage", _named(query(warehouse, FUNNEL))),
        ("Table 2: examples with calls at tau_f 0.5 / 1.0 / 2.0", query(warehouse, TABLE_2)),
        ("Calls kept at tau_f 0.5 / 1.0 / 2.0 (by chance: with results of other documents)", query(warehouse, CHANCE)),
        ("Three kept and three rejected calls, with their losses", query(warehouse, EXAMPLES)),
        ("Held-out questions answered right, in per cent (95 % interval)", read_accuracy(settings.paths.lake)),
    ]


def _named(funnel: "pl.DataFrame") -> "pl.DataFrame":
    return funnel.rename(dict(zip(funnel.columns, STEPS, strict=True)))


def _plain(rows: "pl.DataFrame") -> str:
    import polars as pl

    with pl.Config(
        tbl_rows=-1,
        tbl_cols=-1,
        fmt_str_lengths=44,
        tbl_hide_dataframe_shape=True,
        tbl_width_chars=160,
        tbl_hide_column_data_types=True,
        tbl_formatting="ASCII_HORIZONTAL_ONLY",
    ):
        return str(rows)
