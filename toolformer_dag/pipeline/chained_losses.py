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
from toolformer_dag.computing.stage import Chunk, ClaimedKeys, Planned, TableOutput, Work
from toolformer_dag.computing.stored_rows import (
    choose_chunk_limits,
    claim_keys,
    require_no_lost_rows,
    split_texts_into_chunks,
)
from toolformer_dag.computing.worker import Worker
from toolformer_dag.lake.row_store import RowStore
from toolformer_dag.model.requests import LossRequest, NeedRequest
from toolformer_dag.pipeline.chained_candidates import build_chains, read_calls_with_results
from toolformer_dag.pipeline.losses import CALL_LOSS_KEY as CALL_LOSS_KEY
from toolformer_dag.pipeline.losses import (
    CallsWithLosses,
    collect_losses_identity,
    estimate_loss_tokens,
    read_stored_losses,
)
from toolformer_dag.pipeline.work_counts import EngineMeter, count_planned_work
from toolformer_dag.texts.chains import (
    ChainLink,
    build_swap_comparisons,
    compute_least_need,
    format_chain_json,
    format_chain_text,
    parse_chain,
)

if TYPE_CHECKING:
    from toolformer_dag.model.engine import Engine

_CHAIN_KEY_SCHEMA = {"text_digest": pl.String(), "position": pl.Int32(), "chain": pl.String()}
LOSS_SCHEMA = pl.Schema(
    {**_CHAIN_KEY_SCHEMA, "loss_call": pl.Float64(), "loss_result": pl.Float64(), "reason": pl.String()}
)
"""Stored losses of a `chain` (JSON) at a position of a text: without its last result, and with it."""
NEED_SCHEMA = pl.Schema({**_CHAIN_KEY_SCHEMA, "others": pl.String(), "need": pl.Float64()})
"""Stored needs of a chain; `others` are the results in place of its own with which they are compared, as JSON."""
LOSS_KEY_COLUMNS = tuple(_CHAIN_KEY_SCHEMA)  # text_digest, position, chain
NEED_KEY_COLUMNS = (*_CHAIN_KEY_SCHEMA, "others")
LOSS_COLUMNS = (
    "loss_empty",  # without calls
    "loss_before",  # the smallest after a shorter chain with which the chain begins
    "loss_call",  # after the last call, without its result
    "loss_result",  # after the result of the last call
)
"""Columns of the losses of a chain, in nats."""


class _ChainLosses(NamedTuple):
    """The losses of a chain as they are stored, in nats.

    Attributes:
        loss_call: The loss without the last result. None if there is a reason.
        loss_result: The loss with the last result. None if there is a reason.
        reason: Why there are no losses. None if there are.
    """

    loss_call: float | None
    loss_result: float | None
    reason: str | None


class _NeedKey(NamedTuple):
    """The key of a stored need (NEED_KEY_COLUMNS): how much the later calls of a chain need the earlier results.

    Attributes:
        text_digest: The hash of the text.
        position: The index of the token before which the chain stands.
        chain_json: The calls of the chain with their results, as JSON.
        replacing_results_json: The results that take the place of the chain's own to measure the need, as JSON.
    """

    text_digest: str
    position: int
    chain_json: str
    replacing_results_json: str


class ChainStores(NamedTuple):
    """The row stores of the losses and the needs of a lane's chains, under the plan's model."""

    loss_store: RowStore
    need_store: RowStore


