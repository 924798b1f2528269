"""Run a model in an engine that continues token ids behind the backend interface: the same rows, many in flight.

- p of ` [` at every place of a text comes from one request per text that writes the text itself, token by token: each
  token goes through the model once. The tokens of such a request are forced: written whatever their log p.
- Prompts and texts are shared as the engine shares beginnings of requests.
- Rows of decoding are continued some tokens ahead; a token that the caller does not choose is thrown away. A call is
  written in one request under its grammar.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, cycle, islice
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from toolformer_dag.model.backend import (
    CallForm,
    Ends,
    LogProbabilities,
    SamplePoint,
    TokenCounts,
    TokenQuery,
    TokenText,
)
from toolformer_dag.model.token_service import MOST_LIKELY, Scores, TokenAnswer, TokenRequest, TokenService
from toolformer_dag.settings.model_settings import SamplingSettings

UNRANKED = 1 << 30
"""The rank of tokens that are not among the MOST_LIKELY; a larger `decoding.k` reads as these."""
AHEAD = 16
"""Tokens that a row of decoding is continued by at once."""


class ForcedText(NamedTuple):
    """Tokens that the engine writes whatever their log p, to find out what it gives others there.

    - `prompt`: the tokens before them.
    - `tokens`: the tokens to write.
    - `scored`: the tokens whose log p is wanted at each of them.
    """

    prompt: Sequence[int]
    tokens: Sequence[int]
    scored: Sequence[int]

    @classmethod
    def single(cls, prompt: Sequence[int], token: int) -> "ForcedText":
        """Return a text of one token, whose log p is wanted."""
        return cls(prompt, tokens=[token], scored=[token])

    @property
    def request(self) -> TokenRequest:
        """Return the request to the engine."""
        return TokenRequest(self.prompt, len(self.tokens), forced=self.tokens, scored=self.scored)


@dataclass(slots=True, eq=False)
class ServedSample:
    """A sample that is being drawn in an engine.

    - `prompt`: the tokens that it continues: prompt, text and " [".
    - `uniforms`: a random number for each token that may be drawn, so its length is the most tokens of the sample.
    - `tokens`: the tokens drawn so far; they grow with each answer of the engine.
    """

    prompt: Sequence[int]
    uniforms: NDArray[np.float64]
    tokens: list[int] = field(default_factory=list)

    def request(self, stops: Sequence[int], sampling: SamplingSettings) -> TokenRequest:
        """Build the request for the tokens that are not drawn yet.

        Args:
            stops: The tokens after which the engine stops. If it draws none of them, it uses up the random numbers.
            sampling: The temperature and top_p with which tokens are drawn.
        """
        unused_numbers = self.uniforms[len(self.tokens) :]
        return TokenRequest(
            [*self.prompt, *self.tokens],
            most=len(unused_numbers),
            ends=stops,
            uniforms=unused_numbers,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
        )

    def is_complete(self, ends: Ends) -> bool:
        """Return whether a sample with tokens has as many as it may have, or has ended."""
        return len(self.tokens) >= len(self.uniforms) or ends.has_ended(self.tokens)


class ServiceBackend:
    """A model in a `TokenService`; see `Backend`. The engine chooses the size of a pass by its own options."""

    greedy_rows = 256

    def __init__(self, service: TokenService, context_length: int) -> None:
        self.service = service
        self.context_length = context_length
        self.counts = TokenCounts()
        self.identity = f"{service.library}, {service.dtype}"

    def run(self, requests: Sequence[TokenRequest], kinds: Sequence[str] = ()) -> list[TokenAnswer]:
        """Send requests to the engine, and count the tokens that it ran for them.

        Args:
            requests: What the engine is to write or to read.
            kinds: The fields of `self.counts` to which the tokens are added: one field per request, a single field for
                all requests, or none, so that nothing is counted.

        Returns:
            The answers, in the order of the requests.
        """
        if not requests:
            return []

        answers = self.service.run(requests)
        if kinds:
            for kind, answer in zip(cycle(kinds), answers, strict=False):  # a single kind is repeated
                self.counts.add(kind, answer.ran)
        return answers

    def propose(
        self,
        prompt: Sequence[int],
        texts: Sequence[TokenText],
        start: Sequence[int],
        ends: Ends,
        sampling: SamplingSettings,
    ) -> list[list[list[int]]]:
        """Sample calls in texts, at the places that each text chooses.

        A text chooses by the probability of ` [`, with which a call begins, at each place where a call may begin. All
        texts are in flight at once.

        Args:
            prompt: The tokens before each text.
            texts: The texts, with their places.
            start: The tokens of ` [`.
            ends: Says which tokens end a sample.
            sampling: How tokens are drawn.

        Returns:
            For each text, and for each of its samples, the drawn tokens.
        """
        p_of_texts = self._compute_start_probabilities(prompt, texts, start)  # of ` [`, at each place of each text

        samples_of_texts = []
        for text, p_of_places in zip(texts, p_of_texts, strict=True):
            points = text.choose(p_of_places)
            samples_of_texts.append(_build_samples(prompt, text, start, points))

        all_samples = list(chain.from_iterable(samples_of_texts))
        self._draw_samples(all_samples, ends, sampling)  # fills the `tokens` of each sample
        return [[sample.tokens for sample in samples] for samples in samples_of_texts]

    def _draw_samples(self, samples: Sequence[ServedSample], ends: Ends, sampling: SamplingSettings) -> None:
        """Draw the tokens of samples until all are complete, and append them to the `tokens` of each sample.

        The engine stops at every token that may end a sample. If the sample has not ended there, another request
        continues it.

        Args:
            samples: The samples.
            ends: Says which tokens may end a sample, and whether it has ended.
            sampling: How tokens are drawn.
        """
        stops = self._list_ending_tokens(ends)
        incomplete = samples
        while incomplete:
            answers = self.run([sample.request(stops, sampling) for sample in incomplete], ["samples"])
            for sample, answer in zip(incomplete, answers, strict=True):
                sample.tokens += answer.tokens
            incomplete = [sample for sample in incomplete if not sample.is_complete(ends)]

    def _list_ending_tokens(self, ends: Ends) -> list[int]:
        """Return all tokens of the vocabulary that may end a sample."""
        vocabulary = np.arange(self.service.vocabulary)
        tokens: list[int] = np.flatnonzero(ends.may_end(vocabulary)).tolist()
        return tokens

    def _compute_start_probabilities(
        self, prompt: Sequence[int], texts: Sequence[TokenText], start: Sequence[int]
    ) -> list[NDArray[np.float32]]:
        """Compute the probability of ` [` at each place of each text where a call may begin.

        Args:
            prompt: The tokens before each text.
            texts: The texts, with their places.
            start: The tokens of ` [`.

        Returns:
            For each text, the probability at each of its places, [place_count].
        """
        # The log p of all tokens of ` [` together is the sum of their log p, each after the earlier ones.
        log_p_of_texts = self._compute_first_log_p(prompt, texts, token=start[0])
        for number in range(1, len(start)):
            log_p_of_token = self._compute_later_log_p(prompt, texts, written=start[:number], token=start[number])
            log_p_of_texts = [log_p + later for log_p, later in zip(log_p_of_texts, log_p_of_token, strict=True)]
        return [np.exp(log_p).astype(np.float32) for log_p in log_p_of_texts]

    def _compute_first_log_p(
        self, prompt: Sequence[int], texts: Sequence[TokenText], *, token: int
    ) -> list[NDArray[np.float64]]:
        """Compute log p of a token at each place of each text where a call may begin.

        In one request per text, the engine writes the text itself, and computes log p of `token` at every place.

        Args:
            prompt: The tokens before each text.
            texts: The texts, with their places. A text without places needs no request.
            token: The token.

        Returns:
            For each text, log p at each of its places, [place_count].
        """
        forced_texts = [_build_forced_text(prompt, text, token) for text in texts if text.place_count]
        scores_of_requests = iter(self.score_forced_texts(["positions"], forced_texts))  # counted as "positions"

        log_p_of_texts = []
        for text in texts:
            # For each place, log p by token.
            scores_of_places = next(scores_of_requests) if text.place_count else []
            log_p_of_texts.append(np.array([scores[token] for scores in scores_of_places]))
        return log_p_of_texts

    def _compute_later_log_p(
        self, prompt: Sequence[int], texts: Sequence[TokenText], *, written: Sequence[int], token: int
    ) -> list[NDArray[np.float64]]:
        """Compute log p of a token at each place of each text where a call may begin, after some other tokens there.

        The engine gets one request per place.

        Args:
            prompt: The tokens before each text.
            texts: The texts, with their places.
            written: The tokens that stand at the place, before `token`.
            token: The token.

        Returns:
            For each text, log p at each of its places, [place_count].
        """
        forced_texts = []
        for text in texts:
            for tokens_before_place in _list_tokens_before_places(text):
                forced_texts.append(ForcedText.single([*prompt, *tokens_before_place, *written], token))
        scores_of_requests = self.score_forced_texts(["positions"], forced_texts)  # counted as "positions"

        log_p_of_places = []  # of all texts, in order
        for [scores] in scores_of_requests:  # log p by token, for the only token of the request
            log_p_of_places.append(scores[token])
        return _split_by_text(np.array(log_p_of_places), texts)

    def score_forced_texts(self, kinds: Sequence[str], texts: Sequence[ForcedText]) -> list[list[Scores]]:
        """Let the engine write given texts, to learn how probable it finds tokens along them.

        Args:
            kinds: The fields of `self.counts` to which the tokens that ran are added, as in `run`.
            texts: The tokens to write, and those to be scored at each of them.

        Returns:
            For each text, and for each of its tokens before it is written, log p of this token and of those to be
            scored.
        """
        answers = self.run([text.request for text in texts], kinds)
        return [_sort_scores(answer) for answer in answers]

    def log_probabilities(self, queries: Sequence[TokenQuery]) -> list[LogProbabilities]:
        """Compute the log p of tokens that each query wants, [places, tokens per place] each."""
        kinds = [query.kind for query in queries]
        requests = [_build_query_request(query) for query in queries]
        answers = self.run(requests, kinds)
        return [_select_query_values(query, answer) for query, answer in zip(queries, answers, strict=True)]

    def greedy(self, sequences: Sequence[Sequence[int]]) -> "ServiceRows":
        """Run sequences, and return them as rows for the caller to continue."""
        return ServiceRows(self, sequences)


def _build_samples(
    prompt: Sequence[int], text: TokenText, start: Sequence[int], points: Sequence[SamplePoint]
) -> list[ServedSample]:
    """Build the samples that are to be drawn in a text. They have no tokens yet.

    Args:
        prompt: The tokens before the text.
        text: The text.
        start: The tokens of ` [`, with which each sample begins.
        points: The points of the text at which samples are drawn. Each row of `uniforms` has the random numbers of
            one sample.
    """
    samples = []
    for point in points:
        tokens_before_sample = [*prompt, *text.ids[: point.tokens_before], *start]
        for random_numbers in point.uniforms:
            samples.append(ServedSample(tokens_before_sample, random_numbers))
    return samples


def _split_by_text(values: NDArray[np.float64], texts: Sequence[TokenText]) -> list[NDArray[np.float64]]:
    """Return the values at each text's places, [place_count] each, from those at the places of all texts."""
    ends_of_texts = np.cumsum([text.place_count for text in texts])
    return np.split(values, ends_of_texts[:-1])


