"""Write sentences whose answer takes two or three calls: the result of a call is in the input of the next.

A wording names the templates of a text, as `two_hop/years founded/seen/2`.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from itertools import chain
from random import Random
from typing import NamedTuple

from toolformer_dag.synthetic.sentences import (
    ANSWER_MARK,
    AroundAnswer,
    CallWithResult,
    Phenomenon,
    make_casual,
    sentence,
    split_at_answer,
    with_answer_lead,
)
from toolformer_dag.synthetic.wordings import (
    EntityKind,
    Relation,
    WordingSet,
    WorldPart,
    get_chain_templates,
    get_fact_templates,
    get_relations,
    get_word_list,
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
"""The relations whose value is an entity with facts of its own, and the kind of that entity."""
YEARS = ("birth_year", "founded", "opened")
"""The relations whose value is a year."""
YOUNG = 1940  # texts tell the age in a year of YEARS_TO_COME only of people who were born later
YEARS_TO_COME = (2040, 2099)
"""Later years, from 2040: years from 1900 to 2039 are single tokens, whose digits the embedded model never learned."""
QA_TOOL = "question_answering"
"""The tool of the first calls."""
_UNFIT = ("town of {e}", "town {e}", "firm {e}", "{e}'s", "called {e}", "name of {e}", "named {e}", "to {e},")
"""Words of templates that read badly with a description in place of a name."""


def two_hop(random: Random, world: World, part: WorldPart, wordings: WordingSet) -> Phenomenon:
    """Write a text about a fact of a described entity, years since a fact, or a calculation with two facts."""
    draw: Callable[[Random, World, WorldPart, WordingSet], Phenomenon]
    [draw] = random.choices((_write_second_fact, _write_years, _write_two_numbers), (6, 3, 1))
    return draw(random, world, part, wordings)


class _Described(NamedTuple):
    """An entity that is described by a fact about another one, such as the town where Ada was born."""

    relation: Relation  # of that fact, such as birthplace; its value is the described entity
    entity: Entity  # the other entity, such as Ada

    @property
    def name(self) -> str:
        """The described entity's name."""
        return self.entity.facts[self.relation.key]

    @property
    def kind(self) -> EntityKind:
        """The described entity's kind."""
        return LEADS_TO[self.relation.key]


def _draw_described(random: Random, world: World, part: WorldPart) -> _Described:
    """Draw an entity that another one's fact describes."""
    relation = random.choice([_get_relation(key) for key in LEADS_TO])
    entity = random.choice(world.entities(part, relation.kind))
    return _Described(relation, entity)


class _DescribedText(NamedTuple):
    """A question or statement about an entity that is only described."""

    lead: str  # words before the text
    text: str  # a question without its answer, or a statement with ANSWER_MARK for its answer
    is_question: bool
    number: int  # of its template


def _write_second_fact(random: Random, world: World, part: WorldPart, wordings: WordingSet) -> Phenomenon:
    """Write a question or statement of a fact about an entity that is only described.

    "The mayor of the town where Ada was born is ..." needs a call that returns the town, then one for its mayor.
    """
    described = _draw_described(random, world, part)  # the town, by Ada and the relation birthplace
    asked_relation = random.choice(get_relations(described.kind))  # mayor
    written = _write_described_text(random, described, asked_relation, wordings)
    described_entity = _get_entity(world, part, described.kind, described.name)  # the town with its facts
    first_call = _build_fact_call(described.relation, described.entity)  # where Ada was born
    second_call = _build_fact_call(asked_relation, described_entity)  # who is the mayor there
    return _build_phenomenon(
        random,
        lead=written.lead,
        text=written.text,
        is_question=written.is_question,
        calls=(first_call, second_call),
        wording=f"two_hop/{described.relation.key} {asked_relation.key}/{wordings}/{written.number}",
    )


