"""Write stories that a calculation helps with. Each pair of operands belongs to one part of the synthetic world."""

from collections.abc import Callable, Mapping
from decimal import ROUND_HALF_UP, Decimal
from random import Random
from typing import NamedTuple

from toolformer_dag.synthetic.sentences import Phenomenon, make_typed_question
from toolformer_dag.synthetic.today import WEEK_DAYS
from toolformer_dag.synthetic.wordings import (
    NumberKind,
    Operation,
    Scheme,
    WordingSet,
    WorldPart,
    get_name_pool,
    get_part_of_slot,
    get_story_schemes,
    get_sum_schemes,
    get_word_list,
)

COUNT_RANGES = ((3, 9), (10, 99), (100, 989), (1000, 9899))
"""The ranges that counts are drawn from, one for each order of magnitude."""
COUNT_RANGE_WEIGHTS = (4, 9, 8, 2)
"""How often each of COUNT_RANGES is drawn from."""
_SLOT_COUNT = 20
"""The number of slots that the pairs of operands are hashed into. Each slot belongs to a part of the world."""
_PERCENTS = (*range(1, 11), *range(10, 100, 5), 12, 18, 22, 33, 48, 64, 72)
_SECOND_OPERAND_BY_KIND: Mapping[NumberKind, int] = {"half": 2, "third": 3, "quarter": 4, "double": 2, "triple": 3}
"""The second operand of the kinds of numbers in which a word stands for it."""


def draw_operands(
    random: Random, part: WorldPart, operation: Operation, number_kind: NumberKind
) -> tuple[Decimal, Decimal]:
    """Draw two different numbers for a calculation, and draw again until they belong to a part of the world.

    Each pair of numbers belongs to one part only, so that no calculation of the training texts is asked again
    in the evaluation.

    Args:
        random: The source of the draws.
        part: The part of the synthetic world, such as "pretraining".
        operation: What the numbers will be used for. For "-", the larger number comes first.
        number_kind: What the numbers are about, such as "prices" or "percent".

    Returns:
        The first and the second operand.
    """
    draw_pair = _OPERAND_DRAWER_BY_KIND[number_kind]
    while True:
        first, second = draw_pair(random)
        if first == second:
            continue
        if get_part_of_numbers(first, second) != part:
            continue

        if operation == "-":
            return max(first, second), min(first, second)
        return first, second


def get_part_of_numbers(first_number: Decimal, second_number: Decimal) -> WorldPart:
    """Return the part of the synthetic world ("pretraining", "corpus" or "evaluation") of a pair of numbers.

    So no calculation of one part occurs in another. The order of the two numbers does not matter. They have at most
    two decimals.
    """
    hundredths = [int(first_number * 100), int(second_number * 100)]
    low, high = sorted(hundredths)

    # A simple hash: it spreads neighboring pairs over all slots, and the parts share the slots.
    mixed = (low * 7919 + high * 104729) // 7
    return get_part_of_slot(mixed % _SLOT_COUNT, _SLOT_COUNT)


def _draw_count(random: Random) -> Decimal:
    """Draw a whole number from 3 to 9899: first its order of magnitude, then the number."""
    [(lowest, highest)] = random.choices(COUNT_RANGES, COUNT_RANGE_WEIGHTS)
    return Decimal(random.randint(lowest, highest))


def _draw_price(random: Random) -> Decimal:
    """Draw a price from 1 to 89.99 dollars. Three in ten have no cents."""
    dollars = Decimal(random.randint(1, 89))
    cents = Decimal(random.choice((0, 0, 0, 25, 50, 75, 10, 20, 90, 99)))
    return dollars + cents / 100


def _draw_distance(random: Random) -> Decimal:
    """Draw a distance from 3 to 899.5. Every fourth ends in a half."""
    whole = Decimal(random.randint(3, 899))
    tenths = Decimal(random.choice((0, 0, 0, 5)))
    return whole + tenths / 10


