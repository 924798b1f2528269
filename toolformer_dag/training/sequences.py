"""Convert texts to training sequences, and fix the order of batches before training starts."""

import math
from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, cycle, islice
from random import Random
from typing import NamedTuple

from toolformer_dag.model.encoding import Encoding
from toolformer_dag.settings.training_settings import TrainingSettings


@dataclass(frozen=True, slots=True)
class Examples:
    """Training sequences, with counts of the texts (or other rows of an objective) that they were made of.

    - `sequences`: each sequence is a tuple of lists of token ids: one list, or with packing several, which must not
      attend to each other.
    - `texts`: the number of texts, empty ones too.
    - `split`: how many texts were longer than a sequence and became several.
    - `empty`: how many texts have nothing to predict, since they have at most one token.
    """

    sequences: tuple[tuple[list[int], ...], ...]
    texts: int
    split: int
    empty: int

    @property
    def tokens(self) -> int:
        """Return the number of tokens of all sequences."""
        return sum(tokens_of(sequence) for sequence in self.sequences)


def examples(encoding: Encoding, texts: Sequence[str], sequence_length: int, packing: bool = False) -> Examples:
    """Tokenize texts to training sequences, with BOS and EOS if the tokenizer has them.

    Args:
        encoding: The tokenizer.
        texts: The texts, which may contain calls.
        sequence_length: The maximum number of tokens in a sequence. A longer text is cut into several sequences, so
            that every token after its first is predicted exactly once.
        packing: Whether several texts may share a sequence. `LanguageModeling.collate` keeps them apart.
    """
    tokenized_texts = _tokenize_texts(encoding, texts)  # without texts that have no token
    lengths = [len(ids) for ids in tokenized_texts]
    texts_to_learn = sum(length > 1 for length in lengths)  # in a single token, there is nothing to predict
    split_texts = sum(length > sequence_length for length in lengths)

    sequences = _build_sequences(tokenized_texts, sequence_length, packing)
    return Examples(
        sequences=tuple(sequences),
        texts=len(texts),
        split=split_texts,
        empty=len(texts) - texts_to_learn,
    )


def _build_sequences(tokenized_texts: Sequence[list[int]], length: int, packing: bool) -> list[tuple[list[int], ...]]:
    """Return training sequences of at most `length` tokens: of one text each or, with `packing`, of several."""
    parts: list[list[int]] = []
    for ids in tokenized_texts:
        parts.extend(windows(ids, length))
    if packing:
        return packed(parts, length)
    return [(part,) for part in parts]


def _tokenize_texts(encoding: Encoding, texts: Sequence[str]) -> list[list[int]]:
    """Return the token ids of each text between BOS and EOS; texts without a token are left out."""
    tokenized_texts: list[list[int]] = []
    for tokens in encoding.with_calls(texts):
        if tokens.ids:
            tokenized_texts.append(encoding.bos + tokens.ids + encoding.eos)
    return tokenized_texts


def tokens_of(sequence: Sequence[list[int]]) -> int:
    """Return the number of tokens of a sequence, over all its lists."""
    return sum(len(part) for part in sequence)


def windows(ids: list[int], length: int) -> Iterator[list[int]]:
    """Yield windows of at most `length` >= 2 tokens, each of which begins with the last token of the one before.

    Fewer than two tokens have no window, since the first token is never predicted.
    """
    for start in range(0, len(ids) - 1, length - 1):
        yield ids[start : start + length]


def packed(parts: Sequence[list[int]], length: int) -> list[tuple[list[int], ...]]:
    """Pack whole parts into sequences of at most `length` tokens (best-fit decreasing).

    The longest part comes first; each goes to the sequence with the least room that is enough, else to a new one.
    """
    sequences = _OpenSequences(length)
    for part in sorted(parts, key=len, reverse=True):
        sequences.add(part)
    return [tuple(sequence) for sequence in sequences.parts]