@dataclass(frozen=True, slots=True)
class ChainChunk:
    """Chains that lack losses or needs, and the texts in which they stand.

    Attributes:
        loss_keys: The chains without losses, in the columns LOSS_KEY_COLUMNS.
        need_keys: The chains without a need, in the columns NEED_KEY_COLUMNS.
        texts: The texts, in the columns text_digest and text.
    """

    loss_keys: pl.DataFrame
    need_keys: pl.DataFrame
    texts: pl.DataFrame

    def map_digest_to_text(self) -> dict[str, str]:
        """Return the texts by their hashes."""
        return dict(self.texts.select("text_digest", "text").iter_rows())

    def select_text_digests(self) -> pl.DataFrame:
        """Return the distinct `text_digest` of the chains that lack something."""
        of_losses = self.loss_keys.select("text_digest")
        of_needs = self.need_keys.select("text_digest")
        return pl.concat([of_losses, of_needs]).unique()

    def build_chunk_for_texts(self, texts: pl.DataFrame) -> Chunk:
        """Return the chunk of work for some of the texts (text_digest, tokens)."""
        payload = ChainChunk(
            loss_keys=self.loss_keys.join(texts, on="text_digest", how="semi", maintain_order="left"),
            need_keys=self.need_keys.join(texts, on="text_digest", how="semi", maintain_order="left"),
            texts=self.texts.join(texts, on="text_digest", how="semi"),
        )
        return Chunk(unit_count=texts.height, payload=payload, estimated_tokens=float(texts["tokens"].sum()))


def read_chained_calls(output: TableOutput, shard: str, level: int) -> pl.DataFrame:
    """Read the chains of a shard that have `level` calls, each as its last call.

    Returns:
        One row per chain with the columns CALL_COLUMNS, `chain` (all its calls, as JSON) and `others` (the results, as
        JSON, that replace its own to measure whether its later calls need them).
    """
    calls = read_calls_with_results(output, shard, level)
    chains = build_chains(output.lane, calls)
    return calls.with_columns(chain=chains, others=_choose_replacing_results(chains, level))


def _choose_replacing_results(chain_jsons: pl.Series, level: int) -> pl.Series:
    """Choose, for every call of a chain but the last, a result that can replace its own.

    With the replacement it is measured whether later calls depend on the result. It is the result of another chain's
    call with the same index.

    Example:
        A chain with the results "12", "7" and "84" may get '["15", "9"]'.

    Args:
        chain_jsons: Chains of `level` calls each, as JSON.
        level: The number of calls in a chain.

    Returns:
        For each chain, the replacing results as a JSON list. It is null if all chains have the same result at
        some index, so that there is nothing to replace it with.
    """
    links_of_chains = [parse_chain(chain) for chain in chain_jsons]  # a link is a call with its result

    replacements_by_index: list[dict[str, str]] = []  # for each call but the last: result -> another result
    for call_index in range(level - 1):
        results_at_index = {links[call_index].result for links in links_of_chains}
        replacements_by_index.append(_map_result_to_next_result(results_at_index))  # empty if there is only one result

    json_lists = [_find_replacing_results_json(links, replacements_by_index) for links in links_of_chains]
    return pl.Series(json_lists, dtype=pl.String)


def _find_replacing_results_json(
    links: Sequence[ChainLink], replacements_by_index: Sequence[Mapping[str, str]]
) -> str | None:
    """Look up, for every call of a chain but the last, the result that replaces its own to see if later calls need it.

    Args:
        links: The calls of the chain with their results.
        replacements_by_index: For every call but the last, a mapping from a result to another result.

    Returns:
        The replacing results as a JSON list, or None if one of the calls has none.
    """
    replacing_results = []
    for link, replacements in zip(links[:-1], replacements_by_index, strict=True):
        if link.result not in replacements:
            return None
        replacing_results.append(replacements[link.result])
    return orjson.dumps(replacing_results).decode()


def _map_result_to_next_result(results: Collection[str]) -> dict[str, str]:
    """Map every result to another one: the next in a circle that is ordered by hash.

    The mapping is empty if there are fewer than two results.
    """
    if len(results) < 2:
        return {}
    circle = sorted(results, key=lambda result: blake2b(result.encode()).digest())
    return dict(pairwise([*circle, circle[0]]))


def _open_chain_stores(worker: Worker, lane: Lane) -> ChainStores:
    """Open the row stores of a lane's chains."""
    identity = collect_losses_identity(worker.plan, lane)
    return ChainStores(
        loss_store=worker.open_lane_row_store(lane, "chained_losses", identity, LOSS_KEY_COLUMNS, LOSS_SCHEMA),
        need_store=worker.open_lane_row_store(lane, "chained_needs", identity, NEED_KEY_COLUMNS, NEED_SCHEMA),
    )


