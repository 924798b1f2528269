"""The calculator against two references: fractions over expression trees, and Python's own parser."""

import ast
import re
from decimal import ROUND_HALF_UP, Decimal, localcontext
from fractions import Fraction

import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from toolformer_dag.tools.built_in.calculator import NoResult, evaluate_expression
from toolformer_dag.tools.registry import load_tool
from toolformer_dag.tools.tool import ToolCall, ToolResult

REASONS = {
    *("empty", "too_long", "too_deep", "unknown_symbol", "bad_number", "unbalanced", "syntax"),
    *("division_by_zero", "too_large"),
}

HEXADECIMAL = re.compile("(?<![0-9.,])0[xX][0-9]")


@pytest.mark.parametrize(
    ("input", "reason"),
    [
        *((text, "no_operation") for text in ("99", "(99)", "-5", "((-1,240.50))", '"1953"', "+(-3)", "")),
        *((text, None) for text in ("9 - 5", "20%", "2 × 3", "(1+1)", "-5 – -3", '"7/2"', "8÷4", "(3)*2")),
    ],
)
def test_a_call_that_computes_nothing_is_kept_out(input: str, reason: str | None) -> None:
    assert load_tool("calculator", {}).kept_out(f"It was {input} then.", 7, input) == reason


def outcome(expression: str) -> str:
    try:
        return evaluate_expression(expression)
    except NoResult as none:
        assert none.reason in REASONS
        return none.reason


def rounded(value: Fraction) -> str:
    """Two decimals, half away from zero, by the decimal module."""
    if abs(value) > 10**15:
        return "too_large"
    with localcontext(prec=1000):
        hundredths = (Decimal(value.numerator * 100) / value.denominator).to_integral_value(ROUND_HALF_UP)
        return f"{hundredths / 100 + 0:f}" if hundredths else "0"


@pytest.mark.parametrize(
    ("expression", "result"),
    [
        ("18 + 12 x 3", "54"), ("18 + 12 * 3", "54"), ("658,893 / 11.4%", "5779763.16"), ("723 / 252", "2.87"),
        ("723 - 20", "703"), ("2011 - 1994", "17"), ("4 * 30", "120"), ("27 + 4 * 2", "35"), ("400 / 1400", "0.29"),
        ("735 / 499", "1.47"), ("85 + 23", "108"), ("(1 + 2) * (3 - 5)", "-6"), ("3 × 4 ÷ 2 − 1 · 1", "5"),
        ("2X3", "6"), ("10x10", "100"), ("1.0x10", "10"), ("1,000x10", "10000"), ("0 x 10", "0"), ("0×10", "0"),
        ("-5", "-5"), ("+5", "5"), ("2 - -3", "5"), ("--2", "2"), ("2 * -3", "-6"), ("-(2 + 3)", "-5"),
        ("1,234,567.5 * 2", "2469135"), ("12,34,567 + 1", "1234568"),
        ("1,00,000 / 4", "25000"), (".5 + 5.", "5.5"), ("50% * 200", "100"), ("(20 + 30)% * 4", "2"),
        ("0.005", "0.01"), ("-0.005", "-0.01"), ("1.005", "1.01"), ("2.675", "2.68"), ("-0.004", "0"),
        ("0 * -1", "0"), ("-0", "0"), ("1 / 8", "0.13"), ("1 / 2", "0.5"), ("10 / 4", "2.5"), ("100", "100"),
        ("0.1 + 0.2", "0.3"), ("1 / 3 * 3", "1"), ("7 / -2", "-3.5"), ("1000000000000000", "1000000000000000"),
        (" 1\t+\n1\u00a0", "2"), ("(" * 50 + "1" + ")" * 50, "1"), ("1+" * 99 + "1", "100"), ("-" * 199 + "1", "-1"),
        ("007", "7"), ("0.125 * 8", "1"), ("100,000 + 1,023", "101023"), ("85 / 23", "3.7"),
    ],
)  # fmt: skip
def test_results(expression: str, result: str) -> None:
    assert evaluate_expression(expression) == result


@pytest.mark.parametrize(
    ("expression", "reason"),
    [
        ("", "empty"), (" \n", "empty"), ("two plus two", "unknown_symbol"), ("1e5", "unknown_symbol"),
        ("5.97e24 * 1000", "unknown_symbol"),
        *((text, "unknown_symbol") for text in (
            "0b1", "0O7", "1_000", "\u0661\u0662", "\uff11\uff12", "1.5E-3", "½", "1½", "²", "2²", "Ⅷ", "1\u066b5",
        )),
        ("0x10", "unknown_symbol"), ("0X10 + 1", "unknown_symbol"), ("1 + 0x1F", "unknown_symbol"),
        ("0b11", "unknown_symbol"), ("0o17", "unknown_symbol"),
        ("2 ^ 3", "unknown_symbol"), ("1 + 1 = 2", "unknown_symbol"), ("$5 + $3", "unknown_symbol"),
        ("٣ + 1", "unknown_symbol"), ("\x00", "unknown_symbol"), ("__import__('os')", "unknown_symbol"),
        ("2 ** 3", "syntax"), ("2 // 3", "syntax"), ("1 +", "syntax"), ("* 1", "syntax"), ("x", "syntax"),
        ("()", "syntax"), ("2(3)", "syntax"), ("1 000", "syntax"), ("10 % 3", "syntax"), ("5%%", "syntax"),
        ("%", "syntax"), ("(1 2)", "syntax"), ("(1", "unbalanced"), ("1)", "unbalanced"), ("((1)", "unbalanced"),
        ("(1 +", "unbalanced"), ("1)(2", "unbalanced"), ("1 / 0", "division_by_zero"),
        ("1 / (2 - 2)", "division_by_zero"), ("0 / 0", "division_by_zero"), ("5 / 0%", "division_by_zero"),
        ("1,23", "bad_number"), ("1,23,45", "bad_number"), ("123,45,678", "bad_number"),
        ("1,2345", "bad_number"), ("0,125 * 8", "bad_number"),
        ("00,123", "bad_number"), ("012,345", "bad_number"), ("1.2.3", "bad_number"), (".", "bad_number"),
        (",", "bad_number"), ("1,", "bad_number"), ("1.5,000", "bad_number"), ("1" * 201, "too_long"),
        (" " * 201, "too_long"), ("(" * 51 + "1" + ")" * 51, "too_deep"), ("1000000000000001", "too_large"),
        ("999999999 * 999999999", "too_large"), ("9" * 200, "too_large"), ("0 - 1000000000000001", "too_large"),
        ("1 / 0.0000000000000001", "too_large"),
    ],
)  # fmt: skip
def test_no_result_and_why(expression: str, reason: str) -> None:
    with pytest.raises(NoResult) as none:
        evaluate_expression(expression)
    assert none.value.reason == reason


