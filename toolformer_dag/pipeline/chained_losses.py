"""Compute the losses and needs of chains: whether a last result helps, and whether the earlier calls were needed.

A chain is a sequence of calls at one position of a text, each made after the results of the earlier calls, such as
`[Calculator(3 * 4) -> 12] [Calculator(12 + 1) -> 13]`; a link is one of its calls with the result.

L+ is the loss after all calls and results. L- is the smallest of the loss without calls, after each shorter chain,
and after the chain without its last result; all but the last come from the shorter chains. L+ hardly depends on the
first result, so a chain also has a `need` (beyond the paper): log p of a later call's input after an earlier result,
less log p of the same input after another call's result.
"""

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
from toolformer_dag.computing.stored_rows import choose_chunk_limits, claim, require_whole, split_texts_into_chunks
from toolformer_dag.computing.worker import Worker
from toolformer_dag.lake.row_store import RowStore
from toolformer_dag.model.requests import LossRequest, NeedRequest
from toolformer_dag.pipeline.chained_candidates import build_chains, read_calls_with_results
from toolformer_dag.pipeline.losses import KEY as CALL_LOSS_KEY
from toolformer_dag.pipeline.losses import CallsWithLosses, estimate_loss_tokens, losses_identity, read_stored_losses
from toolformer_dag.pipeline.work_counts import EngineMeter, count_planned_work
from toolformer_dag.texts.chains import (
    ChainLink,
    chain_text,
    compute_least_need,
    other_results,
    parse_chain,
    to_chain_json,
)

if TYPE_CHECKING:
    from toolformer_dag.model.engine import Engine

_CHAIN = {"text_digest": pl.String(), "position": pl.Int32(), "chain": pl.String()}
LOSSES = pl.Schema({**_CHAIN, "loss_call": pl.Float64(), "loss_result": pl.Float64(), "reason": pl.String()})
"""Stored losses of a `chain` (JSON) at a position of a text: without its last result, and with it."""
NEEDS = pl.Schema({**_CHAIN, "others": pl.String(), "need": pl.Float64()})
"""Stored needs of a chain; `others` are the results in place of its own with which they are compared, as JSON."""
LOSS_KEY = tuple(_CHAIN)  # text_digest, position, chain
NEED_KEY = (*_CHAIN, "others")
LOSS_COLUMNS = (
    "loss_empty",  # without calls
    "loss_before",  # the smallest after a shorter chain with which the chain begins
    "loss_call",  # after the last call, without its result
    "loss_result",  # after the result of the last call
)
"""Columns of the losses of a chain, in nats."""


class _ChainLosses(NamedTuple):
    """The losses of a chain as they are stored, without its last result and with it; both null with a reason."""

    loss_call: float | None
    loss_result: float | None
    reason: str | None


class _NeedKey(NamedTuple):
    """The key of a stored need (NEED_KEY)."""

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

    def text_of(self) -> dict[str, str]:
        """Return the texts by their hashes."""
        return dict(self.texts.select("text_digest", "text").iter_rows())

    def text_digests(self) -> pl.DataFrame:
        """Return the distinct `text_digest` of the chains that lack something."""
        of_losses = self.losses.select("text_digest")
        of_needs = self.needs.select("text_digest")
        return pl.concat([of_losses, of_needs]).unique()

    def of_texts(self, texts: pl.DataFrame) -> Chunk:
        """Return the chunk of work for some of the texts (text_digest, tokens)."""
        payload = ChainChunk(
            losses=self.losses.join(texts, on="text_digest", how="semi", maintain_order="left"),
            needs=self.needs.join(texts, on="text_digest", how="semi", maintain_order="left"),
            texts=self.texts.join(texts, on="text_digest", how="semi"),
        )
        return Chunk(units=texts.height, payload=payload, tokens=float(texts["tokens"].sum()))


def read_chained_calls(output: TableOutput, shard: str, level: int) -> pl.DataFrame:
    """Return the last calls of a shard's chains of `level` calls: CALL_COLUMNS, `chain` and `others`, both as JSON.

    others: the results that are swapped in to measure the need of the chain.
    """
    calls = read_calls_with_results(output, shard, level)
    chains = build_chains(output.lane, calls)
    return calls.with_columns(chain=chains, others=_choose_other_results(chains, level))


