"""Draw phenomena of the synthetic world for each tool, and the questions that evaluation asks about them."""

from random import Random
from typing import NamedTuple

from toolformer_dag.settings.settings_file import PAPER_TOOLS
from toolformer_dag.synthetic.calculations import calculation
from toolformer_dag.synthetic.lexicon import translated
from toolformer_dag.synthetic.named_tools import distance, price
from toolformer_dag.synthetic.sentences import (
    ANSWER_MARK,
    CallWithResult,
    Phenomenon,
    fill_template,
    make_casual,
    split_at_answer,
    with_answer_lead,
)
from toolformer_dag.synthetic.today import today
from toolformer_dag.synthetic.two_hop import two_hop
from toolformer_dag.synthetic.wordings import (
    KINDS,
    Relation,
    Templates,
    WordingSet,
    WorldPart,
    get_fact_templates,
    get_relations,
    get_word_list,
)
from toolformer_dag.synthetic.world import Entity, World, get_world, write_passages_by_relation

QUESTION_SHARE = 0.45
KIND_WEIGHTS = (5, 3, 2, 1)  # in the order of KINDS
PRETRAINING_WEIGHTS = (4, 3, 2, 2)  # rivers have three facts too: what is asked rarely must be learnt all the same


def fact(random: Random, world: World, tool: str, part: WorldPart, wordings: WordingSet) -> Phenomenon:
    """Write a sentence that states a fact of a part of the world, or a question that asks for it, with a call.

    As an example, "Ada was born in" before the call with the input "Where was Ada born?", and " Lund, they say." behind
    it.

    `tool`: "question_answering", which returns the fact, or "wiki_search", which returns a passage with the fact.
    """
    entity = _draw_entity(random, world, part)
    relation = random.choice(get_relations(entity.kind))
    templates = get_fact_templates(relation, tool, wordings)
    text = _write_fact_text(random, entity, relation, templates)
    answer = entity.facts[relation.key]
    if tool == "question_answering":
        call = CallWithResult(tool, input=text.question, result=answer)
    else:
        call = _build_search_call(entity, relation, world.seed)
    wording = f"{tool}/{entity.kind}/{relation.key}/{wordings}/{text.wording}"
    return Phenomenon(
        tool=tool,
        before=text.before,
        after=f" {answer}{text.after_answer}",
        input=f'"{call.input}"',
        result=call.result,
        answer=answer,
        wording=wording,
    )


def _draw_entity(random: Random, world: World, part: WorldPart) -> Entity:
    """Draw a kind of entity, and an entity of that kind from a part of the world."""
    weights = PRETRAINING_WEIGHTS if part == "pretraining" else KIND_WEIGHTS
    [kind] = random.choices(KINDS, weights)
    return random.choice(world.entities(part, kind))


def _build_search_call(entity: Entity, relation: Relation, seed: int) -> CallWithResult:
    """Return the search for a fact of an entity, and the passage that it returns. `seed`: of the world."""
    passage = write_passages_by_relation(entity, seed)[relation.key]
    return CallWithResult("wiki_search", input=f"{entity.name} {relation.keyword}", result=passage.snippet)


class _FactText(NamedTuple):
    """A text about a fact."""

    before: str  # the text before its answer
    after_answer: str
    question: str  # which asks for the fact
    wording: str  # names the templates of the text, see `Worded.wording`


def _write_fact_text(random: Random, entity: Entity, relation: Relation, templates: Templates) -> _FactText:
    """Write a question about an entity's fact, or a statement of it, by a random template."""
    if random.random() < QUESTION_SHARE:
        return _write_fact_question(random, entity, templates)
    slots = {"e": entity.name, "v": ANSWER_MARK}  # the mark shows where to split the statement
    statement = fill_template(random, templates, slots, is_question=False)
    ending = random.choice(get_word_list("tails", "facts"))
    around = split_at_answer(statement.text)
    return _FactText(
        before=around.before,
        after_answer=around.after + ending,
        question=relation.question.format(e=entity.name),
        wording=statement.wording,
    )


def _write_fact_question(random: Random, entity: Entity, templates: Templates) -> _FactText:
    """Write a question about an entity's fact, as somebody types it, after a random lead.

    As an example, "Quiz night again! Where was Ada born? It is": a lead, the question, words that lead to the answer.
    """
    leads, questions = templates.choices(is_question=True)
    question_number = random.randrange(len(questions))
    lead_number = random.randrange(len(leads))
    question = make_casual(random, questions[question_number].format(e=entity.name))
    ending = random.choice(get_word_list("tails", "facts"))
    lead = leads[lead_number]
    before = with_answer_lead(random, f"{lead}{question}")
    wording = f"q{question_number}.{lead_number}"
    return _FactText(before=before, after_answer=ending, question=question, wording=wording)


TOOLS = PAPER_TOOLS
TWO_HOP = "two_hop"
"""Phenomena of question answering that need its result in another call."""
NAMED_TOOLS = ("distance", "price")
"""Tools with named arguments, which stand in the training of the embedded model and on no page."""


def phenomenon(random: Random, world: World, tool: str, part: WorldPart, wordings: WordingSet) -> Phenomenon:
    """Write a random text with a place where a call to `tool` helps: of TOOLS, NAMED_TOOLS, or TWO_HOP.

    - `part`: of the world; each entity, number and word belongs to one part alone
    - `wordings`: "seen" in training, or "unseen"
    """
    match tool:
        case "calculator":
            return calculation(random, part, wordings)
        case "calendar":
            return today(random, part, wordings)
        case "machine_translation":
            return translated(random, part, wordings)
        case "distance":
            return distance(random, world, part, wordings)
        case "price":
            return price(random, world, part, wordings)
        case "two_hop":
            return two_hop(random, world, part, wordings)
        case _:
            return fact(random, world, tool, part, wordings)


def questions(seed: int, tool: str, n: int, wordings: WordingSet) -> list[Phenomenon]:
    """Return `n` different questions and unfinished statements that a call to a tool answers, the same for each seed.

    A model continues the text `before`; it is right if `answer` is among its first words. All are from the world's part
    "evaluation", which no training text uses.
    """
    random = Random(f"questions {seed} {tool} {wordings}")
    distinct: dict[tuple[object, ...], Phenomenon] = {}
    while len(distinct) < n:  # never ends if the part has fewer than n different ones
        question = phenomenon(random, get_world(), tool, part="evaluation", wordings=wordings)
        key = (question.before, question.answer, question.date, question.wording)
        distinct[key] = question
    return list(distinct.values())
