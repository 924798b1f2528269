"""Write sentences whose answer takes two or three calls: the result of one is in the input of the next."""

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from random import Random

from toolformer_dag.synthetic.sentences import EarlierCall, Phenomenon, casual, led, sentence
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
"""The relations whose value has facts of its own, by its kind."""
YEARS = ("birth_year", "founded", "opened")
YOUNG = 1940  # who was born after it has an age in the years to come
YEARS_TO_COME = (2040, 2099)
"""The embedded model's tokenizer has a token of each year from 1900 to 2039, whose digits the model has not learned."""
ASKED = "question_answering"
_UNFIT = ("town of {e}", "town {e}", "firm {e}", "{e}'s", "called {e}", "name of {e}", "named {e}", "to {e},")
"""What a template has that reads badly with a description in place of a name."""


def two_hop(random: Random, world: World, part: WorldPart, wordings: WordingSet) -> Phenomenon:
    """Draw a fact about what another fact names, an age in a year, or a sum of two facts; QA is asked first."""
    drawing: Callable[[Random, World, WorldPart, WordingSet], Phenomenon]
    drawing = random.choices((_second_fact, _years, _two_numbers), (6, 3, 1))[0]
    return drawing(random, world, part, wordings)


def _second_fact(random: Random, world: World, part: WorldPart, wordings: WordingSet) -> Phenomenon:
    """State or ask a fact about an entity that is described by a fact: the mayor of the town where Ada was born."""
    first = random.choice([one for key in LEADS_TO for one in _all_relations() if one.key == key])
    entity = random.choice(world.entities(part, first.kind))
    kind, name = LEADS_TO[first.key], entity.facts[first.key]
    second = random.choice(relations(kind))
    described = random.choice(chain_templates("described", wordings)[first.key]).format(e=entity.name)
    answer = _entity(world, part, kind, name).facts[second.key]
    earlier = (EarlierCall(ASKED, f'"{first.question.format(e=entity.name)}"', name),)
    is_question = random.random() < QUESTION_SHARE
    templates = fact_templates(second, ASKED, wordings)
    leads, own = templates.choices(is_question=is_question)
    number = random.choice([at for at, text in enumerate(own) if not any(unfit in text for unfit in _UNFIT)])
    stated = own[number].format(e=described, v="\0")
    lead = random.choice(leads)
    return _phenomenon(
        random,
        (lead, sentence(stated) if is_question else stated),
        is_question=is_question,
        call=(ASKED, f'"{second.question.format(e=name)}"', answer),
        earlier=earlier,
        wording=f"two_hop/{first.key} {second.key}/{wordings}/{number}",
    )


def _years(random: Random, world: World, part: WorldPart, wordings: WordingSet) -> Phenomenon:
    """State or ask how many years after a fact's year another year is."""
    relation = random.choice([one for one in _all_relations() if one.key in YEARS])
    known = world.entities(part, relation.kind)
    young = [one for one in known if relation.key != "birth_year" or int(one.facts["birth_year"]) > YOUNG]
    entity, later = random.choice(young), random.randint(*YEARS_TO_COME)
    year = entity.facts[relation.key]
    is_question = random.random() < QUESTION_SHARE
    own = chain_templates("years", wordings)[f"{relation.key}_{'questions' if is_question else 'statements'}"]
    number = random.randrange(len(own))
    return _phenomenon(
        random,
        (random.choice(_leads(is_question, wordings)), own[number].format(e=entity.name, y=later, v="\0")),
        is_question=is_question,
        call=("calculator", f"{later} - {year}", str(later - int(year))),
        earlier=(EarlierCall(ASKED, f'"{relation.question.format(e=entity.name)}"', year),),
        wording=f"two_hop/years {relation.key}/{wordings}/{number}",
    )


def _two_numbers(random: Random, world: World, part: WorldPart, wordings: WordingSet) -> Phenomenon:
    """State or ask how many years lie between two facts, or the sum of two lengths: a chain of three calls."""
    key = random.choice((*YEARS, "length"))
    [relation] = [one for one in _all_relations() if one.key == key]
    while True:
        a, b = random.sample(world.entities(part, relation.kind), 2)
        first, second = (int(one.facts[key].split()[0]) for one in (a, b))
        if first < second or key == "length":
            break
    is_question = random.random() < QUESTION_SHARE
    own = chain_templates("two_numbers", wordings)[f"{key}_{'questions' if is_question else 'statements'}"]
    number = random.randrange(len(own))
    sum_of = (f"{first} + {second}", first + second) if key == "length" else (f"{second} - {first}", second - first)
    asked = [EarlierCall(ASKED, f'"{relation.question.format(e=one.name)}"', one.facts[key]) for one in (a, b)]
    return _phenomenon(
        random,
        (random.choice(_leads(is_question, wordings)), own[number].format(a=a.name, b=b.name, v="\0")),
        is_question=is_question,
        call=("calculator", sum_of[0], str(sum_of[1])),
        earlier=tuple(asked),
        wording=f"two_hop/two_numbers {key}/{wordings}/{number}",
    )


def _phenomenon(
    random: Random,
    lead_and_text: tuple[str, str],
    *,
    is_question: bool,
    call: tuple[str, str, str],
    earlier: tuple[EarlierCall, ...],
    wording: str,
) -> Phenomenon:
    lead, text = lead_and_text
    begins = not lead or lead.rstrip().endswith((".", "!", "?", ":"))
    if is_question:
        before, rest = led(random, lead + casual(random, sentence(text))), ""
    else:
        before, rest = sentence(lead + (sentence(text) if begins else text)).split(" \0")
    _, asked, result = call
    tail = random.choice(word_list("tails", "facts"))
    return Phenomenon(
        tool=call[0],
        before=before,
        after=f" {result}{rest}{tail}",
        input=asked,
        result=result,
        answer=result,
        wording=wording,
        earlier=earlier,
    )


@cache
def _all_relations() -> tuple[Relation, ...]:
    kinds: Sequence[EntityKind] = ("person", "town", "firm", "river")
    return tuple(relation for kind in kinds for relation in relations(kind))


def _leads(is_question: bool, wordings: WordingSet) -> Sequence[str]:
    leads, _ = fact_templates(_all_relations()[0], ASKED, wordings).choices(is_question=is_question)
    return leads


def _entity(world: World, part: WorldPart, kind: EntityKind, name: str) -> Entity:
    return next(one for one in world.entities(part, kind) if one.name == name)
