"""Losses and needs of chains: whether a last result helps beyond everything before it, and whether that was needed.

A chain is a sequence of calls at one position of a text, each made after the results of the earlier calls, such as
`[Calculator(3 * 4) -> 12] [Calculator(12 + 1) -> 13]`; a link is one of its calls with the result.

L+ is the loss after all calls and results. L- is the smallest of the loss without calls, after each shorter chain,
and after the chain without its last result; all but the last are known from the shorter chains. `need` tells what L+
cannot, since after the last result it hardly depends on the first: log p of a later call's input with an earlier
result, less that with another call's result in its place (beyond the paper).
"""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import islice, pairwise
from math import isfinite
from typing import TYPE_CHECKING, NamedTuple

import orjson
import polars as pl

from toolformer_dag.computing.plan import Lane, Plan
from toolformer_dag.computing.stage import Chunk, Claimed, Planned, TableOutput, Work
from toolformer_dag.computing.stored_rows import chunk_limits, claim, require_whole, text_chunks
from toolformer_dag.computing.worker import Worker
from toolformer_dag.lake.row_store import RowStore
from toolformer_dag.model.requests import LossRequest, NeedRequest
from toolformer_dag.pipeline.chained_candidates import chains_of, finished
from toolformer_dag.pipeline.losses import KEY as CALL_LOSS_KEY
from toolformer_dag.pipeline.losses import CallsWithLosses, loss_tokens, losses_identity, stored_losses
from toolformer_dag.texts.chains import ChainLink, chain_text, least_need, other_results, read_chain, written_chain

if TYPE_CHECKING:
    from toolformer_dag.model.engine import Engine

_CHAIN = {"text_digest": pl.String(), "position": pl.Int32(), "chain": pl.String()}
LOSSES = pl.Schema({**_CHAIN, "loss_call": pl.Float64(), "loss_result": pl.Float64(), "reason": pl.String()})
"""Stored losses of a `chain` (JSON) at a position of a text: without its last result, and with it."""
NEEDS = pl.Schema({**_CHAIN, "others": pl.String(), "need": pl.Float64()})
"""Stored needs of a chain; `others` are the results in place of its own with which they are compared, as JSON."""
LOSS_KEY = tuple(_CHAIN)  # text_digest, position, chain
NEED_KEY = (*_CHAIN, "others")


class _ChainLosses(NamedTuple):
    """The losses of a chain as they are stored, without its last result and with it; both null with a reason."""

    loss_call: float | None
    loss_result: float | None
    reason: str | None


class _NeedKey(NamedTuple):
    """What a need is stored under (NEED_KEY)."""

    text_digest: str
    position: int
    chain: str
    others: str


class ChainStores(NamedTuple):
    """The row stores of the losses and the needs of a lane's chains, under the plan's model."""

    losses: RowStore
    needs: RowStore


@dataclass(frozen=True, slots=True)
class ChainChunk:
    """Chains that lack losses (LOSS_KEY) or needs (NEED_KEY), and the texts (text_digest, text) they stand in."""

    losses: pl.DataFrame
    needs: pl.DataFrame
    texts: pl.DataFrame


def chained_calls(output: TableOutput, shard: str, level: int) -> pl.DataFrame:
    """Return the last calls of the chains of `level` calls of a shard.

    Columns: FINISHED; `chain`, the calls before it and itself; and `others`, the results with which the need of the
    chain is measured (`_results_of_others`). Both are JSON.
    """
    calls = finished(output, shard, level)
    chains = chains_of(output.lane, calls)
    return calls.with_columns(chain=chains, others=_results_of_others(chains, level))


def _results_of_others(chains: pl.Series, level: int) -> pl.Series:
    """Return for each chain a JSON list with another result for each of its calls but the last, to be swapped in.

    Swapped results tell whether the later calls need the earlier ones. The other result of the n-th call is a result
    of the n-th call of another chain (`_next_in_circle`). The list is null where one of the calls gets no other result,
    because all chains have the same.

    chains: as JSON, each of `level` calls. Three calls with the results "12", "7", "84" may give '["15", "9"]'.
    """
    links_of_chains = [read_chain(chain) for chain in chains]
    other_result_of = []  # an entry for the first call of a chain, the second, ...: result -> another result
    for call_index in range(level - 1):
        results = {links[call_index].result for links in links_of_chains}
        other_result_of.append(_next_in_circle(results))

    lists = []
    for links in links_of_chains:
        pairs = zip(other_result_of, links[:-1], strict=True)
        other_results_of_chain = [other_of.get(link.result) for other_of, link in pairs]
        is_complete = None not in other_results_of_chain
        lists.append(orjson.dumps(other_results_of_chain).decode() if is_complete else None)
    return pl.Series(lists, dtype=pl.String)


