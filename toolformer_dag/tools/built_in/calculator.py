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
    NO_OPERATION,
    NoResult,
    ProposedCall,
    Tool,
    ToolCall,
    ToolDefaults,
    ToolResult,
    unquote,
)

MAX_CHARACTERS = 200
"""The longest expression."""
MAX_DEPTH = 50
"""The most parentheses within each other."""
MAX_MAGNITUDE = 10**15
"""The largest value, and the smallest below zero."""

# A number, or any other character but white space. The first form is the rest of `0x10`, whose x is no sign: the whole
# is no token that is known.
TOKEN = re.compile(r"(?<=(?<![0-9.,])0)[xX][0-9]+|[0-9.,]+|\S")
# Digits, plain or with commas after thousands or as in India (12,34,567), and decimals; either may be missing.
NUMBER = re.compile(
    r"(?P<whole>[0-9]+|[1-9][0-9]{0,2}(?:,[0-9]{3})+|[1-9][0-9]?(?:,[0-9]{2})+,[0-9]{3})?(?:\.(?P<decimals>[0-9]*))?"
)
SYMBOLS = dict.fromkeys("xX×·⋅∙∗", "*") | dict.fromkeys("÷∕⁄", "/") | dict.fromkeys("−–", "-")
"""Other characters for the signs of operations."""
KNOWN = frozenset("+-*/()%")
"""The tokens that are no numbers."""
OPERATORS = frozenset("+-*/%")
"""The tokens that compute something where they follow a number."""


def evaluate(expression: str) -> str:
    """Compute an arithmetic expression, rounded half away from zero to two decimals: `0.29`, `35`, `-2.5`.

    `%` divides by a hundred. Trailing zeros are removed, unlike in the paper's table 10 (`85 / 23 -> 3.70`).

    Raises:
        NoResult: The expression has no value. The reason is empty, too_long, too_deep, unknown_symbol,
            bad_number (`1,23`, `1.2.3`), unbalanced, syntax, division_by_zero or too_large.
    """
    # Not covered: powers (`5.97e24`), other bases (`0x10`), currencies, words, equations, `2(3)`.
    if len(expression) > MAX_CHARACTERS:
        raise NoResult("too_long")

    value = _Parser(_tokens(expression)).value()
    if abs(value) > MAX_MAGNITUDE:
        raise NoResult("too_large")

    return _format_rounded(value)


def _tokens(expression: str) -> list[str]:
    """Return the numbers and other characters of an expression, with the usual sign for each operation."""
    return [SYMBOLS.get(token, token) for token in TOKEN.findall(expression)]


def _format_rounded(value: Fraction) -> str:
    """Write a value with at most two decimals, rounded half away from zero."""
    hundredths = (200 * abs(value.numerator) + value.denominator) // (2 * value.denominator)
    whole, decimals = divmod(hundredths, 100)
    sign = "-" if value < 0 and hundredths else ""
    with_two_decimals = f"{sign}{whole}.{decimals:02}"
    return with_two_decimals.rstrip("0").rstrip(".")


def has_operation(expression: str) -> bool:
    """Return whether an expression computes something: `20%` does, `99`, `(99)` and `-5` do not."""
    for before, token in pairwise(_tokens(expression)):
        follows_operand = before not in "+-*/("
        if token in OPERATORS and follows_operand:
            return True
    return False


def _parse_number(token: str) -> Fraction:
    """Read a number such as `1,234.5` or `.5`.

    Raises:
        NoResult: It is not a number ("bad_number").
    """
    match = NUMBER.fullmatch(token)
    has_digit = any(map(str.isdecimal, token))
    if match is None or not has_digit:
        raise NoResult("bad_number")

    whole = (match["whole"] or "").replace(",", "")
    decimals = match["decimals"] or ""
    return Fraction(int(whole + decimals), 10 ** len(decimals))


