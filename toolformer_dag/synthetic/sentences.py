"""Compose sentences with a place where a call belongs, and plain sentences that no tool helps with."""

import datetime
import re
from collections.abc import Mapping
from dataclasses import dataclass
from random import Random
from typing import NamedTuple

from toolformer_dag.synthetic.wordings import Templates, get_word_list, pick


@dataclass(frozen=True, slots=True)
class CallWithResult:
    """A call with its result, alone or in a chain. `tool`: the key of its settings."""

    tool: str
    input: str
    result: str


@dataclass(frozen=True, slots=True)
class Phenomenon:
    """A text with a place where a call belongs, because its result tells what the text says next.

    The text is `before + after`, and the call stands between them; `after` begins with a space and `answer`.
    """

    tool: str
    """The key of the tool in the settings."""
    before: str
    after: str
    input: str
    """The input as the call has it; for question answering and search it is in quotes."""
    result: str
    """What the tool returns."""
    answer: str
    """The part of the result that the text asks for or states."""
    wording: str
    """Names the templates of the text, such as `calendar/year/seen/q3.1`."""
    date: datetime.date | None = None
    """The date of the page; only for the calendar."""
    earlier: tuple[CallWithResult, ...] = ()
    """Earlier calls of a chain, which stand at the same place before the call."""

    @property
    def text(self) -> str:
        """The text without the call."""
        return self.before + self.after


def sentence(text: str) -> str:
    """Return a text with a capital at its beginning."""
    return text[:1].upper() + text[1:]


def joined(lead: str, text: str) -> str:
    """Join a lead and a text, both with a capital; the text keeps its first letter after a lead that is no sentence."""
    begins_sentence = not lead or lead.rstrip().endswith((".", "!", "?"))
    rest = sentence(text) if begins_sentence else text
    return sentence(lead + rest)


class Worded(NamedTuple):
    """A text written from templates."""

    text: str
    wording: str
    """The kind of template (q: question, s: statement), its number, and that of its lead: `q3.1`."""


def fill_template(random: Random, templates: Templates, slots: Mapping[str, str], *, is_question: bool) -> Worded:
    """Fill in a random question or statement of `templates`, after a random lead."""
    leads, texts = templates.choices(is_question=is_question)
    lead = random.choice(leads)
    number = random.randrange(len(texts))
    text = joined(lead.format(**slots), texts[number].format(**slots))
    kind = "q" if is_question else "s"
    return Worded(text, wording=f"{kind}{number}.{leads.index(lead)}")


ANSWER_MARK = "\0"
"""Stands in a statement for its answer while it is written; no other text holds it."""


class AroundAnswer(NamedTuple):
    """A text before its answer, without the space, and after it."""

    before: str
    after: str


def split_at_answer(statement: str) -> AroundAnswer:
    """Split a statement at the mark of its answer, and drop the space before the mark."""
    before, after = statement.split(f" {ANSWER_MARK}")
    return AroundAnswer(before, after)


CASUAL_SHARE = 0.15
"""The share of questions that are contracted, and of those that begin in lower case."""
_CONTRACTIONS = re.compile(r"\b(What|Who|Where) is\b")
_PLAIN_BEGINNINGS = frozenset(
    ("What", "What's", "Who", "Who's", "Where", "Where's", "Which", "When", "How", "In", "Can", "Do", "Please", "Tell")
)
"""Words at the beginning of a question that are no names."""


def type_question(random: Random, question: str) -> str:
    """Return a question as somebody might type it, with the words that lead to the answer."""
    return with_answer_lead(random, make_casual(random, question))


def with_answer_lead(random: Random, question: str) -> str:
    """Return a question and, after it, words that lead to its answer, such as `It is`; some leads are empty."""
    lead = random.choice(get_word_list("answers", "leads"))
    return f"{question} {lead}" if lead else question


def make_casual(random: Random, question: str) -> str:
    """Contract `What is` and begin in lower case, each by chance, as people type."""
    if random.random() < CASUAL_SHARE:
        question = _CONTRACTIONS.sub(r"\1's", question, count=1)
    if random.random() < CASUAL_SHARE and question.split(" ", 1)[0] in _PLAIN_BEGINNINGS:
        question = question[0].lower() + question[1:]
    return question


def filler(random: Random, sentences: int) -> str:
    """Write a paragraph of so many plain sentences."""
    return " ".join(_write_sentence(random, is_first=number == 0) for number in range(sentences))


def _write_sentence(random: Random, *, is_first: bool) -> str:
    """Write a plain sentence that no tool helps with, from random words. `is_first`: of its paragraph."""
    shape = random.random()  # by its ranges: a remark, or a clause with an adverbial, a second clause or nothing
    if shape < 0.1:
        return f"{pick(random, 'filler', 'remarks')}."
    text = _write_clause(random) + _write_rest_of_sentence(random, shape)
    if not is_first and random.random() < 0.3:
        text = f"{pick(random, 'filler', 'connectives')} {text}"
    return sentence(text) + "."


def _write_rest_of_sentence(random: Random, shape: float) -> str:
    """Write what follows a first clause, by ranges of `shape`: an adverbial, a second clause or nothing."""
    if shape < 0.6:
        return f" {pick(random, 'filler', 'adverbials')}"
    if shape < 0.75:
        return f" {pick(random, 'filler', 'subordinate')} {_write_clause(random)}"
    if shape < 0.9:
        return f", and {_write_clause(random)}"
    return ""


def _write_clause(random: Random) -> str:
    """Write a clause that says who does what where."""
    subject = random.choice(get_word_list("filler", "persons") + get_word_list("filler", "groups"))
    return f"{subject} {pick(random, 'filler', 'verbs')} {pick(random, 'filler', 'places')}"
