"""Write stories that a calculation helps with; each pair of operands belongs to one part of the world alone."""

from collections.abc import Callable, Mapping
from decimal import ROUND_HALF_UP, Decimal
from random import Random
from typing import NamedTuple

from toolformer_dag.synthetic.sentences import Phenomenon, type_question
from toolformer_dag.synthetic.today import WEEK_DAYS
from toolformer_dag.synthetic.wordings import (
    Numbers,
    Operation,
    Scheme,
    WordingSet,
    WorldPart,
    get_name_pool,
    get_part_of_slot,
    get_schemes,
    get_word_list,
    sums,
)

SIZES = ((3, 9), (10, 99), (100, 989), (1000, 9899))
"""Ranges of counts."""
SIZE_WEIGHTS = (4, 9, 8, 2)
"""How often each of SIZES is drawn from."""
_SLOTS = 20
"""The pairs of operands are hashed into so many slots, which are dealt to the parts of the world."""
_PERCENTS = (*range(1, 11), *range(10, 100, 5), 12, 18, 22, 33, 48, 64, 72)
_CONSTANTS: Mapping[Numbers, int] = {"half": 2, "third": 3, "quarter": 4, "double": 2, "triple": 3}
"""The second operand of the kinds of numbers in which a word stands for it."""


def operands(random: Random, part: WorldPart, operation: Operation, numbers: Numbers) -> tuple[Decimal, Decimal]:
    """Draw two different numbers for a calculation; for `-` the first is the larger.

    part: the part of the synthetic world to which the pair must belong; each pair belongs to one of three. numbers: the
    kind of numbers, such as "prices".
    """
    draw = _DRAW_OPERANDS[numbers]
    while True:
        first, second = draw(random)
        if first == second or get_part_of_numbers(first, second) != part:
            continue
        if operation == "-":
            return max(first, second), min(first, second)
        return first, second


def get_part_of_numbers(a: Decimal, b: Decimal) -> WorldPart:
    """Return the part of the world that two numbers belong to, in either order."""
    hundredths = [int(a * 100), int(b * 100)]
    low, high = sorted(hundredths)
    mixed = (low * 7919 + high * 104729) // 7
    return get_part_of_slot(mixed % _SLOTS, _SLOTS)


def _draw_count(random: Random) -> Decimal:
    """Draw a count, first its size and then the number."""
    [size] = random.choices(SIZES, SIZE_WEIGHTS)
    return Decimal(random.randint(*size))


def _draw_price(random: Random) -> Decimal:
    """Draw a price below 90 dollars; three in ten have no cents."""
    dollars = Decimal(random.randint(1, 89))
    cents = Decimal(random.choice((0, 0, 0, 25, 50, 75, 10, 20, 90, 99)))
    return dollars + cents / 100


def _draw_distance(random: Random) -> Decimal:
    """Draw a distance below 900; every fourth ends in a half."""
    whole = Decimal(random.randint(3, 899))
    tenths = Decimal(random.choice((0, 0, 0, 5)))
    return whole + tenths / 10


def _draw_share(random: Random) -> tuple[Decimal, Decimal]:
    """Draw a dividend and a divisor; about half of the quotients are whole."""
    divisor = random.randint(3, 48)
    is_whole = random.random() < 0.5
    dividend = divisor * random.randint(3, 60) if is_whole else random.randint(50, 989)
    return Decimal(dividend), Decimal(divisor)


def _build_draw_with_constant(constant: int) -> Callable[[Random], tuple[Decimal, Decimal]]:
    """Return a function that draws a count as the first operand; the second is the constant."""
    return lambda random: (_draw_count(random), Decimal(constant))


_DRAW_OPERANDS: Mapping[Numbers, Callable[[Random], tuple[Decimal, Decimal]]] = {
    "count": lambda random: (_draw_count(random), _draw_count(random)),
    "money": lambda random: (_draw_price(random), _draw_price(random)),
    "distance": lambda random: (_draw_distance(random), _draw_distance(random)),
    "rate": lambda random: (Decimal(random.randint(3, 60)), Decimal(random.randint(3, 99))),
    "prices": lambda random: (Decimal(random.randint(2, 30)), _draw_price(random)),
    "share": _draw_share,
    "percent": lambda random: (
        Decimal(random.choice(_PERCENTS)),
        Decimal(random.choice((1, 1, 5, 10, 100)) * random.randint(2, 99)),
    ),
    **{name: _build_draw_with_constant(constant) for name, constant in _CONSTANTS.items()},
}
"""Draws two operands, by the kind of numbers that a story is about."""


