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
        """Remember an answered call. follows_result: whether it came directly after another one's result."""
        self.calls.append(call)
        if not follows_result:
            self.position_count += 1

    def has_result_of(self, call: DecodedCall) -> bool:
        """Return whether an earlier call with the same tool and input has a result."""
        for earlier in self.calls:
            is_same = (earlier.tool, earlier.input) == (call.tool, call.input)
            if is_same and earlier.result is not None:
                return True
        return False
