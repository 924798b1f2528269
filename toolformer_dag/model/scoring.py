"""Compute the three losses of a call: L(empty), L(c) and L(c, r) (paper, section 2)."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from toolformer_dag.model.backend import Backend, TokenQuery
from toolformer_dag.model.encoding import Encoding
from toolformer_dag.model.requests import DOES_NOT_FIT, WINDOW_WEIGHTS, CallLosses, LossRequest
from toolformer_dag.texts.calls import Call, format_call


@dataclass(slots=True, eq=False)
class Pass:
    """The sequence [BOS], z, x; `known` maps j to log p(x_j | z, x_<j) for every j that a loss needs.

    `first`: the first j that counts. Without BOS, x_0 has no token before it in L(empty), so it counts in no loss.
    """

    kind: str
    prefix: list[int]
    text: list[int]
    first: int
    known: dict[int, float] = field(default_factory=dict)

    def request(self, position: int) -> None:
        """Request the five tokens from x_i on, as far as they exist and count."""
        self.known = dict.fromkeys(self._needed(position), math.nan) | self.known

    @property
    def complete(self) -> bool:
        """Return whether all requested values are known."""
        return not any(map(math.isnan, self.known.values()))

    def holds(self, position: int) -> bool:
        """Return whether every value that L_i needs was requested."""
        return all(j in self.known for j in self._needed(position))

    def loss(self, position: int) -> float:
        """Compute L_i; terms beyond the end of the text are zero and weights are not renormalized."""
        terms = ((w, self.known.get(position + t)) for t, w in enumerate(WINDOW_WEIGHTS))
        return -sum(weight * term for weight, term in terms if term is not None)

    def _needed(self, position: int) -> range:
        return range(max(position, self.first), min(position + len(WINDOW_WEIGHTS), len(self.text)))

    def query(self) -> TokenQuery:
        """Return what is asked of the model."""
        places = list(self.known)
        return TokenQuery(self.kind, self.prefix, self.text, places, [[self.text[j]] for j in places])


class LossScorer:
    """Scores calls with one query per distinct (text, z), however many positions need it."""

    def __init__(self, backend: Backend, encoding: Encoding, requests: Sequence[LossRequest]) -> None:
        self.backend = backend
        self.encoding = encoding
        self.requests = requests
        texts = list(dict.fromkeys(request.text for request in requests))
        self.tokens = {text: t.ids for text, t in zip(texts, encoding.texts(texts), strict=True)}
        calls = list(dict.fromkeys(z for request in requests for z in (_call(request), _result(request))))
        self.prefix_tokens = {"": list[int](), **dict(zip(calls, encoding.calls(calls), strict=True))}
        self.passes: dict[tuple[str, str], Pass] = {}

    def losses(self, floor: float | None) -> list[CallLosses]:
        """Return the losses in the order of the requests; see `Engine.losses`. Raises ValueError, ModelError."""
        fits = [self._fits(request) for request in self.requests]
        for request, fit in zip(self.requests, fits, strict=True):
            if fit:
                self._request_pass("loss_empty", request, "")
                self._request_pass("loss_result", request, _result(request))
                if floor is None:
                    self._request_pass("loss_call", request, _call(request))
        self._run()
        if floor is not None:
            for request, fit in zip(self.requests, fits, strict=True):
                if fit and self._losses(request).delta >= floor:
                    self._request_pass("loss_call", request, _call(request))
            self._run()
        return [
            self._losses(request) if fit else DOES_NOT_FIT for request, fit in zip(self.requests, fits, strict=True)
        ]

    def _run(self) -> None:
        waiting = [each for each in self.passes.values() if not each.complete]
        found = self.backend.log_probabilities([each.query() for each in waiting])
        for each, values in zip(waiting, found, strict=True):
            each.known = dict(zip(each.known, values[:, 0].tolist(), strict=True))

    def _fits(self, request: LossRequest) -> bool:
        n = len(self.tokens[request.text])
        if not 0 <= request.position < n:
            raise ValueError(f"position {request.position} is not in a text of {n} tokens: {request.text[:60]!r}")
        read = min(request.position + len(WINDOW_WEIGHTS), n) - 1
        longest = len(self.encoding.bos) + len(self.prefix_tokens[_result(request)]) + read
        return longest <= self.backend.context_length

    def _request_pass(self, kind: str, request: LossRequest, z: str) -> None:
        key = (request.text, z)
        if key not in self.passes:
            bos = self.encoding.bos
            self.passes[key] = Pass(kind, bos + self.prefix_tokens[z], self.tokens[request.text], first=0 if bos else 1)
        self.passes[key].request(request.position)

    def _losses(self, request: LossRequest) -> CallLosses:
        empty, result = (self.passes[request.text, z].loss(request.position) for z in ("", _result(request)))
        judged = self.passes.get((request.text, _call(request)))
        return CallLosses(
            empty, judged.loss(request.position) if judged and judged.holds(request.position) else None, result
        )


def _call(request: LossRequest) -> str:
    return format_call(Call(request.tool, request.input))


def _result(request: LossRequest) -> str:
    return format_call(Call(request.tool, request.input), request.result)
