"""Find where a written answer ends: its first sentence, or its first line.

Rules for Latin and East Asian punctuation. Where a text ends with a period, what the model would write next decides, so
that "3.5" and "p.m. and" go on. Other scripts end at a line end or at the limit of tokens.
"""

import re

_ENDING = re.compile(r"[.!?…]+[\"'”’»)\]]*(?=\s)|[。！？]+[」』”’）]*|\n")
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
    for found in _ENDING.finditer(text):
        before, after = text[: found.start()], text[found.end() :]
        if re.search(r"\w", before) and not _goes_on(found[0], before, after):
            return found.start() if found[0] == "\n" else found.end()
    return None


def _goes_on(ending: str, before: str, after: str) -> bool:
    if ending[0] in "\n。！？":
        return False
    if after.lstrip()[:1].islower():
        return True
    last = re.split(r"[^\w.]", before)[-1]
    initial = len(last) == 1 and last.isalpha() and last.isupper() and last != "I"
    return ending == "." and (initial or last.lower() in _ABBREVIATIONS)
