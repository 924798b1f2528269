"""Rows that are computed once: what a shard lacks of them, which texts go through the model together."""

from math import inf

import polars as pl

from toolformer_dag.computing.plan import Plan, Role
from toolformer_dag.computing.stage import Claimed, TableOutput
from toolformer_dag.files import StorageError
from toolformer_dag.model.weights import SMALL, model_folder, model_name, parameters
from toolformer_dag.settings.model_settings import ModelSettings
from toolformer_dag.settings.sections import Settings

CPU_TEXTS, GPU_TEXTS = 64, 512
"""Texts of a chunk: 80 GB hold the keys of some 140 texts of GPT-J at a time, and others wait to take their places."""
CPU_WORK = 2e12
"""Tokens of a chunk times parameters, on a CPU: a core takes 40 seconds for it in float32, 10 in bfloat16."""
UNSEEN_PARAMETERS = 10**9
"""What a model of the hub is taken to have until it was fetched."""
TOKEN_BYTES = 4
"""Bytes of a token, about, for estimates."""


def chunk_size(settings: Settings) -> int:
    """Return `execution.chunk_texts`, else what suits the device."""
    if settings.execution.chunk_texts is not None:
        return settings.execution.chunk_texts
    return GPU_TEXTS if _on_gpu(settings.model) else CPU_TEXTS


def _on_gpu(model: ModelSettings) -> bool:
    import torch

    return model.device != "cpu" and torch.cuda.device_count() > 0


def chunk_limits(plan: Plan, role: Role) -> tuple[int, float]:
    """Return how many texts a chunk has at most, and how many tokens, about.

    Tokens have no limit for a small model, on a GPU, and where another engine runs the model.
    """
    model, size = plan.model_of(role), chunk_size(plan.settings)
    if not model.in_torch or _on_gpu(model):
        return size, inf
    folder = model_folder(model_name(model), model.revision)
    count = parameters(folder) if folder else UNSEEN_PARAMETERS
    return size, CPU_WORK / count if count >= SMALL else inf


def text_chunks(texts: pl.DataFrame, lacking: pl.DataFrame, size: int, tokens: float = inf) -> list[pl.DataFrame]:
    """Cut the texts that lack something into chunks of at most `size`, and of about `tokens` or a text that has more.

    `texts` (text_digest, ..., and `tokens` where these are limited) has every text of the shard once, in a fixed order;
    `lacking` (text_digest, whole) those that lack something, and whether it is the whole.
    """
    chunk = pl.int_range(pl.len()) // size
    if tokens < inf:
        before = (pl.col("tokens").cum_sum() - pl.col("tokens")).over(chunk)
        chunk = pl.struct(chunk, before // tokens).rle_id()
    numbered = texts.with_columns(chunk=chunk).join(lacking, on="text_digest", how="left", maintain_order="left")
    whole = numbered.filter(pl.col("whole").fill_null(False).all().over("chunk"))
    pooled = numbered.filter(pl.col("whole").is_not_null() & ~pl.col("chunk").is_in(whole["chunk"].unique().implode()))
    cut = [part for frame in (whole, pooled.with_columns(chunk=chunk)) for part in frame.partition_by("chunk")]
    return [part.drop("chunk", "whole") for part in cut]


def claim(claimed: Claimed, store: str, keys: pl.DataFrame) -> pl.DataFrame:
    """Return those of `keys` that no earlier shard of this run computes already, and claim them; once per shard."""
    known = claimed.setdefault(store, [])
    free = keys.join(pl.concat(known), on=keys.columns, how="anti", maintain_order="left") if known else keys
    known.append(free)
    return free


def release(claimed: Claimed) -> None:
    """Forget what the earliest shard claimed: its rows are stored, and whoever asks for them finds them there."""
    for keys in claimed.values():
        del keys[:1]


def require_whole(output: TableOutput, what: str, lacking: int) -> None:
    """Raise StorageError where rows that were stored before the part was read are `lacking` by now."""
    if lacking:
        raise StorageError(f"{lacking} {what} of {output.lane.key} were damaged while they were read; run again")