def _list_tokens_before_places(text: TokenText) -> list[Sequence[int]]:
    """Return the tokens of a text before each place where a call may begin."""
    return [text.ids[:place] for place in range(text.first_place, text.first_place + text.place_count)]


def _build_forced_text(prompt: Sequence[int], text: TokenText, token: int) -> ForcedText:
    """Build the request to write a text's own tokens, with log p of another token at every place.

    A place is where a call may begin. Its number is the number of tokens of the text before it.

    Example:
        After the prompt [1, 2], the text [5, 6, 7] has the places 1, 2 and 3. The engine gets [1, 2, 5], and writes
        6, 7 and `token`. Before each of these it computes log p of `token`.

    Args:
        prompt: The tokens before the text.
        text: The text, with its first place and the number of its places.
        token: The token whose log p is wanted.
    """
    last_place = text.first_place + text.place_count - 1
    return ForcedText(
        prompt=[*prompt, *text.ids[: text.first_place]],
        tokens=[*text.ids[text.first_place : last_place], token],
        scored=[token],
    )


class WrittenAhead(NamedTuple):
    """A token that the engine wrote after a row, before the caller chose it.

    - `token`: the token.
    - `scores`: log p by token of what could stand there, the likeliest first.
    """

    token: int
    scores: Scores


