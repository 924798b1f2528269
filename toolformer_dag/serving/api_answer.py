"""The parts of answers to all kinds of requests: text, calls, tokens, counts, and why a text ended."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from toolformer_dag.decoding.generation import (
    DecodedCall,
    Generation,
    TokenLikelihood,
    WrittenPiece,
    format_decoded_call,
)
from toolformer_dag.serving.writings import AnsweredCall, Writing


class PlacedToken(NamedTuple):
    """A token of the text without calls, with log p. `offset`: the number of characters of that text before it."""

    offset: int
    token: TokenLikelihood


@dataclass(frozen=True, slots=True)
class NewText:
    """A whole text, or what one chunk of a stream adds to it.

    - `index`: the number of the text in the request, from 0.
    - `text`: the added characters, with calls if the request wants them in the text.
    - `tokens`: the tokens that begin in these characters, with log p; empty unless the request asks for logprobs.
    - `calls`: the calls that were answered here.
    - `finish_reason`: why the text ended, `length` or `stop`; None before its end.
    """

    index: int
    text: str
    tokens: Sequence[PlacedToken] = ()
    calls: Sequence[AnsweredCall] = ()
    finish_reason: str | None = None


def whole_text(index: int, writing: Writing, *, calls_in_text: bool) -> NewText:
    """Build the whole answer for a text that has ended.

    Args:
        index: The number of the text in its request.
        calls_in_text: Whether the returned text includes its calls with their results.

    Raises:
        Exception: The error that ended the text, if there was one.
    """
    generation = writing.done.result()  # its `text` has calls in it, `plain` is the same text without them

    tokens = []
    for placed_token in _place_tokens(generation.likelihoods, first_offset=0):
        is_cut_off = placed_token.offset >= len(generation.plain)  # the tokens of a stop word
        if not is_cut_off:
            tokens.append(placed_token)

    return NewText(
        index,
        text=generation.text if calls_in_text else generation.plain,
        tokens=tokens,
        calls=writing.calls,
        finish_reason=finish_reason(writing),
    )


class TextStream:
    """Turns the pieces of one text, in the order in which they are decoded, into the contents of stream chunks."""

    def __init__(self, index: int, writing: Writing, *, calls_in_text: bool) -> None:
        self._index = index
        self._writing = writing
        self._calls_in_text = calls_in_text
        self._sent_call_count = 0
        self._next_offset = 0  # the characters, without calls, before the next token

    def new_text(self, piece: WrittenPiece | Generation) -> NewText:
        """Convert the next piece of a text to what a client has to be told.

        - The finished text (`Generation`), which comes last, tells why it ended.
        - An answered call tells the call.
        - Characters of plain text tell these characters, and the tokens that begin in them.

        Nothing of a call is sent before its answer, so the characters within a call are not passed here.
        """
        if isinstance(piece, Generation):
            return NewText(self._index, text="", finish_reason=finish_reason(self._writing))
        if piece.call is not None:
            return self._build_new_call(piece.call)

        tokens = _place_tokens(piece.likelihoods, first_offset=self._next_offset)
        self._next_offset += sum(len(token.text) for token in piece.likelihoods)
        return NewText(self._index, text=piece.text, tokens=tokens)

    def _build_new_call(self, call: DecodedCall) -> NewText:
        """Return what an answered call adds to the text, and count it as sent.

        `Writing.calls` holds the same calls in the same order, with seconds and offsets.
        """
        answered_call = self._writing.calls[self._sent_call_count]
        self._sent_call_count += 1
        text = format_decoded_call(call) if self._calls_in_text else ""
        return NewText(self._index, text=text, calls=[answered_call])


def _place_tokens(tokens: Sequence[TokenLikelihood], *, first_offset: int) -> list[PlacedToken]:
    """Return consecutive tokens with their offsets: "It" and " was" have 5 and 7 if `first_offset` is 5."""
    placed_tokens = []
    offset = first_offset
    for token in tokens:
        placed_tokens.append(PlacedToken(offset, token))
        offset += len(token.text)
    return placed_tokens


def build_call_object(answered: AnsweredCall, *, calls_in_text: bool) -> dict[str, Any]:
    """Build the JSON object of a call.

    Its `offset` is the number of characters before the call in the answer's text.

    Args:
        calls_in_text: Whether the answer's text includes calls.
    """
    call = answered.call
    return {
        "tool": call.tool,
        "input": call.input,
        "result": call.result,
        "reason": call.reason,
        "seconds": round(answered.seconds, 6),
        "offset": answered.text_offset if calls_in_text else answered.plain_offset,
    }


def usage(writings: Sequence[Writing]) -> dict[str, int]:
    """Return OpenAI's `usage`: token counts of prompts and completions, tokens of calls included, and their sum."""
    prompt_tokens = sum(writing.prompt_token_count for writing in writings)
    completion_tokens = sum(writing.done.result().tokens for writing in writings)
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
    }


def finish_reason(writing: Writing) -> str:
    """Return why a text ended: "length" if it reached a limit of tokens, else "stop"."""
    return "length" if writing.text.is_full else "stop"
