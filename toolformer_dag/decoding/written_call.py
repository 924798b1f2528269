"""A tool call that is being written: its tokens, which may follow, and where its input could end."""

from dataclasses import dataclass, field
from typing import NamedTuple

from toolformer_dag.decoding.generation import NO_CALL_END, DecodedCall
from toolformer_dag.decoding.vocabulary import Vocabulary
from toolformer_dag.model.backend import CallForm
from toolformer_dag.texts.calls import RESULT_ARROW, MalformedCall, parse_call, restore_paper_markers
from toolformer_dag.texts.input_ends import find_text_after_input

INCOMPLETE_CHARACTER = "\ufffd"
"""The text that the bytes of an incomplete character decode to."""


class Closing(NamedTuple):
    """A possible end of a call's input: its log p, and the call's text with this end, up to `->`."""

    log_probability: float
    body: str


@dataclass(slots=True)
class WrittenCall:
    """An open call: its tool is not run yet, and it may still be growing.

    Attributes:
        call_form: The grammar of the call, which says what tokens may follow.
        tokens: Its tokens after ` [`.
        likeliest_closing: The likeliest end of its input so far. None if `)` was never likely.
    """

    vocabulary: Vocabulary
    call_form: CallForm
    tokens: list[int] = field(default_factory=list)
    likeliest_closing: Closing | None = None

    def append_token(self, token: int) -> None:
        """Append a token, and advance `call_form` by it."""
        self.tokens.append(token)
        self.call_form.grammar_matcher.consume_token(token)

    @property
    def has_ended(self) -> bool:
        """Return whether `->` is written after the input, or the limit of tokens is reached."""
        return len(self.tokens) >= self.call_form.max_tokens or _has_arrow(self.decode_body())

    @property
    def has_tool_name(self) -> bool:
        """Return whether the name of the tool is complete: `(` is written after it."""
        return "(" in self.decode_body()

    def decode_body(self) -> str:
        """Return the text written after ` [`, with the markers of the paper in place of the model's own."""
        text = self.vocabulary.decode_text(self.tokens, self.vocabulary.start_tokens)
        return restore_paper_markers(text, self.vocabulary.encoding.markers)

    def build_closed_body(self) -> str:
        """Return the text of a finished call after ` [`.

        If it has no `->`, it is cut at the likeliest end of its input, if any end was likely.
        """
        body = self.decode_body()
        if self.likeliest_closing is None or _has_arrow(body):
            return body
        return self.likeliest_closing.body

    def record_likelier_closing(self, log_probability: float, closing_text: str) -> None:
        """Remember that the input of the call could end here, if this is likelier than all possible ends before.

        A call that reaches its limit of tokens without `->` is cut at the likeliest end.

        Args:
            log_probability: How likely the closing text is to come next.
            closing_text: A text that closes the input, such as `)`.
        """
        likeliest = self.likeliest_closing
        if likeliest is not None and log_probability <= likeliest.log_probability:
            return

        body = self.decode_body()
        closed_body = f"{body}{closing_text} {RESULT_ARROW}"
        ends_input = _has_arrow(closed_body)  # False within a string, where `)` and `->` are part of the input
        is_inside_character = body.endswith(INCOMPLETE_CHARACTER)  # the last token has only some bytes of a character
        if ends_input and not is_inside_character:
            self.likeliest_closing = Closing(log_probability, closed_body)


def _has_arrow(body: str) -> bool:
    """Return whether `->` follows the input of a call. One within a string of the input does not count."""
    return find_text_after_input(RESULT_ARROW, body) >= 0


def parse_written_call(body: str) -> DecodedCall:
    """Parse the text of a written tool call, which has no result yet.

    Args:
        body: The text after " [", such as "Calculator(2+3) ->". It may have been cut at the limit of tokens.

    Returns:
        The call without a result. If it cannot be run, it has the reason for that.

    Example:
        parse_written_call("Calculator(2+3) ->")  # tool "Calculator", input "2+3", no reason
        parse_written_call("Calculator(2+")  # tool "Calculator", input "2+", reason NO_CALL_END
        parse_written_call("Calcul")  # tool "", input "Calcul", reason NO_CALL_END
    """
    arrow_start = find_text_after_input(RESULT_ARROW, body)  # -1 without an arrow after the input
    if arrow_start < 0:
        return _parse_unfinished_call(body)

    try:
        call = parse_call(body[:arrow_start].rstrip())
    except MalformedCall as error:
        # It is no call after all. What was written is kept, with the reason.
        tool_name, _, written_input = body.partition("(")
        return DecodedCall(tool_name, written_input, result=None, reason=error.reason)
    return DecodedCall(call.tool, call.input, result=None, reason=None)


def _parse_unfinished_call(body: str) -> DecodedCall:
    """Split the text of a tool call without an end into tool and input, and give it the reason NO_CALL_END.

    If not even the name of the tool is complete, the tool is "" and the whole text is the input.
    """
    tool_name, bracket, written_input = body.partition("(")
    if not bracket:
        return DecodedCall(tool="", input=body, result=None, reason=NO_CALL_END)
    return DecodedCall(tool_name, written_input, result=None, reason=NO_CALL_END)
