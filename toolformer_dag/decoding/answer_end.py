"""Find where a written answer ends: its first sentence, or its first line.

Rules for Latin and East Asian punctuation. Where a text ends with a period, what the model would write next decides, so
that "3.5" and "p.m. and" go on. Other scripts end at a line end or at the limit of tokens.
"""

import re

_ENDING = re.compile(r"(?<![.!?…])[.!?…]++[\"'”’»)\]]*+(?=\s)|[。！？]+[」』”’）]*|\n")
_ABBREVIATIONS = {
    "mr",
    "mrs",
    "ms",
    "dr",
    "prof",
    "st",
    "no",
    "vs",
    "gen",
    "sen",
    "jr",
    "sr",
    "fig",
    "vol",
    "e.g",
    "i.e",
}
_LONGEST_ABBREVIATION = max(map(len, _ABBREVIATIONS))
_NEXT_SIGN = re.compile(r"\S")
_CLOSED = re.compile(r"[.!?…。！？][\"'”’»)\]」』）]*$")


def may_have_ended(text: str) -> bool:
    """Return whether `text` ends like a sentence; what follows decides."""
    return _CLOSED.search(text) is not None


def answer_end(text: str) -> int | None:
    """Return the number of characters of the first sentence or line that has words; None where none has ended.

    A sentence ends at `.`, `!`, `?` or `…` before white space and no lower-case letter, except after an abbreviation
    or an initial, and at `。`, `！`, `？`. Its closing quotes and brackets belong to it; the line end does not.
    """
    first_word = re.search(r"\w", text)
    if first_word is None:
        return None
    for ending in _ENDING.finditer(text):
        has_words = first_word.start() < ending.start()
        if has_words and not _goes_on(ending[0], text, ending.start(), ending.end()):
            is_line_end = ending[0] == "\n"
            return ending.start() if is_line_end else ending.end()
    return None


def _goes_on(ending: str, text: str, start: int, end: int) -> bool:
    """Return whether a sentence goes on after `ending`, which stands in `text` from `start` to `end`.

    It does where a word in lower case follows, or a period belongs to a word.
    """
    if ending[0] in "\n。！？":
        return False
    following = _NEXT_SIGN.search(text, end)
    if following and following[0].islower():
        return True
    word_start = max(0, start - _LONGEST_ABBREVIATION - 1)
    last_word = re.split(r"[^\w.]", text[word_start:start])[-1]
    is_initial = len(last_word) == 1 and last_word.isalpha() and last_word.isupper() and last_word != "I"
    is_abbreviation = last_word.lower() in _ABBREVIATIONS
    return ending == "." and (is_initial or is_abbreviation)
