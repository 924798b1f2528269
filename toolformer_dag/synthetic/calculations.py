"""Tell stories that a calculation helps with; no pair of operands is used in two parts of the world."""

from collections.abc import Mapping
from decimal import ROUND_HALF_UP, Decimal
from random import Random

from toolformer_dag.synthetic.names import WorldPart, first_names, name_pool, part_of_slot
from toolformer_dag.synthetic.sentences import Phenomenon, asked
from toolformer_dag.synthetic.today import WEEK_DAYS
from toolformer_dag.synthetic.wordings import Numbers, Operation, WordingSet, schemes, sums, word_list

SIZES, SIZE_WEIGHTS = ((3, 9), (10, 99), (100, 989), (1000, 9899)), (4, 9, 8, 2)
_SLOTS = 20
_PERCENTS = (*range(1, 11), *range(10, 100, 5), 12, 18, 22, 33, 48, 64, 72)
_CONSTANTS: Mapping[Numbers, int] = {"half": 2, "third": 3, "quarter": 4, "double": 2, "triple": 3}


def operands(random: Random, part: WorldPart, operation: Operation, numbers: Numbers) -> tuple[Decimal, Decimal]:
    """Draw two numbers of the part; for `-` the first is the larger."""
    while True:
        a, b = _draw(random, numbers)
        if operation == "-" and a < b:
            a, b = b, a
        if a != b and part_of(a, b) == part:
            return a, b


