"""A text that a client waits for: its request, what is written so far, and why it may be refused."""

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial

from toolformer_dag.decoding.generation import DecodedCall, Generation, WrittenPiece, explain_nothing_written
from toolformer_dag.decoding.rules import DecodingRules
from toolformer_dag.decoding.written_text import WrittenText
from toolformer_dag.files import UserError


class Busy(UserError):
    """Too many texts are open to begin another one. `seconds`: after how long to try again."""

    def __init__(self, seconds: int) -> None:
        super().__init__(f"too many texts wait here; ask again in {seconds} s")
        self.seconds = seconds


class NothingWritten(UserError):
    """A prompt that cannot be completed. `reason`: `does_not_fit` or `empty_prompt`, as in `Generation`."""

    def __init__(self, reason: str) -> None:
        super().__init__(explain_nothing_written(reason))
        self.reason = reason


@dataclass(frozen=True, slots=True)
class TextRequest:
    """A client's request to complete a prompt, as `generate` does.

    - `prompt`: a text, or its token ids with BOS.
    - `context`: the date for the calendar, as 2023-01-30.
    - The other fields replace those of the server's DecodingRules, where they are explained.
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
        """Return a copy of the server's rules with the limits of this request."""
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

    - `call`: the call with its result, or the reason why it has none.
    - `seconds`: how long its text waited for the answer.
    - `text_offset`: the number of characters before it in the text with calls.
    - `plain_offset`: the number of characters before it in the text without calls.
    """

    call: DecodedCall
    seconds: float
    text_offset: int
    plain_offset: int


class Writing:
    """A text of a client, from its request to its end.

    The decoding thread changes it. Other threads read it once `done` has a result, or in `watch`.

    - `text`: the text with its state.
    - `prompt_token_count`: the number of tokens of its prompt.
    - `done`: the future of the Generation, or of the error that ended the text.
    - `calls`: the calls that were answered so far.
    - `began`: when the request came.
    - `call_began`: when the text began to wait for its last call; 0 before the first.
    - `call_deadline`: until when it waits for that call. These three by `time.monotonic`.
    """

    def __init__(
        self, request: TextRequest, rules: DecodingRules, prompt_tokens: Sequence[int], watch: "Watch | None"
    ) -> None:
        """Prepare a text that is to be written after a prompt.

        Args:
            rules: The server's rules of decoding. The limits of `request` are added to them.
            watch: Called in the decoding thread with this object and each piece of text as it is decoded.
        """
        if watch is not None:
            rules = replace(rules, watch=partial(watch, self))  # only called once the text is being decoded

        self.request = request
        self.prompt_token_count = len(prompt_tokens)
        self.text = WrittenText(request.rules(rules), prompt_tokens, context=request.context)
        self.done: Future[Generation] = Future()  # gets the finished text, or the error that ended it
        self.began = time.monotonic()

        # The decoding thread changes these:
        self.calls: list[AnsweredCall] = []  # the calls that were answered so far
        self.call_began = 0.0  # when the text began to wait for its last call; 0 before the first
        self.call_deadline = 0.0  # until when it waits for this call

    def seconds_for_tools(self, limit: float) -> float:
        """Return how many of `limit` seconds are left for waiting for tools; 0 or less if none are."""
        return limit - sum(call.seconds for call in self.calls)


Watch = Callable[[Writing, WrittenPiece], None]
