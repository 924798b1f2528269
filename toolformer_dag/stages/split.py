"""Which documents are held out: the same for every tool and every run, whatever other documents there are."""

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b

TRAIN, HELDOUT = "train", "heldout"
HELDOUT_SHARE = 0.05  # of the documents


def split_of(digest: str) -> str:
    """train or heldout, by a hash of the document's digest."""
    number = int.from_bytes(blake2b(f"split {digest}".encode(), digest_size=8).digest(), "big")
    return HELDOUT if number < HELDOUT_SHARE * 2**64 else TRAIN


@dataclass(frozen=True, slots=True)
class HeldoutTexts:
    """`choosing`: the texts on which the best checkpoint is chosen; `measuring`: those on which it is measured."""

    choosing: list[str]
    measuring: list[str]


def heldout_texts(texts: Sequence[str], at_most: int) -> HeldoutTexts:
    """The first of the held-out texts, at most half, choose; as many of the next measure. One alone does both."""
    if len(texts) < 2:
        return HeldoutTexts(list(texts), list(texts))
    cut = min(at_most, len(texts) // 2)
    return HeldoutTexts(list(texts[:cut]), list(texts[cut : cut + at_most]))
