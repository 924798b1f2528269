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
    """Too many texts are open to begin another one.

    Attributes:
        retry_seconds: After how many seconds the client may try again.
    """

    def __init__(self, retry_seconds: int) -> None:
        """Build the error, with a message that says when to try again."""
        super().__init__(f"too many texts wait here; ask again in {retry_seconds} s")
        self.retry_seconds = retry_seconds


class NothingWritten(UserError):
    """A prompt cannot be completed.

    Attributes:
        reason: `does_not_fit` or `empty_prompt`, as in `Generation`.
    """

    def __init__(self, reason: str) -> None:
        """Build the error, with a message that says what to do about the reason."""
        super().__init__(explain_nothing_written(reason))
        self.reason = reason


@dataclass(frozen=True, slots=True)
class TextRequest:
    """A client's request to complete a prompt, as `generate` does.

    Attributes:
        prompt: A text, or its token ids with BOS.
        max_new_tokens: The maximum number of tokens outside calls.
        max_calls: The maximum number of positions in the text at which calls are made.
        context: The date for the calendar, as 2023-01-30.
        is_one_sentence: Whether the text ends with its first sentence or line.
        withheld_tools: The names of the tools that may not be called.
        stop_words: Words before which the text ends, if they occur outside calls.
        likeliest_count: How many of the likeliest tokens are kept with log p for each token outside calls. None if log
            p is not kept at all.
    """

    prompt: str | Sequence[int]
    max_new_tokens: int
    max_calls: int
    context: str = ""
    is_one_sentence: bool = False
    withheld_tools: frozenset[str] = frozenset()
    stop_words: tuple[str, ...] = ()
    likeliest_count: int | None = None

    def apply_to_rules(self, server_rules: DecodingRules) -> DecodingRules:
        """Return a copy of the server's rules with the limits of this request."""
        return replace(
            server_rules,
            max_new_tokens=self.max_new_tokens,
            max_call_positions=self.max_calls,
            withheld_tool_names=self.withheld_tools,
            ends_after_one_sentence=self.is_one_sentence,
            stop_words=self.stop_words,
            likeliest_token_count=self.likeliest_count,
        )


@dataclass(frozen=True, slots=True)
class AnsweredCall:
    """A call with its answer.

    Attributes:
        decoded_call: The call with its result, or the reason why it has none.
        waited_seconds: How long its text waited for the answer.
        text_offset: The number of characters before it in the text with calls.
        plain_offset: The number of characters before it in the text without calls.
    """

    decoded_call: DecodedCall
    waited_seconds: float
    text_offset: int
    plain_offset: int


class Writing:
    """A text that is written for a client, from its request to its end.

    The decoding thread changes it. Other threads read it once `generation_future` has a result, or once they have got a
    piece of the text.

    Attributes:
        text_request: What the client wants.
        written_text: The text with its state.
        prompt_token_count: The number of tokens of its prompt.
        generation_future: The future of the Generation, or of the error that ended the text.
        answered_calls: The calls that were answered so far.
        began_at: When the request came, by `time.monotonic` like the other two times.
        call_began_at: When the text began to wait for its last call. 0 before the first.
        call_deadline: Until when it waits for that call.
    """

    def __init__(
        self,
        text_request: TextRequest,
        server_rules: DecodingRules,
        prompt_token_ids: Sequence[int],
        on_piece: "PieceCallback | None",
    ) -> None:
        """Prepare a text that is to be written after a prompt.

        Args:
            text_request: What the client wants.
            server_rules: The server's rules of decoding. The limits of `text_request` take the place of theirs.
            prompt_token_ids: The token ids of the prompt, with BOS.
            on_piece: Called in the decoding thread with this object and each piece of text as it is decoded.
        """
        rules = text_request.apply_to_rules(server_rules)
        if on_piece is not None:
            # The watcher is only called once the text is being decoded, when this object is complete.
            rules = replace(rules, watch_piece=partial(on_piece, self))

        self.text_request = text_request
        self.prompt_token_count = len(prompt_token_ids)
        self.written_text = WrittenText(rules, prompt_token_ids, tool_context=text_request.context)
        self.generation_future: Future[Generation] = Future()  # gets the finished text, or the error that ended it
        self.began_at = time.monotonic()

        # The decoding thread changes these with each call.
        self.answered_calls: list[AnsweredCall] = []
        self.call_began_at = 0.0
        self.call_deadline = 0.0

    def compute_tool_seconds_left(self, max_tool_seconds: float) -> float:
        """Compute how long the text may still wait for tools. This is 0 or less if no time is left.

        Args:
            max_tool_seconds: How many seconds it may wait for all its calls together.
        """
        waited_seconds = sum(call.waited_seconds for call in self.answered_calls)
        return max_tool_seconds - waited_seconds


PieceCallback = Callable[[Writing, WrittenPiece], None]
"""A function that gets each piece of a text as it is decoded, with the text to which it belongs."""
