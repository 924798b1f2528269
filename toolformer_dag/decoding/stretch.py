"""A stretch, the part of a text between two calls: its tokens, where a call may begin, and which tokens it bars."""

from dataclasses import dataclass, field
from itertools import islice

from toolformer_dag.decoding.generation import UNLISTED, StartChance, TokenLikelihood
from toolformer_dag.decoding.look_alikes import OPENING, closes_nothing, look_alike_start
from toolformer_dag.decoding.place_scores import PlaceScores
from toolformer_dag.decoding.rules import DecodingRules
from toolformer_dag.decoding.written_call import INCOMPLETE


@dataclass(frozen=True, slots=True)
class CallSite:
    """Which calls may begin where a stretch begins, by those before it.

    - `places_with_calls`: at how many places calls were made so far.
    - `results_before`: how many calls with results stand right before it.
    - `failed_tools`: the tools that were called here without a result; another one is called now.
    - `no_start`: whether no call may begin here, since one was refused.
    - `no_bracket`: whether no opening bracket may come here, since it would begin a look-alike of a call.
    """

    places_with_calls: int = 0
    results_before: int = 0
    failed_tools: frozenset[str] = frozenset()
    no_start: bool = False
    no_bracket: bool = False


@dataclass(slots=True)
class Stretch:
    """The tokens written since the prompt, the last call, or the last time that something was taken back.

    A place in it is the number of its tokens before that place. At place 0 nothing of it is written.

    - `prefix`: all tokens before the stretch, those of the prompt among them.
    - `budget`: the most tokens that it may have.
    - `site`: which calls may begin at place 0.
    - `after_call`: whether a call was made anywhere before it, with a result or without.
    - `written`: its tokens so far.
    - `characters`: how many characters of its text stay, where a stop word or the end of a sentence cuts it; else None.
    - `scores`: what the model said at each place.
    """

    rules: DecodingRules
    prefix: list[int]
    budget: int
    site: CallSite
    after_call: bool
    written: list[int] = field(default_factory=list)
    characters: int | None = None
    scores: PlaceScores = field(default_factory=PlaceScores)
    _offers: dict[int, frozenset[str]] = field(default_factory=dict)  # the tools offered, by place
    _likelihoods: list[TokenLikelihood] = field(default_factory=list)  # of the first tokens, as many as were read

    # What is written

    @property
    def place(self) -> int:
        """Return the place of the next token."""
        return len(self.written)

    @property
    def room(self) -> int:
        """Return how many tokens the context has space for after the prefix."""
        return self.rules.language_model.context_length - len(self.prefix)

    @property
    def is_full(self) -> bool:
        """Return whether a limit ends the text here: that of its tokens, or the context."""
        return self.characters is None and self.place >= min(self.budget, self.room)

    def tokens(self) -> list[int]:
        """Return all tokens of the text so far."""
        return self.prefix + self.written

    def text(self) -> str:
        """Return what the tokens of the stretch say, as far as it stays."""
        return self.rules.vocabulary.text(self.written, self.prefix)[: self.characters]

    def addition(self, token: int) -> str:
        """Return the characters that `token` would add."""
        return self.rules.vocabulary.text([token], self.tokens())

    def take_back_to(self, characters: int) -> None:
        """Drop the last tokens until the text has at most so many characters."""
        while len(self.text()) > characters:
            self.written.pop()
        del self._likelihoods[self.place :]

    def is_inside_character(self, place: int) -> bool:
        """Return whether a place is between the tokens of one character."""
        vocabulary = self.rules.vocabulary
        return vocabulary.text(self.written[:place], vocabulary.start).endswith(INCOMPLETE)

    # Where a call may begin

    @property
    def may_chain(self) -> bool:
        """Return whether a call may begin at place 0, right after a call with a result: up to `depth` in a row."""
        return 0 < self.site.results_before < self.rules.depth

    @property
    def is_right_after_result(self) -> bool:
        """Return whether nothing is written yet after a call with a result."""
        return self.site.results_before > 0 and self.place == 0

    @property
    def k(self) -> int:
        """Return among how many of the likeliest tokens ` [` has to be here; right after a call it is the likeliest."""
        return min(self.rules.k, 1) if self.is_right_after_result else self.rules.k

    def has_calls_left(self, place: int) -> bool:
        """Return whether the rules allow one more call, at `place` or after it."""
        has_places_left = self.rules.k > 0 and self.site.places_with_calls < self.rules.calls
        return has_places_left or (place == 0 and self.may_chain)

    def may_begin_call(self, place: int) -> bool:
        """Return whether the rules let a tool call begin after the first `place` tokens of the stretch.

        That is so where the limit of calls is not reached, the call does not directly follow another one (except in a
        chain), some tool may be called, and the last character is complete. How likely the model finds ` [` is not
        looked at here.
        """
        follows_call = place == 0 and self.after_call
        if follows_call and not self.may_chain:
            return False
        if not self.has_calls_left(place):
            return False
        return bool(self.callable_tools(place)) and not self.is_inside_character(place)

    def callable_tools(self, place: int) -> frozenset[str]:
        """Return the tools that are offered at `place` and whose `min_probability` p of ` [` reaches there."""
        if self.site.no_start and place == 0:
            return frozenset()
        p_start = self.scores.p_starts.get(place, 0.0)
        thresholds = self.rules.min_probability
        return frozenset(name for name in self.offered_tools(place) if thresholds.get(name, 0.0) <= p_start)

    def offered_tools(self, place: int) -> frozenset[str]:
        """Return the names of the tools that `rules.offer` chooses for the text up to `place`; without it all tools.

        The choice is cached per place, since it searches the text.
        """
        if self.rules.offer is None:
            return self.rules.names
        if place not in self._offers:
            text_before = self.rules.vocabulary.text(self.prefix + self.written[:place], [])
            self._offers[place] = self.rules.offer(text_before, self.rules.names)
        return self._offers[place]

    # Which tokens may not come next

    def bars(self, token: int) -> bool:
        """Return whether a rule forbids `token` as the next one. Only tokens with brackets or `->` can be forbidden.

        - Where no tool call may begin, the last token of ` [`, which begins one.
        - Where something that only looks like a call, such as `<QA(`, was removed: every opening bracket.
        - After a call: `->`, and closing brackets that nothing opened. With them a model would invent a result.
        """
        vocabulary = self.rules.vocabulary
        if token not in vocabulary.with_brackets:
            return False
        if token == vocabulary.start[-1] and self._completes_barred_start():
            return True
        added_characters = self.addition(token)
        follows_removed_text = self.site.no_bracket and self.place == 0
        if follows_removed_text and OPENING.search(added_characters) is not None:
            return True
        return self.after_call and self._ends_call(added_characters)

    def _completes_barred_start(self) -> bool:
        """Return whether the last token of ` [` would complete a start of a call where no call may begin.

        ` [` may be several tokens. All but the last have to be written already, at the end of the text.
        """
        beginning = self.rules.vocabulary.start[:-1]
        # The beginning may reach back into `prefix`, the tokens before the stretch, so its end is looked at too.
        last_tokens = self.prefix[-len(beginning) - 1 :] + self.written
        if last_tokens[len(last_tokens) - len(beginning) :] != beginning:
            return False
        place_of_start = max(self.place - len(beginning), 0)
        return not self.may_begin_call(place_of_start)

    def _ends_call(self, addition: str) -> bool:
        """Return whether the characters `addition` would end an invented call after the text so far.

        They do where they complete a marker that only calls have, such as `->`, or close a bracket that is not open.
        """
        text = self.rules.vocabulary.text(self.tokens(), [])
        for marker in self.rules.vocabulary.signs:
            first_start = max(len(text) - len(marker) + 1, 0)  # a marker from here on has characters of `addition`
            if (text + addition).find(marker, first_start) >= 0:
                return True
        return closes_nothing(text, addition)

    def look_alike_start(self, token: int) -> int | None:
        """Return the first character of the look-alike of a call that `token` completes; None where there is none."""
        if token not in self.rules.vocabulary.with_brackets:
            return None
        return look_alike_start(self.text() + self.addition(token), self.rules.tools)

    # What is told about its tokens

    def likelihood(self, place: int) -> TokenLikelihood:
        """Return the log p of the token at `place`, and the likeliest tokens there. Each token is decoded once."""
        while len(self._likelihoods) <= place:
            self._likelihoods.append(self._decoded_likelihood(len(self._likelihoods)))
        return self._likelihoods[place]

    def _decoded_likelihood(self, place: int) -> TokenLikelihood:
        """Return text and log p of the token written at `place`, and of the likeliest tokens there.

        As many of these as the rules ask for. A token that was not among the recorded likeliest ones has log p
        UNLISTED.
        """
        token = self.written[place]
        log_p_by_token = self.scores.likeliest.get(place, {})  # likeliest first; empty where the token was forced
        likeliest = list(islice(log_p_by_token, self.rules.likeliest))
        context = self.prefix + self.written[:place]
        token_text, *likeliest_texts = self.rules.vocabulary.additions([token, *likeliest], context)
        texts_with_log_p = []
        for text, likely_token in zip(likeliest_texts, likeliest, strict=True):
            texts_with_log_p.append((text, log_p_by_token[likely_token]))
        return TokenLikelihood(token_text, log_p_by_token.get(token, UNLISTED), tuple(texts_with_log_p))

    def start_chances(self, last_text: str | None) -> list[StartChance]:
        """Return how likely a tool call was before each token where that was recorded, with the token's text.

        `last_text`: what stands after the last token: ` [` where a call follows, "" where the text ends. With None
        the chance there is left out, because nothing is written there yet.
        """
        chances = []
        for place, start in self.scores.starts.items():  # a place is a number of tokens before it
            if place > len(self.written):
                continue  # the tokens there were removed again
            written_text = last_text
            if place < len(self.written):
                context = self.prefix + self.written[:place]
                written_text = self.rules.vocabulary.text([self.written[place]], context)
            if written_text is not None:
                chances.append(StartChance(written_text, start.probability, start.rank))
        return chances
