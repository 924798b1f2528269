"""Rows that are computed once and stored: which of them a shard has to compute, and which texts make up a chunk."""

from math import inf
from typing import NamedTuple

import polars as pl

from toolformer_dag.computing.plan import Plan, Role
from toolformer_dag.computing.stage import Claimed, TableOutput
from toolformer_dag.files import StorageError
from toolformer_dag.model.weights import SMALL, model_folder, model_name, parameters
from toolformer_dag.settings.model_settings import ModelSettings
from toolformer_dag.settings.sections import Settings

CPU_TEXTS = 64
"""Texts of a chunk on a CPU."""
GPU_TEXTS = 512
"""Texts of a chunk on a GPU: 80 GB hold the keys of some 140 texts of GPT-J at a time, the others wait for a place."""
CPU_WORK = 2e12
"""Tokens of a chunk times parameters, on a CPU: a core takes 40 seconds for it in float32, 10 in bfloat16."""
UNSEEN_PARAMETERS = 10**9
"""The assumed number of parameters of a model of the hub that was not downloaded yet."""
TOKEN_BYTES = 4
"""Bytes of a token, about, for estimates."""


class ChunkLimits(NamedTuple):
    """The most texts of a chunk, and about the most tokens; inf: no limit of tokens."""

    texts: int
    tokens: float


def choose_chunk_size(settings: Settings) -> int:
    """Return the most texts of a chunk: `execution.chunk_texts`, else what suits the device."""
    if settings.execution.chunk_texts is not None:
        return settings.execution.chunk_texts
    return GPU_TEXTS if _runs_on_gpu(settings.model) else CPU_TEXTS


def _runs_on_gpu(model: ModelSettings) -> bool:
    """Return whether the model will run on a GPU of this machine."""
    import torch

    return model.device != "cpu" and torch.cuda.device_count() > 0


def choose_chunk_limits(plan: Plan, role: Role) -> ChunkLimits:
    """Return how many texts and tokens a chunk (what a worker computes and stores at once) has at most.

    role: the model that computes it, "proposer" or "judge". Raises ModelError.
    """
    model = plan.model_of(role)
    return ChunkLimits(texts=choose_chunk_size(plan.settings), tokens=_estimate_token_limit(model))


def _estimate_token_limit(model: ModelSettings) -> float:
    """Return about the most tokens of a chunk on a CPU; inf for a small model, on a GPU, and for other engines."""
    if not model.in_torch or _runs_on_gpu(model):
        return inf
    folder = model_folder(model_name(model), model.revision)
    parameter_count = parameters(folder) if folder else UNSEEN_PARAMETERS
    if parameter_count < SMALL:
        return inf
    return CPU_WORK / parameter_count


def split_texts_into_chunks(
    texts: pl.DataFrame, lacking: pl.DataFrame, size: int, tokens: float = inf
) -> list[pl.DataFrame]:
    """Cut the texts of a shard that have to be computed into chunks; return a frame per chunk, with `texts`' columns.

    For example with size 2 and the texts a b c d e f, of which a and c are stored:

    1. All texts are cut, so that a run without stored rows always has the same chunks: ab, cd, ef
    2. Chunks of which nothing is stored stay: ef
    3. The lacking texts of the other chunks are cut again: bd

    texts: every text of the shard once, in a fixed order: text_digest, other columns, and `tokens` where limited.
    lacking: the texts to compute: text_digest, and `whole`, false where some of the text is stored.
    size, tokens: the most texts of a chunk, and about the most tokens. A text with more tokens has its own chunk.
    """
    chunk_number = _number_chunks(size, tokens)  # an expression: numbers the rows of a frame by their order
    numbered = texts.with_columns(chunk=chunk_number)
    marked = numbered.join(lacking, on="text_digest", how="left", maintain_order="left")  # `whole` is null if stored
    unstored_chunks = _select_unstored_chunks(marked)
    pooled = _select_lacking_outside(marked, unstored_chunks["chunk"])
    pooled_chunks = pooled.with_columns(chunk=chunk_number)
    chunks = [*unstored_chunks.partition_by("chunk"), *pooled_chunks.partition_by("chunk")]
    return [chunk.drop("chunk", "whole") for chunk in chunks]


def _select_unstored_chunks(numbered: pl.DataFrame) -> pl.DataFrame:
    """Return the texts of the chunks of which nothing is stored. numbered: texts with `chunk` and `whole`."""
    is_unstored = pl.col("whole").fill_null(False)
    return numbered.filter(is_unstored.all().over("chunk"))


def _select_lacking_outside(numbered: pl.DataFrame, chunks: pl.Series) -> pl.DataFrame:
    """Return the texts that have to be computed and are in none of these chunks. numbered: texts with `chunk`."""
    is_lacking = pl.col("whole").is_not_null()
    is_in_chunks = pl.col("chunk").is_in(chunks.unique().implode())
    return numbered.filter(is_lacking & ~is_in_chunks)


def _number_chunks(size: int, tokens: float) -> pl.Expr:
    """Return the number of each text's chunk, in the order of the rows: at most `size` texts, about `tokens` tokens."""
    by_size = pl.int_range(pl.len()) // size
    if tokens == inf:
        return by_size
    # Of the chunks by size, the tokens before each text say how many limits are passed already.
    tokens_before = (pl.col("tokens").cum_sum() - pl.col("tokens")).over(by_size)
    return pl.struct(by_size, tokens_before // tokens).rle_id()


def claim(claimed: Claimed, store: str, keys: pl.DataFrame) -> pl.DataFrame:
    """Return those of `keys` that no earlier shard of this run computes already, and add them to `claimed`.

    So a text that stands in two shards is computed once. Call it once per shard and row store, in the order of shards.

    claimed: by row store, the keys of each earlier shard, a frame per shard.
    store: the name of the row store (computed rows, by key) for which the rows are computed.
    """
    claimed_before = claimed.setdefault(store, [])
    free = keys
    if claimed_before:
        free = keys.join(pl.concat(claimed_before), on=keys.columns, how="anti", maintain_order="left")
    claimed_before.append(free)
    return free


def release(claimed: Claimed) -> None:
    """Forget the keys of the earliest shard, which is published: its rows are stored, where later shards find them."""
    for keys_of_shards in claimed.values():
        del keys_of_shards[:1]


def require_whole(output: TableOutput, what: str, lacking: int) -> None:
    """Raise StorageError where rows are `lacking` that were stored before the part was read.

    what: what the rows are, in the plural, for the message.
    """
    if lacking:
        raise StorageError(f"{lacking} {what} of {output.lane.key} were damaged while they were read; run again")
