"""Calls of files, rules and servers at their places among the tokens of the model that judges."""

from typing import Any

import polars as pl

from toolformer_dag.computing.plan import Lane, Plan
from toolformer_dag.computing.stage import CALL_KEY, RESULT, TEXT_KEY, Column, Rejected, TableOutput
from toolformer_dag.computing.worker import Worker
from toolformer_dag.pipeline import scored_candidates
from toolformer_dag.pipeline.document_cuts import tokenizing
from toolformer_dag.texts import call_places
from toolformer_dag.texts.calls import clean_result

PLACING = 2
"""Raised when the same proposals would give other rows; no loss is computed again."""
COLUMNS = {
    **scored_candidates.STAGE.columns,
    "context": Column(pl.String(), "what the result depends on beside the input"),
    "result": RESULT,
}
"""Columns of the tables of such calls."""
UNPLACED = pl.Schema(
    {
        "shard": pl.String(),
        "digest": pl.String(),
        "segment": pl.Int32(),
        "offset": pl.Int64(),
        "text": pl.String(),
        "context": pl.String(),
        "source": pl.String(),
        "at": pl.Int64(),
        "input": pl.String(),
        "result": pl.String(),
        "p_api": pl.Float32(),
        "words": pl.String(),
    }
)
"""A call and its text; `at`: the character of the document before which it stands."""


def placing(plan: Plan, lane: Lane) -> dict[str, Any]:
    """Return what determines the places of calls and what is taken for a call."""
    model = {"model": tokenizing(plan), "placing": PLACING, "places": call_places.VERSION}
    return {**model, "tool": lane.tool.name, "parsing": scored_candidates.PARSING}


def at_tokens(worker: Worker, output: TableOutput, shard: str, calls: pl.DataFrame, rejected: Rejected) -> pl.DataFrame:
    """Return the rows of `calls` (UNPLACED) that stand before a token and are calls of the tool; count the others."""
    lane = output.lane
    rows: list[tuple[object, ...]] = []
    for of_text in calls.partition_by(TEXT_KEY, maintain_order=True):
        text, offset = of_text["text"][0], of_text["offset"][0]
        place_in_text = scored_candidates.judged_places(worker, text)
        for digest, segment, context, source, place, asked, result, p_api, words in of_text.select(
            "digest", "segment", "context", "source", "at", "input", "result", "p_api", "words"
        ).iter_rows():
            token_place = place_in_text(place - offset)
            body, input, reason = scored_candidates.parsed_call(lane, f"{lane.tool.name}({asked})")
            if token_place is None or reason:
                rejected[shard, reason or "inside_a_token"] += 1
                continue
            key = (lane.key, shard, digest, segment, token_place.position, 0)
            cleaned = result and clean_result(result, lane.limits.max_result_characters)
            rows.append((*key, source, offset + token_place.offset, p_api, body, input, words, None, context, cleaned))
    numbered = pl.int_range(pl.len(), dtype=pl.Int32).over(*TEXT_KEY, "position")
    table = pl.DataFrame(rows, schema=output.stage.schema, orient="row").with_columns(sample=numbered)
    return table.sort(CALL_KEY)
