"""The reports at the end of `run --first N` and `run --round N`: what was sampled and kept, and what to do next."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import polars as pl

from toolformer_dag.cli.query_results import drawn
from toolformer_dag.computing.plan import Plan
from toolformer_dag.evaluation.measurements import ACCURACY, read_accuracy
from toolformer_dag.lake.warehouse import query
from toolformer_dag.training.checkpoint_outputs import TextCounts, count_training_texts, explain_too_few_to_train
from toolformer_dag.training.checkpoints import checkpoints

Stamps = Mapping[str, Mapping[str, Any]]
"""By shard: what identifies its content."""

LANES = """
with counts as (pivot (select tool, step, count from funnel) on step in (2, 4, 5, 8) using sum(count) group by tool)
select tool, "2" as texts, "4" as calls, "5" as "with a result", coalesce(places, 0) as places, tau_f, "8" as kept,
       case when coalesce(swaps, 0) = 0 then 'not measured'
            when too_few_swaps then 'too few swaps to tell'
            else format('{} ({}-{})', by_chance, by_chance_low, by_chance_high)
       end as "by chance (95 %)"
from lanes join counts using (tool) left join swapped_statistics using (tool, tau_f) order by lanes.rowid
"""
BY_CHANCE = """
select tool, calls, by_chance, by_chance_low as low, by_chance_high as high
from lanes join swapped_statistics using (tool, tau_f)
where swaps > 0 and not too_few_swaps and calls > 0 and by_chance_high >= calls
order by lanes.rowid
"""
"""The tools whose kept calls may all be kept by chance, by the 95 % interval."""
ECHOES = """
select tool, count(*) as calls, count(*) filter (loss_minus - loss_plus >= tau_f) as gaining,
       count(*) filter (delta >= tau_f) as gaining_over_echo
from eligible join lanes using (tool) where echo is not null group by tool order by tool
"""
SPENT = "select stage, sum(tokens)::bigint as tokens, sum(seconds) as seconds from costs group by stage"
NEXT = """Where to go next
  toolformer-dag explore{options}              every call in its text, and thresholds to drag
  toolformer-dag sql sweep{options}            what each tau_f keeps, and how much of that by chance
  toolformer-dag run{first} --train{options}{corpus}   finetune on these shards
  toolformer-dag run{options}{corpus}                  all shards, then finetune and evaluate"""
NEXT_ROUND = """Where to go next
  toolformer-dag sql sweep --set rounds.count={round}    the rows of the rounds so far; without it those of round 1
  toolformer-dag run --round {next}                      the texts in which no call was kept yet, with this checkpoint
  [rounds] count = {round} in toolformer.toml            every command takes round {round}"""


def format_first_look(plan: Plan, first: int, options: str, corpus: str) -> str:
    """Return the report of `run --first N`, which runs the first N shards alone. Raises WarehouseError.

    It has a table with a row per tool, warnings and remarks about tools, the number of texts to train on, what all
    shards would cost, and the commands to go on with.

    - `first`: N
    - `options`, `corpus`: the options of the command and its `--shards`, to repeat them in these commands; a space
      stands before each
    """
    database = plan.settings.warehouse
    all_shards = _with_all_shards(plan)
    counts = count_training_texts(plan)
    title = f"The first look: {len(plan.shards)} of {len(all_shards.shards)} shards, {counts.documents:,} documents"
    table_of_tools = drawn(query(database, LANES))
    training_texts = explain_too_few_to_train(plan) or _describe_texts_to_train(
        counts
    )  # a warning, or how many there are
    lines = [f"\n{title}", table_of_tools]
    lines += _list_chance_warnings(database)
    lines += _describe_gains_over_echo(database)
    lines.append(f"{training_texts}.")
    lines.append(_describe_cost_of_all_shards(plan, all_shards))
    lines.append(NEXT.format(options=options, corpus=corpus, first=f" --first {first}"))
    return "\n".join(lines)


def _describe_texts_to_train(counts: TextCounts) -> str:
    """Return how many texts there are to train on, and how many per 1,000 documents."""
    per_thousand = 1000 * counts.texts / max(1, counts.documents)
    return f"{counts.texts:,} texts in C* to train on, about {per_thousand:,.0f} per 1,000 documents"


def _describe_gains_over_echo(database: Path) -> list[str]:
    """Return, per tool, how many calls gain more than their echo: the result of another input with the same words."""
    return [
        f"{row['tool']}: of {row['calls']:,} calls with an echo {row['gaining']:,} gain tau_f, "
        f"{row['gaining_over_echo']:,} of them over the echo."
        for row in query(database, ECHOES).iter_rows(named=True)
    ]


def _list_chance_warnings(database: Path) -> list[str]:
    """Return a warning for each tool whose kept calls may all be kept by chance.

    `by_chance` estimates how many calls would be kept with results of other documents; `low` to `high` is its 95 %
    interval.
    """
    warnings = []
    for row in query(database, BY_CHANCE).iter_rows(named=True):  # the tools whose interval reaches the kept calls
        estimate_reaches_calls = row["by_chance"] >= row["calls"]
        keeps = "keeps" if estimate_reaches_calls else "may keep"
        warnings.append(
            f"{row['tool']}: {row['calls']:,} calls are kept, and chance {keeps} as many ({row['by_chance']:,}, 95 %: "
            f"{row['low']:,} to {row['high']:,}): they say nothing about the tool; raise its tau_f or change the model."
        )
    return warnings


def format_round_report(plan: Plan) -> str:
    """Return the report of `run --round`: the calls kept so far, and each round's answers. Raises WarehouseError."""
    round = plan.settings.rounds.count
    calls = drawn(query(plan.settings.warehouse, LANES))
    return "\n".join(
        (
            f"\nCalls by lane, of all rounds so far\n{calls}",
            *_iter_answers_by_round(plan),
            "",
            NEXT_ROUND.format(round=round, next=round + 1),
        )
    )


