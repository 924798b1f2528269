"""Write sentences whose answer takes two or three calls: the result of a call is in the input of the next.

The name of a wording tells which templates a text is written from, such as `two_hop/years founded/seen/2`.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from itertools import chain
from random import Random
from typing import NamedTuple

from toolformer_dag.synthetic.sentences import (
    ANSWER_MARK,
    CallWithResult,
    Phenomenon,
    TextAroundAnswer,
    append_answer_lead,
    capitalize_first_letter,
    make_question_casual,
    split_at_answer,
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
ENTITY_KIND_BY_RELATION: Mapping[str, EntityKind] = {
    "birthplace": "town",
    "home": "town",
    "head_office": "town",
    "source": "town",
    "teacher": "person",
    "mayor": "person",
    "founder": "person",
}
"""The relations whose value is an entity with facts of its own, and the kind of that entity."""
YEAR_RELATIONS = ("birth_year", "founded", "opened")
"""The relations whose value is a year."""
BORN_AFTER_YEAR = 1940
"""Texts tell somebody's age in a year of LATER_YEAR_RANGE only if the person was born after this year."""
LATER_YEAR_RANGE = (2040, 2099)
"""Later years, from 2040: years from 1900 to 2039 are single tokens, whose digits the embedded model never learned."""
QA_TOOL = "question_answering"
"""The tool of the first calls."""
_UNFIT_TEMPLATE_WORDS = (
    "town of {e}",
    "town {e}",
    "firm {e}",
    "{e}'s",
    "called {e}",
    "name of {e}",
    "named {e}",
    "to {e},",
)
"""Words of templates that read badly with a description in place of a name."""


def write_two_hop_phenomenon(random: Random, world: World, part: WorldPart, wording_set: WordingSet) -> Phenomenon:
    """Write a text whose answer takes two or three calls.

    It is about a fact of an entity that is only described, about the years since a fact, or about a calculation
    with two facts.
    """
    write_kind: Callable[[Random, World, WorldPart, WordingSet], Phenomenon]
    [write_kind] = random.choices(
        (_write_second_fact_phenomenon, _write_years_phenomenon, _write_two_numbers_phenomenon), (6, 3, 1)
    )
    return write_kind(random, world, part, wording_set)


class _DescribedEntity(NamedTuple):
    """An entity that a text does not name, but describes by a fact about another entity.

    The town where Ada was born is described by Ada and the relation "birthplace".

    Attributes:
        describing_relation: The relation of that fact, such as birthplace. Its value is the described entity.
        describing_entity: The entity that the fact is about, such as Ada.
    """

    describing_relation: Relation
    describing_entity: Entity

    @property
    def name(self) -> str:
        """The name of the described entity, which the text does not tell."""
        return self.describing_entity.fact_by_relation[self.describing_relation.key]

    @property
    def kind(self) -> EntityKind:
        """The kind of the described entity, such as "town"."""
        return ENTITY_KIND_BY_RELATION[self.describing_relation.key]


def _draw_described_entity(random: Random, world: World, part: WorldPart) -> _DescribedEntity:
    """Draw an entity that is described by a fact about another one: first the relation, then the other entity."""
    relation = random.choice([_get_relation(key) for key in ENTITY_KIND_BY_RELATION])
    entity = random.choice(world.get_entities(part, relation.kind))
    return _DescribedEntity(relation, entity)


class _DescribedText(NamedTuple):
    """A question or statement about an entity that is only described.

    Attributes:
        lead: The words before the text. They may be empty.
        text: A question without its answer, or a statement with ANSWER_MARK in place of its answer.
        is_question: Whether it is a question.
        template_index: The index of its template.
    """

    lead: str
    text: str
    is_question: bool
    template_index: int


