"""Distances and prices of the synthetic world, and sentences that need a call with two or three named arguments."""

from collections.abc import Mapping
from hashlib import blake2b
from random import Random
from typing import NamedTuple

from toolformer_dag.synthetic.sentences import (
    ANSWER_MARK,
    Phenomenon,
    fill_template,
    split_at_answer,
    type_question,
)
from toolformer_dag.synthetic.today import WEEK_DAYS
from toolformer_dag.synthetic.wordings import (
    WordingSet,
    WorldPart,
    get_named_templates,
    get_part_of_slot,
    get_word_list,
)
from toolformer_dag.synthetic.world import WORLD_SEED, World

QUESTION_SHARE = 0.45
MILES_PER_KM = 0.621371
UNITS = ("km", "miles")
_SLOTS = 20
"""The questions about prices are hashed into so many slots, which are dealt to the parts of the world."""


def compute_distance(start: str, end: str, unit: str, seed: int = WORLD_SEED) -> int:
    """Return the length of the road between two towns in km or miles, the same in both directions."""
    towns = sorted((start, end))
    km = 12 + _hash(seed, *towns) % 888
    if unit == "km":
        return km
    return round(km * MILES_PER_KM)


def compute_price(item: str, count: int, day: str, seed: int = WORLD_SEED) -> int:
    """Return what `count` of a thing cost on a weekday, in dollars."""
    return count * (2 + _hash(seed, item, day) % 48)


def _hash(seed: int, *values: str) -> int:
    """Return a number of 32 bits that follows from the values."""
    return int.from_bytes(blake2b(repr((seed, *values)).encode(), digest_size=4).digest(), "big")


def distance(random: Random, world: World, part: WorldPart, wordings: WordingSet) -> Phenomenon:
    """Write a sentence or question about the distance of two towns of a part of the world, with a call.

    The call is `start="A", end="B", unit="miles"`; the unit km is the default, which a call leaves out.
    """
    start, end = [town.name for town in random.sample(world.entities(part, "town"), 2)]
    unit = random.choice(UNITS)
    unit_argument = "" if unit == "km" else f', unit="{unit}"'
    miles_or_km = compute_distance(start, end, unit, world.seed)
    return _build_phenomenon(
        random,
        "distance",
        wordings,
        slots={"a": start, "b": end, "u": unit},
        call_input=f'start="{start}", end="{end}"{unit_argument}',
        answer=str(miles_or_km),
    )


def price(random: Random, world: World, part: WorldPart, wordings: WordingSet) -> Phenomenon:
    """Write a sentence or question about the price of things on a weekday, with a call.

    The call is `item="lamps", count=3, day="Monday"`.
    """
    purchase = _draw_purchase(random, part)
    dollars = compute_price(purchase.item, purchase.quantity, purchase.day, world.seed)
    return _build_phenomenon(
        random,
        "price",
        wordings,
        slots={"n": str(purchase.quantity), "i": purchase.item, "d": purchase.day},
        call_input=f'item="{purchase.item}", count={purchase.quantity}, day="{purchase.day}"',
        answer=str(dollars),
    )


class _Purchase(NamedTuple):
    """Some things that are bought on a weekday."""

    item: str
    quantity: int
    day: str


def _draw_purchase(random: Random, part: WorldPart) -> _Purchase:
    """Draw purchases until one belongs to the part of the world; a hash assigns each purchase to one part."""
    while True:
        item = random.choice(get_word_list("calculator", "things"))
        day = random.choice(WEEK_DAYS)
        quantity = random.randint(2, 60)
        slot = _hash(0, item, day, str(quantity)) % _SLOTS  # seed 0: the same parts in every world
        if get_part_of_slot(slot, _SLOTS) == part:
            return _Purchase(item, quantity, day)


def _build_phenomenon(
    random: Random, tool: str, wordings: WordingSet, *, slots: Mapping[str, str], call_input: str, answer: str
) -> Phenomenon:
    """Write a question or statement by a random template, with a call right before its answer.

    As an example, "The distance from Lund to Ystad in miles is" before the call, and " 93, they say." behind it.

    - `slots`: values for the placeholders of the templates but the answer's: {"a": "Lund", "b": "Ystad"}
    - `answer`: what the tool returns for `call_input`
    """
    text = _write_text(random, tool, wordings, slots)
    ending = random.choice(get_word_list("tails", "facts"))
    return Phenomenon(
        tool=tool,
        before=text.before,
        after=f" {answer}{text.after}{ending}",
        input=call_input,
        result=answer,
        answer=answer,
        wording=f"{tool}/{wordings}/{text.wording}",
    )


class _Text(NamedTuple):
    """A question or statement: the text before its answer and after it, and the name of its template."""

    before: str
    after: str
    wording: str


def _write_text(random: Random, tool: str, wordings: WordingSet, slots: Mapping[str, str]) -> _Text:
    """Write "How far is it from Lund to Ystad? It is" or "From Lund to Ystad it is" and " miles"."""
    is_question = random.random() < QUESTION_SHARE
    slots_and_mark = {**slots, "v": ANSWER_MARK}
    written = fill_template(random, get_named_templates(tool, wordings), slots_and_mark, is_question=is_question)
    if is_question:
        return _Text(type_question(random, written.text), after="", wording=written.wording)
    around = split_at_answer(written.text)
    return _Text(around.before, around.after, written.wording)
