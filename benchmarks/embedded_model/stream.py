"""Produce the rows of token ids for training: copy boot camp, then the packed mix of documents."""

from collections.abc import Iterable, Iterator
from functools import lru_cache
from itertools import islice
from random import Random

import torch
from tokenizers import Tokenizer
from torch import Tensor

from benchmarks.embedded_model import synthetic_documents as synthetic
from benchmarks.embedded_model.demonstrations import PretrainingDocument
from benchmarks.embedded_model.network import EmbeddedTraining
from toolformer_dag.synthetic.world import World

LOOK_AHEAD = 24


def pack(documents: Iterable[list[int]], rows: int, length: int, short: int) -> list[list[int]]:
    """Pack documents into `rows` rows of `length` tokens; the end of a row cuts its last document.

    A row longer than `short` begins with a document longer than `short` if the next LOOK_AHEAD have one; other rows
    leave such documents out. The documents must not end before the rows are full.
    """
    source = iter(documents)
    return [_row(source, length, short) for _ in range(rows)]


def _row(source: Iterator[list[int]], length: int, short: int) -> list[int]:
    """Return a row of documents; one that is longer than `short` looks ahead for a long one, with which it begins."""
    row: list[int] = []
    waiting = []
    if length > short:
        ahead = [next(source) for _ in range(LOOK_AHEAD)]
        waiting = [document for document in ahead if len(document) <= short]
        long_documents = [document for document in ahead if len(document) > short]
        if long_documents:
            row += long_documents[0]
    while len(row) < length:
        document = waiting.pop() if waiting else next(source)
        if len(document) <= short:
            row += document
    return row[:length]


ECHOES_ONLY = 0.7  # of the boot camp
# Tokens of the longest segment, in the boot camp and in the mix.
BOOT_SEGMENT = 16
LATER_SEGMENT = 40


def boot_camp_row(random: Random, vocabulary: int, length: int, progress: float) -> list[int]:
    """Return `length` token ids (never 0) of copy documents; `progress` through the boot camp is from 0 to 1.

    The boot camp starts with echoes over short distances only. Heads that learn on longer distances may settle for the
    token six places back, one turn of the fastest rotary angle, and then never copy a token that is nearer.
    """
    row: list[int] = []
    while len(row) < length:
        kind = _echo if progress < ECHOES_ONLY else copy_document
        row += kind(random, vocabulary, BOOT_SEGMENT)
    return row[:length]


def copy_document(random: Random, vocabulary: int, longest: int) -> list[int]:
    """Return a copy document; its segments have 2 to `longest` tokens."""
    kind = random.choices((_repeats, _echo, _recall), (40, 35, 25))[0]
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
    """Repeat up to four tokens at once, as an answer follows a result."""
    segment = _tokens(random, vocabulary, 2, 4)
    document = _tokens(random, vocabulary, 0, 4) + segment
    for _ in range(random.randint(1, 3)):
        document += _tokens(random, vocabulary, 0, 2) + segment
    return document


def _recall(random: Random, vocabulary: int, _longest: int) -> list[int]:
    arrow = _tokens(random, vocabulary, 1, 1)
    end = _tokens(random, vocabulary, 1, 1)
    pairs = [
        _tokens(random, vocabulary, 1, 3) + arrow + _tokens(random, vocabulary, 1, 4) + end
        for _ in range(random.randint(1, 5))
    ]
    return [token for pair in [*pairs, *random.choices(pairs, k=2 * len(pairs))] for token in pair]


MIX = {
    synthetic.plain: (10, 10),
    synthetic.spelled_years: (4, 3),
    synthetic.note_then_text: (28, 23),
    synthetic.noted: (34, 30),
    synthetic.told_before: (0, 18),
    synthetic.demonstrate: (24, 16),
}
"""Kinds of documents with their weights, early and late in a run."""
TOKENIZER_TEXTS = 6_000
WORLD_STEPS = 20


def mixed_documents(random: Random, step: int, *, late: bool = False) -> Iterator[PretrainingDocument]:
    """Yield documents without end about the synthetic world.

    Every WORLD_STEPS steps have a new synthetic world, so no fact is memorised. `late` in a run the mix has fewer
    demonstrations: the model learns first where calls begin, then to use results.
    """
    world = _world(1 + step // WORLD_STEPS)
    weights = [shares[late] for shares in MIX.values()]
    while True:
        yield random.choices(list(MIX), weights)[0](random, world)


def tokenizer_texts(seed: int) -> list[str]:
    """Return texts to train the tokenizer on; names of all parts occur, so all are tokenized alike."""
    random = Random(f"tokenizer {seed}")
    world = _world(1)
    documents = mixed_documents(random, 0)
    synthetic_texts = [synthetic.of_any_part(random, world) for _ in range(TOKENIZER_TEXTS)]
    return synthetic_texts + ["".join(next(documents)) for _ in range(TOKENIZER_TEXTS)]


@lru_cache(maxsize=2)
def _world(seed: int) -> World:
    return World(seed)


BOOT_LENGTH = 64
SHORT = 512
LONG = 1024
COPY_SHARE = 0.05


def batch(settings: EmbeddedTraining, tokenizer: Tokenizer, step: int, lane: int) -> Tensor:
    """Return a micro-batch of token ids (rows, length + 1): inputs and targets overlap."""
    random = Random(f"stream {settings.seed} {step} {lane}")
    if step < settings.boot_steps:
        rows = range(settings.lane_tokens // BOOT_LENGTH)
        vocabulary = tokenizer.get_vocab_size()
        progress = step / settings.boot_steps
        return torch.tensor([boot_camp_row(random, vocabulary, BOOT_LENGTH + 1, progress) for _ in rows])
    length = LONG if step % 4 == 0 else SHORT
    drawn = mixed_documents(random, step, late=step >= settings.early * settings.steps)
    documents = _encoded(random, drawn, tokenizer)
    return torch.tensor(pack(documents, settings.lane_tokens // length, length + 1, SHORT + 1))


def _encoded(random: Random, drawn: Iterator[PretrainingDocument], tokenizer: Tokenizer) -> Iterator[list[int]]:
    """Yield the token ids of each document after the token that begins a text (id 0), now and then a copy document."""
    while True:
        some = list(islice(drawn, 8))
        pieces = [piece for document in some for piece in document]
        encodings = iter(tokenizer.encode_batch_fast(pieces, add_special_tokens=False))
        for document in some:
            if random.random() < COPY_SHARE:
                yield [0, *copy_document(random, tokenizer.get_vocab_size(), LATER_SEGMENT)]
            yield [0, *(token for _ in document for token in next(encodings).ids)]