@dataclass(slots=True)
class ServiceRow:
    """A sequence that is continued, and what the engine has written after it.

    - `ids`: the tokens of the sequence.
    - `ahead`: outside a call, the tokens that the engine would write next; empty before they are requested. Within a
      call, which one request writes when it begins, the tokens that are left of it.
    - `in_call`: whether the sequence is within a call.
    - `forbidden`: tokens that may not come next.
    - `permitted`: the most likely token that may come next, where none of the scored tokens may; None before it is
      requested.
    """

    ids: list[int]
    ahead: list[WrittenAhead] = field(default_factory=list)
    in_call: bool = False
    forbidden: set[int] = field(default_factory=set)
    permitted: int | None = None

    @property
    def scores(self) -> Scores:
        """Return log p of the likeliest next tokens; empty where nothing is written ahead."""
        return self.ahead[0].scores if self.ahead else {}

    @property
    def best(self) -> int | None:
        """Return the likeliest permitted next token; None where it has to be requested, or a call has no more."""
        if self.in_call:
            return self.ahead[0].token if self.ahead else None
        for token in self.scores:
            if token not in self.forbidden:
                return token
        return self.permitted

    @property
    def needs_best(self) -> bool:
        """Return whether the likeliest permitted token has to be requested from the engine."""
        return self.best is None and not self.in_call

    @property
    def least_log_p_is_tied(self) -> bool:
        """Return whether the last two scored tokens are equally likely; further tokens may be so too."""
        last_two = list(self.scores.values())[-2:]
        return len(last_two) == 2 and last_two[0] == last_two[1]

    def append(self, token: int) -> None:
        """Append a token; what is written ahead stays where it begins with this token."""
        self.ids.append(token)
        is_written = bool(self.ahead) and self.ahead[0].token == token
        self.ahead = self.ahead[1:] if is_written else []
        self.forbidden = set()
        self.permitted = None

    def set_call(self, tokens: Sequence[int]) -> None:
        """Set `ahead` to the tokens of a whole call, with log p 0, which nobody reads."""
        self.ahead = [WrittenAhead(token, {token: 0.0}) for token in tokens]

    def count_tokens_to_continue(self, context_length: int) -> int:
        """Return how many tokens the engine should write ahead now: AHEAD, fewer at the end of the context, or none."""
        if self.ahead or self.in_call:
            return 0
        return max(0, min(AHEAD, context_length - len(self.ids)))


