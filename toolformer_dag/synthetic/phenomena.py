"""Draw phenomena of the synthetic world for each tool, and the questions that evaluation asks about them."""

import datetime
from dataclasses import dataclass
from random import Random

from toolformer_dag.synthetic.calculations import calculation
from toolformer_dag.synthetic.lexicon import translated
from toolformer_dag.synthetic.names import KINDS, WorldPart
from toolformer_dag.synthetic.sentences import Phenomenon, casual, led, worded
from toolformer_dag.synthetic.today import today
from toolformer_dag.synthetic.wordings import Relation, WordingSet, fact_templates, relations, word_list
from toolformer_dag.synthetic.world import Entity, World, passages_by_relation, the_world

QUESTION_SHARE = 0.45
KIND_WEIGHTS = (5, 3, 2, 1)  # in the order of KINDS
PRETRAINING_WEIGHTS = (4, 3, 2, 2)  # rivers have three facts too: what is asked rarely must be learnt all the same


def fact(random: Random, world: World, tool: str, part: WorldPart, wordings: WordingSet) -> Phenomenon:
    """State a fact or ask for it; `tool` is `question_answering` or `wiki_search`."""
    kind = random.choices(KINDS, PRETRAINING_WEIGHTS if part == "pretraining" else KIND_WEIGHTS)[0]
    entity = random.choice(world.entities(part, kind))
    relation = random.choice(relations(kind))
    word = _asked if random.random() < QUESTION_SHARE else _stated
    before, rest, question, wording = word(random, entity, relation, tool, wordings)
    answer = entity.facts[relation.key]
    return Phenomenon(
        tool=tool,
        before=before,
        after=f" {answer}{rest}",
        input=f'"{question}"' if tool == "question_answering" else f'"{entity.name} {relation.keyword}"',
        result=answer if tool == "question_answering" else _snippet(entity, world, relation),
        answer=answer,
        wording=f"{tool}/{relation.kind}/{relation.key}/{wordings}/{wording}",
    )


def _snippet(entity: Entity, world: World, relation: Relation) -> str:
    return passages_by_relation(entity, world.seed)[relation.key].snippet


def _stated(
    random: Random, entity: Entity, relation: Relation, tool: str, wordings: WordingSet
) -> tuple[str, str, str, str]:
    slots = {"e": entity.name, "v": "\0"}
    text, wording = worded(random, fact_templates(relation, tool, wordings), slots, is_question=False)
    before, rest = text.split(" \0")
    tail = random.choice(word_list("tails", "facts"))
    return before, rest + tail, relation.question.format(e=entity.name), wording


def _asked(
    random: Random, entity: Entity, relation: Relation, tool: str, wordings: WordingSet
) -> tuple[str, str, str, str]:
    leads, questions = fact_templates(relation, tool, wordings).choices(is_question=True)
    number, place = random.randrange(len(questions)), random.randrange(len(leads))
    question = casual(random, questions[number].format(e=entity.name))
    tail = random.choice(word_list("tails", "facts"))
    return led(random, f"{leads[place]}{question}"), tail, question, f"q{number}.{place}"


TOOLS = ("calculator", "calendar", "wiki_search", "question_answering", "machine_translation")


def phenomenon(random: Random, world: World, tool: str, part: WorldPart, wordings: WordingSet) -> Phenomenon:
    """Draw a phenomenon for `tool` (a lane's key) about the entities, numbers, dates or words of `part`.

    Raises ValueError for an unknown tool.
    """
    if tool == "calculator":
        return calculation(random, part, wordings)
    if tool == "calendar":
        return today(random, part, wordings)
    if tool == "machine_translation":
        return translated(random, part, wordings)
    if tool in ("question_answering", "wiki_search"):
        return fact(random, world, tool, part, wordings)
    raise ValueError(f"no phenomenon for tool {tool!r}: one of {', '.join(TOOLS)}")


@dataclass(frozen=True, slots=True)
class SyntheticQuestion:
    """Hold a text to continue; a continuation is right when `answer` is among its first words."""

    prompt: str
    answer: str
    tool: str
    date: datetime.date | None
    wording: str


def questions(seed: int, tool: str, n: int, wordings: WordingSet) -> list[SyntheticQuestion]:
    """Return `n` different prompts for one tool, about half questions, half statements to complete."""
    random, found = Random(f"questions {seed} {tool} {wordings}"), dict[SyntheticQuestion, None]()
    while len(found) < n:
        drawn = phenomenon(random, the_world(), tool, "evaluation", wordings)
        found[SyntheticQuestion(drawn.before, drawn.answer, drawn.tool, drawn.date, drawn.wording)] = None
    return list(found)
