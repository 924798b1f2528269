"""The units of a conversation that are judged: recorded calls are the only kind.

A unit stands in a message. It helps if what the assistant says after it is likelier with it than without it, or with
another text in its place. What is particular to calls stands here and in the stages before the losses; what comes
behind (`variants`, `windows`, `judge`, `unit_losses`) asks a unit for what `UnitToJudge` lists and knows no call.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from toolformer_dag.conversations.messages import RecordedCall, RecordedMessage, with_result, without_call
from toolformer_dag.traces.stored_messages import text_digest

NONE = "none"
"""The variant of a conversation without the unit, as if the call was never made."""
EMPTY = "empty"
"""The variant with the unit and no text in it, as a call with an empty result."""
OWN = "own"
"""The variant with the unit as it was recorded. Variants with other texts in its place are named "0", "1", ..."""


class UnitToJudge(Protocol):
    """What the judge asks of a unit."""

    @property
    def messages(self) -> tuple[RecordedMessage, ...]:
        """The conversation; the same object for all units of a conversation, so that it is written once."""
        ...

    @property
    def message(self) -> int:
        """The number of the message with the unit."""
        ...

    @property
    def following(self) -> range:
        """The numbers of the messages whose words it may help, if they are of the assistant; all after `message`."""
        ...

    @property
    def texts(self) -> Sequence[str]:
        """Its text, as the result of a call, then each text that it is held against."""
        ...

    @property
    def not_judged(self) -> str | None:
        """The reason why there is nothing to judge, whatever the model; None for most units."""
        ...

    def replacements(self, message: RecordedMessage, cut: Callable[[str], str]) -> dict[str, Sequence[RecordedMessage]]:
        """Return, by the name of each variant but OWN, the messages in place of the message with the unit.

        message: that message, with long results cut. cut: cuts another text as long.
        """
        ...


class CallPosition(NamedTuple):
    """The position of a call in a conversation: the numbers of its message, and of the call in that message."""

    message: int
    call: int


def iter_call_positions(messages: Sequence[RecordedMessage]) -> Iterator[CallPosition]:
    """Yield the position of each call; calls in messages of the user are left out."""
    for number, message in enumerate(messages):
        if message.role == "user":
            continue
        for index in range(len(message.calls)):
            yield CallPosition(number, index)


@dataclass(frozen=True, slots=True)
class CallToJudge:
    """A recorded call as a unit: its result is held against no call, an empty result, and other results.

    - `messages`: the conversation
    - `message`: the number of the message with the call
    - `index`: the number of the call in that message
    - `other_results`: results of other calls; each is read in place of its own, one after another
    """

    messages: tuple[RecordedMessage, ...]
    message: int
    index: int
    other_results: tuple[str, ...] = ()

    @property
    def call(self) -> RecordedCall:
        """The recorded call."""
        return self.messages[self.message].calls[self.index]

    @property
    def following(self) -> range:
        """The numbers of all messages after that with the call."""
        return range(self.message + 1, len(self.messages))

    @property
    def texts(self) -> Sequence[str]:
        """The recorded result, then the other results."""
        return [self.call.result or "", *self.other_results]

    @property
    def not_judged(self) -> str | None:
        """The reason no_result for a call without a result; else None."""
        return "no_result" if self.call.result is None else None

    def replacements(self, message: RecordedMessage, cut: Callable[[str], str]) -> dict[str, Sequence[RecordedMessage]]:
        """Write the message with the call in other ways, one for each variant of the conversation but the recorded one.

        Args:
            message: The message with the call, its long results shortened.
            cut: Shortens a result.

        Returns:
            By the name of the variant, the messages to put in place of the message:

            - EMPTY: the message with an empty result of the call
            - "0", "1", ...: the message with each of the other results
            - NONE: the message without the call; no message if it says nothing else and has no other call
        """
        replacements: dict[str, Sequence[RecordedMessage]] = {}
        replacements[EMPTY] = with_result([message], number=0, index=self.index, result="")

        for variant_number, other_result in enumerate(self.other_results):
            shortened = cut(other_result)
            replacements[str(variant_number)] = with_result([message], number=0, index=self.index, result=shortened)

        replacements[NONE] = without_call([message], number=0, index=self.index)
        return replacements


def compute_call_key(digest: str, turn: int, call: int, results: Sequence[str]) -> str:
    """Return the key under which the measurements of a call are stored, a hash of what determines them.

    digest: of its conversation. turn: the number of its message there. call: its number in the message. results: the
    other results that it is held against.
    """
    return text_digest(repr((digest, turn, call, tuple(results))))
