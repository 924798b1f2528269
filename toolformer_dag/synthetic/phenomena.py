"""Draw phenomena of the synthetic world for each tool, and the questions that evaluation asks about them."""

from random import Random
from typing import NamedTuple

from toolformer_dag.settings.settings_file import PAPER_TOOLS
from toolformer_dag.synthetic.calculations import write_calculator_phenomenon
from toolformer_dag.synthetic.lexicon import write_translation_phenomenon
from toolformer_dag.synthetic.named_tools import write_distance_phenomenon, write_price_phenomenon
from toolformer_dag.synthetic.sentences import (
    ANSWER_MARK,
    CallWithResult,
    Phenomenon,
    append_answer_lead,
    fill_random_template,
    make_question_casual,
    split_at_answer,
)
from toolformer_dag.synthetic.today import write_calendar_phenomenon
from toolformer_dag.synthetic.two_hop import write_two_hop_phenomenon
from toolformer_dag.synthetic.wordings import (
    ENTITY_KINDS,
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
ENTITY_KIND_WEIGHTS = (5, 3, 2, 1)  # in the order of ENTITY_KINDS
# Rivers have three facts too: what is rarely asked must be learned all the same.
PRETRAINING_KIND_WEIGHTS = (4, 3, 2, 2)


def write_fact_phenomenon(
    random: Random, world: World, tool_key: str, part: WorldPart, wording_set: WordingSet
) -> Phenomenon:
    """Write a sentence that states a fact, or a question that asks for it, with a call of a tool that finds it.

    Args:
        random: The source of the draws.
        world: The synthetic world.
        tool_key: "question_answering", which returns the fact, or "wiki_search", which returns a passage with it.
        part: The part of the world that the fact comes from.
        wording_set: "seen" or "unseen" templates.

    Example:
        The text "Ada was born in", a call with the input "Where was Ada born?", and the text " Lund, they say.".
    """
    entity = _draw_entity(random, world, part)
    relation = random.choice(get_relations(entity.kind))
    templates = get_fact_templates(relation, tool_key, wording_set)
    text = _write_fact_text(random, entity, relation, templates)

    answer = entity.fact_by_relation[relation.key]
    if tool_key == "question_answering":
        call = CallWithResult(tool_key, input=text.question, result=answer)
    else:
        call = _build_search_call(entity, relation, world.seed)

    return Phenomenon(
        tool=tool_key,
        text_before_call=text.before_answer,
        text_after_call=f" {answer}{text.after_answer}",
        input=f'"{call.input}"',
        result=call.result,
        answer=answer,
        wording_name=f"{tool_key}/{entity.kind}/{relation.key}/{wording_set}/{text.wording_name}",
    )


def _draw_entity(random: Random, world: World, part: WorldPart) -> Entity:
    """Draw a kind of entity, and then an entity of that kind from a part of the world."""
    weights = PRETRAINING_KIND_WEIGHTS if part == "pretraining" else ENTITY_KIND_WEIGHTS
    [kind] = random.choices(ENTITY_KINDS, weights)
    return random.choice(world.get_entities(part, kind))


def _build_search_call(entity: Entity, relation: Relation, world_seed: int) -> CallWithResult:
    """Return the search for a fact of an entity, with the passage that the search returns.

    Args:
        entity: The entity, such as Ada.
        relation: The relation of the fact, such as birthplace.
        world_seed: The seed of the world, which the wording of the passage depends on.
    """
    passage = write_passages_by_relation(entity, world_seed)[relation.key]
    return CallWithResult("wiki_search", input=f"{entity.name} {relation.keyword}", result=passage.snippet)


class _FactText(NamedTuple):
    """A text that states a fact or asks for it.

    Attributes:
        before_answer: The text before its answer.
        after_answer: The text after its answer.
        question: A question that asks for the fact, such as "Where was Ada born?".
        wording_name: Names the templates of the text (see `WordedText.wording_name`).
    """

    before_answer: str
    after_answer: str
    question: str
    wording_name: str


def _write_fact_text(random: Random, entity: Entity, relation: Relation, templates: Templates) -> _FactText:
    """Write a question about a fact of an entity, or a statement of the fact, by a random template.

    Args:
        random: The source of the draws.
        entity: The entity, such as Ada.
        relation: The relation of the fact, such as birthplace.
        templates: The templates of the relation.

    Example:
        The statement "Ada was born in Lund, they say." gives "Ada was born in" before the answer and
        ", they say." after it.
    """
    is_question = random.random() < QUESTION_SHARE
    if is_question:
        return _write_fact_question(random, entity, templates)

    # The mark shows where to split the statement.
    value_by_slot = {"e": entity.name, "v": ANSWER_MARK}
    statement = fill_random_template(random, templates, value_by_slot, is_question=False)
    ending = random.choice(get_word_list("tails", "facts"))
    around_answer = split_at_answer(statement.text)
    return _FactText(
        before_answer=around_answer.before_answer,
        after_answer=around_answer.after_answer + ending,
        question=relation.question.format(e=entity.name),
        wording_name=statement.wording_name,
    )


def _write_fact_question(random: Random, entity: Entity, templates: Templates) -> _FactText:
    """Write a question about a fact of an entity, as somebody might type it, after a random lead.

    Example:
        "Quiz night again! Where was Ada born? It is" before the answer: a lead, the question, and words that
        lead to the answer.
    """
    leads, questions = templates.get_leads_and_sentences(is_question=True)
    question_index = random.randrange(len(questions))
    lead_index = random.randrange(len(leads))

    question = make_question_casual(random, questions[question_index].format(e=entity.name))
    ending = random.choice(get_word_list("tails", "facts"))
    question_with_lead = leads[lead_index] + question
    return _FactText(
        before_answer=append_answer_lead(random, question_with_lead),
        after_answer=ending,
        question=question,
        wording_name=f"q{question_index}.{lead_index}",
    )


SYNTHETIC_TOOLS = PAPER_TOOLS
TWO_HOP_KIND = "two_hop"
"""Phenomena of question answering that need its result in another call."""
NAMED_ARGUMENT_TOOLS = ("distance", "price")
"""Tools with named arguments, which stand in the training of the embedded model and on no page."""


def write_phenomenon(
    random: Random, world: World, phenomenon_kind: str, part: WorldPart, wording_set: WordingSet
) -> Phenomenon:
    """Write a random text with a place where a call to a tool helps.

    Args:
        random: The source of the draws.
        world: The synthetic world.
        phenomenon_kind: The key of the tool, one of SYNTHETIC_TOOLS or NAMED_ARGUMENT_TOOLS, or TWO_HOP_KIND for a
            text that takes several calls.
        part: The part of the world that the text is about. Each entity, number and word belongs to one part only.
        wording_set: "seen" for the templates of the training texts, or "unseen" for others.
    """
    match phenomenon_kind:
        case "calculator":
            return write_calculator_phenomenon(random, part, wording_set)
        case "calendar":
            return write_calendar_phenomenon(random, part, wording_set)
        case "machine_translation":
            return write_translation_phenomenon(random, part, wording_set)
        case "distance":
            return write_distance_phenomenon(random, world, part, wording_set)
        case "price":
            return write_price_phenomenon(random, world, part, wording_set)
        case "two_hop":
            return write_two_hop_phenomenon(random, world, part, wording_set)
        case _:
            return write_fact_phenomenon(random, world, phenomenon_kind, part, wording_set)


def generate_questions(seed: int, question_kind: str, question_count: int, wording_set: WordingSet) -> list[Phenomenon]:
    """Return different questions and unfinished statements that a call to a tool answers, the same for each seed.

    A model continues the text before the call. It is right if `answer` is among its first words. All questions
    are about the part "evaluation" of the synthetic world, which no training text uses.

    Args:
        seed: The seed of the draws.
        question_kind: The key of the tool, or TWO_HOP_KIND (see `write_phenomenon`).
        question_count: How many to return. If the part has fewer different ones, the function never ends.
        wording_set: "seen" or "unseen" templates.
    """
    random = Random(f"questions {seed} {question_kind} {wording_set}")
    question_by_key: dict[tuple[object, ...], Phenomenon] = {}
    while len(question_by_key) < question_count:
        question = write_phenomenon(random, get_world(), question_kind, part="evaluation", wording_set=wording_set)
        key = (question.text_before_call, question.answer, question.page_date, question.wording_name)
        question_by_key[key] = question
    return list(question_by_key.values())
