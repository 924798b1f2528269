"""Which words behind a recorded call are weighted: their loss says whether the result of the call helped."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice

from toolformer_dag.conversations.messages import RecordedMessage
from toolformer_dag.model.requests import WINDOW_WEIGHTS


@dataclass(frozen=True, slots=True)
class Window:
    """Which words are weighted, and how.

    - `messages`: how many of the next messages of the assistant; with one, a result that serves later, as the token of
      a login does, would seem to tell nothing
    - `is_last`: the last message of the assistant in place of the next ones
    - `tokens`: how many tokens of these messages, from the first on
    - `weights`: of the tokens in their order; without any all weigh alike
    """

    messages: int = 1
    is_last: bool = False
    tokens: int = 100
    weights: tuple[float, ...] = ()

    def weighted_messages(self, messages: Sequence[RecordedMessage], call_message: int) -> list[int]:
        """Return the numbers of the messages behind message `call_message` whose words are weighted."""
        behind = range(call_message + 1, len(messages))
        if self.is_last:
            behind = behind[::-1]
        answers = (number for number in behind if messages[number].role == "assistant")
        return list(islice(answers, 1 if self.is_last else self.messages))

    def token_weights(self, tokens: int) -> tuple[float, ...]:
        """Return the weights of so many tokens, as (0.5, 0.5) for two that weigh alike."""
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
