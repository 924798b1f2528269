"""Batches as large as memory allows: a budget of tokens, halved where it turns out too large."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from toolformer_dag.model.weights import ModelError

CPU_TOKENS = 2048
"""What stays in a processor's cache; more made passes slower (benchmarks/LOG.md)."""

HELD = 8
"""Keys are held for up to this many times the tokens of one pass: decoding wants many rows at once."""

OUT_OF_MEMORY = ("DefaultCPUAllocator", "CUBLAS_STATUS_ALLOC_FAILED")


class TokenBudget:
    """`tokens` is what one pass may hold, padding counted."""

    def __init__(self, tokens: int) -> None:
        self.tokens = tokens

    def run(
        self,
        lengths: Sequence[int],
        work: Callable[[list[int]], None],
        *,
        lower: str,
        share: int = 1,
        order: Sequence[int] | None = None,
    ) -> None:
        """Calls `work` on batches of indices, none over `share` budgets unless it is a single one.

        They are sorted by length, unless another `order` of the indices is given. `lower` names the settings that
        make a sequence shorter.

        Where `work` runs out of memory, the budget is halved and the batch cut again; `work` must bear repetition.
        Raises ModelError where a single sequence does not fit into memory.
        """
        waiting = list(order) if order is not None else sorted(range(len(lengths)), key=lengths.__getitem__)
        while waiting:
            batch = next(batches(waiting, lengths, self.tokens * share))
            try:
                work(batch)
            except RuntimeError as error:
                self._shrink(error, len(batch), lengths[batch[-1]], lower)
            else:
                waiting = waiting[len(batch) :]
                continue
            if torch.cuda.is_available():
                torch.cuda.empty_cache()  # not before the error is gone, which holds on to the tensors of its frames

    def _shrink(self, error: RuntimeError, batch: int, length: int, lower: str) -> None:
        if not is_out_of_memory(error):
            raise error
        if batch == 1:
            raise ModelError(
                f"out of memory with {length} tokens that cannot be parted; lower {lower}, or use a smaller model, "
                "dtype bfloat16 or a device with more memory"
            ) from error
        self.tokens = max(1, self.tokens // 2)


def is_out_of_memory(error: RuntimeError) -> bool:
    """On a GPU torch has a class for it; on a CPU, and where cuBLAS asks for memory itself, only words."""
    return isinstance(error, torch.OutOfMemoryError) or any(words in str(error) for words in OUT_OF_MEMORY)


def free_token_budget(model: Any, device: torch.device) -> int:
    """Tokens for one pass: half of a GPU's free memory by a rough estimate of what a token takes, else CPU_TOKENS."""
    if device.type != "cuda":
        return CPU_TOKENS
    free, _ = torch.cuda.mem_get_info(device)
    return max(CPU_TOKENS, int(free / 2 / _bytes_per_token(model)))


def _bytes_per_token(model: Any) -> int:
    """Keys and values of all layers, `HELD` times, and one layer's activations."""
    config = model.config.get_text_config()
    width, layers = int(config.hidden_size), int(config.num_hidden_layers)
    return (HELD * 2 * layers + 32) * width * int(next(model.parameters()).element_size())


def batches(order: Sequence[int], lengths: Sequence[int], tokens: int) -> Iterator[list[int]]:
    """Cuts indices, in this order, so that no batch, padded, is over `tokens`, unless it is a single one."""
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