def _choose_other_results(chains: pl.Series, level: int) -> pl.Series:
    """Return for each chain a JSON list of results to swap in, one for each of its calls but the last.

    For a chain with the results "12", "7", "84" it may be '["15", "9"]': the results of other chains at the same index.
    It is null where all chains have the same result at an index.

    chains: as JSON, each of `level` calls.
    """
    links_of_chains = [parse_chain(chain) for chain in chains]  # a link is a call with its result
    other_result_of: list[dict[str, str]] = []  # for the first call of a chain, the second, ...: result -> another one
    for call_index in range(level - 1):
        results = {links[call_index].result for links in links_of_chains}
        other_result_of.append(_map_results_to_next(results))  # empty if there is only one result
    lists = [_find_swapped_results(links, other_result_of) for links in links_of_chains]
    return pl.Series(lists, dtype=pl.String)


def _find_swapped_results(links: Sequence[ChainLink], other_result_of: Sequence[Mapping[str, str]]) -> str | None:
    """Return another result for each call of a chain but the last, as JSON; None where a call has no other.

    other_result_of: for each call but the last, result -> another result.
    """
    other_results = []
    for link, other_of in zip(links[:-1], other_result_of, strict=True):
        if link.result not in other_of:
            return None
        other_results.append(other_of[link.result])
    return orjson.dumps(other_results).decode()


def _map_results_to_next(results: Collection[str]) -> dict[str, str]:
    """Map each result to the next one in a circle of all results, ordered by hash; empty for a single result."""
    if len(results) < 2:
        return {}
    circle = sorted(results, key=lambda result: blake2b(result.encode()).digest())
    return dict(pairwise([*circle, circle[0]]))


def _open_stores(worker: Worker, lane: Lane) -> ChainStores:
    """Open the row stores of a lane's chains."""
    identity = losses_identity(worker.plan, lane)
    return ChainStores(
        losses=worker.lane_rows(lane, "chained_losses", identity, LOSS_KEY, LOSSES),
        needs=worker.lane_rows(lane, "chained_needs", identity, NEED_KEY, NEEDS),
    )


def plan_chains(
    worker: Worker, output: TableOutput, chains: pl.DataFrame, texts: pl.DataFrame, claimed: Claimed
) -> Planned:
    """Plan what the model has to compute for the chains of a shard, in chunks: losses and needs that are not stored.

    Losses are those after the last call, with its result and without; a need is how much the later calls depend on the
    earlier results.

    chains: (text_digest, position, chain, others). `others` are the results that a need compares the chain's own with,
        as JSON; null where no need is to be computed.
    texts: (text_digest, text) of the chains.
    claimed: keys that earlier shards of this run plan already; the keys that are planned here are added.
    """
    stores = _open_stores(worker, output.lane)
    loss_keys = chains.select(LOSS_KEY).unique(maintain_order=True)  # text_digest, position, chain
    # _claimed_missing leaves out what is stored or claimed, and adds the rest to `claimed`.
    missing = ChainChunk(
        losses=_claim_missing(claimed, stores.losses, loss_keys),
        needs=_claim_missing(claimed, stores.needs, _select_need_keys(chains)),
        texts=texts.select("text_digest", "text").unique("text_digest"),
    )
    work = count_planned_work("losses", total=loss_keys.height, missing=missing.losses.height)
    return Planned(_split_into_chunks(worker.plan, loss_keys, missing), work)


def _claim_missing(claimed: Claimed, store: RowStore, keys: pl.DataFrame) -> pl.DataFrame:
    """Return the keys that a row store lacks and no earlier shard of this run computes, and claim them."""
    return claim(claimed, store.name, store.missing(keys))


def _select_need_keys(chains: pl.DataFrame) -> pl.DataFrame:
    """Return the distinct keys (NEED_KEY) of the chains that have results to swap in."""
    return chains.select(NEED_KEY).drop_nulls("others").unique(maintain_order=True)


