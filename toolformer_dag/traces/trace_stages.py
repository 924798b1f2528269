"""The stages of recorded conversations in the order in which they run, and the tables of a plan."""

from itertools import chain

from toolformer_dag.computing.plan import Plan
from toolformer_dag.computing.stage import Stage, TableOutput
from toolformer_dag.traces import call_losses, exchanged_results, recorded_calls, recorded_conversations

STAGES: tuple[Stage, ...] = (
    recorded_conversations.STAGE,
    recorded_calls.STAGE,
    exchanged_results.STAGE,
    call_losses.STAGE,
)
"""The stages; those that compute losses come last."""
SHOWN_TABLE_NAMES = tuple(
    chain.from_iterable((f"{stage.group}/{stage.name}", *stage.sibling_table_names) for stage in STAGES)
)
"""The tables of the lake from which the file of `judge` is built: those of the stages, and those beside them."""


def build_trace_tables(plan: Plan) -> list[TableOutput]:
    """Return a table for each stage of recorded conversations.

    Returns:
        The tables, each after the tables that it reads. Empty if the settings name no conversations, or for the plan
        of a later round: only the first round of a run judges conversations.
    """
    is_later_round = plan.previous_plan is not None
    if not plan.settings.traces.source or is_later_round:
        return []
    return [TableOutput(stage, plan) for stage in STAGES]
