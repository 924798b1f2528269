"""Run a model in an engine that continues token ids behind the backend interface: the same rows, many in flight.

- p of ` [` at every place of a text comes from one request per text that writes the text itself, token by token: each
  token goes through the model once.
- Texts and heads are shared as the engine shares beginnings of requests.
- Rows of decoding are continued some tokens ahead; a token that the caller does not choose is thrown away. A call is
  written in one request under its grammar.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import cycle, islice

import numpy as np
from numpy.typing import NDArray

from toolformer_dag.model.backend import CallForm, Ends, LogProbabilities, TokenCounts, TokenQuery, TokenText
from toolformer_dag.model.token_service import MOST_LIKELY, Scores, TokenAnswer, TokenRequest, TokenService
from toolformer_dag.settings.model_settings import SamplingSettings

UNRANKED = 1 << 30
"""The rank of tokens that are not among the MOST_LIKELY; a larger `decoding.k` reads as these."""
AHEAD = 16
"""Tokens that a row of decoding is continued by at once."""


class ServiceBackend:
    """A model in a `TokenService`; see `Backend`. The engine chooses the size of a pass by its own options."""

    greedy_rows = 256

    def __init__(self, service: TokenService, context_length: int) -> None:
        self.service = service
        self.context_length = context_length
        self.counts = TokenCounts()
        self.identity = f"{service.library}, {service.dtype}"

    def run(self, requests: Sequence[TokenRequest], kinds: Sequence[str] = ()) -> list[TokenAnswer]:
        """Return the answers in the order of the requests.

        `kinds`: what the tokens count as, by request or one for all; without any they are not counted.
        """
        answers = self.service.run(requests) if requests else []
        for kind, answer in zip(cycle(kinds) if kinds else (), answers, strict=False):
            self.counts.add(kind, answer.ran)
        return answers

    def propose(
        self,
        head: Sequence[int],
        texts: Sequence[TokenText],
        start: Sequence[int],
        ends: Ends,
        sampling: SamplingSettings,
    ) -> list[list[list[int]]]:
        """Propose as `Backend.propose` says; all texts are in flight at once."""
        stops = np.flatnonzero(ends.may_end(np.arange(self.service.vocabulary))).tolist()
        chosen = zip(texts, self._start_probabilities(head, texts, start), strict=True)
        points = [(at, point) for at, (text, p) in enumerate(chosen) for point in text.choose(p)]
        samples: list[list[list[int]]] = [[] for _ in texts]
        going_on: list[tuple[list[int], NDArray[np.float64], list[int]]] = []
        for at, point in points:
            before = [*head, *texts[at].ids[: point.kept], *start]
            for stream in point.streams:
                samples[at].append([])
                going_on.append((before, stream, samples[at][-1]))
        self._sample_all(going_on, ends, stops, sampling)
        return samples

    def _sample_all(
        self,
        going_on: list[tuple[list[int], NDArray[np.float64], list[int]]],
        ends: Ends,
        stops: list[int],
        sampling: SamplingSettings,
    ) -> None:
        """Fill samples, each after its prompt by its stream; one that stops without having ended goes on."""
        while going_on:
            requests = [
                TokenRequest(
                    [*before, *sample],
                    len(stream) - len(sample),
                    stops,
                    stream=stream[len(sample) :],
                    temperature=sampling.temperature,
                    top_p=sampling.top_p,
                )
                for before, stream, sample in going_on
            ]
            for (_, _, sample), answer in zip(going_on, self.run(requests, ["samples"]), strict=True):
                sample += answer.tokens
            going_on = [one for one in going_on if len(one[2]) < len(one[1]) and not ends.has_ended(one[2])]

    def _start_probabilities(
        self, head: Sequence[int], texts: Sequence[TokenText], start: Sequence[int]
    ) -> list[NDArray[np.float32]]:
        """Return, by text, p of the tokens `start` at each place [asked]."""
        walks = [
            ([*head, *text.ids[: text.before]], [*text.ids[text.before : text.before + text.asked - 1], start[0]])
            for text in texts
            if text.asked  # elsewhere p is known, and samples alone are missing
        ]
        first = iter(self.walk_scores(["positions"], [(*walk, [start[0]]) for walk in walks]))
        log_p = [np.array([scores[start[0]] for scores in next(first)] if text.asked else []) for text in texts]
        for written in range(1, len(start)):
            later = self._later_scores(head, texts, start[:written], start[written])
            log_p = [before + more for before, more in zip(log_p, later, strict=True)]
        return [np.exp(values).astype(np.float32) for values in log_p]

    def _later_scores(
        self, head: Sequence[int], texts: Sequence[TokenText], written: Sequence[int], token: int
    ) -> list[NDArray[np.float64]]:
        """Return, by text, log p of `token` after `written` at each place: a request per place."""
        walks = [
            ([*head, *text.ids[: text.before + i], *written], [token]) for text in texts for i in range(text.asked)
        ]
        steps = self.walk_scores(["positions"], [(*walk, [token]) for walk in walks])
        values = np.array([step[token] for [step] in steps])
        return np.split(values, np.cumsum([text.asked for text in texts])[:-1])

    def walk_scores(
        self, kinds: Sequence[str], walks: Sequence[tuple[Sequence[int], Sequence[int], Sequence[int]]]
    ) -> list[list[Scores]]:
        """Write tokens after prompts; return log p before each: of the walk's tokens that are asked, and of its own.

        A walk is the prompt, what is written, and the tokens that are asked at each place.
        """
        asked = [TokenRequest(prompt, len(walk), walk=walk, scored=tokens) for prompt, walk, tokens in walks]
        return list(map(_scores, self.run(asked, kinds)))

    def log_probabilities(self, queries: Sequence[TokenQuery]) -> list[LogProbabilities]:
        """Compute log p: of the text's own tokens in a pass over the text, of others by writing it."""
        answers = self.run(list(map(_request, queries)), [query.kind for query in queries])
        return list(map(_values, queries, answers))

    def greedy(self, sequences: Sequence[Sequence[int]]) -> "ServiceRows":
        """Run sequences to be continued."""
        return ServiceRows(self, sequences)