def plan_chain_losses(
    worker: Worker, output: TableOutput, chains: pl.DataFrame, texts: pl.DataFrame, claimed_keys: ClaimedKeys
) -> Planned:
    """Plan which losses and needs of a shard's chains the model still has to compute.

    A chain has two losses, after its last call without the result and with it. Its need says how much the
    later calls depend on the earlier results.

    Args:
        worker: Opens the stores of what is computed already.
        output: The table to be computed, for one tool with its settings.
        chains: The columns text_digest, position, chain and `others`, the results (as JSON) that replace the
            chain's own to measure its need. `others` is null if no need is to be computed.
        texts: The columns text_digest and text, for the texts of the chains.
        claimed_keys: What earlier shards of this run will compute. Everything that is planned here is added to it.

    Returns:
        The work in chunks, and the counts of losses to compute and to reuse.
    """
    stores = _open_chain_stores(worker, output.lane)
    loss_keys = chains.select(LOSS_KEY_COLUMNS).unique(maintain_order=True)  # text_digest, position, chain
    need_keys = _select_need_keys(chains)

    # Take what is neither stored nor claimed by an earlier shard, and claim it.
    missing_work = ChainChunk(
        loss_keys=_claim_missing_keys(claimed_keys, stores.loss_store, loss_keys),
        need_keys=_claim_missing_keys(claimed_keys, stores.need_store, need_keys),
        texts=texts.select("text_digest", "text").unique("text_digest"),
    )

    chunks = _split_into_chunks(worker.plan, loss_keys, missing_work)
    work = count_planned_work("losses", total_count=loss_keys.height, missing_count=missing_work.loss_keys.height)
    return Planned(chunks, work)


def _claim_missing_keys(claimed_keys: ClaimedKeys, store: RowStore, keys: pl.DataFrame) -> pl.DataFrame:
    """Return the keys that a row store lacks and no earlier shard of this run computes, and claim them."""
    return claim_keys(claimed_keys, store.name, store.find_missing_keys(keys))


def _select_need_keys(chains: pl.DataFrame) -> pl.DataFrame:
    """Return the distinct keys (NEED_KEY_COLUMNS) of the chains that have results to swap in."""
    return chains.select(NEED_KEY_COLUMNS).drop_nulls("others").unique(maintain_order=True)


def _split_into_chunks(plan: Plan, loss_keys: pl.DataFrame, missing_work: ChainChunk) -> list[Chunk]:
    """Split what has to be computed for the chains of a shard into chunks of about equal work.

    These are losses and needs (how much the later calls of a chain depend on the earlier results). All of them that are
    missing for one text go into the same chunk.

    Args:
        plan: Gives the largest size of a chunk.
        loss_keys: All chains of the shard, stored or not: text_digest, position, chain.
        missing_work: The losses and needs to compute.
    """
    limits = choose_chunk_limits(plan, "judge")  # the judge is the model that computes losses

    estimated_tokens = estimate_loss_tokens(pl.col("chain").str.len_bytes())
    tokens_per_text = loss_keys.group_by("text_digest", maintain_order=True).agg(tokens=estimated_tokens)

    # `whole` would be true for a text of which nothing is stored. With False for all, the texts that lack something are
    # put together and split into chunks, and the other texts are left out.
    incomplete_texts = missing_work.select_text_digests().with_columns(whole=False)
    batches_of_texts = split_texts_into_chunks(
        tokens_per_text, incomplete_texts, max_texts=limits.max_texts, max_tokens=limits.max_tokens
    )
    return [missing_work.build_chunk_for_texts(batch) for batch in batches_of_texts]


def compute_chain_losses(worker: Worker, output: TableOutput, chunk: ChainChunk) -> Work:
    """Compute the missing losses and needs of a chunk's chains with the model, and store them.

    A need says how much the later calls of a chain depend on the earlier results.

    Returns:
        How many tokens the model ran, and with which backend.
    """
    engine = worker.get_engine("judge")
    meter = EngineMeter(engine)
    stores = _open_chain_stores(worker, output.lane)
    text_by_digest = chunk.map_digest_to_text()

    losses = _compute_losses(engine, chunk.loss_keys.select(LOSS_KEY_COLUMNS), text_by_digest)
    stores.loss_store.append_rows(losses)

    needs = _compute_needs(engine, chunk.need_keys.select(NEED_KEY_COLUMNS), text_by_digest)
    stores.need_store.append_rows(needs)
    return meter.measure_work()


