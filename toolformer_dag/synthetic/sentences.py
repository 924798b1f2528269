"""Compose sentences with a place where a call belongs, and plain sentences that no tool helps with."""

import datetime
import re
from collections.abc import Mapping
from dataclasses import dataclass
from random import Random
from typing import NamedTuple

from toolformer_dag.synthetic.wordings import Templates, draw_word, get_word_list


@dataclass(frozen=True, slots=True)
class CallWithResult:
    """A call of a tool with its result. `tool` is the key of the tool in the settings."""

    tool: str
    input: str
    result: str


@dataclass(frozen=True, slots=True)
class Phenomenon:
    """A text with a place where a call belongs, because its result tells what the text says next.

    Attributes:
        tool: The key of the tool in the settings.
        text_before_call: The text up to the place of the call.
        text_after_call: The text after it, which begins with a space and `answer`.
        input: The input as the call has it. For question answering and search it is in quotes.
        result: What the tool returns.
        answer: The part of the result that the text asks for or states.
        wording_name: Names the templates of the text, such as `calendar/year/seen/q3.1`.
        page_date: The date of the page that the text belongs on. Only set for the calendar.
        earlier_calls: For a text that takes several calls, the calls before the last one, at the same place.
    """

    tool: str
    text_before_call: str
    text_after_call: str
    input: str
    result: str
    answer: str
    wording_name: str
    page_date: datetime.date | None = None
    earlier_calls: tuple[CallWithResult, ...] = ()

    @property
    def text(self) -> str:
        """The text without the call."""
        return self.text_before_call + self.text_after_call


def capitalize_first_letter(text: str) -> str:
    """Return a text with a capital at its beginning."""
    return text[:1].upper() + text[1:]


def join_lead_and_text(lead: str, text: str) -> str:
    """Join a lead and a text into sentences that begin with a capital.

    The text keeps its first letter if the lead is only the beginning of its sentence.

    Example:
        "" and "it is late." give "It is late."
        "as you know, " and "it is late." give "As you know, it is late."
        "Hello! " and "it is late." give "Hello! It is late."
    """
    begins_sentence = not lead or lead.rstrip().endswith((".", "!", "?"))
    if begins_sentence:
        text = capitalize_first_letter(text)
    return capitalize_first_letter(lead + text)


class WordedText(NamedTuple):
    """A text written from templates.

    Attributes:
        text: The text.
        wording_name: Names the templates: the kind of sentence (q for a question, s for a statement), its index, and
            the index of its lead, such as "q3.1".
    """

    text: str
    wording_name: str


def fill_random_template(
    random: Random, templates: Templates, value_by_slot: Mapping[str, str], *, is_question: bool
) -> WordedText:
    """Write a sentence by a random template, after a random lead.

    Args:
        random: The source of the draws.
        templates: The templates to choose from.
        value_by_slot: The values of the slots in the templates, such as "e": "Ada" for `{e}`.
        is_question: Whether to write a question. Otherwise a statement is written.
    """
    leads, sentences = templates.get_leads_and_sentences(is_question=is_question)
    lead = random.choice(leads)
    sentence_index = random.randrange(len(sentences))

    filled_lead = lead.format(**value_by_slot)
    filled_sentence = sentences[sentence_index].format(**value_by_slot)

    kind = "q" if is_question else "s"
    return WordedText(
        text=join_lead_and_text(filled_lead, filled_sentence),
        wording_name=f"{kind}{sentence_index}.{leads.index(lead)}",
    )


ANSWER_MARK = "\0"
"""Stands in a statement for its answer while it is written; no other text holds it."""


class TextAroundAnswer(NamedTuple):
    """A text before its answer, without the space in between, and after it."""

    before_answer: str
    after_answer: str