def _write_second_fact_phenomenon(random: Random, world: World, part: WorldPart, wording_set: WordingSet) -> Phenomenon:
    """Write a question or statement about a fact of an entity that is only described.

    Example:
        "The mayor of the town where Ada was born is" needs two calls: "Where was Ada born?" returns the town,
        and the second call asks for the mayor of that town.
    """
    # The example in terms of the names below: the town is described by Ada and the relation birthplace,
    # and the asked relation is mayor.
    described = _draw_described_entity(random, world, part)
    asked_relation = random.choice(get_relations(described.kind))
    written = _write_described_text(random, described, asked_relation, wording_set)

    described_entity = _get_entity(world, part, described.kind, described.name)
    first_call = _build_fact_call(described.describing_relation, described.describing_entity)
    second_call = _build_fact_call(asked_relation, described_entity)

    relation_keys = f"{described.describing_relation.key} {asked_relation.key}"
    return _build_phenomenon(
        random,
        lead=written.lead,
        text=written.text,
        is_question=written.is_question,
        calls=(first_call, second_call),
        wording_name=f"two_hop/{relation_keys}/{wording_set}/{written.template_index}",
    )


def _write_described_text(
    random: Random, described_entity: _DescribedEntity, asked_relation: Relation, wording_set: WordingSet
) -> _DescribedText:
    """Write a question or statement about a fact of a described entity, by a random template.

    Args:
        random: The source of the draws.
        described_entity: The entity that the text describes, such as the town where Ada was born.
        asked_relation: The relation of the fact that the text asks for or states, such as mayor.
        wording_set: "seen" or "unseen" templates.
    """
    description = _write_entity_description(random, described_entity, wording_set)
    is_question = random.random() < QUESTION_SHARE

    templates = get_fact_templates(asked_relation, QA_TOOL, wording_set)
    leads, sentences = templates.get_leads_and_sentences(is_question=is_question)
    template_index = random.choice(_list_fitting_template_indexes(sentences))
    lead = random.choice(leads)

    text = sentences[template_index].format(e=description, v=ANSWER_MARK)
    return _DescribedText(lead, text, is_question, template_index)


def _write_entity_description(random: Random, described_entity: _DescribedEntity, wording_set: WordingSet) -> str:
    """Write a description in place of a name, such as "the town where Ada was born"."""
    templates_by_relation = get_chain_templates("described", wording_set)
    templates = templates_by_relation[described_entity.describing_relation.key]
    return random.choice(templates).format(e=described_entity.describing_entity.name)


def _list_fitting_template_indexes(templates: Sequence[str]) -> list[int]:
    """Return the indexes of the templates that read well with a description such as "the town where Ada was born"."""
    indexes = []
    for index, template in enumerate(templates):
        reads_badly = any(words in template for words in _UNFIT_TEMPLATE_WORDS)
        if not reads_badly:
            indexes.append(index)
    return indexes


def _write_years_phenomenon(random: Random, world: World, part: WorldPart, wording_set: WordingSet) -> Phenomenon:
    """Write a text about the years between a fact's year and a later one, such as somebody's age in 2050.

    It needs two calls: a question that returns the year of the fact, and a calculation.

    Example:
        "How old will Ada be in 2050?" takes the question "When was Ada born?" and the calculation "2050 - 1961".
    """
    year_relations = [relation for relation in _list_relations() if relation.key in YEAR_RELATIONS]
    relation = random.choice(year_relations)
    entity = random.choice(_select_entities_with_year(world, part, relation))
    later_year = random.randint(*LATER_YEAR_RANGE)

    year = _parse_fact_number(entity, relation.key)
    question_call = _build_fact_call(relation, entity)
    calculator_call = _build_calculator_call(f"{later_year} - {year}", later_year - year)

    return _write_calculated_phenomenon(
        random,
        template_table="years",
        relation_key=relation.key,
        wording_set=wording_set,
        value_by_slot={"e": entity.name, "y": later_year},
        calls=(question_call, calculator_call),
    )


def _select_entities_with_year(world: World, part: WorldPart, relation: Relation) -> Sequence[Entity]:
    """Return the entities of a part of the world that a text may relate to a later year.

    These are all entities of the relation's kind. For birth years, they are only the people born after
    BORN_AFTER_YEAR, who may still live in that later year.
    """
    entities = world.get_entities(part, relation.kind)
    if relation.key == "birth_year":
        return [person for person in entities if int(person.fact_by_relation["birth_year"]) > BORN_AFTER_YEAR]
    return entities


