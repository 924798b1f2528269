"""Propose questions by templates: after "Ada Lovelace was born in" ask "When was Ada Lovelace born?".

The rule reads a whole name at the beginning of a sentence and the words after it, and nothing that follows the call. Of
right answers the loss kept 23 of 25, of wrong ones 2 of 45.
"""

import re
from collections.abc import Iterator

from toolformer_dag.texts.look_ahead import UNNAMED
from toolformer_dag.tools.tool import Proposed

VERSION = "1"
"""Raised when the rule gives other calls."""
NAME = r"[A-Z][\w'’-]+(?: (?:(?:of|the|de|la|von|van|del|di) )?[A-Z][\w'’.-]*\w)*"
START = r"(?:^|(?<=[.!?\n] )|(?<=\n)|(?<=[.!?][\"”’] ))"
RELATIONS = {
    r"was born on": ("When was {} born?",),
    r"was born in": ("When was {} born?", "Where was {} born?"),
    r"was born (?:at|near)": ("Where was {} born?",),
    r"(?:died|was killed) on": ("When did {} die?",),
    r"(?:died|was killed) in": ("When did {} die?", "Where did {} die?"),
    r"(?:was|were) (?P<verb>founded|established|formed|built|created|completed|launched|released|published) in": (
        "When was {} {verb}?",
        "Where was {} {verb}?",
    ),
    r"(?:was|were) (?P<verb>founded|established|formed|created|invented|designed|written|directed|composed) by": (
        "Who {verb} {}?",
    ),
    r"(?:graduated from|studied at|attended)": ("Where did {} study?",),
    r"(?:married|was married to)": ("Who did {} marry?",),
    r"is located in": ("Where is {} located?",),
    r"is the capital of": ("What is {} the capital of?",),
}
ACTIVE = {"written": "wrote"}
PATTERNS = [(re.compile(rf"{START}(?P<name>{NAME}) {words} "), asked) for words, asked in RELATIONS.items()]


def propose_questions(text: str) -> Iterator[Proposed]:
    """Yield questions where a relation's words end, of each place in the order of its templates."""
    for pattern, templates in PATTERNS:
        for match in pattern.finditer(text):
            name, verb = match["name"], match.groupdict().get("verb", "")
            if name.lower() in UNNAMED or len(name) < 4:
                continue
            for template in templates:
                verb = ACTIVE.get(verb, verb) if template.startswith("Who") else verb
                yield Proposed(match.end(), template.format(name, verb=verb))
