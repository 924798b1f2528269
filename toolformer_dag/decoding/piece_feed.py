"""Pass a text to `DecodingRules.watch` while it is written: only characters that later tokens cannot change."""

from collections.abc import Sequence

from toolformer_dag.decoding.generation import DecodedCall, TokenLikelihood, WrittenPiece
from toolformer_dag.decoding.look_alikes import find_begun_look_alike
from toolformer_dag.decoding.rules import DecodingRules
from toolformer_dag.decoding.text_since_call import TextSinceCall
from toolformer_dag.decoding.written_call import INCOMPLETE, WrittenCall
from toolformer_dag.texts.calls import API_START, RESULT_ARROW
from toolformer_dag.texts.input_ends import find_behind_input


class PieceFeed:
    """Passes the newly written characters of one text to the watcher, `rules.watch`; does nothing without one.

    A text is a sequence of plain texts and calls. The feed remembers how many characters and tokens of each it has
    passed on, and passes on each once. A token is passed on, with log p, once its first character is.
    """

    def __init__(self, rules: DecodingRules, prompt: int) -> None:
        """Feed the watcher `rules.watch` with a text of which it has got nothing yet.

        prompt: the index of the text's prompt, which the watcher gets with each piece.
        """
        self._rules = rules
        self._prompt = prompt
        # How many characters the watcher has got:
        self._text_characters_sent = 0  # of the plain text since the last call; `begin_text` sets it to 0
        self._call_characters_sent = 0  # of the open call; `begin_call` sets it to 0
        self._plain_characters_sent = 0  # of all plain text, that is without calls
        # How many tokens of all plain text it has got, with their log p:
        self._tokens_sent = 0
        self._next_token_start = 0  # where the next of these tokens begins, in characters of all plain text

    def begin_text(self) -> None:
        """Start counting the characters of new plain text."""
        self._text_characters_sent = 0

    def begin_call(self) -> None:
        """Start counting the characters of a new call."""
        self._call_characters_sent = 0

    def show_text(self, text: TextSinceCall, earlier_tokens: Sequence[TokenLikelihood], *, whole: bool) -> None:
        """Pass the newly written characters since the last tool call to the watcher, if there is one.

        - text: the text since that call.
        - earlier_tokens: the tokens before that call, without those of calls: tokens are counted from the first one on.
          With log p if the rules ask for it, else none.
        - whole: whether `text` is over. Until then, an end that a later token may change is held back.
        """
        if self._rules.watch is None:
            return
        new_characters = self._take_new_characters(text, whole=whole)
        if new_characters:
            likelihoods = self._take_new_likelihoods(text, earlier_tokens)
            self._rules.watch(WrittenPiece(self._prompt, new_characters, in_call=False, likelihoods=likelihoods))

    def _take_new_characters(self, text: TextSinceCall, *, whole: bool) -> str:
        """Return the characters of the text since the call that are not sent yet, and count them as sent.

        whole: whether the text is over; else only the characters that no later token can change.
        """
        final_text = text.text() if whole else drop_uncertain_end(text.text(), self._rules.stop)
        new_characters = final_text[self._text_characters_sent :]
        self._text_characters_sent += len(new_characters)  # counted from the last call on
        self._plain_characters_sent += len(new_characters)  # counted from the prompt on, without calls
        return new_characters

    def _take_new_likelihoods(
        self, text: TextSinceCall, earlier_tokens: Sequence[TokenLikelihood]
    ) -> tuple[TokenLikelihood, ...]:
        """Return the tokens, with log p, that begin in the characters sent so far, and count them as sent.

        Each token is returned once. Empty unless the rules ask for log p.

        `earlier_tokens`: those before `text`, without the tokens of calls.
        """
        if self._rules.likeliest is None:
            return ()
        new_tokens = []
        token_count = len(earlier_tokens) + text.token_count
        # A token is sent once its first character is, even if its last ones are still held back.
        while self._tokens_sent < token_count and self._next_token_start < self._plain_characters_sent:
            token = _get_likelihood(text, earlier_tokens, self._tokens_sent)
            new_tokens.append(token)
            self._tokens_sent += 1
            self._next_token_start += len(token.text)
        return tuple(new_tokens)

    def show_call(self, call: WrittenCall, *, is_over: bool) -> None:
        """Pass the newly written characters of a tool call to the watcher, from ` [` up to `->`.

        `is_over`: whether no further token is written. Nothing of a call is passed on while it may still be removed.
        """
        if self._rules.watch is None or self._may_be_removed(call):
            return
        body = call.closed_body() if is_over else call.body()  # a closed body without `->` is cut where `)` was likely
        final_text = format_begun_call(body, self._rules.vocabulary.encoding.markers.arrow)
        new_characters = final_text[self._call_characters_sent :]  # none if it was cut before what was sent
        if new_characters:
            self._call_characters_sent = len(final_text)  # 0 again when the next call begins
            self._rules.watch(WrittenPiece(self._prompt, new_characters, in_call=True))

    def _may_be_removed(self, call: WrittenCall) -> bool:
        """Return whether the call may turn out to be too unlikely for its tool, which is not named in full yet."""
        return bool(self._rules.min_probability) and not call.has_name

    def show_answer(self, call: DecodedCall) -> None:
        """Pass an answered call to the watcher, with its result or the reason why it has none."""
        if self._rules.watch is not None:
            self._rules.watch(WrittenPiece(self._prompt, "", in_call=True, call=call))


