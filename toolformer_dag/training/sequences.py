"""From texts to the sequences of each batch, in an order fixed before training starts."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, cycle, islice
from random import Random

import torch

from toolformer_dag.model.encoding import Encoding


@dataclass(frozen=True, slots=True)
class Examples:
    """`texts` went in: `split` were longer than a sequence, `empty` held nothing to predict. `tokens` in all."""

    sequences: tuple[list[int], ...]
    texts: int
    split: int
    empty: int
    tokens: int


def examples(encoding: Encoding, texts: Sequence[str], sequence_length: int) -> Examples:
    """Texts are neither packed together nor truncated.

    The paper names the sequence length only. A longer text becomes several sequences, each beginning with the last
    token of the one before, so that every token is predicted exactly once and none is lost.
    """
    ends = [] if encoding.tokenizer.eos_token_id is None else [int(encoding.tokenizer.eos_token_id)]
    whole = [encoding.bos + text.ids + ends for text in encoding.texts(texts) if text.ids]
    sequences = tuple(window for ids in whole for window in windows(ids, sequence_length))
    return Examples(
        sequences,
        texts=len(texts),
        split=sum(len(ids) > sequence_length for ids in whole),
        empty=len(texts) - sum(len(ids) > 1 for ids in whole),
        tokens=sum(map(len, sequences)),
    )


def windows(ids: list[int], length: int) -> Iterator[list[int]]:
    """Consecutive windows of at most `length` (at least 2) tokens that share one token with the window before."""
    for start in range(0, len(ids) - 1, length - 1):
        yield ids[start : start + length]


IGNORED = -100


def collate(rows: Sequence[Mapping[str, list[int]]]) -> dict[str, torch.Tensor]:
    """`input_ids`, `attention_mask` and `labels`, each [rows, longest]; padding is on the right and not predicted."""
    sequences = [torch.tensor(row["input_ids"]) for row in rows]
    return {
        "input_ids": _padded(sequences, 0),
        "attention_mask": _padded([torch.ones_like(ids) for ids in sequences], 0),
        "labels": _padded(sequences, IGNORED),
    }


def _padded(sequences: list[torch.Tensor], value: int) -> torch.Tensor:
    return torch.nn.utils.rnn.pad_sequence(sequences, batch_first=True, padding_value=value)


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