def _split_into_chunks(plan: Plan, loss_keys: pl.DataFrame, missing: ChainChunk) -> list[Chunk]:
    """Cut the missing losses and needs into chunks of about equal work; those of a text are in one chunk.

    loss_keys: (text_digest, position, chain) of all chains of the shard.
    """
    limits = choose_chunk_limits(plan, "judge")  # the judge is the model that computes losses
    chain_tokens = estimate_loss_tokens(pl.col("chain").str.len_bytes())
    texts_with_tokens = loss_keys.group_by("text_digest", maintain_order=True).agg(tokens=chain_tokens)
    # Not `whole`: something of the text may be stored. Then text_chunks cuts these texts alone, not the whole shard.
    to_compute = missing.text_digests().with_columns(whole=False)
    batches = split_texts_into_chunks(texts_with_tokens, to_compute, size=limits.texts, tokens=limits.tokens)
    return [missing.of_texts(batch) for batch in batches]


def compute_chains(worker: Worker, output: TableOutput, chunk: ChainChunk) -> Work:
    """Compute the losses and needs of a chunk of chains with the model, and append them to their row stores."""
    engine = worker.engine("judge")
    meter = EngineMeter(engine)
    stores = _open_stores(worker, output.lane)
    text_of = chunk.text_of()
    stores.losses.append(_compute_losses(engine, chunk.losses.select(LOSS_KEY), text_of))
    stores.needs.append(_compute_needs(engine, chunk.needs.select(NEED_KEY), text_of))
    return meter.work()


def _compute_losses(engine: "Engine", keys: pl.DataFrame, text_of: Mapping[str, str]) -> pl.DataFrame:
    """Compute the losses of chains, without the last result and with it; return rows of LOSSES in the order of `keys`.

    keys: LOSS_KEY. text_of: text_digest -> text.
    """
    requests = [_build_loss_request(text_of[digest], position, chain) for digest, position, chain in keys.iter_rows()]
    losses = [_to_stored_losses(pair) for pair in engine.chained_losses(requests)]
    schema = {name: LOSSES[name] for name in _ChainLosses._fields}
    return keys.hstack(pl.DataFrame(losses, schema=schema, orient="row"))


def _build_loss_request(text: str, position: int, chain: str) -> LossRequest:
    """Return the request for the losses of the last call of a chain (JSON), which stands after the earlier ones."""
    *earlier, last = parse_chain(chain)
    return LossRequest(
        text=text,
        position=position,
        tool=last.tool,
        input=last.input,
        result=last.result,
        calls=chain_text(earlier),
    )


def _to_stored_losses(pair: tuple[float, float] | None) -> _ChainLosses:
    """Return the losses of a chain as they are stored.

    pair: (loss_call, loss_result) in nats; None where chain and text do not fit the context.
    """
    if pair is None:
        return _ChainLosses(None, None, reason="does_not_fit")
    loss_call, loss_result = pair
    if not isfinite(loss_call) or not isfinite(loss_result):
        return _ChainLosses(None, None, reason="not_finite")
    return _ChainLosses(loss_call, loss_result, reason=None)


def _compute_needs(engine: "Engine", keys: pl.DataFrame, text_of: Mapping[str, str]) -> pl.DataFrame:
    """Compute how much the later calls of chains (NEED_KEY) need the earlier results; add it as the column `need`."""
    requests: list[NeedRequest] = []
    for values in keys.iter_rows():
        requests += _build_need_requests(_NeedKey(*values), text_of)
    chain_lengths = [len(parse_chain(chain)) for chain in keys["chain"]]
    needs = _compute_least_needs(chain_lengths, engine.needs(requests))
    return keys.with_columns(need=pl.Series(needs, dtype=pl.Float64))


def _compute_least_needs(chain_lengths: Sequence[int], gains: Sequence[float]) -> list[float]:
    """Return the need of each chain: how much its least needed result helps a later call, in nats.

    Chains of 2 and 3 calls have 1 and 3 gains: from [0.3, 0.1, 2.0, 0.5] the first takes [0.3], the second the rest.

    chain_lengths: the number of calls of each chain.
    gains: how much a true result helps a later call, in nats; those of the first chain, then of the next.
    """
    remaining_gains = iter(gains)
    needs = []
    for length in chain_lengths:
        comparison_count = length * (length - 1) // 2  # each result with each later call
        gains_of_chain = list(islice(remaining_gains, comparison_count))
        needs.append(compute_least_need(length, gains_of_chain))
    return needs


