"""`demo`: run the whole pipeline on the synthetic web, and print what came of it."""

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import typer

from toolformer_dag.cli.run import completed, open_project, summary
from toolformer_dag.cli.terminal import Config, Set, escape_controls, with_config

if TYPE_CHECKING:
    from toolformer_dag.assets.running import Step
    from toolformer_dag.computing.plan import Plan
    from toolformer_dag.lake.table import Table

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
"""Printed first where the profile's own corpus and model are used."""
BEGIN = """The model proposes calls to {lanes} tools where it finds ` [` likely. The tools answer. A call stays if its
result lowers the model's own loss on the words after it."""
SEEN = "(seen): new questions, in wordings that the embedded model was trained on"
NEXT = """Where to go next
  {bin}/toolformer-dag explore      every call in its text, and thresholds to drag: http://127.0.0.1:3001
  make ui                           the asset graph, its plots and its runs: http://127.0.0.1:3000
  {bin}/toolformer-dag init mine    a project over your own texts"""


class Example(NamedTuple):
    """Which call is shown after a stage: the one with the largest value of a column, with a sentence about it."""

    column: str
    sentence: str


EXAMPLES = {
    "scored_candidates": Example("p_api", "proposed: the bracket has p = {:.2f}"),
    "loss_deltas": Example("delta", "lowers the loss by {:.2f} nats"),
}
"""The stages after which a call is shown."""
AROUND = 48
"""Characters of the text on each side of a call."""


def demo(config: Config = None, set: Set = None) -> None:
    """Run the whole line with the embedded profile, then print its tables. A second time nothing runs.

    Example: toolformer-dag demo
    """
    project = open_project(config, "embedded", shards=None, pairs=set, first=None)
    plan = project.plan
    if project.stale():
        _introduce(plan)
    report = completed(project, (), training=True, after_step=partial(describe_best_call, plan))
    report.raise_for_failures()
    typer.echo(summary(report))
    _print_tables(plan)
    _print_answered_question(plan)
    _print_accuracy(plan)
    typer.echo(with_config(f"\n{NEXT.format(bin=Path('.venv/bin'))}"))


def _introduce(plan: "Plan") -> None:
    """Say on standard error what is about to run."""
    corpus = plan.settings.corpus
    if plan.settings.model.name == "embedded" and not corpus.named:
        typer.echo(SMALL.format(documents=corpus.small_web.documents), err=True)
    typer.echo(BEGIN.format(lanes=len(plan.lanes)), err=True)


def _print_tables(plan: "Plan") -> None:
    """Print the tables of the warehouse, each under its title."""
    from toolformer_dag.cli.query_results import drawn
    from toolformer_dag.lake.warehouse import query

    for title, text in TABLES.items():
        rows = query(plan.settings.warehouse, text)
        typer.echo(f"\n{title}\n{drawn(rows)}")


def _print_answered_question(plan: "Plan") -> None:
    """Print a question that only the model with tools answers right; nothing where there is none."""
    from toolformer_dag.lake.warehouse import query

    for question in query(plan.settings.warehouse, ANSWERED).iter_rows(named=True):
        typer.echo(f"\n{format_answered_question(**question)}")


def _print_accuracy(plan: "Plan") -> None:
    """Print the share of held-out questions that each model answers right, by benchmark."""
    from toolformer_dag.cli.query_results import drawn
    from toolformer_dag.evaluation.measurements import read_accuracy

    rows = drawn(read_accuracy(plan.lake))
    typer.echo(f"\nHeld-out questions answered right, in per cent (95 % interval)\n{SEEN}\n{rows}")


def format_answered_question(benchmark: str, prompt: str, written_without: str, written_with: str) -> str:
    """Return a held-out question with the finetuned model's answers, without and with tools."""
    return escape_controls(
        f"One question, held out ({benchmark})\n"
        f"  {prompt}\n"
        f"  without tools: {written_without}\n"
        f"  with tools:    {written_with}"
    )


def describe_best_call(plan: "Plan", step: "Step") -> str | None:
    """Return a line with the best call of the table that a step has written.

    After sampling that is the likeliest call, after scoring the most helpful one, such as:

        in all there were [Calculator(17 + 25) -> 42] 42 apples  (lowers the loss by 1.25 nats)

    None for other steps, and where the table has no call.
    """
    lane, _, stage = step.name.partition("/")
    example = EXAMPLES.get(stage)
    if example is None:
        return None
    call = _find_largest_call(
        plan.lake.table(step.name), example.column
    )  # the call with the largest number in this column
    if call is None:
        return None
    sentence = example.sentence.format(call[example.column])
    return escape_controls(f"    {_format_call_in_document(plan, lane, call)}  ({sentence})")


def _find_largest_call(table: "Table", column: str) -> dict[str, Any] | None:
    """Return the call with the largest value in `column`, or None without a complete call."""
    import polars as pl

    if not table.parts():
        return None
    is_complete = (pl.col("input").is_not_null(), pl.col("reason").is_null(), pl.col(column).is_not_null())
    calls = table.scan().filter(*is_complete).sort(column, descending=True).head(1).collect().to_dicts()
    return calls[0] if calls else None


def _format_call_in_document(plan: "Plan", lane: str, call: dict[str, Any]) -> str:
    """Return a call with AROUND characters of its document on each side, on one line."""
    text = _read_document_text(plan, call)
    offset = call["char_offset"]
    before = text[:offset][-AROUND:]
    after = text[offset:][:AROUND]
    result = f" -> {call['result']}" if "result" in call else ""
    excerpt = f"{before} [{plan.lane_names[lane]}({call['input']}){result}]{after}"
    return " ".join(excerpt.split())


def _read_document_text(plan: "Plan", call: dict[str, Any]) -> str:
    """Return the text of the document that a call stands in."""
    import polars as pl

    documents = plan.lake.table("ccnet/raw_shards").scan([call["shard"]])
    text: str = documents.filter(pl.col("digest") == call["digest"]).select("text").collect().item()
    return text
