"""Losses and needs of chains: whether a last result helps beyond everything before it, and whether that was needed.

L+ is the loss after all calls and results. L- is the smallest of the loss without calls, after each shorter chain,
and after the chain without its last result; all but the last are known from the shorter chains. `need` tells what L+
cannot, since after the last result it hardly depends on the first: log p of a later call's input with an earlier
result, less that with another call's result in its place (beyond the paper).
"""

from collections import Counter
from dataclasses import dataclass
from hashlib import blake2b
from itertools import pairwise
from math import isfinite

import orjson
import polars as pl

from toolformer_dag.computing.plan import Lane
from toolformer_dag.computing.stage import Chunk, Claimed, Planned, TableOutput, Work
from toolformer_dag.computing.stored_rows import chunk_limits, claim, require_whole, text_chunks
from toolformer_dag.computing.worker import Worker
from toolformer_dag.lake.row_store import RowStore
from toolformer_dag.model.requests import LossRequest, NeedRequest
from toolformer_dag.pipeline.chained_candidates import chains_of, finished
from toolformer_dag.pipeline.losses import (
    loss_tokens,
    losses_identity,
    stored_losses,
)
from toolformer_dag.texts.chains import chain_text, least_need, other_results, read_chain, written_chain

PLACE = {"text_digest": pl.String(), "position": pl.Int32(), "chain": pl.String()}
LOSSES = pl.Schema({**PLACE, "loss_call": pl.Float64(), "loss_result": pl.Float64(), "reason": pl.String()})
NEEDS = pl.Schema({**PLACE, "others": pl.String(), "need": pl.Float64()})
LOSS_KEY, NEED_KEY = tuple(PLACE), (*PLACE, "others")


@dataclass(frozen=True, slots=True)
class ChainChunk:
    """Chains that lack losses (LOSS_KEY) or needs (NEED_KEY), and the texts (text_digest, text) they stand in."""

    losses: pl.DataFrame
    needs: pl.DataFrame
    texts: pl.DataFrame


def chained_calls(output: TableOutput, shard: str, level: int) -> pl.DataFrame:
    """Return the last calls of the chains of `level` calls of a shard: FINISHED, `chain`, and `others` (`_others`)."""
    calls = finished(output, shard, level)
    chains = chains_of(output.lane, calls)
    return calls.with_columns(chain=chains, others=_others(chains))


def _others(chains: pl.Series) -> pl.Series:
    """Return for each chain as many results as it has calls but the last, as JSON: those that take their places.

    The results of the first calls of all chains stand in a circle in the order of their hashes, and so do those of the
    second ones; a chain gets the next in each circle. Null where there is no other.
    """
    links = [read_chain(chain) for chain in chains]
    results: list[list[str]] = [[] for _ in links]
    for at in range(max(map(len, links), default=1) - 1):
        circle = sorted({one[at].result for one in links}, key=lambda text: blake2b(text.encode()).digest())
        following = dict(pairwise([*circle, *circle[:1]]))
        for chain, others in zip(links, results, strict=True):
            others += [following[chain[at].result]] if len(circle) > 1 else []
    return pl.Series(
        [
            orjson.dumps(others).decode() if len(others) == len(chain) - 1 else None
            for chain, others in zip(links, results, strict=True)
        ],
        dtype=pl.String,
    )


def _stores(worker: Worker, lane: Lane) -> tuple[RowStore, RowStore]:
    identity = losses_identity(worker.plan, lane)
    losses = worker.lane_rows(lane, "chained_losses", identity, LOSS_KEY, LOSSES)
    return losses, worker.lane_rows(lane, "chained_needs", identity, NEED_KEY, NEEDS)


def planned_chains(
    worker: Worker, output: TableOutput, chains: pl.DataFrame, texts: pl.DataFrame, claimed: Claimed
) -> Planned:
    """Plan the losses of chains that are not stored; their needs where `others` is."""
    losses, needs = _stores(worker, output.lane)
    asked = chains.select(LOSS_KEY).unique(maintain_order=True)
    lacking = claim(claimed, losses.name, losses.missing(asked))
    needing = chains.filter(pl.col("others").is_not_null()).select(NEED_KEY).unique(maintain_order=True)
    unknown = claim(claimed, needs.name, needs.missing(needing))
    of_texts = pl.concat([lacking.select("text_digest"), unknown.select("text_digest")]).unique()
    tokens = loss_tokens(pl.col("chain").str.len_bytes())
    distinct = asked.group_by("text_digest", maintain_order=True).agg(tokens=tokens)
    by_digest = texts.select("text_digest", "text").unique("text_digest")
    chunks = [
        Chunk(
            batch.height,
            ChainChunk(
                lacking.join(batch, on="text_digest", how="semi", maintain_order="left"),
                unknown.join(batch, on="text_digest", how="semi", maintain_order="left"),
                by_digest.join(batch, on="text_digest", how="semi"),
            ),
            float(batch["tokens"].sum()),
        )
        for batch in text_chunks(distinct, of_texts.with_columns(whole=False), *chunk_limits(worker.plan, "judge"))
    ]
    counted = Work(computed=Counter(losses=lacking.height), reused=Counter(losses=asked.height - lacking.height))
    return Planned(chunks, counted)


