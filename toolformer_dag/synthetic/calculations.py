"""Tell stories that a calculation helps with; no pair of operands is used in two parts of the world."""

from collections.abc import Callable, Mapping
from decimal import ROUND_HALF_UP, Decimal
from random import Random

from toolformer_dag.synthetic.sentences import Phenomenon, asked
from toolformer_dag.synthetic.today import WEEK_DAYS
from toolformer_dag.synthetic.wordings import (
    Numbers,
    Operation,
    Scheme,
    WordingSet,
    WorldPart,
    name_pool,
    part_of_slot,
    schemes,
    sums,
    word_list,
)

SIZES, SIZE_WEIGHTS = ((3, 9), (10, 99), (100, 989), (1000, 9899)), (4, 9, 8, 2)
_SLOTS = 20
_PERCENTS = (*range(1, 11), *range(10, 100, 5), 12, 18, 22, 33, 48, 64, 72)
_CONSTANTS: Mapping[Numbers, int] = {"half": 2, "third": 3, "quarter": 4, "double": 2, "triple": 3}


def operands(random: Random, part: WorldPart, operation: Operation, numbers: Numbers) -> tuple[Decimal, Decimal]:
    """Draw two numbers of the part; for `-` the first is the larger."""
    while True:
        a, b = _DRAWS[numbers](random)
        if operation == "-" and a < b:
            a, b = b, a
        if a != b and part_of(a, b) == part:
            return a, b


