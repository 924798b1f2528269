"""Compute proposals and losses of texts, exactly as the paper defines them, with any backend."""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray
from torch import nn

from toolformer_dag.model.backend import Backend, SamplePoint, TokenCounts, TokenQuery, TokenText
from toolformer_dag.model.encoding import Encoding, TextTokens
from toolformer_dag.model.loading import LanguageModel, load_model
from toolformer_dag.model.requests import (
    DOES_NOT_FIT,
    WINDOW_WEIGHTS,
    CallLosses,
    LossRequest,
    NeedRequest,
    Proposal,
    ProposalRequest,
    SampledCall,
    select_positions,
    uniforms,
)
from toolformer_dag.model.service_backend import ServiceBackend
from toolformer_dag.model.transformers_backend import TransformersBackend
from toolformer_dag.model.weights import OffsetError
from toolformer_dag.settings.model_settings import SamplingSettings
from toolformer_dag.settings.sections import Settings
from toolformer_dag.texts.call_places import sampling_token, without_other_tokens
from toolformer_dag.texts.calls import Call, format_call

SampleKeys = list[tuple[int, int]]
"""Pairs of position and sample number."""


@dataclass(frozen=True, slots=True)
class Selection:
    """The thresholds that decide which positions get how many samples, and how these are drawn."""

    tau_s: float
    k: int
    m: int
    sampling: SamplingSettings

    def missing_samples(
        self, request: ProposalRequest, offsets: NDArray[np.int32], probabilities: NDArray[np.float32]
    ) -> SampleKeys:
        """Return the samples that the thresholds ask for and `request` does not hold.

        `offsets` [n]: where the tokens begin before which calls may stand.
        """
        if not request.calls:  # after calls there is one place, which the calls before it have chosen
            probabilities = without_other_tokens(request.text, offsets, probabilities, self.tau_s)
        positions = select_positions(probabilities, self.tau_s, self.k)
        return [(i, j) for i in positions for j in range(self.m) if (i, j) not in request.stored]


@dataclass(slots=True, eq=False)
class Item:
    """A request and its tokens; p_i where they are known, the samples to draw and their tokens; or a reason.

    `text`: the tokens before which calls may stand; `lead`: those between the prompt and the first of these.
    """

    request: ProposalRequest
    text: TextTokens
    lead: list[int]
    probabilities: NDArray[np.float32] | None = None
    missing: SampleKeys = field(default_factory=list)
    samples: Sequence[Sequence[int]] = ()
    reason: str | None = None

    @property
    def is_open(self) -> bool:
        """Return whether the model has to run."""
        return self.reason is None and (self.probabilities is None or bool(self.missing))


