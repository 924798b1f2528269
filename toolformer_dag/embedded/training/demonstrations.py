"""Annotation by example, in the form of the prompts P(x): an instruction, texts, and the same texts with calls.

The calls are noisy on purpose, in place and input, so that the filter has work to do.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

from toolformer_dag.embedded.training.document import Document
from toolformer_dag.texts.call import Call, format_call

RIGHT_PLACE, RANDOM_PLACE = 0.68, 0.15  # the rest stay without a call
NO_PLACE_RANDOM = 0.12  # a text where the tool has nothing to say


@dataclass(frozen=True, slots=True)
class Example:
    """A text and where calls stand in it: character offsets with the inputs, in order."""

    text: str
    calls: tuple[tuple[int, Call], ...]

    def parts(self) -> tuple[str, ...]:
        """The text with its calls, cut where the method tokenizes apart."""
        parts, last = [], 0
        for offset, call in self.calls:
            parts += [self.text[last:offset], format_call(call)]
            last = offset
        return tuple(part for part in (*parts, self.text[last:]) if part)


def demonstration(random: Random, instruction: str, examples: Sequence[Example]) -> Document:
    """The document; the last example, and half of the others, come in the pieces in which P(x) is tokenized."""
    pieces: list[str] = []
    head = instruction
    for number, example in enumerate(examples, 1):
        if number == len(examples) or random.random() < 0.5:
            pieces += [f"{head}Input: ", example.text, "\nOutput: ", *example.parts()]
            head = "\n"
        else:
            head += f"Input: {example.text}\nOutput: {''.join(example.parts())}\n"
    return tuple(pieces)


def noisy_place(random: Random, text: str, gold: int | None) -> int | None:
    """The right offset, any other before a word, or none."""
    draw = random.random()
    if gold is not None and draw < RIGHT_PLACE:
        return gold
    if draw < (RIGHT_PLACE + RANDOM_PLACE if gold is not None else NO_PLACE_RANDOM):
        return _any_space(random, text)
    return None


def _any_space(random: Random, text: str) -> int | None:
    spaces = [place for place, letter in enumerate(text) if letter == " "]
    return random.choice(spaces) if spaces else None