def _write_described_text(
    random: Random, described: _Described, relation: Relation, wordings: WordingSet
) -> _DescribedText:
    """Write a question or statement about the value of a relation of a described entity."""
    description = _write_description(random, described, wordings)
    is_question = random.random() < QUESTION_SHARE
    leads, texts = get_fact_templates(relation, QA_TOOL, wordings).choices(is_question=is_question)
    number = random.choice(_list_fitting_indexes(texts))
    lead = random.choice(leads)
    text = texts[number].format(e=description, v=ANSWER_MARK)
    return _DescribedText(lead, text, is_question, number)


def _write_description(random: Random, described: _Described, wordings: WordingSet) -> str:
    """Return a description such as "the town where Ada was born"."""
    templates = get_chain_templates("described", wordings)[described.relation.key]
    return random.choice(templates).format(e=described.entity.name)


def _list_fitting_indexes(templates: Sequence[str]) -> list[int]:
    """Return the indexes of the templates that read well with a description such as "the town where Ada was born"."""
    indexes = []
    for index, template in enumerate(templates):
        reads_badly = any(words in template for words in _UNFIT)
        if not reads_badly:
            indexes.append(index)
    return indexes


def _write_years(random: Random, world: World, part: WorldPart, wordings: WordingSet) -> Phenomenon:
    """Write a text about the years between a fact's year and a later one, such as somebody's age in 2050.

    It needs a question whose answer is the year of the fact, then a calculation: "How old will Ada be in 2050?" takes
    "When was Ada born?" and 2050 - 1961.
    """
    relation = random.choice([relation for relation in _list_relations() if relation.key in YEARS])
    entity = random.choice(_select_entities_with_year(world, part, relation))
    later_year = random.randint(*YEARS_TO_COME)
    year = _parse_number(entity, relation.key)
    question = _build_fact_call(relation, entity)
    calculation = _build_calculator_call(f"{later_year} - {year}", later_year - year)
    return _write_calculated(
        random,
        templates="years",
        key=relation.key,
        wordings=wordings,
        slots={"e": entity.name, "y": later_year},
        calls=(question, calculation),
    )


def _select_entities_with_year(world: World, part: WorldPart, relation: Relation) -> Sequence[Entity]:
    """Return the entities of the relation's kind; of people only those who may live in YEARS_TO_COME."""
    entities = world.entities(part, relation.kind)
    if relation.key == "birth_year":
        return [person for person in entities if int(person.facts["birth_year"]) > YOUNG]
    return entities


def _write_two_numbers(random: Random, world: World, part: WorldPart, wordings: WordingSet) -> Phenomenon:
    """Write a text about the years between two facts, or about the sum of two rivers' lengths.

    It needs two questions, whose answers are numbers, then a calculation with both.
    """
    relation_key = random.choice((*YEARS, "length"))
    relation = _get_relation(relation_key)
    entities = _draw_two_entities(random, world.entities(part, relation.kind), relation_key)
    first, second = entities
    questions = [_build_fact_call(relation, entity) for entity in entities]
    calculation = _build_sum_or_difference(
        relation_key, _parse_number(first, relation_key), _parse_number(second, relation_key)
    )
    return _write_calculated(
        random,
        templates="two_numbers",
        key=relation_key,
        wordings=wordings,
        slots={"a": first.name, "b": second.name},
        calls=(*questions, calculation),
    )


def _build_sum_or_difference(key: str, first: int, second: int) -> CallWithResult:
    """Return the call that adds two lengths, or subtracts the first year from the second."""
    if key == "length":
        return _build_calculator_call(f"{first} + {second}", first + second)
    return _build_calculator_call(f"{second} - {first}", second - first)


def _draw_two_entities(random: Random, entities: Sequence[Entity], key: str) -> list[Entity]:
    """Draw two entities by the key of a number; unless it is a length, the number of the first is the smaller."""
    while True:
        a, b = random.sample(entities, 2)
        if key == "length" or _parse_number(a, key) < _parse_number(b, key):
            return [a, b]