def _draw_division_operands(random: Random) -> tuple[Decimal, Decimal]:
    """Draw a dividend and a divisor. About half of the quotients are whole numbers."""
    divisor = random.randint(3, 48)
    has_whole_quotient = random.random() < 0.5
    if has_whole_quotient:
        quotient = random.randint(3, 60)
        dividend = divisor * quotient
    else:
        dividend = random.randint(50, 989)
    return Decimal(dividend), Decimal(divisor)


def _draw_percentage_operands(random: Random) -> tuple[Decimal, Decimal]:
    """Draw a percentage, such as 15, and a whole number to take it from."""
    percentage = random.choice(_PERCENTS)
    factor = random.choice((1, 1, 5, 10, 100))
    whole = factor * random.randint(2, 99)
    return Decimal(percentage), Decimal(whole)


def _build_operand_drawer(second_operand: int) -> Callable[[Random], tuple[Decimal, Decimal]]:
    """Return a function that draws the first operand, a count. The second one is always `second_operand`."""

    def draw_count_and_constant(random: Random) -> tuple[Decimal, Decimal]:
        return _draw_count(random), Decimal(second_operand)

    return draw_count_and_constant


_OPERAND_DRAWER_BY_KIND: Mapping[NumberKind, Callable[[Random], tuple[Decimal, Decimal]]] = {
    "count": lambda random: (_draw_count(random), _draw_count(random)),
    "money": lambda random: (_draw_price(random), _draw_price(random)),
    "distance": lambda random: (_draw_distance(random), _draw_distance(random)),
    "rate": lambda random: (Decimal(random.randint(3, 60)), Decimal(random.randint(3, 99))),
    "prices": lambda random: (Decimal(random.randint(2, 30)), _draw_price(random)),
    "share": _draw_division_operands,
    "percent": _draw_percentage_operands,
    **{kind: _build_operand_drawer(constant) for kind, constant in _SECOND_OPERAND_BY_KIND.items()},
}
"""Draws two operands, by the kind of numbers that a story is about."""


def compute_result(first_operand: Decimal, operation: Operation, second_operand: Decimal) -> str:
    """Calculate, and return the result as the calculator tool prints it.

    It has at most two decimals and no trailing zeros. `a % b` means a percent of b.

    Args:
        first_operand: The number before the operator.
        operation: The operator.
        second_operand: The number after the operator. It must not be 0.

    Example:
        5 / 2 gives "2.5".
        5 % 200 gives "10".
    """
    results = {
        "+": first_operand + second_operand,
        "-": first_operand - second_operand,
        "*": first_operand * second_operand,
        "/": first_operand / second_operand,
        "%": first_operand * second_operand / 100,
    }
    rounded = results[operation].quantize(Decimal("0.01"), ROUND_HALF_UP)
    with_two_decimals = f"{rounded:f}"
    return with_two_decimals.rstrip("0").rstrip(".")


def format_number(random: Random, number: Decimal) -> str:
    """Write a number as a page would, in a random notation.

    Example:
        1240 gives "1,240" or "1240".
        2.5 gives "2.50" or "2.5".
        2.25 always gives "2.25".
    """
    is_whole = number == number.to_integral_value()
    if is_whole:
        has_commas = random.random() < 0.5
        return f"{int(number):,}" if has_commas else str(int(number))

    needs_two_decimals = number * 10 % 1 != 0
    if needs_two_decimals or random.random() < 0.5:
        return f"{number:.2f}"
    return f"{number:.1f}"


QUESTION_SHARE = 0.45
NESTED_SHARE = 0.15  # of the sums in one template: three numbers, with brackets or an average
SUM_SHARE = 0.5  # of the seen wordings: those of somebody who asks, in one template


