"""Which sequences make up which batch: fixed before training starts, so that a resumed run sees the same ones."""

from collections.abc import Sequence
from itertools import chain, cycle, islice
from random import Random

GROUP_BATCHES = 50  # batches among which sequences are sorted by length: little padding, still much shuffling


def steps_of(sequences: int, batch_size: int, max_steps: int, epochs: float | None) -> int:
    """How many batches are trained on; an epoch's last batch is filled up, so no sequence misses an epoch."""
    in_epoch = -(-sequences // batch_size)
    return max_steps if epochs is None else max(1, min(max_steps, round(epochs * in_epoch)))


def batch_order(lengths: Sequence[int], batch_size: int, steps: int, seed: int) -> list[int]:
    """`steps * batch_size` indices, batch after batch; sequences of like length share a batch."""
    random = Random(seed)
    in_epoch = -(-len(lengths) // batch_size)
    epochs = (_epoch(lengths, batch_size, random) for _ in range(-(-steps // in_epoch)))
    return list(islice(chain.from_iterable(epochs), steps * batch_size))


def _epoch(lengths: Sequence[int], batch_size: int, random: Random) -> list[int]:
    shuffled = list(range(len(lengths)))
    random.shuffle(shuffled)
    padded = list(islice(cycle(shuffled), -(-len(shuffled) // batch_size) * batch_size))
    groups = [sorted(group, key=lengths.__getitem__) for group in _cut(padded, batch_size * GROUP_BATCHES)]
    batches = [batch for group in groups for batch in _cut(group, batch_size)]
    random.shuffle(batches)
    return list(chain.from_iterable(batches))


def _cut(items: list[int], size: int) -> list[list[int]]:
    return [items[at : at + size] for at in range(0, len(items), size)]
