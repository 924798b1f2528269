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
    """A token of a text, with its log p and its place.

    Attributes:
        offset: The number of characters before the token, in the text without calls.
        token: The token.
    """

    offset: int
    token: TokenLikelihood


@dataclass(frozen=True, slots=True)
class NewText:
    """A whole text, or what one chunk of a stream adds to it.

    Attributes:
        text_index: The number of the text in the request, from 0.
        text: The added characters, with calls if the request wants them in the text.
        placed_tokens: The tokens that begin in these characters, with log p. Empty unless the request asks for
            logprobs.
        answered_calls: The calls that were answered here.
        finish_reason: Why the text ended, `length` or `stop`. None before its end.
    """

    text_index: int
    text: str
    placed_tokens: Sequence[PlacedToken] = ()
    answered_calls: Sequence[AnsweredCall] = ()
    finish_reason: str | None = None


def build_whole_text(text_index: int, writing: Writing, *, has_calls_in_text: bool) -> NewText:
    """Build the content of the whole answer for a text that has ended.

    Args:
        text_index: The number of the text in its request, from 0.
        writing: The text.
        has_calls_in_text: Whether the returned text includes its calls with their results.

    Raises:
        Exception: The error that ended the text, if there was one.
    """
    generation = writing.generation_future.result()
    text = generation.text if has_calls_in_text else generation.plain_text

    # The tokens of a stop word are beyond the end of the text, where they were cut off.
    text_length = len(generation.plain_text)
    placed_tokens = _place_tokens(generation.token_likelihoods, first_offset=0)
    tokens_of_text = [placed_token for placed_token in placed_tokens if placed_token.offset < text_length]

    return NewText(
        text_index,
        text=text,
        placed_tokens=tokens_of_text,
        answered_calls=writing.answered_calls,
        finish_reason=get_finish_reason(writing),
    )


class TextStream:
    """Turns the pieces of one text, in the order in which they are decoded, into the contents of a stream's events."""

    def __init__(self, text_index: int, writing: Writing, *, has_calls_in_text: bool) -> None:
        """Begin a stream of which nothing is sent yet.

        Args:
            text_index: The number of the text in its request, from 0.
            writing: The text.
            has_calls_in_text: Whether the client wants calls with their results as part of the text.
        """
        self._text_index = text_index
        self._writing = writing
        self._has_calls_in_text = has_calls_in_text
        self._sent_call_count = 0
        self._next_offset = 0  # how many characters, without calls, are before the next token

    def convert_piece(self, piece: WrittenPiece | Generation) -> NewText:
        """Convert the next piece of the text to what a client gets of it.

        - Of the finished text, which comes last, it gets the reason why the text ended. It has the characters already.
        - Of an answered call, it gets the call with its result.
        - Of plain text, it gets the characters, and the tokens that begin in them.

        Nothing of a call is sent before its answer, so the characters within a call must not be passed here.

        Args:
            piece: The next piece of the text, or the whole text at its end.
        """
        if isinstance(piece, Generation):
            return NewText(self._text_index, text="", finish_reason=get_finish_reason(self._writing))

        if piece.answered_call is not None:
            return self._build_text_of_call(piece.answered_call)

        tokens = _place_tokens(piece.token_likelihoods, first_offset=self._next_offset)
        # Not the length of `piece.text`: a token begins in it, but may end in the next piece.
        self._next_offset += sum(len(token.text) for token in piece.token_likelihoods)
        return NewText(self._text_index, text=piece.text, placed_tokens=tokens)

    def _build_text_of_call(self, decoded_call: DecodedCall) -> NewText:
        """Return what an answered call adds to the text, and count the call as sent."""
        # This list has the same calls in the same order, with seconds and offsets.
        answered_call = self._writing.answered_calls[self._sent_call_count]
        self._sent_call_count += 1

        text = format_decoded_call(decoded_call) if self._has_calls_in_text else ""
        return NewText(self._text_index, text=text, answered_calls=[answered_call])


def _place_tokens(tokens: Sequence[TokenLikelihood], *, first_offset: int) -> list[PlacedToken]:
    """Return consecutive tokens with their offsets, the numbers of characters before them.

    For example, "It" and " was" have the offsets 5 and 7 if `first_offset` is 5.
    """
    placed_tokens = []
    offset = first_offset
    for token in tokens:
        placed_tokens.append(PlacedToken(offset, token))
        offset += len(token.text)
    return placed_tokens


def build_call_object(answered_call: AnsweredCall, *, has_calls_in_text: bool) -> dict[str, Any]:
    """Build the JSON object that describes a tool call in an answer.

    Its `offset` is the number of characters before the call in the answer's text, which may include earlier calls.

    Args:
        answered_call: The call, with its result or the reason why it has none.
        has_calls_in_text: Whether the answer's text includes calls.
    """
    decoded_call = answered_call.decoded_call
    offset = answered_call.text_offset if has_calls_in_text else answered_call.plain_offset
    return {
        "tool": decoded_call.tool,
        "input": decoded_call.input,
        "result": decoded_call.result,
        "reason": decoded_call.reason,
        "seconds": round(answered_call.waited_seconds, 6),
        "offset": offset,
    }


def build_usage_object(writings: Sequence[Writing]) -> dict[str, int]:
    """Build OpenAI's `usage` object, with the token counts of all texts of a request.

    The tokens of calls count as tokens of the completion.

    Args:
        writings: The texts, which must have ended.

    Raises:
        Exception: The error that ended a text, if there was one.
    """
    prompt_token_count = sum(writing.prompt_token_count for writing in writings)
    completion_token_count = sum(writing.generation_future.result().token_count for writing in writings)
    return {
        "prompt_tokens": prompt_token_count,
        "completion_tokens": completion_token_count,
        "total_tokens": prompt_token_count + completion_token_count,
    }


def get_finish_reason(writing: Writing) -> str:
    """Return why a text ended: "length" if it reached a limit of tokens, otherwise "stop"."""
    return "length" if writing.written_text.is_full else "stop"