class _OpenSequences:
    """Sequences that are being filled with parts, in the order in which they were begun (`parts`)."""

    def __init__(self, length: int) -> None:
        self._length = length
        self._by_room: list[_Room] = []  # the room of every sequence, ascending
        self.parts: list[list[list[int]]] = []

    def add(self, part: list[int]) -> None:
        """Add a part to the sequence with the least room that is enough, else to a new sequence."""
        room = self._take_room(len(part))
        self.parts[room.sequence].append(part)
        insort(self._by_room, _Room(room.free_tokens - len(part), room.sequence))

    def _take_room(self, tokens: int) -> "_Room":
        """Remove and return the least room for so many tokens; begin a sequence where there is none."""
        index = bisect_left(self._by_room, _Room(tokens, 0))  # the first with enough room
        if index < len(self._by_room):
            return self._by_room.pop(index)
        self.parts.append([])
        return _Room(self._length, len(self.parts) - 1)


class _Room(NamedTuple):
    """How many tokens a sequence may still take. Rooms sort by free tokens, then by the index of the sequence."""

    free_tokens: int
    sequence: int


IGNORED = -100
"""The label of a token that is read and not predicted."""


GROUP_BATCHES = 50
"""Sequences are sorted by length within this many batches: less padding, but still shuffled."""


def compute_training_steps(sequences: int, settings: TrainingSettings) -> int:
    """Compute the number of optimizer steps of a run, at least 1.

    It is `max_steps`, or less if `passes` or `epochs` are set and reached earlier.

    Args:
        sequences: The number of training sequences.
        settings: The settings of the training.
    """
    steps = settings.max_steps
    if settings.passes is not None:
        steps_of_passes = settings.passes * sequences // settings.batch_size
        steps = max(1, min(steps, steps_of_passes))
    if settings.epochs is not None:  # the last batch of an epoch is filled up, so that no sequence is left out
        steps_of_epochs = round(settings.epochs * _count_batches_per_epoch(sequences, settings.batch_size))
        steps = max(1, min(steps, steps_of_epochs))
    return steps


def _count_batches_per_epoch(sequences: int, batch_size: int) -> int:
    return math.ceil(sequences / batch_size)


def draw_batch_order(lengths: Sequence[int], batch_size: int, steps: int, seed: int) -> list[int]:
    """Draw the order in which the sequences of a run are read, with similar lengths in each batch.

    Args:
        lengths: The number of tokens of each sequence.
        batch_size: The number of sequences in a batch.
        steps: The number of batches.
        seed: The seed of the random order.

    Returns:
        The indices of `steps * batch_size` sequences, batch after batch.
    """
    random = Random(seed)
    epochs = math.ceil(steps / _count_batches_per_epoch(len(lengths), batch_size))

    order: list[int] = []
    for _ in range(epochs):
        order.extend(_draw_epoch(lengths, batch_size, random))
    return order[: steps * batch_size]


def _draw_epoch(lengths: Sequence[int], batch_size: int, random: Random) -> list[int]:
    """Draw the order of the sequences in an epoch: batches of similar lengths, in random order.

    Args:
        lengths: The number of tokens of each sequence.
        batch_size: The number of sequences in a batch.
        random: The random generator, which moves on.

    Returns:
        The indices of the sequences, batch after batch.
    """
    shuffled = list(range(len(lengths)))
    random.shuffle(shuffled)

    # The last batch is filled up with sequences from the beginning.
    filled_length = _count_batches_per_epoch(len(shuffled), batch_size) * batch_size
    filled = list(islice(cycle(shuffled), filled_length))

    batches = _split_into_batches(filled, lengths, batch_size)
    random.shuffle(batches)
    return list(chain.from_iterable(batches))


def _split_into_batches(indices: list[int], lengths: Sequence[int], batch_size: int) -> list[list[int]]:
    """Cut the indices of sequences into batches of similar length.

    Only sequences within a group of GROUP_BATCHES batches are sorted by length, so that the batches differ from
    epoch to epoch.
    """
    batches: list[list[int]] = []
    for group in _cut(indices, batch_size * GROUP_BATCHES):
        by_length = sorted(group, key=lengths.__getitem__)
        batches.extend(_cut(by_length, batch_size))
    return batches


def _cut(items: list[int], size: int) -> list[list[int]]:
    return [items[start : start + size] for start in range(0, len(items), size)]
