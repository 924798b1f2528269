"""The text since the last tool call: its tokens, where a call may begin, and which tokens may not come next."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice

from toolformer_dag.decoding.generation import REPEATED, UNLISTED, DecodedCall, StartChance, TokenLikelihood
from toolformer_dag.decoding.look_alikes import OPENING, closes_unopened_bracket, look_alike_start
from toolformer_dag.decoding.rules import DecodingRules
from toolformer_dag.decoding.text_memory import TextMemory
from toolformer_dag.decoding.token_scores import TokenScores
from toolformer_dag.decoding.written_call import INCOMPLETE


@dataclass(frozen=True, slots=True)
class FirstTokenRules:
    """What may come first after a tool call or a removal of text. It concerns this one place; see `TextMemory`.

    - `results_before`: the number of calls with results directly before the first token.
    - `failed_tools`: the tools that were called here and gave no result; another tool is called next.
    - `no_call`: whether no call may begin here, because one was refused here.
    - `no_bracket`: whether no opening bracket may come here, because text such as `<QA(` was removed here.
    """

    results_before: int = 0
    failed_tools: frozenset[str] = frozenset()
    no_call: bool = False
    no_bracket: bool = False


@dataclass(slots=True)
class TextSinceCall:
    """The tokens written since the prompt, the last tool call, or the last removal of text.

    A token index counts them from 0: before index 2, two of these tokens are written.

    - `memory`: what the whole text remembers of its calls; it does not change while this object is written.
    - `tokens_before`: all earlier tokens of the text, including the prompt.
    - `max_tokens`: the maximum number of `tokens`.
    - `first_token`: what may come at index 0.
    - `tokens`: the tokens so far. All tokens of the text are `tokens_before + tokens`.
    - `cut_length`: the number of characters after which the text is cut, for a stop word or a sentence; else None.
    - `scores`: the model's probabilities, by token index.
    """

    rules: DecodingRules
    memory: TextMemory
    tokens_before: list[int]
    max_tokens: int
    first_token: FirstTokenRules
    tokens: list[int] = field(default_factory=list)
    cut_length: int | None = None
    scores: TokenScores = field(default_factory=TokenScores)
    _offered_tools: dict[int, frozenset[str]] = field(default_factory=dict)  # cache of `offered_tools`
    _likelihoods: list[TokenLikelihood] = field(default_factory=list)  # cache of `likelihood`, by token index

    # What is written

    @property
    def token_count(self) -> int:
        """Return how many tokens are written since the call; this is also the index of the next token."""
        return len(self.tokens)

    @property
    def context_left(self) -> int:
        """Return how many tokens fit into the model's context after `tokens_before`."""
        return self.rules.language_model.context_length - len(self.tokens_before)

    @property
    def is_full(self) -> bool:
        """Return whether `max_tokens` or the model's context is used up, and no stop word ended the text."""
        has_reached_limit = self.token_count >= min(self.max_tokens, self.context_left)
        return has_reached_limit and self.cut_length is None

    def all_tokens(self) -> list[int]:
        """Return all tokens of the text so far, including the prompt."""
        return self.tokens_before + self.tokens

    def text(self) -> str:
        """Return the decoded text since the call, cut after `cut_length` characters if that is set."""
        return self.rules.vocabulary.text(self.tokens, self.tokens_before)[: self.cut_length]

    def addition(self, token: int) -> str:
        """Return the characters that `token` would add to the text."""
        return self.rules.vocabulary.text([token], self.all_tokens())

    def shorten_to(self, length: int) -> None:
        """Remove the last tokens until the text since the call has at most `length` characters."""
        while len(self.text()) > length:
            self.tokens.pop()
        del self._likelihoods[self.token_count :]

    def is_inside_character(self, token_index: int) -> bool:
        """Return whether a character is incomplete before an index, because only some of its bytes are written."""
        vocabulary = self.rules.vocabulary
        text_before = vocabulary.text(self.tokens[:token_index], vocabulary.start)
        return text_before.endswith(INCOMPLETE)

    def _list_tokens_until(self, token_index: int) -> list[int]:
        """Return all tokens of the text before an index, including the prompt."""
        return self.tokens_before + self.tokens[:token_index]

    # Where a call may begin

    @property
    def after_call(self) -> bool:
        """Return whether any call was made before, with a result or without."""
        return bool(self.memory.calls)

    @property
    def may_chain(self) -> bool:
        """Return whether a call may directly follow the last one: up to `rules.depth` calls in a row may."""
        return 0 < self.first_token.results_before < self.rules.depth

    @property
    def is_right_after_result(self) -> bool:
        """Return whether nothing is written yet after a call with a result."""
        return self.first_token.results_before > 0 and self.token_count == 0

    @property
    def top_k(self) -> int:
        """Return k: a call begins if ` [` is among the k likeliest next tokens. Right after a result k is 1."""
        return min(self.rules.k, 1) if self.is_right_after_result else self.rules.k

    def has_calls_left(self, token_index: int) -> bool:
        """Return whether the limit on calls allows one more, at the index or later."""
        calls_are_enabled = self.rules.k > 0
        has_positions_left = self.memory.position_count < self.rules.calls
        continues_chain = token_index == 0 and self.may_chain  # a chain of calls stands at one position
        return (calls_are_enabled and has_positions_left) or continues_chain

    def may_begin_call(self, token_index: int) -> bool:
        """Return whether a tool call may begin before the token at an index.

        It makes no difference how many tokens are likelier there than ` [`, which begins a call.
        """
        # Directly after an earlier call, another one may only follow as part of a chain.
        follows_call_directly = token_index == 0 and self.after_call
        if follows_call_directly and not self.may_chain:
            return False

        if not self.has_calls_left(token_index):
            return False
        if not self.callable_tools(token_index):
            return False

        # A call cannot begin between the bytes of one character.
        return not self.is_inside_character(token_index)

    def callable_tools(self, token_index: int) -> frozenset[str]:
        """Return the offered tools for which ` [`, which begins a call, is likely enough at an index.

        A tool may need a least probability of ` [` (`rules.min_probability`).
        """
        if self.first_token.no_call and token_index == 0:
            return frozenset()

        start_probability = self.scores.start_probabilities.get(token_index, 0.0)
        thresholds = self.rules.min_probability
        offered_tools = self.offered_tools(token_index)
        return frozenset(name for name in offered_tools if thresholds.get(name, 0.0) <= start_probability)

    @property
    def permitted_tools(self) -> frozenset[str]:
        """Return the tools that calls in this text may name. A rule that bars a tool after earlier calls belongs here.

        All choices of tools follow from it: `offered_tools`, then `callable_tools`, and the grammar of a call.
        """
        return self.rules.names

    def offered_tools(self, token_index: int) -> frozenset[str]:
        """Return the names of the permitted tools that fit the text before an index.

        `rules.offer` chooses them. If it is None, all permitted tools are returned.
        """
        if self.rules.offer is None:
            return self.permitted_tools

        # The choice searches the text, so it is made once per index and cached.
        if token_index not in self._offered_tools:
            text_before = self.rules.vocabulary.text(self._list_tokens_until(token_index))
            self._offered_tools[token_index] = self.rules.offer(text_before, self.permitted_tools)
        return self._offered_tools[token_index]

    # What may come first after the next call or removal

    def rules_after_removal(self, *, no_call: bool, no_bracket: bool) -> FirstTokenRules:
        """Build the rules for the next token after something was removed from the end of the text.

        Args:
            no_call: Whether to forbid a call here. A ban that applies here already stays in any case.
            no_bracket: Whether to forbid an opening bracket here. It is set after text such as `<QA(` was removed,
                which only looks like a call, because the model would write the same text again.
        """
        call_was_forbidden_here = self.token_count == 0 and self.first_token.no_call
        return FirstTokenRules(
            results_before=self._results_before_next_token,
            no_call=no_call or call_was_forbidden_here,
            no_bracket=no_bracket,
        )

    def rules_after_call(self, call: DecodedCall) -> FirstTokenRules:
        """Build the rules for the first token after a tool call, depending on how the call was answered.

        A call without a result is left out of the text, which then goes on where the call began.

        Args:
            call: The answered call. It stands at the end of this text.
        """
        results_before_call = self._results_before_next_token

        # The call has a result: another call may directly follow, as part of a chain.
        if call.result is not None:
            return FirstTokenRules(results_before=results_before_call + 1)

        # The call repeats an earlier one, or continues a chain: the text goes on without a call here.
        if call.reason == REPEATED or self.is_right_after_result:
            return FirstTokenRules(results_before=results_before_call, no_call=True)

        # Otherwise another tool is tried here, one that has not failed here yet.
        failed_tools = self.first_token.failed_tools | {call.tool}
        return FirstTokenRules(results_before=results_before_call, failed_tools=failed_tools)

    @property
    def _results_before_next_token(self) -> int:
        """Return how many calls with results stand directly before the next token: none after a token of text."""
        return self.first_token.results_before if self.token_count == 0 else 0

    # Which tokens may not come next

    def forbids(self, token: int) -> bool:
        """Return whether a rule forbids a token as the next one.

        It would begin a call where none may begin, begin text that only looks like a call, or end a call that the model
        only invents.
        """
        has_bracket_or_marker = token in self.rules.vocabulary.with_brackets
        if not has_bracket_or_marker:
            return False
        return (
            self._begins_forbidden_call(token)
            or self._reopens_removed_bracket(token)
            or self._ends_invented_call(token)
        )

    def _begins_forbidden_call(self, token: int) -> bool:
        """Return whether a token would complete ` [`, which begins a tool call, where no call may begin.

        Some models write ` [` as several tokens, for example 7 and 8. Then 8 completes it if the text ends with 7.
        """
        *first_tokens, last_token = self.rules.vocabulary.start
        completes_call_start = token == last_token and self._ends_with(first_tokens)
        if not completes_call_start:
            return False

        # The index is negative if the first tokens of ` [` are in `tokens_before`, such as at the end of the prompt.
        call_start_index = self.token_count - len(first_tokens)
        return not self.may_begin_call(max(call_start_index, 0))

    def _ends_with(self, tokens: list[int]) -> bool:
        """Return whether the text so far, the prompt included, ends with `tokens`; True for no tokens."""
        if not tokens:
            return True
        last_tokens = self.tokens_before[-len(tokens) :] + self.tokens
        return last_tokens[-len(tokens) :] == tokens

    def _reopens_removed_bracket(self, token: int) -> bool:
        """Return whether a token has an opening bracket directly after text such as `<QA(` was removed.

        Such text only looks like a tool call. With the bracket, the model would write it again.
        """
        follows_removed_text = self.first_token.no_bracket and self.token_count == 0
        return follows_removed_text and OPENING.search(self.addition(token)) is not None

    def _ends_invented_call(self, token: int) -> bool:
        """Return whether a token would end a tool call that the model only invents.

        After a real call, the model may write the end of a call that never began. A token does so if it completes a
        marker that only calls have, such as `->`, or closes a bracket that is not open.
        """
        if not self.after_call:
            return False

        text_so_far = self.rules.vocabulary.text(self.all_tokens())
        new_characters = self.addition(token)
        completes_marker = self._completes_marker(text_so_far, new_characters)
        return completes_marker or closes_unopened_bracket(text_so_far, new_characters)

    def _completes_marker(self, text: str, new_characters: str) -> bool:
        """Return whether characters added to a text complete a marker that only calls have, such as `->`."""
        extended_text = text + new_characters
        for marker in self.rules.vocabulary.call_signs:
            # A marker that begins here or later contains at least one of the new characters.
            first_start = max(len(text) - len(marker) + 1, 0)
            if extended_text.find(marker, first_start) >= 0:
                return True
        return False

    def look_alike_start(self, token: int) -> int | None:
        """Find text that would look like a tool call if a token were appended, such as `<QA(`.

        Such a look-alike is the name of a tool with `(` after it and an opening bracket before it.

        Returns:
            The index of its first character in the text since the call, or None if there is no look-alike.
        """
        if token not in self.rules.vocabulary.with_brackets:
            return None
        return look_alike_start(self.text() + self.addition(token), self.rules.tools)

    # Probabilities of its tokens

    @property
    def last_start_probability(self) -> float:
        """Return the model's p of ` [` after the last token; 0 where it was not recorded."""
        return self.scores.start_probabilities.get(self.token_count, 0.0)

    def likelihood(self, token_index: int) -> TokenLikelihood:
        """Return the token at an index and the likeliest tokens there, as texts with their log probabilities."""
        # The cache is filled in order, up to the index.
        while len(self._likelihoods) <= token_index:
            self._likelihoods.append(self._decode_likelihood(len(self._likelihoods)))
        return self._likelihoods[token_index]

    def _decode_likelihood(self, token_index: int) -> TokenLikelihood:
        """Decode the token at an index and the likeliest tokens there, with their log probabilities.

        Returns:
            The text of the written token, and of the `rules.likeliest` likeliest tokens at its place. The written token
            has the log probability UNLISTED if none was recorded for it.
        """
        written_token = self.tokens[token_index]

        # Token -> log probability, likeliest first. Nothing was recorded if a rule chose the token.
        recorded = self.scores.likeliest.get(token_index, {})
        likeliest = dict(islice(recorded.items(), self.rules.likeliest))

        written_text, *likeliest_texts = self._decode_texts_at(token_index, [written_token, *likeliest])
        return TokenLikelihood(
            text=written_text,
            log_probability=recorded.get(written_token, UNLISTED),
            likeliest=tuple(zip(likeliest_texts, likeliest.values(), strict=True)),
        )

    def _decode_texts_at(self, token_index: int, tokens: Sequence[int]) -> list[str]:
        """Return the text that each of `tokens` alone has, or would have, at an index."""
        return self.rules.vocabulary.decode_additions(tokens, self._list_tokens_until(token_index))

    def list_start_chances(self, last_text: str | None) -> list[StartChance]:
        """List how likely a tool call was before each token, wherever that was recorded.

        Args:
            last_text: What follows the last token: " [" if a call follows, "" at the end of the whole text, None if
                plain text goes on there.
        """
        chances = []
        for token_index, start_score in self.scores.starts.items():
            next_text = self._decode_text_after(token_index, last_text)
            if next_text is not None:  # it is None where tokens were removed again
                chances.append(StartChance(next_text, start_score.probability, start_score.rank))
        return chances

    def _decode_text_after(self, token_count: int, last_text: str | None) -> str | None:
        """Return what the text has after its first `token_count` tokens.

        Returns:
            The text of the next token, or `last_text` after all tokens. None for a larger count: the tokens there
            were removed again, and only their scores are left.
        """
        if token_count < self.token_count:
            next_token = self.tokens[token_count]
            return self.rules.vocabulary.text([next_token], self._list_tokens_until(token_count))
        if token_count == self.token_count:
            return last_text
        return None