class Engine:
    """Proposes and scores calls in many texts; `backend` runs the model.

    `counts` holds the tokens that went through the model.
    """

    def __init__(
        self, language_model: LanguageModel, *, backend: Backend | None = None, token_budget: int | None = None
    ) -> None:
        self.language_model = language_model
        self.encoding = language_model.encoding
        self.backend = backend or _new_backend(language_model, token_budget)

    @property
    def counts(self) -> TokenCounts:
        """Return the tokens that went through the model."""
        return self.backend.counts

    def position_at(self, text: str, offset: int) -> int:
        """Return the position i of a call that stands before character `offset` of a text.

        x_i is the token that begins there or, after white space, the first one that is not only white space. Raises
        OffsetError where no token begins there.
        """
        [tokens] = self.encoding.texts([text])
        place = tokens.place_at(text, offset)
        if place is None:
            raise OffsetError(offset, tokens.nearest_boundary(offset))
        return place.position

    def propose(
        self,
        prompt: str,
        requests: Sequence[ProposalRequest],
        *,
        tau_s: float,
        k: int,
        m: int,
        sampling: SamplingSettings,
        finetuned: bool = False,
    ) -> list[Proposal]:
        """Compute p_i before every token of each text and sample calls at the selected positions (paper, section 2).

        `finetuned`: whether the model learned calls with their results, so that samples end before these. Returns
        proposals in the order of `requests`. The proposal of a text that does not fit the context holds a reason
        instead, and so does that of a text with a p_i that is not finite. Raises ModelError where a single text does
        not fit into memory.
        """
        selection = Selection(tau_s, k, m, sampling)
        head, ends = self.encoding.head(prompt), self.encoding.before_results if finetuned else self.encoding
        texts = self.encoding.texts([request.text for request in requests])
        items = [self._item(len(head), *asked, selection) for asked in zip(requests, texts, strict=True)]
        if running := [item for item in items if item.is_open]:
            asked = [self._token_text(item, selection) for item in running]
            drawn = self.backend.propose(head, asked, self.encoding.start, ends, sampling)
            for item, samples in zip(running, drawn, strict=True):
                item.samples = samples
        return [_proposal(item, ends) for item in items]

    def losses(self, requests: Sequence[LossRequest], floor: float | None = None) -> list[CallLosses]:
        """Compute L(empty), L(c) and L(c, r) of each call, in the order of `requests` (paper, section 2).

        With a `floor`, L(c) is computed only where L(empty) - L(c, r) reaches it: elsewhere no tau_f at or above the
        floor keeps the call.

        Raises ValueError for a position outside its text, ModelError where a single sequence does not fit into memory.
        """
        return LossScorer(self.backend, self.encoding, requests).losses(floor)

    def chained_losses(self, requests: Sequence[LossRequest]) -> list[tuple[float, float] | None]:
        """Compute L(z, c) and L(z, c, r) after the calls z of each request; None where they do not fit the context.

        Raises as `losses` does.
        """
        return LossScorer(self.backend, self.encoding, requests).chained()

    def needs(self, requests: Sequence[NeedRequest]) -> list[float]:
        """Return by how much the calls before a call make it likelier than others would, nats.

        That is the log p of its name, its input and its end, after x_<i and either. Raises ModelError.
        """
        distinct = list(dict.fromkeys(request.text for request in requests))
        texts = dict(zip(distinct, self.encoding.texts(distinct), strict=True))
        written = list(dict.fromkeys(text for one in requests for text in (one.before, one.other, one.call)))
        encoded = dict(zip(written, self.encoding.calls(written), strict=True))
        queries, first = [], len(self.encoding.start)
        for request in requests:
            call = encoded[request.call]
            places = range(first, len(call))
            written_before = sampling_token(request.text, texts[request.text].offsets, request.position)
            for before in (request.before, request.other):
                prefix = self.encoding.bos + texts[request.text].ids[:written_before] + encoded[before]
                queries.append(TokenQuery("loss_call", prefix, call, places, [[call[at]] for at in places]))
        sums = [float(values.sum()) for values in self.backend.log_probabilities(queries)]
        return [own - other for own, other in zip(sums[::2], sums[1::2], strict=True)]

    def token_losses(self, request: LossRequest, tokens: int) -> list[dict[str, Any]]:
        """Return so many tokens from x_i on: `token`, `weight`, and -log p as `loss_empty`, `loss_call`, `loss_result`.

        None where call and text do not fit the context. The weighted sums are what `losses` returns. Raises as it does.
        """
        return LossScorer(self.backend, self.encoding, [request], tokens).token_losses()

    def _item(self, head: int, request: ProposalRequest, text: TextTokens, selection: Selection) -> Item:
        lead, known = text.ids + self.encoding.output, request.probabilities
        if request.calls:
            i = sampling_token(request.text, text.offsets, request.behind)
            lead = lead + text.ids[:i] + self.encoding.calls([request.calls])[0]
            text = TextTokens(text.ids[i : i + 1], text.offsets[i : i + 1], text.inside[i : i + 1])
        n = len(text.ids)
        call = len(self.encoding.start) + selection.sampling.max_call_tokens
        if not n:
            return Item(request, text, lead, reason="empty")
        if head + len(lead) + n + call > self.backend.context_length:
            return Item(request, text, lead, reason="does_not_fit")
        if known is None:
            return Item(request, text, lead)
        if len(known) != n:
            raise ValueError(f"{len(known)} probabilities were given for a text of {n} tokens")
        return Item(request, text, lead, known, selection.missing_samples(request, text.offsets, known))

    def _token_text(self, item: Item, selection: Selection) -> TokenText:
        """Return x, "Output:" and x again up to the last position that is needed, and how to choose points."""
        before = len(item.lead)
        asked = len(item.text.ids) if item.probabilities is None else 0
        last = max(i for i, _ in item.missing) if item.missing else asked - 1
        return TokenText(
            ids=item.lead + item.text.ids[:last],
            before=before,
            asked=asked,
            most_samples=selection.k * selection.m,
            choose=partial(_choose, item, before, selection),
        )


