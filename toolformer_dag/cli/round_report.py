"""What `run --round N` ends with: calls kept and answers by round, and how other commands are asked for a round."""

from toolformer_dag.cli.first_look import LANES
from toolformer_dag.cli.query_results import drawn
from toolformer_dag.computing.plan import Plan
from toolformer_dag.evaluation.measurements import ACCURACY, read_accuracy
from toolformer_dag.lake.warehouse import query

NEXT = """Where to go next
  toolformer-dag sql sweep --set rounds.count={round}    the rows of the rounds so far; without it those of round 1
  toolformer-dag run --round {next}                      the texts in which no call was kept yet, with this checkpoint
  [rounds] count = {round} in toolformer.toml            every command takes round {round}"""


def round_report(plan: Plan) -> str:
    """Return the report for people. Raises WarehouseError."""
    shown = {"tbl_hide_column_data_types": True, "tbl_formatting": "ASCII_MARKDOWN"}
    tables = {"Calls by lane, of all rounds so far": query(plan.settings.warehouse, LANES)}
    for one in plan.projects:
        if one.lake.table(ACCURACY).parts():
            title = f"Round {one.settings.rounds.count}: held-out questions answered right, in per cent (95 % interval)"
            tables[title] = read_accuracy(one.lake)
    round = plan.settings.rounds.count
    parts = [f"\n{title}\n{drawn(rows, 44, 160, **shown)}" for title, rows in tables.items()]
    return "\n".join((*parts, "", NEXT.format(round=round, next=round + 1)))
