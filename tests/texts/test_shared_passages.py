"""Passages that texts share: against a slow search over the words themselves."""

import re
import unicodedata

from hypothesis import given, settings
from hypothesis import strategies as st

from toolformer_dag.texts.shared_passages import MIN_PASSAGE_WORDS, PASSAGE_WORDS, SharedPassages

QUESTION = "how many apples did Ada have after she gave Bo five of her twelve red apples in the end"
WORDS = QUESTION.split()


def found(texts: list[str], others: list[str]) -> list[tuple[int, int]]:
    return SharedPassages(texts).find_shared_pairs(others).rows()


def words_of(text: str) -> list[str]:
    return re.findall(r"[^\W_]+", unicodedata.normalize("NFKC", text).lower())


def slowly(texts: list[str], others: list[str]) -> list[tuple[int, int]]:
    pairs = set()
    for number, text in enumerate(texts):
        words = words_of(text)
        n = min(len(words), PASSAGE_WORDS)
        passages = {tuple(words[at : at + n]) for at in range(len(words) - n + 1)} if n >= MIN_PASSAGE_WORDS else set()
        for place, other in enumerate(others):
            there = words_of(other)
            if any(tuple(there[at : at + n]) in passages for at in range(len(there) - n + 1)):
                pairs.add((place, number))
    return sorted(pairs)


def test_thirteen_words_in_a_row_are_found_whatever_their_case_and_punctuation() -> None:
    other = "It was asked: " + ", ".join(word.upper() for word in WORDS[:13]) + "?! Then"
    assert found([QUESTION], ["nothing", other]) == [(1, 0)]
    assert found([QUESTION], [" ".join(WORDS[:12])]) == []
    assert found([QUESTION], [" ".join(WORDS[:7]) + " or " + " ".join(WORDS[7:])]) == []


def test_accents_may_be_composed_or_not() -> None:
    words = ["Zoë", "und", "Jürgen", "äßen", "über", "fünf", "süße", "Öpfel"]
    assert found([" ".join(words)], [unicodedata.normalize("NFD", f"So {' '.join(words)}.")]) == [(0, 0)]


def test_a_short_text_is_found_as_a_whole_and_a_shorter_one_never() -> None:
    eight = " ".join(WORDS[:8])
    seven = " ".join(WORDS[:7])
    assert found([eight, seven], [f"So {eight} then", f"So {seven} then"]) == [(0, 0)]
    assert SharedPassages([eight, seven, ""]).word_counts == [8, 7, 0]


TEXT = st.lists(st.sampled_from(["a", "b", "c", "Ünïcode", "7", "ﬁ"]), max_size=24).map(" ".join)


@settings(max_examples=200, deadline=None)
@given(st.lists(TEXT, max_size=4), st.lists(TEXT, max_size=4))
def test_the_same_pairs_are_found_as_by_comparing_words(texts: list[str], others: list[str]) -> None:
    assert found(texts, others) == slowly(texts, others)
