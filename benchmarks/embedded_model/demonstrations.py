"""Write documents in the form of P(x): instructions, notes that a text uses, demonstrations of calls."""

import re
from collections.abc import Sequence
from functools import cache
from random import Random

from toolformer_dag.synthetic import PROMPT_FOLDER
from toolformer_dag.synthetic.phenomena import NAMED_ARGUMENT_TOOLS
from toolformer_dag.synthetic.sentences import CallWithResult, Phenomenon
from toolformer_dag.texts.calls import Call, format_call
from toolformer_dag.tools.registry import BUILT_IN_FOLDER

TAGS = ["Note", "Info", "Ref", "Box", "Fact", "Data", "Hint", "Memo", "Link", "Page", "See", "Key"]
EQUALS = (" = ", ": ", " is ", " - ", " -> ", " ... ")
RELEVANT_SHARE = 0.78  # of the texts; the rest have only a note about something else
SECOND_SHARE = 0.3
INSIDE_SHARE = 0.5  # of the relevant notes
EARLIER_SHARE = 0.25  # of the notes inside: one sentence before the words they tell


PretrainingDocument = tuple[str, ...]
"""The pieces of a document, tokenized one by one."""
Note = tuple[str, int]
"""A piece of knowledge, and where the text uses it, as a character offset."""


def note(random: Random, gold: Phenomenon, text: str) -> Note:
    """Write the note of a call at the gold place; `text` contains the phenomenon's own text."""
    return content(random, gold), text.index(gold.text) + len(gold.text_before_call)


def content(random: Random, gold: Phenomenon | CallWithResult) -> str:
    """Return input and result in one line, or the result alone, as mostly for the date and a search."""
    alone = {"calendar": 1.0, "wiki_search": 0.4}.get(gold.tool, 0.2)
    if random.random() < alone:
        return gold.result
    asked = gold.input if gold.tool in NAMED_ARGUMENT_TOOLS else gold.input.strip('"')
    return asked + random.choice(EQUALS) + gold.result


def in_place(random: Random, gold: Phenomenon, told: Phenomenon) -> str:
    """Return what stands for the calls before their result is used: a note, behind those of the calls before it."""
    notes: tuple[Phenomenon | CallWithResult, ...] = (*gold.earlier_calls, told)
    return "".join(f" {bracketed(random, content(random, one))}" for one in notes)


def bracketed(random: Random, known: str) -> str:
    """Put the content in random brackets; square ones only where it has no arrow."""
    square = "->" not in known and "[" not in known
    forms = ["({})", "<{}>", "{{{}}}", random.choice(TAGS) + "({})", *(["[{}]"] * 2 if square else [])]
    return random.choice(forms).format(known)


def wrapped(random: Random, known: str) -> str:
    """Put the content in brackets, behind a tag, or leave it bare."""
    draw = random.random()
    if draw < 0.75:
        return bracketed(random, known)
    if draw < 0.9:
        return f"{random.choice(TAGS)}: {known}"
    return known if known.endswith(".") else known + "."


def with_notes(random: Random, text: str, own: list[Note], other: list[str]) -> PretrainingDocument:
    """Put a relevant note before or inside most texts, and another (from `other`, contents) before some.

    As pieces, the text follows its notes directly, as x follows e(c, r); as a single text, a space separates them.
    """
    pieces = [text]
    before: list[str] = []
    relevant = bool(own) and random.random() < RELEVANT_SHARE
    if relevant:
        told, place = random.choice(own)
        if random.random() < INSIDE_SHARE:
            pieces = _inside(random, text, told, place)
        else:
            before = [wrapped(random, told)]
    if other and (not relevant or random.random() < SECOND_SHARE):
        before.append(wrapped(random, random.choice(other)))
    if not before:
        return tuple(pieces)
    random.shuffle(before)
    notes = "".join(f" {known}" for known in before)
    if random.random() < 0.3:
        return (f"{notes} {''.join(pieces)}",)
    return (notes, *pieces)


def _inside(random: Random, text: str, told: str, place: int) -> list[str]:
    """Insert the note right before the words it is about, or before their sentence."""
    sentence = text.rfind(". ", 0, place) + 1
    if sentence and random.random() < EARLIER_SHARE:
        place = sentence
    return [text[:place], f" {bracketed(random, told)}", text[place:]]