class ServiceRows:
    """Sequences that the caller continues; see `GreedyRows` for the methods.

    Ranks from MOST_LIKELY on are UNRANKED: the engine scores no more tokens.
    """

    def __init__(self, backend: ServiceBackend, sequences: Sequence[Sequence[int]]) -> None:
        self._backend = backend
        self._rows: list[ServiceRow] = []
        self.add(sequences)

    def step(self, tokens: Sequence[int], forms: Mapping[int, CallForm]) -> None:
        """Append a token to each row. Where it begins a call, the engine writes the whole call ahead.

        Args:
            tokens: The token of each row.
            forms: For each row in which a call begins, by the index of the row, the grammar and the most tokens of
                the call.
        """
        for index, (row, token) in enumerate(zip(self._rows, tokens, strict=True)):
            row.append(token)
            if index in forms:
                row.in_call = True
        self._write_calls(forms)
        self._continue_rows()  # outside calls, requests the next tokens of each row that has none written ahead

    def keep(self, rows: Sequence[int]) -> None:
        """Keep only these rows, in this order."""
        self._rows = [self._rows[index] for index in rows]

    def add(self, sequences: Sequence[Sequence[int]]) -> None:
        """Run sequences and append them as rows."""
        self._rows += [ServiceRow(list(ids)) for ids in sequences]
        self._continue_rows()

    def likeliest(self, row: int, tokens: int) -> dict[int, float]:
        """Return a row's most likely next tokens with their log p in nats; at most MOST_LIKELY."""
        return dict(islice(self._rows[row].scores.items(), tokens))

    def ranks(self, token: int) -> list[int]:
        """Return for each row how many tokens are more likely than `token` as the next one."""
        return [self._compute_rank(row, token) for row in self._rows]

    def _compute_rank(self, row: ServiceRow, token: int) -> int:
        """Return how many tokens are likelier than `token` as the next one of a row; UNRANKED below the scored ones."""
        log_p = row.scores.get(token)
        if log_p is None:
            log_p = self._find_tied_log_p(row, token)
        if log_p is None:
            return UNRANKED
        return sum(other > log_p for other in row.scores.values())

    def _find_tied_log_p(self, row: ServiceRow, token: int) -> float | None:
        """Find log p of a token that the engine did not score, in case it is as likely as the last scored ones.

        The engine scores only the likeliest next tokens. If the last two of them are equally likely, with a log p of -3
        for example, it may have left out others with -3. Only then it is asked for the token.

        Returns:
            The log p of the token, or None if the last two differ or the token is less likely.
        """
        if not row.least_log_p_is_tied:
            return None

        # Asks for a single text of a single token. The row does not change.
        [[scores]] = self._backend.score_forced_texts([], [ForcedText.single(row.ids, token)])
        log_p = scores[token]
        least_scored_log_p = min(row.scores.values())
        return log_p if log_p >= least_scored_log_p else None

    def rank_of_sequence(self, row: int, tokens: Sequence[int]) -> int:
        """Return how many single tokens, except `tokens[0]`, are more likely than the whole sequence `tokens`."""
        joint_log_p = self.log_probability(row, tokens)
        scores = self._rows[row].scores
        rank = sum(log_p > joint_log_p for token, log_p in scores.items() if token != tokens[0])
        return rank if rank < MOST_LIKELY - 1 else UNRANKED

    def log_probability(self, row: int, tokens: Sequence[int]) -> float:
        """Compute the joint log probability of some tokens as the continuation of a row, in nats.

        Nothing is appended to the row.
        """
        known_log_p = self._rows[row].scores.get(tokens[0])
        if known_log_p is not None and len(tokens) == 1:
            return known_log_p

        text = ForcedText(self._rows[row].ids, tokens=tokens, scored=tokens)
        [scores_of_tokens] = self._backend.score_forced_texts([], [text])
        return sum(scores[token] for scores, token in zip(scores_of_tokens, tokens, strict=True))

    def forbid(self, places: Sequence[tuple[int, int]]) -> None:
        """Forbid tokens as the next ones of rows, until the next step. places: pairs of a row and a token."""
        for row, token in places:
            self._rows[row].forbidden.add(token)
            self._rows[row].permitted = None

    def permit(self, row: int, form: CallForm) -> bool:
        """Return whether the call that the engine wrote after a row has a next token that its form allows."""
        ahead = self._rows[row].ahead
        return bool(ahead) and form.allows(ahead[0].token)

    def best(self) -> list[int]:
        """Return the most likely next token of each row that is not forbidden; 0 after a call's end."""
        self._request_best([row for row in self._rows if row.needs_best])
        return [row.best or 0 for row in self._rows]

    def _request_best(self, rows: Sequence[ServiceRow]) -> None:
        """Set `permitted` of these rows to the likeliest token that is not forbidden, by a request for each."""
        answers = self._backend.run([TokenRequest(row.ids, forbidden=row.forbidden) for row in rows])
        for row, answer in zip(rows, answers, strict=True):
            [row.permitted] = answer.tokens

    def _write_calls(self, forms: Mapping[int, CallForm]) -> None:
        """Let the engine write the calls that begin in some rows, each in one request, and store them in `ahead`.

        The `ahead` of a row holds tokens that are written after it, before the caller chooses them.

        Args:
            forms: For each of these rows, by its index, the grammar and the most tokens of the call. If the most is 0,
                nothing is written.
        """
        calls = [_RowWithCall(self._rows[index], form) for index, form in forms.items() if form.most > 0]
        answers = self._backend.run([call.request for call in calls])
        for call, answer in zip(calls, answers, strict=True):
            call.row.set_call(answer.tokens)

        # A call with its most tokens may be cut off. Then the scores of its tokens tell where its input ends best.
        self._score_calls([call.row for call in calls if call.is_cut])

    def _score_calls(self, rows: Sequence[ServiceRow]) -> None:
        """Let the engine write the calls in `ahead` of these rows once more, and store them there with their scores."""
        requests = []
        for row in rows:
            tokens = [written.token for written in row.ahead]
            requests.append(TokenRequest(row.ids, most=len(tokens), forced=tokens, likeliest=MOST_LIKELY))
        self._write_ahead(rows, requests)

    def _continue_rows(self) -> None:
        """Let the engine write the likeliest next tokens of each row, and store them with their scores in `ahead`.

        Nothing is written in rows within a call, and in rows that still have tokens ahead. For the others several
        tokens are requested at once, because the caller mostly chooses the likeliest ones too.
        """
        rows = []
        requests = []
        for row in self._rows:
            token_count = row.count_tokens_to_continue(self._backend.context_length)
            if token_count == 0:
                continue
            rows.append(row)
            requests.append(TokenRequest(row.ids, most=token_count, likeliest=MOST_LIKELY))
        self._write_ahead(rows, requests)

    def _write_ahead(self, rows: Sequence[ServiceRow], requests: Sequence[TokenRequest]) -> None:
        """Run a request per row; set `ahead` of the row to the tokens that it writes, with their scores."""
        for row, answer in zip(rows, self._backend.run(requests), strict=True):
            written = zip(answer.tokens, _sort_scores(answer), strict=True)
            row.ahead = [WrittenAhead(token, scores) for token, scores in written]


