"""Distances and prices of the synthetic world, and sentences that need a call with two or three named arguments."""

from collections.abc import Mapping
from hashlib import blake2b
from random import Random

from toolformer_dag.synthetic.sentences import ANSWER_MARK, Phenomenon, around_answer, casual, with_answer_lead, worded
from toolformer_dag.synthetic.today import WEEK_DAYS
from toolformer_dag.synthetic.wordings import WordingSet, WorldPart, named_templates, part_of_slot, word_list
from toolformer_dag.synthetic.world import WORLD_SEED, World

QUESTION_SHARE = 0.45
MILES_PER_KM = 0.621371
UNITS = ("km", "miles")
_SLOTS = 20
"""Into as many slots the questions about prices are dealt, and these to the parts of the world."""


def distance_of(start: str, end: str, unit: str, seed: int = WORLD_SEED) -> int:
    """Return the length of the road between two towns in km or miles, the same in both directions."""
    km = 12 + _hash(seed, *sorted((start, end))) % 888
    return km if unit == UNITS[0] else round(km * MILES_PER_KM)


def price_of(item: str, count: int, day: str, seed: int = WORLD_SEED) -> int:
    """Return what `count` of a thing cost on a weekday, in dollars."""
    return count * (2 + _hash(seed, item, day) % 48)


def _hash(seed: int, *values: str) -> int:
    """Return a number of 32 bits that follows from the values."""
    return int.from_bytes(blake2b(repr((seed, *values)).encode(), digest_size=4).digest(), "big")


def distance(random: Random, world: World, part: WorldPart, wordings: WordingSet) -> Phenomenon:
    """Write a sentence or question about the distance of two towns, with a call such as `start="A", end="B"`.

    The unit is drawn: `unit="miles"` is written into the call, km is the default and left out. part: of the world, from
    whose towns is drawn. wordings: "seen" in training, or "unseen".
    """
    start, end = [town.name for town in random.sample(world.entities(part, "town"), 2)]
    unit = random.choice(UNITS)
    call_input = f'start="{start}", end="{end}"'
    if unit != UNITS[0]:
        call_input += f', unit="{unit}"'
    miles_or_km = distance_of(start, end, unit, world.seed)
    return _phenomenon(
        random,
        "distance",
        wordings,
        slots={"a": start, "b": end, "u": unit},
        call_input=call_input,
        answer=str(miles_or_km),
    )


def price(random: Random, world: World, part: WorldPart, wordings: WordingSet) -> Phenomenon:
    """Write a sentence or question about the price of some things on a weekday, with a call to the price tool.

    The input of the call is as `item="lamps", count=3, day="Monday"`. A hash assigns each combination of the three to
    one part of the world, so combinations are drawn until one belongs to `part`.
    """
    while True:
        item = random.choice(word_list("calculator", "things"))
        day = random.choice(WEEK_DAYS)
        count = random.randint(2, 60)
        bucket = _hash(0, item, day, str(count)) % _SLOTS  # seed 0: the same parts in every world
        if part_of_slot(bucket, _SLOTS) == part:
            break
    return _phenomenon(
        random,
        "price",
        wordings,
        slots={"n": str(count), "i": item, "d": day},
        call_input=f'item="{item}", count={count}, day="{day}"',
        answer=str(price_of(item, count, day, world.seed)),
    )


def _phenomenon(
    random: Random, tool: str, wordings: WordingSet, *, slots: Mapping[str, str], call_input: str, answer: str
) -> Phenomenon:
    """Write a question or statement about an answer by a random template; return it with the call that belongs there.

    The call stands between `before` and `after`, right before the answer. A question has `before` "How far is it from
    Lund to Ystad? It is" and `after` " 40."; a statement has `before` "From Lund to Ystad it is" and `after` " 40
    miles."

    - slots: the values for the placeholders of the templates, as {"a": "Lund", "b": "Ystad"}; `{v}`, which stands for
      the answer, is added here.
    - call_input: the input of the call. answer: what the tool returns for it.
    """
    is_question = random.random() < QUESTION_SHARE
    templates = named_templates(tool, wordings)
    text, wording = worded(random, templates, {**slots, "v": ANSWER_MARK}, is_question=is_question)
    if is_question:
        before = with_answer_lead(random, casual(random, text))
        after_answer = ""
    else:
        before, after_answer = around_answer(text)
    ending = random.choice(word_list("tails", "facts"))
    return Phenomenon(
        tool=tool,
        before=before,
        after=f" {answer}{after_answer}{ending}",
        input=call_input,
        result=answer,
        answer=answer,
        wording=f"{tool}/{wordings}/{wording}",
    )
