"""What a text that is being written remembers of its calls, for the rules about what may come next."""

from dataclasses import dataclass, field

from toolformer_dag.decoding.generation import DecodedCall


@dataclass(slots=True)
class TextMemory:
    """What a text remembers from its prompt to its end; one object per text.

    A rule that looks back has its field here. `WrittenText` changes it when a call is answered, and each
    `TextSinceCall` reads it. It stays the same from one answer to the next.

    - `calls`: the answered calls, with results or with the reasons why they have none.
    - `position_count`: the number of positions at which calls were made; a chain of calls is at one.
    """

    calls: list[DecodedCall] = field(default_factory=list)
    position_count: int = 0

    def add(self, call: DecodedCall, *, follows_result: bool) -> None:
        """Remember an answered call.

        Args:
            call: The call, with its result or the reason why it has none.
            follows_result: Whether it came directly after the result of another call, at the same position.
        """
        self.calls.append(call)
        if not follows_result:
            self.position_count += 1

    def has_result_of(self, call: DecodedCall) -> bool:
        """Return whether an earlier call with the same tool and input has a result."""
        for earlier_call in self.calls:
            is_same_call = (earlier_call.tool, earlier_call.input) == (call.tool, call.input)
            if is_same_call and earlier_call.result is not None:
                return True
        return False
