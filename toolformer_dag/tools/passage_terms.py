"""The terms by which passages and queries are compared: their words, lower case, without accents."""

import functools
from collections.abc import Iterable
from itertools import pairwise
from unicodedata import normalize

import regex
import tantivy

from toolformer_dag.tools.passages import WITHOUT_SPACES

MAX_TERM_BYTES = 40
"""The longest term; what is longer is not indexed."""
MAX_QUERY_TERMS = 64
"""The most terms of a query that are searched for."""

_STOP_WORDS = """
a about after again all also am an and any are as at be been before being but by can could did do does for from had has
have he her his how i if in into is it its me my no not of on or our out s she so some such t than that the their them
then there these they this to too up us was we were what when where which while who whom whose why will with would you
your
"""
STOP_WORDS = frozenset(_STOP_WORDS.split())
"""English words that queries are searched without, where they have others."""

_RUN_WITHOUT_SPACES = regex.compile(f"{WITHOUT_SPACES}+")
"""Consecutive letters of scripts that write no spaces between words."""


def build_any_term_query(schema: tantivy.Schema, field: str, terms: Iterable[str]) -> tantivy.Query | None:
    """Return the query for documents whose field has at least one of the terms; None without terms."""
    term_queries = []
    for term in terms:
        term_query = tantivy.Query.term_query(schema, field, term, "freq")
        term_queries.append((tantivy.Occur.Should, term_query))
    return tantivy.Query.boolean_query(term_queries) if term_queries else None


@functools.cache
def get_analyzer() -> tantivy.TextAnalyzer:
    """Return tantivy's analyzer that cuts texts into words for an index: `Čapek's` becomes `capek` and `s`.

    Words are runs of letters and digits, in lower case and without accents, of at most MAX_TERM_BYTES.
    """
    builder = tantivy.TextAnalyzerBuilder(tantivy.Tokenizer.simple())
    builder = builder.filter(tantivy.Filter.remove_long(MAX_TERM_BYTES))
    builder = builder.filter(tantivy.Filter.lowercase())
    builder = builder.filter(tantivy.Filter.ascii_fold())
    return builder.build()


def with_word_spaces(text: str) -> str:
    """Return a text with spaces also in scripts that write none between words, such as Chinese and Thai.

    Such a run becomes its pairs of letters and its letters: ` 東京 京都 東 京 都 ` for `東京都`.
    """
    if text.isascii():
        return text
    with_composed_accents = normalize("NFC", text)
    return str(_RUN_WITHOUT_SPACES.sub(_split_into_pairs_and_letters, with_composed_accents))


def _split_into_pairs_and_letters(run: regex.Match[str]) -> str:
    """Return the pairs of letters and the letters of a match, with spaces around each."""
    letters = [character for character in run[0] if character.isalnum()]  # the analyzer splits at most marks
    pairs = [first + second for first, second in pairwise(letters)]
    return " ".join(["", *pairs, *letters, ""])


def parse_query_terms(query: str) -> list[str]:
    """Return at most MAX_QUERY_TERMS distinct terms in order, without stop words unless there is nothing else."""
    all_terms = get_analyzer().analyze(with_word_spaces(query))
    distinct_terms = list(dict.fromkeys(all_terms))
    # Stop words take most of the time and hardly change the ranking.
    terms = [term for term in distinct_terms if term not in STOP_WORDS]
    return (terms or distinct_terms)[:MAX_QUERY_TERMS]