class _Parser:
    """Parses and computes an expression by recursive descent; a method for each rule of its grammar.

        sum = product (("+" | "-") product)*
        product = signed (("*" | "/") signed)*
        signed = ("+" | "-")* operand "%"?
        operand = number | "(" sum ")"

    The methods of the rules begin at the token `_next` and move it past what they read. All raise NoResult.
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
            if token not in KNOWN and not may_be_number:
                raise NoResult("unknown_symbol")

        self._tokens = [*tokens, ""]  # the empty token ends the expression
        self._next = 0  # index of the token that is read next
        self._depth = 0  # parentheses that are open

    def value(self) -> Fraction:
        """Compute the whole expression.

        Raises:
            NoResult: It has no value, or something follows it.
        """
        value = self._parse_sum()

        unread = self._tokens[self._next]
        if unread == ")":
            raise NoResult("unbalanced")
        if unread:
            raise NoResult("syntax")
        return value

    def _accept_token(self, accepted: str) -> str:
        """Return the next token and move past it if it is one of `accepted`; else return ""."""
        token = self._tokens[self._next]
        if not token or token not in accepted:
            return ""
        self._next += 1
        return token

    def _iter_accepted_tokens(self, accepted: str) -> Iterator[str]:
        """Yield the next token and move past it, as long as it is one of `accepted`."""
        return iter(partial(self._accept_token, accepted), "")

    def _parse_sum(self) -> Fraction:
        """Return the value of `product (("+" | "-") product)*`, from the left."""
        value = self._parse_product()
        for sign in self._iter_accepted_tokens("+-"):
            right = self._parse_product()
            value = value + right if sign == "+" else value - right
        return value

    def _parse_product(self) -> Fraction:
        """Return the value of `signed (("*" | "/") signed)*`, from the left."""
        value = self._parse_signed()
        for sign in self._iter_accepted_tokens("*/"):
            right = self._parse_signed()
            if sign == "/" and not right:
                raise NoResult("division_by_zero")
            value = value * right if sign == "*" else value / right
        return value

    def _parse_signed(self) -> Fraction:
        """Compute `("+" | "-")* operand "%"?`, where a percent sign divides by a hundred."""
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

        token = self._tokens[self._next]
        is_end = token == ""  # the last token
        is_inside_parenthesis = self._depth > 0
        if is_end and is_inside_parenthesis:
            raise NoResult("unbalanced")
        if is_end or token in KNOWN:  # an operator or a parenthesis, no number
            raise NoResult("syntax")

        self._next += 1
        return _parse_number(token)

    def _parse_rest_of_parenthesis(self) -> Fraction:
        """Compute `sum ")"`, after the opening parenthesis was read.

        After an error the parser is not used again.

        Raises:
            NoResult: More than MAX_DEPTH parentheses are open ("too_deep"), the expression ends before the closing
                parenthesis ("unbalanced"), or something else is in its place ("syntax").
        """
        self._depth += 1  # parentheses that are open
        if self._depth > MAX_DEPTH:
            raise NoResult("too_deep")

        value = self._parse_sum()
        if not self._accept_token(")"):
            is_end = self._tokens[self._next] == ""  # the last token
            raise NoResult("unbalanced" if is_end else "syntax")

        self._depth -= 1
        return value


class CalculatorOptions(ToolOptions):
    """Options of the calculator; strict_rule: whether its rule proposes only sums that may be meant on a web page."""

    strict_rule: Unfingerprinted[bool] = True


class Calculator(Tool):
    """Exact arithmetic; an input without a value has the reason of `evaluate`."""

    name = "Calculator"
    looks_for = "numbers of which one may follow from others"
    version = "6"
    kept_out_version = "1"
    description = "Computes an arithmetic expression, such as 400 / 1400."
    defaults = ToolDefaults(tau_s=0.0, k=20, m=10, tau_f=0.5)
    Options = CalculatorOptions
    options: CalculatorOptions

    def wants_document(self, document: Document) -> str | None:
        """Return the first rule that the whole text meets; a segment meets no rule that its document does not."""
        return find_selection_rule(document.text, document.text)

    def wants(self, text: str, document: Document) -> str | None:
        return find_selection_rule(text, document.text)

    def propose(self, text: str, context: str) -> Iterable[ProposedCall]:
        return sums.propose_sums(text, self.options.strict_rule)

    def rule_identity(self) -> Mapping[str, object]:
        return {"rule": sums.VERSION, "strict": self.options.strict_rule}

    def kept_out(self, text: str, offset: int, input: str) -> str | None:
        """Return `no_operation` for a number alone, as in `Calculator(99) -> 99`: the call repeats the text."""
        return super().kept_out(text, offset, input) if has_operation(unquote(input)) else NO_OPERATION

    def run(self, calls: Sequence[ToolCall]) -> list[ToolResult]:
        return [_answer_input(call.input) for call in calls]


def _answer_input(input: str) -> ToolResult:
    try:
        return ToolResult(evaluate(unquote(input)))
    except NoResult as error:
        return ToolResult(None, error.reason)