def _build_need_requests(key: _NeedKey, text_of: Mapping[str, str]) -> list[NeedRequest]:
    """Return the requests that compare a chain's later calls after its true results and after swapped ones.

    For `[QA(Who?) -> She] [WikiSearch(She)]` there is one: how much likelier is WikiSearch(She) after "She" than after
    "Rome"? A longer chain has one for each result and each later call.
    """
    true_links = parse_chain(key.chain)
    swapped_in = orjson.loads(key.others)  # for each call but the last, the result in place of its own
    comparisons = other_results(true_links, swapped_in)
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
    """Add to chains (calls at one position, each after the results of the earlier ones) what is stored of them.

    - loss_empty, loss_before, loss_call, loss_result: in nats; null with a reason
    - need: how much the later calls need the earlier results, in nats; null where `others` is null
    - reason: why the losses are null (does_not_fit, not_finite); idle_first if no later call needs the earlier results

    chains: text_digest, position, chain (JSON), others (the results that the need compares with, JSON), and more.

    Raises StorageError if rows were damaged since they were computed.
    """
    stores = _open_stores(worker, output.lane)
    scored = _with_losses_and_needs(output, stores, chains)  # adds loss_call, loss_result, need, reason
    shorter = _read_losses_of_shorter_chains(worker, output, chains)  # loss_empty, loss_before, first_reason
    scored = scored.join(shorter, on=LOSS_KEY, maintain_order="left")
    scored = _without_incomplete_losses(scored)
    if not worker.plan.settings.filtering.keep_idle_first:
        scored = _with_idle_first(scored)
    return CallsWithLosses(scored, [stores.losses.name, stores.needs.name])


def _with_losses_and_needs(output: TableOutput, stores: ChainStores, chains: pl.DataFrame) -> pl.DataFrame:
    """Add the columns loss_call, loss_result, reason and need, which are stored for each chain."""
    losses = _read_stored_rows(output, stores.losses, chains.select(LOSS_KEY), "losses")
    needs = _read_stored_rows(output, stores.needs, _select_need_keys(chains), "needs")
    with_losses = chains.join(losses, on=LOSS_KEY, maintain_order="left")
    return with_losses.join(needs, on=NEED_KEY, how="left", maintain_order="left")


def _with_idle_first(chains: pl.DataFrame) -> pl.DataFrame:
    """Give chains the reason idle_first where no later call needs the earlier results (`need` <= 0)."""
    idle_first = pl.when(pl.col("need") <= 0).then(pl.lit("idle_first"))
    return chains.with_columns(reason=pl.coalesce("reason", idle_first))


def _without_incomplete_losses(chains: pl.DataFrame) -> pl.DataFrame:
    """Return chains with all LOSS_COLUMNS, or with none and a `reason`; the column `first_reason` is dropped.

    Without the losses of the first call (`first_reason`), there is nothing to compare the whole chain with.
    """
    chains = chains.with_columns(reason=pl.coalesce("reason", "first_reason")).drop("first_reason")
    has_losses = pl.col("reason").is_null()
    return chains.with_columns(pl.when(has_losses).then(name).alias(name) for name in LOSS_COLUMNS)


def _read_stored_rows(output: TableOutput, store: RowStore, keys: pl.DataFrame, what: str) -> pl.DataFrame:
    """Return the rows that a row store has for `keys`, a row per distinct key.

    Raises StorageError if some are missing; `what` names the rows in its message, such as "losses".
    """
    distinct_keys = keys.unique()
    rows = store.stored(distinct_keys)
    require_whole(output, what, distinct_keys.height - rows.height)
    return rows


def _read_losses_of_shorter_chains(worker: Worker, output: TableOutput, chains: pl.DataFrame) -> pl.DataFrame:
    """Look up the losses of the shorter chains that each chain begins with; return a row per distinct chain.

    A chain of three calls begins with its first call and with a chain of two. Columns:
    - text_digest, position, chain
    - loss_empty: without calls; loss_before: the smallest after a shorter chain. Null where none are stored
    - first_reason: why the first call has no losses, else null
    """
    distinct = chains.select(LOSS_KEY).unique(maintain_order=True)
    links_of_chains = [parse_chain(chain) for chain in distinct["chain"]]  # the calls of each chain
    table = _with_first_calls(worker, output.lane, distinct, links_of_chains)  # losses of single calls
    table = _with_loss_before(worker, output.lane, table, links_of_chains)  # and of chains of two or more
    return table.select(*LOSS_KEY, "loss_empty", "loss_before", "first_reason")


