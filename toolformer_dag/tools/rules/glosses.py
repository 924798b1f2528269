"""Propose translations where a text explains a foreign phrase: `"la tortuga" means "` and the call, inside the quotes.

The rule reads the phrase, the words that announce its meaning and the opening quote, and nothing that follows the call.
Directly after the phrase, as in the paper's examples, the loss kept as many swapped translations as right ones.
"""

import re
from collections.abc import Iterator

from toolformer_dag.tools.tool import ProposedCall

VERSION = "1"
"""Raised when the rule gives other calls."""
OPEN = '"“‘«'
"""The opening quotation marks."""
CLOSE = '"”’»'
"""The closing quotation marks."""
# Words that announce a meaning, such as `, which roughly means`.
MEANING_CUE = (
    r"(?:,? (?:which|that) )?(?:roughly |literally |usually |often )?"
    r"(?:means|meaning|translated? as|translates (?:as|to)|translated|in English|literally|or|i\.e\.)"
)
# A quoted phrase, what may stand between it and its meaning (a dash, a bracket, a cue), and the quote that opens the
# meaning: `"la tortuga" means "` of `"la tortuga" means "the turtle"`.
GLOSS = re.compile(
    rf"[{OPEN}](?P<phrase>[^{OPEN}{CLOSE}();:0-9\n]{{3,120}})[{CLOSE}]"
    rf",?\s{{0,9}}(?:[(\[—–-]\s{{0,9}})?(?:{MEANING_CUE})?[:,]?\s{{0,9}}[{OPEN}]"
)
ANNOUNCED = re.compile(r"[A-Za-z(\[—–]")
"""A letter, bracket or dash, of which one stands between a phrase and its meaning, but none between two quotations."""


def glosses(text: str) -> Iterator[ProposedCall]:
    """Yield a translation call for each quoted phrase that a text explains, whatever its language.

    In `"la tortuga" means "the turtle"` the input is `la tortuga`, and the call stands before `the turtle`.
    """
    for match in GLOSS.finditer(text):  # `"la tortuga" means "`, up to the quote that opens the meaning
        after_phrase = match.end("phrase") + 1  # one more for its closing quote
        meaning_quote = match.end() - 1
        is_explained = ANNOUNCED.search(text, after_phrase, meaning_quote) is not None  # a word, bracket or dash
        if is_explained:
            yield ProposedCall(match.end(), match["phrase"].strip())
