"""Notes: something that is known, and a text that uses it. This is how the model learns to read e(c, r).

A note stands before the text, as e(c, r) does when calls are judged, or inside it, right before the words it tells, as
e(c, r) does in C*. No note looks like a call with its result: none holds a tool's name, and square brackets and arrow
never come together.
"""

from dataclasses import dataclass
from random import Random

from toolformer_dag.embedded.gold import Phenomenon
from toolformer_dag.embedded.training.document import Document

TAGS = ["Note", "Info", "Ref", "Box", "Fact", "Data", "Hint", "Memo", "Link", "Page", "See", "Key"]
EQUALS = (" = ", ": ", " is ", " - ", " -> ", " ... ")
RELEVANT_SHARE = 0.78  # of the texts; the rest have only a note about something else
SECOND_SHARE = 0.3
INSIDE_SHARE = 0.5  # of the relevant notes
EARLIER_SHARE = 0.25  # of the notes inside: one sentence before the words they tell


@dataclass(frozen=True, slots=True)
class Note:
    """What is known, and the character offset of the words it tells in the text that uses it."""

    content: str
    place: int


def note(random: Random, gold: Phenomenon, text: str) -> Note:
    """What a call at the gold place would bring in; `text` holds the phenomenon's own text."""
    return Note(content(random, gold), text.index(gold.text) + len(gold.before))


def content(random: Random, gold: Phenomenon) -> str:
    """Input and result in one line, or the result alone; the date and a search result mostly stand for themselves."""
    asked = gold.input.strip('"')
    alone = {"calendar": 1.0, "wiki_search": 0.4}.get(gold.tool, 0.2)
    if random.random() < alone:
        return gold.result
    return f"{asked}{random.choice(EQUALS)}{gold.result}"


def bracketed(random: Random, known: str) -> str:
    """The content in brackets of any kind, square ones only without an arrow."""
    square = "->" not in known and "[" not in known
    forms = ["({})", "<{}>", "{{{}}}", random.choice(TAGS) + "({})", *(["[{}]"] * 2 if square else [])]
    return random.choice(forms).format(known)


def wrapped(random: Random, known: str) -> str:
    """The content in brackets, behind a tag, or bare."""
    draw = random.random()
    if draw < 0.75:
        return bracketed(random, known)
    if draw < 0.9:
        return f"{random.choice(TAGS)}: {known}"
    return known if known.endswith(".") else known + "."


def with_notes(random: Random, text: str, own: list[Note], other: list[str]) -> Document:
    """A relevant note before or inside most texts, another one (of `other`, contents) before some.

    In pieces the text follows at once, as x follows e(c, r); as one text a space comes between.
    """
    chosen = random.choice(own) if own and random.random() < RELEVANT_SHARE else None
    pieces = [text]
    before = []
    if chosen and random.random() < INSIDE_SHARE:
        pieces = _inside(random, text, chosen)
    elif chosen:
        before = [wrapped(random, chosen.content)]
    if other and (chosen is None or random.random() < SECOND_SHARE):
        before.append(wrapped(random, random.choice(other)))
    random.shuffle(before)
    notes = "".join(f" {known}" for known in before)
    if notes and random.random() < 0.3:
        pieces[0] = f" {pieces[0]}"
        return (notes + "".join(pieces),)
    return (notes, *pieces) if notes else tuple(pieces)


def _inside(random: Random, text: str, known: Note) -> list[str]:
    """The text around its note, which stands right before the words it tells or before their sentence."""
    sentence = text.rfind(". ", 0, known.place) + 1
    place = sentence if sentence and random.random() < EARLIER_SHARE else known.place
    return [text[:place], f" {bracketed(random, known.content)}", text[place:]]