@st.composite
def trees(draw: st.DrawFn, depth: int = 4) -> tuple[str, Fraction | None]:
    """An expression with its value, None where it divides by zero somewhere."""
    if depth == 0 or draw(st.booleans()):
        return draw(operands())
    (left, a), (right, b) = draw(trees(depth=depth - 1)), draw(trees(depth=depth - 1))
    operator = draw(st.sampled_from("+-−–*xX×·/÷"))
    space = draw(st.sampled_from(["", " ", "  "]))
    sign = draw(st.sampled_from(["", "-", "+"]))
    percent = draw(st.sampled_from(["", "%"]))
    value = None if a is None or b is None else applied(operator, a, b)
    if value is not None:
        value = (-value if sign == "-" else value) / (100 if percent else 1)
    return f"{sign}({left}{space}{operator}{space}{right}){percent}", value


@st.composite
def operands(draw: st.DrawFn) -> tuple[str, Fraction]:
    value = draw(st.decimals(0, 10**7, places=draw(st.integers(0, 4))))
    percent = draw(st.booleans())
    text = f"{value:,f}" if draw(st.booleans()) else f"{value:f}"
    return text + "%" * percent, Fraction(value) / (100 if percent else 1)


def applied(operator: str, a: Fraction, b: Fraction) -> Fraction | None:
    if operator == "+":
        return a + b
    if operator in "-−–":
        return a - b
    if operator in "/÷":
        return a / b if b else None
    return a * b


@given(trees())
def test_it_computes_what_fractions_compute(tree: tuple[str, Fraction | None]) -> None:
    expression, value = tree
    assume(len(expression) <= 200 and not HEXADECIMAL.search(expression))
    assert outcome(expression) == ("division_by_zero" if value is None else rounded(value))


def by_python(expression: str) -> Fraction | None:
    """The value by Python's parser, None where the expression is not one of the four operations."""
    try:
        return walked(ast.parse(expression, mode="eval").body, expression)
    except (SyntaxError, TypeError):
        return None


def walked(node: ast.expr, source: str) -> Fraction | None:
    if isinstance(node, ast.Constant):
        return Fraction(ast.get_source_segment(source, node) or "")
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub | ast.UAdd):
        value = walked(node.operand, source)
        return -value if isinstance(node.op, ast.USub) else value
    signs = {ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.Div: "/"}
    if isinstance(node, ast.BinOp) and type(node.op) in signs:
        return applied(signs[type(node.op)], walked(node.left, source), walked(node.right, source))
    return None


@settings(max_examples=500)
@given(
    st.lists(st.sampled_from(["7", "10", "0.5", "2.", ".25", "3", "+", "-", "*", "/", "(", ")", " "]), max_size=12).map(
        "".join
    )
)
@example("-2*-(3--1)/4")
@pytest.mark.filterwarnings("ignore::SyntaxWarning")
def test_it_reads_what_python_s_parser_reads(text: str) -> None:
    expected = by_python(text.strip())
    found = outcome(text)
    if expected is not None:
        assert found == rounded(expected)
    else:
        assert found in REASONS


@given(st.text() | st.text(alphabet="0123456789.,+-*/x×÷()% =^e", max_size=250))
def test_any_text_gives_a_result_or_a_reason(text: str) -> None:
    found = outcome(text)
    assert found in REASONS or Decimal(found).is_finite()


@given(st.fractions(-(10**15), 10**15, max_denominator=10**6))
def test_results_are_read_again_as_themselves(value: Fraction) -> None:
    once = evaluate_expression(f"{value.numerator} / {value.denominator}")
    assert evaluate_expression(once) == once == rounded(value)
    assert once != "-0" and abs(Fraction(once) - value) <= Fraction(1, 200)


def test_the_tool_answers_every_call_in_order_and_strips_quotes() -> None:
    tool = load_tool("calculator", {})
    calls = [
        ToolCall('"400 / 1400"'),
        ToolCall("1/0"),
        ToolCall(""),
        ToolCall("x" * 1_000_000),
        ToolCall("“18 + 12 x 3”"),
    ]
    assert tool.run(calls) == [
        ToolResult("0.29"),
        ToolResult(None, "division_by_zero"),
        ToolResult(None, "empty"),
        ToolResult(None, "too_long"),
        ToolResult("54"),
    ]
