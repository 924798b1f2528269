"""Propose translations where a text explains a foreign phrase: `"la tortuga" means "` and the call, inside the quotes.

The rule reads the phrase, the words that announce its meaning and the opening quote, and nothing that follows the call.
Directly after the phrase, as in the paper's examples, the loss kept as many swapped translations as right ones.
"""

import re
from collections.abc import Iterator

from toolformer_dag.tools.tool import ProposedCall

VERSION = "1"
"""Raised when the rule gives other calls."""
OPENING_QUOTES = '"“‘«'
"""The opening quotation marks."""
CLOSING_QUOTES = '"”’»'
"""The closing quotation marks."""
# Words that announce a meaning, such as `, which roughly means`.
MEANING_CUE_REGEX = (
    r"(?:,? (?:which|that) )?(?:roughly |literally |usually |often )?"
    r"(?:means|meaning|translated? as|translates (?:as|to)|translated|in English|literally|or|i\.e\.)"
)
# A quoted phrase, what may stand between it and its meaning (a dash, a bracket, a cue), and the quote that opens the
# meaning: `"la tortuga" means "` of `"la tortuga" means "the turtle"`.
GLOSS_PATTERN = re.compile(
    rf"[{OPENING_QUOTES}](?P<phrase>[^{OPENING_QUOTES}{CLOSING_QUOTES}();:0-9\n]{{3,120}})[{CLOSING_QUOTES}]"
    rf",?\s{{0,9}}(?:[(\[—–-]\s{{0,9}})?(?:{MEANING_CUE_REGEX})?[:,]?\s{{0,9}}[{OPENING_QUOTES}]"
)
ANNOUNCEMENT_PATTERN = re.compile(r"[A-Za-z(\[—–]")
"""A letter, bracket or dash, of which one stands between a phrase and its meaning, but none between two quotations."""


def propose_glosses(text: str) -> Iterator[ProposedCall]:
    """Yield a translation call for each quoted phrase that a text explains, whatever its language.

    In `"la tortuga" means "the turtle"` the input is `la tortuga`, and the call stands before `the turtle`.
    """
    for match in GLOSS_PATTERN.finditer(text):  # `"la tortuga" means "`, up to the quote that opens the meaning
        phrase = match["phrase"].strip()
        after_phrase = match.end("phrase") + 1  # one more for its closing quote
        meaning_quote_offset = match.end() - 1

        # A word, bracket or dash between the quotes announces the meaning. Without one, they are two mere quotations.
        announcement = ANNOUNCEMENT_PATTERN.search(text, after_phrase, meaning_quote_offset)
        if announcement is not None:
            yield ProposedCall(match.end(), phrase)
