"""Other words in the place of some, so that the model goes by what a text says and not by one fixed wording."""

import re
from dataclasses import replace
from functools import cache
from random import Random

from toolformer_dag.embedded.gold import Phenomenon
from toolformer_dag.embedded.wordings import filler
from toolformer_dag.embedded.wordings.word_list import spaced

LARGEST_SHARE = 0.3  # of a text's plain words
LARGEST_SHARE_OF_SUMS = 0.5
PLAIN_WORD = re.compile(r"(?<![\w'\"])[a-z]{2,}(?![\w'])")
KEPT = frozenset(("answer", "is"))  # "The answer is" ends the questions of evaluation too
KEPT_OF_DATES = frozenset(spaced("day weekday week month year date full complete"))  # they ask for its form


def blurred(random: Random, gold: Phenomenon) -> Phenomenon:
    """The phenomenon with some plain words before its place exchanged; a question inside its input changes alike.

    Names, numbers and, for translation, the foreign words stay.
    """
    share = random.random() * (LARGEST_SHARE_OF_SUMS if gold.tool == "calculator" else LARGEST_SHARE)
    asked = gold.input.strip('"')
    kept = KEPT | {"machine_translation": set(asked.split()), "calendar": KEPT_OF_DATES}.get(gold.tool, set())
    words = [word for word in dict.fromkeys(PLAIN_WORD.findall(gold.before)) if word not in kept]
    others = {word: random.choice(_words()) for word in words if random.random() < share}

    def exchanged(text: str) -> str:
        return PLAIN_WORD.sub(lambda hit: others.get(hit[0], hit[0]), text)

    quoted = gold.tool == "question_answering" and asked in gold.before
    changed = f'"{exchanged(asked)}"' if quoted else gold.input
    return replace(gold, before=exchanged(gold.before), input=changed)


@cache
def _words() -> tuple[str, ...]:
    texts = (*filler.PERSONS, *filler.GROUPS, *filler.VERBS, *filler.PLACES, *filler.ADVERBIALS, *filler.REMARKS)
    return tuple(sorted({word for text in texts for word in PLAIN_WORD.findall(text)}))
