"""rule_proposals: propose calls by a rule: a pattern of the settings, or the tool's method `propose`."""

from collections import Counter
from collections.abc import Mapping
from typing import Any, NamedTuple

import polars as pl

from toolformer_dag.computing.plan import Lane, Plan
from toolformer_dag.computing.stage import CALL_KEY, TEXT_KEY, ByShard, PartRows, Rejected, Stage, TableOutput
from toolformer_dag.computing.worker import Worker
from toolformer_dag.pipeline.placing import (
    PROPOSAL_COLUMNS,
    UnplacedCall,
    build_unplaced_frame,
    place_at_tokens,
    placing_settings,
)
from toolformer_dag.settings.tool_settings import RULE
from toolformer_dag.tools.tool import OverBudget


def identity(lane: Lane) -> dict[str, object]:
    """Return what the rule's calls depend on, as `{"rule": ...}`; empty for a lane without a rule. Raises ToolDown."""
    if RULE not in lane.sources.names:
        return {}
    return {"rule": lane.sources.rule_identity(lane.tool)}


def settings(plan: Plan, lane: Lane) -> Mapping[str, Any]:
    """Return the settings that the rows depend on, apart from the texts; a change makes the table out of date."""
    return {**placing_settings(plan, lane), **identity(lane)}


def rows(worker: Worker, output: TableOutput, shard: str) -> PartRows:
    """Return the calls that a tool's rule proposes for the texts of a shard, each at a token of its text.

    Texts that cost the rule too much work are rejected as over_budget. Raises ToolDown if the rule fails.
    """
    texts = output.lane_table("heuristic_subset").read(shard)
    proposals = _propose_calls(output.lane, texts)
    calls = build_unplaced_frame(proposals.calls)
    # A rule names the character of a call. Calls inside a token, and calls that the tool cannot read, are rejected.
    placed = place_at_tokens(worker, output, calls)
    over_budget: Rejected = Counter({(shard, "over_budget"): proposals.over_budget_count})
    return PartRows([placed.rows], rejected=over_budget + placed.rejected)


class _Proposals(NamedTuple):
    """What a rule proposes for some texts."""

    calls: list[UnplacedCall]
    over_budget_count: int  # texts that cost the rule too much work


def _propose_calls(lane: Lane, texts: pl.DataFrame) -> _Proposals:
    """Return the calls that the rule proposes for texts (rows of heuristic_subset)."""
    calls: list[UnplacedCall] = []
    over_budget_count = 0
    for text in texts.select(*TEXT_KEY, "offset", "text", "context").iter_rows(named=True):
        try:
            calls += _propose_calls_for_text(lane, text)
        except OverBudget:
            over_budget_count += 1
    return _Proposals(calls, over_budget_count)


def _propose_calls_for_text(lane: Lane, text: Mapping[str, Any]) -> list[UnplacedCall]:
    """Return the distinct calls that the rule proposes for a text. Raises OverBudget.

    text: a row of heuristic_subset: shard, digest, segment, offset (of the text in its document), text, context.
    """
    proposals = lane.sources.propose(lane.tool, text["text"], text["context"])
    distinct_proposals = dict.fromkeys(proposals)  # in their order
    return [
        UnplacedCall(
            **text,  # a call has the fields of its text
            source=RULE,
            char_offset=text["offset"] + proposal.offset,
            input=proposal.input,
            words=proposal.words or None,
        )
        for proposal in distinct_proposals
    ]


STAGE = Stage(
    name="rule_proposals",
    description="Calls that the lane's rule proposes for its texts.",
    columns=PROPOSAL_COLUMNS,
    key=CALL_KEY,
    settings=settings,
    reads=("heuristic_subset",),
    make=ByShard(rows),
)
