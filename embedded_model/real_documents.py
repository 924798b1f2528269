"""Write documents of the pretraining mix from real text: plain, with notes, demonstrations."""

from random import Random

from embedded_model.demonstrations import (
    NAMES,
    DemonstrationExample,
    bracketed,
    content,
    demonstration,
    guessed_input,
    instruction,
    noisy_place,
    note,
    with_notes,
)
from embedded_model.documents import PretrainingDocument, excerpt
from embedded_model.real_gold import RealGold
from toolformer_dag.synthetic.phenomena import TOOLS
from toolformer_dag.synthetic.sentences import Phenomenon
from toolformer_dag.texts.calls import Call

NOTE_WEIGHTS = {
    "calculator": 14,
    "calendar": 22,
    "question_answering": 26,
    "wiki_search": 26,
    "machine_translation": 12,
}
PLAIN_LENGTHS = (400, 1000, 1800, 3000)
WRONG_INPUT = 0.4


def plain(random: Random, source: RealGold) -> PretrainingDocument:
    """Return some paragraphs of a page."""
    _, text = random.choice(source.page(random).passages)
    return (excerpt(random, text, random.randrange(len(text)), random.choice(PLAIN_LENGTHS))[0],) if text else ("",)


def note_then_text(random: Random, source: RealGold) -> PretrainingDocument:
    """Write a note with the excerpt it was taken from, or with another excerpt."""
    gold, other = (_some(random, source) for _ in range(2))
    if gold is None:
        return plain(random, source)
    return with_notes(random, gold.text, [note(random, gold, gold.text)], [content(random, other)] if other else [])


def told_before(random: Random, source: RealGold) -> PretrainingDocument:
    """Write a note, then an excerpt that says the same for the first time, as e(c, r) stands before x."""
    gold = _some(random, source)
    if gold is None or gold.answer in gold.before:
        return plain(random, source)
    return f" {bracketed(random, content(random, gold))}", gold.text


def demonstrate(random: Random, source: RealGold) -> PretrainingDocument:
    """Write two to four examples for a tool."""
    tool = random.choice(TOOLS)
    examples = [_annotated(random, source, tool) for _ in range(random.randint(2, 4))]
    return demonstration(random, instruction(random, tool), examples)


def _some(random: Random, source: RealGold) -> Phenomenon | None:
    return source.gold(random, random.choices(list(NOTE_WEIGHTS), list(NOTE_WEIGHTS.values()))[0])


def _annotated(random: Random, source: RealGold, tool: str) -> DemonstrationExample:
    gold = source.gold(random, tool)
    if gold is None:
        return DemonstrationExample("".join(plain(random, source))[:300], ())
    offset = noisy_place(random, gold.text, len(gold.before))
    if offset is None:
        return DemonstrationExample(gold.text, ())
    guessed = tool == "calculator" or offset != len(gold.before) or random.random() < WRONG_INPUT
    asked = guessed_input(random, tool, gold.text[:offset]) if guessed else gold.input
    if asked is None:
        return DemonstrationExample(gold.text, ())
    return DemonstrationExample(gold.text, ((offset, Call(NAMES[tool], asked)),))
