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

    - `places`: at how many places calls were made so far.
    - `results`: how many calls with results stand right before it.
    - `failed`: the tools that were called here without a result; another one is called now.
    - `no_start`: whether no call may begin here, since one was refused.
    - `no_bracket`: whether no opening bracket may come here, since it would begin a look-alike of a call.
    """

    places: int = 0
    results: int = 0
    failed: frozenset[str] = frozenset()
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
        return 0 < self.site.results < self.rules.depth

    @property
    def is_right_after_result(self) -> bool:
        """Return whether nothing is written yet after a call with a result."""
        return self.site.results > 0 and self.place == 0

    @property
    def k(self) -> int:
        """Return among how many of the likeliest tokens ` [` has to be here; right after a call it is the likeliest."""
        return min(self.rules.k, 1) if self.is_right_after_result else self.rules.k

    def has_calls_left(self, place: int) -> bool:
        """Return whether the rules allow one more call, at `place` or after it."""
        has_places_left = self.rules.k > 0 and self.site.places < self.rules.calls
        return has_places_left or (place == 0 and self.may_chain)

    def may_begin_call(self, place: int) -> bool:
        """Return whether a call may begin at `place`, whatever the model's p of ` [` is among all tokens.

        One more call is allowed, some text or a chain stands between it and the one before, some tool may be called
        here, and no character is half written.
        """
        is_apart = place > 0 or not self.after_call or self.may_chain
        if not (is_apart and self.has_calls_left(place)):
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
        """Return the tools that the text up to `place` is for; each place is asked about once."""
        if self.rules.offer is None:
            return self.rules.names
        if place not in self._offers:
            text_before = self.rules.vocabulary.text(self.prefix + self.written[:place], [])
            self._offers[place] = self.rules.offer(text_before, self.rules.names)
        return self._offers[place]

    # Which tokens may not come next

    def bars(self, token: int) -> bool:
        """Return whether `token` may not come next.

        - Where no call may begin, the last token of ` [` is barred.
        - Where a look-alike of a call was taken back, every opening bracket is.
        - After a call, `->` and closing brackets that nothing opened are: a model that misses a result invents one.
        """
        vocabulary = self.rules.vocabulary
        if token not in vocabulary.with_brackets:
            return False
        if token == vocabulary.start[-1] and self._completes_barred_start():
            return True
        addition = self.addition(token)
        if self.site.no_bracket and self.place == 0 and OPENING.search(addition) is not None:
            return True
        return self.after_call and self._ends_call(addition)

    def _completes_barred_start(self) -> bool:
        """Return whether all tokens of ` [` but the last are written, and no call may begin where they stand."""
        beginning = self.rules.vocabulary.start[:-1]
        # The beginning may stand in the prefix, so as many of its last tokens are looked at too.
        last_tokens = self.prefix[-len(beginning) - 1 :] + self.written
        if last_tokens[len(last_tokens) - len(beginning) :] != beginning:
            return False
        place_of_start = max(self.place - len(beginning), 0)
        return not self.may_begin_call(place_of_start)

    def _ends_call(self, addition: str) -> bool:
        """Return whether `addition` completes a sign that only calls have, such as `->`, or closes no open bracket."""
        text = self.rules.vocabulary.text(self.tokens(), [])
        for sign in self.rules.vocabulary.signs:
            first_that_reaches_addition = max(len(text) - len(sign) + 1, 0)
            if (text + addition).find(sign, first_that_reaches_addition) >= 0:
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
        token = self.written[place]
        log_probabilities = self.scores.likeliest.get(place, {})  # nothing where ` [` was forced
        likeliest = list(islice(log_probabilities, self.rules.likeliest))
        context = self.prefix + self.written[:place]
        token_text, *likeliest_texts = self.rules.vocabulary.additions([token, *likeliest], context)
        others = []
        for text, other in zip(likeliest_texts, likeliest, strict=True):
            others.append((text, log_probabilities[other]))
        return TokenLikelihood(token_text, log_probabilities.get(token, UNLISTED), tuple(others))

    def start_chances(self, last_text: str | None) -> list[StartChance]:
        """Return how likely a call was at each place where the rules trace it.

        `last_text`: what stands at the last place: ` [` of a call, or "" where the text ends. None where the next
        stretch writes there.
        """
        chances = []
        for place, start in self.scores.starts.items():
            text = last_text
            if place < self.place:
                context = self.prefix + self.written[:place]
                text = self.rules.vocabulary.text([self.written[place]], context)
            if place <= self.place and text is not None:
                chances.append(StartChance(text, start.probability, start.rank))
        return chances
