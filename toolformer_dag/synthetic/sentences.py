"""Compose sentences with a place where a call belongs, and plain sentences that no tool helps with."""

import datetime
import re
from collections.abc import Mapping
from dataclasses import dataclass
from random import Random

from toolformer_dag.synthetic.wordings import Templates, pick, word_list


@dataclass(frozen=True, slots=True)
class EarlierCall:
    """Hold a call whose result the next call of a chain needs; `tool` is the lane's key."""

    tool: str
    input: str
    result: str


@dataclass(frozen=True, slots=True)
class Phenomenon:
    """Hold sentences around a gold place: the text is `before + after`, and `after` begins with a space and `answer`.

    `tool` is the lane's key, `input` is written as in the call (QA and search inputs quoted), `result` is the tool's,
    `answer` the part of it that the text asks for. `date` is set for the calendar only. `earlier`: the calls of a chain
    before the last one, which stand at the same place.
    """

    tool: str
    before: str
    after: str
    input: str
    result: str
    answer: str
    wording: str
    date: datetime.date | None = None
    earlier: tuple[EarlierCall, ...] = ()

    @property
    def text(self) -> str:
        """Return the text without the call."""
        return self.before + self.after


def sentence(text: str) -> str:
    """Capitalize the first letter."""
    return text[:1].upper() + text[1:]


def joined(lead: str, text: str) -> str:
    """Put the lead before the text, and capitalize the text where it begins a sentence."""
    begins = not lead or lead.rstrip().endswith((".", "!", "?"))
    return sentence(lead + (sentence(text) if begins else text))


def worded(random: Random, templates: Templates, slots: Mapping[str, str], *, is_question: bool) -> tuple[str, str]:
    """Fill in a random template after a random lead; return the text, and which: `q3.1`, `s0.2`."""
    leads, own = templates.choices(is_question=is_question)
    lead, number = random.choice(leads), random.randrange(len(own))
    text = joined(lead.format(**slots), own[number].format(**slots))
    return text, f"{'q' if is_question else 's'}{number}.{leads.index(lead)}"


CASUAL_SHARE = 0.15
_CONTRACTIONS = re.compile(r"\b(What|Who|Where) is\b")
_PLAIN_BEGINNINGS = frozenset(
    ("What", "What's", "Who", "Who's", "Where", "Where's", "Which", "When", "How", "In", "Can", "Do", "Please", "Tell")
)


def asked(random: Random, question: str) -> str:
    """Return a question as somebody might type it, with the words that lead to the answer."""
    return led(random, casual(random, question))


def led(random: Random, question: str) -> str:
    """Put the words that lead to the answer, if any, after a question."""
    lead = random.choice(word_list("answers", "leads"))
    return f"{question} {lead}" if lead else question


def casual(random: Random, question: str) -> str:
    """Contract `What is` and begin in lower case, each by chance, as people type."""
    if random.random() < CASUAL_SHARE:
        question = _CONTRACTIONS.sub(r"\1's", question, count=1)
    if random.random() < CASUAL_SHARE and question.split(" ", 1)[0] in _PLAIN_BEGINNINGS:
        question = question[0].lower() + question[1:]
    return question


def filler(random: Random, sentences: int) -> str:
    """Write a paragraph of so many plain sentences."""
    return " ".join(_sentence(random, is_first=place == 0) for place in range(sentences))


def _sentence(random: Random, *, is_first: bool) -> str:
    shape = random.random()
    if shape < 0.1:
        return f"{pick(random, 'filler', 'remarks')}."
    text = _clause(random)
    if shape < 0.6:
        text += f" {pick(random, 'filler', 'adverbials')}"
    elif shape < 0.75:
        text += f" {pick(random, 'filler', 'subordinate')} {_clause(random)}"
    elif shape < 0.9:
        text += f", and {_clause(random)}"
    if not is_first and random.random() < 0.3:
        text = f"{pick(random, 'filler', 'connectives')} {text}"
    return sentence(text) + "."


def _clause(random: Random) -> str:
    subject = random.choice(word_list("filler", "persons") + word_list("filler", "groups"))
    return f"{subject} {pick(random, 'filler', 'verbs')} {pick(random, 'filler', 'places')}"
