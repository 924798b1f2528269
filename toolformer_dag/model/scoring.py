"""Compute the three losses of a call: L(empty), L(c) and L(c, r) (paper, section 2)."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from toolformer_dag.model.attention import on_device
from toolformer_dag.model.memory import CACHE_PASSES
from toolformer_dag.model.requests import DOES_NOT_FIT, WINDOW_WEIGHTS, CallLosses, LossRequest
from toolformer_dag.model.runtime import Prefixes, Runtime
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
        last = min(position + len(WINDOW_WEIGHTS), len(self.text))
        self.known = dict.fromkeys(range(max(position, self.first), last), math.nan) | self.known

    @property
    def complete(self) -> bool:
        """Return whether all requested values are known."""
        return not any(map(math.isnan, self.known.values()))

    def loss(self, position: int) -> float:
        """Compute L_i; terms beyond the end of the text are zero and weights are not renormalized."""
        terms = ((w, self.known.get(position + t)) for t, w in enumerate(WINDOW_WEIGHTS))
        return -sum(weight * term for weight, term in terms if term is not None)

    @property
    def tokens_read(self) -> list[int]:
        """Return the tokens of x to run: up to the token before the last requested x_j."""
        return self.text[: max(self.known, default=0)]


def run_passes(runtime: Runtime, passes: Iterable[Pass]) -> None:
    """Compute the requested values; passes are sorted so that common beginnings of prefixes run once."""
    waiting = sorted((each for each in passes if not each.complete), key=lambda each: each.prefix)
    lengths = [len(each.prefix) for each in waiting]
    runtime.budget.run(
        lengths,
        lambda batch: _run(runtime, [waiting[number] for number in batch]),
        lower="max_call_tokens",
        share=CACHE_PASSES,
        order=range(len(waiting)),
    )


def _run(runtime: Runtime, passes: Sequence[Pass]) -> None:
    prefixes = runtime.prefixes([each.prefix for each in passes])
    for each, new_tokens in zip(passes, prefixes.new_tokens, strict=True):
        runtime.counts.add(each.kind, new_tokens)
    lengths = [len(each.prefix) + len(each.tokens_read) for each in passes]
    runtime.budget.run(
        lengths, lambda batch: _texts(runtime, prefixes, passes, batch), lower="segment_tokens or max_call_tokens"
    )


def _texts(runtime: Runtime, prefixes: Prefixes, passes: Sequence[Pass], batch: list[int]) -> None:
    chosen = [passes[number] for number in batch]
    features = prefixes.features(batch, [each.tokens_read for each in chosen])
    requested = [(row, j, each.text[j]) for row, each in enumerate(chosen) for j in each.known]
    rows, columns, targets = on_device(requested, features.device).T
    values = iter(runtime.backbone.log_probabilities(features[rows, columns], targets).tolist())
    for each in chosen:
        each.known = {j: next(values) for j in each.known}
        runtime.counts.add(each.kind, len(each.tokens_read))
    runtime.counts.passes += 1


class LossScorer:
    """Scores calls with one pass per distinct (text, z), however many positions need it."""

    def __init__(self, runtime: Runtime, requests: Sequence[LossRequest]) -> None:
        self.runtime = runtime
        self.requests = requests
        texts = list(dict.fromkeys(request.text for request in requests))
        self.tokens = {text: t.ids for text, t in zip(texts, runtime.encoding.texts(texts), strict=True)}
        calls = list(dict.fromkeys(z for request in requests for z in (_call(request), _result(request))))
        self.prefix_tokens = {"": list[int](), **dict(zip(calls, runtime.encoding.calls(calls), strict=True))}
        self.passes: dict[tuple[str, str], Pass] = {}

    def losses(self) -> list[CallLosses]:
        """Return the losses in the order of the requests. Raises ValueError, ModelError."""
        fits = [self._fits(request) for request in self.requests]
        for request, fit in zip(self.requests, fits, strict=True):
            if fit:
                self._request_pass("loss_empty", request, "")
                self._request_pass("loss_result", request, _result(request))
                self._request_pass("loss_call", request, _call(request))
        run_passes(self.runtime, self.passes.values())
        return [
            self._losses(request) if fit else DOES_NOT_FIT for request, fit in zip(self.requests, fits, strict=True)
        ]

    def _fits(self, request: LossRequest) -> bool:
        n = len(self.tokens[request.text])
        if not 0 <= request.position < n:
            raise ValueError(f"position {request.position} is not in a text of {n} tokens: {request.text[:60]!r}")
        read = min(request.position + len(WINDOW_WEIGHTS), n) - 1
        longest = len(self.runtime.encoding.bos) + len(self.prefix_tokens[_result(request)]) + read
        return longest <= self.runtime.context_length

    def _request_pass(self, kind: str, request: LossRequest, z: str) -> None:
        key = (request.text, z)
        if key not in self.passes:
            bos = self.runtime.encoding.bos
            self.passes[key] = Pass(kind, bos + self.prefix_tokens[z], self.tokens[request.text], first=0 if bos else 1)
        self.passes[key].request(request.position)

    def _losses(self, request: LossRequest) -> CallLosses:
        prefixes = ("", _call(request), _result(request))
        empty, call, result = (self.passes[request.text, z].loss(request.position) for z in prefixes)
        return CallLosses(empty, call, result)


def _call(request: LossRequest) -> str:
    return format_call(Call(request.tool, request.input))


def _result(request: LossRequest) -> str:
    return format_call(Call(request.tool, request.input), request.result)