def part_of(a: Decimal, b: Decimal) -> WorldPart:
    """Return the part that may ask about these two numbers, in either order."""
    low, high = sorted((int(a * 100), int(b * 100)))
    return part_of_slot((low * 7919 + high * 104729) // 7 % _SLOTS, _SLOTS)


def _count(random: Random) -> Decimal:
    return Decimal(random.randint(*random.choices(SIZES, SIZE_WEIGHTS)[0]))


def _price(random: Random) -> Decimal:
    return Decimal(random.randint(1, 89)) + Decimal(random.choice((0, 0, 0, 25, 50, 75, 10, 20, 90, 99))) / 100


def _distance(random: Random) -> Decimal:
    return Decimal(random.randint(3, 899)) + Decimal(random.choice((0, 0, 0, 5))) / 10


def _share(random: Random) -> tuple[Decimal, Decimal]:
    """Draw a dividend and a divisor; half of the quotients are whole."""
    divisor, whole = random.randint(3, 48), random.random() < 0.5
    return Decimal(divisor * random.randint(3, 60) if whole else random.randint(50, 989)), Decimal(divisor)


def _part(number: int) -> Callable[[Random], tuple[Decimal, Decimal]]:
    return lambda random: (_count(random), Decimal(number))


_DRAWS: Mapping[Numbers, Callable[[Random], tuple[Decimal, Decimal]]] = {
    "count": lambda random: (_count(random), _count(random)),
    "money": lambda random: (_price(random), _price(random)),
    "distance": lambda random: (_distance(random), _distance(random)),
    "rate": lambda random: (Decimal(random.randint(3, 60)), Decimal(random.randint(3, 99))),
    "prices": lambda random: (Decimal(random.randint(2, 30)), _price(random)),
    "share": _share,
    "percent": lambda random: (
        Decimal(random.choice(_PERCENTS)),
        Decimal(random.choice((1, 1, 5, 10, 100)) * random.randint(2, 99)),
    ),
    **{name: _part(number) for name, number in _CONSTANTS.items()},
}


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
NESTED_SHARE = 0.15  # of the sums in one template: three numbers, with brackets or an average
SUM_SHARE = 0.5  # of the seen wordings: those of somebody who asks, in one template


def calculation(random: Random, part: WorldPart, wordings: WordingSet) -> Phenomenon:
    """Write a sum or a story whose last number is the result of an operation on numbers in it."""
    as_sum = wordings == "seen" and random.random() < SUM_SHARE
    if as_sum and random.random() < NESTED_SHARE:
        return _nested(random, part)
    return _told(random, part, wordings, _sum(random) if as_sum else random.choice(random.choice(schemes(wordings))))


def _told(random: Random, part: WorldPart, wordings: WordingSet, scheme: Scheme) -> Phenomenon:
    a, b = operands(random, part, scheme.operation, scheme.numbers)
    slots = _slots(random, part) | {"a": written(random, a), "b": written(random, b)}
    setup = random.randrange(len(scheme.setups)) if scheme.setups else 0
    is_question = random.random() < QUESTION_SHARE
    ends = scheme.questions if is_question else scheme.endings
    end = random.randrange(len(ends))
    template, wording = ends[end], f"{'q' if is_question else 'e'}{end}"
    if scheme.setups:
        template, wording = scheme.setups[setup] + (". " if is_question else "") + template, f"{setup}.{wording}"
    before = template.format(**slots)
    if is_question:
        before = asked(random, before)
    tail = _tail(random, scheme.unit.format(**slots)).format(m=slots["m"])
    result = result_of(a, scheme.operation, b)
    return Phenomenon(
        tool="calculator",
        before=before,
        after=f" {result}{tail}",
        input=_expression(scheme.operation, template, slots),
        result=result,
        answer=result,
        wording=f"calculator/{scheme.operation} {scheme.name}/{wordings}/{wording}",
    )


def _nested(random: Random, part: WorldPart) -> Phenomenon:
    """Write a calculation with three numbers: in brackets as it stands, or an average."""
    a, b = operands(random, part, "+", "count")
    c = random.choice([number for number in range(2, 30) if number not in (a, b)])
    if random.random() < 0.5:
        asked_for = random.choice((f"({a} + {b}) * {c}", f"{c} * ({a} + {b})", f"({max(a, b)} - {min(a, b)}) * {c}"))
        exact = (abs(a - b) if " - " in asked_for else a + b) * c
        shown = asked_for if random.random() < 0.7 else asked_for.replace(" ", "")
        templates, number = word_list("calculator", "bracket_questions"), f"{exact}"
        before = random.choice(templates).format(x=shown)
    else:
        asked_for, number = f"({a} + {b} + {c}) / 3", result_of(a + b + c, "/", Decimal(3))
        before = random.choice(word_list("calculator", "average_questions")).format(a=a, b=b, c=c)
    return Phenomenon(
        tool="calculator",
        before=asked(random, before) if before.endswith("?") else before,
        after=f" {number}{random.choice(('.', '.', ', nothing more.'))}",
        input=asked_for,
        result=number,
        answer=number,
        wording="calculator/seen/nested",
    )


def _sum(random: Random) -> Scheme:
    operation = random.choices(("+", "-", "*", "/", "%"), (5, 5, 5, 6, 4))[0]
    own = [scheme for scheme in sums() if scheme.operation == operation]
    return random.choices(own, [len(each.questions) + len(each.endings) for each in own])[0]


def _tail(random: Random, unit: str) -> str:
    tails = [tail for tail in word_list("tails", "calculator") if unit or "{unit}" not in tail]
    return random.choice(tails).replace("{unit}", unit)


def _expression(operation: str, template: str, slots: Mapping[str, str]) -> str:
    """Return the call's input; the operands of + and * come in the order in which the text names them."""
    if operation == "%":
        return f"{slots['b']} * {slots['a']} / 100"
    swapped = operation in "+*" and 0 <= template.find("{b}") < template.index("{a}")
    first, second = ("b", "a") if swapped else ("a", "b")
    return f"{slots[first]} {operation} {slots[second]}"


_SLOT_LISTS = {"it": "things", "box": "containers", "event": "events", "gets": "gets", "loses": "loses"}


def _slots(random: Random, part: WorldPart) -> dict[str, str]:
    n, m = random.sample(word_list("names", "first_names"), 2)
    t, u, w = random.sample(name_pool("town", part), 3)
    day, other = random.sample(WEEK_DAYS, 2)
    chosen = {slot: random.choice(word_list("calculator", name)) for slot, name in _SLOT_LISTS.items()}
    return chosen | {"n": n, "m": m, "t": t, "u": u, "w": w, "day": day, "other": other}