def _compute_losses(engine: "Engine", loss_keys: pl.DataFrame, text_by_digest: Mapping[str, str]) -> pl.DataFrame:
    """Compute the losses of chains after the last call, without its result and with it.

    Args:
        engine: The model.
        loss_keys: The chains to measure, with the columns LOSS_KEY_COLUMNS.
        text_by_digest: The texts by their hash.

    Returns:
        One row per chain with the columns LOSS_SCHEMA, in the order of `loss_keys`.
    """
    requests = []
    for text_digest, position, chain in loss_keys.iter_rows():
        requests.append(_build_loss_request(text_by_digest[text_digest], position, chain))

    stored_losses = [_to_stored_losses(losses) for losses in engine.compute_chained_losses(requests)]
    schema = {name: LOSS_SCHEMA[name] for name in _ChainLosses._fields}
    return loss_keys.hstack(pl.DataFrame(stored_losses, schema=schema, orient="row"))


def _build_loss_request(text: str, position: int, chain_json: str) -> LossRequest:
    """Build the request for the losses of the last call of a chain, which follows the earlier calls.

    Args:
        text: The text without calls.
        position: Where the chain stands in the text.
        chain_json: The calls with their results, as JSON.
    """
    *earlier_links, last_link = parse_chain(chain_json)
    return LossRequest(
        text=text,
        position=position,
        tool=last_link.tool,
        input=last_link.input,
        result=last_link.result,
        earlier_calls=format_chain_text(earlier_links),
    )


def _to_stored_losses(losses: tuple[float, float] | None) -> _ChainLosses:
    """Convert the losses of a chain to the form in which they are stored.

    Args:
        losses: loss_call and loss_result in nats, or None if chain and text do not fit the model's context.

    Returns:
        The two losses, or the reason why they cannot be used.
    """
    if losses is None:
        return _ChainLosses(None, None, reason="does_not_fit")

    loss_call, loss_result = losses
    if not isfinite(loss_call) or not isfinite(loss_result):
        return _ChainLosses(None, None, reason="not_finite")
    return _ChainLosses(loss_call, loss_result, reason=None)


def _compute_needs(engine: "Engine", need_keys: pl.DataFrame, text_by_digest: Mapping[str, str]) -> pl.DataFrame:
    """Compute the need of chains of calls: how much the later calls depend on the earlier results.

    A result helps a later call if the call is likelier after it than after another result. The need is that of the
    chain's least helpful result, in nats.

    Args:
        engine: The model.
        need_keys: The chains and the results that replace their own, with the columns NEED_KEY_COLUMNS.
        text_by_digest: The texts by their hash.

    Returns:
        `need_keys` with one more column, `need`.
    """
    requests: list[NeedRequest] = []  # one or more per chain, in the order of `need_keys`
    for key_fields in need_keys.iter_rows():
        requests += _build_need_requests(_NeedKey(*key_fields), text_by_digest)

    gains = engine.compute_needs(requests)  # one per request
    # The length of a chain tells how many of the gains are its own.
    chain_lengths = [len(parse_chain(chain_json)) for chain_json in need_keys["chain"]]
    needs = _compute_least_needs(chain_lengths, gains)
    return need_keys.with_columns(need=pl.Series(needs, dtype=pl.Float64))


