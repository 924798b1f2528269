"""Conversations whose calls are known to be right, to have a wrong value, to be needless, and so on: seeded."""

import json
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

TOWNS = ("Lyon", "Porto", "Graz", "Malmö", "Bergen", "Leeds", "Ghent", "Turin", "Cork", "Tampere", "Basel", "Split")
SKIES = ("light rain", "clear sky", "heavy snow", "thick fog", "scattered clouds", "strong wind")
STATES = ("shipped", "delivered", "cancelled", "waiting for payment", "returned", "packed")
NAMES = ("Mara Ilves", "Tomas Reed", "Ines Calvo", "Jonah Pike", "Wanda Krol", "Elif Aydin", "Piet Maas", "Rosa Lund")
Content = dict[str, Any]


@dataclass(frozen=True)
class Fact:
    """A question that a tool answers; `wrong`: another value of the same kind; `answer`: what states the right one."""

    tool: str
    question: str
    arguments: Content
    right: str
    wrong: str
    answer: str


def _sum(chance: random.Random) -> Fact:
    a = chance.randint(112, 980)
    b = chance.randint(13, 97)
    answer = chance.choice(("That makes {}.", "It comes to {} in all.", "{} is the product."))
    right = str(a * b)
    wrong = str(a * (b + chance.choice((-2, -1, 1, 2))))
    question = chance.choice((f"What is {a} times {b}?", f"We need {a} boxes of {b} pieces. How many pieces is that?"))
    return Fact("calculator", question, {"expression": f"{a} * {b}"}, right, wrong, answer.format(right))


def _weather(chance: random.Random) -> Fact:
    town = chance.choice(TOWNS)
    sky, other_sky = chance.sample(SKIES, 2)
    warm, cold = chance.sample(range(-9, 34), 2)
    written = chance.choice(
        ("In {c} it is {t} degrees with {s}.", "Expect {s} in {c}, at {t} degrees.", "{t} degrees, {s}.")
    )
    right = json.dumps({"temperature": warm, "sky": sky})
    wrong = json.dumps({"temperature": cold, "sky": other_sky})
    day = chance.choice(("now", "today", "this morning", "this evening"))
    question = f"How is the weather in {town} {day}?"
    return Fact("weather", question, {"town": town}, right, wrong, written.format(c=town, t=warm, s=sky))


def _order(chance: random.Random) -> Fact:
    order = f"B{chance.randint(10000, 99999)}"
    state, other_state = chance.sample(STATES, 2)
    price, other_price = (chance.randint(900, 9900) / 100 for _ in range(2))
    record = {"order": order, "carrier": "north post", "warehouse": chance.choice(TOWNS), "items": chance.randint(1, 5)}
    right = json.dumps({**record, "total": price, "status": state})
    wrong = json.dumps({**record, "total": other_price, "status": other_state})
    written = chance.choice(("Your order {o} is {s}; its total is {p} euros.", "It is {s}. You paid {p} euros for it."))
    question = f"Where is my order {order}?"
    return Fact("get_order", question, {"order": order}, right, wrong, written.format(o=order, s=state, p=price))


def _contact(chance: random.Random) -> Fact:
    name = f"{chance.choice(NAMES)} of {chance.choice(TOWNS)}"
    phone, other_phone = (
        f"+{chance.randint(30, 49)} {chance.randint(100, 999)} {chance.randint(10000, 99999)}" for _ in range(2)
    )
    right = json.dumps({"name": name, "phone": phone})
    wrong = json.dumps({"name": name, "phone": other_phone})
    answer = chance.choice((f"You reach {name} at {phone}.", f"The number is {phone}."))
    return Fact("find_contact", f"How do I reach {name}?", {"name": name}, right, wrong, answer)


MAKERS: tuple[Callable[[random.Random], Fact], ...] = (_sum, _weather, _order, _contact)


def facts(count: int, seed: int = 1) -> list[Fact]:
    """Return questions of four tools in turn."""
    chance = random.Random(seed)
    return [MAKERS[number % len(MAKERS)](chance) for number in range(count)]


def turn(calls: list[tuple[str, Content, str]], first: int = 0) -> Iterator[Content]:
    """Yield a message with calls, and their results."""
    asked = [(f"c{first + n}", *call) for n, call in enumerate(calls)]
    functions = [(name, {"name": tool, "arguments": json.dumps(given)}) for name, tool, given, _ in asked]
    listed = [{"id": name, "type": "function", "function": one} for name, one in functions]
    yield {"role": "assistant", "content": "", "tool_calls": listed}
    for name, _, _, result in asked:
        yield {"role": "tool", "tool_call_id": name, "content": result}


def conversation(fact: Fact, fault: str = "right", other: Fact | None = None) -> list[Content]:
    """Return a conversation; its last call is the one that is judged.

    Faults: right, wrong_value (the result has another value than the answer), needless (another call follows, whose
    result the answer does not use), ignored (the answer states a value that no tool gave), hallucinated (the arguments
    are another question's, and so is the result).
    """
    call = (fact.tool, fact.arguments, fact.wrong if fault == "wrong_value" else fact.right)
    answer = fact.answer
    if fault in ("needless", "hallucinated", "ignored"):
        assert other is not None
    if fault == "hallucinated":
        call = (fact.tool, other.arguments, other.right)
    said = [{"role": "user", "content": fact.question}, *turn([call])]
    if fault == "needless":
        said += turn([(other.tool, other.arguments, other.right)], 1)
    if fault == "ignored":
        answer = other.answer
    return [*said, {"role": "assistant", "content": answer}]


FAULTS = ("right", "wrong_value", "needless", "hallucinated", "ignored")


def records(count: int, fault: str = "right", seed: int = 1) -> list[Content]:
    """Return so many conversations with one fault, as records; of `needless` the other call is another tool's."""
    made = facts(count, seed)
    step = 1 if fault == "needless" else len(MAKERS)
    pairs = ((fact, made[(number + step) % count]) for number, fact in enumerate(made))
    return [{"id": f"made-{n}", "messages": conversation(fact, fault, other)} for n, (fact, other) in enumerate(pairs)]