def _next_in_circle(results: Collection[str]) -> dict[str, str]:
    """Map each result to another: in a circle of all results, in the order of their hashes, to the next one.

    A single result has no other; the mapping is empty then.
    """
    if len(results) < 2:
        return {}
    circle = sorted(results, key=lambda result: blake2b(result.encode()).digest())
    return dict(pairwise([*circle, circle[0]]))


def _stores(worker: Worker, lane: Lane) -> ChainStores:
    identity = losses_identity(worker.plan, lane)
    return ChainStores(
        losses=worker.lane_rows(lane, "chained_losses", identity, LOSS_KEY, LOSSES),
        needs=worker.lane_rows(lane, "chained_needs", identity, NEED_KEY, NEEDS),
    )


def planned_chains(
    worker: Worker, output: TableOutput, chains: pl.DataFrame, texts: pl.DataFrame, claimed: Claimed
) -> Planned:
    """Plan the losses and needs of chains that are not stored yet: chunks for workers, and counts of distinct losses.

    A need says by how much the later calls of a chain gain from the true results of the earlier ones, in nats.

    chains: text_digest, position, chain (the calls, as JSON), others (results to swap in, as JSON; null where no need
        is to be computed), and other columns.
    texts: text_digest and text of at least the texts of the chains.
    claimed: the keys of rows that earlier shards of this run compute already. They are not planned again; the keys that
        are planned here are added.
    """
    stores = _stores(worker, output.lane)
    loss_keys = chains.select(LOSS_KEY).unique(maintain_order=True)
    need_keys = chains.filter(pl.col("others").is_not_null()).select(NEED_KEY).unique(maintain_order=True)
    # `claim` leaves out what earlier shards compute, and notes the rest.
    missing_losses = claim(claimed, stores.losses.name, stores.losses.missing(loss_keys))
    missing_needs = claim(claimed, stores.needs.name, stores.needs.missing(need_keys))

    chunks = _chunks(worker.plan, loss_keys, missing_losses, missing_needs, texts)
    work = Work(
        computed=Counter(losses=missing_losses.height),
        reused=Counter(losses=loss_keys.height - missing_losses.height),
    )
    return Planned(chunks, work)


def _chunks(
    plan: Plan, loss_keys: pl.DataFrame, missing_losses: pl.DataFrame, missing_needs: pl.DataFrame, texts: pl.DataFrame
) -> list[Chunk]:
    """Cut the missing losses and needs into chunks of about equal work; those of a text stay in one chunk.

    loss_keys: all chains of the shard (LOSS_KEY), from which the tokens of each text are estimated.
    missing_losses, missing_needs: the keys (LOSS_KEY, NEED_KEY) of what is to be computed.
    texts: text_digest and text of at least the texts of the chains.
    """
    chain_tokens = loss_tokens(pl.col("chain").str.len_bytes())
    texts_with_tokens = loss_keys.group_by("text_digest", maintain_order=True).agg(tokens=chain_tokens)
    digests = pl.concat([missing_losses.select("text_digest"), missing_needs.select("text_digest")])
    # Something of a text may be stored already (not `whole`): the texts that lack something are pooled, then cut.
    to_compute = digests.unique().with_columns(whole=False)
    distinct_texts = texts.select("text_digest", "text").unique("text_digest")
    chunks = []
    for batch in text_chunks(texts_with_tokens, to_compute, *chunk_limits(plan, "judge")):
        payload = ChainChunk(
            losses=missing_losses.join(batch, on="text_digest", how="semi", maintain_order="left"),
            needs=missing_needs.join(batch, on="text_digest", how="semi", maintain_order="left"),
            texts=distinct_texts.join(batch, on="text_digest", how="semi"),
        )
        chunks.append(Chunk(units=batch.height, payload=payload, tokens=float(batch["tokens"].sum())))
    return chunks


def compute_chains(worker: Worker, output: TableOutput, chunk: ChainChunk) -> Work:
    """Compute the losses and needs of a chunk of chains with the model, and append them to their row stores.

    Returns the tokens that went through the model.
    """
    engine = worker.engine("judge")
    tokens_before = Counter(engine.counts.as_dict())
    stores = _stores(worker, output.lane)
    text_of = dict(chunk.texts.select("text_digest", "text").iter_rows())
    stores.losses.append(_computed_losses(engine, chunk.losses.select(LOSS_KEY), text_of))
    stores.needs.append(_computed_needs(engine, chunk.needs.select(NEED_KEY), text_of))
    tokens = Counter(engine.counts.as_dict()) - tokens_before
    return Work(tokens, backends=frozenset({engine.backend.identity}))