def result_of(a: Decimal, operation: Operation, b: Decimal) -> str:
    """Return the result as the calculator prints it: at most two decimals, without trailing zeros. b: never 0.

    As an example, "2.5" for 5 / 2, and "10" for 5 percent of 200, where a is 5.
    """
    results = {
        "+": a + b,
        "-": a - b,
        "*": a * b,
        "/": a / b,
        "%": a * b / 100,
    }
    rounded = results[operation].quantize(Decimal("0.01"), ROUND_HALF_UP)
    with_two_decimals = f"{rounded:f}"
    return with_two_decimals.rstrip("0").rstrip(".")


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
    """Write a text that ends in the result of a calculation with the numbers in it.

    It is a story ("Ada had 12 apples and got 30 more ...") or, with "seen" wordings only, often a bare sum such as
    "What is 12 + 30?". A scheme is the templates of one kind of story or sum, with its operation.
    """
    is_sum = wordings == "seen" and random.random() < SUM_SHARE
    if is_sum and random.random() < NESTED_SHARE:
        return _write_nested_calculation(random, part)
    if is_sum:
        scheme = _draw_sum_scheme(random)
    else:
        schemes_of_operation = random.choice(get_schemes(wordings))
        scheme = random.choice(schemes_of_operation)
    return _write_story(random, part, wordings, scheme)


def _write_story(random: Random, part: WorldPart, wordings: WordingSet, scheme: Scheme) -> Phenomenon:
    """Write a story or a bare sum, with a call of the calculator before its result.

    As an example, "Ada had 12 apples. Then Tom gave Ada 30 more. What is the total?" before the call, its input
    "12 + 30", its result "42", and the ending " apples in all.".

    scheme: the templates of one kind of story or sum, with its operation and kind of numbers.
    """
    a, b = operands(random, part, scheme.operation, scheme.numbers)
    slots = {**_draw_slots(random, part), "a": written(random, a), "b": written(random, b)}
    template = _draw_story_template(random, scheme)
    before = _type_if_question(random, template.text.format(**slots), is_question=template.is_question)
    ending = _draw_ending(random, scheme, slots)
    expression = _build_expression(scheme.operation, template.text, slots)
    result = result_of(a, scheme.operation, b)
    wording = f"calculator/{scheme.operation} {scheme.name}/{wordings}/{template.key}"
    return _build_phenomenon(before=before, ending=ending, expression=expression, result=result, wording=wording)


def _type_if_question(random: Random, text: str, *, is_question: bool) -> str:
    """Return a question as somebody might type it; a statement comes back unchanged."""
    return type_question(random, text) if is_question else text


def _build_phenomenon(*, before: str, ending: str, expression: str, result: str, wording: str) -> Phenomenon:
    """Return a text with a call of the calculator before its result.

    - `before`, `ending`: the text before and after the result
    - `expression`: the input of the call
    - `wording`: names the templates of the text
    """
    return Phenomenon(
        tool="calculator",
        before=before,
        after=f" {result}{ending}",
        input=expression,
        result=result,
        answer=result,
        wording=wording,
    )


class _StoryTemplate(NamedTuple):
    """The template of a story up to its result, with slots such as `{a}`."""

    text: str
    is_question: bool
    key: str
    """The indexes of its parts in the scheme: `2.q0` is the third setup with the first question, e an ending."""


def _draw_story_template(random: Random, scheme: Scheme) -> _StoryTemplate:
    """Draw a template: a setup, if the scheme has any, and a question or an ending."""
    if not scheme.setups:
        return _draw_last_sentence(random, scheme)
    setup_index = random.randrange(len(scheme.setups))
    last = _draw_last_sentence(random, scheme)
    separator = ". " if last.is_question else ""
    text = f"{scheme.setups[setup_index]}{separator}{last.text}"
    return _StoryTemplate(text, last.is_question, key=f"{setup_index}.{last.key}")


def _draw_last_sentence(random: Random, scheme: Scheme) -> _StoryTemplate:
    """Draw a question or an ending of a scheme."""
    is_question = random.random() < QUESTION_SHARE
    sentences = scheme.questions if is_question else scheme.endings
    index = random.randrange(len(sentences))
    key = f"q{index}" if is_question else f"e{index}"
    return _StoryTemplate(sentences[index], is_question, key)


