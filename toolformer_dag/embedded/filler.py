"""Plain sentences that no tool can help with."""

from random import Random

from toolformer_dag.embedded.gold import sentence
from toolformer_dag.embedded.wordings.filler import ADVERBIALS, CONNECTIVES, GROUPS, PERSONS, PLACES, VERBS


def filler(random: Random, sentences: int) -> str:
    """So many plain sentences, as one paragraph."""
    return " ".join(_sentence(random, is_first=place == 0) for place in range(sentences))


def _sentence(random: Random, *, is_first: bool) -> str:
    words = _clause(random)
    if random.random() < 0.6:
        words += f" {random.choice(ADVERBIALS)}"
    if random.random() < 0.25:
        words += f", and {_clause(random)}"
    if not is_first and random.random() < 0.3:
        words = f"{random.choice(CONNECTIVES)} {words}"
    return sentence(words) + "."


def _clause(random: Random) -> str:
    return f"{random.choice(PERSONS + GROUPS)} {random.choice(VERBS)} {random.choice(PLACES)}"
