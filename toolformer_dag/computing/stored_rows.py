"""Rows that are computed once and stored: which of them a shard has to compute, and which texts make up a chunk."""

from math import inf
from typing import NamedTuple

import polars as pl

from toolformer_dag.computing.plan import Plan, Role
from toolformer_dag.computing.stage import ClaimedKeys, TableOutput
from toolformer_dag.files import StorageError
from toolformer_dag.model.weights import (
    SMALL_PARAMETER_COUNT,
    count_folder_parameters,
    find_model_folder,
    resolve_model_name,
)
from toolformer_dag.settings.model_settings import ModelSettings
from toolformer_dag.settings.sections import Settings

CPU_CHUNK_TEXTS = 64
"""The largest number of texts in a chunk on a CPU."""
GPU_CHUNK_TEXTS = 512
"""The largest number of texts in a chunk on a GPU.

80 GB hold the attention keys of some 140 texts of GPT-J at a time. The other texts wait for a place.
"""
CPU_CHUNK_WORK = 2e12
"""The tokens of a chunk times the parameters of the model, on a CPU.

A core takes 40 seconds for that in float32, and 10 seconds in bfloat16.
"""
ASSUMED_PARAMETER_COUNT = 10**9
"""The assumed number of parameters of a model on the Hugging Face hub that was not downloaded yet."""
BYTES_PER_TOKEN = 4
"""The approximate number of bytes of text in a token, for estimates."""


class ChunkLimits(NamedTuple):
    """How large a chunk may be.

    Attributes:
        max_texts: The largest number of texts.
        max_tokens: Roughly the largest number of tokens. Infinity for no limit.
    """

    max_texts: int
    max_tokens: float


def choose_chunk_size(settings: Settings) -> int:
    """Choose the largest number of texts in a chunk: `execution.chunk_texts`, or if it is not set, by the device."""
    if settings.execution.chunk_texts is not None:
        return settings.execution.chunk_texts
    return GPU_CHUNK_TEXTS if _runs_on_gpu(settings.model) else CPU_CHUNK_TEXTS


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
    model = plan.get_model_settings(role)
    max_texts = choose_chunk_size(plan.settings)
    return ChunkLimits(max_texts, max_tokens=_estimate_token_limit(model))


def _estimate_token_limit(model: ModelSettings) -> float:
    """Estimate how many tokens a chunk may have so that a CPU computes it in less than about a minute.

    Returns:
        Infinity for a small model, on a GPU, and for a model that does not run in torch.
    """
    if not model.runs_in_torch or _runs_on_gpu(model):
        return inf

    folder = find_model_folder(resolve_model_name(model), model.revision)
    parameter_count = count_folder_parameters(folder) if folder else ASSUMED_PARAMETER_COUNT
    if parameter_count < SMALL_PARAMETER_COUNT:
        return inf
    return CPU_CHUNK_WORK / parameter_count


def split_texts_into_chunks(
    texts: pl.DataFrame, lacking_texts: pl.DataFrame, max_texts: int, max_tokens: float = inf
) -> list[pl.DataFrame]:
    """Split the texts of a shard that still have to be computed into chunks.

    Example: `max_texts` is 2, and of the texts a b c d e f, the results of a and c are stored already.

    1. All texts are split into chunks, which do not depend on what is stored: ab, cd, ef.
    2. A chunk without any stored result is kept: ef.
    3. The missing texts of the other chunks are collected and split again: bd.

    Args:
        texts: All texts of the shard in a fixed order, each once. The columns are `text_digest`, `tokens` (only needed
            if `max_tokens` limits a chunk), and any others.
        lacking_texts: The texts to compute. The columns are `text_digest` and `whole`, which is false if some results
            of the text are stored.
        max_texts: The largest number of texts in a chunk.
        max_tokens: Roughly the largest number of tokens in a chunk. A chunk may exceed it by its last text.

    Returns:
        A table for each chunk, with the columns of `texts`.
    """
    # A Polars expression. It numbers the chunks of whatever frame it is applied to, in the order of the rows.
    chunk_number = _build_chunk_number_expression(max_texts, max_tokens)
    numbered_texts = texts.with_columns(chunk=chunk_number)

    # This adds the column `whole`, which is null for texts that are stored completely.
    marked_texts = numbered_texts.join(lacking_texts, on="text_digest", how="left", maintain_order="left")
    texts_of_unstored_chunks = _select_unstored_chunks(marked_texts)

    other_lacking_texts = _select_lacking_outside(marked_texts, texts_of_unstored_chunks["chunk"])
    texts_split_again = other_lacking_texts.with_columns(chunk=chunk_number)

    chunks = [*texts_of_unstored_chunks.partition_by("chunk"), *texts_split_again.partition_by("chunk")]
    return [chunk.drop("chunk", "whole") for chunk in chunks]