@dataclass(frozen=True, slots=True)
class _RowWithCall:
    """A row after which a call is written.

    - `row`: the row.
    - `form`: the call's grammar and its most tokens.
    """

    row: ServiceRow
    form: CallForm

    @property
    def request(self) -> TokenRequest:
        """Return the request to write the call to its end, under its grammar."""
        return TokenRequest(self.row.ids, self.form.most, ends=[self.form.end], grammar=self.form.grammar)

    @property
    def is_cut(self) -> bool:
        """Return whether the call that was written has as many tokens as it may have."""
        return len(self.row.ahead) == self.form.most


def _sort_scores(answer: TokenAnswer) -> list[Scores]:
    """Return the scores at each written token, the likeliest token first; of equally likely ones, the lower number."""
    return [dict(sorted(scores.items(), key=_likelier_first)) for scores in answer.scores]


def _likelier_first(token_and_log_p: tuple[int, float]) -> tuple[float, int]:
    """Return the sort key that orders pairs of a token and its log p: likelier ones first, then lower tokens."""
    token, log_p = token_and_log_p
    return (-log_p, token)


def _build_query_request(query: TokenQuery) -> TokenRequest:
    """Build the engine's request that answers a query: log p of some tokens at some places of a text.

    If only the text's own tokens are wanted, the engine only reads the text, up to the last place. This is fastest.
    Otherwise it writes the text's tokens, with log p of the wanted tokens at each place.
    """
    if not _wants_text_only(query):
        return _build_writing_request(query)

    last_place = max(query.places)  # the number of tokens of the text before it
    tokens_to_read = [*query.prefix, *query.text[: last_place + 1]]
    return TokenRequest(tokens_to_read, reads_prompt=True)


