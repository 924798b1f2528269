"""Made texts with sums in them, so that a benchmark needs no data: about 155 tokens each."""

import random

NAMES = ["Anna", "Boris", "Clara", "Dmitri", "Elena", "Farid", "Grace", "Hugo", "Ines", "Jonas", "Kofi", "Lena"]
PLACES = ["Bergen", "Cordoba", "Dresden", "Esbjerg", "Fukuoka", "Geneva", "Hamburg", "Izmir", "Jaipur", "Krakow"]
THINGS = ["pens", "bicycles", "tickets", "houses", "trees", "letters", "students", "machines", "boats", "books"]
SENTENCES = 8
CLOSING = " That is all that the book of the town says about it."


def sentence(draw: random.Random) -> str:
    """A sum told in words."""
    a, b = draw.randint(20, 900), draw.randint(2, 400)
    name, place, things = draw.choice(NAMES), draw.choice(PLACES), draw.choice(THINGS)
    told = [
        f"{name} had {a} {things} and bought {b} more in {place}, so that makes {a + b} in all.",
        f"Of the {a + b} {things} in {place}, {b} were sold to {name}, which leaves {a}.",
        f"The town of {place} counted {a} {things} and then {b} new ones, a total of {a + b}.",
    ]
    return draw.choice(told)


def text(draw: random.Random) -> str:
    """Eight sums and a closing sentence."""
    return " ".join(sentence(draw) for _ in range(SENTENCES)) + CLOSING


def texts(count: int, seed: int = 0) -> list[str]:
    """Distinct texts, the same for the same seed."""
    draw = random.Random(seed)
    return [text(draw) for _ in range(count)]