def _select_unstored_chunks(numbered_texts: pl.DataFrame) -> pl.DataFrame:
    """Select the texts of chunks without any stored result.

    Args:
        numbered_texts: The texts with the columns `chunk` (its number) and `whole` (true if no result of the text is
            stored).
    """
    is_unstored = pl.col("whole").fill_null(False)
    return numbered_texts.filter(is_unstored.all().over("chunk"))


def _select_lacking_outside(numbered_texts: pl.DataFrame, chunk_numbers: pl.Series) -> pl.DataFrame:
    """Select the texts that have to be computed and are not in the given chunks.

    Args:
        numbered_texts: The texts with the columns `chunk` (its number) and `whole` (null if all results are stored).
        chunk_numbers: The numbers of the chunks.
    """
    is_lacking = pl.col("whole").is_not_null()
    is_in_chunks = pl.col("chunk").is_in(chunk_numbers.unique().implode())
    return numbered_texts.filter(is_lacking & ~is_in_chunks)


def _build_chunk_number_expression(max_texts: int, max_tokens: float) -> pl.Expr:
    """Build an expression that gives each text the number of its chunk, in the order of the rows.

    Example:
        If a chunk may have 3 texts and 10 tokens, four texts of 5 tokens each get the numbers 0, 0, 1 and 2. The third
        text exceeds the tokens, and the fourth exceeds the count of texts.

    Args:
        max_texts: The largest number of texts in a chunk.
        max_tokens: Roughly the largest number of tokens in a chunk. Infinity for no limit.
    """
    number_by_size = pl.int_range(pl.len()) // max_texts
    if max_tokens == inf:
        return number_by_size

    # Split the chunks further: how often was the limit reached by the texts before, within the same chunk?
    tokens_before = (pl.col("tokens").cum_sum() - pl.col("tokens")).over(number_by_size)
    return pl.struct(number_by_size, tokens_before // max_tokens).rle_id()


def claim_keys(claimed_keys: ClaimedKeys, store_name: str, lacking_keys: pl.DataFrame) -> pl.DataFrame:
    """Select the rows that a shard has to compute, and note that they will be computed.

    Rows that an earlier shard of this run will compute are left out. So a text that occurs in two shards is computed
    once. This must be called once for each shard and row store, in the order of the shards.

    Args:
        claimed_keys: For each row store, a list with the keys that each earlier shard will compute. The selected keys
            are added to it.
        store_name: The name of the row store, which keeps computed rows by their keys.
        lacking_keys: The keys of the rows that the shard lacks.

    Returns:
        The keys of the rows to compute.
    """
    keys_of_earlier_shards = claimed_keys.setdefault(store_name, [])

    keys_to_compute = lacking_keys
    if keys_of_earlier_shards:
        taken_keys = pl.concat(keys_of_earlier_shards)
        keys_to_compute = lacking_keys.join(taken_keys, on=lacking_keys.columns, how="anti", maintain_order="left")

    # An entry is added for every shard, even if it is empty, because the entries are released in order.
    keys_of_earlier_shards.append(keys_to_compute)
    return keys_to_compute


def release_earliest_keys(claimed_keys: ClaimedKeys) -> None:
    """Remove the keys of the earliest shard, after it was published. Later shards find its rows among the stored ones.

    Args:
        claimed_keys: For each row store, a list with the keys that each shard will compute.
    """
    for keys_by_shard in claimed_keys.values():
        del keys_by_shard[:1]


def require_no_lost_rows(output: TableOutput, row_description: str, lost_row_count: int) -> None:
    """Check that no stored rows were lost while a part of a table was read from them.

    Args:
        output: The table.
        row_description: What the rows are, in the plural, for the message.
        lost_row_count: How many of the rows are missing.

    Raises:
        StorageError: Rows are missing, because a file of stored rows turned out to be damaged.
    """
    if lost_row_count:
        raise StorageError(
            f"{lost_row_count} {row_description} of {output.lane.key} were damaged while they were read; run again"
        )