def _wants_text_only(query: TokenQuery) -> bool:
    """Return whether a query wants log p of a single token at each place: the one that stands there in the text."""
    if max(query.places) >= len(query.text):
        return False
    tokens_by_place = zip(query.places, query.tokens, strict=True)
    return all(list(tokens) == [query.text[place]] for place, tokens in tokens_by_place)


def _build_writing_request(query: TokenQuery) -> TokenRequest:
    """Build the request to write a text from the first place of a query to the last, with log p of the wanted tokens.

    A place is the number of tokens of the text before it.

    Example:
        The prefix is [1] and the text [5, 6, 7]. The query wants log p of token 8 at place 1, and of token 9 at
        place 3, after the end of the text. The request has prompt=[1, 5], most=3, forced=[6, 7, 9] and scored=[8].
    """
    first_place = min(query.places)
    tokens_to_write = _list_tokens_to_write(query)  # the answer has their log p even if they are not in `scored`
    other_wanted_tokens = _collect_unwritten_tokens(query, tokens_to_write)
    return TokenRequest(
        prompt=[*query.prefix, *query.text[:first_place]],
        most=len(tokens_to_write),
        forced=tokens_to_write,
        scored=sorted(other_wanted_tokens),
    )


def _list_tokens_to_write(query: TokenQuery) -> list[int]:
    """List the text's tokens from the first place to the last.

    If the last place is at the end of the text, where no token follows, a token that the query wants stands for it.
    """
    first_place = min(query.places)
    count = max(query.places) - first_place + 1
    any_token = query.tokens[-1][0]
    return [*query.text[first_place:], any_token][:count]


