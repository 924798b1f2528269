"""`demo`: run the whole pipeline on the synthetic web, and print what came of it."""

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import typer

from toolformer_dag.cli.run import format_run_summary, open_project, run_project
from toolformer_dag.cli.terminal import ConfigOption, SetOption, add_config_option, escape_control_characters

if TYPE_CHECKING:
    from toolformer_dag.assets.running import Step
    from toolformer_dag.computing.plan import Plan
    from toolformer_dag.lake.table import Table

QUERY_BY_TITLE = {
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

ANSWERED_QUESTION_SQL = """
select benchmark, prompt, written_without, written_with from won_and_lost
where outcome = 'won' and length(prompt) > 40
order by length(prompt) + length(written_with), benchmark, question limit 1
"""
SMALL_WEB_MESSAGE = (
    "A synthetic web of {documents} pages and a model of 2.17 million parameters: a few minutes on this machine."
)
"""Printed first where the profile's own corpus and model are used."""
BEGIN_MESSAGE = (
    "The model proposes calls to {lanes} tools where it finds ` [` likely. The tools answer. A call stays if its\n"
    "result lowers the model's own loss on the words after it."
)
SEEN_QUESTIONS_NOTE = "(seen): new questions, in wordings that the embedded model was trained on"
NEXT_COMMANDS = """Where to go next
  {bin}/toolformer-dag explore      every call in its text, and thresholds to drag: http://127.0.0.1:3001
  make ui                           the asset graph, its plots and its runs: http://127.0.0.1:3000
  {bin}/toolformer-dag init mine    a project over your own texts"""


class Example(NamedTuple):
    """Which call is shown after a stage, and how.

    Attributes:
        ranking_column: The call with the largest value in this column is shown.
        sentence_template: A remark about the call, with a place for that value.
    """

    ranking_column: str
    sentence_template: str


EXAMPLE_BY_STAGE = {
    "scored_candidates": Example("p_api", "proposed: the bracket has p = {:.2f}"),
    "loss_deltas": Example("delta", "lowers the loss by {:.2f} nats"),
}
"""The stages after which a call is shown."""
CONTEXT_CHARACTERS = 48
"""Characters of the text on each side of a call."""


def demo(config: ConfigOption = None, set: SetOption = None) -> None:
    """Run the whole line with the embedded profile, then print its tables. A second time nothing runs.

    Example: toolformer-dag demo
    """
    project = open_project(config, "embedded", shard_patterns=None, override_pairs=set, first_shard_count=None)
    plan = project.plan
    if project.list_stale_assets():
        _print_introduction(plan)

    describe_ended_step = partial(describe_best_call, plan)
    run_report = run_project(project, (), includes_training=True, describe_ended_step=describe_ended_step)
    run_report.raise_for_failures()

    typer.echo(format_run_summary(run_report))
    _print_tables(plan)
    _print_answered_question(plan)
    _print_accuracy(plan)
    typer.echo(add_config_option(f"\n{NEXT_COMMANDS.format(bin=Path('.venv/bin'))}"))


def _print_introduction(plan: "Plan") -> None:
    """Print on standard error what is about to run, and how long it takes if it is the demo's own corpus and model."""
    corpus = plan.settings.corpus
    if plan.settings.model.name == "embedded" and not corpus.has_source:
        typer.echo(SMALL_WEB_MESSAGE.format(documents=corpus.small_web.documents), err=True)
    typer.echo(BEGIN_MESSAGE.format(lanes=len(plan.lanes)), err=True)


def _print_tables(plan: "Plan") -> None:
    """Print the demo's tables, each under its title, from the warehouse."""
    from toolformer_dag.cli.query_results import format_rows_as_table
    from toolformer_dag.lake.warehouse import query

    for title, sql in QUERY_BY_TITLE.items():
        rows = query(plan.settings.warehouse_file, sql)
        typer.echo(f"\n{title}\n{format_rows_as_table(rows)}")


def _print_answered_question(plan: "Plan") -> None:
    """Print a held-out question that the model answers right with tools only; print nothing if there is none."""
    from toolformer_dag.lake.warehouse import query

    questions = query(plan.settings.warehouse_file, ANSWERED_QUESTION_SQL)  # one row at most
    for question in questions.iter_rows(named=True):
        typer.echo(f"\n{format_answered_question(**question)}")


def _print_accuracy(plan: "Plan") -> None:
    """Print a table with the share of held-out questions that each model answers right, by benchmark."""
    from toolformer_dag.cli.query_results import format_rows_as_table
    from toolformer_dag.evaluation.measurements import read_accuracy_by_condition

    table = format_rows_as_table(read_accuracy_by_condition(plan.lake))
    typer.echo(f"\nHeld-out questions answered right, in per cent (95 % interval)\n{SEEN_QUESTIONS_NOTE}\n{table}")


def format_answered_question(benchmark: str, prompt: str, written_without: str, written_with: str) -> str:
    """Format a held-out question with the finetuned model's two answers.

    Args:
        benchmark: The name of the benchmark that the question is of.
        prompt: The question.
        written_without: What the model writes without tools.
        written_with: What it writes with tools.
    """
    return escape_control_characters(
        f"One question, held out ({benchmark})\n"
        f"  {prompt}\n"
        f"  without tools: {written_without}\n"
        f"  with tools:    {written_with}"
    )


def describe_best_call(plan: "Plan", step: "Step") -> str | None:
    """Return a line that shows the best call of the table that a step has written.

    After sampling that is the likeliest call, after scoring the most helpful one, such as:

        in all there were [Calculator(17 + 25) -> 42] 42 apples  (lowers the loss by 1.25 nats)

    Returns:
        The line. None for other steps, and if the table has no call.
    """
    lane_key, _, stage_name = step.name.partition("/")  # calculator/loss_deltas
    example = EXAMPLE_BY_STAGE.get(stage_name)
    if example is None:
        return None

    call_row = _find_call_with_largest_value(plan.lake.get_table(step.name), example.ranking_column)
    if call_row is None:
        return None

    call_text = _format_call_in_document(plan, lane_key, call_row)
    remark = example.sentence_template.format(call_row[example.ranking_column])
    return escape_control_characters(f"    {call_text}  ({remark})")


def _find_call_with_largest_value(table: "Table", column_name: str) -> dict[str, Any] | None:
    """Return the row of a complete call with the largest value in a column, or None if there is no such call.

    A call is complete if it has an input, was not rejected, and has a value in the column.
    """
    import polars as pl

    if not table.list_part_names():
        return None

    has_input = pl.col("input").is_not_null()
    is_not_rejected = pl.col("reason").is_null()
    has_value = pl.col(column_name).is_not_null()
    complete_calls = table.scan_parts().filter(has_input, is_not_rejected, has_value)

    best_calls = complete_calls.sort(column_name, descending=True).head(1).collect().to_dicts()
    return best_calls[0] if best_calls else None


def _format_call_in_document(plan: "Plan", lane_key: str, call_row: dict[str, Any]) -> str:
    """Return a call in its place in the document, with CONTEXT_CHARACTERS of text on each side, on one line.

    Args:
        plan: The project's plan.
        lane_key: The lane (the tool) of the call.
        call_row: The call's row, with its place `char_offset`, its `input`, and its `result` if the table has one.
    """
    text = _read_document_text(plan, call_row)
    offset = call_row["char_offset"]
    text_before = text[:offset][-CONTEXT_CHARACTERS:]
    text_after = text[offset:][:CONTEXT_CHARACTERS]

    tool_name = plan.tool_name_by_lane_key[lane_key]
    result = f" -> {call_row['result']}" if "result" in call_row else ""
    excerpt = f"{text_before} [{tool_name}({call_row['input']}){result}]{text_after}"
    return " ".join(excerpt.split())


def _read_document_text(plan: "Plan", call_row: dict[str, Any]) -> str:
    """Return the text of the document in which a call stands, found by the call's `shard` and `digest`."""
    import polars as pl

    documents = plan.lake.get_table("ccnet/raw_shards").scan_parts([call_row["shard"]])
    document = documents.filter(pl.col("digest") == call_row["digest"])
    text: str = document.select("text").collect().item()
    return text
