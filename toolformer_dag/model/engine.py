"""Compute proposals and losses of texts, exactly as the paper defines them, with any backend."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray

from toolformer_dag.model.backend import Backend, SamplePoint, TokenCounts, TokenText
from toolformer_dag.model.encoding import TextTokens
from toolformer_dag.model.loading import LanguageModel, load_model
from toolformer_dag.model.requests import (
    CallLosses,
    LossRequest,
    Proposal,
    ProposalRequest,
    SampledCall,
    rejected_proposal,
    select_positions,
    uniforms,
)
from toolformer_dag.model.scoring import LossScorer, TokenLosses
from toolformer_dag.model.transformers_backend import TransformersBackend
from toolformer_dag.settings.sections import ModelSettings, SamplingSettings

SampleKeys = list[tuple[int, int]]
"""Pairs of position and sample number."""


@dataclass(frozen=True, slots=True)
class Selection:
    """The thresholds that decide which positions get how many samples."""

    tau_s: float
    k: int
    m: int

    def missing_samples(self, request: ProposalRequest, probabilities: NDArray[np.float32]) -> SampleKeys:
        """Return the samples that the thresholds ask for and `request` does not hold."""
        positions = select_positions(probabilities, self.tau_s, self.k)
        return [(i, j) for i in positions for j in range(self.m) if (i, j) not in request.stored]


@dataclass(slots=True, eq=False)
class Item:
    """A request, its tokens, and the samples to draw; both are empty until p_i is known."""

    request: ProposalRequest
    text: TextTokens
    probabilities: NDArray[np.float32] | None
    missing: SampleKeys


class Engine:
    """Proposes and scores calls in many texts; `backend` runs the model.

    `counts` holds the tokens that went through the model.
    """

    def __init__(
        self, language_model: LanguageModel, *, backend: Backend | None = None, token_budget: int | None = None
    ) -> None:
        self.language_model = language_model
        self.encoding = language_model.encoding
        self.backend = backend or TransformersBackend(language_model, token_budget=token_budget)

    @property
    def counts(self) -> TokenCounts:
        """Return the tokens that went through the model."""
        return self.backend.counts

    def position_at(self, text: str, offset: int) -> int:
        """Return the position i whose token begins at character `offset`. Raises OffsetError where none does."""
        return self.encoding.texts([text])[0].position_at(offset)

    def propose(
        self,
        prompt: str,
        requests: Sequence[ProposalRequest],
        *,
        tau_s: float,
        k: int,
        m: int,
        sampling: SamplingSettings,
    ) -> list[Proposal]:
        """Compute p_i before every token of each text and sample calls at the selected positions (paper, section 2).

        Returns proposals in the order of `requests`. The proposal of a text that does not fit the context holds a
        reason instead, and so does that of a text with a p_i that is not finite. Raises ModelError where a single text
        does not fit into memory.
        """
        selection = Selection(tau_s, k, m)
        ids = self.encoding.head(prompt)
        texts = self.encoding.texts([request.text for request in requests])
        results = {}
        items = {}
        for number, (request, text) in enumerate(zip(requests, texts, strict=True)):
            answer = self._without_pass(len(ids), request, text, selection, sampling)
            if isinstance(answer, Proposal):
                results[number] = answer
            else:
                items[number] = answer
        if items:
            asked = [self._token_text(item, selection, sampling) for item in items.values()]
            drawn = self.backend.propose(ids, asked, self.encoding.start, self.encoding.ended, sampling)
            for (number, item), samples in zip(items.items(), drawn, strict=True):
                results[number] = self._proposal(item, samples)
        return [results[number] for number in range(len(requests))]

    def losses(self, requests: Sequence[LossRequest], floor: float | None = None) -> list[CallLosses]:
        """Compute L(empty), L(c) and L(c, r) of each call, in the order of `requests` (paper, section 2).

        With a `floor`, L(c) is computed only where L(empty) - L(c, r) reaches it: elsewhere no tau_f at or above the
        floor keeps the call.

        Raises ValueError for a position outside its text, ModelError where a single sequence does not fit into memory.
        """
        return LossScorer(self.backend, self.encoding, requests).losses(floor)

    def token_losses(self, request: LossRequest, tokens: int) -> list[TokenLosses]:
        """Return the losses and weights of so many tokens from x_i on; none where call and text do not fit the context.

        The weighted sums over these are what `losses` returns. Raises as `losses` does.
        """
        return LossScorer(self.backend, self.encoding, [request], tokens).token_losses()

    def _without_pass(
        self, head: int, request: ProposalRequest, text: TextTokens, selection: Selection, sampling: SamplingSettings
    ) -> Proposal | Item:
        """Return the proposal where it needs no model, else the item to compute."""
        n = len(text.ids)
        longest = head + 2 * n + len(self.encoding.output) + len(self.encoding.start) + sampling.max_call_tokens
        if not n:
            return rejected_proposal("empty")
        if longest > self.backend.context_length:
            return rejected_proposal("does_not_fit")
        if request.probabilities is None:
            return Item(request, text, None, [])
        if len(request.probabilities) != n:
            raise ValueError(f"{len(request.probabilities)} probabilities were given for a text of {n} tokens")
        missing = selection.missing_samples(request, request.probabilities)
        if not missing:
            return Proposal(request.probabilities, text.offsets, ())
        return Item(request, text, request.probabilities, missing)

    def _token_text(self, item: Item, selection: Selection, sampling: SamplingSettings) -> TokenText:
        """Return x, "Output:" and x again up to the last position that is needed, and how to choose points."""
        before = len(item.text.ids) + len(self.encoding.output)
        known = item.probabilities is not None
        last = max(i for i, _ in item.missing) if known else len(item.text.ids) - 1
        return TokenText(
            ids=item.text.ids + self.encoding.output + item.text.ids[:last],
            before=before,
            asked=0 if known else len(item.text.ids),
            most_samples=selection.k * selection.m,
            choose=partial(_choose, item, before, selection, sampling),
        )

    def _proposal(self, item: Item, samples: Sequence[Sequence[int]]) -> Proposal:
        if item.probabilities is None or not np.isfinite(item.probabilities).all():
            return rejected_proposal("not_finite")
        drawn = zip(item.missing, map(self.encoding.body, samples), strict=True)
        calls = [SampledCall(i, j, body, "no_end" if body is None else None) for (i, j), body in drawn]
        return Proposal(item.probabilities, item.text.offsets, tuple(calls))


def _choose(
    item: Item, before: int, selection: Selection, sampling: SamplingSettings, found: NDArray[np.float32]
) -> list[SamplePoint]:
    """Note p_i, 0 where x_i begins inside a character, and return the points to sample; none where p is not finite."""
    if len(found):
        item.probabilities = np.where(item.text.inside, np.float32(0), found)
        finite = bool(np.isfinite(item.probabilities).all())
        item.missing = selection.missing_samples(item.request, item.probabilities) if finite else []
    points = []
    for i in dict.fromkeys(i for i, _ in item.missing):
        numbers = [j for position, j in item.missing if position == i]
        streams = [uniforms(sampling.seed, item.request.digest, i, j, sampling.max_call_tokens) for j in numbers]
        points.append(SamplePoint(before + i, np.stack(streams)))
    return points


def load_engine(model: ModelSettings, name: str | None = None, dtype: str | None = None) -> Engine:
    """Load the settings' model, or the model `name`, under the settings' device and dtype. Raises ModelError."""
    return Engine(load_model(model, name, dtype), token_budget=model.token_budget)
