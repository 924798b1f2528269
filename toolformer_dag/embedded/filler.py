"""Plain sentences that no tool can help with."""

from random import Random

from toolformer_dag.embedded.gold import sentence
from toolformer_dag.embedded.wordings import filler as words

SUBJECTS = words.PERSONS + words.GROUPS


def filler(random: Random, sentences: int) -> str:
    """So many plain sentences, as one paragraph."""
    return " ".join(_sentence(random, is_first=place == 0) for place in range(sentences))


def _sentence(random: Random, *, is_first: bool) -> str:
    shape = random.random()
    if shape < 0.1:
        return f"{random.choice(words.REMARKS)}."
    text = _clause(random)
    if shape < 0.6:
        text += f" {random.choice(words.ADVERBIALS)}"
    elif shape < 0.75:
        text += f" {random.choice(words.SUBORDINATE)} {_clause(random)}"
    elif shape < 0.9:
        text += f", and {_clause(random)}"
    if not is_first and random.random() < 0.3:
        text = f"{random.choice(words.CONNECTIVES)} {text}"
    return sentence(text) + "."


def _clause(random: Random) -> str:
    return f"{random.choice(SUBJECTS)} {random.choice(words.VERBS)} {random.choice(words.PLACES)}"
