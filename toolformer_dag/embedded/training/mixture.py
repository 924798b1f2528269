"""The pretraining mix: plain texts, notes with texts that use them, demonstrations; made and real."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from random import Random

from toolformer_dag.embedded.training import made, real
from toolformer_dag.embedded.training.document import Document, joined
from toolformer_dag.embedded.training.real_gold import RealGold
from toolformer_dag.embedded.training.real_text import load_real_text
from toolformer_dag.embedded.world import World

MADE_KINDS = (made.plain, made.note_then_text, made.noted, made.told_before, made.demonstrate)
EARLY_WEIGHTS = (12, 30, 38, 0, 20)
LATE_WEIGHTS = (12, 24, 32, 18, 14)
REAL_KINDS = (real.plain, real.note_then_text, real.told_before, real.demonstrate)
REAL_EARLY_WEIGHTS = (40, 42, 0, 18)
REAL_LATE_WEIGHTS = (34, 28, 26, 12)
TOKENIZER_TEXTS = 6_000
WORLD_STEPS = 20


@dataclass(frozen=True, slots=True)
class Mixture:
    """What documents are drawn from; without real text everything is made."""

    real: RealGold | None

    @classmethod
    def load(cls, paths: Sequence[Path]) -> "Mixture":
        """Raises RealTextError for a path that holds no text."""
        return cls(RealGold(load_real_text(paths)) if paths else None)

    def documents(self, random: Random, step: int, real_share: float, *, late: bool = False) -> Iterator[Document]:
        """Without end; the made world changes every WORLD_STEPS steps, so that its facts cannot be learnt by heart.

        `late` in a run there are fewer demonstrations: what results are good for is learnt after where calls begin.
        """
        world = _world(1 + step // WORLD_STEPS)
        made_weights, real_weights = (LATE_WEIGHTS, REAL_LATE_WEIGHTS) if late else (EARLY_WEIGHTS, REAL_EARLY_WEIGHTS)
        while True:
            if self.real is not None and random.random() < real_share:
                make_real = random.choices(REAL_KINDS, real_weights)[0]
                yield make_real(random, self.real)
            else:
                make_made = random.choices(MADE_KINDS, made_weights)[0]
                yield make_made(random, world)

    def sample_texts(self, seed: int, real_share: float) -> list[str]:
        """Texts from which the tokenizer is trained; names of all parts, so that none is better known than others."""
        random = Random(f"tokenizer {seed}")
        documents, world = self.documents(random, 0, real_share), _world(1)
        made_texts = [made.of_any_part(random, world) for _ in range(TOKENIZER_TEXTS)]
        return made_texts + joined([next(documents) for _ in range(TOKENIZER_TEXTS)])


@lru_cache(maxsize=2)
def _world(seed: int) -> World:
    return World(seed)
