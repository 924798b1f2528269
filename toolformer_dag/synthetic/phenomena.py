"""Draw phenomena of the synthetic world for each tool, and the questions that evaluation asks about them."""

from random import Random

from toolformer_dag.settings.settings_file import PAPER_TOOLS
from toolformer_dag.synthetic.calculations import calculation
from toolformer_dag.synthetic.lexicon import translated
from toolformer_dag.synthetic.named_tools import distance, price
from toolformer_dag.synthetic.sentences import ANSWER_MARK, Phenomenon, around_answer, casual, with_answer_lead, worded
from toolformer_dag.synthetic.today import today
from toolformer_dag.synthetic.two_hop import two_hop
from toolformer_dag.synthetic.wordings import KINDS, WordingSet, WorldPart, fact_templates, relations, word_list
from toolformer_dag.synthetic.world import World, passages_by_relation, the_world

QUESTION_SHARE = 0.45
KIND_WEIGHTS = (5, 3, 2, 1)  # in the order of KINDS
PRETRAINING_WEIGHTS = (4, 3, 2, 2)  # rivers have three facts too: what is asked rarely must be learnt all the same


def fact(random: Random, world: World, tool: str, part: WorldPart, wordings: WordingSet) -> Phenomenon:
    """Write a sentence that states a fact of the synthetic world, or a question that asks for it, with a call.

    tool: "question_answering", whose call has the question as input and the fact as result; or "wiki_search", whose
    call has the entity's name and a keyword as input and a passage with the fact as result. part: of the world, such as
    "pretraining", from whose people, towns, firms and rivers is drawn.
    """
    kind_weights = PRETRAINING_WEIGHTS if part == "pretraining" else KIND_WEIGHTS
    kind = random.choices(KINDS, kind_weights)[0]
    entity = random.choice(world.entities(part, kind))
    relation = random.choice(relations(kind))
    answer = entity.facts[relation.key]
    templates = fact_templates(relation, tool, wordings)
    is_question = random.random() < QUESTION_SHARE
    if is_question:
        leads, questions = templates.choices(is_question=True)
        number = random.randrange(len(questions))
        lead_number = random.randrange(len(leads))
        question = casual(random, questions[number].format(e=entity.name))
        text = f"{leads[lead_number]}{question}"
        wording = f"q{number}.{lead_number}"
    else:
        question = relation.question.format(e=entity.name)
        text, wording = worded(random, templates, {"e": entity.name, "v": ANSWER_MARK}, is_question=False)
    ending = random.choice(word_list("tails", "facts"))
    if is_question:
        before = with_answer_lead(random, text)
        after_answer = ""
    else:
        before, after_answer = around_answer(text)

    if tool == "question_answering":
        call_input = question
        result = answer
    else:
        call_input = f"{entity.name} {relation.keyword}"
        result = passages_by_relation(entity, world.seed)[relation.key].snippet
    return Phenomenon(
        tool=tool,
        before=before,
        after=f" {answer}{after_answer}{ending}",
        input=f'"{call_input}"',
        result=result,
        answer=answer,
        wording=f"{tool}/{relation.kind}/{relation.key}/{wordings}/{wording}",
    )


TOOLS = PAPER_TOOLS
TWO_HOP = "two_hop"
"""Phenomena of question answering that need its result in another call."""
NAMED_TOOLS = ("distance", "price")
"""Tools with named arguments, which stand in the training of the embedded model and on no page."""


def phenomenon(random: Random, world: World, tool: str, part: WorldPart, wordings: WordingSet) -> Phenomenon:
    """Write a random text with a place where a call to `tool` helps: of TOOLS, NAMED_TOOLS, or TWO_HOP.

    part: of the world; entities, numbers and words belong to one part alone. wordings: "seen" in training, or "unseen".
    """
    draw_from_world = {TWO_HOP: two_hop, "distance": distance, "price": price}
    draw_without_world = {"calculator": calculation, "calendar": today, "machine_translation": translated}
    if tool in draw_from_world:
        return draw_from_world[tool](random, world, part, wordings)
    if tool in draw_without_world:
        return draw_without_world[tool](random, part, wordings)
    return fact(random, world, tool, part, wordings)


def questions(seed: int, tool: str, n: int, wordings: WordingSet) -> list[Phenomenon]:
    """Return `n` different questions and unfinished statements that a call to a tool answers, the same for each seed.

    A phenomenon is a text with a place where a call helps. Here a model is to continue its text `before`, and is right
    when `answer` is among its first words. About half are questions. All are from the world's part "evaluation", in
    which training has no texts. Does not end where the part has fewer than `n` different ones.
    """
    random = Random(f"questions {seed} {tool} {wordings}")
    distinct: dict[tuple[object, ...], Phenomenon] = {}
    while len(distinct) < n:
        question = phenomenon(random, the_world(), tool, part="evaluation", wordings=wordings)
        key = (question.before, question.answer, question.date, question.wording)
        distinct[key] = question
    return list(distinct.values())
