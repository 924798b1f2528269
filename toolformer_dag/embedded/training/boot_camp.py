"""Copy boot camp: rows of random tokens in which what follows can only be known by looking back.

Without it the losses of e(c, r) do not move at all; with it attention learns to copy after about 300 steps.
"""

from random import Random

RECALL_SHARE = 0.25
BOOT_SEGMENT, LATER_SEGMENT = 16, 40  # tokens of the longest segment, in the boot camp and in the mix


def boot_camp_row(random: Random, vocabulary: int, length: int) -> list[int]:
    """`length` token ids: repeated random segments, or keys and values that are asked for again. Id 0 is not used."""
    row: list[int] = []
    while len(row) < length:
        row += copy_document(random, vocabulary, BOOT_SEGMENT)
    return row[:length]


def copy_document(random: Random, vocabulary: int, longest: int) -> list[int]:
    """One such document; its segments have 3 to `longest` tokens."""
    if random.random() < RECALL_SHARE:
        return _recall(random, vocabulary)
    return _repeats(random, vocabulary, longest)


def _tokens(random: Random, vocabulary: int, shortest: int, longest: int) -> list[int]:
    return [random.randrange(1, vocabulary) for _ in range(random.randint(shortest, longest))]


def _repeats(random: Random, vocabulary: int, longest: int) -> list[int]:
    segment = _tokens(random, vocabulary, 3, longest)
    document = list(segment)
    for _ in range(random.randint(1, 3)):
        if random.random() < 0.4:
            document += _tokens(random, vocabulary, 1, 10)
        document += segment[random.randint(0, len(segment) // 3) :]
    return document


def _recall(random: Random, vocabulary: int) -> list[int]:
    arrow, end = _tokens(random, vocabulary, 1, 1), _tokens(random, vocabulary, 1, 1)
    pairs = [
        _tokens(random, vocabulary, 1, 3) + arrow + _tokens(random, vocabulary, 1, 4) + end
        for _ in range(random.randint(1, 5))
    ]
    return [token for pair in [*pairs, *random.choices(pairs, k=2 * len(pairs))] for token in pair]
