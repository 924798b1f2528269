"""What answers of all kinds of requests are made of: new text, calls, tokens, and why a text ended."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from toolformer_dag.decoding.generation import Generation, TokenLikelihood, WrittenPiece, call_text
from toolformer_dag.serving.writings import AnsweredCall, Writing


class PlacedToken(NamedTuple):
    """A token of the text without calls, with the character at which it begins there."""

    offset: int
    token: TokenLikelihood


@dataclass(frozen=True, slots=True)
class NewText:
    """A text, or what a chunk of a stream adds to it.

    - `index`: the number of the text in the request.
    - `tokens`: where the request asks for logprobs: those that begin in it.
    - `calls`: those that were answered in it.
    - `finish_reason`: why the text ended (`finish_reason`); None before its end.
    """

    index: int
    text: str
    tokens: Sequence[PlacedToken] = ()
    calls: Sequence[AnsweredCall] = ()
    finish_reason: str | None = None


def whole_text(index: int, writing: Writing, *, calls_in_text: bool) -> NewText:
    """Return all of a text that has ended. Raises its error."""
    generation = writing.done.result()
    tokens = []
    for placed in _placed(generation.likelihoods, 0):
        if placed.offset < len(generation.plain):  # a stop word is cut off, its tokens are still listed
            tokens.append(placed)
    text = generation.text if calls_in_text else generation.plain
    return NewText(index, text, tokens, writing.calls, finish_reason(writing))


class TextStream:
    """Turns the pieces of one text into what the chunks of its stream add."""

    def __init__(self, index: int, writing: Writing, *, calls_in_text: bool) -> None:
        self._index = index
        self._writing = writing
        self._calls_in_text = calls_in_text
        self._sent_calls = 0
        self._next_offset = 0  # the character at which the next token begins

    def new_text(self, piece: WrittenPiece | Generation) -> NewText:
        """Return what a stream sends for a piece of the text: new text, an answered call, or the end of the text.

        A call is sent once it has its result: each piece with a call stands for the next call of the writing.
        """
        if isinstance(piece, Generation):
            return NewText(self._index, "", finish_reason=finish_reason(self._writing))
        if piece.call is not None:
            call = self._writing.calls[self._sent_calls]
            self._sent_calls += 1
            text = call_text(piece.call) if self._calls_in_text else ""
            return NewText(self._index, text, calls=[call])
        tokens = _placed(piece.likelihoods, self._next_offset)
        self._next_offset += sum(len(token.text) for token in piece.likelihoods)
        return NewText(self._index, piece.text, tokens)


def _placed(tokens: Sequence[TokenLikelihood], offset: int) -> list[PlacedToken]:
    """Return tokens that follow each other, with their places; the first begins at the character `offset`."""
    placed = []
    for token in tokens:
        placed.append(PlacedToken(offset, token))
        offset += len(token.text)
    return placed


def call_object(answered: AnsweredCall, *, calls_in_text: bool) -> dict[str, Any]:
    """Return a call as answers show it; `offset`: the characters of the answer's text before it."""
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
    """Count tokens; those of calls that the model wrote are among the completion's."""
    prompt_tokens = sum(writing.prompt_tokens for writing in writings)
    completion_tokens = sum(writing.done.result().tokens for writing in writings)
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
    }


def finish_reason(writing: Writing) -> str:
    """Return why a text ended: `length` for a limit of tokens, else `stop`."""
    return "length" if writing.text.is_full else "stop"