def _write_two_numbers_phenomenon(random: Random, world: World, part: WorldPart, wording_set: WordingSet) -> Phenomenon:
    """Write a text about the years between two facts, or about the sum of two rivers' lengths.

    It needs three calls: two questions, whose answers are numbers, and a calculation with both numbers.
    """
    relation_key = random.choice((*YEAR_RELATIONS, "length"))
    relation = _get_relation(relation_key)
    first_entity, second_entity = _draw_two_entities(random, world.get_entities(part, relation.kind), relation_key)

    calculator_call = _build_sum_or_difference_call(
        relation_key,
        first_number=_parse_fact_number(first_entity, relation_key),
        second_number=_parse_fact_number(second_entity, relation_key),
    )
    calls = (
        _build_fact_call(relation, first_entity),
        _build_fact_call(relation, second_entity),
        calculator_call,
    )

    return _write_calculated_phenomenon(
        random,
        template_table="two_numbers",
        relation_key=relation_key,
        wording_set=wording_set,
        value_by_slot={"a": first_entity.name, "b": second_entity.name},
        calls=calls,
    )


def _build_sum_or_difference_call(relation_key: str, first_number: int, second_number: int) -> CallWithResult:
    """Return the calculator call that adds two lengths, or subtracts the first year from the second."""
    if relation_key == "length":
        return _build_calculator_call(f"{first_number} + {second_number}", first_number + second_number)
    return _build_calculator_call(f"{second_number} - {first_number}", second_number - first_number)


def _draw_two_entities(random: Random, entities: Sequence[Entity], relation_key: str) -> tuple[Entity, Entity]:
    """Draw two different entities to calculate with a number of each.

    Args:
        random: The source of the draws.
        entities: The entities to draw from.
        relation_key: The relation whose value is the number, such as "founded" or "length".

    Returns:
        The two entities. For years, the first one has the earlier year. Lengths have no order.
    """
    while True:
        first_entity, second_entity = random.sample(entities, 2)
        if relation_key == "length":
            return first_entity, second_entity

        first_year = _parse_fact_number(first_entity, relation_key)
        second_year = _parse_fact_number(second_entity, relation_key)
        if first_year < second_year:
            return first_entity, second_entity


def _write_calculated_phenomenon(
    random: Random,
    *,
    template_table: str,
    relation_key: str,
    wording_set: WordingSet,
    value_by_slot: Mapping[str, object],
    calls: Sequence[CallWithResult],
) -> Phenomenon:
    """Write a question or statement about a calculation by a random template, with its calls before the answer.

    Args:
        random: The source of the draws.
        template_table: The name of the group of templates, "years" or "two_numbers".
        relation_key: The relation that the templates are about, such as "founded".
        wording_set: "seen" or "unseen" templates.
        value_by_slot: The values of the templates' slots, except for the answer's slot `{v}`.
        calls: The calls in their order. The last one is the calculator's, and its result is the answer.

    Example:
        The template "in the year {y}, {e} will be {v} years old" with {"y": 2050, "e": "Ada"} gives
        "In the year 2050, Ada will be" before the calls.
    """
    is_question = random.random() < QUESTION_SHARE
    sentence_kind = "questions" if is_question else "statements"
    templates = get_chain_templates(template_table, wording_set)[f"{relation_key}_{sentence_kind}"]
    template_index = random.randrange(len(templates))
    lead = random.choice(_list_leads(wording_set, is_question=is_question))

    return _build_phenomenon(
        random,
        lead=lead,
        text=templates[template_index].format(**value_by_slot, v=ANSWER_MARK),
        is_question=is_question,
        calls=calls,
        wording_name=f"two_hop/{template_table} {relation_key}/{wording_set}/{template_index}",
    )