def _computed_losses(engine: "Engine", keys: pl.DataFrame, text_of: Mapping[str, str]) -> pl.DataFrame:
    """Compute the losses of chains, without the last result and with it; return rows of LOSSES in the order of `keys`.

    keys: text_digest, position and chain (LOSS_KEY). text_of: text_digest -> text.
    """
    requests = []
    for digest, position, chain in keys.iter_rows():
        *earlier, last = read_chain(chain)
        requests.append(
            LossRequest(
                text=text_of[digest],
                position=position,
                tool=last.tool,
                input=last.input,
                result=last.result,
                calls=chain_text(earlier),
            )
        )
    # For each request the engine gives (loss_call, loss_result), or None where it does not fit the context.
    losses = [_values(pair) for pair in engine.chained_losses(requests)]
    schema = {name: LOSSES[name] for name in _ChainLosses._fields}
    return keys.hstack(pl.DataFrame(losses, schema=schema, orient="row"))


def _values(pair: tuple[float, float] | None) -> _ChainLosses:
    """Turn the losses of a chain (loss_call, loss_result; nats) into what is stored of them.

    pair: None where chain and text do not fit the model's context together, which is stored as does_not_fit. Infinite
    losses and NaN are stored as not_finite.
    """
    if pair is None:
        return _ChainLosses(None, None, reason="does_not_fit")
    loss_call, loss_result = pair
    if not isfinite(loss_call) or not isfinite(loss_result):
        return _ChainLosses(None, None, reason="not_finite")
    return _ChainLosses(loss_call, loss_result, reason=None)


def _computed_needs(engine: "Engine", keys: pl.DataFrame, text_of: Mapping[str, str]) -> pl.DataFrame:
    """Compute how much the later calls of chains need the earlier results; return `keys` with the column `need`.

    Each later call is compared twice: how probable it is after the true results, and after one of them is swapped for
    another (`other_results`). The gain of a comparison is the difference of the two log probabilities; the need of a
    chain is its least gain. All comparisons of all chains go through the engine together.

    keys: text_digest, position, chain and others (NEED_KEY). text_of: text_digest -> text.
    """
    requests: list[NeedRequest] = []
    request_counts = []  # of each chain
    for values in keys.iter_rows():
        requests_of_chain = _need_requests(_NeedKey(*values), text_of)
        request_counts.append(len(requests_of_chain))
        requests += requests_of_chain

    remaining_gains = iter(engine.needs(requests))  # in the order of the requests
    needs = []
    for chain, request_count in zip(keys["chain"], request_counts, strict=True):
        gains = list(islice(remaining_gains, request_count))
        needs.append(least_need(len(read_chain(chain)), gains))
    return keys.with_columns(need=pl.Series(needs, dtype=pl.Float64))


def _need_requests(key: _NeedKey, text_of: Mapping[str, str]) -> list[NeedRequest]:
    """Return a request to the engine for each comparison of a chain, true results against a swapped one."""
    comparisons = other_results(read_chain(key.chain), orjson.loads(key.others))
    return [
        NeedRequest(
            text=text_of[key.text_digest],
            position=key.position,
            before=comparison.before,
            other=comparison.before_with_swap,
            call=comparison.call,
        )
        for comparison in comparisons
    ]


def with_chains(worker: Worker, output: TableOutput, chains: pl.DataFrame) -> CallsWithLosses:
    """Add the stored losses and needs to chains; return them with the names of the row stores that they come from.

    chains: text_digest, position, chain (the calls, as JSON), others (results to compare with), and other columns.

    The columns that are added:
    - loss_empty: the loss without calls, in nats as all of them
    - loss_before: the smallest loss after a shorter chain that it begins with
    - loss_call, loss_result: the losses after the last call, without its result and with it
    - need: how much the later calls need the earlier results, in nats; null where `others` is null
    - reason: why the losses are null (does_not_fit, not_finite); or `idle_first`, where no later call needs the earlier
      results (`need` <= 0) and the settings do not keep such chains, which have their losses; else null

    Raises StorageError where rows were damaged since they were computed.
    """
    stores = _stores(worker, output.lane)
    losses = _stored_rows(output, stores.losses, chains.select(LOSS_KEY), "losses")
    needs = _stored_rows(output, stores.needs, chains.select(NEED_KEY).drop_nulls("others"), "needs")
    shorter = _shorter_chains(worker, output, chains)
    scored = chains.join(losses, on=LOSS_KEY, maintain_order="left")
    scored = scored.join(needs, on=NEED_KEY, how="left", maintain_order="left")
    scored = _without_incomplete_losses(scored.join(shorter, on=LOSS_KEY, maintain_order="left"))

    if not worker.plan.settings.filtering.keep_idle_first:
        idle_first = pl.when(pl.col("need") <= 0).then(pl.lit("idle_first"))
        scored = scored.with_columns(reason=pl.coalesce("reason", idle_first))
    return CallsWithLosses(scored, [stores.losses.name, stores.needs.name])


