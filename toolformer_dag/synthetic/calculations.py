"""Tell stories that a calculation helps with; no pair of operands is used in two parts of the world."""

from collections.abc import Callable, Mapping
from decimal import ROUND_HALF_UP, Decimal
from random import Random
from typing import NamedTuple

from toolformer_dag.synthetic.sentences import Phenomenon, typed_question
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

SIZES = ((3, 9), (10, 99), (100, 989), (1000, 9899))
"""Ranges of counts."""
SIZE_WEIGHTS = (4, 9, 8, 2)
"""How often each of SIZES is drawn from."""
_SLOTS = 20
"""Into as many slots the pairs of operands are dealt, and these to the parts of the world."""
_PERCENTS = (*range(1, 11), *range(10, 100, 5), 12, 18, 22, 33, 48, 64, 72)
_CONSTANTS: Mapping[Numbers, int] = {"half": 2, "third": 3, "quarter": 4, "double": 2, "triple": 3}
"""The second operand where words stand for it."""


def operands(random: Random, part: WorldPart, operation: Operation, numbers: Numbers) -> tuple[Decimal, Decimal]:
    """Draw two different numbers for a calculation; for `-` the first is the larger.

    part: of the world, such as "pretraining". Each pair of numbers belongs to one part alone, so numbers are drawn
    until they are of this one. numbers: what kind of numbers, such as "prices".
    """
    while True:
        a, b = _DRAW_OPERANDS[numbers](random)
        if operation == "-" and a < b:
            a, b = b, a
        if a != b and part_of(a, b) == part:
            return a, b


def part_of(a: Decimal, b: Decimal) -> WorldPart:
    """Return the part that may ask about these two numbers, in either order."""
    low, high = sorted((int(a * 100), int(b * 100)))
    slot = (low * 7919 + high * 104729) // 7 % _SLOTS
    return part_of_slot(slot, _SLOTS)


def _count(random: Random) -> Decimal:
    return Decimal(random.randint(*random.choices(SIZES, SIZE_WEIGHTS)[0]))


def _price(random: Random) -> Decimal:
    return Decimal(random.randint(1, 89)) + Decimal(random.choice((0, 0, 0, 25, 50, 75, 10, 20, 90, 99))) / 100


def _distance(random: Random) -> Decimal:
    return Decimal(random.randint(3, 899)) + Decimal(random.choice((0, 0, 0, 5))) / 10


def _share(random: Random) -> tuple[Decimal, Decimal]:
    """Draw a dividend and a divisor; half of the quotients are whole."""
    divisor = random.randint(3, 48)
    is_whole = random.random() < 0.5
    dividend = divisor * random.randint(3, 60) if is_whole else random.randint(50, 989)
    return Decimal(dividend), Decimal(divisor)


def _count_and(constant: int) -> Callable[[Random], tuple[Decimal, Decimal]]:
    """Return a function that draws a count, whose second operand is always this constant."""
    return lambda random: (_count(random), Decimal(constant))


_DRAW_OPERANDS: Mapping[Numbers, Callable[[Random], tuple[Decimal, Decimal]]] = {
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
    **{name: _count_and(constant) for name, constant in _CONSTANTS.items()},
}
"""Draws two operands, by the kind of numbers that a story is about."""


def result_of(a: Decimal, operation: Operation, b: Decimal) -> str:
    """Return the result as the calculator prints it: at most two decimals, without trailing zeros."""
    results = {"+": a + b, "-": a - b, "*": a * b, "/": a / b, "%": a * b / 100}
    rounded = results[operation].quantize(Decimal("0.01"), ROUND_HALF_UP)
    return f"{rounded:f}".rstrip("0").rstrip(".")


def written(random: Random, number: Decimal) -> str:
    """Write the number as a page would: `12`, `2.50`, `1,240` or `1240`."""
    if number == number.to_integral_value():
        has_commas = random.random() < 0.5
        return f"{int(number):,}" if has_commas else str(int(number))
    needs_two_decimals = number * 10 % 1
    if needs_two_decimals or random.random() < 0.5:
        return f"{number:.2f}"
    return f"{number:.1f}"


