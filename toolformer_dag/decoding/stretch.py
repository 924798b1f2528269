"""The stretch of a text between two tool calls: its tokens, where a call may begin, and which tokens it forbids."""

from dataclasses import dataclass, field
from itertools import islice

from toolformer_dag.decoding.generation import UNLISTED, StartChance, TokenLikelihood
from toolformer_dag.decoding.look_alikes import OPENING, closes_unopened_bracket, look_alike_start
from toolformer_dag.decoding.place_scores import PlaceScores
from toolformer_dag.decoding.rules import DecodingRules
from toolformer_dag.decoding.written_call import INCOMPLETE


@dataclass(frozen=True, slots=True)
class CallSite:
    """Which tool calls may begin at the first token of a stretch, given the calls before it.

    - `places_with_calls`: the number of positions in the text so far at which calls were made.
    - `results_before`: the number of calls with results directly before the stretch.
    - `failed_tools`: the tools that were called here and gave no result; another tool is called next.
    - `no_start`: whether no call may begin here, because one was refused here.
    - `no_bracket`: whether no opening bracket may come here, because text such as `<QA(` was removed here.
    """

    places_with_calls: int = 0
    results_before: int = 0
    failed_tools: frozenset[str] = frozenset()
    no_start: bool = False
    no_bracket: bool = False


