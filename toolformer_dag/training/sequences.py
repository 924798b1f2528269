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

    Attributes:
        sequences: Each sequence is a tuple of lists of token ids: one list, or with packing several, which must not
            attend to each other.
        text_count: The number of texts, empty ones too.
        split_text_count: How many texts were longer than a sequence, and became several.
        empty_text_count: How many texts have nothing to predict, since they have at most one token.
    """

    sequences: tuple[tuple[list[int], ...], ...]
    text_count: int
    split_text_count: int
    empty_text_count: int

    @property
    def token_count(self) -> int:
        """The number of tokens of all sequences."""
        return sum(count_sequence_tokens(sequence) for sequence in self.sequences)


def build_examples(encoding: Encoding, texts: Sequence[str], sequence_length: int, packing: bool = False) -> Examples:
    """Tokenize texts to training sequences, with BOS and EOS if the tokenizer has them.

    Args:
        encoding: The tokenizer.
        texts: The texts, which may contain calls.
        sequence_length: The maximum number of tokens in a sequence. A longer text is cut into several sequences, so
            that every token after its first is predicted exactly once.
        packing: Whether several texts may share a sequence. `LanguageModeling.collate_sequences` keeps them apart.

    Returns:
        The sequences with counts of the texts. A text of a single token counts as empty, unless BOS or EOS is added.
    """
    token_ids_of_texts = _tokenize_texts(encoding, texts)  # without texts that have no token
    text_lengths = [len(token_ids) for token_ids in token_ids_of_texts]

    learned_text_count = sum(length > 1 for length in text_lengths)  # in a single token, there is nothing to predict
    split_text_count = sum(length > sequence_length for length in text_lengths)

    sequences = _build_sequences(token_ids_of_texts, sequence_length, packing)
    return Examples(
        sequences=tuple(sequences),
        text_count=len(texts),
        split_text_count=split_text_count,
        empty_text_count=len(texts) - learned_text_count,
    )


def _build_sequences(
    token_ids_of_texts: Sequence[list[int]], sequence_length: int, packing: bool
) -> list[tuple[list[int], ...]]:
    """Cut texts into training sequences of at most `sequence_length` tokens.

    Example:
        Without packing, the texts [1, 2, 3, 4] and [5, 6] with a length of 3 give three sequences of a part each:
        [1, 2, 3], [3, 4] and [5, 6]. Token 3 is in two parts, because the first token of a part is never predicted.

    Args:
        token_ids_of_texts: The tokens of each text.
        sequence_length: The maximum number of tokens in a sequence.
        packing: Whether a sequence may hold parts of several texts. Otherwise it is a single part.
    """
    parts: list[list[int]] = []
    for token_ids in token_ids_of_texts:
        parts.extend(iter_windows(token_ids, sequence_length))

    if packing:
        return pack_parts(parts, sequence_length)
    return [(part,) for part in parts]


def _tokenize_texts(encoding: Encoding, texts: Sequence[str]) -> list[list[int]]:
    """Return the token ids of each text between BOS and EOS. Texts without a token are left out."""
    token_ids_of_texts: list[list[int]] = []
    for tokens in encoding.encode_texts_with_calls(texts):
        if tokens.token_ids:
            token_ids_of_texts.append(encoding.bos_ids + tokens.token_ids + encoding.eos_ids)
    return token_ids_of_texts


def count_sequence_tokens(sequence: Sequence[list[int]]) -> int:
    """Return the number of tokens of a sequence, over all its lists."""
    return sum(len(part) for part in sequence)


def iter_windows(token_ids: list[int], window_length: int) -> Iterator[list[int]]:
    """Yield windows of tokens, each of which begins with the last token of the one before.

    The windows of [1, 2, 3, 4] with a length of 3 are [1, 2, 3] and [3, 4]. Fewer than two tokens have no window, since
    the first token is never predicted.

    Args:
        token_ids: The tokens.
        window_length: The maximum number of tokens in a window, at least 2.
    """
    for start in range(0, len(token_ids) - 1, window_length - 1):
        yield token_ids[start : start + window_length]


def pack_parts(parts: Sequence[list[int]], sequence_length: int) -> list[tuple[list[int], ...]]:
    """Pack whole parts into sequences of at most `sequence_length` tokens (best-fit decreasing).

    The longest part comes first. Each goes to the sequence with the least room that is enough, or to a new one.
    """
    open_sequences = _OpenSequences(sequence_length)
    for part in sorted(parts, key=len, reverse=True):
        open_sequences.add_part(part)
    return [tuple(sequence) for sequence in open_sequences.parts_of_sequences]


class _OpenSequences:
    """Sequences that are being filled with parts.

    Attributes:
        parts_of_sequences: The parts of each sequence, in the order in which the sequences were begun.
    """

    def __init__(self, sequence_length: int) -> None:
        self._sequence_length = sequence_length
        self._sorted_rooms: list[_Room] = []  # the room of every sequence, ascending
        self.parts_of_sequences: list[list[list[int]]] = []

    def add_part(self, part: list[int]) -> None:
        """Add a part to the sequence with the least room that is enough, or to a new sequence."""
        room = self._take_smallest_room(len(part))
        self.parts_of_sequences[room.sequence_index].append(part)

        remaining_room = _Room(room.free_tokens - len(part), room.sequence_index)
        insort(self._sorted_rooms, remaining_room)

    def _take_smallest_room(self, token_count: int) -> "_Room":
        """Take the least room that `token_count` tokens fit into. The room of a sequence is what it may still take.

        It is removed from `_sorted_rooms`, and the caller puts back what is left of it. If no sequence has enough room,
        a new one is begun in `parts_of_sequences`, and its whole length is returned.
        """
        room_index = bisect_left(self._sorted_rooms, _Room(token_count, 0))  # the first with enough room
        if room_index < len(self._sorted_rooms):
            return self._sorted_rooms.pop(room_index)

        self.parts_of_sequences.append([])
        new_sequence_index = len(self.parts_of_sequences) - 1
        return _Room(self._sequence_length, new_sequence_index)


class _Room(NamedTuple):
    """How many tokens a sequence may still take. Rooms sort by free tokens, then by the index of the sequence."""

    free_tokens: int
    sequence_index: int


IGNORED_LABEL = -100
"""The label of a token that is read and not predicted."""


BATCHES_PER_GROUP = 50
"""Sequences are sorted by length within this many batches: less padding, but still shuffled."""


def compute_step_count(sequence_count: int, settings: TrainingSettings) -> int:
    """Compute the number of optimizer steps of a run, at least 1.

    It is `max_steps`, or less if `passes` or `epochs` are set and reached earlier. Both say how often all sequences
    are read.

    Example:
        10 sequences in batches of 4 are 5 steps with `passes = 2`, because 20 sequences make 5 full batches. They are
        6 steps with `epochs = 2` (which may be a fraction), because the last batch of each epoch is filled up.

    Args:
        sequence_count: The number of training sequences.
        settings: The settings of the training.
    """
    step_count = settings.max_steps
    if settings.passes is not None:
        steps_of_passes = settings.passes * sequence_count // settings.batch_size
        step_count = max(1, min(step_count, steps_of_passes))

    if settings.epochs is not None:
        batches_per_epoch = _count_batches_per_epoch(sequence_count, settings.batch_size)
        steps_of_epochs = round(settings.epochs * batches_per_epoch)
        step_count = max(1, min(step_count, steps_of_epochs))

    return step_count


def _count_batches_per_epoch(sequence_count: int, batch_size: int) -> int:
    """Return the number of batches of an epoch. The last batch is filled up, so that no sequence is left out."""
    return math.ceil(sequence_count / batch_size)


def draw_batch_order(sequence_lengths: Sequence[int], batch_size: int, step_count: int, seed: int) -> list[int]:
    """Draw the order in which the sequences of a run are read, with similar lengths in each batch.

    Args:
        sequence_lengths: The number of tokens of each sequence.
        batch_size: The number of sequences in a batch.
        step_count: The number of batches.
        seed: The seed of the random order.

    Returns:
        The indices of `step_count * batch_size` sequences, batch after batch.
    """
    random_generator = Random(seed)
    batches_per_epoch = _count_batches_per_epoch(len(sequence_lengths), batch_size)
    epoch_count = math.ceil(step_count / batches_per_epoch)

    sequence_indices: list[int] = []
    for _ in range(epoch_count):
        sequence_indices.extend(_draw_epoch_order(sequence_lengths, batch_size, random_generator))
    return sequence_indices[: step_count * batch_size]


def _draw_epoch_order(sequence_lengths: Sequence[int], batch_size: int, random_generator: Random) -> list[int]:
    """Draw the order of the sequences in an epoch: batches of similar lengths, in random order.

    Args:
        sequence_lengths: The number of tokens of each sequence.
        batch_size: The number of sequences in a batch.
        random_generator: The random generator, which moves on.

    Returns:
        The indices of the sequences, batch after batch.
    """
    shuffled_indices = list(range(len(sequence_lengths)))
    random_generator.shuffle(shuffled_indices)

    # The last batch is filled up with sequences from the beginning.
    filled_length = _count_batches_per_epoch(len(shuffled_indices), batch_size) * batch_size
    filled_indices = list(islice(cycle(shuffled_indices), filled_length))

    batches = _split_into_batches(filled_indices, sequence_lengths, batch_size)
    random_generator.shuffle(batches)
    return list(chain.from_iterable(batches))


def _split_into_batches(
    sequence_indices: list[int], sequence_lengths: Sequence[int], batch_size: int
) -> list[list[int]]:
    """Split the indices of sequences into batches, so that the sequences of a batch have similar lengths.

    Only sequences within a group of BATCHES_PER_GROUP batches are sorted by length, so that the batches differ from
    epoch to epoch.
    """
    batches: list[list[int]] = []
    for group_indices in _split_into_chunks(sequence_indices, batch_size * BATCHES_PER_GROUP):
        indices_by_length = sorted(group_indices, key=sequence_lengths.__getitem__)
        batches.extend(_split_into_chunks(indices_by_length, batch_size))
    return batches


def _split_into_chunks(items: list[int], chunk_size: int) -> list[list[int]]:
    """Split a list into lists of `chunk_size` items. The last may be shorter."""
    return [items[start : start + chunk_size] for start in range(0, len(items), chunk_size)]