def _get_likelihood(
    text: TextSinceCall, earlier_tokens: Sequence[TokenLikelihood], token_index: int
) -> TokenLikelihood:
    """Return the token at an index of all plain text, which is `earlier_tokens` and then the tokens of `text`."""
    if token_index < len(earlier_tokens):
        return earlier_tokens[token_index]
    return text.likelihood(token_index - len(earlier_tokens))


def drop_uncertain_end(text: str, stop: Sequence[str]) -> str:
    """Return the beginning of an unfinished text that no later token can change.

    `drop_uncertain_end("It is\\nQu", stop=["\\nQuestion"])` is "It is": "\\nQu" may become the stop word. So may an end
    become ` [`, a look-alike of a call such as `<QA(`, or another character.
    """
    begun_length = max((_measure_begun_word(text, word) for word in stop), default=0)
    before_stop_word = text[: len(text) - begun_length]
    before_brackets = before_stop_word[
        : find_begun_look_alike(before_stop_word)
    ]  # they may begin a call or a look-alike
    return before_brackets.rstrip(f" {INCOMPLETE}")  # spaces may belong to ` [`; INCOMPLETE is half a character


def _measure_begun_word(text: str, word: str) -> int:
    """Return with how many characters at its end `text` may begin the stop word `word`; 0 for none.

    3 for "It is\\nQu" and "\\nQuestion": the text ends with "\\nQu". A whole stop word is not looked for: it has ended
    the text.
    """
    start = max(0, len(text) - len(word) + 1)  # from here, the text has fewer characters than the word
    while True:
        start = text.find(word[0], start)
        if start < 0:
            return 0
        if word.startswith(text[start:]):
            return len(text) - start
        start += 1


def format_begun_call(body: str, arrow: str) -> str:
    """Return ` [` and the beginning of an unfinished call that no later token can change, without its `->`.

    `format_begun_call("Calculator(2+3) -", "->")` is " [Calculator(2+3)", because " -" may become " ->".

    - body: the text written after ` [`.
    - arrow: the model's marker for `->`; `body` may end with the beginning of it.
    """
    arrow_start = find_behind_input(RESULT_ARROW, body)  # a `->` within the input does not count; -1 without one
    if arrow_start >= 0:
        body = body[:arrow_start]
    # A later token may change these characters at the end: spaces and "-" may become " ->", and INCOMPLETE stands for
    # the bytes of an unfinished character.
    begun_arrow = arrow.strip()[:-1]  # "-" of "->"
    uncertain_characters = f" {begun_arrow}{INCOMPLETE}"
    return API_START + body.rstrip(uncertain_characters)  # each of these characters, in any order
