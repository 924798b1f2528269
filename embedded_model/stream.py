"""Produce the rows of token ids for training: copy boot camp, then the packed mix of documents."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from random import Random

import numpy as np
import torch
from numpy.typing import NDArray
from tokenizers import Tokenizer
from torch import Tensor

from embedded_model import real_documents as real
from embedded_model import synthetic_documents as synthetic
from embedded_model.documents import PretrainingDocument, encode, joined
from embedded_model.network import EmbeddedTraining
from embedded_model.real_gold import RealGold
from embedded_model.real_text import load_real_text
from toolformer_dag.synthetic.world import World

Rows = NDArray[np.int64]
LOOK_AHEAD = 24


class NoDocuments(ValueError):
    """Report that the documents ended before the rows were full."""


def pack(documents: Iterable[list[int]], rows: int, length: int, short: int) -> Rows:
    """Pack documents into `rows` rows of `length` tokens; the end of a row cuts its last document.

    A row longer than `short` begins with a document longer than `short` if the next LOOK_AHEAD have one; other rows
    leave such documents out. Raises NoDocuments where the documents end too soon.
    """
    source = iter(documents)
    packed = [_row(source, length, short) for _ in range(rows)]
    return np.array(packed, dtype=np.int64).reshape(rows, length)


def _row(source: Iterator[list[int]], length: int, short: int) -> list[int]:
    waiting = [_next(source) for _ in range(LOOK_AHEAD)] if length > short else []
    long = [document for document in waiting if len(document) > short]
    waiting = [document for document in waiting if len(document) <= short]
    row = list(long[0]) if long else []
    while len(row) < length:
        document = waiting.pop() if waiting else _next(source)
        row += document if len(document) <= short else []
    return row[:length]


def _next(source: Iterator[list[int]]) -> list[int]:
    document = next(source, None)
    if document is None:
        raise NoDocuments("the documents ended before the rows were full; give more of them")
    return document


KIND_WEIGHTS = (40, 35, 25)  # repeats, echoes, recall
ECHOES_ONLY = 0.7  # of the boot camp
ECHOED = 4  # tokens of the longest segment that is said again at once
BOOT_SEGMENT, LATER_SEGMENT = 16, 40  # tokens of the longest segment, in the boot camp and in the mix


def boot_camp_row(random: Random, vocabulary: int, length: int, progress: float) -> list[int]:
    """Return `length` token ids (never 0) of copy documents; `progress` through the boot camp is from 0 to 1.

    The boot camp starts with echoes over short distances only. Heads that learn on longer distances may settle for the
    token six places back, one turn of the fastest rotary angle, and then never copy a token that is nearer.
    """
    row: list[int] = []
    while len(row) < length:
        if progress < ECHOES_ONLY:
            row += _echo(random, vocabulary, BOOT_SEGMENT)
        else:
            row += copy_document(random, vocabulary, BOOT_SEGMENT)
    return row[:length]


def copy_document(random: Random, vocabulary: int, longest: int) -> list[int]:
    """Return a copy document; its segments have 2 to `longest` tokens."""
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
    """Repeat a few tokens at once, as an answer follows a result."""
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


SYNTHETIC_KINDS = (
    synthetic.plain,
    synthetic.note_then_text,
    synthetic.noted,
    synthetic.told_before,
    synthetic.demonstrate,
)
SYNTHETIC_EARLY_WEIGHTS = (12, 30, 38, 0, 20)
SYNTHETIC_LATE_WEIGHTS = (12, 24, 32, 18, 14)
REAL_KINDS = (real.plain, real.note_then_text, real.told_before, real.demonstrate)
REAL_EARLY_WEIGHTS = (40, 42, 0, 18)
REAL_LATE_WEIGHTS = (34, 28, 26, 12)
TOKENIZER_TEXTS = 6_000
WORLD_STEPS = 20


@dataclass(frozen=True, slots=True)
class Mixture:
    """Draw documents from the synthetic world and, if there is any, from real text."""

    real: RealGold | None

    @classmethod
    def load(cls, paths: Sequence[Path]) -> "Mixture":
        """Read the real text of the paths. Raises RealTextError for a path without text."""
        return cls(RealGold(load_real_text(paths)) if paths else None)

    def documents(
        self, random: Random, step: int, real_share: float, *, late: bool = False
    ) -> Iterator[PretrainingDocument]:
        """Yield documents without end; every WORLD_STEPS steps have a new synthetic world, so no fact is memorised.

        `late` in a run the mix has fewer demonstrations: the model learns first where calls begin, then to use results.
        """
        world = _world(1 + step // WORLD_STEPS)
        synthetic_weights = SYNTHETIC_LATE_WEIGHTS if late else SYNTHETIC_EARLY_WEIGHTS
        real_weights = REAL_LATE_WEIGHTS if late else REAL_EARLY_WEIGHTS
        while True:
            if self.real is not None and random.random() < real_share:
                real_kind = random.choices(REAL_KINDS, real_weights)[0]
                yield real_kind(random, self.real)
            else:
                synthetic_kind = random.choices(SYNTHETIC_KINDS, synthetic_weights)[0]
                yield synthetic_kind(random, world)

    def sample_texts(self, seed: int, real_share: float) -> list[str]:
        """Return texts to train the tokenizer on; names of all parts occur, so all are tokenized alike."""
        random = Random(f"tokenizer {seed}")
        documents, world = self.documents(random, 0, real_share), _world(1)
        synthetic_texts = [synthetic.of_any_part(random, world) for _ in range(TOKENIZER_TEXTS)]
        return synthetic_texts + joined([next(documents) for _ in range(TOKENIZER_TEXTS)])


@lru_cache(maxsize=2)
def _world(seed: int) -> World:
    return World(seed)


BOOT_LENGTH = 64
SHORT, LONG = 512, 1024
LONG_EVERY = 4  # every fourth step has the long rows
COPY_SHARE = 0.05
ENCODED_AT_ONCE = 8


class Stream:
    """Produce the micro-batches of a run."""

    def __init__(self, settings: EmbeddedTraining, mixture: Mixture, tokenizer: Tokenizer) -> None:
        self.settings, self.mixture, self.tokenizer = settings, mixture, tokenizer

    def batch(self, step: int, lane: int) -> Tensor:
        """Return rows of token ids (rows, length + 1): inputs and targets overlap."""
        settings = self.settings
        random = Random(f"stream {settings.seed} {step} {lane}")
        if step < settings.boot_steps:
            rows = range(settings.lane_tokens // BOOT_LENGTH)
            vocabulary = settings.shape.vocabulary
            progress = step / settings.boot_steps
            return torch.tensor([boot_camp_row(random, vocabulary, BOOT_LENGTH + 1, progress) for _ in rows])
        length = LONG if step % LONG_EVERY == 0 else SHORT
        rows_of = settings.lane_tokens // length
        return torch.from_numpy(pack(self._documents(random, step), rows_of, length + 1, SHORT + 1))

    def _documents(self, random: Random, step: int) -> Iterator[list[int]]:
        late = step >= self.settings.early * self.settings.steps
        drawn = self.mixture.documents(random, step, self.settings.real_share, late=late)
        while True:
            for document in encode(self.tokenizer, [next(drawn) for _ in range(ENCODED_AT_ONCE)]):
                if random.random() < COPY_SHARE:
                    yield [0, *copy_document(random, self.settings.shape.vocabulary, LATER_SEGMENT)]
                yield document