def write_calculator_phenomenon(random: Random, part: WorldPart, wording_set: WordingSet) -> Phenomenon:
    """Write a text that ends in the result of a calculation with the numbers in it.

    It is a story ("Ada had 12 apples and got 30 more ...") or a bare sum ("What is 12 + 30?"). Only the "seen"
    wordings have bare sums.
    """
    is_sum = wording_set == "seen" and random.random() < SUM_SHARE
    if is_sum and random.random() < NESTED_SHARE:
        return _write_nested_phenomenon(random, part)

    # A scheme is the templates of one kind of story or sum, with its operation.
    if is_sum:
        scheme = _draw_sum_scheme(random)
    else:
        schemes_of_operation = random.choice(get_story_schemes(wording_set))
        scheme = random.choice(schemes_of_operation)
    return _write_story_phenomenon(random, part, wording_set, scheme)


def _write_story_phenomenon(random: Random, part: WorldPart, wording_set: WordingSet, scheme: Scheme) -> Phenomenon:
    """Write a phenomenon, that is, a text with a place where a call helps.

    The text is a story or a bare sum, and the call to the calculator stands before the result.

    Args:
        random: The source of the draws.
        part: The part of the synthetic world that the numbers and towns belong to.
        wording_set: "seen" or "unseen", from which the scheme comes. It becomes part of the wording's name.
        scheme: The templates of one kind of story or sum, with its operation and kind of numbers.

    Example:
        The text "Ada had 12 apples. Then Tom gave Ada 30 more. What is the total?", a call with the
        input "12 + 30" and the result "42", and the text " 42 apples in all.".
    """
    first_operand, second_operand = draw_operands(random, part, scheme.operation, scheme.numbers)
    value_by_slot = _draw_value_by_slot(random, part)
    value_by_slot["a"] = format_number(random, first_operand)
    value_by_slot["b"] = format_number(random, second_operand)

    template = _draw_story_template(random, scheme)
    text_before_call = template.text.format(**value_by_slot)
    if template.is_question:
        # Worded as people type it ("what's"), and perhaps followed by the beginning of an answer ("It is").
        text_before_call = make_typed_question(random, text_before_call)

    return _build_phenomenon(
        text_before_call=text_before_call,
        ending_after_result=_draw_ending(random, scheme, value_by_slot),
        expression=_build_expression(scheme.operation, template.text, value_by_slot),
        result=compute_result(first_operand, scheme.operation, second_operand),
        wording_name=f"calculator/{scheme.operation} {scheme.name}/{wording_set}/{template.part_indexes_key}",
    )


def _build_phenomenon(
    *, text_before_call: str, ending_after_result: str, expression: str, result: str, wording_name: str
) -> Phenomenon:
    """Return a text with a call of the calculator right before its result.

    Args:
        text_before_call: The text up to the result.
        ending_after_result: The text after the result, such as " apples in all.".
        expression: The input of the call, such as "12 + 30".
        result: The result of the call, which the text repeats.
        wording_name: Names the templates of the text.
    """
    return Phenomenon(
        tool="calculator",
        text_before_call=text_before_call,
        text_after_call=f" {result}{ending_after_result}",
        input=expression,
        result=result,
        answer=result,
        wording_name=wording_name,
    )


class _StoryTemplate(NamedTuple):
    """The template of a story up to its result.

    Attributes:
        text: The template, with slots such as `{a}`.
        is_question: Whether it ends in a question.
        part_indexes_key: Tells which parts of the scheme it is made of. "2.q0" is the third setup with the first
            question, and "2.e0" the third setup with the first ending.
    """

    text: str
    is_question: bool
    part_indexes_key: str


def _draw_story_template(random: Random, scheme: Scheme) -> _StoryTemplate:
    """Draw the template of a story: a setup, if the scheme has any, and then a question or an ending.

    Example:
        The first setup "{n} had {a} {it}" and the first question "How many are there?" give
        "{n} had {a} {it}. How many are there?", with "0.q0" as `part_indexes_key`.
    """
    if not scheme.setups:
        return _draw_question_or_ending(random, scheme)

    setup_index = random.randrange(len(scheme.setups))
    setup = scheme.setups[setup_index]
    last = _draw_question_or_ending(random, scheme)

    # An ending continues the sentence of the setup, but a question is a sentence of its own.
    separator = ". " if last.is_question else ""
    return _StoryTemplate(
        text=f"{setup}{separator}{last.text}",
        is_question=last.is_question,
        part_indexes_key=f"{setup_index}.{last.part_indexes_key}",
    )


