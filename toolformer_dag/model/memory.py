"""Cut work into batches under a token budget, which is halved when memory runs out."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from toolformer_dag.model.weights import ModelError

Result = TypeVar("Result")
CPU_TOKENS_PER_PASS = 2048
"""Tokens of a pass that stay in a processor's cache; larger passes were slower (benchmarks/LOG.md)."""

MAX_CACHED_PASSES = 8
"""Passes whose keys may be cached at the same time: decoding needs many rows together."""

CACHE_FILLS_PER_BATCH = 8
"""How many times the texts of a batch would fill the cache: waiting texts take the slots of those that are done."""

OUT_OF_MEMORY_MESSAGES = ("DefaultCPUAllocator", "CUBLAS_STATUS_ALLOC_FAILED")
"""Words in the messages of errors that mean that memory ran out."""


@dataclass(frozen=True, slots=True)
class CacheLimits:
    """How many texts and continuations of texts (branches) may have keys and values in the cache.

    Attributes:
        max_texts: Texts in which calls are being sampled.
        max_branches: Continuations of these texts, on which samples are drawn.
        max_probes: Continuations of a text by " [", where that is several tokens: p of the later ones is computed on
            them.
    """

    max_texts: int
    max_branches: int
    max_probes: int


class TokenBudget:
    """A limit on the number of tokens in a pass of the model, padding included.

    Attributes:
        max_tokens: The limit. It becomes smaller when memory runs out.
    """

    def __init__(self, max_tokens: int) -> None:
        self.max_tokens = max_tokens

    def run_in_batches(
        self,
        sequence_lengths: Sequence[int],
        run_batch: Callable[[list[int]], Iterable[Result]],
        *,
        settings_to_lower: str,
        budgets_per_batch: int = 1,
        sequence_order: Sequence[int] | None = None,
    ) -> list[Result]:
        """Run `run_batch` on batches of sequences, and collect one result per sequence.

        When memory runs out, the budget is halved and a smaller batch is tried.

        Args:
            sequence_lengths: The number of tokens of each sequence. Elsewhere a sequence is named by its index in this
                list.
            run_batch: Takes the indices of a batch, and returns one result for each. It may see a sequence more than
                once.
            settings_to_lower: The settings that make sequences shorter, for the error message.
            budgets_per_batch: A batch has at most `budgets_per_batch` times the budget in tokens, padding included, or
                it is a single sequence.
            sequence_order: The indices in the order in which they are cut into batches. By default, they are sorted by
                length.

        Returns:
            The results, in the order of `sequence_lengths`.

        Raises:
            ModelError: A single sequence does not fit into memory, even with a budget of only its own length.
        """
        shortest_first = sorted(range(len(sequence_lengths)), key=sequence_lengths.__getitem__)
        waiting_indices = shortest_first if sequence_order is None else list(sequence_order)

        result_by_index: dict[int, Result] = {}
        while waiting_indices:
            # The limit is read each time, because it may have become smaller.
            batch = next(iter_batches(waiting_indices, sequence_lengths, self.max_tokens * budgets_per_batch))
            try:
                result_by_index.update(zip(batch, run_batch(batch), strict=True))
            except RuntimeError as error:
                if not is_out_of_memory_error(error):
                    raise
                batch_lengths = [sequence_lengths[index] for index in batch]
                self._halve_budget(batch_lengths, settings_to_lower=settings_to_lower, error=error)
            else:
                waiting_indices = waiting_indices[len(batch) :]
                continue
            # This has to follow the except block, because the error keeps the tensors of its frames alive.
            _free_gpu_cache()

        return [result_by_index[index] for index in range(len(sequence_lengths))]

    def _halve_budget(self, sequence_lengths: Sequence[int], *, settings_to_lower: str, error: RuntimeError) -> None:
        """Halve the budget after a batch ran out of memory.

        Args:
            sequence_lengths: The numbers of tokens of the sequences in the batch.
            settings_to_lower: The settings that make sequences shorter, for the error message.
            error: The error that reported it.

        Raises:
            ModelError: The batch was a single sequence, and the budget is already no larger than its length.
        """
        is_smallest_batch = len(sequence_lengths) == 1 and self.max_tokens <= sequence_lengths[0]
        if is_smallest_batch:
            raise ModelError(
                f"out of memory with a single sequence of {sequence_lengths[0]} tokens; lower {settings_to_lower}, "
                "or use a smaller model, dtype bfloat16 or a device with more memory"
            ) from error
        self.max_tokens = max(1, self.max_tokens // 2)


def _free_gpu_cache() -> None:
    """Return memory that torch holds without need to the GPU, if there is one."""
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def is_out_of_memory_error(error: RuntimeError) -> bool:
    """Return whether an error means that memory ran out. Errors of CPU and cuBLAS only say so in their message."""
    if isinstance(error, torch.OutOfMemoryError):
        return True
    return any(words in str(error) for words in OUT_OF_MEMORY_MESSAGES)


def estimate_token_budget(model: Any, device: torch.device) -> int:
    """Estimate how many tokens of a pass fill half of a GPU's free memory.

    Returns:
        The number of tokens, at least CPU_TOKENS_PER_PASS. On a CPU it is CPU_TOKENS_PER_PASS.
    """
    if device.type != "cuda":
        return CPU_TOKENS_PER_PASS
    free_bytes, _ = torch.cuda.mem_get_info(device)
    fitting_tokens = int(free_bytes / 2 / _estimate_bytes_per_token(model))
    return max(CPU_TOKENS_PER_PASS, fitting_tokens)


def _estimate_bytes_per_token(model: Any) -> int:
    """Estimate how many bytes a token of a pass takes: its cached keys and values, and the activations of one layer."""
    config = model.config.get_text_config()
    cached_vectors = MAX_CACHED_PASSES * 2 * config.num_hidden_layers  # 2: keys and values
    activation_vectors = 32  # about so many in a layer
    bytes_per_number = next(model.parameters()).element_size()
    return int((cached_vectors + activation_vectors) * config.hidden_size * bytes_per_number)


def iter_batches(
    sequence_order: Sequence[int], sequence_lengths: Sequence[int], max_tokens: int
) -> Iterator[list[int]]:
    """Cut sequences into batches of neighbors, so that each batch fits into a number of tokens.

    Args:
        sequence_order: The indices of the sequences, in the order in which they are cut into batches.
        sequence_lengths: The number of tokens of each sequence.
        max_tokens: The maximum size of a batch, when every sequence is padded to the longest one in it.

    Yields:
        The indices of each batch. A sequence longer than `max_tokens` is a batch of its own.

    Example:
        iter_batches([0, 1, 2], [2, 3, 9], max_tokens=8)  # [0, 1], which takes 2 * 3 tokens, and [2]
    """
    batch: list[int] = []
    longest_length = 0
    for index in sequence_order:
        longest_length = max(longest_length, sequence_lengths[index])
        would_exceed_limit = (len(batch) + 1) * longest_length > max_tokens
        if batch and would_exceed_limit:
            # Start a new batch with this sequence.
            yield batch
            batch = []
            longest_length = sequence_lengths[index]
        batch.append(index)

    if batch:
        yield batch