def _write_nested_calculation(random: Random, part: WorldPart) -> Phenomenon:
    """Write a question or statement with a calculation of three numbers, and a call of the calculator for it.

    As an example, "What is (3 + 4) * 5?" before the call, its input "(3 + 4) * 5" and its result "35"; or an average.
    """
    a, b = operands(random, part, "+", "count")
    c = random.choice([number for number in range(2, 30) if number not in (a, b)])
    write_calculation = _write_bracket_calculation if random.random() < 0.5 else _write_average
    nested = write_calculation(random, a, b, c)
    return _build_phenomenon(
        before=_type_if_question(random, nested.text, is_question=nested.text.endswith("?")),
        ending=random.choice((".", ".", ", nothing more.")),
        expression=nested.expression,
        result=nested.result,
        wording="calculator/seen/nested",
    )


class _NestedCalculation(NamedTuple):
    """A calculation with three numbers: the text before its result, and the input of the call."""

    text: str
    expression: str
    result: str


def _write_bracket_calculation(random: Random, a: Decimal, b: Decimal, c: int) -> _NestedCalculation:
    """Write a product with a sum or difference in brackets, such as `(3 + 4) * 5`, in the text often without spaces."""
    results = _compute_products(a, b, c)
    expression = random.choice(tuple(results))
    has_spaces = random.random() < 0.7
    shown = expression if has_spaces else expression.replace(" ", "")
    question = random.choice(get_word_list("calculator", "bracket_questions"))
    return _NestedCalculation(question.format(x=shown), expression, result=str(results[expression]))


def _compute_products(a: Decimal, b: Decimal, c: int) -> dict[str, Decimal]:
    """Return the results of the products of `c` with the sum and the difference of two numbers, by expression."""
    smaller, larger = sorted((a, b))
    return {
        f"({a} + {b}) * {c}": (a + b) * c,
        f"{c} * ({a} + {b})": (a + b) * c,
        f"({larger} - {smaller}) * {c}": (larger - smaller) * c,
    }


def _write_average(random: Random, a: Decimal, b: Decimal, c: int) -> _NestedCalculation:
    """Write a question or statement about the average of three numbers."""
    question = random.choice(get_word_list("calculator", "average_questions"))
    return _NestedCalculation(
        text=question.format(a=a, b=b, c=c),
        expression=f"({a} + {b} + {c}) / 3",
        result=result_of(a + b + c, "/", Decimal(3)),
    )


def _draw_sum_scheme(random: Random) -> Scheme:
    """Draw a scheme of bare sums; a scheme with more wordings is drawn more often."""
    [operation] = random.choices(("+", "-", "*", "/", "%"), (5, 5, 5, 6, 4))
    candidates = [scheme for scheme in sums() if scheme.operation == operation]
    wording_counts = [len(scheme.questions) + len(scheme.endings) for scheme in candidates]
    return random.choices(candidates, wording_counts)[0]


def _draw_ending(random: Random, scheme: Scheme, slots: Mapping[str, str]) -> str:
    """Draw what follows the result of a story: its unit, if it has one, and the end of the sentence."""
    unit = scheme.unit.format(**slots)
    endings = [ending for ending in get_word_list("tails", "calculator") if unit or "{unit}" not in ending]
    ending = random.choice(endings)
    second_person = slots["m"]
    return ending.replace("{unit}", unit).format(m=second_person)


def _build_expression(operation: str, template: str, slots: Mapping[str, str]) -> str:
    """Return the call's input; operands of `+` and `*` are in the order of the text."""
    if operation == "%":
        return f"{slots['b']} * {slots['a']} / 100"
    names_b_first = 0 <= template.find("{b}") < template.index("{a}")
    if operation in "+*" and names_b_first:
        return f"{slots['b']} {operation} {slots['a']}"
    return f"{slots['a']} {operation} {slots['b']}"


_SLOT_LISTS = {"it": "things", "box": "containers", "event": "events", "gets": "gets", "loses": "loses"}
"""Slots of stories whose values are drawn from a list of words."""


def _draw_slots(random: Random, part: WorldPart) -> dict[str, str]:
    """Draw a word for each placeholder of the stories' templates but the numbers: {"n": "Ada", "it": "apples", ...}.

    The templates name two persons {n} and {m}, three towns {t}, {u} and {w}, two weekdays {day} and {other}; the others
    are those of _SLOT_LISTS.
    """
    persons = random.sample(get_word_list("names", "first_names"), 2)
    towns = random.sample(get_name_pool("town", part), 3)
    days = random.sample(WEEK_DAYS, 2)
    slots = {slot: random.choice(get_word_list("calculator", name)) for slot, name in _SLOT_LISTS.items()}
    slots |= zip(("n", "m"), persons, strict=True)
    slots |= zip(("t", "u", "w"), towns, strict=True)
    slots |= zip(("day", "other"), days, strict=True)
    return slots
