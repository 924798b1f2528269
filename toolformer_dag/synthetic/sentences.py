"""Text with the place at which a call belongs, and plain sentences that no tool can help with."""

import datetime
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from random import Random

from toolformer_dag.synthetic.wordings import filler as words


@dataclass(frozen=True, slots=True)
class Phenomenon:
    """One or more sentences around a gold place: the text is `before + after`, and `after` begins with a space.

    `tool` is the lane's key, `input` stands as in the call (QA and search inputs quoted), `result` is what the tool
    returns, `answer` the words asked for, with which `after` begins. `date` is set for the calendar only.
    """

    tool: str
    before: str
    after: str
    input: str
    result: str
    answer: str
    wording: str
    is_question: bool
    date: datetime.date | None = None

    @property
    def text(self) -> str:
        """The text without the call."""
        return self.before + self.after


def sentence(text: str) -> str:
    """The text with a capital at its beginning."""
    return text[:1].upper() + text[1:]


def joined(lead: str, text: str) -> str:
    """The lead and then the text, which gets a capital where it begins a sentence."""
    begins = not lead or lead.rstrip().endswith((".", "!", "?"))
    return sentence(lead + (sentence(text) if begins else text))


def worded(random: Random, leads: Sequence[str], templates: Sequence[str], slots: Mapping[str, str]) -> tuple[str, str]:
    """One of the templates after one of the leads, filled in, and which ones they are."""
    lead, number = random.choice(leads), random.randrange(len(templates))
    text = joined(lead.format(**slots), templates[number].format(**slots))
    return text, f"{number}.{leads.index(lead)}"


SUBJECTS = words.PERSONS + words.GROUPS


def filler(random: Random, sentences: int) -> str:
    """So many plain sentences, as one paragraph."""
    return " ".join(_sentence(random, is_first=place == 0) for place in range(sentences))


def _sentence(random: Random, *, is_first: bool) -> str:
    shape = random.random()
    if shape < 0.1:
        return f"{random.choice(words.REMARKS)}."
    text = _clause(random)
    if shape < 0.6:
        text += f" {random.choice(words.ADVERBIALS)}"
    elif shape < 0.75:
        text += f" {random.choice(words.SUBORDINATE)} {_clause(random)}"
    elif shape < 0.9:
        text += f", and {_clause(random)}"
    if not is_first and random.random() < 0.3:
        text = f"{random.choice(words.CONNECTIVES)} {text}"
    return sentence(text) + "."


def _clause(random: Random) -> str:
    return f"{random.choice(SUBJECTS)} {random.choice(words.VERBS)} {random.choice(words.PLACES)}"
