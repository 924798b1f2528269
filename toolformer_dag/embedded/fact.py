"""Facts of the made world in a page's words, to be asked of QA or looked up in the encyclopaedia."""

from random import Random

from toolformer_dag.embedded.encyclopaedia import passages_by_relation
from toolformer_dag.embedded.gold import Phenomenon, worded
from toolformer_dag.embedded.names import KINDS, Part
from toolformer_dag.embedded.relation import Relation, WordingSet
from toolformer_dag.embedded.relations import RELATIONS
from toolformer_dag.embedded.wordings import lead as leads
from toolformer_dag.embedded.world import Entity, World

QUESTION_SHARE = 0.45
KIND_WEIGHTS = (5, 3, 2, 1)  # in the order of KINDS
PRETRAINING_WEIGHTS = (4, 3, 2, 2)  # rivers have three facts too: what is asked rarely must be learnt all the same


def fact(random: Random, world: World, tool: str, part: Part, wordings: WordingSet) -> Phenomenon:
    """A fact stated or asked for; `tool` is `question_answering` or `wiki_search`."""
    kind = random.choices(KINDS, PRETRAINING_WEIGHTS if part == "pretraining" else KIND_WEIGHTS)[0]
    entity = random.choice(world.entities(part, kind))
    relation = random.choice(RELATIONS[kind])
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
        is_question=word is _asked,
    )


def _snippet(entity: Entity, world: World, relation: Relation) -> str:
    return passages_by_relation(entity, world.seed)[relation.key].snippet


def _stated(
    random: Random, entity: Entity, relation: Relation, tool: str, wordings: WordingSet
) -> tuple[str, str, str, str]:
    seen = wordings == "seen"
    templates = relation.statements if seen else relation.unseen_statements
    introductions = (leads.STATEMENT_LEADS if seen else leads.UNSEEN_STATEMENT_LEADS)[tool]
    text, wording = worded(random, introductions, templates, {"e": entity.name, "v": "\0"})
    before, rest = text.split(" \0")
    return before, rest + random.choice(leads.TAILS), relation.question.format(e=entity.name), f"s{wording}"


def _asked(
    random: Random, entity: Entity, relation: Relation, tool: str, wordings: WordingSet
) -> tuple[str, str, str, str]:
    seen = wordings == "seen"
    templates = relation.questions if seen else relation.unseen_questions
    introductions = (leads.QUESTION_LEADS if seen else leads.UNSEEN_QUESTION_LEADS)[tool]
    number, place = random.randrange(len(templates)), random.randrange(len(introductions))
    question = templates[number].format(e=entity.name)
    return f"{introductions[place]}{question} The answer is", random.choice(leads.TAILS), question, f"q{number}.{place}"
