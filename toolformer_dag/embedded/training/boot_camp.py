"""Copy boot camp: rows of random tokens in which what follows can only be known by looking back.

Without it the losses of e(c, r) do not move at all; with it attention learns to copy after about 300 steps.
"""

from random import Random

KIND_WEIGHTS = (40, 35, 25)  # repeats, echoes, recall
ECHOES_ONLY = 0.7  # of the boot camp
ECHOED = 4  # tokens of the longest segment that is said again at once
BOOT_SEGMENT, LATER_SEGMENT = 16, 40  # tokens of the longest segment, in the boot camp and in the mix


def boot_camp_row(random: Random, vocabulary: int, length: int, progress: float) -> list[int]:
    """`length` token ids of copy documents; id 0 is not used. `progress` through the boot camp: from 0 to 1.

    At first only echoes, over a few places. Heads that learn on longer ways may settle for the token six places back,
    one turn of the fastest rotary angle, instead of the one before; what was said so near is then never copied.
    """
    row: list[int] = []
    while len(row) < length:
        if progress < ECHOES_ONLY:
            row += _echo(random, vocabulary, BOOT_SEGMENT)
        else:
            row += copy_document(random, vocabulary, BOOT_SEGMENT)
    return row[:length]


def copy_document(random: Random, vocabulary: int, longest: int) -> list[int]:
    """One such document; its segments have 2 to `longest` tokens."""
    kind = random.choices((_repeats, _echo, _recall), KIND_WEIGHTS)[0]
    return kind(random, vocabulary, longest)


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


def _echo(random: Random, vocabulary: int, _longest: int) -> list[int]:
    """A few tokens said again at once, as an answer follows a result."""
    segment = _tokens(random, vocabulary, 2, ECHOED)
    document = _tokens(random, vocabulary, 0, 4) + segment
    for _ in range(random.randint(1, 3)):
        document += _tokens(random, vocabulary, 0, 2) + segment
    return document


def _recall(random: Random, vocabulary: int, _longest: int) -> list[int]:
    arrow, end = _tokens(random, vocabulary, 1, 1), _tokens(random, vocabulary, 1, 1)
    pairs = [
        _tokens(random, vocabulary, 1, 3) + arrow + _tokens(random, vocabulary, 1, 4) + end
        for _ in range(random.randint(1, 5))
    ]
    return [token for pair in [*pairs, *random.choices(pairs, k=2 * len(pairs))] for token in pair]
