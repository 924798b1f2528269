"""Stretches of real text around a place, cut at sentences."""

import re
from random import Random

SENTENCE_END = re.compile(r"(?<=[.!?])[\"”’)]?\s+(?=[A-Z\"“‘(])|\n+")


def excerpt(random: Random, text: str, place: int, characters: int) -> tuple[str, int]:
    """About so many characters of whole sentences around `place`, and where the place is in them."""
    starts = [0, *(end.end() for end in SENTENCE_END.finditer(text))]
    before = [start for start in starts if place - characters // 2 <= start <= place]
    start = random.choice(before or [max(start for start in starts if start <= place)])
    ends = [end for end in (*starts[1:], len(text)) if end > place]
    fitting = [end for end in ends if end - start <= characters]
    stop = random.choice(fitting[-3:] or ends[:1])
    cut = text[start : min(stop, start + 2 * characters)].rstrip()
    return (cut, place - start) if len(cut) > place - start else (text[start:stop], place - start)


def sentences(text: str) -> list[str]:
    """The sentences of a text, without those of a few letters."""
    return [part.strip() for part in SENTENCE_END.split(text) if len(part.strip()) > 15]
