"""Operands for the calculator, dealt to the three parts so that no pair of one part is ever asked in another."""

from decimal import ROUND_HALF_UP, Decimal
from random import Random

from toolformer_dag.embedded.names import PARTS, SHARES, Part
from toolformer_dag.embedded.wordings.scheme import Numbers

SIZES = ((3, 9), (10, 99), (10, 99), (100, 989), (100, 989))
_SLOTS = 20


def operands(random: Random, part: Part, operation: str, numbers: Numbers) -> tuple[Decimal, Decimal]:
    """Two numbers of the part; the first is the larger one where `operation` takes away."""
    while True:
        a, b = _draw(random, numbers)
        if operation == "-" and a < b:
            a, b = b, a
        if a != b and part_of(a, b) == part:
            return a, b


def part_of(a: Decimal, b: Decimal) -> Part:
    """The part that may ask about these two numbers, in whichever order."""
    low, high = sorted((int(a * 100), int(b * 100)))
    slot = (low * 7919 + high * 104729) // 7 % _SLOTS
    for place, part in enumerate(PARTS):
        if slot < round(sum(SHARES[: place + 1]) * _SLOTS):
            return part
    raise AssertionError("SHARES do not add up to one")


def _draw(random: Random, numbers: Numbers) -> tuple[Decimal, Decimal]:
    if numbers == "money":
        return _price(random), _price(random)
    if numbers == "rate":
        return Decimal(random.randint(3, 60)), Decimal(random.randint(3, 99))
    if numbers == "share":
        b = random.randint(3, 48)
        return Decimal(b * random.randint(3, 60) if random.random() < 0.5 else random.randint(50, 989)), Decimal(b)
    return Decimal(random.randint(*random.choice(SIZES))), Decimal(random.randint(*random.choice(SIZES)))


def _price(random: Random) -> Decimal:
    return Decimal(random.randint(1, 60)) + Decimal(random.choice((0, 25, 50, 75, 10, 20, 90, 99))) / 100


def apply(a: Decimal, operation: str, b: Decimal) -> str:
    """The result as the calculator words it: two decimals at most, integers without."""
    value = {"+": a + b, "-": a - b, "*": a * b, "/": a / b}[operation]
    return number_text(value.quantize(Decimal("0.01"), ROUND_HALF_UP))


def number_text(value: Decimal) -> str:
    """`12` for 12.00, else two decimals."""
    return str(int(value)) if value == value.to_integral_value() else f"{value:.2f}"
