"""The stages of recorded conversations in the order in which they run, and the tables of a plan."""

from toolformer_dag.computing.plan import Plan
from toolformer_dag.computing.stage import Stage, TableOutput
from toolformer_dag.traces import call_losses, exchanged_results, recorded_calls, recorded_conversations

STAGES: tuple[Stage, ...] = (
    recorded_conversations.STAGE,
    recorded_calls.STAGE,
    exchanged_results.STAGE,
    call_losses.STAGE,
)


def trace_tables(plan: Plan) -> list[TableOutput]:
    """Return the tables where the settings name conversations, in the order of STAGES.

    A plan of a later round has none: the first one has them.
    """
    if not plan.settings.traces.source or plan.start is not None:
        return []
    return [TableOutput(stage, plan) for stage in STAGES]