def _compute_least_needs(chain_lengths: Sequence[int], gains: Sequence[float]) -> list[float]:
    """Compute the need of each chain: how much its least needed result helps a later call, in nats.

    Example:
        A chain of 2 calls has one gain, a chain of 3 calls has three. With the chain lengths [2, 3] and the
        gains [0.3, 0.1, 2.0, 0.5], the first chain has [0.3] and the second has [0.1, 2.0, 0.5].

    Args:
        chain_lengths: The number of calls of each chain.
        gains: How much a true result helps a later call, in nats. The gains of the first chain come first,
            then those of the next.
    """
    remaining_gains = iter(gains)
    needs = []
    for chain_length in chain_lengths:
        gain_count = chain_length * (chain_length - 1) // 2  # one for each pair of a result and a later call
        gains_of_chain = list(islice(remaining_gains, gain_count))
        needs.append(compute_least_need(chain_length, gains_of_chain))
    return needs


def _build_need_requests(need_key: _NeedKey, text_by_digest: Mapping[str, str]) -> list[NeedRequest]:
    """Build the requests that measure whether the later calls of a chain need the earlier results.

    Each request compares how likely a call is after the true results and after one of them is replaced.

    Example:
        The chain `[QA(Who?) -> She] [WikiSearch(She)]` has one request: how much likelier is WikiSearch(She)
        after the result "She" than after "Rome"?

    Returns:
        One request for each pair of a result and a later call.
    """
    true_links = parse_chain(need_key.chain_json)
    replacing_results = orjson.loads(need_key.replacing_results_json)  # one for each call but the last

    requests = []
    for comparison in build_swap_comparisons(true_links, replacing_results):
        request = NeedRequest(
            text=text_by_digest[need_key.text_digest],
            position=need_key.position,
            earlier_calls=comparison.calls_before,
            other_earlier_calls=comparison.calls_before_with_swap,
            call=comparison.call_text,
        )
        requests.append(request)
    return requests


def with_chain_losses(worker: Worker, output: TableOutput, chains: pl.DataFrame) -> CallsWithLosses:
    """Add the stored losses and needs to a table of chains.

    A chain is a sequence of calls at one position of a text, each made after the results of the earlier ones.

    Args:
        worker: Opens the stores.
        output: The table to be computed, for one tool with its settings.
        chains: The columns text_digest, position, chain (as JSON), `others` (the results that replace the
            chain's own to measure its need, as JSON) and possibly more.

    Returns:
        The chains with these columns added:

        - loss_empty: the loss without calls, in nats
        - loss_before: the smallest loss after the first calls of the chain, without the last one
        - loss_call, loss_result: the losses after the whole chain, without and with the result of its last call
        - need: how much the later calls need the earlier results, in nats; null if `others` is null
        - reason: why there are no losses (such as does_not_fit or not_finite), or idle_first if `need` is 0 or
            less, unless the settings keep such chains

        All four losses are null if one of them could not be computed.

    Raises:
        StorageError: Stored rows were damaged since they were computed.
    """
    stores = _open_chain_stores(worker, output.lane)
    # Adds loss_call, loss_result, need and reason.
    with_own_losses = _with_losses_and_needs(output, stores, chains)

    # Adds loss_empty, loss_before and first_reason (why the first call has no losses).
    losses_of_shorter_chains = _read_losses_of_shorter_chains(worker, output, chains)
    with_all_losses = with_own_losses.join(losses_of_shorter_chains, on=LOSS_KEY_COLUMNS, maintain_order="left")

    scored_chains = _without_incomplete_losses(with_all_losses)  # also merges first_reason into reason
    if not worker.plan.settings.filtering.keep_idle_first:
        scored_chains = _with_idle_first_reasons(scored_chains)
    return CallsWithLosses(scored_chains, [stores.loss_store.name, stores.need_store.name])


def _with_losses_and_needs(output: TableOutput, stores: ChainStores, chains: pl.DataFrame) -> pl.DataFrame:
    """Add what is stored for each chain: the columns loss_call, loss_result, reason and need."""
    losses = _read_stored_rows(output, stores.loss_store, chains.select(LOSS_KEY_COLUMNS), "losses")
    needs = _read_stored_rows(output, stores.need_store, _select_need_keys(chains), "needs")

    with_losses = chains.join(losses, on=LOSS_KEY_COLUMNS, maintain_order="left")
    return with_losses.join(needs, on=NEED_KEY_COLUMNS, how="left", maintain_order="left")


