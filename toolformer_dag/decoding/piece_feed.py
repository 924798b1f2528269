"""Pass a text to `DecodingRules.watch` while it is written: only characters that later tokens cannot change."""

from collections.abc import Sequence

from toolformer_dag.decoding.generation import DecodedCall, TokenLikelihood, WrittenPiece
from toolformer_dag.decoding.look_alikes import begun_start
from toolformer_dag.decoding.rules import DecodingRules
from toolformer_dag.decoding.stretch import Stretch
from toolformer_dag.decoding.written_call import INCOMPLETE, WrittenCall
from toolformer_dag.texts.calls import API_START, RESULT_ARROW
from toolformer_dag.texts.input_ends import find_behind_input


class PieceFeed:
    """Passes the newly written characters of one text to the watcher, `rules.watch`; does nothing without one.

    A text is a sequence of stretches (its tokens between two tool calls) and calls. The feed remembers how many
    characters and tokens of each it has passed on, and passes on each once. `prompt`: the index of the text's prompt.
    """

    def __init__(self, rules: DecodingRules, prompt: int) -> None:
        self._rules = rules
        self._prompt = prompt
        # Characters that the watcher has got:
        self._stretch_characters_sent = 0  # of the current stretch
        self._call_characters_sent = 0  # of the open call
        self._characters_sent = 0  # of all stretches
        # Tokens of all stretches whose log p the watcher has got:
        self._tokens_sent = 0
        self._token_characters_sent = 0  # their characters: the next token begins there in the text without calls

    def begin_stretch(self) -> None:
        """Start counting for a new stretch, of which nothing is passed on yet."""
        self._stretch_characters_sent = 0

    def begin_call(self) -> None:
        """Start counting for a new call, of which nothing is passed on yet."""
        self._call_characters_sent = 0

    def show_text(self, stretch: Stretch, earlier: Sequence[TokenLikelihood], *, whole: bool) -> None:
        """Pass the newly written characters of a stretch to the watcher; do nothing without a watcher.

        - stretch: the part of the text since the last tool call.
        - earlier: the tokens of the stretches before it with log p; empty unless the rules ask for log p.
        - whole: whether the stretch is over. Until then, an end that a later token may change is held back: half a
          character, or the beginning of ` [` or of a stop word.
        """
        if self._rules.watch is None:
            return
        text = stretch.text()
        if not whole:
            text = shown_text(text, self._rules.stop)
        added = text[self._stretch_characters_sent :]
        if not added:
            return
        self._stretch_characters_sent = len(text)
        self._characters_sent += len(added)
        likelihoods = self._new_likelihoods(stretch, earlier)
        self._rules.watch(WrittenPiece(self._prompt, added, in_call=False, likelihoods=likelihoods))

    def _new_likelihoods(self, stretch: Stretch, earlier: Sequence[TokenLikelihood]) -> tuple[TokenLikelihood, ...]:
        """Return the tokens, with log p, that begin in the characters sent so far, and count them as sent.

        Each token is returned once. Empty unless the rules ask for log p. The tokens of the text outside calls are
        `earlier` and then those of the stretch. Advances `_tokens_sent` and `_token_characters_sent`.
        """
        if self._rules.likeliest is None:
            return ()
        new_tokens = []
        written_count = len(earlier) + stretch.token_count
        while self._tokens_sent < written_count and self._token_characters_sent < self._characters_sent:
            if self._tokens_sent < len(earlier):
                token = earlier[self._tokens_sent]
            else:
                token = stretch.likelihood(self._tokens_sent - len(earlier))
            new_tokens.append(token)
            self._tokens_sent += 1
            self._token_characters_sent += len(token.text)
        return tuple(new_tokens)

    def show_call(self, call: WrittenCall, *, is_over: bool) -> None:
        """Pass the newly written characters of a tool call to the watcher, from ` [` up to `->`.

        `is_over`: whether no further token is written. A call cut at its limit of tokens then ends with its likeliest
        end (`WrittenCall.closed_body`). If tools have a `min_probability`, nothing is passed on before the tool's name
        is complete, because the call may still be removed.
        """
        if self._rules.watch is None:
            return
        may_be_removed = bool(self._rules.min_probability) and not call.has_name
        if may_be_removed:
            return
        body = call.closed_body() if is_over else call.body()
        text = shown_call(body, self._rules.vocabulary.encoding.markers.arrow)
        added = text[self._call_characters_sent :]
        if added:
            self._call_characters_sent = len(text)
            self._rules.watch(WrittenPiece(self._prompt, added, in_call=True))

    def show_answer(self, call: DecodedCall) -> None:
        """Pass an answered call to the watcher, with its result or the reason why it has none."""
        if self._rules.watch is not None:
            self._rules.watch(WrittenPiece(self._prompt, "", in_call=True, call=call))


def shown_text(text: str, stop: Sequence[str]) -> str:
    """Return the beginning of an unfinished text that no later token can change.

    `shown_text("It is\\nQu", stop=["\\nQuestion"])` is "It is": a text ends before a stop word, and "\\nQu" may
    become one. Left out is also an end that may become ` [`, a look-alike of a call such as `<QA(`, or another
    character.
    """
    longest_beginning = max((_begun_characters(text, word) for word in stop), default=0)
    text = text[: len(text) - longest_beginning]
    text = text[: begun_start(text)]  # without the brackets that may begin a call or a look-alike
    return text.rstrip(f" {INCOMPLETE}")  # without spaces, which may belong to ` [`, and without half a character


def _begun_characters(text: str, word: str) -> int:
    """Return the length of the end of `text` with which the stop word `word` begins, 0 without one.

    3 for "It is\\nQu" and "\\nQuestion": the text ends with "\\nQu".
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
    """Return ` [` and the beginning of an unfinished call that no later token can change, without its `->`.

    `shown_call("Calculator(2+3) -", "->")` is " [Calculator(2+3)", because " -" may become " ->".

    - body: the text written after ` [`.
    - arrow: the model's marker for `->`. An end of `body` that may become it, or another character, is left out.
    """
    arrow_start = find_behind_input(RESULT_ARROW, body)  # a `->` within the input does not count; -1 without one
    if arrow_start >= 0:
        body = body[:arrow_start]
    characters_before_arrow_ends = arrow.strip()[:-1]  # "-" of "->"
    uncertain_characters = f" {characters_before_arrow_ends}{INCOMPLETE}"
    return API_START + body.rstrip(uncertain_characters)  # each of these characters, in any order
