"""From text to search terms: the same analysis for passages and for queries."""

import functools

import tantivy

LONGEST_TERM = 40
MOST_TERMS = 64

_STOP_WORDS = """
a about after again all also am an and any are as at be been before being but by can could did do does for from had has
have he her his how i if in into is it its me my no not of on or our out s she so some such t than that the their them
then there these they this to too up us was we were what when where which while who whom whose why will with would you
your
"""
STOP_WORDS = frozenset(_STOP_WORDS.split())


@functools.cache
def analyzer() -> tantivy.TextAnalyzer:
    """Words as runs of letters and digits, lower case, accents folded; longer than 40 bytes are left out."""
    filters = (tantivy.Filter.remove_long(LONGEST_TERM), tantivy.Filter.lowercase(), tantivy.Filter.ascii_fold())
    builder = tantivy.TextAnalyzerBuilder(tantivy.Tokenizer.simple())
    for each in filters:
        builder = builder.filter(each)
    return builder.build()


def query_terms(query: str) -> list[str]:
    """Distinct terms in order, at most 64; stop words only where there is nothing else.

    Stop words are skipped in queries, not in the index: they cost most of the time and move the ranking little.
    """
    terms = list(dict.fromkeys(analyzer().analyze(query)))
    return ([term for term in terms if term not in STOP_WORDS] or terms)[:MOST_TERMS]