def _collect_unwritten_tokens(query: TokenQuery, written: Sequence[int]) -> set[int]:
    """Collect the tokens whose log p a query wants at a place where another token is written.

    Args:
        query: The places, and the tokens wanted at each.
        written: The tokens that are written, beginning at the first place.
    """
    first_place = min(query.places)
    unwritten: set[int] = set()
    for place, wanted_tokens in zip(query.places, query.tokens, strict=True):
        written_token = written[place - first_place]
        unwritten.update(token for token in wanted_tokens if token != written_token)
    return unwritten


def _select_query_values(query: TokenQuery, answer: TokenAnswer) -> LogProbabilities:
    """Return the log p that a query wants, [places, tokens per place], from the answer to `_build_query_request`."""
    values = _select_prompt_values(query, answer) if answer.prompt else _select_written_values(query, answer)
    return np.array(values, np.float32)


def _select_prompt_values(query: TokenQuery, answer: TokenAnswer) -> list[list[float]]:
    """Return log p of the text's token at each place, from an answer with log p of all tokens of the prompt."""
    return [[answer.prompt[len(query.prefix) + place]] for place in query.places]


def _select_written_values(query: TokenQuery, answer: TokenAnswer) -> list[list[float]]:
    """Return log p of the wanted tokens at each place, from an answer with scores from the first place on."""
    first_place = min(query.places)
    values = []
    for place, tokens in zip(query.places, query.tokens, strict=True):
        scores = answer.scores[place - first_place]
        values.append([scores[token] for token in tokens])
    return values