def part_of(a: Decimal, b: Decimal) -> WorldPart:
    """Return the part that may ask about these two numbers, in either order."""
    low, high = sorted((int(a * 100), int(b * 100)))
    return part_of_slot((low * 7919 + high * 104729) // 7 % _SLOTS, _SLOTS)


def _draw(random: Random, numbers: Numbers) -> tuple[Decimal, Decimal]:
    if numbers == "money":
        return _price(random), _price(random)
    if numbers == "distance":
        return _distance(random), _distance(random)
    if numbers == "rate":
        return Decimal(random.randint(3, 60)), Decimal(random.randint(3, 99))
    if numbers == "prices":
        return Decimal(random.randint(2, 30)), _price(random)
    if numbers == "share":
        return _dividend(random)
    if numbers == "percent":
        return Decimal(random.choice(_PERCENTS)), Decimal(random.choice((1, 1, 5, 10, 100)) * random.randint(2, 99))
    return _count(random), Decimal(_CONSTANTS[numbers]) if numbers in _CONSTANTS else _count(random)


def _count(random: Random) -> Decimal:
    return Decimal(random.randint(*random.choices(SIZES, SIZE_WEIGHTS)[0]))


def _price(random: Random) -> Decimal:
    return Decimal(random.randint(1, 89)) + Decimal(random.choice((0, 0, 0, 25, 50, 75, 10, 20, 90, 99))) / 100


def _distance(random: Random) -> Decimal:
    return Decimal(random.randint(3, 899)) + Decimal(random.choice((0, 0, 0, 5))) / 10


def _dividend(random: Random) -> tuple[Decimal, Decimal]:
    """Draw a dividend and a divisor; half of the quotients are whole."""
    divisor = random.randint(3, 48)
    whole = random.random() < 0.5
    return Decimal(divisor * random.randint(3, 60) if whole else random.randint(50, 989)), Decimal(divisor)


def result_of(a: Decimal, operation: Operation, b: Decimal) -> str:
    """Return the result as the calculator prints it: at most two decimals, without trailing zeros."""
    value = {"+": a + b, "-": a - b, "*": a * b, "/": a / b, "%": a * b / 100}[operation].quantize(
        Decimal("0.01"), ROUND_HALF_UP
    )
    return f"{value:f}".rstrip("0").rstrip(".")


def written(random: Random, number: Decimal) -> str:
    """Write the number as a page would: `12`, `2.50`, `1,240` or `1240`."""
    if number != number.to_integral_value():
        return f"{number:.2f}" if number * 10 % 1 or random.random() < 0.5 else f"{number:.1f}"
    return f"{int(number):,}" if random.random() < 0.5 else str(int(number))


QUESTION_SHARE = 0.45
SUM_SHARE = 0.5  # of the seen wordings: those of somebody who asks, in one template


def calculation(random: Random, part: WorldPart, wordings: WordingSet) -> Phenomenon:
    """Write a sum or a story whose last number is the result of an operation on numbers in it."""
    as_sum = wordings == "seen" and random.random() < SUM_SHARE
    return plain_sum(random, part) if as_sum else story(random, part, wordings)


def plain_sum(random: Random, part: WorldPart) -> Phenomenon:
    """Ask for a calculation in a single template, or state it."""
    operation = random.choices(("+", "-", "*", "/", "%"), (5, 5, 5, 6, 4))[0]
    own = [found for found in sums() if found.operation == operation]
    found = random.choices(own, [len(each.questions) + len(each.statements) for each in own])[0]
    a, b = operands(random, part, found.operation, found.numbers)
    slots = _slots(random, part) | {"a": written(random, a), "b": written(random, b)}
    is_question = random.random() < QUESTION_SHARE
    templates = found.questions if is_question else found.statements
    number = random.randrange(len(templates))
    before = templates[number].format(**slots)
    return _calculated(
        random,
        asked(random, before) if is_question else before,
        _expression(found.operation, templates[number], slots),
        result_of(a, found.operation, b),
        found.unit,
        slots,
        f"calculator/{found.operation} {found.name}/seen/{'q' if is_question else 'e'}{number}",
    )


def story(random: Random, part: WorldPart, wordings: WordingSet) -> Phenomenon:
    """Tell a story whose last number is the result of one operation on two numbers in it."""
    scheme = random.choice(random.choice(schemes(wordings)))
    a, b = operands(random, part, scheme.operation, scheme.numbers)
    slots = _slots(random, part) | {"a": written(random, a), "b": written(random, b)}
    setup = random.randrange(len(scheme.setups))
    is_question = random.random() < QUESTION_SHARE
    ends = scheme.questions if is_question else scheme.endings
    end = random.randrange(len(ends))
    template = scheme.setups[setup] + (f". {ends[end]}" if is_question else ends[end])
    before = template.format(**slots)
    return _calculated(
        random,
        asked(random, before) if is_question else before,
        _expression(scheme.operation, template, slots),
        result_of(a, scheme.operation, b),
        scheme.unit,
        slots,
        f"calculator/{scheme.operation} {scheme.name}/{wordings}/{setup}.{'q' if is_question else 'e'}{end}",
    )


def _calculated(
    random: Random, before: str, expression: str, result: str, unit: str, slots: Mapping[str, str], wording: str
) -> Phenomenon:
    tails = [tail for tail in word_list("tails", "calculator") if unit or "{unit}" not in tail]
    tail = random.choice(tails).format(unit=unit.format(**slots), m=slots["m"])
    return Phenomenon("calculator", before, f" {result}{tail}", expression, result, result, wording)


def _expression(operation: str, template: str, slots: Mapping[str, str]) -> str:
    """Return the call's input; the operands of + and * come in the order in which the text names them."""
    if operation == "%":
        return f"{slots['b']} * {slots['a']} / 100"
    swapped = operation in "+*" and 0 <= template.find("{b}") < template.index("{a}")
    first, second = ("b", "a") if swapped else ("a", "b")
    return f"{slots[first]} {operation} {slots[second]}"


_SLOT_LISTS = {"it": "things", "box": "containers", "event": "events", "gets": "gets", "loses": "loses"}


def _slots(random: Random, part: WorldPart) -> dict[str, str]:
    n, m = random.sample(first_names(), 2)
    t, u, w = random.sample(name_pool("town", part), 3)
    day, other = random.sample(WEEK_DAYS, 2)
    chosen = {slot: random.choice(word_list("calculator", name)) for slot, name in _SLOT_LISTS.items()}
    return chosen | {"n": n, "m": m, "t": t, "u": u, "w": w, "day": day, "other": other}
