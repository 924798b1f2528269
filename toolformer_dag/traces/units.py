"""The units of a conversation that are judged: recorded calls are the only kind.

A unit stands in a message. It helps if what the assistant says after it is likelier with it than without it, or with
another text in its place. What is particular to calls stands here and in the stages before the losses; what comes
behind (`variants`, `windows`, `judge`, `unit_losses`) asks a unit for what `UnitToJudge` lists and knows no call.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from toolformer_dag.conversations.messages import RecordedCall, RecordedMessage, remove_call, replace_result
from toolformer_dag.traces.stored_messages import compute_text_digest

NO_UNIT_VARIANT = "none"
"""The variant of a conversation without the unit, as if the call was never made."""
EMPTY_UNIT_VARIANT = "empty"
"""The variant with the unit and no text in it, as a call with an empty result."""
RECORDED_VARIANT = "own"
"""The variant with the unit as it was recorded. Variants with other texts in its place are named "0", "1", ..."""


class UnitToJudge(Protocol):
    """What the judge asks of a unit."""

    @property
    def messages(self) -> tuple[RecordedMessage, ...]:
        """The conversation; the same object for all units of a conversation, so that it is written once."""
        ...

    @property
    def message_index(self) -> int:
        """The number of the message with the unit."""
        ...

    @property
    def following_message_indexes(self) -> range:
        """The numbers of all messages after the one with the unit; it may help those of the assistant."""
        ...

    @property
    def own_and_other_texts(self) -> Sequence[str]:
        """Its text, such as the result of a call, then each text that it is compared with."""
        ...

    @property
    def reason_not_judged(self) -> str | None:
        """The reason why there is nothing to judge, whatever the model; None for most units."""
        ...

    def build_replacements(
        self, unit_message: RecordedMessage, cut_text: Callable[[str], str]
    ) -> dict[str, Sequence[RecordedMessage]]:
        """Write the message with the unit (a recorded call) in other ways, to see whether the recorded one helps more.

        Each way gives a variant of the conversation, which the judge model reads.

        Args:
            unit_message: The message with the unit, its long results shortened.
            cut_text: Shortens another text in the same way.

        Returns:
            By the name of each variant but "own" (as recorded), the messages in place of `unit_message`. For a call
            they are {"empty": [the message with an empty result], "0": [the message with another result], "none": []}.
        """
        ...


class CallPosition(NamedTuple):
    """The position of a call in a conversation: the numbers of its message, and of the call in that message."""

    message_index: int
    call_index: int


def iter_call_positions(messages: Sequence[RecordedMessage]) -> Iterator[CallPosition]:
    """Yield the position of each call; calls in messages of the user are left out."""
    for number, message in enumerate(messages):
        if message.role == "user":
            continue
        for index in range(len(message.calls)):
            yield CallPosition(number, index)


@dataclass(frozen=True, slots=True)
class CallToJudge:
    """A recorded call as a unit: its result is compared with no call, an empty result, and other results.

    Attributes:
        messages: the conversation.
        message_index: the number of the message with the call.
        call_index: the number of the call in that message.
        other_results: results of other calls; each is read in place of its own, one after another.
    """

    messages: tuple[RecordedMessage, ...]
    message_index: int
    call_index: int
    other_results: tuple[str, ...] = ()

    @property
    def call(self) -> RecordedCall:
        """The recorded call."""
        return self.messages[self.message_index].calls[self.call_index]

    @property
    def following_message_indexes(self) -> range:
        """The numbers of all messages after the one with the call."""
        return range(self.message_index + 1, len(self.messages))

    @property
    def own_and_other_texts(self) -> Sequence[str]:
        """The recorded result, then the other results."""
        return [self.call.result or "", *self.other_results]

    @property
    def reason_not_judged(self) -> str | None:
        """The reason "no_result" for a call without a result, None for any other."""
        return "no_result" if self.call.result is None else None

    def build_replacements(
        self, unit_message: RecordedMessage, cut_text: Callable[[str], str]
    ) -> dict[str, Sequence[RecordedMessage]]:
        """Write the message with the call in other ways, to see whether the recorded result helps more than those.

        Args:
            unit_message: The message with the call, its long results shortened.
            cut_text: Shortens a result.

        Returns:
            By the name of each way, the messages that stand in place of the message:

            - "empty": the message with an empty result of the call
            - "0", "1", ...: the message with each of the other results
            - "none": the message without the call; no message if it says nothing else and has no other call
        """
        replacements: dict[str, Sequence[RecordedMessage]] = {}
        replacements[EMPTY_UNIT_VARIANT] = replace_result(
            [unit_message], message_index=0, call_index=self.call_index, new_result=""
        )

        for variant_number, other_result in enumerate(self.other_results):
            replacements[str(variant_number)] = replace_result(
                [unit_message], message_index=0, call_index=self.call_index, new_result=cut_text(other_result)
            )

        replacements[NO_UNIT_VARIANT] = remove_call([unit_message], message_index=0, call_index=self.call_index)
        return replacements


def compute_call_key(
    conversation_digest: str, message_index: int, call_index: int, other_results: Sequence[str]
) -> str:
    """Return the key under which the measurements of a call are stored, a hash of what determines them.

    Args:
        conversation_digest: A hash of its conversation.
        message_index: The number of its message there.
        call_index: The number of the call in that message.
        other_results: The other results that it is compared with.
    """
    return compute_text_digest(repr((conversation_digest, message_index, call_index, tuple(other_results))))
