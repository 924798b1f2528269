"""The SQL that decides which scored calls stay, and how many of them by chance.

The filter runs it over the files of one lane (a tool with its settings), the warehouse over those of all lanes. Both
have its text in their fingerprints.
"""

from toolformer_dag.lake.queries import read_sql_file

ESTIMATING_CONTROL = "swapped_results"
"""The table of the control by which the share kept by chance is estimated: calls scored with other results."""


def insert_control_name(sql: str) -> str:
    """Return SQL with the name of the estimating control in place of `$control`."""
    return sql.replace("$control", ESTIMATING_CONTROL)


KEEP_RULE_SQL = read_sql_file(__package__, "rule.sql")
"""The macro `why_not`: why a call does not stay at a threshold. The filter, the warehouse and the page use it."""
JUDGED_VIEW_SQL = read_sql_file(__package__, "judged.sql")
"""`judged`: every call of `scored`, whether it may stay, and whether it is the best of its place."""
SWAPPED_PLACES_SQL = insert_control_name(read_sql_file(__package__, "swapped_places.sql"))
"""`swapped_places`: what calls gain with the results of other documents, at every place of the control."""
CHANCE_VIEWS_SQL = insert_control_name(read_sql_file(__package__, "kept_by_chance.sql"))
"""Views over `decisions` and `swapped_places`: how many places are kept by chance at each threshold."""
COST_FRONTIER_VIEW_SQL = read_sql_file(__package__, "cost_frontier.sql")
"""The view `cost_frontier`: what each threshold gains, and for what cost."""
SCORED_CALLS_TABLE = "loss_deltas"
"""The table of scored calls. In the warehouse it is a view over `decisions`, where each call has its verdict."""
