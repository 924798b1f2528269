"""Documents of the pretraining mix about the made world, about entities of its pretraining part only."""

from random import Random

from toolformer_dag.embedded.filler import filler
from toolformer_dag.embedded.gold import Phenomenon
from toolformer_dag.embedded.names import PARTS
from toolformer_dag.embedded.phenomenon import TOOLS, phenomenon
from toolformer_dag.embedded.training.blur import blurred
from toolformer_dag.embedded.training.demonstrations import Example, demonstration, noisy_place
from toolformer_dag.embedded.training.document import Document
from toolformer_dag.embedded.training.instructions import NAMES, guessed_input, instruction
from toolformer_dag.embedded.training.notes import bracketed, content, note, with_notes
from toolformer_dag.embedded.training.wrong_input import wrong_input
from toolformer_dag.embedded.web import document_text
from toolformer_dag.embedded.world import World
from toolformer_dag.texts.call import Call

TOOL_WEIGHTS = {"calculator": 13, "calendar": 4, "question_answering": 12, "wiki_search": 8, "machine_translation": 5}
SIBLINGS = {"question_answering": "wiki_search", "wiki_search": "question_answering"}  # they know the same facts
SIBLING_SHARE = 0.7  # of the texts that have no place for one of them
PLACE_SHARE = 0.7  # of the texts shown in a demonstration
WRONG_INPUT = 0.12
BLURRED_SHARE = 0.25
BLURRED_SUMS = 0.45  # their numbers are to be found whatever the words are
TOLD_SHARE, WRONG_SHARE = 0.8, 0.1  # of the texts in a row of them; the rest have no note
ALONE_SHARE = 0.75  # of the examples: their texts are one phenomenon, so that calls make up much of a demonstration


def some(random: Random, world: World, tool: str | None = None) -> Phenomenon:
    """A phenomenon of a tool, or of any."""
    gold = phenomenon(random, world, tool or _any_tool(random), "pretraining", "seen")
    share = BLURRED_SUMS if gold.tool == "calculator" else BLURRED_SHARE
    return blurred(random, gold) if random.random() < share else gold


def _any_tool(random: Random) -> str:
    return random.choices(list(TOOL_WEIGHTS), list(TOOL_WEIGHTS.values()))[0]


def of_any_part(random: Random, world: World) -> str:
    """A phenomenon of any tool and any part, with its result, as the tokenizer meets them."""
    gold = phenomenon(random, world, random.choice(TOOLS), random.choice(PARTS), "seen")
    return f"{gold.text} {gold.input} {gold.result}"


def page(random: Random, golds: list[Phenomenon]) -> str:
    """A text around phenomena: alone, among plain sentences, or a whole page of the small web."""
    draw = random.random()
    if draw < 0.15:
        return document_text(random, golds)
    texts = [gold.text for gold in golds]
    if draw < 0.5:
        texts.insert(random.randint(0, len(texts)), filler(random, 1))
    return " ".join(texts)


def plain(random: Random, world: World) -> Document:
    """A page and nothing else."""
    if random.random() < 0.15:
        return (filler(random, random.randint(2, 5)),)
    return (page(random, [some(random, world) for _ in range(random.randint(1, 2))]),)


def note_then_text(random: Random, world: World) -> Document:
    """A note and a page that uses it, or does not."""
    golds = [some(random, world) for _ in range(random.choice((1, 1, 2)))]
    text = page(random, golds)
    own = [note(random, gold, text) for gold in golds]
    distractor = some(random, world, golds[0].tool if random.random() < 0.5 else None)
    return with_notes(random, text, own, [content(random, distractor)])


def noted(random: Random, world: World) -> Document:
    """Short texts one after the other; most have a note right before the words it tells, some a wrong one or none."""
    pieces: list[str] = []
    for _ in range(random.randint(3, 8)):
        gold, draw = some(random, world), random.random()
        told = gold if draw < TOLD_SHARE else some(random, world, gold.tool)
        known = [f" {bracketed(random, content(random, told))}"] if draw < TOLD_SHARE + WRONG_SHARE else []
        pieces += [f" {gold.before}" if pieces else gold.before, *known, gold.after]
    return tuple(pieces)


def told_before(random: Random, world: World) -> Document:
    """A note and then the short text that it tells, as e(c, r) stands before x when calls are judged."""
    gold = some(random, world, random.choice(TOOLS))
    return f" {bracketed(random, content(random, gold))}", gold.text


def annotated(random: Random, world: World, tool: str, *, alone: bool) -> Example:
    """A phenomenon `alone` or on a page, mostly with a place for the tool, and its noisy call."""
    has_place = random.random() < PLACE_SHARE
    golds = [some(random, world, tool)] if has_place else [some(random, world, _other(random, tool))]
    if not alone and random.random() < 0.3:
        golds.append(some(random, world, _other(random, tool)))
    text = golds[0].text if alone else page(random, golds)
    gold = text.index(golds[0].text) + len(golds[0].before) if has_place else None
    offset = noisy_place(random, text, gold)
    asked = None if offset is None else _input(random, golds[0], tool, text[:offset])
    if offset is None or asked is None:
        return Example(text, ())
    return Example(text, ((offset, Call(NAMES[tool], asked)),))


def demonstrate(random: Random, world: World) -> Document:
    """Three to seven examples for one tool."""
    tool = _any_tool(random)
    alone = [random.random() < ALONE_SHARE for _ in range(random.randint(3, 7))]
    examples = [annotated(random, world, tool, alone=one) for one in alone]
    return demonstration(random, instruction(random, tool), examples)


def _other(random: Random, tool: str) -> str:
    if tool in SIBLINGS and random.random() < SIBLING_SHARE:
        return SIBLINGS[tool]
    return random.choice([one for one in TOOLS if one != tool])


def _input(random: Random, gold: Phenomenon, tool: str, before: str) -> str | None:
    if gold.tool != tool:
        return guessed_input(random, tool, before)
    return wrong_input(random, gold) if random.random() < WRONG_INPUT else gold.input