def _with_loss_before(
    worker: Worker, lane: Lane, table: pl.DataFrame, links_of_chains: Sequence[Sequence[ChainLink]]
) -> pl.DataFrame:
    """Add the column loss_before: the smallest stored loss after a shorter chain that the chain begins with.

    table: a row per chain: text_digest, position, chain, and loss_after_1 (after its first call).
    links_of_chains: the calls of each chain, in the order of the rows.
    """
    store = _open_stores(worker, lane).losses
    loss_columns = ["loss_after_1"]
    for length in range(2, lane.depth):  # the longest chain has `depth` calls
        # Adds loss_after_2, ...: null for a chain that has no more than `length` calls, which min_horizontal ignores.
        table = _with_losses_after(store, table, links_of_chains, length)
        loss_columns.append(f"loss_after_{length}")
    return table.with_columns(loss_before=pl.min_horizontal(loss_columns))


def _with_losses_after(
    store: RowStore, table: pl.DataFrame, links_of_chains: Sequence[Sequence[ChainLink]], length: int
) -> pl.DataFrame:
    """Add the column loss_after_2 (for the length 2): the stored loss after the first 2 calls of each longer chain.

    It is null for chains that are not longer. links_of_chains: the calls of each chain, in the order of the rows.
    """
    beginnings = [_build_beginning(links, length) for links in links_of_chains]  # as JSON; None for chains not longer
    with_beginnings = table.with_columns(beginning=pl.Series(beginnings, dtype=pl.String))
    with_losses = _with_loss_of_beginning(store, with_beginnings, f"loss_after_{length}")
    return with_losses.drop("beginning")


def _build_beginning(links: Sequence[ChainLink], length: int) -> str | None:
    """Return the first `length` calls of a longer chain, as JSON; None for a chain that is not longer."""
    return to_chain_json(links[:length]) if len(links) > length else None


def _with_first_calls(
    worker: Worker, lane: Lane, chains: pl.DataFrame, links_of_chains: Sequence[Sequence[ChainLink]]
) -> pl.DataFrame:
    """Add to chains (text_digest, position, chain) the input and result of their first call, and its stored losses.

    - loss_empty: without the call; loss_after_1: after its result. Null if they are not stored
    - first_reason: why its losses could not be computed, else null

    links_of_chains: the calls of each chain, in the order of the rows.
    """
    with_first = chains.hstack(_build_first_calls(links_of_chains))
    # Losses of single calls are stored under text_digest, position, input and result (CALL_LOSS_KEY).
    losses = read_stored_losses(worker, lane, with_first.select(CALL_LOSS_KEY).unique())
    losses = losses.select(*CALL_LOSS_KEY, "loss_empty", loss_after_1="loss_result", first_reason="reason")
    return with_first.join(losses, on=CALL_LOSS_KEY, how="left", maintain_order="left")


def _build_first_calls(links_of_chains: Sequence[Sequence[ChainLink]]) -> pl.DataFrame:
    """Return (input, result) of the first call of each chain."""
    first_links = [links[0] for links in links_of_chains]
    inputs = pl.Series("input", [link.input for link in first_links], dtype=pl.String)
    results = pl.Series("result", [link.result for link in first_links], dtype=pl.String)
    return pl.DataFrame([inputs, results])


def _with_loss_of_beginning(store: RowStore, table: pl.DataFrame, loss_column: str) -> pl.DataFrame:
    """Add the column `loss_column`: the stored loss after the calls that a chain begins with, null if none is stored.

    table: text_digest, position, and beginning: the first calls of a longer chain as JSON, such as
        '[{"tool": "QA", "input": "...", "result": "..."}]'; null for a chain without a beginning.
    """
    key = ("text_digest", "position", "beginning")
    beginnings = table.select(key).drop_nulls("beginning").unique()
    # The row store has the beginning under `chain`, like every chain, and its loss after the last result.
    stored = store.stored(beginnings.rename({"beginning": "chain"}))
    losses = stored.rename({"chain": "beginning", "loss_result": loss_column})
    return table.join(losses.select(*key, loss_column), on=key, how="left", maintain_order="left")
