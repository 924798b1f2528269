"""Convert texts to training sequences, and fix the order of batches before training starts."""

from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, cycle, islice
from random import Random

from toolformer_dag.model.encoding import Encoding
from toolformer_dag.settings.training_settings import TrainingSettings


@dataclass(frozen=True, slots=True)
class Examples:
    """Training sequences of `texts` texts, or of other rows.

    `sequences`: each one or, packed, several lists of token ids. `split`: the number of texts longer than a sequence.
    `empty`: the number of texts with nothing to predict.
    """

    sequences: tuple[tuple[list[int], ...], ...]
    texts: int
    split: int
    empty: int

    @property
    def tokens(self) -> int:
        """Return the number of tokens of all sequences."""
        return sum(map(tokens_of, self.sequences))


def examples(encoding: Encoding, texts: Sequence[str], sequence_length: int, packing: bool = False) -> Examples:
    """Tokenize texts to sequences, with BOS and EOS where the tokenizer has them; texts are not truncated.

    The paper only gives the sequence length. A longer text becomes several sequences that each begin with the last
    token of the sequence before, so that every token is predicted exactly once. `packing` puts several of these into
    a sequence; `LanguageModeling.collate` keeps them apart.
    """
    whole = [encoding.bos + tokens.ids + encoding.eos for tokens in encoding.with_calls(texts) if tokens.ids]
    parts = [window for ids in whole for window in windows(ids, sequence_length)]
    return Examples(
        tuple(packed(parts, sequence_length) if packing else ((part,) for part in parts)),
        texts=len(texts),
        split=sum(len(ids) > sequence_length for ids in whole),
        empty=len(texts) - sum(len(ids) > 1 for ids in whole),
    )


def tokens_of(sequence: Sequence[list[int]]) -> int:
    """Return the number of tokens of a sequence, over all its lists."""
    return sum(map(len, sequence))


def windows(ids: list[int], length: int) -> Iterator[list[int]]:
    """Yield windows of at most `length` >= 2 tokens that share a token with the window before."""
    for start in range(0, len(ids) - 1, length - 1):
        yield ids[start : start + length]


def packed(parts: Sequence[list[int]], length: int) -> list[tuple[list[int], ...]]:
    """Fill sequences of at most `length` tokens with whole parts, the longest first, each where it fits best."""
    sequences: list[list[list[int]]] = []
    by_room: list[tuple[int, int]] = []  # (free tokens, sequence), ascending
    for part in sorted(parts, key=len, reverse=True):
        at = bisect_left(by_room, (len(part), 0))
        free, number = by_room.pop(at) if at < len(by_room) else (length, len(sequences))
        if number == len(sequences):
            sequences.append([])
        sequences[number].append(part)
        insort(by_room, (free - len(part), number))
    return [tuple(sequence) for sequence in sequences]


IGNORED = -100
"""The label of a token that is read and not predicted."""


GROUP_BATCHES = 50  # sequences are sorted by length within this many batches: less padding, but still shuffled


def training_steps(sequences: int, settings: TrainingSettings) -> int:
    """Return the number of steps; the last batch of an epoch is filled, so that no sequence misses an epoch."""
    epochs, batch_size, max_steps = settings.epochs, settings.batch_size, settings.max_steps
    in_epoch = -(-sequences // batch_size)
    if settings.passes is not None:
        max_steps = max(1, min(max_steps, settings.passes * sequences // batch_size))
    return max_steps if epochs is None else max(1, min(max_steps, round(epochs * in_epoch)))


def batch_order(lengths: Sequence[int], batch_size: int, steps: int, seed: int) -> list[int]:
    """Return `steps * batch_size` sequence indices in the order of batches; a batch has similar lengths."""
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