def split_at_answer(statement: str) -> TextAroundAnswer:
    """Split a statement at the mark of its answer, and drop the space before the mark.

    Raises:
        ValueError: The statement does not have exactly one mark with a space before it.
    """
    before_answer, after_answer = statement.split(f" {ANSWER_MARK}")
    return TextAroundAnswer(before_answer, after_answer)


CASUAL_SHARE = 0.15
"""The share of questions that are contracted, and of those that begin in lower case."""
_CONTRACTIBLE_PATTERN = re.compile(r"\b(What|Who|Where) is\b")
_LOWERABLE_FIRST_WORDS = frozenset(
    ("What", "What's", "Who", "Who's", "Where", "Where's", "Which", "When", "How", "In", "Can", "Do", "Please", "Tell")
)
"""Words at the beginning of a question that are not names, so that people may type them in lower case."""


def make_typed_question(random: Random, question: str) -> str:
    """Return a question as somebody might type it, and after it words that lead to the answer.

    Example:
        "What is the capital?" may give "what's the capital? It is".
    """
    return append_answer_lead(random, make_question_casual(random, question))


def append_answer_lead(random: Random, question: str) -> str:
    """Return a question and, after it, random words that lead to its answer, such as "It is", or none."""
    answer_lead = random.choice(get_word_list("answers", "leads"))
    if not answer_lead:
        return question
    return f"{question} {answer_lead}"


def make_question_casual(random: Random, question: str) -> str:
    """Contract "What is" and the like, begin a question in lower case, or both, each by chance, as people type.

    Example:
        "What is the capital?" may give "What's the capital?" or "what is the capital?".
    """
    if random.random() < CASUAL_SHARE:
        question = _CONTRACTIBLE_PATTERN.sub(r"\1's", question, count=1)

    # Names keep their capital.
    if random.random() < CASUAL_SHARE:
        first_word = question.split(" ", 1)[0]
        if first_word in _LOWERABLE_FIRST_WORDS:
            question = question[0].lower() + question[1:]
    return question


def write_filler_paragraph(random: Random, sentence_count: int) -> str:
    """Write a paragraph of plain sentences, which no tool helps with."""
    sentences = []
    for number in range(sentence_count):
        sentences.append(_write_filler_sentence(random, is_first_in_paragraph=number == 0))
    return " ".join(sentences)


def _write_filler_sentence(random: Random, *, is_first_in_paragraph: bool) -> str:
    """Write a plain sentence from random words. It may begin with a word such as "then" if it is not the first."""
    # One sentence in ten is a fixed remark. The number also decides how the other ones end.
    shape_number = random.random()
    if shape_number < 0.1:
        remark = draw_word(random, "filler", "remarks")
        return f"{remark}."

    text = _write_filler_clause(random) + _write_sentence_end(random, shape_number)
    if not is_first_in_paragraph and random.random() < 0.3:
        connective = draw_word(random, "filler", "connectives")
        text = f"{connective} {text}"
    return capitalize_first_letter(text) + "."


def _write_sentence_end(random: Random, shape_number: float) -> str:
    """Write what follows the first clause of a plain sentence.

    Args:
        random: The source of the draws.
        shape_number: From 0.1 to 1. Decides what follows: an adverbial (below 0.6), a subordinate clause (below 0.75),
            a second main clause (below 0.9) or nothing.
    """
    if shape_number < 0.6:
        adverbial = draw_word(random, "filler", "adverbials")
        return f" {adverbial}"
    if shape_number < 0.75:
        conjunction = draw_word(random, "filler", "subordinate")
        return f" {conjunction} {_write_filler_clause(random)}"
    if shape_number < 0.9:
        return f", and {_write_filler_clause(random)}"
    return ""


def _write_filler_clause(random: Random) -> str:
    """Write a clause of random words that says who does what where."""
    subjects = get_word_list("filler", "persons") + get_word_list("filler", "groups")
    subject = random.choice(subjects)
    verb = draw_word(random, "filler", "verbs")
    place = draw_word(random, "filler", "places")
    return f"{subject} {verb} {place}"
