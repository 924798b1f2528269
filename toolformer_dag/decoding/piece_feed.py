"""Pass a text to whoever watches it, piece by piece: only what later tokens cannot change."""

from collections.abc import Sequence

from toolformer_dag.decoding.generation import DecodedCall, TokenLikelihood, WrittenPiece
from toolformer_dag.decoding.look_alikes import begun_start
from toolformer_dag.decoding.rules import DecodingRules
from toolformer_dag.decoding.stretch import Stretch
from toolformer_dag.decoding.written_call import INCOMPLETE, WrittenCall
from toolformer_dag.texts.calls import API_START, RESULT_ARROW
from toolformer_dag.texts.input_ends import find_behind_input


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
        """Pass the characters that are new since the last call to the watcher; do nothing where nobody watches.

        - stretch: the part of the text since the last tool call.
        - earlier: log p of the tokens before it, where the rules ask for log p.
        - whole: whether the stretch is over. While it is not, an end that a later token may change is held back: half
          a character, or the beginning of ` [` or of a stop word.
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
        """Return log p of the tokens that begin in the characters shown so far, each token once.

        Empty where the rules ask for no log p. `earlier` are the tokens before the stretch, so token t of the text is
        in `earlier` or in the stretch. `self._tokens` counts those that were returned.
        """
        if self._rules.likeliest is None:
            return ()
        tokens = []
        written_count = len(earlier) + stretch.place
        while self._tokens < written_count and self._next_token_begins < self._characters_of_text:
            if self._tokens < len(earlier):
                token = earlier[self._tokens]
            else:
                token = stretch.likelihood(self._tokens - len(earlier))
            tokens.append(token)
            self._tokens += 1
            self._next_token_begins += len(token.text)
        return tuple(tokens)

    def show_call(self, call: WrittenCall, *, is_over: bool) -> None:
        """Pass the characters of an unfinished tool call that are new to the watcher, from ` [` up to `->`.

        `is_over`: whether the call is complete. Nothing is passed before the tool's name is written where a tool has a
        `min_probability`: the call may still be taken back.
        """
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
    """Return the beginning of an unfinished text that no later token can change.

    Held back is what may become another character, ` [`, a look-alike of a call such as `<QA(`, or one of the words
    `stop`, before which the text ends: `shown_text("It is\\nQu", stop=["\\nQuestion"])` is "It is".
    """
    longest_beginning = max((_begun_characters(text, word) for word in stop), default=0)
    certain = text[: len(text) - longest_beginning]
    return certain[: begun_start(certain)].rstrip(f" {INCOMPLETE}")


def _begun_characters(text: str, word: str) -> int:
    """Return how many characters at the end of a text begin a stop word that is not whole yet.

    Of "It is\\nQu" and "\\nQuestion" these are 3.
    """
    start = max(0, len(text) - len(word) + 1)
    while True:
        start = text.find(word[0], start)
        if start < 0:
            return 0
        if word.startswith(text[start:]):
            return len(text) - start
        start += 1


def shown_call(body: str, arrow: str) -> str:
    """Return the text of an unfinished call that no later token can change, from ` [` up to `->` without it.

    - body: what is written after ` [`. `shown_call("Calculator(2+3) -", "->")` is " [Calculator(2+3)".
    - arrow: what the model writes for `->`. An end of `body` that may become it, or another character, is held back.
    """
    end = find_behind_input(RESULT_ARROW, body)
    if end >= 0:
        body = body[:end]
    beginning_of_arrow = arrow.strip()[:-1]
    return API_START + body.rstrip(f" {beginning_of_arrow}{INCOMPLETE}")
