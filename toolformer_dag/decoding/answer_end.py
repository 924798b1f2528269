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
_CLOSED = re.compile(r"[.!?…。！？][\"'”’»)\]」』）]*$")


def may_have_ended(text: str) -> bool:
    """Return whether `text` ends like a sentence; what follows decides."""
    return _CLOSED.search(text) is not None


def answer_end(text: str) -> int | None:
    """Return the number of characters of the first sentence or line that has words; None where none has ended.

    A sentence ends at `.`, `!`, `?` or `…` before white space and no lower-case letter, except after an abbreviation
    or an initial, and at `。`, `！`, `？`. Its closing quotes and brackets belong to it; the line end does not.
    """
    for ending in _ENDING.finditer(text):
        before = text[: ending.start()]
        after = text[ending.end() :]
        has_words = re.search(r"\w", before) is not None
        if has_words and not _goes_on(ending[0], before, after):
            is_line_end = ending[0] == "\n"
            return ending.start() if is_line_end else ending.end()
    return None


def _goes_on(ending: str, before: str, after: str) -> bool:
    """Return whether a sentence goes on after `ending`: a word in lower case follows, or a period belongs to a word."""
    if ending[0] in "\n。！？":
        return False
    if after.lstrip()[:1].islower():
        return True
    last_word = re.split(r"[^\w.]", before)[-1]
    is_initial = len(last_word) == 1 and last_word.isalpha() and last_word.isupper() and last_word != "I"
    is_abbreviation = last_word.lower() in _ABBREVIATIONS
    return ending == "." and (is_initial or is_abbreviation)
