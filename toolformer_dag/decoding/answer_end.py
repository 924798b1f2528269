"""Find where a written answer ends: its first sentence, or its first line.

The rules cover Latin and East Asian punctuation. If a text ends with a period, the token that the model would write
next decides, so that "3.5" and "p.m. and" go on. Text in other scripts ends at a line end or at the limit of tokens.
"""

import re

_SENTENCE_ENDING = re.compile(r"(?<![.!?…])[.!?…]++[\"'”’»)\]]*+(?=\s)|[。！？]+[」』”’）]*|\n")
"""Punctuation that may end a sentence, with the quotes and brackets that it closes, or a line end."""
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
_NON_SPACE = re.compile(r"\S")
_FINAL_PUNCTUATION = re.compile(r"[.!?…。！？][\"'”’»)\]」』）]*$")


def has_final_punctuation(text: str) -> bool:
    """Return whether a text ends with the punctuation of a sentence, as "It was 3." does.

    Whether the sentence really ends there depends on what follows, for example a digit.
    """
    return _FINAL_PUNCTUATION.search(text) is not None


def find_answer_end(text: str) -> int | None:
    """Find where the first sentence or line ends that has words.

    A sentence ends at `.`, `!`, `?` or `…` before white space, but not before a lower-case letter, nor at the period of
    an abbreviation or an initial. It also ends at `。`, `！` and `？`.

    Closing quotes and brackets belong to the sentence.

    Returns:
        The length of the text up to that end, in characters and without the line end. None if nothing has ended yet.

    Example:
        find_answer_end("It was 3.5 km. Then")  # 14, the length of "It was 3.5 km."
        find_answer_end("Dr. Smith came\\n")  # 14, without the line end
        find_answer_end("Dr. Smith")  # None
    """
    first_word = re.search(r"\w", text)
    if first_word is None:
        return None

    for ending in _SENTENCE_ENDING.finditer(text):
        has_words = first_word.start() < ending.start()
        if has_words and not _is_within_sentence(ending, text):
            is_line_end = ending[0] == "\n"
            return ending.start() if is_line_end else ending.end()
    return None


def _is_within_sentence(ending: re.Match[str], text: str) -> bool:
    """Return whether a sentence goes on after punctuation that could end it.

    It goes on if a lower-case word follows ("at 5 p.m. and"), or if the period belongs to an initial ("J. Smith") or to
    an abbreviation ("Dr. Smith").

    Args:
        ending: The punctuation or line end, as a match of `_SENTENCE_ENDING` in the text.
        text: The text.
    """
    punctuation = ending[0]

    # A line end and East Asian punctuation always end a sentence.
    if punctuation[0] in "\n。！？":
        return False

    next_character = _NON_SPACE.search(text, ending.end())  # after the white space
    if next_character and next_character[0].islower():
        return True

    last_word = _find_word_before(text, ending.start())
    return punctuation == "." and (_is_initial(last_word) or last_word.lower() in _ABBREVIATIONS)


def _find_word_before(text: str, end: int) -> str:
    """Return the word that ends at an index of a text, such as "Smith" or "e.g".

    Of a long word, only the end is returned.
    """
    start = max(0, end - _LONGEST_ABBREVIATION - 1)
    return re.split(r"[^\w.]", text[start:end])[-1]


def _is_initial(word: str) -> bool:
    """Return whether a word is one capital letter, such as "J" in "J. Smith", but not the word "I"."""
    is_capital_letter = len(word) == 1 and word.isalpha() and word.isupper()
    return is_capital_letter and word != "I"