class ServiceRows:
    """Sequences of different lengths; see GreedyRows. Ranks from MOST_LIKELY on are UNRANKED."""

    def __init__(self, backend: ServiceBackend, sequences: Sequence[Sequence[int]]) -> None:
        self._backend = backend
        self._rows: list[_Row] = []
        self.add(sequences)

    def step(self, tokens: Sequence[int], forms: Mapping[int, CallForm]) -> None:
        """Append a token to each row; write the calls that begin."""
        for at, (row, token) in enumerate(zip(self._rows, tokens, strict=True)):
            row.append(token)
            row.in_call |= at in forms
        self._write(forms)
        self._continue()

    def keep(self, rows: Sequence[int]) -> None:
        """Drop all other rows."""
        self._rows = [self._rows[at] for at in rows]

    def add(self, sequences: Sequence[Sequence[int]]) -> None:
        """Run sequences and add them after the rows."""
        self._rows += [_Row(list(ids)) for ids in sequences]
        self._continue()

    def likeliest(self, row: int, tokens: int) -> dict[int, float]:
        """Return so many of the most likely next tokens of a row with their log p; at most MOST_LIKELY."""
        return dict(islice(self._rows[row].scores.items(), tokens))

    def ranks(self, token: int) -> list[int]:
        """Return, by row, how many tokens are more likely than `token`."""
        return [self._rank(row, token) for row in self._rows]

    def _rank(self, row: "_Row", token: int) -> int:
        """A token that is not listed may be as likely as the last one that is: then few may be more likely."""
        listed = sorted(row.scores.values())
        value = row.scores.get(token)
        if value is None and len(listed) > 1 and listed[0] == listed[1]:
            [[scores]] = self._backend.walk_scores([], [(row.ids, [token], [token])])
            value = scores[token] if scores[token] >= listed[0] else None
        return UNRANKED if value is None else sum(other > value for other in listed)

    def rank_of_sequence(self, row: int, tokens: Sequence[int]) -> int:
        """Return how many tokens but the first of `tokens` are more likely than all of `tokens` in this order."""
        joint = self.log_probability(row, tokens)
        rank = sum(value > joint for token, value in self._rows[row].scores.items() if token != tokens[0])
        return rank if rank < MOST_LIKELY - 1 else UNRANKED

    def log_probability(self, row: int, tokens: Sequence[int]) -> float:
        """Return the joint log probability of `tokens` as the continuation of a row; nothing is appended."""
        known = self._rows[row].scores.get(tokens[0])
        if known is not None and len(tokens) == 1:
            return known
        [steps] = self._backend.walk_scores([], [(self._rows[row].ids, tokens, tokens)])
        return sum(scores[token] for scores, token in zip(steps, tokens, strict=True))

    def forbid(self, places: Sequence[tuple[int, int]]) -> None:
        """Forbid pairs of a row and its next token."""
        for at, token in places:
            self._rows[at].forbidden.add(token)
            self._rows[at].permitted = None

    def permit(self, row: int, form: CallForm) -> bool:
        """Return whether a token is written ahead in the form."""
        ahead = self._rows[row].ahead
        return bool(ahead) and form.allows(ahead[0][0])

    def best(self) -> list[int]:
        """Return the most likely next token of each row."""
        lost = [row for row in self._rows if row.best is None and not row.in_call]
        asked = [TokenRequest(row.ids, forbidden=row.forbidden) for row in lost]
        for row, answer in zip(lost, self._backend.run(asked), strict=True):
            [row.permitted] = answer.tokens
        return [0 if row.best is None else row.best for row in self._rows]

    def _write(self, forms: Mapping[int, CallForm]) -> None:
        """Write calls ahead of rows. Only those that are cut off get scores, which tell where they end best."""
        fitting = [(self._rows[at], form) for at, form in forms.items() if form.most > 0]
        asked = [TokenRequest(row.ids, form.most, [form.end], grammar=form.grammar) for row, form in fitting]
        for (row, _), answer in zip(fitting, self._backend.run(asked), strict=True):
            row.ahead = [(token, {token: 0.0}) for token in answer.tokens]
        cut = [row for row, form in fitting if len(row.ahead) == form.most]
        walks = [
            TokenRequest(row.ids, len(row.ahead), walk=[token for token, _ in row.ahead], likeliest=MOST_LIKELY)
            for row in cut
        ]
        self._look_ahead(cut, walks)

    def _continue(self) -> None:
        """Continue the rows that have no scores of their next token, as far as the context reaches."""
        waiting = [
            row
            for row in self._rows
            if not row.ahead and not row.in_call and len(row.ids) < self._backend.context_length
        ]
        asked = [
            TokenRequest(row.ids, min(AHEAD, self._backend.context_length - len(row.ids)), likeliest=MOST_LIKELY)
            for row in waiting
        ]
        self._look_ahead(waiting, asked)

    def _look_ahead(self, rows: Sequence["_Row"], asked: Sequence[TokenRequest]) -> None:
        """Keep what is written ahead of rows, with its scores."""
        for row, answer in zip(rows, self._backend.run(asked), strict=True):
            row.ahead = list(zip(answer.tokens, _scores(answer), strict=True))


