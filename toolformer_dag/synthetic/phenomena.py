"""Draw phenomena of the synthetic world for each tool, and the questions that evaluation asks about them."""

from random import Random

from toolformer_dag.settings.settings_file import PAPER_TOOLS
from toolformer_dag.synthetic.calculations import calculation
from toolformer_dag.synthetic.lexicon import translated
from toolformer_dag.synthetic.named_tools import distance, price
from toolformer_dag.synthetic.sentences import Phenomenon, casual, led, worded
from toolformer_dag.synthetic.today import today
from toolformer_dag.synthetic.two_hop import two_hop
from toolformer_dag.synthetic.wordings import KINDS, WordingSet, WorldPart, fact_templates, relations, word_list
from toolformer_dag.synthetic.world import World, passages_by_relation, the_world

QUESTION_SHARE = 0.45
KIND_WEIGHTS = (5, 3, 2, 1)  # in the order of KINDS
PRETRAINING_WEIGHTS = (4, 3, 2, 2)  # rivers have three facts too: what is asked rarely must be learnt all the same


def fact(random: Random, world: World, tool: str, part: WorldPart, wordings: WordingSet) -> Phenomenon:
    """State a fact or ask for it; `tool` is `question_answering` or `wiki_search`."""
    kind = random.choices(KINDS, PRETRAINING_WEIGHTS if part == "pretraining" else KIND_WEIGHTS)[0]
    entity = random.choice(world.entities(part, kind))
    relation = random.choice(relations(kind))
    templates, is_question = fact_templates(relation, tool, wordings), random.random() < QUESTION_SHARE
    if is_question:
        leads, questions = templates.choices(is_question=True)
        number, place = random.randrange(len(questions)), random.randrange(len(leads))
        question = casual(random, questions[number].format(e=entity.name))
        text, wording = f"{leads[place]}{question}", f"q{number}.{place}"
    else:
        text, wording = worded(random, templates, {"e": entity.name, "v": "\0"}, is_question=False)
        question = relation.question.format(e=entity.name)
    tail = random.choice(word_list("tails", "facts"))
    before, rest = (led(random, text), "") if is_question else text.split(" \0")
    answer = entity.facts[relation.key]
    asks = tool == "question_answering"
    return Phenomenon(
        tool=tool,
        before=before,
        after=f" {answer}{rest}{tail}",
        input=f'"{question}"' if asks else f'"{entity.name} {relation.keyword}"',
        result=answer if asks else passages_by_relation(entity, world.seed)[relation.key].snippet,
        answer=answer,
        wording=f"{tool}/{relation.kind}/{relation.key}/{wordings}/{wording}",
    )


TOOLS = PAPER_TOOLS
TWO_HOP = "two_hop"
"""Phenomena of question answering that need its result in another call."""
NAMED_TOOLS = ("distance", "price")
"""Tools with named arguments, which stand in the training of the embedded model and on no page."""


def phenomenon(random: Random, world: World, tool: str, part: WorldPart, wordings: WordingSet) -> Phenomenon:
    """Draw a phenomenon for `tool` (of TOOLS, NAMED_TOOLS, or TWO_HOP) about what `part` has of the world."""
    drawing = {"calculator": calculation, "calendar": today, "machine_translation": translated}.get(tool)
    of_world = {TWO_HOP: two_hop, "distance": distance, "price": price}.get(tool)
    if of_world:
        return of_world(random, world, part, wordings)
    return drawing(random, part, wordings) if drawing else fact(random, world, tool, part, wordings)


def questions(seed: int, tool: str, n: int, wordings: WordingSet) -> list[Phenomenon]:
    """Return `n` phenomena for one tool that differ in what is asked, about half questions, half statements.

    The text to continue is `before`; a continuation is right when `answer` is among its first words.
    """
    random, distinct = Random(f"questions {seed} {tool} {wordings}"), dict[tuple[object, ...], Phenomenon]()
    while len(distinct) < n:
        drawn = phenomenon(random, the_world(), tool, "evaluation", wordings)
        distinct[drawn.before, drawn.answer, drawn.date, drawn.wording] = drawn
    return list(distinct.values())
