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
"""Keys of up to this many passes are cached at once: decoding needs many rows together."""

STREAMED = 8
"""Texts of up to so many full caches follow each other: those that wait take the places of those that are done."""

OUT_OF_MEMORY = ("DefaultCPUAllocator", "CUBLAS_STATUS_ALLOC_FAILED")


@dataclass(frozen=True, slots=True)
class Places:
    """How many texts, and branches after them, keep their keys at once.

    `probes`: branches of a text, open while no sample is drawn, that tell p of a " [" of several tokens.
    """

    texts: int
    branches: int
    probes: int


class TokenBudget:
    """A limit on the tokens of a pass, padding included."""

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
        """Return the result of every index, in batches for `work` within `share` budgets or of a single index.

        Indices are sorted by length unless `order` is given. `lower` names the settings that shorten a sequence, for
        the error message. When `work` runs out of memory, the budget is halved and the batch is cut again, so `work`
        must be repeatable. Raises ModelError where a single sequence does not fit into memory under a budget of its own
        length: `work` may spend a larger one on several rows of a sequence.
        """
        results: dict[int, Result] = {}
        waiting = list(order) if order is not None else sorted(range(len(lengths)), key=lengths.__getitem__)
        while waiting:
            batch = next(batches(waiting, lengths, self.tokens * share))
            try:
                results.update(zip(batch, work(batch), strict=True))
            except RuntimeError as error:
                if not is_out_of_memory(error):
                    raise
                if len(batch) == 1 and self.tokens <= lengths[batch[0]]:
                    raise ModelError(
                        f"out of memory with a single sequence of {lengths[batch[0]]} tokens; lower {lower}, or use a "
                        "smaller model, dtype bfloat16 or a device with more memory"
                    ) from error
                self.tokens = max(1, self.tokens // 2)
            else:
                waiting = waiting[len(batch) :]
                continue
            if torch.cuda.is_available():
                torch.cuda.empty_cache()  # after the except block: the error keeps the tensors of its frames alive
        return [results[index] for index in range(len(lengths))]


def is_out_of_memory(error: RuntimeError) -> bool:
    """Return whether memory ran out. CPU and cuBLAS errors are recognized by their message only."""
    return isinstance(error, torch.OutOfMemoryError) or any(words in str(error) for words in OUT_OF_MEMORY)


def free_token_budget(model: Any, device: torch.device) -> int:
    """Estimate the tokens of a pass that take half of a GPU's free memory; return CPU_TOKENS on a CPU."""
    if device.type != "cuda":
        return CPU_TOKENS
    free, _ = torch.cuda.mem_get_info(device)
    config = model.config.get_text_config()
    values = CACHE_PASSES * 2 * config.num_hidden_layers + 32  # the cached keys and values, a layer's activations
    return max(CPU_TOKENS, int(free / 2 / (values * config.hidden_size * next(model.parameters()).element_size())))


def batches(order: Sequence[int], lengths: Sequence[int], tokens: int) -> Iterator[list[int]]:
    """Cut indices, in this order, into batches of at most `tokens` padded tokens or of a single index."""
    batch: list[int] = []
    longest = 0
    for index in order:
        longest = max(longest, lengths[index])
        if batch and (len(batch) + 1) * longest > tokens:
            yield batch
            batch, longest = [], lengths[index]
        batch.append(index)
    if batch:
        yield batch
