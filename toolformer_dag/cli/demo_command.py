"""`demo`: the whole line over the synthetic web, with something to read while it runs and a screen of it at the end."""

from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import typer

from toolformer_dag.cli.run import completed, opened_project, summary
from toolformer_dag.cli.terminal import Config, Set, harmless, with_config

if TYPE_CHECKING:
    from toolformer_dag.assets.running import Step
    from toolformer_dag.computing.plan import Plan

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
select kept, tool, coalesce(chain_text(chain), input) as input, left(result, 40) as result,
       round(loss_empty, 2) as "L(empty)", round(loss_call, 2) as "L(c)", round(loss_result, 2) as "L(c, r)",
       round(delta, 2) as delta
from ranked where number = 1 qualify row_number() over (partition by kept order by hash(digest, position)) <= 3
order by kept desc, delta desc
""",
}
"""The tables of `demo`, by title, as queries over the warehouse."""

ANSWERED = """
select benchmark, prompt, written_without, written_with from won_and_lost
where outcome = 'won' and length(prompt) > 40
order by length(prompt) + length(written_with), benchmark, question limit 1
"""
SMALL = "A synthetic web of {documents} pages and a model of 2.17 million parameters: a few minutes on this machine."
"""What is said of the profile's own corpus and model."""
BEGIN = """The model proposes calls to {lanes} tools where it finds ` [` likely. The tools answer. A call stays if its
result lowers the model's own loss on the words after it."""
SEEN = "(seen): new questions, in wordings that the embedded model was trained on"
NEXT = """Where to go next
  {bin}/toolformer-dag explore      every call in its text, and thresholds to drag: http://127.0.0.1:3001
  make ui                           the asset graph, its plots and its runs: http://127.0.0.1:3000
  {bin}/toolformer-dag init mine    a project over your own texts"""


class Best(NamedTuple):
    """The call of a stage that is shown: the one with the largest value of a column, and what is said of it."""

    column: str
    said: str


BEST = {
    "scored_candidates": Best("p_api", "proposed: the bracket has p = {:.2f}"),
    "loss_deltas": Best("delta", "lowers the loss by {:.2f} nats"),
}
"""The stages after which a call is shown."""
AROUND = 48
"""Characters of the text on each side of a call."""


def demo(config: Config = None, set: Set = None) -> None:
    """Run the whole line with the embedded profile, then print its tables. A second time nothing runs.

    Example: toolformer-dag demo
    """
    project = opened_project(config, "embedded", shards=None, pairs=set, first=None)
    plan = project.plan
    from functools import partial

    from toolformer_dag.cli.query_results import drawn
    from toolformer_dag.evaluation.measurements import read_accuracy
    from toolformer_dag.lake.warehouse import query

    if project.stale():
        corpus = plan.settings.corpus
        if plan.settings.model.name == "embedded" and not corpus.named:
            typer.echo(SMALL.format(documents=corpus.small_web.documents), err=True)
        typer.echo(BEGIN.format(lanes=len(plan.lanes)), err=True)
    report = completed(project, (), training=True, after_step=partial(best_call, plan))
    report.raise_for_failures()
    typer.echo(summary(report))
    tables = {title: query(plan.settings.warehouse, text) for title, text in TABLES.items()}
    parts = [f"\n{title}\n{drawn(rows)}" for title, rows in tables.items()]
    accuracy_title = f"Held-out questions answered right, in per cent (95 % interval)\n{SEEN}"
    accuracy = f"\n{accuracy_title}\n{drawn(read_accuracy(plan.lake))}"
    questions = query(plan.settings.warehouse, ANSWERED).iter_rows(named=True)  # one, or none where none was won
    parts.append("\n".join(f"\n{lines(**question)}" for question in questions))
    next_steps = with_config(NEXT.format(bin=Path(".venv/bin")))
    typer.echo("\n".join((*parts, accuracy, "", next_steps)))


def lines(benchmark: str, prompt: str, written_without: str, written_with: str) -> str:
    """Return a held-out question as the finetuned model answers it with calls disabled, and with its tools."""
    return harmless(
        f"One question, held out ({benchmark})\n"
        f"  {prompt}\n"
        f"  without tools: {written_without}\n"
        f"  with tools:    {written_with}"
    )


def best_call(plan: "Plan", step: "Step") -> str | None:
    """Return the likeliest call that a step has sampled, or the most helpful one that it has scored, in its text.

    None for a step of another stage, and where there is no call.
    """
    import polars as pl

    lane, _, stage = step.name.partition("/")
    if stage not in BEST:
        return None
    table = plan.lake.table(step.name)
    if not table.parts():
        return None
    column = BEST[stage].column
    is_whole = (pl.col("input").is_not_null(), pl.col("reason").is_null(), pl.col(column).is_not_null())
    best = table.scan().filter(*is_whole).sort(column, descending=True).head(1).collect().to_dicts()
    if not best:
        return None
    [call] = best
    said = BEST[stage].said.format(call[column])
    return harmless(f"    {_written(plan, lane, call)}  ({said})")


def _written(plan: "Plan", lane: str, call: dict[str, Any]) -> str:
    """Return a call with its result, where it has one, and AROUND characters of its document on each side; one line."""
    import polars as pl

    documents = plan.lake.table("ccnet/raw_shards").scan([call["shard"]])
    text = documents.filter(pl.col("digest") == call["digest"]).select("text").collect().item()
    offset = call["char_offset"]
    before = text[:offset][-AROUND:]
    after = text[offset:][:AROUND]
    result = f" -> {call['result']}" if "result" in call else ""
    written = f"{before} [{plan.lane_names[lane]}({call['input']}){result}]{after}"
    return " ".join(written.split())