def _write_calculated(
    random: Random,
    *,
    templates: str,
    key: str,
    wordings: WordingSet,
    slots: Mapping[str, object],
    calls: Sequence[CallWithResult],
) -> Phenomenon:
    """Write a question or statement about a calculation by a random template, with its calls before the answer.

    As an example, by the template "in the year {y}, {e} will be {v} years old", in which {v} is the answer.

    - `templates`: the name of the templates, such as "years"
    - `key`: the key of their relation, such as "founded"
    - `slots`: values for the placeholders of the templates but the answer's
    - `calls`: the calls in their order, the calculator last
    """
    is_question = random.random() < QUESTION_SHARE
    sentences = "questions" if is_question else "statements"
    texts = get_chain_templates(templates, wordings)[f"{key}_{sentences}"]
    number = random.randrange(len(texts))
    lead = random.choice(_list_leads(wordings, is_question=is_question))
    return _build_phenomenon(
        random,
        lead=lead,
        text=texts[number].format(**slots, v=ANSWER_MARK),
        is_question=is_question,
        calls=calls,
        wording=f"two_hop/{templates} {key}/{wordings}/{number}",
    )


def _build_phenomenon(
    random: Random, *, lead: str, text: str, is_question: bool, calls: Sequence[CallWithResult], wording: str
) -> Phenomenon:
    """Return a question or statement with its calls right before its answer.

    As an example, "As far as we know, in the year 2050, Ada will be" before the calls, and " 89 years old, they say."
    behind them.

    - `lead`: words before the text
    - `text`: the question without its answer, or the statement with ANSWER_MARK for its answer
    - `calls`: the calls in their order; the result of the last one is the answer
    """
    parts = _write_led_question(random, lead, text) if is_question else _write_led_statement(lead, text)
    ending = random.choice(get_word_list("tails", "facts"))
    *earlier_calls, last_call = calls
    return Phenomenon(
        tool=last_call.tool,
        before=parts.before,
        after=f" {last_call.result}{parts.after}{ending}",
        input=last_call.input,
        result=last_call.result,
        answer=last_call.result,
        wording=wording,
        earlier=tuple(earlier_calls),
    )


def _write_led_question(random: Random, lead: str, question: str) -> AroundAnswer:
    """Return a question after its lead, as somebody types it: "Who is the mayor of Lund? It is"."""
    typed = make_casual(random, sentence(question))
    return AroundAnswer(before=with_answer_lead(random, lead + typed), after="")


def _write_led_statement(lead: str, statement: str) -> AroundAnswer:
    """Return a statement after its lead, split at its answer: "In 2050 Ada will be" and " years old"."""
    begins_sentence = not lead or lead.rstrip().endswith((".", "!", "?", ":"))
    rest = sentence(statement) if begins_sentence else statement
    return split_at_answer(sentence(lead + rest))


@cache
def _list_relations() -> tuple[Relation, ...]:
    """Return the relations of all kinds of entities."""
    kinds: Sequence[EntityKind] = ("person", "town", "firm", "river")
    return tuple(chain.from_iterable(get_relations(kind) for kind in kinds))


def _get_relation(key: str) -> Relation:
    """Return the relation with this key."""
    return next(relation for relation in _list_relations() if relation.key == key)


def _build_fact_call(relation: Relation, entity: Entity) -> CallWithResult:
    """Return the call of question answering that asks for a fact of an entity."""
    question = relation.question.format(e=entity.name)
    return CallWithResult(QA_TOOL, input=f'"{question}"', result=entity.facts[relation.key])


def _build_calculator_call(expression: str, result: int) -> CallWithResult:
    """Return a call of the calculator."""
    return CallWithResult("calculator", input=expression, result=str(result))


def _parse_number(entity: Entity, key: str) -> int:
    """Return the number in a fact: 1820 for `1820`, 120 for `120 miles`."""
    number, *_ = entity.facts[key].split()
    return int(number)


def _list_leads(wordings: WordingSet, *, is_question: bool) -> Sequence[str]:
    """Return the words that may stand before a question or statement."""
    any_relation = _list_relations()[0]  # leads are the same for all
    leads, _ = get_fact_templates(any_relation, QA_TOOL, wordings).choices(is_question=is_question)
    return leads


def _get_entity(world: World, part: WorldPart, kind: EntityKind, name: str) -> Entity:
    """Return the entity of this name in a part of the world."""
    return next(entity for entity in world.entities(part, kind) if entity.name == name)
