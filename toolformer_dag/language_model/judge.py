"""The three losses of many calls, with every distinct sequence run once (paper, section 2, "Filtering API Calls")."""

from collections.abc import Sequence

from toolformer_dag.language_model.losses import UNFIT, WINDOW_WEIGHTS, CallLosses, LossRequest
from toolformer_dag.language_model.runtime import Runtime
from toolformer_dag.language_model.score import Pass, run_passes
from toolformer_dag.texts.call import Call, format_call


class Judge:
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
