"""The calculator: the four basic operations, rounded to two decimals (paper, section 3)."""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from fractions import Fraction
from functools import partial
from itertools import pairwise

from toolformer_dag.settings.setting_types import Unfingerprinted
from toolformer_dag.texts.document import Document
from toolformer_dag.tools.calculator_selection import find_selection_rule
from toolformer_dag.tools.options import ToolOptions
from toolformer_dag.tools.rules import sums
from toolformer_dag.tools.tool import (
    NO_OPERATION_REASON,
    NoResult,
    ProposedCall,
    Tool,
    ToolCall,
    ToolDefaults,
    ToolResult,
    unquote,
)

MAX_EXPRESSION_CHARACTERS = 200
"""The longest expression."""
MAX_PARENTHESIS_DEPTH = 50
"""The most parentheses within each other."""
MAX_MAGNITUDE = 10**15
"""The largest value, and the smallest below zero."""

# A number, or any other character but white space. The first form is the rest of `0x10`, whose x is no sign: the whole
# is no token that is known.
TOKEN_PATTERN = re.compile(r"(?<=(?<![0-9.,])0)[xX][0-9]+|[0-9.,]+|\S")
# Digits, plain or with commas after thousands or as in India (12,34,567), and decimals; either may be missing.
NUMBER_PATTERN = re.compile(
    r"(?P<whole>[0-9]+|[1-9][0-9]{0,2}(?:,[0-9]{3})+|[1-9][0-9]?(?:,[0-9]{2})+,[0-9]{3})?(?:\.(?P<decimals>[0-9]*))?"
)
OPERATOR_BY_SYMBOL = dict.fromkeys("xX×·⋅∙∗", "*") | dict.fromkeys("÷∕⁄", "/") | dict.fromkeys("−–", "-")
"""Other characters for the signs of operations."""
KNOWN_TOKENS = frozenset("+-*/()%")
"""The tokens that are no numbers."""
OPERATORS = frozenset("+-*/%")
"""The tokens that compute something where they follow a number."""


def evaluate_expression(expression: str) -> str:
    """Compute an arithmetic expression, rounded half away from zero to two decimals: `0.29`, `35`, `-2.5`.

    `%` divides by a hundred. Trailing zeros are removed, unlike in the paper's table 10 (`85 / 23 -> 3.70`).

    Raises:
        NoResult: The expression has no value. The reason is empty, too_long, too_deep, unknown_symbol,
            bad_number (`1,23`, `1.2.3`), unbalanced, syntax, division_by_zero or too_large.
    """
    # Not covered: powers (`5.97e24`), other bases (`0x10`), currencies, words, equations, `2(3)`.
    if len(expression) > MAX_EXPRESSION_CHARACTERS:
        raise NoResult("too_long")

    value = _Parser(_tokenize_expression(expression)).parse_expression()
    if abs(value) > MAX_MAGNITUDE:
        raise NoResult("too_large")

    return _format_rounded(value)


def _tokenize_expression(expression: str) -> list[str]:
    """Return the numbers and other characters of an expression, with the usual sign for each operation."""
    return [OPERATOR_BY_SYMBOL.get(token, token) for token in TOKEN_PATTERN.findall(expression)]


def _format_rounded(value: Fraction) -> str:
    """Write a value with at most two decimals, rounded half away from zero."""
    # floor(100 * |value| + 1/2), in integers only
    hundredths = (200 * abs(value.numerator) + value.denominator) // (2 * value.denominator)
    whole, decimals = divmod(hundredths, 100)

    is_negative = value < 0 and hundredths != 0  # -0.001 is rounded to 0, not to -0
    sign = "-" if is_negative else ""
    text_with_two_decimals = f"{sign}{whole}.{decimals:02}"
    return text_with_two_decimals.rstrip("0").rstrip(".")


