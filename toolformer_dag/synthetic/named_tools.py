"""Distances and prices of the synthetic world, and sentences that need a call with two or three named arguments."""

from collections.abc import Mapping
from hashlib import blake2b
from random import Random

from toolformer_dag.synthetic.sentences import Phenomenon, casual, led, worded
from toolformer_dag.synthetic.today import WEEK_DAYS
from toolformer_dag.synthetic.wordings import WordingSet, WorldPart, named_templates, part_of_slot, word_list
from toolformer_dag.synthetic.world import WORLD_SEED, World

QUESTION_SHARE = 0.45
MILES_PER_KM = 0.621371
UNITS = ("km", "miles")
_SLOTS = 20


def distance_of(start: str, end: str, unit: str, seed: int = WORLD_SEED) -> int:
    """Return the length of the road between two towns in km or miles, the same in both directions."""
    km = 12 + _hash(seed, *sorted((start, end))) % 888
    return km if unit == UNITS[0] else round(km * MILES_PER_KM)


def price_of(item: str, count: int, day: str, seed: int = WORLD_SEED) -> int:
    """Return what so many of a thing cost on a weekday, in dollars."""
    return count * (2 + _hash(seed, item, day) % 48)


def _hash(seed: int, *values: str) -> int:
    return int.from_bytes(blake2b(repr((seed, *values)).encode(), digest_size=4).digest(), "big")


def distance(random: Random, world: World, part: WorldPart, wordings: WordingSet) -> Phenomenon:
    """State or ask how far two towns of a part are from each other; the call leaves out km, the default."""
    start, end = (one.name for one in random.sample(world.entities(part, "town"), 2))
    unit = random.choice(UNITS)
    asked = f'start="{start}", end="{end}"' + ("" if unit == UNITS[0] else f', unit="{unit}"')
    answer = str(distance_of(start, end, unit, world.seed))
    return _phenomenon(random, "distance", wordings, {"a": start, "b": end, "u": unit}, (asked, answer))


def price(random: Random, world: World, part: WorldPart, wordings: WordingSet) -> Phenomenon:
    """State or ask what so many of a thing cost on a weekday; no such three are of two parts."""
    while True:
        item, day = random.choice(word_list("calculator", "things")), random.choice(WEEK_DAYS)
        count = random.randint(2, 60)
        if part_of_slot(_hash(0, item, day, str(count)) % _SLOTS, _SLOTS) == part:
            break
    asked = f'item="{item}", count={count}, day="{day}"'
    slots = {"n": str(count), "i": item, "d": day}
    return _phenomenon(random, "price", wordings, slots, (asked, str(price_of(item, count, day, world.seed))))


def _phenomenon(
    random: Random, tool: str, wordings: WordingSet, slots: Mapping[str, str], call: tuple[str, str]
) -> Phenomenon:
    is_question = random.random() < QUESTION_SHARE
    text, wording = worded(random, named_templates(tool, wordings), {**slots, "v": "\0"}, is_question=is_question)
    before, rest = (led(random, casual(random, text)), "") if is_question else text.split(" \0")
    asked, answer = call
    return Phenomenon(
        tool=tool,
        before=before,
        after=f" {answer}{rest}{random.choice(word_list('tails', 'facts'))}",
        input=asked,
        result=answer,
        answer=answer,
        wording=f"{tool}/{wordings}/{wording}",
    )
