"""Which words after a unit, such as a recorded call, are weighted: their loss says whether it helped."""

from collections.abc import Sequence
from dataclasses import dataclass

from toolformer_dag.conversations.messages import RecordedMessage
from toolformer_dag.model.requests import WINDOW_WEIGHTS


@dataclass(frozen=True, slots=True)
class Window:
    """Which tokens after a unit are weighted, and how much.

    Attributes:
        max_messages: the number of next messages of the assistant whose words are weighted. With only one, a result
            that is used later, such as the token of a login, would seem to be useless.
        is_last_message_only: whether only the last message of the assistant is weighted, in place of the next ones.
        max_tokens: the most tokens that are weighted, from the first weighted word on.
        fixed_weights: the weights of these tokens, in their order; if empty, all weigh alike.
    """

    max_messages: int = 1
    is_last_message_only: bool = False
    max_tokens: int = 100
    fixed_weights: tuple[float, ...] = ()

    def list_weighted_message_indexes(
        self, messages: Sequence[RecordedMessage], following_message_indexes: range
    ) -> list[int]:
        """Select the messages over whose words the loss is computed: the next ones of the assistant, or its last one.

        Args:
            messages: All messages of the conversation.
            following_message_indexes: The numbers of the messages after the unit, such as the judged call.

        Returns:
            The numbers of these messages, such as [4, 6].
        """
        answer_indexes = [index for index in following_message_indexes if messages[index].role == "assistant"]
        if self.is_last_message_only:
            return answer_indexes[-1:]
        return answer_indexes[: self.max_messages]

    def compute_token_weights(self, token_count: int) -> tuple[float, ...]:
        """Return the weights of a number of tokens, as (0.5, 0.5) for 2 tokens that weigh alike."""
        if self.fixed_weights:
            return self.fixed_weights[:token_count]
        equal_weight = 1 / max(1, token_count)
        return (equal_weight,) * token_count


WINDOWS_BY_NAME = {
    "next_words": Window(max_messages=4),
    "next": Window(max_messages=1),
    "answer": Window(is_last_message_only=True),
    "paper": Window(max_tokens=len(WINDOW_WEIGHTS), fixed_weights=WINDOW_WEIGHTS),
}
"""The windows by the names that `traces.window` takes; "paper" weighs as Section 2 does."""
