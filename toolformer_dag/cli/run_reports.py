"""The reports at the end of `run --first N` and `run --round N`: what was sampled and kept, and what to do next."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import polars as pl

from toolformer_dag.cli.query_results import format_rows_as_table
from toolformer_dag.computing.plan import Plan
from toolformer_dag.evaluation.measurements import ACCURACY_TABLE, read_accuracy_by_condition
from toolformer_dag.lake.warehouse import query
from toolformer_dag.training.checkpoint_outputs import TextCounts, count_training_texts, explain_too_few_training_texts
from toolformer_dag.training.checkpoints import build_checkpoints_by_name

StampByShard = Mapping[str, Mapping[str, Any]]
"""By shard: what identifies its content."""

LANES_SQL = """
with counts as (pivot (select tool, step, count from funnel) on step in (2, 4, 5, 8) using sum(count) group by tool)
select tool, "2" as texts, "4" as calls, "5" as "with a result", coalesce(places, 0) as places, tau_f, "8" as kept,
       case when coalesce(swaps, 0) = 0 then 'not measured'
            when too_few_swaps then 'too few swaps to tell'
            else format('{} ({}-{})', by_chance, by_chance_low, by_chance_high)
       end as "by chance (95 %)"
from lanes join counts using (tool) left join swapped_statistics using (tool, tau_f) order by lanes.rowid
"""
KEPT_BY_CHANCE_SQL = """
select tool, calls, by_chance, by_chance_low as low, by_chance_high as high
from lanes join swapped_statistics using (tool, tau_f)
where swaps > 0 and not too_few_swaps and calls > 0 and by_chance_high >= calls
order by lanes.rowid
"""
"""The tools whose kept calls may all be kept by chance, by the 95 % interval."""
ECHO_GAINS_SQL = """
select tool, count(*) as calls, count(*) filter (loss_minus - loss_plus >= tau_f) as gaining,
       count(*) filter (delta >= tau_f) as gaining_over_echo