def _with_idle_first_reasons(chains: pl.DataFrame) -> pl.DataFrame:
    """Give the reason idle_first to chains in which no later call needs the earlier results (`need` <= 0)."""
    idle_first = pl.when(pl.col("need") <= 0).then(pl.lit("idle_first"))
    return chains.with_columns(reason=pl.coalesce("reason", idle_first))


def _without_incomplete_losses(chains: pl.DataFrame) -> pl.DataFrame:
    """Remove the losses of chains for which one could not be computed, and give these chains a `reason`.

    If the first call has no losses (`first_reason`), there is nothing to compare the whole chain with. The column
    `first_reason` is dropped.
    """
    with_reasons = chains.with_columns(reason=pl.coalesce("reason", "first_reason")).drop("first_reason")
    has_losses = pl.col("reason").is_null()
    return with_reasons.with_columns(pl.when(has_losses).then(name).alias(name) for name in LOSS_COLUMNS)


def _read_stored_rows(output: TableOutput, store: RowStore, keys: pl.DataFrame, row_kind: str) -> pl.DataFrame:
    """Return the stored rows with some keys, one per distinct key.

    Args:
        output: The table to be computed, for the error message.
        store: Where the rows are stored.
        keys: The keys, which may repeat.
        row_kind: What the rows are, for the error message, such as "losses".

    Raises:
        StorageError: Some rows are missing.
    """
    distinct_keys = keys.unique()
    stored_rows = store.read_stored_rows(distinct_keys)
    require_no_lost_rows(output, row_kind, distinct_keys.height - stored_rows.height)
    return stored_rows


def _read_losses_of_shorter_chains(worker: Worker, output: TableOutput, chains: pl.DataFrame) -> pl.DataFrame:
    """Return the losses of the shorter chains with which each chain begins.

    Its last call only helps if the loss after the whole chain is below them. A chain of three calls begins with its
    first call and with a chain of two.

    Returns:
        One row per distinct chain with the columns:

        - text_digest, position, chain
        - loss_empty: the loss without calls, or null if it is not stored
        - loss_before: the smallest loss after a shorter chain, or null if none is stored
        - first_reason: why the first call has no losses, or null if it has some
    """
    distinct_chains = chains.select(LOSS_KEY_COLUMNS).unique(maintain_order=True)
    links_of_chains = [parse_chain(chain) for chain in distinct_chains["chain"]]  # the calls of each chain

    # Adds the losses of single calls: loss_empty, loss_after_1, first_reason.
    with_first_calls = _with_first_calls(worker, output.lane, distinct_chains, links_of_chains)
    # Adds loss_before, for which the losses of chains of two or more calls are read too.
    with_loss_before = _with_loss_before(worker, output.lane, with_first_calls, links_of_chains)
    return with_loss_before.select(*LOSS_KEY_COLUMNS, "loss_empty", "loss_before", "first_reason")


def _with_loss_before(
    worker: Worker, lane: Lane, chains_with_first_loss: pl.DataFrame, links_of_chains: Sequence[Sequence[ChainLink]]
) -> pl.DataFrame:
    """Add loss_before: the smallest stored loss after the first calls of a chain, without its last one.

    It is one of the losses that the whole chain has to beat. For a chain of four calls it is the smallest of the
    losses after its first call, its first two and its first three.

    Args:
        worker: Opens the store of losses.
        lane: The tool with its settings.
        chains_with_first_loss: One row per chain: text_digest, position, chain and loss_after_1, the loss after its
            first call.
        links_of_chains: The calls of each chain, in the order of the rows.
    """
    loss_store = _open_chain_stores(worker, lane).loss_store
    chains = chains_with_first_loss

    loss_columns = ["loss_after_1"]
    for call_count in range(2, lane.max_chain_calls):  # the longest chain has `max_chain_calls` calls
        # Adds the column loss_after_2, then loss_after_3, ... It is null for chains that are not longer.
        chains = _with_loss_after_first_calls(loss_store, chains, links_of_chains, call_count)
        loss_columns.append(f"loss_after_{call_count}")

    smallest_loss = pl.min_horizontal(loss_columns)  # ignores nulls
    return chains.with_columns(loss_before=smallest_loss)


