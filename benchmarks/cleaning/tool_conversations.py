"""Made conversations for training: four tools that many use, thirty that two use each, several wordings, seeded.

So half of the calls have no other result of their tool to be held against, as in published sets.
"""

import json
import random
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from benchmarks.made_traces import NAMES, TOWNS, Fact, conversation, facts

Draw = Callable[[random.Random], str]


class RareTool(NamedTuple):
    """A tool that two conversations use. `noun`: what it returns of a thing; `draw`: draws a value of it."""

    noun: str
    things: tuple[str, ...]
    draw: Draw
    unit: str = ""


def number(low: int, high: int, decimals: int = 0) -> Draw:
    """Return what draws a number."""
    return lambda chance: f"{chance.uniform(low, high):.{decimals}f}"


def code(form: str) -> Draw:
    """Return what draws a code: each 9 of the form becomes a digit, each A a letter."""
    letters = "ABCDEFGHJKLMNPRSTUVWXYZ"

    def draw(chance: random.Random) -> str:
        drawn = {"9": lambda: str(chance.randint(1, 9)), "A": lambda: chance.choice(letters)}
        return "".join(drawn[character]() if character in drawn else character for character in form)

    return draw


def day(chance: random.Random) -> str:
    """Draw a date."""
    return f"{chance.randint(1951, 2031)}-{chance.randint(1, 12):02}-{chance.randint(1, 28):02}"


def clock(chance: random.Random) -> str:
    """Draw a time of day."""
    return f"{chance.randint(6, 22):02}:{chance.randint(0, 59):02}"


def word(*words: str) -> Draw:
    """Return what draws one of several words."""
    return lambda chance: chance.choice(words)


BRIDGES = ("the old bridge", "the harbour bridge", "the mill bridge", "the railway bridge")
BOOKS = ("The Salt Road", "Nine Winters", "A Map of Rain", "The Glass Orchard")
TRAINS = ("the night train", "the coast train", "the mountain train", "the first train")
PARCELS = ("my parcel", "the return", "the gift box", "the spare part")
LAKES = ("Lake Orre", "Lake Tamsin", "the mill pond", "Lake Veil")
DEVICES = ("the boiler", "the router", "the heat pump", "the printer")
CARS = ("the rental car", "the van", "the delivery truck", "the minibus")
FILMS = ("Blue Ferry", "The Last Orchard", "Paper Moons", "North of Nowhere")
TOWN_NAMES = word(*TOWNS)
PERSON = word(*NAMES)
RARE_TOOLS = (
    RareTool("length", BRIDGES, number(40, 900), "metres"),
    RareTool("opening year", BRIDGES, number(1851, 2019)),
    RareTool("toll", BRIDGES, number(1, 19, 2), "euros"),
    RareTool("author", BOOKS, PERSON),
    RareTool("shelf mark", BOOKS, code("AA 999.9")),
    RareTool("publication date", BOOKS, day),
    RareTool("number of pages", BOOKS, number(90, 900)),
    RareTool("departure time", TRAINS, clock),
    RareTool("platform", TRAINS, number(1, 24)),
    RareTool("seat number", TRAINS, code("99A")),
    RareTool("final stop", TRAINS, TOWN_NAMES),
    RareTool("tracking number", PARCELS, code("AA999999A")),
    RareTool("weight", PARCELS, number(1, 30, 1), "kg"),
    RareTool("delivery date", PARCELS, day),
    RareTool("pick-up town", PARCELS, TOWN_NAMES),
    RareTool("depth", LAKES, number(3, 310, 1), "metres"),
    RareTool("water temperature", LAKES, number(3, 27, 1), "degrees"),
    RareTool("ranger", LAKES, PERSON),
    RareTool("serial number", DEVICES, code("A99-9999")),
    RareTool("error code", DEVICES, code("E999")),
    RareTool("next service date", DEVICES, day),
    RareTool("power draw", DEVICES, number(12, 980), "watts"),
    RareTool("technician", DEVICES, PERSON),
    RareTool("licence plate", CARS, code("AA 9999")),
    RareTool("mileage", CARS, number(1200, 98000), "km"),
    RareTool("fuel level", CARS, number(5, 99), "percent"),
    RareTool("colour", CARS, word("dark green", "silver", "bright red", "navy blue", "ochre", "pale yellow")),
    RareTool("director", FILMS, PERSON),
    RareTool("running time", FILMS, number(71, 188), "minutes"),
    RareTool("screening hall", FILMS, code("9A")),
)
QUESTIONS = (
    "What is the {noun} of {thing}?",
    "Can you look up the {noun} of {thing}?",
    "I need the {noun} of {thing}, please.",
    "Please tell me the {noun} of {thing}.",
)
ANSWERS = (
    "The {noun} of {thing} is {value}.",
    "It is {value}.",
    "I looked it up: {value}.",
    "{value} is the {noun} you asked for.",
    "According to the records, the {noun} is {value}. Is there anything else?",
)


def _record(tool: RareTool, thing: str, value: str, chance: random.Random) -> str:
    """Return a result in one of three forms; a second field may hold what nobody asked for."""
    field = tool.noun.replace(" ", "_").replace("-", "_")
    told: Any = float(value) if value.replace(".", "", 1).isdigit() and "." in value else value
    forms: tuple[dict[str, Any], ...] = (
        {field: told},
        {"status": "success", field: told, **({"unit": tool.unit} if tool.unit else {})},
        {"name": thing, field: told, "checked_by": chance.choice(NAMES)},
    )
    return json.dumps(chance.choice(forms))


def rare_fact(tool: RareTool, chance: random.Random) -> Fact:
    """Return a question of a rare tool and its answer."""
    thing = chance.choice(tool.things)
    value = tool.draw(chance)
    value = str(float(value)) if value.replace(".", "", 1).isdigit() and "." in value else value  # as JSON writes it
    question = chance.choice(QUESTIONS).format(noun=tool.noun, thing=thing)
    told = f"{value} {tool.unit}" if tool.unit else value
    answer = chance.choice(ANSWERS).format(noun=tool.noun, thing=thing, value=told)
    name = "get_" + tool.noun.replace(" ", "_").replace("-", "_")
    return Fact(name, question, {"of": thing}, _record(tool, thing, value, chance), "", answer)


def tool_conversations(seed: int = 1) -> list[dict[str, Any]]:
    """Return 120 conversations of one call each, as records: half of them of rare tools."""
    chance = random.Random(seed)
    rare = [rare_fact(tool, chance) for tool in RARE_TOOLS for _ in range(2)]
    mixed: Sequence[Fact] = [*facts(len(rare), seed), *rare]
    return [{"messages": conversation(fact)} for fact in chance.sample(mixed, len(mixed))]
