"""A text that a client waits for: what was asked, what is written so far, and why it may be refused."""

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial

from toolformer_dag.decoding.generation import DecodedCall, Generation, WrittenPiece, why_nothing
from toolformer_dag.decoding.rules import DecodingRules
from toolformer_dag.decoding.written_text import WrittenText
from toolformer_dag.files import UserError


class Busy(UserError):
    """As many texts are open as may be. `seconds`: when to ask again."""

    def __init__(self, seconds: int) -> None:
        super().__init__(f"too many texts wait here; ask again in {seconds} s")
        self.seconds = seconds


class NothingWritten(UserError):
    """A text that cannot be completed. `reason`: that of its Generation."""

    def __init__(self, reason: str) -> None:
        super().__init__(why_nothing(reason))
        self.reason = reason


@dataclass(frozen=True, slots=True)
class TextRequest:
    """A text to complete as `generate` does, under limits of its own.

    - `prompt`: a text, or its tokens with BOS.
    - `context`: the date for the calendar, as 2023-01-30.
    - The other fields are as in DecodingRules.
    """

    prompt: str | Sequence[int]
    max_new_tokens: int
    calls: int
    context: str = ""
    one_sentence: bool = False
    withheld: frozenset[str] = frozenset()
    stop: tuple[str, ...] = ()
    likeliest: int | None = None

    def rules(self, rules: DecodingRules) -> DecodingRules:
        """Return `rules` with the limits of this text."""
        return replace(
            rules,
            max_new_tokens=self.max_new_tokens,
            calls=self.calls,
            withheld=self.withheld,
            one_sentence=self.one_sentence,
            stop=self.stop,
            likeliest=self.likeliest,
        )


@dataclass(frozen=True, slots=True)
class AnsweredCall:
    """A call with its answer.

    - `seconds`: how long its text waited for it.
    - `text_offset`, `plain_offset`: the characters before it in the text with calls, and in the text without them.
    """

    call: DecodedCall
    seconds: float
    text_offset: int
    plain_offset: int


class Writing:
    """A text of a client, from its request to its end.

    The thread that decodes changes it. Other threads read it once `done` has ended, or in `watch`.

    - `text`: the text with its state. `prompt_tokens`: how many tokens its prompt has.
    - `done`: gets the Generation, or the error that ended the text.
    - `calls`: those that were answered so far.
    - `began`: when it was asked for. `call_began`, `call_deadline`: when the text began to wait for its tool, and until
      when it does. All three by `time.monotonic`.
    """

    def __init__(
        self, request: TextRequest, rules: DecodingRules, prompt_tokens: Sequence[int], watch: "Watch | None"
    ) -> None:
        """Prepare a text; `watch` gets each piece of it as it is decoded, in the thread that decodes."""
        if watch is not None:
            rules = replace(rules, watch=partial(watch, self))
        self.request = request
        self.prompt_tokens = len(prompt_tokens)
        self.text = WrittenText(request.rules(rules), prompt_tokens, context=request.context)
        self.done: Future[Generation] = Future()
        self.calls: list[AnsweredCall] = []
        self.began = time.monotonic()
        self.call_began = 0.0
        self.call_deadline = 0.0

    def seconds_for_tools(self, limit: float) -> float:
        """Return how long the text may still wait for its tools, of `limit` seconds in all; below 0 for no longer."""
        return limit - sum(call.seconds for call in self.calls)


Watch = Callable[[Writing, WrittenPiece], None]