@dataclass(slots=True)
class _Row:
    """A sequence, what was written ahead of it with the scores at each place, and what may not come next.

    `in_call`: whether the row goes on as a call, whose tokens are all ahead from its beginning.
    """

    ids: list[int]
    ahead: list[tuple[int, Scores]] = field(default_factory=list)
    in_call: bool = False
    forbidden: set[int] = field(default_factory=set)
    permitted: int | None = None  # the most likely permitted token, where it is none of the likeliest

    @property
    def scores(self) -> Scores:
        return self.ahead[0][1] if self.ahead else {}

    @property
    def best(self) -> int | None:
        """Return the likeliest permitted token, None where it is not among the likeliest."""
        if self.in_call:
            return self.ahead[0][0] if self.ahead else None
        return next((token for token in self.scores if token not in self.forbidden), self.permitted)

    def append(self, token: int) -> None:
        self.ids.append(token)
        self.ahead = self.ahead[1:] if self.ahead and self.ahead[0][0] == token else []
        self.forbidden, self.permitted = set(), None


def _scores(answer: TokenAnswer) -> list[Scores]:
    """Return log p by token at each written place, the likeliest first."""
    return [dict(sorted(step.items(), key=lambda item: (-item[1], item[0]))) for step in answer.scores]


def _request(query: TokenQuery) -> TokenRequest:
    """Ask for a text's own tokens alone by reading it, else by writing it from the first place to the last.

    Where the last place is the end of the text, any token is written there.
    """
    first, last = min(query.places), max(query.places)
    asked = list(zip(query.places, query.tokens, strict=True))
    if last < len(query.text) and all(list(ids) == [query.text[place]] for place, ids in asked):
        return TokenRequest([*query.prefix, *query.text[: last + 1]], reads_prompt=True)
    walk = [*query.text[first:], query.tokens[-1][0]][: last - first + 1]
    others = sorted({token for place, ids in asked for token in ids if token != walk[place - first]})
    return TokenRequest([*query.prefix, *query.text[:first]], len(walk), walk=walk, scored=others)


def _values(query: TokenQuery, answer: TokenAnswer) -> LogProbabilities:
    if answer.prompt:
        return np.array([[answer.prompt[len(query.prefix) + place]] for place in query.places], np.float32)
    asked = zip((answer.scores[place - min(query.places)] for place in query.places), query.tokens, strict=True)
    return np.array([[scores[token] for token in ids] for scores, ids in asked], np.float32)
