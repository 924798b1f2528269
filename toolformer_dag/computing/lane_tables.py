"""The names of the tables that a lane has, so that a mistyped one is a type error."""

from typing import Literal, NamedTuple

LaneTable = Literal[
    "heuristic_subset",
    "file_proposals",
    "rule_proposals",
    "served_proposals",
    "scored_candidates",
    "tool_results",
    "chained_candidates",
    "chained_results",
    "chained_candidates_3",
    "chained_results_3",
    "loss_deltas",
    "chained_deltas",
    "scored_texts",
    "filter_rule",
    "decided_calls",
    "filtered_calls",
]
"""The names of tables, in the order in which they are brought up to date. A lane has those that its settings need.

The tables of controls are named in pipeline/controls.py.
"""
LaneRows = Literal[
    "positions",
    "samples",
    "written",
    "results",
    "losses",
    "loss_bounds",
    "chained_positions",
    "chained_samples",
    "chained_losses",
    "chained_needs",
]
"""The names of row stores, which keep what a model or a tool has computed for a lane."""


class CallTables(NamedTuple):
    """The two tables with the calls of one level of chains.

    Attributes:
        candidates_table: The table of the sampled calls.
        results_table: The table of what the tools answered.
    """

    candidates_table: LaneTable
    results_table: LaneTable


_CALL_TABLES_BY_LEVEL = {
    1: CallTables("scored_candidates", "tool_results"),
    2: CallTables("chained_candidates", "chained_results"),
    3: CallTables("chained_candidates_3", "chained_results_3"),
}


def get_call_tables(chain_level: int) -> CallTables:
    """Return the tables of the calls of one level of chains. A chain is several calls at one position of a text.

    Args:
        chain_level: 1 for the first calls at their positions, 2 for the calls after one other call, and so on.
    """
    return _CALL_TABLES_BY_LEVEL[chain_level]
