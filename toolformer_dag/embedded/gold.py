"""A stretch of text with the place at which a call belongs."""

import datetime
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from random import Random


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