def has_operation(expression: str) -> bool:
    """Return whether an expression computes something: `20%` does, but `99`, `(99)` and `-5` do not."""
    tokens = _tokenize_expression(expression)
    for previous_token, token in pairwise(tokens):
        follows_operand = previous_token not in "+-*/("
        if token in OPERATORS and follows_operand:
            return True
    return False


def _parse_number(token: str) -> Fraction:
    """Parse a number such as `1,234.5` or `.5`, exactly.

    Raises:
        NoResult: It is not a number ("bad_number").
    """
    match = NUMBER_PATTERN.fullmatch(token)
    has_digit = any(map(str.isdecimal, token))
    if match is None or not has_digit:
        raise NoResult("bad_number")

    whole_digits = (match["whole"] or "").replace(",", "")
    decimal_digits = match["decimals"] or ""
    all_digits = int(whole_digits + decimal_digits)
    return Fraction(all_digits, 10 ** len(decimal_digits))


class _Parser:
    """Parses and computes an expression by recursive descent; a method for each rule of its grammar.

        sum = product (("+" | "-") product)*
        product = signed (("*" | "/") signed)*
        signed = ("+" | "-")* operand "%"?
        operand = number | "(" sum ")"

    The methods of the rules begin at the token `_next_index` and move it past what they read. All raise NoResult.
    """

    def __init__(self, tokens: list[str]) -> None:
        """Check the tokens of an expression.

        Raises:
            NoResult: There are none ("empty"), or one of them is unknown ("unknown_symbol").
        """
        if not tokens:
            raise NoResult("empty")

        for token in tokens:
            may_be_number = token[0] in "0123456789.,"
            if token not in KNOWN_TOKENS and not may_be_number:
                raise NoResult("unknown_symbol")

        self._tokens = [*tokens, ""]  # the empty token ends the expression
        self._next_index = 0  # index of the token that is read next
        self._open_parenthesis_count = 0

    def parse_expression(self) -> Fraction:
        """Compute the value of the whole expression.

        Raises:
            NoResult: The expression has no value, or something follows it.
        """
        value = self._parse_sum()

        next_token = self._tokens[self._next_index]  # "" at the end of the expression
        if next_token == ")":
            raise NoResult("unbalanced")
        if next_token:
            raise NoResult("syntax")

        return value

    def _accept_token(self, accepted_tokens: str) -> str:
        """Return the next token and move past it if it is one of the accepted ones, or else return "".

        Args:
            accepted_tokens: The accepted tokens, each of one character, as one text.
        """
        token = self._tokens[self._next_index]
        if not token or token not in accepted_tokens:
            return ""
        self._next_index += 1
        return token

    def _iter_accepted_tokens(self, accepted_tokens: str) -> Iterator[str]:
        """Yield the next token and move past it, again and again, as long as it is one of `accepted_tokens`."""
        accept_next_token = partial(self._accept_token, accepted_tokens)  # returns "" for any other token
        return iter(accept_next_token, "")

    def _parse_sum(self) -> Fraction:
        """Compute a sum such as `2 * 3 - 4 + 1` from left to right, beginning at the next token.

        Raises:
            NoResult: It has no value.
        """
        value = self._parse_product()
        for sign in self._iter_accepted_tokens("+-"):
            operand = self._parse_product()
            if sign == "+":
                value += operand
            else:
                value -= operand
        return value

    def _parse_product(self) -> Fraction:
        """Compute a product such as `2 * -3 / 4` from left to right, beginning at the next token.

        Raises:
            NoResult: It has no value, for example because of a division by zero ("division_by_zero").
        """
        value = self._parse_signed()
        for sign in self._iter_accepted_tokens("*/"):
            operand = self._parse_signed()
            if sign == "*":
                value *= operand
            elif operand == 0:
                raise NoResult("division_by_zero")
            else:
                value /= operand
        return value

    def _parse_signed(self) -> Fraction:
        """Compute an operand with its signs, such as `--5` or `-20%`, beginning at the next token.

        A percent sign divides by a hundred.

        Raises:
            NoResult: It has no value.
        """
        is_negative = False
        for sign in self._iter_accepted_tokens("+-"):
            if sign == "-":
                is_negative = not is_negative

        operand = self._parse_operand()

        if self._accept_token("%"):
            operand /= 100
        return -operand if is_negative else operand

    def _parse_operand(self) -> Fraction:
        """Read the next number, or compute a sum in parentheses.

        Raises:
            NoResult: The expression ends inside a parenthesis ("unbalanced"), or something else follows ("syntax").
        """
        if self._accept_token("("):  # moves past it
            return self._parse_rest_of_parenthesis()

        token = self._tokens[self._next_index]
        is_at_end = token == ""
        is_inside_parenthesis = self._open_parenthesis_count > 0
        if is_at_end and is_inside_parenthesis:
            raise NoResult("unbalanced")
        if is_at_end or token in KNOWN_TOKENS:  # an operator or a parenthesis, no number
            raise NoResult("syntax")

        self._next_index += 1
        return _parse_number(token)

    def _parse_rest_of_parenthesis(self) -> Fraction:
        """Compute `sum ")"`, after the opening parenthesis was read.

        After an error the parser is not used again.

        Raises:
            NoResult: More than MAX_PARENTHESIS_DEPTH parentheses are open ("too_deep"), the expression ends before the
                closing parenthesis ("unbalanced"), or something else is in its place ("syntax").
        """
        self._open_parenthesis_count += 1
        if self._open_parenthesis_count > MAX_PARENTHESIS_DEPTH:
            raise NoResult("too_deep")

        value = self._parse_sum()
        if not self._accept_token(")"):
            is_at_end = self._tokens[self._next_index] == ""
            raise NoResult("unbalanced" if is_at_end else "syntax")

        self._open_parenthesis_count -= 1
        return value