def _build_phenomenon(
    random: Random, *, lead: str, text: str, is_question: bool, calls: Sequence[CallWithResult], wording_name: str
) -> Phenomenon:
    """Return a question or statement with its calls right before its answer.

    Args:
        random: The source of the draws.
        lead: The words before the text, such as "As far as we know, ".
        text: A question without its answer, or a statement with ANSWER_MARK in place of its answer.
        is_question: Whether the text is a question.
        calls: The calls in their order. The result of the last one is the answer.
        wording_name: Names the templates of the text.

    Example:
        "As far as we know, in the year 2050, Ada will be" comes before the calls, and
        " 89 years old, they say." after them.
    """
    if is_question:
        around_answer = _write_question_with_lead(random, lead, text)
    else:
        around_answer = _split_statement_with_lead(lead, text)
    ending = random.choice(get_word_list("tails", "facts"))

    *earlier_calls, last_call = calls
    answer = last_call.result
    return Phenomenon(
        tool=last_call.tool,
        text_before_call=around_answer.before_answer,
        text_after_call=f" {answer}{around_answer.after_answer}{ending}",
        input=last_call.input,
        result=answer,
        answer=answer,
        wording_name=wording_name,
        earlier_calls=tuple(earlier_calls),
    )


def _write_question_with_lead(random: Random, lead: str, question: str) -> TextAroundAnswer:
    """Return a question after its lead, as somebody might type it, such as "Who is the mayor of Lund? It is".

    The text after its answer is empty.
    """
    typed_question = make_question_casual(random, capitalize_first_letter(question))
    return TextAroundAnswer(before_answer=append_answer_lead(random, lead + typed_question), after_answer="")


def _split_statement_with_lead(lead: str, statement: str) -> TextAroundAnswer:
    """Join a lead and a statement, and split them at the answer.

    The statement gets a capital if the lead is empty or a whole sentence, or ends in a colon.

    Args:
        lead: The words before the statement.
        statement: The statement, with ANSWER_MARK in place of its answer.

    Example:
        The lead "As far as we know, " and the statement "in 2050, Ada will be" ANSWER_MARK " years old" give
        "As far as we know, in 2050, Ada will be" and " years old".
    """
    begins_sentence = not lead or lead.rstrip().endswith((".", "!", "?", ":"))
    if begins_sentence:
        statement = capitalize_first_letter(statement)
    return split_at_answer(capitalize_first_letter(lead + statement))


@cache
def _list_relations() -> tuple[Relation, ...]:
    """Return the relations of all four kinds of entities."""
    kinds: Sequence[EntityKind] = ("person", "town", "firm", "river")
    return tuple(chain.from_iterable(get_relations(kind) for kind in kinds))


def _get_relation(relation_key: str) -> Relation:
    """Return the first relation with a key such as "birthplace". Raises StopIteration if there is none."""
    return next(relation for relation in _list_relations() if relation.key == relation_key)


def _build_fact_call(relation: Relation, entity: Entity) -> CallWithResult:
    """Return the call of question answering that asks for a fact of an entity, such as Ada's birthplace."""
    question = relation.question.format(e=entity.name)
    return CallWithResult(QA_TOOL, input=f'"{question}"', result=entity.fact_by_relation[relation.key])


def _build_calculator_call(expression: str, result: int) -> CallWithResult:
    """Return the call of the calculator with an expression, such as "2050 - 1961", and its result."""
    return CallWithResult("calculator", input=expression, result=str(result))


def _parse_fact_number(entity: Entity, relation_key: str) -> int:
    """Return the number at the beginning of a fact: 1820 for "1820", and 120 for "120 miles"."""
    first_word = entity.fact_by_relation[relation_key].split()[0]
    return int(first_word)


def _list_leads(wording_set: WordingSet, *, is_question: bool) -> Sequence[str]:
    """Return the words that may stand before a question, or before a statement."""
    # The leads are the same for all relations, so take those of any.
    any_relation = _list_relations()[0]
    templates = get_fact_templates(any_relation, QA_TOOL, wording_set)
    leads, _sentences = templates.get_leads_and_sentences(is_question=is_question)
    return leads


def _get_entity(world: World, part: WorldPart, kind: EntityKind, entity_name: str) -> Entity:
    """Return the entity of this name in a part of the world. Raises StopIteration if there is none."""
    return next(entity for entity in world.get_entities(part, kind) if entity.name == entity_name)
