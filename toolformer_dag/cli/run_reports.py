"""What `run --first N` and `run --round N` end with: what was sampled and kept, and what to do next."""

from dataclasses import replace
from datetime import timedelta
from pathlib import Path

from toolformer_dag.cli.query_results import drawn
from toolformer_dag.computing.plan import Plan
from toolformer_dag.evaluation.measurements import ACCURACY, read_accuracy
from toolformer_dag.lake.warehouse import query
from toolformer_dag.training.checkpoint_outputs import CHECKPOINTS, too_few_to_train, training_text_counts

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
"""The tools of which chance may keep as many calls as the filter, by the 95 % interval."""
ECHOES = """
select tool, count(*) as calls, count(*) filter (loss_minus - loss_plus >= tau_f) as gaining,
       count(*) filter (delta >= tau_f) as gaining_over_echo
from eligible join lanes using (tool) where echo is not null group by tool order by tool
"""
SPENT = f"""
select coalesce(sum(tokens), 0)::bigint, coalesce(sum(seconds), 0) from costs
where stage not in {(*CHECKPOINTS, "accuracy", "perplexity")}
"""
NEXT = """Where to go next
  toolformer-dag explore{options}              every call in its text, and thresholds to drag
  toolformer-dag sql sweep{options}            what each tau_f keeps, and how much of that by chance
  toolformer-dag run{first} --train{options}{corpus}   finetune on these shards
  toolformer-dag run{options}{corpus}                  all shards, then finetune and evaluate"""
NEXT_ROUND = """Where to go next
  toolformer-dag sql sweep --set rounds.count={round}    the rows of the rounds so far; without it those of round 1
  toolformer-dag run --round {next}                      the texts in which no call was kept yet, with this checkpoint
  [rounds] count = {round} in toolformer.toml            every command takes round {round}"""


def first_look(plan: Plan, first: int, options: str, corpus: str) -> str:
    """Return the report of `run --first`, with what all shards would cost. Raises WarehouseError.

    `options`: those of the command that every command takes, with a space before each; `corpus`: its `--shards`, alike.
    """
    whole = _everything(plan)
    database = plan.settings.warehouse
    texts, documents = training_text_counts(plan)
    enough = f"{texts:,} texts in C* to train on, about {1000 * texts / max(1, documents):,.0f} per 1,000 documents"
    echoes = [
        f"{row['tool']}: of {row['calls']:,} calls with an echo {row['gaining']:,} gain tau_f, "
        f"{row['gaining_over_echo']:,} of them over the echo."
        for row in query(database, ECHOES).iter_rows(named=True)
    ]
    lanes = drawn(query(database, LANES))
    return "\n".join(
        (
            f"\nThe first look: {len(plan.shards)} of {len(whole.shards)} shards, {documents:,} documents",
            lanes,
            *_kept_by_chance(database),
            *echoes,
            f"{too_few_to_train(plan) or enough}.",
            _rest(plan, whole),
            NEXT.format(options=options, corpus=corpus, first=f" --first {first}"),
        )
    )


def _kept_by_chance(database: Path) -> list[str]:
    """Return a sentence for each tool of whose kept calls as many would be kept by chance."""
    sentences = []
    for row in query(database, BY_CHANCE).iter_rows(named=True):
        surely = row["by_chance"] >= row["calls"]
        may = "keeps" if surely else "may keep"
        sentences.append(
            f"{row['tool']}: {row['calls']:,} calls are kept, and chance {may} as many ({row['by_chance']:,}, 95 %: "
            f"{row['low']:,} to {row['high']:,}): they say nothing about the tool; raise its tau_f or change the model."
        )
    return sentences


def round_report(plan: Plan) -> str:
    """Return the report of `run --round`: calls kept and answers by round. Raises WarehouseError."""
    tables = {"Calls by lane, of all rounds so far": query(plan.settings.warehouse, LANES)}
    for project in plan.projects:
        if project.lake.table(ACCURACY).parts():
            number = project.settings.rounds.count
            title = f"Round {number}: held-out questions answered right, in per cent (95 % interval)"
            tables[title] = read_accuracy(project.lake)
    round = plan.settings.rounds.count
    parts = [f"\n{title}\n{drawn(rows)}" for title, rows in tables.items()]
    return "\n".join((*parts, "", NEXT_ROUND.format(round=round, next=round + 1)))


def _everything(plan: Plan) -> Plan:
    """Return the plan without corpus.first: that of all shards."""
    corpus = plan.settings.corpus.model_copy(update={"first": None})
    return replace(plan, settings=plan.settings.model_copy(update={"corpus": corpus}))


def _rest(plan: Plan, everything: Plan) -> str:
    """Scale what the lake has cost so far by the sizes of the shards, or by their number where sizes are not known."""
    all_stamps = everything.stamps
    seen_stamps = plan.stamps
    if len(all_stamps) == len(seen_stamps):
        return "These are all shards."
    factor = len(all_stamps) / len(seen_stamps)
    if all("bytes" in stamp for stamp in all_stamps.values()):
        seen_bytes = sum(stamp["bytes"] for stamp in seen_stamps.values())
        factor = sum(stamp["bytes"] for stamp in all_stamps.values()) / seen_bytes
    [(tokens, seconds)] = query(plan.settings.warehouse, SPENT).rows()
    spent = f"{tokens:,} tokens and {timedelta(seconds=round(seconds))}"
    return (
        f"So far {spent} went into these shards. All {len(all_stamps)} would take about {tokens * factor:,.0f} tokens "
        f"and {timedelta(seconds=round(seconds * factor))}, without finetuning; `run --estimate` tells it with "
        "intervals."
    )
