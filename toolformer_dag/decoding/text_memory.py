"""What a text that is being written remembers of its calls, for the rules about what may come next."""

from dataclasses import dataclass, field

from toolformer_dag.decoding.generation import DecodedCall


@dataclass(slots=True)
class TextMemory:
    """What one text remembers of its calls, from its prompt to its end.

    A rule that looks back has its field here. `WrittenText` changes it when a call is answered, and each
    `TextSinceCall` reads it. It stays the same from one answer to the next.

    Attributes:
        answered_calls: The answered calls, with results or with the reasons why they have none. Calls in the prompt are
            not among them.
        call_position_count: The number of positions at which calls were made. A chain of calls is at one position.
    """

    answered_calls: list[DecodedCall] = field(default_factory=list)
    call_position_count: int = 0

    def add_call(self, call: DecodedCall, *, follows_result: bool) -> None:
        """Remember an answered call.

        Args:
            call: The call, with its result or the reason why it has none.
            follows_result: Whether it came directly after the result of another call, at the same position.
        """
        self.answered_calls.append(call)
        if not follows_result:
            self.call_position_count += 1

    def has_same_call_with_result(self, call: DecodedCall) -> bool:
        """Return whether an earlier call with the same tool and input has a result."""
        for earlier_call in self.answered_calls:
            is_same_call = (earlier_call.tool, earlier_call.input) == (call.tool, call.input)
            if is_same_call and earlier_call.result is not None:
                return True
        return False
