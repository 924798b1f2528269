"""Write sentences whose answer takes two or three calls: the result of one is in the input of the next.

A wording is a name for the templates that a text was written with, as `two_hop/years founded/seen/2`.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from itertools import chain
from random import Random

from toolformer_dag.synthetic.sentences import (
    ANSWER_MARK,
    EarlierCall,
    Phenomenon,
    around_answer,
    casual,
    sentence,
    with_answer_lead,
)
from toolformer_dag.synthetic.wordings import (
    EntityKind,
    Relation,
    WordingSet,
    WorldPart,
    chain_templates,
    fact_templates,
    relations,
    word_list,
)
from toolformer_dag.synthetic.world import Entity, World

QUESTION_SHARE = 0.45
LEADS_TO: Mapping[str, EntityKind] = {
    "birthplace": "town",
    "home": "town",
    "head_office": "town",
    "source": "town",
    "teacher": "person",
    "mayor": "person",
    "founder": "person",
}
"""Relation whose value is an entity with facts of its own -> the kind of that entity."""
YEARS = ("birth_year", "founded", "opened")
"""The relations whose value is a year."""
YOUNG = 1940  # who was born after it has an age in the years to come
YEARS_TO_COME = (2040, 2099)
"""The embedded model's tokenizer has a token of each year from 1900 to 2039, whose digits the model has not learned."""
QA_TOOL = "question_answering"
"""The tool of the first calls."""
_UNFIT = ("town of {e}", "town {e}", "firm {e}", "{e}'s", "called {e}", "name of {e}", "named {e}", "to {e},")
"""What a template has that reads badly with a description in place of a name."""


def two_hop(random: Random, world: World, part: WorldPart, wordings: WordingSet) -> Phenomenon:
    """Draw a fact about what another fact names, an age in a year, or a sum of two facts; QA is asked first."""
    draw: Callable[[Random, World, WorldPart, WordingSet], Phenomenon]
    draw = random.choices((_second_fact, _years, _two_numbers), (6, 3, 1))[0]
    return draw(random, world, part, wordings)


def _second_fact(random: Random, world: World, part: WorldPart, wordings: WordingSet) -> Phenomenon:
    """Write a text that needs two calls: about an entity that is only described, by a fact about another one.

    "The mayor of the town where Ada Lovelace was born is ..." needs a call that returns the town, and a second one that
    asks for the mayor of that town.
    """
    # 1. Two facts: the value of the first (a town) is the entity of the second (the mayor of that town).
    first_relation = random.choice([_relation(key) for key in LEADS_TO])  # such as birthplace
    entity = random.choice(world.entities(part, first_relation.kind))
    described_kind = LEADS_TO[first_relation.key]  # such as town
    described_name = entity.facts[first_relation.key]
    second_relation = random.choice(relations(described_kind))  # such as mayor
    descriptions = chain_templates("described", wordings)[first_relation.key]
    description = random.choice(descriptions).format(e=entity.name)
    answer = _entity(world, part, described_kind, described_name).facts[second_relation.key]

    is_question = random.random() < QUESTION_SHARE
    # 2. A question or statement of the second fact, with a description ("the town where Ada was born") for a name.
    leads, texts = fact_templates(second_relation, QA_TOOL, wordings).choices(is_question=is_question)
    number = random.choice(_fitting(texts))
    text = texts[number].format(e=description, v=ANSWER_MARK)
    return _phenomenon(
        random,
        lead=random.choice(leads),
        text=sentence(text) if is_question else text,
        is_question=is_question,
        call=EarlierCall(tool=QA_TOOL, input=_question(second_relation, described_name), result=answer),
        earlier=(EarlierCall(tool=QA_TOOL, input=_question(first_relation, entity.name), result=described_name),),
        wording=f"two_hop/{first_relation.key} {second_relation.key}/{wordings}/{number}",
    )


def _fitting(templates: Sequence[str]) -> list[int]:
    """Return the indexes of the templates that read well with a description, "the town where Ada was born", as {e}."""
    indexes = []
    for index, template in enumerate(templates):
        reads_badly = any(words in template for words in _UNFIT)
        if not reads_badly:
            indexes.append(index)
    return indexes


def _years(random: Random, world: World, part: WorldPart, wordings: WordingSet) -> Phenomenon:
    """Write a text about the years between a fact's year and a later one, such as somebody's age in 2050.

    It needs two calls: a question whose answer is the year of the fact, and a calculation with it.
    """
    relation = random.choice([relation for relation in _all_relations() if relation.key in YEARS])
    entities: Sequence[Entity] = world.entities(part, relation.kind)
    if relation.key == "birth_year":
        entities = [person for person in entities if int(person.facts["birth_year"]) > YOUNG]
    entity = random.choice(entities)
    later_year = random.randint(*YEARS_TO_COME)
    year = entity.facts[relation.key]

    is_question = random.random() < QUESTION_SHARE
    templates_of = chain_templates("years", wordings)
    texts = templates_of[_template_key(relation.key, is_question=is_question)]
    number = random.randrange(len(texts))
    return _phenomenon(
        random,
        lead=random.choice(_leads(wordings, is_question=is_question)),
        text=texts[number].format(e=entity.name, y=later_year, v=ANSWER_MARK),  # entity, year, value
        is_question=is_question,
        call=EarlierCall(tool="calculator", input=f"{later_year} - {year}", result=str(later_year - int(year))),
        earlier=(EarlierCall(tool=QA_TOOL, input=_question(relation, entity.name), result=year),),
        wording=f"two_hop/years {relation.key}/{wordings}/{number}",
    )


