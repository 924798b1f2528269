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
    """Choose the largest number of texts in a chunk: `execution.chunk_texts`, or if it is not set, by the device."""
    if settings.execution.chunk_texts is not None:
        return settings.execution.chunk_texts
    return GPU_TEXTS if _runs_on_gpu(settings.model) else CPU_TEXTS


def _runs_on_gpu(model: ModelSettings) -> bool:
    """Return whether the model will run on a GPU of this machine."""
    import torch

    return model.device != "cpu" and torch.cuda.device_count() > 0


def choose_chunk_limits(plan: Plan, role: Role) -> ChunkLimits:
    """Choose how many texts and tokens a chunk may have. A chunk is what a worker computes and stores at once.

    Args:
        plan: The plan of the run.
        role: Which model computes the chunk: "proposer" or "judge".

    Raises:
        ModelError: The model is a checkpoint that does not exist yet.
    """
    model = plan.model_of(role)
    return ChunkLimits(texts=choose_chunk_size(plan.settings), tokens=_estimate_token_limit(model))


def _estimate_token_limit(model: ModelSettings) -> float:
    """Estimate how many tokens a chunk may have so that a CPU computes it in less than about a minute.

    Returns:
        Infinity for a small model, on a GPU, and for a model that does not run in torch.
    """
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
    """Split the texts of a shard that still have to be computed into chunks.

    Example: `size` is 2, and of the texts a b c d e f, the results of a and c are stored already.

    1. All texts are split into chunks, which do not depend on what is stored: ab, cd, ef.
    2. A chunk without any stored result is kept: ef.
    3. The missing texts of the other chunks are collected and split again: bd.

    Args:
        texts: All texts of the shard in a fixed order, each once. The columns are `text_digest`, `tokens` (only needed
            if `tokens` limits a chunk), and any others.
        lacking: The texts to compute. The columns are `text_digest` and `whole`, which is false if some results of the
            text are stored.
        size: The largest number of texts in a chunk.
        tokens: Roughly the largest number of tokens in a chunk. A chunk may exceed it by its last text.

    Returns:
        A table for each chunk, with the columns of `texts`.
    """
    chunk_number = _number_chunks(size, tokens)  # an expression that numbers the rows of a frame by their order
    numbered = texts.with_columns(chunk=chunk_number)

    # `whole` is null for texts that are stored completely.
    marked = numbered.join(lacking, on="text_digest", how="left", maintain_order="left")
    kept = _select_unstored_chunks(marked)
    other_missing = _select_lacking_outside(marked, kept["chunk"])
    split_again = other_missing.with_columns(chunk=chunk_number)

    chunks = [*kept.partition_by("chunk"), *split_again.partition_by("chunk")]
    return [chunk.drop("chunk", "whole") for chunk in chunks]


def _select_unstored_chunks(numbered: pl.DataFrame) -> pl.DataFrame:
    """Select the texts of chunks without any stored result.

    Args:
        numbered: The texts with the columns `chunk` (its number) and `whole` (true if no result of the text is stored).
    """
    is_unstored = pl.col("whole").fill_null(False)
    return numbered.filter(is_unstored.all().over("chunk"))


def _select_lacking_outside(numbered: pl.DataFrame, chunks: pl.Series) -> pl.DataFrame:
    """Select the texts that have to be computed and are not in the given chunks.

    Args:
        numbered: The texts with the columns `chunk` (its number) and `whole` (null if all results are stored).
        chunks: The numbers of the chunks.
    """
    is_lacking = pl.col("whole").is_not_null()
    is_in_chunks = pl.col("chunk").is_in(chunks.unique().implode())
    return numbered.filter(is_lacking & ~is_in_chunks)


def _number_chunks(size: int, tokens: float) -> pl.Expr:
    """Build an expression that gives each text the number of its chunk, in the order of the rows.

    Args:
        size: The largest number of texts in a chunk.
        tokens: Roughly the largest number of tokens in a chunk; infinity for no limit.
    """
    number_by_size = pl.int_range(pl.len()) // size
    if tokens == inf:
        return number_by_size

    # Split the chunks further: how often was the limit reached by the texts before, within the same chunk?
    tokens_before = (pl.col("tokens").cum_sum() - pl.col("tokens")).over(number_by_size)
    return pl.struct(number_by_size, tokens_before // tokens).rle_id()


def claim(claimed: Claimed, store: str, keys: pl.DataFrame) -> pl.DataFrame:
    """Select the rows that a shard has to compute, and note that they will be computed.

    Rows that an earlier shard of this run will compute are left out. So a text that occurs in two shards is computed
    once. This must be called once for each shard and row store, in the order of the shards.

    Args:
        claimed: For each row store, a list with the keys that each earlier shard will compute. The selected keys are
            added to it.
        store: The name of the row store, which keeps computed rows by their keys.
        keys: The keys of the rows that the shard lacks.

    Returns:
        The keys of the rows to compute.
    """
    keys_of_earlier_shards = claimed.setdefault(store, [])

    selected = keys
    if keys_of_earlier_shards:
        taken = pl.concat(keys_of_earlier_shards)
        selected = keys.join(taken, on=keys.columns, how="anti", maintain_order="left")

    keys_of_earlier_shards.append(selected)
    return selected


def release(claimed: Claimed) -> None:
    """Remove the keys of the earliest shard, after it was published. Later shards find its rows among the stored ones.

    Args:
        claimed: For each row store, a list with the keys that each shard will compute.
    """
    for keys_by_shard in claimed.values():
        del keys_by_shard[:1]


def require_whole(output: TableOutput, what: str, lacking: int) -> None:
    """Check that no stored rows were lost while a part of a table was read from them.

    Args:
        output: The table.
        what: What the rows are, in the plural, for the message.
        lacking: How many of the rows are missing.

    Raises:
        StorageError: Rows are missing, because a file of stored rows turned out to be damaged.
    """
    if lacking:
        raise StorageError(f"{lacking} {what} of {output.lane.key} were damaged while they were read; run again")
