"""Compute the three losses of a call: L(empty), L(c) and L(c, r) (paper, section 2)."""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from toolformer_dag.model.backend import Backend, TokenQuery
from toolformer_dag.model.encoding import Encoding
from toolformer_dag.model.requests import DOES_NOT_FIT, WINDOW_WEIGHTS, CallLosses, LossRequest
from toolformer_dag.texts.calls import Call, format_call

KINDS = ("loss_empty", "loss_result", "loss_call")
"""Fields of CallLosses and TokenCounts; the last one is asked for last, where the others let it matter."""


@dataclass(frozen=True, slots=True)
class TokenLosses:
    """-log p of the token at characters `start` to `end` behind nothing, e(c) and e(c, r); `weight`: its w_t."""

    start: int
    end: int
    weight: float
    loss_empty: float
    loss_call: float
    loss_result: float


class LossScorer:
    """Scores calls with one query per distinct (text, z), however many positions need it.

    `window`: how many tokens from x_i on are asked for. `known` maps j to log p(x_j | z, x_<j), by text and z.
    """

    def __init__(
        self, backend: Backend, encoding: Encoding, requests: Sequence[LossRequest], window: int = len(WINDOW_WEIGHTS)
    ) -> None:
        self.backend, self.encoding, self.requests, self.window = backend, encoding, requests, window
        texts = list(dict.fromkeys(request.text for request in requests))
        self.texts = dict(zip(texts, encoding.texts(texts), strict=True))
        calls = list(
            dict.fromkeys(z for request in requests for z in (_z("loss_call", request), _z("loss_result", request)))
        )
        self.prefix_tokens = {"": list[int](), **dict(zip(calls, encoding.calls(calls), strict=True))}
        self.known: dict[tuple[str, str], dict[int, float]] = {}

    def losses(self, floor: float | None) -> list[CallLosses]:
        """Return the losses in the order of the requests; see `Engine.losses`. Raises ValueError, ModelError."""
        fits = [self._fits(request) for request in self.requests]
        fitting = [request for request, fit in zip(self.requests, fits, strict=True) if fit]
        self._ask(fitting, KINDS if floor is None else KINDS[:2])
        if floor is not None:
            self._ask([one for one in fitting if self._losses(one).delta >= floor], KINDS[2:])
        return [
            self._losses(request) if fit else DOES_NOT_FIT for request, fit in zip(self.requests, fits, strict=True)
        ]

    def token_losses(self) -> list[TokenLosses]:
        """Return the losses of each token in the window of the only request; none where it does not fit."""
        [request] = self.requests
        if not self._fits(request):
            return []
        self._ask([request], KINDS)
        text, i = self.texts[request.text], request.position
        starts = [*text.offsets.tolist(), len(request.text)]
        weights = [*WINDOW_WEIGHTS, *[0.0] * self.window]
        empty, result, call = (self.known[request.text, _z(kind, request)] for kind in KINDS)
        return [
            TokenLosses(starts[j], starts[j + 1], weights[j - i], -empty[j], -call[j], -result[j])
            for j in self._window(request)
        ]

    def _ask(self, requests: Iterable[LossRequest], kinds: Sequence[str]) -> None:
        """Ask for what these losses of the requests need."""
        places: dict[tuple[str, str, str], dict[int, None]] = defaultdict(dict)
        for request in requests:
            for kind in kinds:
                key = kind, request.text, _z(kind, request)
                places[key] = dict.fromkeys(self._window(request)) | places[key]
                self.known[key[1:]] = {}
        waiting = {key: list(needed) for key, needed in places.items() if needed}
        found = self.backend.log_probabilities([self._query(*key, needed) for key, needed in waiting.items()])
        for ((_, text, z), needed), values in zip(waiting.items(), found, strict=True):
            self.known[text, z] = dict(zip(needed, values[:, 0].tolist(), strict=True))

    def _query(self, kind: str, text: str, z: str, places: Sequence[int]) -> TokenQuery:
        ids = self.texts[text].ids
        return TokenQuery(kind, self.encoding.bos + self.prefix_tokens[z], ids, places, [[ids[j]] for j in places])

    def _window(self, request: LossRequest) -> range:
        """Return the j that count. Without BOS, x_0 has no token before it in L(empty), so it counts in no loss."""
        first = 0 if self.encoding.bos else 1
        end = min(request.position + self.window, len(self.texts[request.text].ids))
        return range(max(request.position, first), end)

    def _fits(self, request: LossRequest) -> bool:
        n = len(self.texts[request.text].ids)
        if not 0 <= request.position < n:
            raise ValueError(f"position {request.position} is not in a text of {n} tokens: {request.text[:60]!r}")
        read = min(request.position + self.window, n) - 1
        longest = len(self.encoding.bos) + len(self.prefix_tokens[_z("loss_result", request)]) + read
        return longest <= self.backend.context_length

    def _losses(self, request: LossRequest) -> CallLosses:
        empty, result, call = (self._loss(request, _z(kind, request)) for kind in KINDS)
        assert empty is not None and result is not None
        return CallLosses(empty, call, result)

    def _loss(self, request: LossRequest, z: str) -> float | None:
        """Compute L_i(z), None where it was not asked for; beyond the text terms are zero, without new weights."""
        known, window = self.known.get((request.text, z)), self._window(request)
        if known is None or not known.keys() >= set(window):
            return None
        return -sum(WINDOW_WEIGHTS[j - request.position] * known[j] for j in window)


def _z(kind: str, request: LossRequest) -> str:
    """Return what stands before the text: nothing, e(c) or e(c, r)."""
    if kind == "loss_empty":
        return ""
    return format_call(Call(request.tool, request.input), request.result if kind == "loss_result" else None)
