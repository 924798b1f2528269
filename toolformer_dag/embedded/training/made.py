"""Documents of the pretraining mix about the made world, about entities of its pretraining part only."""

from random import Random

from toolformer_dag.embedded.filler import filler
from toolformer_dag.embedded.gold import Phenomenon
from toolformer_dag.embedded.names import PARTS
from toolformer_dag.embedded.phenomenon import TOOLS, phenomenon
from toolformer_dag.embedded.relation import Relation
from toolformer_dag.embedded.relations import RELATIONS
from toolformer_dag.embedded.training.blur import blurred
from toolformer_dag.embedded.training.demonstrations import Example, demonstration, noisy_place
from toolformer_dag.embedded.training.document import Document
from toolformer_dag.embedded.training.instructions import NAMES, guessed_input, instruction
from toolformer_dag.embedded.training.notes import content, note, with_notes
from toolformer_dag.embedded.web import document_text
from toolformer_dag.embedded.world import World
from toolformer_dag.texts.call import Call

TOOL_WEIGHTS = {"calculator": 3, "calendar": 2, "question_answering": 2, "wiki_search": 3, "machine_translation": 2}
WRONG_INPUT = 0.2
BLURRED_SHARE = 0.5
ALONE_SHARE = 0.75  # of the examples: their texts are one phenomenon, so that calls make up much of a demonstration


def some(random: Random, world: World, tool: str | None = None) -> Phenomenon:
    """A phenomenon of a tool, or of any."""
    chosen = tool or random.choices(list(TOOL_WEIGHTS), list(TOOL_WEIGHTS.values()))[0]
    gold = phenomenon(random, world, chosen, "pretraining", "seen")
    return blurred(random, gold) if random.random() < BLURRED_SHARE else gold


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


def annotated(random: Random, world: World, tool: str, *, alone: bool) -> Example:
    """A phenomenon `alone` or on a page, mostly with a place for the tool, and its noisy call."""
    has_place = random.random() < 0.88
    golds = [some(random, world, tool)] if has_place else [some(random, world, _other(random, tool))]
    if not alone and random.random() < 0.3:
        golds.append(some(random, world, _other(random, tool)))
    text = golds[0].text if alone else page(random, golds)
    gold = text.index(golds[0].text) + len(golds[0].before) if has_place else None
    offset = noisy_place(random, text, gold)
    if offset is None:
        return Example(text, ())
    return Example(text, ((offset, Call(NAMES[tool], _input(random, golds[0], tool, text[:offset]))),))


def demonstrate(random: Random, world: World) -> Document:
    """Three to seven examples for one tool."""
    tool = random.choice(TOOLS)
    alone = [random.random() < ALONE_SHARE for _ in range(random.randint(3, 7))]
    examples = [annotated(random, world, tool, alone=one) for one in alone]
    return demonstration(random, instruction(random, tool), examples)


def _other(random: Random, tool: str) -> str:
    return random.choice([one for one in TOOLS if one != tool])


def _input(random: Random, gold: Phenomenon, tool: str, before: str) -> str:
    if gold.tool != tool:
        return guessed_input(random, tool, before)
    return wrong_input(random, gold) if random.random() < WRONG_INPUT else gold.input


def wrong_input(random: Random, gold: Phenomenon) -> str:
    """An input like the right one that asks for something else; the calendar has only one."""
    if gold.tool == "calculator":
        return _wrong_sum(random, gold.input)
    if gold.tool == "machine_translation":
        words = gold.input.split()
        return random.choice((words[-1], " ".join(words[:2]), " ".join(gold.before.split()[:3])))
    if gold.tool == "calendar":
        return gold.input
    return _wrong_question(random, gold)


def _wrong_sum(random: Random, expression: str) -> str:
    a, operator, b = expression.split(" ")
    other = random.choice([sign for sign in "+-*/" if sign != operator])
    return random.choice((f"{b} {operator} {a}", f"{a} {other} {b}", f"{a} {operator} {random.randint(2, 99)}"))


def _wrong_question(random: Random, gold: Phenomenon) -> str:
    kind, key = gold.wording.split("/")[1:3]
    relations = next(found for name, found in RELATIONS.items() if name == kind)
    name = next(_name(gold.input.strip('"'), relation) for relation in relations if relation.key == key)
    other = random.choice(relations)
    if gold.tool == "question_answering":
        return f'"{other.question.format(e=name)}"'
    return random.choice((f'"{name}"', f'"{name} {other.keyword}"'))


def _name(asked: str, relation: Relation) -> str:
    templates = (f"{{e}} {relation.keyword}", relation.question, *relation.questions)
    for before, after in (template.split("{e}", 1) for template in templates):
        if asked.startswith(before) and asked.endswith(after):
            return asked[len(before) : len(asked) - len(after)]
    return asked
