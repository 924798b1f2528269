"""rule_proposals: propose calls by a rule: a pattern of the settings, or the tool's method `propose`."""

from collections import Counter
from collections.abc import Mapping
from typing import Any, NamedTuple

import polars as pl

from toolformer_dag.computing.plan import Lane, Plan
from toolformer_dag.computing.stage import CALL_KEY, TEXT_KEY, ByShard, PartRows, RejectionCounts, Stage, TableOutput
from toolformer_dag.computing.worker import Worker
from toolformer_dag.pipeline.placing import (
    PROPOSAL_COLUMNS,
    UnplacedCall,
    build_unplaced_frame,
    collect_placing_settings,
    place_calls_at_tokens,
)
from toolformer_dag.settings.tool_settings import RULE_SOURCE
from toolformer_dag.tools.tool import OverBudget


def collect_rule_identity(lane: Lane) -> dict[str, object]:
    """Return what the rule's calls depend on, as `{"rule": ...}`. A lane without a rule has {}.

    Raises:
        ToolDown: The tool's code fails.
    """
    if RULE_SOURCE not in lane.call_sources.source_names:
        return {}
    return {"rule": lane.call_sources.compute_rule_identity(lane.tool)}


def settings(plan: Plan, lane: Lane) -> Mapping[str, Any]:
    """Return the settings on which the rows depend, apart from the texts. A change makes the table out of date."""
    return {**collect_placing_settings(plan, lane), **collect_rule_identity(lane)}


def rows(worker: Worker, output: TableOutput, shard: str) -> PartRows:
    """Return the calls that a tool's rule proposes for the texts of a shard, each at a token of its text.

    Texts that cost the rule too much work are rejected as over_budget.

    Raises:
        ToolDown: The rule fails.
    """
    text_rows = output.get_lane_table("heuristic_subset").read_part(shard)
    proposals = _propose_calls(output.lane, text_rows)

    # A rule names the character of a call. Calls inside a token, and calls that the tool cannot read, are rejected.
    unplaced_calls = build_unplaced_frame(proposals.calls)
    placed_calls = place_calls_at_tokens(worker, output, unplaced_calls)

    over_budget: RejectionCounts = Counter({(shard, "over_budget"): proposals.over_budget_text_count})
    return PartRows([placed_calls.rows], rejection_counts=over_budget + placed_calls.rejected)


class _Proposals(NamedTuple):
    """The calls that a rule proposes for some texts.

    Attributes:
        calls: The calls, text by text.
        over_budget_text_count: How many texts cost the rule too much work, and have no calls.
    """

    calls: list[UnplacedCall]
    over_budget_text_count: int


def _propose_calls(lane: Lane, text_rows: pl.DataFrame) -> _Proposals:
    """Return the calls that the rule proposes for texts (rows of heuristic_subset)."""
    calls: list[UnplacedCall] = []
    over_budget_text_count = 0

    text_fields = text_rows.select(*TEXT_KEY, "offset", "text", "context")
    for text_row in text_fields.iter_rows(named=True):
        try:
            calls += _propose_calls_for_text(lane, text_row)
        except OverBudget:
            over_budget_text_count += 1

    return _Proposals(calls, over_budget_text_count)


def _propose_calls_for_text(lane: Lane, text_row: Mapping[str, Any]) -> list[UnplacedCall]:
    """Return the distinct calls that the rule proposes for a text, in the order of the proposals.

    Args:
        text_row: The text, with the columns shard, digest, segment, offset (of the text in its document), text and
            context of heuristic_subset.

    Raises:
        OverBudget: The text costs the rule too much work.
        ToolDown: The rule fails.
    """
    proposals = lane.call_sources.propose_by_rule(lane.tool, text_row["text"], text_row["context"])
    distinct_proposals = dict.fromkeys(proposals)  # keeps their order

    return [
        UnplacedCall(
            **text_row,  # a call has the fields of its text
            source=RULE_SOURCE,
            char_offset=text_row["offset"] + proposal.offset,
            input=proposal.input,
            words=proposal.words or None,
        )
        for proposal in distinct_proposals
    ]


STAGE = Stage(
    name="rule_proposals",
    description="Calls that the lane's rule proposes for its texts.",
    columns=PROPOSAL_COLUMNS,
    key_columns=CALL_KEY,
    collect_settings=settings,
    reads=("heuristic_subset",),
    row_maker=ByShard(rows),
)
