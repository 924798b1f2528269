"""Translation into English from the closed lexicon."""

from functools import cache

from toolformer_dag.embedded.lexicon import ARTICLES, LANGUAGES, words

_THE = frozenset(article for articles in ARTICLES.values() for article in articles.values())


def translate(phrase: str) -> str | None:
    """A phrase of article, adjective and noun in lower-case English; None when no word of it is in the lexicon.

    Words that it does not know stay as they are, in their place; adjectives move before the noun.
    """
    tokens = phrase.lower().split()
    articles = [token for token in tokens if token in _THE]
    rest = [token for token in tokens if token not in _THE]
    nouns, adjectives = _english("noun"), _english("adjective")
    if not any(token in nouns or token in adjectives for token in rest):
        return None
    modifiers = [adjectives[token] for token in rest if token in adjectives and token not in nouns]
    others = [nouns.get(token, token) for token in rest if token in nouns or token not in adjectives]
    return " ".join([*(["the"] if articles else []), *modifiers, *others])


@cache
def _english(word_class: str) -> dict[str, str]:
    return {
        form.lower(): word.english
        for language in LANGUAGES
        for word in words(language, word_class)
        for form in word.forms
    }
