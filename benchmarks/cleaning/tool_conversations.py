"""Made conversations for training: four tools that many use, thirty that two use each, several wordings, seeded.

So half of the calls have no other result of their tool to be held against, as in published sets. A result of the thirty
has values of three things, of which the question asks for one: a model has to learn which one to repeat.
"""

import json
import random
from collections.abc import Callable, Mapping, Sequence
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
    "{noun} of {thing}?",
    "I forgot the {noun} of {thing}. Which is it?",
    "We talked about {thing}. Could you find its {noun}?",
)
ANSWERS = (
    "The {noun} of {thing} is {value}.",
    "It is {value}.",
    "I looked it up: {value}.",
    "{value} is the {noun} you asked for.",
    "According to the records, the {noun} is {value}. Is there anything else?",
    "For {thing}, the {noun} is {value}.",
    "That would be {value}.",
    "The records have {value} as the {noun} of {thing}.",
)


def _values(tool: RareTool, thing: str, chance: random.Random) -> dict[str, str]:
    """Return values of a tool for a thing and two others, all different, in any order."""
    others = [other for other in tool.things if other != thing]
    values: dict[str, str] = {}
    for name in (thing, *chance.sample(others, 2)):
        value = _as_in_json(tool.draw(chance))
        while value in values.values():
            value = _as_in_json(tool.draw(chance))
        values[name] = value
    names = chance.sample(sorted(values), len(values))
    return {name: values[name] for name in names}


def _as_in_json(value: str) -> str:
    """Return a value as JSON writes it: of the number 12.50 `12.5`."""
    return str(float(value)) if _is_decimal(value) else value


def _is_decimal(value: str) -> bool:
    """Return whether a value is a number with a decimal point."""
    return "." in value and value.replace(".", "", 1).isdigit()


def _record(tool: RareTool, values: Mapping[str, str], chance: random.Random) -> str:
    """Return a result in one of three forms. values: by the things that have them."""
    field = _field(tool)
    written: dict[str, Any] = {name: float(value) if _is_decimal(value) else value for name, value in values.items()}
    listed = [{"name": name, field: value} for name, value in written.items()]
    forms: tuple[Any, ...] = (
        {field: written},
        {"status": "success", "results": listed},
        {"results": listed, "checked_by": chance.choice(NAMES)},
    )
    return json.dumps(chance.choice(forms))


def _field(tool: RareTool) -> str:
    """Return the name of a tool's value in its results, such as `opening_year`."""
    return tool.noun.replace(" ", "_").replace("-", "_")


def rare_fact(tool: RareTool, chance: random.Random) -> Fact:
    """Return a question of a rare tool and its answer."""
    thing = chance.choice(tool.things)
    values = _values(tool, thing, chance)
    value = f"{values[thing]} {tool.unit}".rstrip()
    question = chance.choice(QUESTIONS).format(noun=tool.noun, thing=thing)
    answer = chance.choice(ANSWERS).format(noun=tool.noun, thing=thing, value=value)
    return Fact(f"get_{_field(tool)}", question, {"of": thing}, _record(tool, values, chance), "", answer)


def tool_conversations(seed: int = 1) -> list[dict[str, Any]]:
    """Return 120 conversations of one call each, as records: half of them of rare tools."""
    chance = random.Random(seed)
    rare = [rare_fact(tool, chance) for tool in RARE_TOOLS for _ in range(2)]
    mixed: Sequence[Fact] = [*facts(len(rare), seed), *rare]
    return [{"messages": conversation(fact)} for fact in chance.sample(mixed, len(mixed))]
