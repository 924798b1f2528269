"""Pass a text to `DecodingRules.watch` while it is written: only characters that later tokens cannot change."""

from collections.abc import Sequence

from toolformer_dag.decoding.generation import DecodedCall, TokenLikelihood, WrittenPiece
from toolformer_dag.decoding.look_alikes import begun_start
from toolformer_dag.decoding.rules import DecodingRules
from toolformer_dag.decoding.text_since_call import TextSinceCall
from toolformer_dag.decoding.written_call import INCOMPLETE, WrittenCall
from toolformer_dag.texts.calls import API_START, RESULT_ARROW
from toolformer_dag.texts.input_ends import find_behind_input


class PieceFeed:
    """Passes the newly written characters of one text to the watcher, `rules.watch`; does nothing without one.

    A text is a sequence of plain texts and calls. The feed remembers how many characters and tokens of each it has
    passed on, and passes on each once.
    """

    def __init__(self, rules: DecodingRules, prompt: int) -> None:
        """Make the feed of a text. prompt: the index of its prompt, which the watcher gets."""
        self._rules = rules
        self._prompt = prompt
        # Characters that the watcher has got:
        self._text_characters_sent = 0  # of the plain text since the last call
        self._call_characters_sent = 0  # of the open call
        self._characters_sent = 0  # of all plain text
        # Tokens of all plain text whose log p the watcher has got:
        self._tokens_sent = 0
        self._token_characters_sent = 0  # their characters: the next token begins there in the text without calls

    def begin_text(self) -> None:
        """Start counting the characters of new plain text."""
        self._text_characters_sent = 0

    def begin_call(self) -> None:
        """Start counting the characters of a new call."""
        self._call_characters_sent = 0

    def show_text(self, text: TextSinceCall, earlier: Sequence[TokenLikelihood], *, whole: bool) -> None:
        """Pass the newly written characters since the last tool call to the watcher, if there is one.

        - earlier: the tokens of all text before that call, with log p if the rules ask for it.
        - whole: whether this text is over. Until then, an end that a later token may change is held back.
        """
        if self._rules.watch is None:
            return
        added = self._new_characters(text, whole=whole)
        if added:
            likelihoods = self._new_likelihoods(text, earlier)
            self._rules.watch(WrittenPiece(self._prompt, added, in_call=False, likelihoods=likelihoods))

    def _new_characters(self, text: TextSinceCall, *, whole: bool) -> str:
        """Return the characters of the text since the call that are not sent yet, and count them as sent.

        whole: whether the text is over; else only the characters that no later token can change.
        """
        characters = text.text() if whole else shown_text(text.text(), self._rules.stop)
        added = characters[self._text_characters_sent :]
        self._text_characters_sent += len(added)
        self._characters_sent += len(added)
        return added

    def _new_likelihoods(self, text: TextSinceCall, earlier: Sequence[TokenLikelihood]) -> tuple[TokenLikelihood, ...]:
        """Return the tokens, with log p, that begin in the characters sent so far, and count them as sent.

        Each token is returned once. Empty unless the rules ask for log p. `earlier`: the tokens before those of `text`.
        """
        if self._rules.likeliest is None:
            return ()
        new_tokens = []
        token_count = len(earlier) + text.token_count
        while self._tokens_sent < token_count and self._token_characters_sent < self._characters_sent:
            token = _likelihood(text, earlier, self._tokens_sent)
            new_tokens.append(token)
            self._tokens_sent += 1
            self._token_characters_sent += len(token.text)
        return tuple(new_tokens)

    def show_call(self, call: WrittenCall, *, is_over: bool) -> None:
        """Pass the newly written characters of a tool call to the watcher, from ` [` up to `->`.

        `is_over`: whether no further token is written. Nothing of a call is passed on while it may still be removed.
        """
        if self._rules.watch is None or self._may_be_removed(call):
            return
        body = call.closed_body() if is_over else call.body()
        text = shown_call(body, self._rules.vocabulary.encoding.markers.arrow)
        added = text[self._call_characters_sent :]
        if added:
            self._call_characters_sent = len(text)
            self._rules.watch(WrittenPiece(self._prompt, added, in_call=True))

    def _may_be_removed(self, call: WrittenCall) -> bool:
        """Return whether the call may turn out to be too unlikely for its tool, which is not named in full yet."""
        return bool(self._rules.min_probability) and not call.has_name

    def show_answer(self, call: DecodedCall) -> None:
        """Pass an answered call to the watcher, with its result or the reason why it has none."""
        if self._rules.watch is not None:
            self._rules.watch(WrittenPiece(self._prompt, "", in_call=True, call=call))


def _likelihood(text: TextSinceCall, earlier: Sequence[TokenLikelihood], token_index: int) -> TokenLikelihood:
    """Return the token at an index of all plain text, which is `earlier` and then the tokens of `text`."""
    if token_index < len(earlier):
        return earlier[token_index]
    return text.likelihood(token_index - len(earlier))


def shown_text(text: str, stop: Sequence[str]) -> str:
    """Return the beginning of an unfinished text that no later token can change.

    `shown_text("It is\\nQu", stop=["\\nQuestion"])` is "It is": "\\nQu" may become the stop word. So may an end
    become ` [`, a look-alike of a call such as `<QA(`, or another character.
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
