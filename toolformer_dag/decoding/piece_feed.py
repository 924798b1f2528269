"""Pass a text to `DecodingRules.watch_piece` while it is written: only characters that later tokens cannot change."""

from collections.abc import Sequence

from toolformer_dag.decoding.generation import DecodedCall, TokenLikelihood, WrittenPiece
from toolformer_dag.decoding.look_alikes import find_partial_look_alike
from toolformer_dag.decoding.rules import DecodingRules
from toolformer_dag.decoding.text_since_call import TextSinceCall
from toolformer_dag.decoding.written_call import INCOMPLETE_CHARACTER, WrittenCall
from toolformer_dag.texts.calls import PAPER_BEGIN_MARKER, RESULT_ARROW
from toolformer_dag.texts.input_ends import find_text_after_input


class PieceFeed:
    """Passes the newly written characters of one text to the watcher, `rules.watch_piece`, if there is one.

    A text is a sequence of plain texts and calls. The feed remembers how many characters and tokens of each it has
    passed on, and passes on each once. A token is passed on, with log p, once its first character is.
    """

    def __init__(self, rules: DecodingRules, prompt_index: int) -> None:
        """Prepare to show a text to the watcher, `rules.watch_piece`, which has seen nothing of it yet.

        Args:
            rules: The rules of decoding, with the watcher.
            prompt_index: The index of the text's prompt. The watcher gets it with each piece of the text.
        """
        self._rules = rules
        self._prompt_index = prompt_index

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

    def show_text(
        self, text_since_call: TextSinceCall, earlier_likelihoods: Sequence[TokenLikelihood], *, is_complete: bool
    ) -> None:
        """Pass the characters that were written since the last tool call, and not passed on yet, to the watcher.

        Without a watcher nothing is done.

        Args:
            text_since_call: The text since the last call.
            earlier_likelihoods: The tokens of plain text before that call, if the rules ask for log probabilities.
            is_complete: Whether the text is complete. Otherwise an end that a later token may change is held back.
        """
        if self._rules.watch_piece is None:
            return

        new_characters = self._take_new_characters(text_since_call, is_complete=is_complete)
        if not new_characters:
            return

        likelihoods = self._take_new_likelihoods(text_since_call, earlier_likelihoods)
        piece = WrittenPiece(self._prompt_index, new_characters, is_in_call=False, token_likelihoods=likelihoods)
        self._rules.watch_piece(piece)

    def _take_new_characters(self, text_since_call: TextSinceCall, *, is_complete: bool) -> str:
        """Return the characters of a text that the watcher has not got yet, and count them as sent.

        Args:
            text_since_call: The text since the last call.
            is_complete: Whether the text is complete. Otherwise an end that a later token may change is left out.
        """
        final_text = text_since_call.decode_text()
        if not is_complete:
            final_text = drop_uncertain_end(final_text, self._rules.stop_words)

        new_characters = final_text[self._text_characters_sent :]
        self._text_characters_sent += len(new_characters)  # counted from the last call on
        self._plain_characters_sent += len(new_characters)  # counted from the prompt on, without calls
        return new_characters

    def _take_new_likelihoods(
        self, text_since_call: TextSinceCall, earlier_likelihoods: Sequence[TokenLikelihood]
    ) -> tuple[TokenLikelihood, ...]:
        """Return the tokens that the watcher has not got yet and whose first character it has, and count them as sent.

        The watcher gets the characters before their tokens, so `_take_new_characters` is called first. The counts
        `_tokens_sent` and `_next_token_start` are changed. They go over all plain text, that is without calls.

        Args:
            text_since_call: The text since the last call. Its tokens come after the earlier ones.
            earlier_likelihoods: The tokens of all plain text before that call, whether they were sent already or not.

        Returns:
            The tokens with their log probabilities. Empty if the rules do not ask for log probabilities.
        """
        if self._rules.likeliest_token_count is None:
            return ()

        new_tokens = []
        token_count = len(earlier_likelihoods) + text_since_call.token_count
        # A token is sent once its first character is, even if its last ones are still held back.
        while self._tokens_sent < token_count and self._next_token_start < self._plain_characters_sent:
            token = _get_likelihood(text_since_call, earlier_likelihoods, self._tokens_sent)
            new_tokens.append(token)
            self._tokens_sent += 1
            self._next_token_start += len(token.text)
        return tuple(new_tokens)

    def show_call(self, call: WrittenCall, *, is_complete: bool) -> None:
        """Pass the new characters of a tool call, without its `->`, to the watcher.

        While the call may still be removed, nothing of it is passed on. Without a watcher nothing is done.

        Args:
            call: The call that is being written.
            is_complete: Whether the call gets no more tokens.
        """
        if self._rules.watch_piece is None or self._may_be_removed(call):
            return

        call_text = self._format_call(call, is_complete=is_complete)
        new_characters = call_text[self._call_characters_sent :]  # empty if the cut is before what was sent
        if new_characters:
            self._call_characters_sent = len(call_text)
            self._rules.watch_piece(WrittenPiece(self._prompt_index, new_characters, is_in_call=True))

    def _format_call(self, call: WrittenCall, *, is_complete: bool) -> str:
        """Return the text of a call as it is shown to the watcher, without its `->` and without an uncertain end.

        The end is uncertain if a later token may change it. A complete call without `->`, which has reached
        its limit of tokens, is cut where `)` was likeliest to come next. So it may be shorter than what was already
        sent: ` [QA(Who built it and` may become ` [QA(Who built it)`.

        Args:
            call: The call.
            is_complete: Whether the call gets no more tokens.
        """
        body = call.build_closed_body() if is_complete else call.decode_body()
        return format_unfinished_call(body, self._rules.vocabulary.encoding.markers.arrow)

    def _may_be_removed(self, call: WrittenCall) -> bool:
        """Return whether the call may turn out to be too unlikely for its tool, which is not named in full yet."""
        return bool(self._rules.min_start_probability_by_tool) and not call.has_tool_name

    def show_answered_call(self, call: DecodedCall) -> None:
        """Pass an answered call to the watcher, with its result or the reason why it has none."""
        if self._rules.watch_piece is None:
            return

        piece = WrittenPiece(self._prompt_index, "", is_in_call=True, answered_call=call)
        self._rules.watch_piece(piece)


