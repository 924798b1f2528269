"""Stretches of real text around a place, cut at sentences."""

import re
from random import Random

SENTENCE_END = re.compile(r"(?<=[.!?])[\"”’)]?\s+(?=[A-Z\"“‘(])|\n+")


def excerpt(random: Random, text: str, place: int, characters: int) -> tuple[str, int]:
    """About so many characters of whole sentences around `place`, and where the place is in them."""
    starts = [0, *(end.end() for end in SENTENCE_END.finditer(text))]
    before = [start for start in starts if place - characters // 2 <= start <= place]
    start = random.choice(before) if before else _word_before(text, max(0, place - characters // 2))
    ends = [end for end in (*starts[1:], len(text)) if place < end <= start + characters]
    stop = random.choice(ends[-3:]) if ends else start + characters
    return text[start:stop].rstrip(), place - start


def _word_before(text: str, place: int) -> int:
    """Where the word begins in which the place is."""
    return max(text.rfind(" ", 0, place), text.rfind("\n", 0, place)) + 1


def sentences(text: str) -> list[str]:
    """The sentences of a text, without those of a few letters."""
    return [part.strip() for part in SENTENCE_END.split(text) if len(part.strip()) > 15]