def _iter_answers_by_round(plan: Plan) -> Iterator[str]:
    """Yield a table per evaluated round, with the held-out questions that were answered right."""
    for project in plan.projects:
        if project.lake.table(ACCURACY).parts():
            number = project.settings.rounds.count
            title = f"Round {number}: held-out questions answered right, in per cent (95 % interval)"
            yield f"\n{title}\n{drawn(read_accuracy(project.lake))}"


def _with_all_shards(plan: Plan) -> Plan:
    """Return the plan without `corpus.first`, which limits the shards."""
    corpus = plan.settings.corpus.model_copy(update={"first": None})
    return replace(plan, settings=plan.settings.model_copy(update={"corpus": corpus}))


def _describe_cost_of_all_shards(plan: Plan, all_shards: Plan) -> str:
    """Return what the shards have cost so far, and what all would cost in proportion. all_shards: the plan of all."""
    if len(all_shards.shards) == len(plan.shards):
        return "These are all shards."
    ratio = _compute_size_ratio(plan.stamps, all_shards.stamps)
    spent = _query_cost_before_training(plan)
    tokens = int(spent["tokens"].sum())
    seconds = float(spent["seconds"].sum())
    time_spent = timedelta(seconds=round(seconds))
    time_of_all = timedelta(seconds=round(seconds * ratio))
    return (
        f"So far {tokens:,} tokens and {time_spent} went into these shards. All {len(all_shards.shards)} would take "
        f"about {tokens * ratio:,.0f} tokens and {time_of_all}, without finetuning; `run --estimate` tells it with "
        "intervals."
    )


def _query_cost_before_training(plan: Plan) -> pl.DataFrame:
    """Return tokens and seconds per stage, without finetuning and evaluation."""
    trained_and_measured = [*checkpoints(plan.settings), "accuracy", "perplexity"]
    # A checkpoint of a seed that the settings no longer have begins with the name of another one.
    is_later = pl.any_horizontal(pl.col("stage").str.starts_with(name) for name in trained_and_measured)
    return query(plan.settings.warehouse, SPENT).filter(~is_later)


def _compute_size_ratio(first_stamps: Stamps, all_stamps: Stamps) -> float:
    """Return how many times larger all shards are than the first ones: in bytes if all sizes are known, else in number.

    A stamp has what identifies the content of a shard, such as the size of its file in `bytes`.

    - first_stamps: of the first shards, by shard; at least one
    - all_stamps: of all shards, these included
    """
    if not all("bytes" in stamp for stamp in all_stamps.values()):
        return len(all_stamps) / len(first_stamps)
    size_of_first = sum(stamp["bytes"] for stamp in first_stamps.values())
    size_of_all = sum(stamp["bytes"] for stamp in all_stamps.values())
    return float(size_of_all / size_of_first)