def _get_likelihood(
    text_since_call: TextSinceCall, earlier_likelihoods: Sequence[TokenLikelihood], token_index: int
) -> TokenLikelihood:
    """Return one token of the plain text, which consists of some earlier tokens and the tokens of `text_since_call`.

    Args:
        text_since_call: The text since the last call.
        earlier_likelihoods: The tokens of plain text before that call.
        token_index: The index of the token, counted from the first of the earlier tokens.
    """
    if token_index < len(earlier_likelihoods):
        return earlier_likelihoods[token_index]
    return text_since_call.get_likelihood(token_index - len(earlier_likelihoods))


def drop_uncertain_end(text: str, stop_words: Sequence[str]) -> str:
    """Return the beginning of an unfinished text, without an end that a later token may change.

    The end is uncertain if it may become a stop word, ` [`, text like `<QA(` that only looks like a call, or if its
    last character is incomplete.

    Example:
        drop_uncertain_end("It is\\nQu", ["\\nQuestion"])  # "It is", because "\\nQu" may become the stop word
    """
    # The end may be the beginning of a stop word, or of several, of which the longest counts.
    begun_lengths = [_count_begun_stop_word_characters(text, stop_word) for stop_word in stop_words]
    begun_length = max(begun_lengths, default=0)
    before_stop_word = text[: len(text) - begun_length]

    # Brackets may begin a call, or text that only looks like one.
    brackets_start = find_partial_look_alike(before_stop_word)
    before_brackets = before_stop_word[:brackets_start]

    # A space may become ` [`, and INCOMPLETE_CHARACTER is half a character.
    return before_brackets.rstrip(f" {INCOMPLETE_CHARACTER}")


def _count_begun_stop_word_characters(text: str, stop_word: str) -> int:
    """Count the characters at the end of a text that may be the beginning of a stop word.

    A whole stop word is not looked for, because it would have ended the text.

    Example:
        _count_begun_stop_word_characters("It is\\nQu", "\\nQuestion")  # 3, the length of "\\nQu"
    """
    # From here on, the text has fewer characters than the stop word.
    start = max(0, len(text) - len(stop_word) + 1)

    # Try each place where the first character of the stop word occurs.
    while True:
        start = text.find(stop_word[0], start)
        if start < 0:
            return 0
        if stop_word.startswith(text[start:]):
            return len(text) - start
        start += 1


def format_unfinished_call(call_body: str, arrow: str) -> str:
    """Return ` [` and the text of an unfinished tool call, without its `->` and an end that a later token may change.

    Args:
        call_body: The text that was written after " [". A complete arrow of the model is already replaced by `->`, and
            only an incomplete one still has the model's form.
        arrow: How the model writes `->`.

    Example:
        format_unfinished_call("Calculator(2+3) -", "->")  # " [Calculator(2+3)", because " -" may become " ->"
    """
    # An arrow inside the input does not count. The index is -1 without an arrow.
    arrow_start = find_text_after_input(RESULT_ARROW, call_body)
    if arrow_start >= 0:
        call_body = call_body[:arrow_start]

    # Characters at the end that may become " ->", or stand for the bytes of an incomplete character.
    begun_arrow = arrow.strip()[:-1]  # "-" of "->"
    uncertain_characters = f" {begun_arrow}{INCOMPLETE_CHARACTER}"
    return PAPER_BEGIN_MARKER + call_body.rstrip(uncertain_characters)