NAMES = {
    "calculator": "Calculator",
    "calendar": "Calendar",
    "wiki_search": "WikiSearch",
    "question_answering": "QA",
    "machine_translation": "MT",
    "distance": "Distance",
    "price": "Price",
}
NUMBER = re.compile(r"\d[\d,]*(?:\.\d+)?")
_OTHERS = (
    "Add calls to the {name} API:\n",
    "Add calls to the {name} API to the text. A call is written as [{name}({slot})].\n",
    "Write [{name}({slot})] where it helps to go on with the text.\n",
    "Here are texts, and the same texts with calls to {name}:\n",
)


def instruction(random: Random, tool: str) -> str:
    """Draw an instruction for a tool, with its line end."""
    if random.random() < 0.7:
        return random.choice(_of_prompts(tool))
    slot = "" if tool == "calendar" else random.choice(("input", "text", "question"))
    return random.choice(_OTHERS).format(name=NAMES[tool], slot=slot)


def guessed_input(random: Random, tool: str, before: str) -> str | None:
    """Make an input from the words before the place; return None for a calculator without two different numbers.

    A sum never uses a number twice: the model would keep that habit after finetuning.
    """
    if tool == "calculator":
        return _guessed_sum(random, before)
    words = " ".join(before.split()[-random.randint(1, 4) :]).strip('"()[].,;:') or "this"
    return {
        "calendar": "",
        "distance": f'start="{words}", end="{words}"',
        "price": f'item="{words}", count=2, day="Monday"',
        "machine_translation": words,
        "wiki_search": f'"{words}"',
        "question_answering": f'"What is {words}?"',
    }[tool]


def _guessed_sum(random: Random, before: str) -> str | None:
    numbers = list(dict.fromkeys(NUMBER.findall(before)))[-2:]
    return f"{numbers[0]} {random.choice('+-*/')} {numbers[1]}" if len(numbers) == 2 else None


@cache
def _of_prompts(tool: str) -> tuple[str, ...]:
    files = (BUILT_IN_FOLDER / f"{tool}.txt", PROMPT_FOLDER / f"{tool}.txt")
    return tuple(file.read_text("utf-8").partition("Input:")[0].strip() + "\n" for file in files if file.exists())


CHAIN_INSTRUCTIONS = (
    "Add calls that use the results of calls before them:\n",
    "Here a call may stand behind the result of another, where it leads further:\n",
    "Write [Name(input)] behind a result where a further call helps to go on with the text.\n",
)


@cache
def chain_instructions() -> tuple[str, ...]:
    """Return the instructions for calls behind calls, that of the synthetic world's prompt three times."""
    written = (PROMPT_FOLDER / "question_answering_chain.txt").read_text("utf-8").partition("Input:")[0].strip() + "\n"
    return (written, written, written, *CHAIN_INSTRUCTIONS)


def behind_calls(text: str, offset: int, earlier: Sequence[CallWithResult], asked: tuple[str, str] | None) -> list[str]:
    """Return the text with calls and their results at a character offset, and `asked`, tool and input, behind them."""
    done = "".join(format_call(Call(NAMES[one.tool], one.input), one.result) for one in earlier)
    last = [format_call(Call(NAMES[asked[0]], asked[1]))] if asked else []
    return [part for part in (text[:offset], done, *last, text[offset:]) if part]


# Shares of the texts; the rest stay without a call.
RIGHT_PLACE = 0.68
RANDOM_PLACE = 0.15
NO_PLACE_RANDOM = 0.12  # a text where the tool has nothing to say


def with_call(text: str, offset: int, tool: str, asked: str) -> list[str]:
    """Return the text with a call at a character offset, cut where the method tokenizes separately."""
    parts = (text[:offset], format_call(Call(NAMES[tool], asked)), text[offset:])
    return [part for part in parts if part]


def demonstration(
    random: Random, instruction: str, examples: Sequence[tuple[str, Sequence[str]]]
) -> PretrainingDocument:
    """Build the document of texts and their annotated parts.

    The last example, and half of the others, are cut into pieces as P(x) is tokenized.
    """
    pieces: list[str] = []
    head = instruction
    for number, (text, parts) in enumerate(examples, 1):
        if number == len(examples) or random.random() < 0.5:
            pieces += [f"{head}Input: ", text, "\nOutput: ", *parts]
            head = "\n"
        else:
            head += f"Input: {text}\nOutput: {''.join(parts)}\n"
    return tuple(pieces)


def noisy_place(random: Random, text: str, gold: int | None) -> int | None:
    """Return the right offset, any other before a word, or None."""
    draw = random.random()
    if gold is not None and draw < RIGHT_PLACE:
        return gold
    if draw < (RIGHT_PLACE + RANDOM_PLACE if gold is not None else NO_PLACE_RANDOM):
        spaces = [place for place, letter in enumerate(text) if letter == " "]
        return random.choice(spaces) if spaces else None
    return None