class CalculatorOptions(ToolOptions):
    """Options of the calculator; strict_rule: whether its rule proposes only sums that may be meant on a web page."""

    strict_rule: Unfingerprinted[bool] = True


class Calculator(Tool):
    """Computes arithmetic expressions exactly. An input without a value has a reason of `evaluate_expression`."""

    name = "Calculator"
    looks_for = "numbers of which one may follow from others"
    version = "6"
    kept_out_version = "1"
    description = "Computes an arithmetic expression, such as 400 / 1400."
    defaults = ToolDefaults(tau_s=0.0, k=20, m=10, tau_f=0.5)
    Options = CalculatorOptions
    options: CalculatorOptions

    def wants_document(self, document: Document) -> str | None:
        """Return the first rule of appendix A that the whole text of a document meets, or None if it meets none.

        A segment of the document meets no rule that the document does not meet.

        Raises:
            OverBudget: There are too many numbers to try.
        """
        return find_selection_rule(document.text, document.text)

    def wants(self, text: str, document: Document) -> str | None:
        return find_selection_rule(text, document.text)

    def propose(self, text: str, context: str) -> Iterable[ProposedCall]:
        return sums.propose_sums(text, self.options.strict_rule)

    def rule_identity(self) -> Mapping[str, object]:
        return {"rule": sums.VERSION, "strict": self.options.strict_rule}

    def kept_out(self, text: str, offset: int, input: str) -> str | None:
        """Return `no_operation` for a number alone, as in `Calculator(99) -> 99`, and None for any other input.

        Such a call only repeats what the text says.
        """
        if not has_operation(unquote(input)):
            return NO_OPERATION_REASON
        return super().kept_out(text, offset, input)

    def run(self, calls: Sequence[ToolCall]) -> list[ToolResult]:
        return [_answer_input(call.input) for call in calls]


def _answer_input(call_input: str) -> ToolResult:
    """Compute the expression that a call has as its input, or give the reason why it has no value."""
    try:
        return ToolResult(evaluate_expression(unquote(call_input)))
    except NoResult as error:
        return ToolResult(None, error.reason)