def _draw_question_or_ending(random: Random, scheme: Scheme) -> _StoryTemplate:
    """Draw one of the questions or endings of a scheme, as a template without a setup."""
    is_question = random.random() < QUESTION_SHARE
    sentences = scheme.questions if is_question else scheme.endings
    index = random.randrange(len(sentences))
    key = f"q{index}" if is_question else f"e{index}"
    return _StoryTemplate(sentences[index], is_question, key)


def _write_nested_phenomenon(random: Random, part: WorldPart) -> Phenomenon:
    """Write a text about a calculation with three numbers: a product with brackets, or an average.

    Example:
        The text "What is (3 + 4) * 5?", a call with the input "(3 + 4) * 5" and the result "35", and the
        text " 35.".
    """
    first_number, second_number = draw_operands(random, part, "+", "count")
    unused_numbers = [number for number in range(2, 30) if number not in (first_number, second_number)]
    third_number = random.choice(unused_numbers)

    if random.random() < 0.5:
        nested = _write_bracket_calculation(random, first_number, second_number, third_number)
    else:
        nested = _write_average_calculation(random, first_number, second_number, third_number)

    text_before_call = nested.text
    if nested.text.endswith("?"):
        text_before_call = make_typed_question(random, nested.text)

    return _build_phenomenon(
        text_before_call=text_before_call,
        ending_after_result=random.choice((".", ".", ", nothing more.")),
        expression=nested.expression,
        result=nested.result,
        wording_name="calculator/seen/nested",
    )


class _NestedCalculation(NamedTuple):
    """A calculation with three numbers.

    Attributes:
        text: The text before the result.
        expression: The input of the call.
        result: The result of the call.
    """

    text: str
    expression: str
    result: str


def _write_bracket_calculation(
    random: Random, first_number: Decimal, second_number: Decimal, factor: int
) -> _NestedCalculation:
    """Write a product with a sum or a difference in brackets, such as "What is (3 + 4) * 5?".

    The text often shows it without spaces, as in "(3+4)*5". The call's input always has them.
    """
    product_by_expression = _compute_product_by_expression(first_number, second_number, factor)
    expression = random.choice(tuple(product_by_expression))

    has_spaces = random.random() < 0.7
    shown_expression = expression if has_spaces else expression.replace(" ", "")

    template = random.choice(get_word_list("calculator", "bracket_questions"))
    return _NestedCalculation(
        text=template.format(x=shown_expression),
        expression=expression,
        result=str(product_by_expression[expression]),
    )


def _compute_product_by_expression(first_number: Decimal, second_number: Decimal, factor: int) -> dict[str, Decimal]:
    """Multiply the sum and the difference of two numbers by a factor.

    The smaller number is subtracted from the larger one.

    Returns:
        The products by expression. The numbers 3 and 4 with the factor 5 give

            {"(3 + 4) * 5": 35, "5 * (3 + 4)": 35, "(4 - 3) * 5": 5}
    """
    smaller, larger = sorted((first_number, second_number))
    product_of_sum = (first_number + second_number) * factor
    return {
        f"({first_number} + {second_number}) * {factor}": product_of_sum,
        f"{factor} * ({first_number} + {second_number})": product_of_sum,
        f"({larger} - {smaller}) * {factor}": (larger - smaller) * factor,
    }


def _write_average_calculation(
    random: Random, first_number: Decimal, second_number: Decimal, third_number: int
) -> _NestedCalculation:
    """Write a question or statement about the average of three numbers.

    Example:
        3, 4 and 5 give the call's input "(3 + 4 + 5) / 3" and its result "4".
    """
    template = random.choice(get_word_list("calculator", "average_questions"))
    total = first_number + second_number + third_number
    return _NestedCalculation(
        text=template.format(a=first_number, b=second_number, c=third_number),
        expression=f"({first_number} + {second_number} + {third_number}) / 3",
        result=compute_result(total, "/", Decimal(3)),
    )


