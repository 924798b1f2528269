"""rule_proposals: propose calls by a rule: a pattern of the settings, or the tool's method `propose`."""

from collections import Counter
from collections.abc import Mapping
from typing import Any

from toolformer_dag.computing.plan import Lane, Plan
from toolformer_dag.computing.stage import CALL_KEY, TEXT_KEY, ByShard, PartRows, Rejected, Stage, TableOutput
from toolformer_dag.computing.worker import Worker
from toolformer_dag.pipeline.placing import COLUMNS, UnplacedCall, placed_at_tokens, placing, unplaced
from toolformer_dag.settings.tool_settings import RULE
from toolformer_dag.tools.tool import OverBudget


def identity(lane: Lane) -> dict[str, object]:
    """Return what the rule's calls depend on, as `{"rule": ...}`; empty for a lane without a rule. Raises ToolDown."""
    if RULE not in lane.sources.names:
        return {}
    return {"rule": lane.sources.rule_identity(lane.tool)}


def settings(plan: Plan, lane: Lane) -> Mapping[str, Any]:
    """Return the settings that the rows depend on, apart from the texts; a change makes the table out of date."""
    return {**placing(plan, lane), **identity(lane)}


def rows(worker: Worker, output: TableOutput, shard: str) -> PartRows:
    """Return the calls that a tool's rule proposes for the texts of a shard, each before its token.

    Rejected: over_budget (texts that cost the rule too much work), inside_a_token (no token begins at the character),
    and the reasons of `parse_call`. Raises ToolDown if the rule fails.
    """
    rejected: Rejected = Counter()
    calls: list[UnplacedCall] = []
    texts = output.lane_table("heuristic_subset").read(shard)
    for text in texts.select(*TEXT_KEY, "offset", "text", "context").iter_rows(named=True):
        try:
            calls += _proposed_calls(output.lane, text)
        except OverBudget:
            rejected[shard, "over_budget"] += 1
    placed = placed_at_tokens(worker, output, unplaced(calls))
    return PartRows([placed.rows], rejected=rejected + placed.rejected)


def _proposed_calls(lane: Lane, text: Mapping[str, Any]) -> list[UnplacedCall]:
    """Return the distinct calls that the rule proposes for a text (a row of heuristic_subset). Raises OverBudget."""
    proposals = lane.sources.propose(lane.tool, text["text"], text["context"])
    return [
        UnplacedCall(
            **text,
            source=RULE,
            char_offset=text["offset"] + proposal.offset,
            input=proposal.input,
            words=proposal.words or None,
        )
        for proposal in dict.fromkeys(proposals)
    ]


STAGE = Stage(
    name="rule_proposals",
    description="Calls that the lane's rule proposes for its texts.",
    columns=COLUMNS,
    key=CALL_KEY,
    settings=settings,
    reads=("heuristic_subset",),
    make=ByShard(rows),
)
