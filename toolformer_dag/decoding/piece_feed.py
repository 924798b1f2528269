"""Pass a text to whoever watches it, piece by piece: only what later tokens cannot change."""

from collections.abc import Sequence

from toolformer_dag.decoding.generation import DecodedCall, TokenLikelihood, WrittenPiece
from toolformer_dag.decoding.look_alikes import begun_start
from toolformer_dag.decoding.rules import DecodingRules
from toolformer_dag.decoding.stretch import Stretch
from toolformer_dag.decoding.written_call import INCOMPLETE, WrittenCall
from toolformer_dag.texts.calls import API_START, RESULT_ARROW, find_behind_input


class PieceFeed:
    """Passes the pieces of one text to `watch` of its rules; where there is none, nothing happens.

    `prompt`: the index of the prompt. A piece costs what is new in it, however long the text is.
    """

    def __init__(self, rules: DecodingRules, prompt: int) -> None:
        self._rules = rules
        self._prompt = prompt
        self._characters_of_stretch = 0  # shown ones of the stretch that is being written
        self._characters_of_call = 0  # shown ones of the open call
        self._characters_of_text = 0  # shown ones outside calls
        self._tokens = 0  # tokens outside calls whose likelihoods were shown
        self._next_token_begins = 0  # at this character of the text without calls

    def begin_stretch(self) -> None:
        """Show another stretch from now on."""
        self._characters_of_stretch = 0

    def begin_call(self) -> None:
        """Show another call from now on."""
        self._characters_of_call = 0

    def show_text(self, stretch: Stretch, earlier: Sequence[TokenLikelihood], *, whole: bool) -> None:
        """Show what is new in a stretch; unless it is over (`whole`), without an end that may become something else.

        `earlier`: the tokens of the stretches before it, where the rules keep the likeliest.
        """
        if self._rules.watch is None:
            return
        text = stretch.text()
        if not whole:
            text = shown_text(text, self._rules.stop)
        added = text[self._characters_of_stretch :]
        if not added:
            return
        self._characters_of_stretch = len(text)
        self._characters_of_text += len(added)
        likelihoods = self._new_likelihoods(stretch, earlier)
        self._rules.watch(WrittenPiece(self._prompt, added, in_call=False, likelihoods=likelihoods))

    def _new_likelihoods(self, stretch: Stretch, earlier: Sequence[TokenLikelihood]) -> tuple[TokenLikelihood, ...]:
        """Return the tokens that begin in the text shown by now, and that were not shown before."""
        if self._rules.likeliest is None:
            return ()
        tokens = []
        written = len(earlier) + stretch.place
        while self._tokens < written and self._next_token_begins < self._characters_of_text:
            if self._tokens < len(earlier):
                token = earlier[self._tokens]
            else:
                token = stretch.likelihood(self._tokens - len(earlier))
            tokens.append(token)
            self._tokens += 1
            self._next_token_begins += len(token.text)
        return tuple(tokens)

    def show_call(self, call: WrittenCall, *, is_over: bool) -> None:
        """Show what is new in an open call; nothing as long as it may be taken back for the name of its tool."""
        if self._rules.watch is None:
            return
        if self._rules.min_probability and not call.has_name:
            return
        body = call.closed_body() if is_over else call.body()
        text = shown_call(body, self._rules.vocabulary.encoding.markers.arrow)
        added = text[self._characters_of_call :]
        if added:
            self._characters_of_call = len(text)
            self._rules.watch(WrittenPiece(self._prompt, added, in_call=True))

    def show_answer(self, call: DecodedCall) -> None:
        """Show a call with its result, or with the reason why it has none."""
        if self._rules.watch is not None:
            self._rules.watch(WrittenPiece(self._prompt, "", in_call=True, call=call))


def shown_text(text: str, stop: Sequence[str]) -> str:
    """Return an unfinished text without an end that may become another character, ` [` or one of the `stop` words."""
    longest_beginning = 0  # characters at the end of the text with which a stop word may begin
    for word in stop:
        for length in range(1, len(word)):
            if text.endswith(word[:length]):
                longest_beginning = max(longest_beginning, length)
    certain = text[: len(text) - longest_beginning]
    return certain[: begun_start(certain)].rstrip(f" {INCOMPLETE}")


def shown_call(body: str, arrow: str) -> str:
    """Return ` [` and an open call up to `->`, without an end that may become another character or `arrow`.

    `body`: the text written after ` [`. `arrow`: the model's marker for `->`.
    """
    end = find_behind_input(RESULT_ARROW, body)
    if end >= 0:
        body = body[:end]
    beginning_of_arrow = arrow.strip()[:-1]
    return API_START + body.rstrip(f" {beginning_of_arrow}{INCOMPLETE}")
