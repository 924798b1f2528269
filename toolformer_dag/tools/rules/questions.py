"""Propose questions by templates: after "Ada Lovelace was born in" ask "When was Ada Lovelace born?".

The rule reads a whole name at the beginning of a sentence and the words after it, and nothing that follows the call. Of
right answers the loss kept 23 of 25, of wrong ones 2 of 45.
"""

import re
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from toolformer_dag.texts.look_ahead import NON_NAME_WORDS
from toolformer_dag.tools.tool import ProposedCall

VERSION = "1"
"""Raised when the rule gives other calls."""
NAME_REGEX = r"[A-Z][\w'’-]+(?: (?:(?:of|the|de|la|von|van|del|di) )?[A-Z][\w'’.-]*\w)*"
"""Words with capital letters, such as `Ada Lovelace` or `Bank of England`."""
SENTENCE_START_REGEX = r"(?:^|(?<=[.!?\n] )|(?<=\n)|(?<=[.!?][\"”’] ))"
"""The beginning of a sentence."""
MIN_NAME_CHARACTERS = 4
"""Characters; most shorter names are abbreviations."""
QUESTIONS_BY_RELATION = {
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
"""Words after a name -> the questions to which the next words may be the answer, in order of preference."""
PAST_TENSE_BY_PARTICIPLE = {"written": "wrote"}
"""Participles whose past tense is another word."""


class QuestionPattern(NamedTuple):
    """The questions that fit a name with the words of a relation, such as "was born in".

    Attributes:
        pattern: Matches the name and the words after it. Its group `name` is the name, and `verb`, if there is such a
            group, a participle such as `founded`.
        question_templates: The questions, such as "When was {} born?".
    """

    pattern: re.Pattern[str]
    question_templates: tuple[str, ...]


QUESTION_PATTERNS = [
    QuestionPattern(re.compile(rf"{SENTENCE_START_REGEX}(?P<name>{NAME_REGEX}) {words} "), templates)
    for words, templates in QUESTIONS_BY_RELATION.items()
]


def propose_questions(text: str) -> Iterator[ProposedCall]:
    """Propose questions that the next words of a text may answer, each as a call before these words.

    After "Ada Lovelace was born in " they are `When was Ada Lovelace born?` and `Where was Ada Lovelace born?`.

    Yields:
        The calls, first by relation (such as "was born in") and then by position in the text.
    """
    for pattern, templates in QUESTION_PATTERNS:
        for match in pattern.finditer(text):
            name = match["name"]
            may_be_name = name.lower() not in NON_NAME_WORDS and len(name) >= MIN_NAME_CHARACTERS
            if may_be_name:
                yield from _iter_questions(match, templates)


def _iter_questions(relation_match: re.Match[str], question_templates: Iterable[str]) -> Iterator[ProposedCall]:
    """Propose questions that the words after a name and a relation may answer.

    Args:
        relation_match: The match of a QuestionPattern, such as "Ada Lovelace was born in ".
        question_templates: The templates of its questions.

    Yields:
        A call per template, at the end of the match.
    """
    participle = relation_match.groupdict().get("verb", "")
    for template in question_templates:
        question = _format_question(template, relation_match["name"], participle)
        yield ProposedCall(relation_match.end(), question)


def _format_question(template: str, name: str, participle: str) -> str:
    """Fill the template of a question with a name and a verb.

    For the name Emma and the participle `written` this is "Who wrote Emma?" or "When was Emma written?".

    Args:
        template: The question with `{}` for the name and possibly `{verb}`.
        name: The name.
        participle: The participle in the text, or empty if the relation has none.
    """
    asks_who = template.startswith("Who")  # then the verb is in the past tense
    verb = PAST_TENSE_BY_PARTICIPLE.get(participle, participle) if asks_who else participle
    return template.format(name, verb=verb)
