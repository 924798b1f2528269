"""The text since the last tool call: its tokens, where a call may begin, and which tokens may not come next."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice

from toolformer_dag.decoding.generation import (
    REPEATED_CALL,
    UNLISTED_LOG_PROBABILITY,
    DecodedCall,
    StartChance,
    TokenLikelihood,
)
from toolformer_dag.decoding.look_alikes import OPENING_BRACKET, closes_unopened_bracket, find_look_alike_start
from toolformer_dag.decoding.rules import DecodingRules
from toolformer_dag.decoding.text_memory import TextMemory
from toolformer_dag.decoding.token_scores import TokenScores
from toolformer_dag.decoding.written_call import INCOMPLETE_CHARACTER


@dataclass(frozen=True, slots=True)
class FirstTokenRules:
    """What may come first after a tool call or a removal of text. It concerns only this one place in the text.

    Attributes:
        preceding_result_count: The number of calls with results directly before the first token.
        failed_tool_names: The tools that were called here and gave no result. Another tool is called next.
        forbids_call: Whether no call may begin here, because one was refused here.
        forbids_opening_bracket: Whether no opening bracket may come here, because text such as `<QA(` was removed here.
    """

    preceding_result_count: int = 0
    failed_tool_names: frozenset[str] = frozenset()
    forbids_call: bool = False
    forbids_opening_bracket: bool = False


@dataclass(slots=True)
class TextSinceCall:
    """The tokens written since the prompt, the last tool call, or the last removal of text.

    A token index counts them from 0: before index 2, two of these tokens are written.

    Attributes:
        memory: What the whole text remembers of its calls. It does not change while this object is written.
        preceding_tokens: All earlier tokens of the text, including the prompt.
        max_tokens: The maximum number of `tokens`.
        first_token_rules: What may come at index 0.
        tokens: The tokens so far. All tokens of the text are `preceding_tokens + tokens`.
        cut_length: The number of characters after which the text is cut, for a stop word or a sentence. Otherwise None.
        token_scores: The model's probabilities, by token index.
    """

    rules: DecodingRules
    memory: TextMemory
    preceding_tokens: list[int]
    max_tokens: int
    first_token_rules: FirstTokenRules
    tokens: list[int] = field(default_factory=list)
    cut_length: int | None = None
    token_scores: TokenScores = field(default_factory=TokenScores)
    # Caches of `get_offered_tools` and `get_likelihood`, by token index.
    _cached_offered_tools: dict[int, frozenset[str]] = field(default_factory=dict)
    _cached_likelihoods: list[TokenLikelihood] = field(default_factory=list)

    # What is written

    @property
    def token_count(self) -> int:
        """Return how many tokens are written since the call; this is also the index of the next token."""
        return len(self.tokens)

    @property
    def context_tokens_left(self) -> int:
        """Return how many tokens fit into the model's context after `preceding_tokens`."""
        return self.rules.language_model.context_length - len(self.preceding_tokens)

    @property
    def is_full(self) -> bool:
        """Return whether `max_tokens` or the model's context is used up, and no stop word ended the text."""
        has_reached_limit = self.token_count >= min(self.max_tokens, self.context_tokens_left)
        return has_reached_limit and self.cut_length is None

    def list_all_tokens(self) -> list[int]:
        """Return all tokens of the text so far, including the prompt."""
        return self.preceding_tokens + self.tokens

    def decode_text(self) -> str:
        """Return the decoded text since the call, cut after `cut_length` characters if that is set."""
        return self.rules.vocabulary.decode_text(self.tokens, self.preceding_tokens)[: self.cut_length]

    def decode_addition(self, token: int) -> str:
        """Return the characters that `token` would add to the text."""
        return self.rules.vocabulary.decode_text([token], self.list_all_tokens())

    def shorten_text(self, max_characters: int) -> None:
        """Remove the last tokens until the text since the call has at most `max_characters` characters."""
        while len(self.decode_text()) > max_characters:
            self.tokens.pop()
        del self._cached_likelihoods[self.token_count :]

    def is_inside_character(self, token_index: int) -> bool:
        """Return whether a character is incomplete before an index, because only some of its bytes are written."""
        vocabulary = self.rules.vocabulary
        text_before = vocabulary.decode_text(self.tokens[:token_index], vocabulary.start_tokens)
        return text_before.endswith(INCOMPLETE_CHARACTER)

    def _list_tokens_until(self, token_index: int) -> list[int]:
        """Return all tokens of the text before an index, including the prompt."""
        return self.preceding_tokens + self.tokens[:token_index]

    # Where a call may begin

    @property
    def has_earlier_call(self) -> bool:
        """Return whether any call was made before, with a result or without."""
        return bool(self.memory.answered_calls)

    @property
    def can_chain_call(self) -> bool:
        """Return whether a call may directly follow the last one: up to `rules.max_chain_calls` calls in a row may."""
        return 0 < self.first_token_rules.preceding_result_count < self.rules.max_chain_calls

    @property
    def is_right_after_result(self) -> bool:
        """Return whether nothing is written yet after a call with a result."""
        return self.first_token_rules.preceding_result_count > 0 and self.token_count == 0

    @property
    def top_k(self) -> int:
        """Return k: a call begins if ` [` is among the k likeliest next tokens.

        Right after a result k is 1, or 0 if calls are turned off.
        """
        if self.is_right_after_result:
            return min(self.rules.top_k, 1)
        return self.rules.top_k

    def has_calls_left(self, token_index: int) -> bool:
        """Return whether the limit on calls allows one more, at the index or later."""
        calls_are_enabled = self.rules.top_k > 0
        has_positions_left = self.memory.call_position_count < self.rules.max_call_positions
        continues_chain = token_index == 0 and self.can_chain_call  # a chain of calls stands at one position
        return (calls_are_enabled and has_positions_left) or continues_chain

    def can_begin_call(self, token_index: int) -> bool:
        """Return whether the rules let a tool call begin before the token at an index.

        The module `token_choice` checks, besides, whether ` [`, which begins a call, is among the likeliest tokens.
        """
        # Directly after an earlier call, another one may only follow as part of a chain.
        follows_call_directly = token_index == 0 and self.has_earlier_call
        if follows_call_directly and not self.can_chain_call:
            return False

        if not self.has_calls_left(token_index):
            return False
        if not self.get_callable_tools(token_index):
            return False

        # A call cannot begin between the bytes of one character.
        return not self.is_inside_character(token_index)

    def get_callable_tools(self, token_index: int) -> frozenset[str]:
        """Return the offered tools for which ` [`, which begins a call, is likely enough at an index.

        A tool may need a minimum probability of ` [` (`rules.min_start_probability_by_tool`).
        """
        if self.first_token_rules.forbids_call and token_index == 0:
            return frozenset()

        start_probability = self.token_scores.start_probability_by_index.get(token_index, 0.0)
        thresholds = self.rules.min_start_probability_by_tool
        offered_tools = self.get_offered_tools(token_index)
        return frozenset(name for name in offered_tools if thresholds.get(name, 0.0) <= start_probability)

    @property
    def permitted_tool_names(self) -> frozenset[str]:
        """Return the names of the tools that may be called in this text.

        A rule that bars a tool after earlier calls belongs here. All choices of tools follow from it:
        `get_offered_tools`, then `get_callable_tools`, and the grammar of a call.
        """
        return self.rules.callable_tool_names

    def get_offered_tools(self, token_index: int) -> frozenset[str]:
        """Return the names of the permitted tools that fit the text before an index.

        `rules.choose_offered_tools` chooses them. If it is None, all permitted tools are returned.
        """
        if self.rules.choose_offered_tools is None:
            return self.permitted_tool_names

        # The choice searches the text, so it is made once per index and cached.
        if token_index not in self._cached_offered_tools:
            text_before = self.rules.vocabulary.decode_text(self._list_tokens_until(token_index))
            self._cached_offered_tools[token_index] = self.rules.choose_offered_tools(
                text_before, self.permitted_tool_names
            )
        return self._cached_offered_tools[token_index]

    # What may come first after the next call or removal

    def build_rules_after_removal(self, *, forbids_call: bool, forbids_opening_bracket: bool) -> FirstTokenRules:
        """Build the rules for the next token after something was removed from the end of the text.

        Without rules, the model could write the same again.

        Args:
            forbids_call: Whether to forbid a call here. If one is forbidden here already, it stays so.
            forbids_opening_bracket: Whether to forbid an opening bracket here, because text that only looks like a
                call was removed, such as `<QA(`. An earlier ban does not stay.
        """
        call_was_forbidden_here = self.token_count == 0 and self.first_token_rules.forbids_call
        return FirstTokenRules(
            # The calls with results directly before this place. What was removed is no longer among the tokens.
            preceding_result_count=self._preceding_result_count,
            forbids_call=forbids_call or call_was_forbidden_here,
            forbids_opening_bracket=forbids_opening_bracket,
        )

    def build_rules_after_call(self, call: DecodedCall) -> FirstTokenRules:
        """Build the rules for the first token after a tool call, depending on how the call was answered.

        A call without a result is left out of the text, which then goes on where the call began.

        Args:
            call: The answered call. It stands at the end of this text.
        """
        results_before_call = self._preceding_result_count

        # The call has a result: another call may directly follow, as part of a chain.
        if call.result is not None:
            return FirstTokenRules(preceding_result_count=results_before_call + 1)

        # The call repeats an earlier one, or continues a chain: the text goes on without a call here.
        if call.reason == REPEATED_CALL or self.is_right_after_result:
            return FirstTokenRules(preceding_result_count=results_before_call, forbids_call=True)

        # Otherwise another tool is tried here, one that has not failed here yet.
        failed_tools = self.first_token_rules.failed_tool_names | {call.tool}
        return FirstTokenRules(preceding_result_count=results_before_call, failed_tool_names=failed_tools)

    @property
    def _preceding_result_count(self) -> int:
        """Return how many calls with results stand directly before the next token, which is 0 after plain text."""
        if self.token_count > 0:
            return 0
        return self.first_token_rules.preceding_result_count

    # Which tokens may not come next

    def is_forbidden(self, token: int) -> bool:
        """Return whether a rule forbids a token as the next one.

        It would begin a call where none may begin, begin text that only looks like a call, or end a call that the model
        only invents.
        """
        has_bracket_or_marker = token in self.rules.vocabulary.bracket_tokens
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
        *first_tokens, last_token = self.rules.vocabulary.start_tokens
        completes_call_start = token == last_token and self._ends_with_tokens(first_tokens)
        if not completes_call_start:
            return False

        # The index is negative if the first tokens of ` [` are in `preceding_tokens`, such as at the end of the prompt.
        call_start_index = self.token_count - len(first_tokens)
        return not self.can_begin_call(max(call_start_index, 0))

    def _ends_with_tokens(self, tokens: list[int]) -> bool:
        """Return whether the text so far, the prompt included, ends with `tokens`; True for no tokens."""
        if not tokens:
            return True
        last_tokens = self.preceding_tokens[-len(tokens) :] + self.tokens
        return last_tokens[-len(tokens) :] == tokens

    def _reopens_removed_bracket(self, token: int) -> bool:
        """Return whether a token has an opening bracket directly after text such as `<QA(` was removed.

        Such text only looks like a tool call. With the bracket, the model would write it again.
        """
        follows_removed_text = self.first_token_rules.forbids_opening_bracket and self.token_count == 0
        return follows_removed_text and OPENING_BRACKET.search(self.decode_addition(token)) is not None

    def _ends_invented_call(self, token: int) -> bool:
        """Return whether a token would end a tool call that the model only invents.

        After a real call, the model may write the end of a call that never began. A token does so if it completes a
        marker that only calls have, such as `->`, or closes a bracket that is not open.
        """
        if not self.has_earlier_call:
            return False

        text_so_far = self.rules.vocabulary.decode_text(self.list_all_tokens())
        new_characters = self.decode_addition(token)
        completes_marker = self._completes_marker(text_so_far, new_characters)
        return completes_marker or closes_unopened_bracket(text_so_far, new_characters)

    def _completes_marker(self, text: str, new_characters: str) -> bool:
        """Return whether characters added to a text complete a marker that only calls have, such as `->`."""
        extended_text = text + new_characters
        for marker in self.rules.vocabulary.call_only_texts:
            # A marker that begins here or later contains at least one of the new characters.
            first_start = max(len(text) - len(marker) + 1, 0)
            if extended_text.find(marker, first_start) >= 0:
                return True
        return False

    def find_look_alike_start(self, token: int) -> int | None:
        """Find text that would look like a tool call if a token were appended, such as `<QA(`.

        Such a look-alike is the name of a tool with `(` after it and an opening bracket before it.

        Returns:
            The index of its first character in the text since the call, or None if there is no look-alike.
        """
        if token not in self.rules.vocabulary.bracket_tokens:
            return None

        text_with_token = self.decode_text() + self.decode_addition(token)
        # The function of the module `look_alikes`, not this method.
        return find_look_alike_start(text_with_token, self.rules.tools_by_name)

    # Probabilities of its tokens

    @property
    def last_start_probability(self) -> float:
        """Return the model's probability of ` [` after the last token. It is 0 if it was not recorded there."""
        return self.token_scores.start_probability_by_index.get(self.token_count, 0.0)

    def get_likelihood(self, token_index: int) -> TokenLikelihood:
        """Return the token at an index and the likeliest tokens there, as texts with their log probabilities."""
        # The cache is filled in order, up to the index.
        while len(self._cached_likelihoods) <= token_index:
            self._cached_likelihoods.append(self._decode_likelihood(len(self._cached_likelihoods)))
        return self._cached_likelihoods[token_index]

    def _decode_likelihood(self, token_index: int) -> TokenLikelihood:
        """Decode the token at an index and the likeliest tokens there, with their log probabilities.

        Returns:
            The text of the written token, and of the `rules.likeliest_token_count` likeliest tokens in its place. The
            written token has the log probability UNLISTED_LOG_PROBABILITY if none was recorded for it.
        """
        written_token = self.tokens[token_index]

        # Log probabilities by token, likeliest first. Nothing was recorded if a rule chose the token.
        recorded = self.token_scores.likeliest_by_index.get(token_index, {})

        # The rules may ask for fewer tokens than were recorded.
        likeliest = dict(islice(recorded.items(), self.rules.likeliest_token_count))

        # Decoded together: the text of the written token, then those of the likeliest tokens.
        written_text, *likeliest_texts = self._decode_texts_at(token_index, [written_token, *likeliest])
        return TokenLikelihood(
            text=written_text,
            log_probability=recorded.get(written_token, UNLISTED_LOG_PROBABILITY),
            likeliest_tokens=tuple(zip(likeliest_texts, likeliest.values(), strict=True)),
        )

    def _decode_texts_at(self, token_index: int, tokens: Sequence[int]) -> list[str]:
        """Return the text that each of `tokens` alone has, or would have, at an index."""
        return self.rules.vocabulary.decode_additions(tokens, self._list_tokens_until(token_index))

    def list_start_chances(self, following_text: str | None) -> list[StartChance]:
        """List how likely the model found a tool call at each place where that was recorded, and what it wrote there.

        Args:
            following_text: What follows the last token: " [" if a call follows, "" at the end of the whole text, None
                if plain text goes on there.
        """
        chances = []
        for token_index, start_score in self.token_scores.start_score_by_index.items():
            next_text = self._decode_text_after(token_index, following_text)
            if next_text is not None:  # it is None where tokens were removed again
                chances.append(StartChance(next_text, start_score.probability, start_score.rank))
        return chances

    def _decode_text_after(self, token_count: int, following_text: str | None) -> str | None:
        """Return what was written directly after the first `token_count` tokens.

        Returns:
            The text of the next token. After all tokens, it is `following_text`. None if there are fewer tokens: those
            there were removed again, and only their scores are left.
        """
        if token_count < self.token_count:
            next_token = self.tokens[token_count]
            return self.rules.vocabulary.decode_text([next_token], self._list_tokens_until(token_count))
        if token_count == self.token_count:
            return following_text
        return None
