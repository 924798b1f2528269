"""Find where a written answer ends: its first sentence, or its first line.

The rules cover Latin and East Asian punctuation. If a text ends with a period, the token that the model would write
next decides, so that "3.5" and "p.m. and" go on. Text in other scripts ends at a line end or at the limit of tokens.
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
    """Return whether `text` ends with the punctuation of a sentence, as "It was 3." does. What follows decides."""
    return _CLOSED.search(text) is not None


def answer_end(text: str) -> int | None:
    """Return the length in characters of the first sentence or line that has words; None if none has ended yet.

    A sentence ends at `.`, `!`, `?` or `…` before white space, except before a lower-case letter and after an
    abbreviation or an initial; also at `。`, `！`, `？`. Closing quotes and brackets belong to it, a line end does not:

        answer_end("It was 3.5 km. Then")  # 14, the length of "It was 3.5 km."
        answer_end("Dr. Smith came\\n")  # 14, without the line end
        answer_end("Dr. Smith")  # None
    """
    first_word = re.search(r"\w", text)
    if first_word is None:
        return None
    for ending in _ENDING.finditer(text):  # punctuation and line ends
        has_words = first_word.start() < ending.start()
        if has_words and not _goes_on(ending[0], text, ending.start(), ending.end()):
            is_line_end = ending[0] == "\n"
            return ending.start() if is_line_end else ending.end()
    return None


def _goes_on(ending: str, text: str, start: int, end: int) -> bool:
    """Return whether a sentence goes on after `ending`, which may end it, such as "." or "!".

    It does if a lower-case word follows ("at 5 p.m. and"), or if the period belongs to an initial ("J. Smith") or to an
    abbreviation ("Dr. Smith"). A line end and East Asian punctuation always end it.

    start, end: the characters of `text` between which `ending` stands.
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
