"""Reads answers out of the made world's encyclopaedia: which relation is asked for, and where its sentence stands."""

import re
from collections.abc import Sequence
from functools import cache, lru_cache

from toolformer_dag.embedded.encyclopaedia import Passage
from toolformer_dag.embedded.relation import Relation
from toolformer_dag.embedded.relations import RELATIONS

_WORD = re.compile(r"\w+")
_ALL = tuple(relation for group in RELATIONS.values() for relation in group)
KEYWORD_WEIGHT, MISSING_WEIGHT = 2.0, 0.1


def answer(question: str, passages: Sequence[Passage]) -> str | None:
    """The words of a passage that answer the question, or None when no passage is about an entity in the question.

    Of the relations that the passages state, the one is read whose wordings share most words with the question. Not
    covered: questions about two entities, or about anything that is no relation of the made world.
    """
    about = [passage for passage in passages if re.search(rf"\b{re.escape(passage.title)}\b", question)]
    words = set(_words(question)).difference(*(_words(passage.title) for passage in about))
    for relation in _ranked(frozenset(words)):
        for passage in about:
            found = _read(relation, passage)
            if found:
                return found
    return None


def _read(relation: Relation, passage: Passage) -> str | None:
    for sentence in relation.sentences:
        before, after = sentence.format(e=passage.title, v="\0").split("\0")
        found = re.search(f"{re.escape(before)}(.+?){re.escape(after)}", passage.text)
        if found:
            return found[1]
    return None


@lru_cache(maxsize=4096)
def _ranked(words: frozenset[str]) -> list[Relation]:
    """Relations that share a word with the question, the likeliest first."""
    scores = {relation: _score(words, relation) for relation in _ALL}
    return sorted((relation for relation in _ALL if scores[relation] > 0), key=lambda relation: -scores[relation])


def _score(words: frozenset[str], relation: Relation) -> float:
    """The best wording's shared words, rare ones counting more, less a little for those that the question lacks."""
    keyword = sum(KEYWORD_WEIGHT * _rarity(word) for word in words.intersection(_words(relation.keyword)))
    return keyword + max(
        sum(map(_rarity, words & asked)) - MISSING_WEIGHT * sum(map(_rarity, asked - words))
        for asked in _wordings(relation)
    )


@cache
def _wordings(relation: Relation) -> tuple[frozenset[str], ...]:
    texts = (relation.question, *relation.questions, *relation.statements)
    return tuple(_words(re.sub(r"\{.\}", "", text)) for text in texts)


@cache
def _rarity(word: str) -> float:
    return 1 / max(1, sum(any(word in words for words in _wordings(relation)) for relation in _ALL))


def _words(text: str) -> frozenset[str]:
    return frozenset(_WORD.findall(text.lower()))
