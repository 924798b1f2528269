"""The three losses of a call: L(empty), L(c) and L(c, r) (paper, section 2)."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from toolformer_dag.model.attention import on_device
from toolformer_dag.model.memory import HELD
from toolformer_dag.model.requests import UNFIT, WINDOW_WEIGHTS, CallLosses, LossRequest
from toolformer_dag.model.runtime import Prefixes, Runtime
from toolformer_dag.texts.calls import Call, format_call


@dataclass(slots=True, eq=False)
class Pass:
    """The sequence [BOS], z, x; `found` maps j to log p(x_j | z, x_<j) for every j that a loss needs.

    `first`: the first j that counts. Without BOS nothing stands before x_0 in L(empty), so it counts in no loss.
    """

    kind: str
    prefix: list[int]
    text: list[int]
    first: int
    found: dict[int, float] = field(default_factory=dict)

    def want(self, position: int) -> None:
        """Asks for the five tokens from x_i on, as far as they exist and count."""
        last = min(position + len(WINDOW_WEIGHTS), len(self.text))
        self.found = dict.fromkeys(range(max(position, self.first), last), math.nan) | self.found

    @property
    def done(self) -> bool:
        """Whether nothing that was asked for is missing."""
        return not any(map(math.isnan, self.found.values()))

    def loss(self, position: int) -> float:
        """L_i: minus the weighted sum. A term that does not exist is zero; the weights stay as they are."""
        terms = ((w, self.found.get(position + t)) for t, w in enumerate(WINDOW_WEIGHTS))
        return -sum(weight * term for weight, term in terms if term is not None)

    @property
    def read(self) -> list[int]:
        """What of x goes through the model: nothing after the token before the last x_j asked for."""
        return self.text[: max(self.found, default=0)]


def run_passes(runtime: Runtime, passes: Iterable[Pass]) -> None:
    """Fills in what was asked for. Passes whose prefixes begin alike are taken together."""
    waiting = sorted((each for each in passes if not each.done), key=lambda each: each.prefix)
    lengths = [len(each.prefix) for each in waiting]
    runtime.budget.run(
        lengths,
        lambda batch: _run(runtime, [waiting[number] for number in batch]),
        lower="max_call_tokens",
        share=HELD,
        order=range(len(waiting)),
    )


def _run(runtime: Runtime, passes: Sequence[Pass]) -> None:
    """The prefixes first, then the texts behind them."""
    prefixes = runtime.prefixes([each.prefix for each in passes])
    for each, fresh in zip(passes, prefixes.fresh, strict=True):
        runtime.counts.add(each.kind, fresh)
    lengths = [len(each.prefix) + len(each.read) for each in passes]
    runtime.budget.run(
        lengths, lambda batch: _texts(runtime, prefixes, passes, batch), lower="segment_tokens or max_call_tokens"
    )


def _texts(runtime: Runtime, prefixes: Prefixes, passes: Sequence[Pass], batch: list[int]) -> None:
    chosen = [passes[number] for number in batch]
    features = prefixes.features(batch, [each.read for each in chosen])
    asked = [(row, j, each.text[j]) for row, each in enumerate(chosen) for j in each.found]
    rows, columns, targets = on_device(asked, features.device).T
    values = iter(runtime.backbone.log_probabilities(features[rows, columns], targets).tolist())
    for each in chosen:
        each.found = {j: next(values) for j in each.found}
        runtime.counts.add(each.kind, len(each.read))
    runtime.counts.passes += 1


class LossScorer:
    """Collects what is asked about, so that equal (text, z) become one pass however many positions they serve."""

    def __init__(self, runtime: Runtime, requests: Sequence[LossRequest]) -> None:
        self.runtime = runtime
        self.requests = requests
        texts = list(dict.fromkeys(request.text for request in requests))
        self.tokens = {text: t.ids for text, t in zip(texts, runtime.encoding.texts(texts), strict=True)}
        written = list(dict.fromkeys(z for request in requests for z in (_call(request), _result(request))))
        self.z = {"": list[int](), **dict(zip(written, runtime.encoding.calls(written), strict=True))}
        self.passes: dict[tuple[str, str], Pass] = {}

    def losses(self, skip_hopeless: bool) -> list[CallLosses]:
        """In the order of the requests."""
        fits = [self._fits(request) for request in self.requests]
        fitting = [request for request, fit in zip(self.requests, fits, strict=True) if fit]
        for request in fitting:
            self._want("loss_empty", request, "")
            self._want("loss_result", request, _result(request))
        if skip_hopeless:
            self._run()
        for request in fitting:
            if not (skip_hopeless and self._hopeless(request)):
                self._want("loss_call", request, _call(request))
        self._run()
        return [
            self._losses(request, skip_hopeless) if fit else UNFIT
            for request, fit in zip(self.requests, fits, strict=True)
        ]

    def _fits(self, request: LossRequest) -> bool:
        n = len(self.tokens[request.text])
        if not 0 <= request.position < n:
            raise ValueError(f"position {request.position} is not in a text of {n} tokens: {request.text[:60]!r}")
        read = min(request.position + len(WINDOW_WEIGHTS), n) - 1
        longest = len(self.runtime.encoding.bos) + len(self.z[_result(request)]) + read
        return longest <= self.runtime.context_length

    def _want(self, kind: str, request: LossRequest, z: str) -> None:
        key = (request.text, z)
        if key not in self.passes:
            bos = self.runtime.encoding.bos
            self.passes[key] = Pass(kind, bos + self.z[z], self.tokens[request.text], first=0 if bos else 1)
        self.passes[key].want(request.position)

    def _run(self) -> None:
        run_passes(self.runtime, self.passes.values())

    def _loss(self, request: LossRequest, z: str) -> float:
        return self.passes[request.text, z].loss(request.position)

    def _hopeless(self, request: LossRequest) -> bool:
        """L_i(empty) - L+ < 0: L- is at most L_i(empty), so the call is kept at no tau_f >= 0."""
        return self._loss(request, "") < self._loss(request, _result(request))

    def _losses(self, request: LossRequest, skip_hopeless: bool) -> CallLosses:
        empty, result = self._loss(request, ""), self._loss(request, _result(request))
        if skip_hopeless and self._hopeless(request):
            return CallLosses(empty, float("nan"), result, upper_bound=True)
        return CallLosses(empty, self._loss(request, _call(request)), result)


def _call(request: LossRequest) -> str:
    return format_call(Call(request.tool, request.input))


def _result(request: LossRequest) -> str:
    return format_call(Call(request.tool, request.input), request.result)
