"""Documents in the form of P(x): instructions, notes that a text uses, demonstrations of calls."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from random import Random

from embedded_model.documents import PretrainingDocument
from toolformer_dag.synthetic import PROMPTS
from toolformer_dag.synthetic.sentences import Phenomenon
from toolformer_dag.texts.calls import Call, format_call
from toolformer_dag.tools.registry import BUILT_IN_FOLDER

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


def with_notes(random: Random, text: str, own: list[Note], other: list[str]) -> PretrainingDocument:
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


NAMES = {
    "calculator": "Calculator",
    "calendar": "Calendar",
    "wiki_search": "WikiSearch",
    "question_answering": "QA",
    "machine_translation": "MT",
}
NUMBER = re.compile(r"\d[\d,]*(?:\.\d+)?")
PAPER_PROMPTS = BUILT_IN_FOLDER
_OTHERS = (
    "Add calls to the {name} API:\n",
    "Add calls to the {name} API to the text. A call is written as [{name}({slot})].\n",
    "Write [{name}({slot})] where it helps to go on with the text.\n",
    "Here are texts, and the same texts with calls to {name}:\n",
)


def instruction(random: Random, tool: str) -> str:
    """One of the instructions of a tool, with its line end."""
    if random.random() < 0.7:
        return random.choice(_of_prompts(tool))
    slot = "" if tool == "calendar" else random.choice(("input", "text", "question"))
    return random.choice(_OTHERS).format(name=NAMES[tool], slot=slot)


def guessed_input(random: Random, tool: str, before: str) -> str | None:
    """An input made of the words before the place, where nothing better is known; None without two numbers for a sum.

    A sum of one number and itself is never shown: it would be a habit that outlives finetuning.
    """
    if tool == "calculator":
        return _guessed_sum(random, before)
    words = " ".join(before.split()[-random.randint(1, 4) :]).strip('"()[].,;:') or "this"
    return {
        "calendar": "",
        "machine_translation": words,
        "wiki_search": f'"{words}"',
        "question_answering": f'"What is {words}?"',
    }[tool]


def _guessed_sum(random: Random, before: str) -> str | None:
    numbers = list(dict.fromkeys(NUMBER.findall(before)))[-2:]
    return f"{numbers[0]} {random.choice('+-*/')} {numbers[1]}" if len(numbers) == 2 else None


@cache
def _of_prompts(tool: str) -> tuple[str, ...]:
    files = (PAPER_PROMPTS / f"{tool}.txt", PROMPTS / f"{tool}.txt")
    return tuple(file.read_text("utf-8").partition("Input:")[0].strip() + "\n" for file in files)


RIGHT_PLACE, RANDOM_PLACE = 0.68, 0.15  # the rest stay without a call
NO_PLACE_RANDOM = 0.12  # a text where the tool has nothing to say


@dataclass(frozen=True, slots=True)
class DemonstrationExample:
    """A text and where calls stand in it: character offsets with the inputs, in order."""

    text: str
    calls: tuple[tuple[int, Call], ...]

    def parts(self) -> tuple[str, ...]:
        """The text with its calls, cut where the method tokenizes apart."""
        parts, last = [], 0
        for offset, call in self.calls:
            parts += [self.text[last:offset], format_call(call)]
            last = offset
        return tuple(part for part in (*parts, self.text[last:]) if part)


def demonstration(random: Random, instruction: str, examples: Sequence[DemonstrationExample]) -> PretrainingDocument:
    """The document; the last example, and half of the others, come in the pieces in which P(x) is tokenized."""
    pieces: list[str] = []
    head = instruction
    for number, example in enumerate(examples, 1):
        if number == len(examples) or random.random() < 0.5:
            pieces += [f"{head}Input: ", example.text, "\nOutput: ", *example.parts()]
            head = "\n"
        else:
            head += f"Input: {example.text}\nOutput: {''.join(example.parts())}\n"
    return tuple(pieces)


def noisy_place(random: Random, text: str, gold: int | None) -> int | None:
    """The right offset, any other before a word, or none."""
    draw = random.random()
    if gold is not None and draw < RIGHT_PLACE:
        return gold
    if draw < (RIGHT_PLACE + RANDOM_PLACE if gold is not None else NO_PLACE_RANDOM):
        return _any_space(random, text)
    return None


def _any_space(random: Random, text: str) -> int | None:
    spaces = [place for place, letter in enumerate(text) if letter == " "]
    return random.choice(spaces) if spaces else None