QUESTION_SHARE = 0.45
NESTED_SHARE = 0.15  # of the sums in one template: three numbers, with brackets or an average
SUM_SHARE = 0.5  # of the seen wordings: those of somebody who asks, in one template


def calculation(random: Random, part: WorldPart, wordings: WordingSet) -> Phenomenon:
    """Write a text whose last number is the result of a calculation with numbers in it, for a calculator to help with.

    It is a story ("Ada had 12 apples and got 30 more ...") or, among the seen wordings, often a bare sum that somebody
    asks for. wordings: "seen" in training, or "unseen" ones.
    """
    is_sum = wordings == "seen" and random.random() < SUM_SHARE
    if is_sum and random.random() < NESTED_SHARE:
        return _nested(random, part)
    if is_sum:
        scheme = _sum_scheme(random)
    else:
        schemes_of_operation = random.choice(schemes(wordings))
        scheme = random.choice(schemes_of_operation)
    return _story(random, part, wordings, scheme)


def _story(random: Random, part: WorldPart, wordings: WordingSet, scheme: Scheme) -> Phenomenon:
    """Write a story: a setup with two numbers, and a question or an ending that leads to the result.

    As "Ada had 12 apples and got 30 more. How many has she?", before the call `12 + 30`. A scheme holds the templates
    of a kind of story; one without setups has single sentences. The templates, the numbers and the words in the slots,
    such as names and things, are drawn at random.
    """
    a, b = operands(random, part, scheme.operation, scheme.numbers)
    slots = _slots(random, part)
    slots["a"] = written(random, a)
    slots["b"] = written(random, b)
    template = _story_template(random, scheme)
    before = template.text.format(**slots)
    if template.is_question:
        before = typed_question(random, before)
    unit = scheme.unit.format(**slots)
    ending = _after_result(random, unit).format(m=slots["m"])  # m: the second person of the story
    result = result_of(a, scheme.operation, b)
    return Phenomenon(
        tool="calculator",
        before=before,
        after=f" {result}{ending}",
        input=_expression(scheme.operation, template.text, slots),
        result=result,
        answer=result,
        wording=f"calculator/{scheme.operation} {scheme.name}/{wordings}/{template.key}",
    )


class _StoryTemplate(NamedTuple):
    """The template of a story up to its result."""

    text: str  # with slots such as `{a}`
    is_question: bool
    key: str  # the indexes of its parts in the scheme: `2.q0` is the third setup with the first question, e an ending


def _story_template(random: Random, scheme: Scheme) -> _StoryTemplate:
    """Draw a setup of the scheme, where it has some, and a question or an ending, and join them."""
    setup_index = random.randrange(len(scheme.setups)) if scheme.setups else 0
    is_question = random.random() < QUESTION_SHARE
    last_sentences = scheme.questions if is_question else scheme.endings
    last_index = random.randrange(len(last_sentences))

    text = last_sentences[last_index]
    key = f"q{last_index}" if is_question else f"e{last_index}"
    if scheme.setups:
        separator = ". " if is_question else ""
        text = scheme.setups[setup_index] + separator + text
        key = f"{setup_index}.{key}"
    return _StoryTemplate(text, is_question, key)


def _nested(random: Random, part: WorldPart) -> Phenomenon:
    """Write a question or statement with a calculation of three numbers: `(3 + 4) * 5` or an average."""
    a, b = operands(random, part, "+", "count")
    c = random.choice([number for number in range(2, 30) if number not in (a, b)])
    calculation = _in_brackets(random, a, b, c) if random.random() < 0.5 else _average(random, a, b, c)
    text = calculation.text
    before = typed_question(random, text) if text.endswith("?") else text
    ending = random.choice((".", ".", ", nothing more."))
    return Phenomenon(
        tool="calculator",
        before=before,
        after=f" {calculation.result}{ending}",
        input=calculation.expression,
        result=calculation.result,
        answer=calculation.result,
        wording="calculator/seen/nested",
    )


