"""Which words after a unit, such as a recorded call, are weighted: their loss says whether it helped."""

from collections.abc import Sequence
from dataclasses import dataclass

from toolformer_dag.conversations.messages import RecordedMessage
from toolformer_dag.model.requests import WINDOW_WEIGHTS


@dataclass(frozen=True, slots=True)
class Window:
    """Which tokens after a unit are weighted, and how much.

    Attributes:
        messages: the number of next messages of the assistant whose words are weighted. With only one, a result that
            is used later, such as the token of a login, would seem to be useless.
        is_last: whether only the last message of the assistant is weighted, in place of the next ones.
        tokens: the most tokens that are weighted, from the first weighted word on.
        weights: the weights of these tokens, in their order; if empty, all weigh alike.
    """

    messages: int = 1
    is_last: bool = False
    tokens: int = 100
    weights: tuple[float, ...] = ()

    def weighted_messages(self, messages: Sequence[RecordedMessage], following: range) -> list[int]:
        """Return the numbers of the messages among `following` whose words are weighted, as [4, 6]."""
        answers = [number for number in following if messages[number].role == "assistant"]
        return answers[-1:] if self.is_last else answers[: self.messages]

    def token_weights(self, tokens: int) -> tuple[float, ...]:
        """Return the weights of a number of tokens, as (0.5, 0.5) for 2 tokens that weigh alike."""
        if self.weights:
            return self.weights[:tokens]
        return (1 / max(1, tokens),) * tokens


WINDOWS = {
    "next_words": Window(messages=4),
    "next": Window(messages=1),
    "answer": Window(is_last=True),
    "paper": Window(tokens=len(WINDOW_WEIGHTS), weights=WINDOW_WEIGHTS),
}
"""The windows by the names that `traces.window` takes; "paper" weighs as Section 2 does."""