def _proposal(item: Item, encoding: Encoding) -> Proposal:
    if item.reason is not None:
        return Proposal(reason=item.reason)
    if item.probabilities is None or not np.isfinite(item.probabilities).all():
        return Proposal(reason="not_finite")
    drawn = zip(item.missing, map(encoding.body, item.samples), strict=True)
    calls = [SampledCall(i, j, body, "no_end" if body is None else None) for (i, j), body in drawn]
    return Proposal(item.probabilities, item.text.offsets, tuple(calls))


def _choose(item: Item, before: int, selection: Selection, probabilities: NDArray[np.float32]) -> list[SamplePoint]:
    """Note p_i, 0 where x_i begins inside a character, and return the points to sample; none where p is not finite."""
    if len(probabilities):
        item.probabilities = np.where(item.text.inside, np.float32(0), probabilities)
        finite = bool(np.isfinite(item.probabilities).all())
        item.missing = []
        if finite:
            item.missing = selection.missing_samples(item.request, item.text.offsets, item.probabilities)
    sampling, points = selection.sampling, []
    for i in dict.fromkeys(i for i, _ in item.missing):
        numbers = [j for position, j in item.missing if position == i]
        streams = [uniforms(sampling.seed, item.request.digest, i, j, sampling.max_call_tokens) for j in numbers]
        points.append(SamplePoint(before + i, np.stack(streams)))
    return points


KINDS = ("loss_empty", "loss_result", "loss_call")
"""Fields of CallLosses and TokenCounts; the last one is asked for last, where the others let it matter."""


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
        fitting = [request for request in self.requests if self._fits(request)]
        self._ask(fitting, KINDS if floor is None else KINDS[:2])
        if floor is not None:
            self._ask([one for one in fitting if self._losses(one).delta >= floor], KINDS[2:])
        return [self._losses(request) if self._fits(request) else DOES_NOT_FIT for request in self.requests]

    def chained(self) -> list[tuple[float, float] | None]:
        """Return the losses without and with the result in the order of the requests; see `Engine.chained_losses`."""
        fitting = [request for request in self.requests if self._fits(request)]
        self._ask(fitting, KINDS[1:])
        losses: list[tuple[float, float] | None] = []
        for request in self.requests:
            call, result = (self._loss(request, _z(kind, request)) for kind in ("loss_call", "loss_result"))
            losses.append(None if call is None or result is None else (call, result))
        return losses

    def token_losses(self) -> list[dict[str, Any]]:
        """Return each token in the window of the only request with its losses; none where it does not fit."""
        [request] = self.requests
        if not self._fits(request):
            return []
        self._ask([request], KINDS)
        text, i = self.texts[request.text], request.position
        starts = [*text.offsets.tolist(), len(request.text)]
        weights = [*WINDOW_WEIGHTS, *[0.0] * self.window]
        known = {kind: self.known[request.text, _z(kind, request)] for kind in KINDS}
        return [
            {
                "token": request.text[starts[j] : starts[j + 1]],
                "weight": weights[j - i],
                **{kind: -values[j] for kind, values in known.items()},
            }
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
        answers = self.backend.log_probabilities([self._query(*key, needed) for key, needed in waiting.items()])
        for ((_, text, z), needed), values in zip(waiting.items(), answers, strict=True):
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
    """Return what stands before the text: nothing, e(c) or e(c, r), in a chain after the calls before it."""
    if kind == "loss_empty":
        return ""
    result = request.result if kind == "loss_result" else None
    return request.calls + format_call(Call(request.tool, request.input), result)


def load_engine(settings: Settings, name: str | None = None, dtype: str | None = None) -> Engine:
    """Load the settings' model, or the model `name`, under the settings' device and dtype. Raises ModelError."""
    return Engine(load_model(settings.model, name, dtype), token_budget=settings.model.token_budget)


_BACKENDS: WeakKeyDictionary[LanguageModel, Backend] = WeakKeyDictionary()


def backend_of(language_model: LanguageModel) -> Backend:
    """Return the model's backend, made once per model and released with it."""
    if language_model not in _BACKENDS:
        # of a copy: a value that refers to its key would keep it, and the weights, for ever
        _BACKENDS[language_model] = _new_backend(replace(language_model), None)
    return _BACKENDS[language_model]


def _new_backend(language_model: LanguageModel, token_budget: int | None) -> Backend:
    if isinstance(language_model.model, nn.Module):
        return TransformersBackend(language_model, token_budget=token_budget)
    return ServiceBackend(language_model.model, language_model.context_length)