@dataclass(slots=True)
class Stretch:
    """The tokens written since the prompt, the last tool call, or the last removal of text.

    A `place` is an index into `written`: at place 2, two tokens of the stretch come before.

    - `prefix`: all tokens of the text before the stretch, including the prompt.
    - `budget`: the maximum number of tokens in `written`.
    - `site`: which calls may begin at place 0.
    - `after_call`: whether any call was made before the stretch, with a result or without.
    - `written`: the tokens of the stretch so far. All tokens of the text are `prefix + written`.
    - `characters`: the length to which the decoded text is cut, at a stop word or the end of a sentence; else None.
    - `scores`: the model's probabilities, by place.
    """

    rules: DecodingRules
    prefix: list[int]
    budget: int
    site: CallSite
    after_call: bool
    written: list[int] = field(default_factory=list)
    characters: int | None = None
    scores: PlaceScores = field(default_factory=PlaceScores)
    _offers: dict[int, frozenset[str]] = field(default_factory=dict)  # cache of `offered_tools`, by place
    _likelihoods: list[TokenLikelihood] = field(default_factory=list)  # cache of `likelihood`, by place

    # What is written

    @property
    def token_count(self) -> int:
        """Return how many tokens are written; this is also the place of the next token."""
        return len(self.written)

    @property
    def context_left(self) -> int:
        """Return how many tokens fit into the model's context after the prefix."""
        return self.rules.language_model.context_length - len(self.prefix)

    @property
    def is_full(self) -> bool:
        """Return whether the token budget or the model's context is used up, and no stop word ended the text."""
        has_reached_limit = self.token_count >= min(self.budget, self.context_left)
        return has_reached_limit and self.characters is None

    def tokens(self) -> list[int]:
        """Return all tokens of the text so far, including the prompt."""
        return self.prefix + self.written

    def text(self) -> str:
        """Return the decoded text of the stretch, cut after `characters` if that is set."""
        return self.rules.vocabulary.text(self.written, self.prefix)[: self.characters]

    def addition(self, token: int) -> str:
        """Return the characters that `token` would add to the text."""
        return self.rules.vocabulary.text([token], self.tokens())

    def shorten_to(self, characters: int) -> None:
        """Remove the last tokens of the stretch until its text has at most `characters` characters."""
        while len(self.text()) > characters:
            self.written.pop()
        del self._likelihoods[self.token_count :]

    def is_inside_character(self, place: int) -> bool:
        """Return whether the tokens before `place` end with only some bytes of a character."""
        vocabulary = self.rules.vocabulary
        return vocabulary.text(self.written[:place], vocabulary.start).endswith(INCOMPLETE)

    # Where a call may begin

    @property
    def may_chain(self) -> bool:
        """Return whether a call may directly follow the call before the stretch: up to `depth` calls in a row may."""
        return 0 < self.site.results_before < self.rules.depth

    @property
    def is_right_after_result(self) -> bool:
        """Return whether nothing is written yet after a call with a result."""
        return self.site.results_before > 0 and self.token_count == 0

    @property
    def k(self) -> int:
        """Return k: a call begins here if ` [` is among the k likeliest next tokens. Right after a result k is 1."""
        return min(self.rules.k, 1) if self.is_right_after_result else self.rules.k

    def has_calls_left(self, place: int) -> bool:
        """Return whether the limit on calls leaves one more, at `place` or later."""
        has_places_left = self.rules.k > 0 and self.site.places_with_calls < self.rules.calls
        return has_places_left or (place == 0 and self.may_chain)

    def may_begin_call(self, place: int) -> bool:
        """Return whether the rules let a tool call begin after the first `place` tokens of the stretch.

        It may if the limit on calls is not reached, no call directly precedes (except in a chain), some tool can be
        called, and the last character is complete. The rank of ` [` among the next tokens is checked elsewhere.
        """
        follows_call = place == 0 and self.after_call
        if follows_call and not self.may_chain:
            return False
        if not self.has_calls_left(place):
            return False
        return bool(self.callable_tools(place)) and not self.is_inside_character(place)

    def callable_tools(self, place: int) -> frozenset[str]:
        """Return the offered tools whose threshold the model's probability of ` [` at `place` reaches.

        The thresholds are `rules.min_probability`; a tool without one can always be called.
        """
        if self.site.no_start and place == 0:
            return frozenset()
        p_start = self.scores.p_starts.get(place, 0.0)
        thresholds = self.rules.min_probability
        return frozenset(name for name in self.offered_tools(place) if thresholds.get(name, 0.0) <= p_start)

    def offered_tools(self, place: int) -> frozenset[str]:
        """Return the names of the tools that fit the text before `place`, chosen by `rules.offer`; without it all.

        `place`: how many tokens of the stretch belong to that text. The choice is cached, because it searches the text.
        """
        if self.rules.offer is None:
            return self.rules.names
        if place not in self._offers:
            tokens_before = self.prefix + self.written[:place]
            text_before = self.rules.vocabulary.text(tokens_before)
            self._offers[place] = self.rules.offer(text_before, self.rules.names)
        return self._offers[place]

    # Which tokens may not come next

    def forbids(self, token: int) -> bool:
        """Return whether a rule forbids `token` as the next one. Only tokens with brackets or `->` can be forbidden.

        - Where no tool call may begin, the last token of ` [`, which begins one.
        - Where something that only looks like a call, such as `<QA(`, was removed: every opening bracket.
        - After a call: `->`, and closing brackets that nothing opened. With them a model would invent a result.
        """
        if token not in self.rules.vocabulary.with_brackets:
            return False
        return (
            self._begins_forbidden_call(token)
            or self._reopens_removed_bracket(token)
            or self._ends_invented_call(token)
        )

    def _begins_forbidden_call(self, token: int) -> bool:
        """Return whether `token` would complete ` [`, which begins a tool call, where no call may begin.

        ` [` may be several tokens. With the tokens [7, 8] of ` [`, 8 completes it if the text so far ends with 7.
        """
        *first_tokens, last_token = self.rules.vocabulary.start
        completes_start = token == last_token and self._ends_with(first_tokens)
        if not completes_start:
            return False
        place_of_start = max(self.token_count - len(first_tokens), 0)
        return not self.may_begin_call(place_of_start)

    def _ends_with(self, tokens: list[int]) -> bool:
        """Return whether the text so far, the prompt included, ends with `tokens`; True for no tokens."""
        if not tokens:
            return True
        last_tokens = self.prefix[-len(tokens) :] + self.written  # `tokens` may begin before the stretch
        return last_tokens[-len(tokens) :] == tokens

    def _reopens_removed_bracket(self, token: int) -> bool:
        """Return whether `token` has an opening bracket just where a look-alike of a call, as `<QA(`, was removed."""
        follows_removed_text = self.site.no_bracket and self.token_count == 0
        return follows_removed_text and OPENING.search(self.addition(token)) is not None

    def _ends_invented_call(self, token: int) -> bool:
        """Return whether `token`, after a real call, would end a call that the model only invents.

        It does if it completes a marker that only calls have, such as `->`, or closes a bracket that is not open.
        """
        if not self.after_call:
            return False
        text = self.rules.vocabulary.text(self.tokens())
        addition = self.addition(token)
        for marker in self.rules.vocabulary.call_signs:
            first_start = max(len(text) - len(marker) + 1, 0)  # a marker from here on has characters of `addition`
            if (text + addition).find(marker, first_start) >= 0:
                return True
        return closes_unopened_bracket(text, addition)

    def look_alike_start(self, token: int) -> int | None:
        """Return the index in the text at which a look-alike of a call begins that `token` would complete, else None.

        A look-alike is a tool's name after another bracket, such as `<QA(`.
        """
        if token not in self.rules.vocabulary.with_brackets:
            return None
        return look_alike_start(self.text() + self.addition(token), self.rules.tools)

    # Probabilities of its tokens

    def likelihood(self, place: int) -> TokenLikelihood:
        """Return the token at `place` and the likeliest tokens there, as texts with log p. Results are cached."""
        while len(self._likelihoods) <= place:
            self._likelihoods.append(self._decoded_likelihood(len(self._likelihoods)))
        return self._likelihoods[place]

    def _decoded_likelihood(self, place: int) -> TokenLikelihood:
        """Return text and log p of the token written at `place`, and of the `rules.likeliest` likeliest tokens there.

        The written token has log p UNLISTED if it was not among the recorded likeliest ones.
        """
        token = self.written[place]
        log_p_by_token = self.scores.likeliest.get(place, {})  # likeliest first; empty where the token was forced
        likeliest_tokens = list(islice(log_p_by_token, self.rules.likeliest))
        tokens_before = self.prefix + self.written[:place]
        # The text that each token has after the tokens before it.
        token_text, *likeliest_texts = self.rules.vocabulary.additions([token, *likeliest_tokens], tokens_before)
        likeliest_log_ps = [log_p_by_token[likely_token] for likely_token in likeliest_tokens]
        return TokenLikelihood(
            text=token_text,
            log_probability=log_p_by_token.get(token, UNLISTED),
            likeliest=tuple(zip(likeliest_texts, likeliest_log_ps, strict=True)),
        )

    def start_chances(self, last_text: str | None) -> list[StartChance]:
        """Return how likely a tool call was before each token where that was recorded, with the token's text.

        `last_text`: what follows the last token: ` [` before a call, "" at the end of the text. With None the chance
        after the last token is left out, because nothing is written there yet.
        """
        chances = []
        for place, start in self.scores.starts.items():
            if place < self.token_count:
                tokens_before = self.prefix + self.written[:place]
                text = self.rules.vocabulary.text([self.written[place]], tokens_before)
                chances.append(StartChance(text, start.probability, start.rank))
            elif place == self.token_count and last_text is not None:
                chances.append(StartChance(last_text, start.probability, start.rank))
            # Scores of places beyond belong to tokens that were removed again.
        return chances
