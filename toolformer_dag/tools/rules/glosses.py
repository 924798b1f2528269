"""Propose translations where a text explains a foreign phrase: `"la tortuga" means "` and the call, inside the quotes.

The rule reads the phrase, the words that announce its meaning and the opening quote, and nothing that follows the call.
Directly after the phrase, as in the paper's examples, the loss kept as many swapped translations as right ones.
"""

import re
from collections.abc import Iterator

from toolformer_dag.tools.tool import Proposed

VERSION = "1"
"""Raised when the rule gives other calls."""
OPEN, CLOSE = '"“‘«', '"”’»'
CUE = (
    r"(?:,? (?:which|that) )?(?:roughly |literally |usually |often )?"
    r"(?:means|meaning|translated? as|translates (?:as|to)|translated|in English|literally|or|i\.e\.)"
)
GLOSS = re.compile(
    rf"[{OPEN}](?P<phrase>[^{OPEN}{CLOSE}();:0-9\n]{{3,120}})[{CLOSE}],?\s*[(\[—–-]?\s*(?:{CUE})?[:,]?\s*[{OPEN}]"
)
ANNOUNCED = re.compile(r"[A-Za-z(\[—–]")


def glosses(text: str) -> Iterator[Proposed]:
    """Yield a call for each quoted phrase with a gloss, whatever its language; quotations in a row are no gloss."""
    for match in GLOSS.finditer(text):
        if ANNOUNCED.search(text, match.end("phrase") + 1, match.end() - 1):
            yield Proposed(match.end(), match["phrase"].strip())
