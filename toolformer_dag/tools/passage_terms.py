"""The terms by which passages and queries are compared: their words, lower case, without accents."""

import functools
from collections.abc import Iterable
from itertools import pairwise
from unicodedata import normalize

import regex
import tantivy

from toolformer_dag.tools.passages import UNSPACED_LETTER_REGEX

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

_UNSPACED_RUN_PATTERN = regex.compile(f"{UNSPACED_LETTER_REGEX}+")
"""Consecutive letters of scripts that write no spaces between words."""


def build_any_term_query(schema: tantivy.Schema, field_name: str, terms: Iterable[str]) -> tantivy.Query | None:
    """Build the query for documents that have at least one of some terms in a field.

    Args:
        schema: The fields of the index.
        field_name: The field in which the terms are searched for.
        terms: The terms, as the index has them.

    Returns:
        The query, or None if there are no terms.
    """
    optional_queries = []
    for term in terms:
        term_query = tantivy.Query.term_query(schema, field_name, term, "freq")
        optional_queries.append((tantivy.Occur.Should, term_query))

    if not optional_queries:
        return None
    return tantivy.Query.boolean_query(optional_queries)


@functools.cache
def get_word_analyzer() -> tantivy.TextAnalyzer:
    """Return tantivy's analyzer that cuts texts into words for an index: `Čapek's` becomes `capek` and `s`.

    Words are runs of letters and digits, in lower case and without accents, of at most MAX_TERM_BYTES.
    """
    builder = tantivy.TextAnalyzerBuilder(tantivy.Tokenizer.simple())
    builder = builder.filter(tantivy.Filter.remove_long(MAX_TERM_BYTES))
    builder = builder.filter(tantivy.Filter.lowercase())
    builder = builder.filter(tantivy.Filter.ascii_fold())
    return builder.build()


def insert_word_spaces(text: str) -> str:
    """Insert spaces into the parts of a text whose script writes none between words, such as Chinese and Thai.

    Such a part becomes its pairs of letters and its letters: ` 東京 京都 東 京 都 ` for `東京都`. So it can be found by
    each of them, although its words are not known.
    """
    if text.isascii():
        return text
    with_composed_accents = normalize("NFC", text)
    return str(_UNSPACED_RUN_PATTERN.sub(_split_into_pairs_and_letters, with_composed_accents))


def _split_into_pairs_and_letters(letter_run: regex.Match[str]) -> str:
    """Return the pairs of letters and the letters of a match, with spaces around each."""
    # Marks are left out, because the analyzer would split words at most of them.
    letters = [character for character in letter_run[0] if character.isalnum()]
    pairs = [first + second for first, second in pairwise(letters)]
    return " ".join(["", *pairs, *letters, ""])


def parse_query_terms(query: str) -> list[str]:
    """Return the distinct terms of a query, at most MAX_QUERY_TERMS, in order.

    Stop words such as `the` are left out unless the query has no other words.
    """
    all_terms = get_word_analyzer().analyze(insert_word_spaces(query))
    distinct_terms = list(dict.fromkeys(all_terms))

    # Stop words take most of the time of a search and hardly change the ranking.
    content_terms = [term for term in distinct_terms if term not in STOP_WORDS]
    chosen_terms = content_terms or distinct_terms
    return chosen_terms[:MAX_QUERY_TERMS]
