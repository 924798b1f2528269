"""Cut work into batches under a token budget, which is halved when memory runs out."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from toolformer_dag.model.weights import ModelError

Result = TypeVar("Result")
CPU_TOKENS = 2048
"""Tokens of a pass that stay in a processor's cache; larger passes were slower (benchmarks/LOG.md)."""

CACHE_PASSES = 8
"""Passes whose keys may be cached at the same time: decoding needs many rows together."""

STREAMED = 8
"""How many times the texts of a batch would fill the cache: waiting texts take the slots of those that are done."""

OUT_OF_MEMORY = ("DefaultCPUAllocator", "CUBLAS_STATUS_ALLOC_FAILED")
"""Words in the messages of errors that mean that memory ran out."""


@dataclass(frozen=True, slots=True)
class CacheLimits:
    """How many texts and continuations of texts (branches) may have keys and values in the cache.

    - `texts`: texts in which calls are being sampled.
    - `branches`: continuations of these texts, on which samples are drawn.
    - `probes`: continuations of a text by " [", where that is several tokens: p of the later ones is computed on them.
    """

    texts: int
    branches: int
    probes: int


class TokenBudget:
    """A limit on the tokens of a pass, padding included. `tokens` becomes smaller when memory runs out."""

    def __init__(self, tokens: int) -> None:
        self.tokens = tokens

    def run(
        self,
        lengths: Sequence[int],
        work: Callable[[list[int]], Iterable[Result]],
        *,
        lower: str,
        share: int = 1,
        order: Sequence[int] | None = None,
    ) -> list[Result]:
        """Run `work` on batches of sequences, and collect one result per sequence.

        When memory runs out, the budget is halved and a smaller batch is tried.

        Args:
            lengths: The number of tokens of each sequence. Elsewhere a sequence is named by its index in this list.
            work: Takes the indices of a batch, and returns one result for each. It may see a sequence more than once.
            lower: The settings that make sequences shorter, for the error message.
            share: A batch has at most `share` times the budget in tokens, padding included, or it is a single sequence.
            order: The indices in the order in which they are cut into batches. By default, they are sorted by length.

        Returns:
            The results, in the order of `lengths`.

        Raises:
            ModelError: A single sequence does not fit into memory, even with a budget of only its own length.
        """
        results: dict[int, Result] = {}
        by_length = sorted(range(len(lengths)), key=lengths.__getitem__)
        waiting = by_length if order is None else list(order)

        while waiting:
            batch = next(batches(waiting, lengths, self.tokens * share))
            try:
                results.update(zip(batch, work(batch), strict=True))
            except RuntimeError as error:
                if not is_out_of_memory(error):
                    raise
                self._halve_budget([lengths[index] for index in batch], lower=lower, error=error)
            else:
                waiting = waiting[len(batch) :]  # the batch is done
                continue
            _free_gpu_cache()  # after the except block: the error keeps the tensors of its frames alive

        return [results[index] for index in range(len(lengths))]

    def _halve_budget(self, lengths: Sequence[int], *, lower: str, error: RuntimeError) -> None:
        """Halve the budget after a batch ran out of memory.

        Args:
            lengths: The numbers of tokens of the sequences in the batch.
            lower: The settings that make sequences shorter, for the error message.
            error: The error that said so.

        Raises:
            ModelError: The batch was a single sequence, and the budget is already no larger than its length.
        """
        if len(lengths) == 1 and self.tokens <= lengths[0]:
            raise ModelError(
                f"out of memory with a single sequence of {lengths[0]} tokens; lower {lower}, or use a "
                "smaller model, dtype bfloat16 or a device with more memory"
            ) from error
        self.tokens = max(1, self.tokens // 2)


def _free_gpu_cache() -> None:
    """Return memory that torch holds without need to the GPU, if there is one."""
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def is_out_of_memory(error: RuntimeError) -> bool:
    """Return whether an error says that memory ran out; errors of CPU and cuBLAS say so in their message alone."""
    return isinstance(error, torch.OutOfMemoryError) or any(words in str(error) for words in OUT_OF_MEMORY)


def estimate_token_budget(model: Any, device: torch.device) -> int:
    """Return about how many tokens of a pass fill half of a GPU's free memory; CPU_TOKENS on a CPU, and at least."""
    if device.type != "cuda":
        return CPU_TOKENS
    free_bytes, _ = torch.cuda.mem_get_info(device)
    return max(CPU_TOKENS, int(free_bytes / 2 / _estimate_bytes_per_token(model)))


def _estimate_bytes_per_token(model: Any) -> int:
    """Return about how many bytes a token of a pass takes: cached keys and values, and activations of one layer."""
    config = model.config.get_text_config()
    cached_vectors = CACHE_PASSES * 2 * config.num_hidden_layers  # 2: keys and values
    activation_vectors = 32  # about so many in a layer
    bytes_per_number = next(model.parameters()).element_size()
    return int((cached_vectors + activation_vectors) * config.hidden_size * bytes_per_number)


def batches(order: Sequence[int], lengths: Sequence[int], tokens: int) -> Iterator[list[int]]:
    """Cut sequences into batches of neighbours, so that each batch fits into a number of tokens.

    Args:
        order: The indices of the sequences, in the order in which they are cut into batches.
        lengths: The number of tokens of each sequence.
        tokens: The maximum size of a batch, when every sequence is padded to the longest one in it.

    Yields:
        The indices of each batch. A sequence longer than `tokens` is a batch of its own.

    Example:
        batches([0, 1, 2], lengths=[2, 3, 9], tokens=8)  # [0, 1], which takes 2 * 3 tokens, and [2]
    """
    batch: list[int] = []
    longest = 0
    for index in order:
        longest = max(longest, lengths[index])
        is_full = (len(batch) + 1) * longest > tokens
        if batch and is_full:  # start a new batch with this sequence
            yield batch
            batch = []
            longest = lengths[index]
        batch.append(index)

    if batch:  # the last one
        yield batch