def compute_chains(worker: Worker, output: TableOutput, chunk: ChainChunk) -> Work:
    """Compute and commit the losses and the needs of a chunk of chains."""
    engine, texts = worker.engine("judge"), dict(chunk.texts.select("text_digest", "text").iter_rows())
    before, (losses, needs) = Counter(engine.counts.as_dict()), _stores(worker, output.lane)
    wanted = list(chunk.losses.select(LOSS_KEY).iter_rows())
    requests = []
    for digest, position, chain in wanted:
        *earlier, last = read_chain(chain)
        requests.append(LossRequest(texts[digest], position, last.tool, last.input, last.result, chain_text(earlier)))
    pairs = zip(wanted, engine.chained_losses(requests), strict=True)
    losses.append(pl.DataFrame([(*key, *_values(pair)) for key, pair in pairs], schema=LOSSES, orient="row"))
    keys = list(chunk.needs.select(NEED_KEY).iter_rows())
    asked = [other_results(read_chain(chain), orjson.loads(others)) for _, _, chain, others in keys]
    gains = iter(
        engine.needs(
            [
                NeedRequest(texts[key[0]], key[1], *triple)
                for key, triples in zip(keys, asked, strict=True)
                for triple in triples
            ]
        )
    )
    entries = [
        (*key, least_need(len(read_chain(key[2])), [next(gains) for _ in triples]))
        for key, triples in zip(keys, asked, strict=True)
    ]
    needs.append(pl.DataFrame(entries, schema=NEEDS, orient="row"))
    return Work(Counter(engine.counts.as_dict()) - before, backends=frozenset({engine.backend.identity}))


def _values(pair: tuple[float, float] | None) -> tuple[float | None, float | None, str | None]:
    if pair is None:
        return None, None, "does_not_fit"
    return (*pair, None) if all(map(isfinite, pair)) else (None, None, "not_finite")


def with_chains(worker: Worker, output: TableOutput, chains: pl.DataFrame) -> tuple[pl.DataFrame, list[str]]:
    """Return `chains` with their losses and reason, `loss_before` and `need`, and the names of the row stores.

    Raises StorageError where some were damaged meanwhile.
    """
    losses, needs = _stores(worker, output.lane)
    own = losses.stored(chains.select(LOSS_KEY).unique())
    require_whole(output, "losses", chains.select(LOSS_KEY).n_unique() - own.height)
    asked = chains.filter(pl.col("others").is_not_null()).select(NEED_KEY).unique()
    known = needs.stored(asked)
    require_whole(output, "needs", asked.height - known.height)
    scored = chains.join(own, on=LOSS_KEY, maintain_order="left").join(
        known, on=NEED_KEY, how="left", maintain_order="left"
    )
    shorter = _before(worker, output, chains)
    scored = scored.join(shorter, on=LOSS_KEY, maintain_order="left").with_columns(
        reason=pl.coalesce("reason", "before_reason")
    )
    unfit = pl.col("reason").is_not_null()
    numbers = ("loss_empty", "loss_before", "loss_call", "loss_result")
    scored = scored.with_columns(pl.when(~unfit).then(name).alias(name) for name in numbers)
    if not worker.plan.settings.filtering.keep_idle_first:
        idle = pl.when(pl.col("need") <= 0).then(pl.lit("idle_first"))
        scored = scored.with_columns(reason=pl.coalesce("reason", idle))
    return scored.drop("before_reason"), [losses.name, needs.name]


def _before(worker: Worker, output: TableOutput, chains: pl.DataFrame) -> pl.DataFrame:
    """(LOSS_KEY, loss_empty, loss_before, before_reason): what the shorter chains of each chain have."""
    lane, losses = output.lane, _stores(worker, output.lane)[0]
    distinct = chains.select(LOSS_KEY).unique(maintain_order=True)
    links = [read_chain(chain) for chain in distinct["chain"]]
    first = pl.DataFrame(
        {"input": [calls[0].input for calls in links], "result": [calls[0].result for calls in links]},
        schema={"input": pl.String, "result": pl.String},
    )
    keyed = distinct.hstack(first)
    keys = ("text_digest", "position", "input", "result")
    alone = stored_losses(worker, lane, keyed.select(keys).unique())
    joined = keyed.join(
        alone.select(*keys, "loss_empty", "reason", first="loss_result"), on=keys, how="left", maintain_order="left"
    )
    befores = [pl.col("first")]
    for length in range(2, lane.depth):
        cut = [written_chain(calls[:length]) if len(calls) > length else None for calls in links]
        joined = joined.with_columns(cut=pl.Series(cut, dtype=pl.String))
        stored = losses.stored(
            joined.filter(pl.col("cut").is_not_null()).select("text_digest", "position", chain="cut").unique()
        )
        stored = stored.select("text_digest", "position", pl.col("loss_result").alias(f"before_{length}"), cut="chain")
        joined = joined.join(stored, on=("text_digest", "position", "cut"), how="left", maintain_order="left").drop(
            "cut"
        )
        befores.append(pl.col(f"before_{length}"))
    known = joined.with_columns(loss_before=pl.min_horizontal(befores), before_reason="reason")
    return known.select(*LOSS_KEY, "loss_empty", "loss_before", "before_reason")