class _NestedCalculation(NamedTuple):
    """A calculation with three numbers."""

    text: str  # what stands before the result
    expression: str  # the input of the call
    result: str


def _in_brackets(random: Random, a: Decimal, b: Decimal, c: int) -> _NestedCalculation:
    """Write a product of `c` and the sum or difference of the other numbers, such as `(3 + 4) * 5`.

    The text has it with or without spaces; the call, `expression`, always has them.
    """
    expression = random.choice((f"({a} + {b}) * {c}", f"{c} * ({a} + {b})", f"({max(a, b)} - {min(a, b)}) * {c}"))
    in_brackets = abs(a - b) if " - " in expression else a + b
    has_spaces = random.random() < 0.7
    shown = expression if has_spaces else expression.replace(" ", "")
    question = random.choice(word_list("calculator", "bracket_questions"))
    return _NestedCalculation(question.format(x=shown), expression, result=str(in_brackets * c))


def _average(random: Random, a: Decimal, b: Decimal, c: int) -> _NestedCalculation:
    """Write the average of three numbers."""
    question = random.choice(word_list("calculator", "average_questions"))
    return _NestedCalculation(
        text=question.format(a=a, b=b, c=c),
        expression=f"({a} + {b} + {c}) / 3",
        result=result_of(a + b + c, "/", Decimal(3)),
    )


def _sum_scheme(random: Random) -> Scheme:
    """Draw a calculation in a single template; those with more wordings are drawn more often."""
    operation = random.choices(("+", "-", "*", "/", "%"), (5, 5, 5, 6, 4))[0]
    candidates = [scheme for scheme in sums() if scheme.operation == operation]
    wording_counts = [len(scheme.questions) + len(scheme.endings) for scheme in candidates]
    return random.choices(candidates, wording_counts)[0]


def _after_result(random: Random, unit: str) -> str:
    """Draw what follows a result, with its unit; without a unit, what needs none. It may have a slot `{m}`."""
    endings = [ending for ending in word_list("tails", "calculator") if unit or "{unit}" not in ending]
    return random.choice(endings).replace("{unit}", unit)


def _expression(operation: str, template: str, slots: Mapping[str, str]) -> str:
    """Return the call's input; the operands of + and * come in the order in which the text names them."""
    if operation == "%":
        return f"{slots['b']} * {slots['a']} / 100"
    names_b_first = 0 <= template.find("{b}") < template.index("{a}")
    if operation in "+*" and names_b_first:
        return f"{slots['b']} {operation} {slots['a']}"
    return f"{slots['a']} {operation} {slots['b']}"


_SLOT_LISTS = {"it": "things", "box": "containers", "event": "events", "gets": "gets", "loses": "loses"}
"""Slots of stories whose values are drawn from a list of words."""


def _slots(random: Random, part: WorldPart) -> dict[str, str]:
    """Return a word for each slot of a story's templates, drawn at random, as {"n": "Ada", "it": "apples", ...}.

    n and m are two persons, t, u and w three towns, `day` and `other` two days of the week; the rest is in _SLOT_LISTS.
    The numbers, slots a and b, are drawn by the caller. part: the part of the world whose towns are named.
    """
    first_person, second_person = random.sample(word_list("names", "first_names"), 2)
    towns = random.sample(name_pool("town", part), 3)
    day, other_day = random.sample(WEEK_DAYS, 2)
    slots = {slot: random.choice(word_list("calculator", name)) for slot, name in _SLOT_LISTS.items()}
    slots |= {"n": first_person, "m": second_person}
    slots |= {"t": towns[0], "u": towns[1], "w": towns[2]}
    slots |= {"day": day, "other": other_day}
    return slots