def _without_incomplete_losses(chains: pl.DataFrame) -> pl.DataFrame:
    """Return chains with all four losses, or with none and a `reason`; the column `first_reason` is dropped.

    Without the losses of the first call (`first_reason`), there is nothing to compare the whole chain with.
    """
    chains = chains.with_columns(reason=pl.coalesce("reason", "first_reason")).drop("first_reason")
    has_losses = pl.col("reason").is_null()
    loss_columns = ("loss_empty", "loss_before", "loss_call", "loss_result")
    return chains.with_columns(pl.when(has_losses).then(name).alias(name) for name in loss_columns)


def _stored_rows(output: TableOutput, store: RowStore, keys: pl.DataFrame, what: str) -> pl.DataFrame:
    """Return the rows that a row store has for `keys`, a row per distinct key.

    Raises StorageError where some are missing; `what` names the rows in its message ("losses").
    """
    distinct_keys = keys.unique()
    rows = store.stored(distinct_keys)
    require_whole(output, what, distinct_keys.height - rows.height)
    return rows


def _shorter_chains(worker: Worker, output: TableOutput, chains: pl.DataFrame) -> pl.DataFrame:
    """Look up the losses of the shorter chains that each chain begins with; return a row per distinct chain.

    For a chain of the calls a, b, c these are the losses after a, and after a and b. Columns:
    - LOSS_KEY (text_digest, position, chain)
    - loss_empty: the loss of the text without calls
    - loss_before: the smallest of the losses after the shorter chains, here min(loss after a, loss after a and b)
    - first_reason: why the first call has no losses; null where it has some

    Losses are null where none are stored.
    """
    lane = output.lane
    distinct = chains.select(LOSS_KEY).unique(maintain_order=True)
    links_of_chains = [read_chain(chain) for chain in distinct["chain"]]
    table = _with_first_calls(worker, lane, distinct, links_of_chains)
    loss_columns = ["loss_after_1"]
    for length in range(2, lane.depth):  # the longest chain has `depth` calls
        # The first `length` calls of each longer chain, else null. `table` has the order of `links_of_chains`.
        beginnings = [written_chain(links[:length]) if len(links) > length else None for links in links_of_chains]
        table = table.with_columns(beginning=pl.Series(beginnings, dtype=pl.String))
        loss_column = f"loss_after_{length}"
        table = _with_beginnings(_stores(worker, lane).losses, table, loss_column).drop("beginning")
        loss_columns.append(loss_column)
    table = table.with_columns(loss_before=pl.min_horizontal(loss_columns))
    return table.select(*LOSS_KEY, "loss_empty", "loss_before", "first_reason")


def _with_first_calls(
    worker: Worker, lane: Lane, chains: pl.DataFrame, links_of_chains: Sequence[Sequence[ChainLink]]
) -> pl.DataFrame:
    """Return `chains` with the columns input and result of their first call, and three more:

    - loss_empty: the loss without calls
    - loss_after_1: the loss after the first call and its result
    - first_reason: why its losses could not be computed (does_not_fit, not_finite), else null

    All three are null where nothing is stored of the first call.

    chains: LOSS_KEY. links_of_chains: the calls of each chain with their results, in the order of the rows.
    """
    first_calls = pl.DataFrame(
        {
            "input": [links[0].input for links in links_of_chains],
            "result": [links[0].result for links in links_of_chains],
        },
        schema={"input": pl.String, "result": pl.String},
    )
    with_first = chains.hstack(first_calls)
    losses = stored_losses(worker, lane, with_first.select(CALL_LOSS_KEY).unique())
    losses = losses.select(*CALL_LOSS_KEY, "loss_empty", loss_after_1="loss_result", first_reason="reason")
    return with_first.join(losses, on=CALL_LOSS_KEY, how="left", maintain_order="left")


def _with_beginnings(chain_losses: RowStore, table: pl.DataFrame, loss_column: str) -> pl.DataFrame:
    """Add the column `loss_column`: the loss stored for the shorter chain in the column `beginning`, else null.

    table: text_digest, position, beginning (the first calls of a longer chain, as JSON; may be null).
    """
    key = ("text_digest", "position", "beginning")
    beginnings = table.filter(pl.col("beginning").is_not_null()).select(key).unique()
    # In the row store a beginning is a chain like any other.
    losses = chain_losses.stored(beginnings.rename({"beginning": "chain"}))
    losses = losses.rename({"chain": "beginning", "loss_result": loss_column}).select(*key, loss_column)
    return table.join(losses, on=key, how="left", maintain_order="left")