def _draw_sum_scheme(random: Random) -> Scheme:
    """Draw the templates of one kind of bare sum, such as "What is 12 + 30?".

    The operation is drawn first. Among its schemes, one with more wordings is drawn more often.
    """
    [operation] = random.choices(("+", "-", "*", "/", "%"), (5, 5, 5, 6, 4))
    candidates = [scheme for scheme in get_sum_schemes() if scheme.operation == operation]
    wording_counts = [len(scheme.questions) + len(scheme.endings) for scheme in candidates]
    [drawn_scheme] = random.choices(candidates, wording_counts)
    return drawn_scheme


def _draw_ending(random: Random, scheme: Scheme, value_by_slot: Mapping[str, str]) -> str:
    """Draw the text that follows the result of a story, such as " apples in all.".

    It may name the unit of the result, if the scheme has one, and the second person of the story.
    """
    unit = scheme.unit.format(**value_by_slot)
    fitting_endings = []
    for ending in get_word_list("tails", "calculator"):
        if unit or "{unit}" not in ending:
            fitting_endings.append(ending)

    drawn_ending = random.choice(fitting_endings)
    second_person = value_by_slot["m"]
    return drawn_ending.replace("{unit}", unit).format(m=second_person)


def _build_expression(operation: str, template: str, value_by_slot: Mapping[str, str]) -> str:
    """Return the calculator's input, such as "12 + 30", for a story.

    For "+" and "*" the operands come in the order in which the template names them. A percentage is written
    as a product: 5 percent of 200 is "200 * 5 / 100".

    Args:
        operation: The operator; "%" for a percentage.
        template: The template of the story, with the slots `{a}` and perhaps `{b}`.
        value_by_slot: The operands as the text writes them, under the keys "a" and "b".

    Raises:
        ValueError: The operation is not "%", and the template has the slot `{b}` but not `{a}`.
    """
    first_operand = value_by_slot["a"]
    second_operand = value_by_slot["b"]
    if operation == "%":
        return f"{second_operand} * {first_operand} / 100"

    # `find` returns -1 if a word, such as "half", stands for the second operand.
    names_second_operand_first = 0 <= template.find("{b}") < template.index("{a}")
    if operation in "+*" and names_second_operand_first:
        return f"{second_operand} {operation} {first_operand}"
    return f"{first_operand} {operation} {second_operand}"


_WORD_LIST_BY_SLOT = {"it": "things", "box": "containers", "event": "events", "gets": "gets", "loses": "loses"}
"""Slots of stories whose values are drawn from a list of words."""


def _draw_value_by_slot(random: Random, part: WorldPart) -> dict[str, str]:
    """Draw a word for each slot of the stories' templates, except for the numbers `{a}` and `{b}`.

    Args:
        random: The source of the draws.
        part: The part of the synthetic world that the towns belong to.

    Returns:
        The words by slot: two persons ("n" and "m"), three towns ("t", "u" and "w"), two weekdays ("day" and
        "other"), and a word for each slot of _WORD_LIST_BY_SLOT, such as "it": "apples".
    """
    persons = random.sample(get_word_list("names", "first_names"), 2)
    towns = random.sample(get_name_pool("town", part), 3)
    days = random.sample(WEEK_DAYS, 2)

    value_by_slot = {}
    for slot, list_name in _WORD_LIST_BY_SLOT.items():
        value_by_slot[slot] = random.choice(get_word_list("calculator", list_name))

    value_by_slot |= zip(("n", "m"), persons, strict=True)
    value_by_slot |= zip(("t", "u", "w"), towns, strict=True)
    value_by_slot |= zip(("day", "other"), days, strict=True)
    return value_by_slot
