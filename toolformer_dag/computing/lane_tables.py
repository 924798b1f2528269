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
"""Tables in the order in which they are brought up to date; a lane has those that its settings ask for.

Those of controls are named in pipeline/controls.py.
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
"""Row stores: what a model or a tool has computed for a lane."""


class CallTables(NamedTuple):
    """The two tables with the calls of one level: what was sampled, and what the tools answered."""

    candidates: LaneTable
    results: LaneTable


_CALL_TABLES = {
    1: CallTables("scored_candidates", "tool_results"),
    2: CallTables("chained_candidates", "chained_results"),
    3: CallTables("chained_candidates_3", "chained_results_3"),
}


def call_tables(level: int) -> CallTables:
    """Return the tables of calls that stand after `level` - 1 others at their place; those of level 1 stand alone."""
    return _CALL_TABLES[level]
