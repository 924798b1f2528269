"""One pair of quotes around all of an input is taken off, two quotations stay."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from toolformer_dag.tools.tool import unquote


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", ""), ('"', '"'), ('""', ""), ("a", "a"), (' "a b" ', "a b"), ("'76'", "76"), ("“a ”", "a"), ("«a»", "a"),
        ('"a', '"a'), ('“a"', '“a"'), ("l'été d'", "l'été d'"), ("'It's Tom's'", "It's Tom's"),
        ("‘It’s the dogs’ food’", "It’s the dogs’ food"), ('"He said "hi" to me"', 'He said "hi" to me'),
        ("“He said “hi” and “ho” to me”", "He said “hi” and “ho” to me"), ('"a"b"', 'a"b'), ('""a""', '"a"'),
        ('5" or 6"', '5" or 6"'),
    ],
)  # fmt: skip
def test_one_pair_around_all_of_it(text: str, expected: str) -> None:
    assert unquote(text) == expected


@pytest.mark.parametrize(
    "text",
    [
        '"Hamlet" or "Macbeth"', '"Hamlet","Macbeth"', '"a" "b" "c"', "'Hamlet's ghost' or 'Tom's'", "“a” and “b”",
        "‘Tom’s’ and ‘b’", "«a» «b»", '"What?" (not "Why?")...\n"Who?"',
    ],
)  # fmt: skip
def test_two_quotations_stay(text: str) -> None:
    assert unquote(text) == text


@given(st.text(), st.sampled_from(['""', "''", "“”", "‘’", "«»"]))
def test_a_text_without_quotes_loses_those_around_it(text: str, pair: str) -> None:
    plain = "".join(character for character in text if character not in "\"'“”‘’«»").strip()
    assert unquote(f" {pair[0]}{plain}{pair[1]}\n") == unquote(plain) == plain


def test_a_long_text_of_quotes_is_read_in_one_pass() -> None:
    for text in ('"' * 1_000_000, '"a" ' * 300_000 + '"', "'a" * 500_000 + "'", '"a ' + '"b ' * 300_000 + '"'):
        assert unquote(text) in (text, text[1:-1].strip())
