"""What decoding gives back. Imports no torch."""

from dataclasses import dataclass

DECODING = 2  # raised by hand when the same model would write another text after the same prompt
TOOL_DOWN = "tool_down"
"""The reason of every call of a tool that could not work as a whole."""


@dataclass(frozen=True, slots=True)
class MadeCall:
    """A call that was begun, with its result or the reason why there is none.

    `tool` is empty and `input` holds what was written where that was no call. Reasons: the tool's own and the runner's
    (`lost:...`); `tool_down`; `unknown_tool`; `withheld`; `malformed:...` as in `parse_call`; `no_arrow` (closed
    before `->`); `no_end` (neither `->` nor `]` within the limit); `end_of_text`.
    """

    tool: str
    input: str
    result: str | None
    reason: str | None


@dataclass(frozen=True, slots=True)
class Generation:
    """What was written after the prompt: `text` with calls, `plain` without them.

    `tokens`: tokens that the model chose, those of calls included. `reason`: `does_not_fit` where the prompt fills the
    context, `empty_prompt` where there is none and the tokenizer adds no BOS; then nothing was written.
    """

    text: str
    plain: str
    calls: tuple[MadeCall, ...]
    tokens: int
    reason: str | None = None
