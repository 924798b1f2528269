"""Distances and prices of the synthetic world, and sentences that need a call with two or three named arguments."""

from collections.abc import Mapping
from hashlib import blake2b
from random import Random
from typing import NamedTuple

from toolformer_dag.synthetic.sentences import (
    ANSWER_MARK,
    Phenomenon,
    fill_random_template,
    make_typed_question,
    split_at_answer,
)
from toolformer_dag.synthetic.today import WEEK_DAYS
from toolformer_dag.synthetic.wordings import (
    WordingSet,
    WorldPart,
    get_named_tool_templates,
    get_part_of_slot,
    get_word_list,
)
from toolformer_dag.synthetic.world import WORLD_SEED, World

QUESTION_SHARE = 0.45
MILES_PER_KM = 0.621371
UNITS = ("km", "miles")
_SLOT_COUNT = 20
"""The number of slots that the questions about prices are hashed into. Each belongs to a part of the world."""


def compute_distance(start: str, end: str, unit: str, seed: int = WORLD_SEED) -> int:
    """Return the length of the road between two towns of the synthetic world, the same in both directions.

    Args:
        start: The name of a town.
        end: The name of the other town.
        unit: "km", or anything else for miles.
        seed: The seed of the world.
    """
    towns = sorted((start, end))
    km = 12 + _hash_to_number(seed, *towns) % 888
    if unit == "km":
        return km
    return round(km * MILES_PER_KM)


def compute_price(item: str, count: int, day: str, seed: int = WORLD_SEED) -> int:
    """Return what a number of things costs on a weekday, in dollars. A single one costs from 2 to 49 dollars."""
    dollars_apiece = 2 + _hash_to_number(seed, item, day) % 48
    return count * dollars_apiece


def _hash_to_number(seed: int, *values: str) -> int:
    """Return a number from 0 to 2**32 - 1 that looks random, but is the same for the same values."""
    digest = blake2b(repr((seed, *values)).encode(), digest_size=4).digest()
    return int.from_bytes(digest, "big")


def write_distance_phenomenon(random: Random, world: World, part: WorldPart, wording_set: WordingSet) -> Phenomenon:
    """Write a sentence or question about the distance of two towns of a part of the world, with a call.

    Example:
        The input of the call is `start="Lund", end="Ystad", unit="miles"`. Kilometers are the default, so a call for
        them has no unit.
    """
    start_town, end_town = random.sample(world.get_entities(part, "town"), 2)
    start = start_town.name
    end = end_town.name
    unit = random.choice(UNITS)
    distance = compute_distance(start, end, unit, world.seed)

    unit_argument = "" if unit == "km" else f', unit="{unit}"'
    return _build_phenomenon(
        random,
        "distance",
        wording_set,
        value_by_slot={"a": start, "b": end, "u": unit},
        call_input=f'start="{start}", end="{end}"{unit_argument}',
        answer=str(distance),
    )


def write_price_phenomenon(random: Random, world: World, part: WorldPart, wording_set: WordingSet) -> Phenomenon:
    """Write a sentence or question about the price of things on a weekday, with a call.

    Example:
        The input of the call is `item="lamps", count=3, day="Monday"`.
    """
    purchase = _draw_purchase(random, part)
    dollars = compute_price(purchase.item, purchase.quantity, purchase.day, world.seed)
    return _build_phenomenon(
        random,
        "price",
        wording_set,
        value_by_slot={"n": str(purchase.quantity), "i": purchase.item, "d": purchase.day},
        call_input=f'item="{purchase.item}", count={purchase.quantity}, day="{purchase.day}"',
        answer=str(dollars),
    )


class _Purchase(NamedTuple):
    """A number of things that are bought on a weekday, such as 3 lamps on Monday."""

    item: str
    quantity: int
    day: str


def _draw_purchase(random: Random, part: WorldPart) -> _Purchase:
    """Draw purchases until one belongs to a part of the synthetic world, such as "evaluation".

    Every purchase belongs to one part, so that no question of the training texts is asked again in the evaluation.
    """
    while True:
        item = random.choice(get_word_list("calculator", "things"))
        day = random.choice(WEEK_DAYS)
        quantity = random.randint(2, 60)

        # A purchase is hashed into a numbered slot, and each part has its share of the slots. The seed 0 makes the
        # parts the same in every world.
        slot = _hash_to_number(0, item, day, str(quantity)) % _SLOT_COUNT
        if get_part_of_slot(slot, _SLOT_COUNT) == part:
            return _Purchase(item, quantity, day)


def _build_phenomenon(
    random: Random,
    tool_key: str,
    wording_set: WordingSet,
    *,
    value_by_slot: Mapping[str, str],
    call_input: str,
    answer: str,
) -> Phenomenon:
    """Write a question or statement by a random template, with a call right before its answer.

    Args:
        random: The source of the draws.
        tool_key: The key of the tool, "distance" or "price".
        wording_set: "seen" or "unseen" templates.
        value_by_slot: The values of the templates' slots, except for the answer's slot, such as
            {"a": "Lund", "b": "Ystad", "u": "miles"}.
        call_input: The input of the call.
        answer: What the tool returns for this input.

    Example:
        The text "The distance from Lund to Ystad in miles is", and after the call " 93, they say.".
    """
    around_answer = _write_text_around_answer(random, tool_key, wording_set, value_by_slot)
    ending = random.choice(get_word_list("tails", "facts"))
    return Phenomenon(
        tool=tool_key,
        text_before_call=around_answer.before_answer,
        text_after_call=f" {answer}{around_answer.after_answer}{ending}",
        input=call_input,
        result=answer,
        answer=answer,
        wording_name=f"{tool_key}/{wording_set}/{around_answer.wording_name}",
    )


class _TextAroundAnswer(NamedTuple):
    """The text of a question or statement before its answer and after it, and the name of its template."""

    before_answer: str
    after_answer: str
    wording_name: str


def _write_text_around_answer(
    random: Random, tool_key: str, wording_set: WordingSet, value_by_slot: Mapping[str, str]
) -> _TextAroundAnswer:
    """Write a question or statement by a random template, without its answer.

    Args:
        random: The source of the draws.
        tool_key: The key of the tool, "distance" or "price".
        wording_set: "seen" or "unseen" templates.
        value_by_slot: The values of the templates' slots, except for the answer's slot.

    Returns:
        The text before the answer and after it. Nothing follows the answer of a question.

    Example:
        A question gives "How far is it from Lund to Ystad? It is" and "".
        A statement gives "From Lund to Ystad it is" and " miles".
    """
    is_question = random.random() < QUESTION_SHARE
    templates = get_named_tool_templates(tool_key, wording_set)

    # The mark shows where to split a statement. Questions do not use it.
    slots_and_mark = {**value_by_slot, "v": ANSWER_MARK}
    written = fill_random_template(random, templates, slots_and_mark, is_question=is_question)
    if is_question:
        # Worded as people type it ("how far"), and perhaps followed by the beginning of an answer ("It is").
        question_and_lead = make_typed_question(random, written.text)
        return _TextAroundAnswer(question_and_lead, after_answer="", wording_name=written.wording_name)

    around_answer = split_at_answer(written.text)
    return _TextAroundAnswer(around_answer.before_answer, around_answer.after_answer, written.wording_name)