def _with_loss_after_first_calls(
    loss_store: RowStore, chains: pl.DataFrame, links_of_chains: Sequence[Sequence[ChainLink]], call_count: int
) -> pl.DataFrame:
    """Add the stored loss after the first calls of each chain, as a column such as loss_after_2.

    Args:
        loss_store: The stored losses of chains.
        chains: One row per chain: text_digest, position, chain and other columns.
        links_of_chains: The calls of each chain, in the order of the rows.
        call_count: How many calls count as the first ones. The new column is null for chains that are not longer.
    """
    beginnings = [_build_beginning_json(links, call_count) for links in links_of_chains]  # as JSON, or None
    with_beginnings = chains.with_columns(beginning=pl.Series(beginnings, dtype=pl.String))
    with_losses = _with_loss_of_beginning(loss_store, with_beginnings, f"loss_after_{call_count}")
    return with_losses.drop("beginning")


def _build_beginning_json(links: Sequence[ChainLink], call_count: int) -> str | None:
    """Return the first `call_count` calls of a chain as JSON, or None if the chain is not longer than that."""
    if len(links) <= call_count:
        return None
    return format_chain_json(links[:call_count])


def _with_first_calls(
    worker: Worker, lane: Lane, chains: pl.DataFrame, links_of_chains: Sequence[Sequence[ChainLink]]
) -> pl.DataFrame:
    """Add the first call of each chain and the losses that are stored for it.

    Args:
        worker: Opens the store of losses.
        lane: The tool with its settings.
        chains: The columns text_digest, position and chain.
        links_of_chains: The calls of each chain, in the order of the rows.

    Returns:
        The chains with these columns added:

        - input, result: of the first call
        - loss_empty: the loss without the call, or null if it is not stored
        - loss_after_1: the loss after its result, or null if it is not stored
        - first_reason: why its losses could not be computed, else null
    """
    with_first_calls = chains.hstack(_build_first_calls_frame(links_of_chains))

    # The losses of single calls are stored under text_digest, position, input and result (CALL_LOSS_KEY).
    call_keys = with_first_calls.select(CALL_LOSS_KEY).unique()
    stored_losses = read_stored_losses(worker, lane, call_keys)
    losses = stored_losses.select(*CALL_LOSS_KEY, "loss_empty", loss_after_1="loss_result", first_reason="reason")
    return with_first_calls.join(losses, on=CALL_LOSS_KEY, how="left", maintain_order="left")


def _build_first_calls_frame(links_of_chains: Sequence[Sequence[ChainLink]]) -> pl.DataFrame:
    """Build a table with the input and the result of the first call of each chain."""
    first_links = [links[0] for links in links_of_chains]
    inputs = pl.Series("input", [link.input for link in first_links], dtype=pl.String)
    results = pl.Series("result", [link.result for link in first_links], dtype=pl.String)
    return pl.DataFrame([inputs, results])


def _with_loss_of_beginning(
    loss_store: RowStore, chains_with_beginnings: pl.DataFrame, loss_column: str
) -> pl.DataFrame:
    """Add the stored loss after the first calls of each chain.

    Args:
        loss_store: The stored losses of chains.
        chains_with_beginnings: The columns text_digest, position, `beginning` and others. A beginning is the first
            calls of a longer chain as JSON, such as '[{"tool": "QA", "input": "...", "result": "..."}]', or null.
        loss_column: The name of the new column. It is null if there is no beginning or no stored loss.
    """
    beginning_key = ("text_digest", "position", "beginning")
    beginnings = chains_with_beginnings.select(beginning_key).drop_nulls("beginning").unique()

    # A beginning is a chain itself: the store has it in the column `chain`.
    stored_rows = loss_store.read_stored_rows(beginnings.rename({"beginning": "chain"}))
    losses = stored_rows.rename({"chain": "beginning", "loss_result": loss_column})
    return chains_with_beginnings.join(
        losses.select(*beginning_key, loss_column), on=beginning_key, how="left", maintain_order="left"
    )