def _template_key(relation_key: str, *, is_question: bool) -> str:
    """Return the key of a relation's templates in `chain_templates`: `founded_questions` or `founded_statements`."""
    sentences = "questions" if is_question else "statements"
    return f"{relation_key}_{sentences}"


def _two_numbers(random: Random, world: World, part: WorldPart, wordings: WordingSet) -> Phenomenon:
    """Write a text about the years between two facts, or about the sum of two rivers' lengths.

    It needs three calls: two questions, whose answers are numbers, and a calculation with both.
    """
    key = random.choice((*YEARS, "length"))
    relation = _relation(key)
    while True:
        a, b = random.sample(world.entities(part, relation.kind), 2)
        first = _number_of(a, key)
        second = _number_of(b, key)
        if first < second or key == "length":
            break
    if key == "length":
        calculation = f"{first} + {second}"
        result = first + second
    else:
        calculation = f"{second} - {first}"
        result = second - first

    is_question = random.random() < QUESTION_SHARE
    templates_of = chain_templates("two_numbers", wordings)
    texts = templates_of[_template_key(key, is_question=is_question)]
    number = random.randrange(len(texts))
    return _phenomenon(
        random,
        lead=random.choice(_leads(wordings, is_question=is_question)),
        text=texts[number].format(a=a.name, b=b.name, v=ANSWER_MARK),
        is_question=is_question,
        call=EarlierCall(tool="calculator", input=calculation, result=str(result)),
        earlier=(
            EarlierCall(tool=QA_TOOL, input=_question(relation, a.name), result=a.facts[key]),
            EarlierCall(tool=QA_TOOL, input=_question(relation, b.name), result=b.facts[key]),
        ),
        wording=f"two_hop/two_numbers {key}/{wordings}/{number}",
    )


def _phenomenon(
    random: Random,
    *,
    lead: str,
    text: str,
    is_question: bool,
    call: EarlierCall,
    earlier: tuple[EarlierCall, ...],
    wording: str,
) -> Phenomenon:
    """Return a question or statement with the calls that it needs, which stand right before its answer.

    A question has `before` "Who is the mayor of Lund? It is" and `after` " Eva Holm."; a statement has `before` "In
    2050 Ada will be" and `after` " 70 years old."; the calls stand between `before` and `after`.

    - lead: words before the text.
    - text: the question without its answer, or the statement with ANSWER_MARK for its answer.
    - call: the last call, whose result is the answer. earlier: the calls before it, whose results it needs.
    - wording: a name for the templates that were used.
    """
    if is_question:
        typed = casual(random, sentence(text))
        before = with_answer_lead(random, lead + typed)
        after_answer = ""
    else:
        begins_sentence = not lead or lead.rstrip().endswith((".", "!", "?", ":"))
        rest = sentence(text) if begins_sentence else text
        before, after_answer = around_answer(sentence(lead + rest))
    ending = random.choice(word_list("tails", "facts"))
    return Phenomenon(
        tool=call.tool,
        before=before,
        after=f" {call.result}{after_answer}{ending}",
        input=call.input,
        result=call.result,
        answer=call.result,
        wording=wording,
        earlier=earlier,
    )


@cache
def _all_relations() -> tuple[Relation, ...]:
    """Return the relations of all kinds of entities."""
    kinds: Sequence[EntityKind] = ("person", "town", "firm", "river")
    return tuple(chain.from_iterable(relations(kind) for kind in kinds))


def _relation(key: str) -> Relation:
    """Return the relation with this key."""
    return next(relation for relation in _all_relations() if relation.key == key)


def _question(relation: Relation, name: str) -> str:
    """Return the input of QA that asks for a fact about the entity of this name."""
    return f'"{relation.question.format(e=name)}"'


def _number_of(entity: Entity, key: str) -> int:
    """Return the number in a fact: 1820 of `1820`, 120 of `120 miles`."""
    number, *_ = entity.facts[key].split()
    return int(number)


def _leads(wordings: WordingSet, *, is_question: bool) -> Sequence[str]:
    """Return what may stand before a question or statement; it is the same for all relations."""
    leads, _ = fact_templates(_all_relations()[0], QA_TOOL, wordings).choices(is_question=is_question)
    return leads


def _entity(world: World, part: WorldPart, kind: EntityKind, name: str) -> Entity:
    """Return the entity of a part that has this name."""
    return next(entity for entity in world.entities(part, kind) if entity.name == name)