from eligible join lanes using (tool) where echo is not null group by tool order by tool
"""
COST_BY_STAGE_SQL = "select stage, sum(tokens)::bigint as tokens, sum(seconds) as seconds from costs group by stage"
NEXT_COMMANDS = """Where to go next
  toolformer-dag explore{options}              every call in its text, and thresholds to drag
  toolformer-dag sql sweep{options}            what each tau_f keeps, and how much of that by chance
  toolformer-dag run{first} --train{options}{corpus}   finetune on these shards
  toolformer-dag run{options}{corpus}                  all shards, then finetune and evaluate"""
NEXT_ROUND_COMMANDS = """Where to go next
  toolformer-dag sql sweep --set rounds.count={round}    the rows of the rounds so far; without it those of round 1
  toolformer-dag run --round {next}                      the texts in which no call was kept yet, with this checkpoint
  [rounds] count = {round} in toolformer.toml            every command takes round {round}"""


def format_first_look(plan: Plan, first_shard_count: int, command_options: str, shards_option: str) -> str:
    """Format the report of `run --first N`, which takes only the first N shards of the corpus through the pipeline.

    It has a table with a row per tool, warnings and remarks about tools, the number of texts to train on, what all
    shards would cost, and the commands to go on with.

    Args:
        plan: The plan of the first N shards.
        first_shard_count: N.
        command_options: The options of the command, to repeat them in the commands to go on with. A space stands
            before each.
        shards_option: Its option `--shards`, to repeat it too. Empty if it was not typed.

    Raises:
        WarehouseError: The warehouse is missing or cannot be read.
    """
    database = plan.settings.warehouse_file
    full_plan = _build_plan_of_all_shards(plan)
    text_counts = count_training_texts(plan)

    title = _format_first_look_title(plan, full_plan, text_counts)
    tool_table = format_rows_as_table(query(database, LANES_SQL))
    # Either a warning that there are too few texts, or how many there are.
    training_texts = explain_too_few_training_texts(plan) or _describe_training_texts(text_counts)
    next_commands = NEXT_COMMANDS.format(
        options=command_options, corpus=shards_option, first=f" --first {first_shard_count}"
    )

    lines = [
        f"\n{title}",
        tool_table,
        *_list_chance_warnings(database),
        *_describe_gains_over_echo(database),
        f"{training_texts}.",
        _describe_cost_of_all_shards(plan, full_plan),
        next_commands,
    ]
    return "\n".join(lines)


def _format_first_look_title(plan: Plan, full_plan: Plan, text_counts: TextCounts) -> str:
    """Return the title of the report of a first look, which says how many shards and documents were looked at."""
    shard_count = len(plan.shards_by_name)
    full_shard_count = len(full_plan.shards_by_name)
    return f"The first look: {shard_count} of {full_shard_count} shards, {text_counts.document_count:,} documents"


def _describe_training_texts(text_counts: TextCounts) -> str:
    """Return how many texts with kept calls there are to train on, and how many that is per 1,000 documents."""
    document_count = max(1, text_counts.document_count)
    per_thousand = 1000 * text_counts.text_count / document_count
    return f"{text_counts.text_count:,} texts in C* to train on, about {per_thousand:,.0f} per 1,000 documents"


def _describe_gains_over_echo(database: Path) -> list[str]:
    """Return a sentence per tool that says how many of its calls help more than their echo does.

    Some calls were proposed because the text names their result: Search("capital of France") before "Paris". The echo
    of such a call is the result for the word itself, of Search("Paris"). If the call helps no more than its echo, it
    may help only because its result repeats the word.

    Raises:
        WarehouseError: The warehouse is missing or cannot be read.
    """
    sentences = []
    for row in query(database, ECHO_GAINS_SQL).iter_rows(named=True):
        sentences.append(
            f"{row['tool']}: of {row['calls']:,} calls with an echo {row['gaining']:,} gain tau_f, "
            f"{row['gaining_over_echo']:,} of them over the echo."
        )
    return sentences


def _list_chance_warnings(database: Path) -> list[str]:
    """Return a warning for each tool whose kept calls may all be kept by chance.

    As a test, calls were scored with results that belong to other documents. `by_chance` is the estimated number of
    calls that would be kept with such results, and `low` to `high` is its 95 % interval. The query returns the tools
    whose interval reaches the number of calls that are truly kept.

    Raises:
        WarehouseError: The warehouse is missing or cannot be read.
    """
    warnings = []
    for row in query(database, KEPT_BY_CHANCE_SQL).iter_rows(named=True):
        estimate_reaches_calls = row["by_chance"] >= row["calls"]
        verb = "keeps" if estimate_reaches_calls else "may keep"
        warnings.append(
            f"{row['tool']}: {row['calls']:,} calls are kept, and chance {verb} as many ({row['by_chance']:,}, 95 %: "
            f"{row['low']:,} to {row['high']:,}): they say nothing about the tool; raise its tau_f or change the model."
        )
    return warnings


def format_round_report(plan: Plan) -> str:
    """Format the report of `run --round`: the calls kept so far, and how well each round's model answers.

    Raises:
        WarehouseError: The warehouse is missing or cannot be read.
    """
    round_number = plan.settings.rounds.count
    call_table = format_rows_as_table(query(plan.settings.warehouse_file, LANES_SQL))
    next_commands = NEXT_ROUND_COMMANDS.format(round=round_number, next=round_number + 1)

    lines = [
        f"\nCalls by lane, of all rounds so far\n{call_table}",
        *_iter_accuracy_tables_by_round(plan),
        "",
        next_commands,
    ]
    return "\n".join(lines)


def _iter_accuracy_tables_by_round(plan: Plan) -> Iterator[str]:
    """Yield a table for each round that was evaluated: the share of held-out questions that were answered right."""
    for round_plan in plan.plans_by_round:
        is_evaluated = bool(round_plan.lake.get_table(ACCURACY_TABLE).list_part_names())
        if not is_evaluated:
            continue
        round_number = round_plan.settings.rounds.count
        title = f"Round {round_number}: held-out questions answered right, in per cent (95 % interval)"
        table = format_rows_as_table(read_accuracy_by_condition(round_plan.lake))
        yield f"\n{title}\n{table}"


def _build_plan_of_all_shards(plan: Plan) -> Plan:
    """Return the plan without the setting `corpus.first`, which limits the number of shards."""
    corpus = plan.settings.corpus.model_copy(update={"first": None})
    settings = plan.settings.model_copy(update={"corpus": corpus})
    return replace(plan, settings=settings)


def _describe_cost_of_all_shards(plan: Plan, full_plan: Plan) -> str:
    """Return a sentence that says what the shards have cost so far, and what all shards would cost in proportion.

    Args:
        plan: The plan of the first shards.
        full_plan: The plan of all shards.

    Raises:
        WarehouseError: The warehouse is missing or cannot be read.
    """
    full_shard_count = len(full_plan.shards_by_name)
    if full_shard_count == len(plan.shards_by_name):
        return "These are all shards."

    size_ratio = _compute_size_ratio(plan.stamp_by_shard, full_plan.stamp_by_shard)
    costs = _query_cost_before_training(plan)
    tokens = int(costs["tokens"].sum())
    seconds = float(costs["seconds"].sum())
    time_spent = timedelta(seconds=round(seconds))
    time_of_all = timedelta(seconds=round(seconds * size_ratio))
    return (
        f"So far {tokens:,} tokens and {time_spent} went into these shards. All {full_shard_count} would take "
        f"about {tokens * size_ratio:,.0f} tokens and {time_of_all}, without finetuning; `run --estimate` tells it "
        "with intervals."
    )


def _query_cost_before_training(plan: Plan) -> pl.DataFrame:
    """Return what each stage before finetuning has cost: a table with the columns stage, tokens and seconds.

    Raises:
        WarehouseError: The warehouse is missing or cannot be read.
    """
    costs = query(plan.settings.warehouse_file, COST_BY_STAGE_SQL)
    later_stages = [*build_checkpoints_by_name(plan.settings), "accuracy", "perplexity"]
    # Names are compared by their beginnings: "finetuned_checkpoint_seed_2" has costs even after seed 2 was removed from
    # the settings, and is recognized by "finetuned_checkpoint".
    is_later = pl.any_horizontal(pl.col("stage").str.starts_with(name) for name in later_stages)
    return costs.filter(~is_later)


def _compute_size_ratio(first_stamp_by_shard: StampByShard, all_stamp_by_shard: StampByShard) -> float:
    """Return the size of all shards divided by that of the first ones, such as 2.5.

    What the first shards have cost, times this, is about what all shards would cost. The sizes are in bytes if all are
    known, and otherwise in numbers of shards.

    Args:
        first_stamp_by_shard: The stamps of the first shards, by shard. There is at least one. A stamp identifies the
            content of a shard, for example by the size of its file in `bytes`.
        all_stamp_by_shard: The stamps of all shards.
    """
    all_sizes_are_known = all("bytes" in stamp for stamp in all_stamp_by_shard.values())
    if not all_sizes_are_known:
        return len(all_stamp_by_shard) / len(first_stamp_by_shard)

    first_bytes = sum(stamp["bytes"] for stamp in first_stamp_by_shard.values())
    all_bytes = sum(stamp["bytes"] for stamp in all_stamp_by_shard.values())
    return float(all_bytes / first_bytes)
