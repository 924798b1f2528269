"""A text on its way to a proposal: what a backend is asked about it, and what its answers become."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from toolformer_dag.model.backend import SamplePoint, TokenText
from toolformer_dag.model.encoding import Encoding, TextTokens
from toolformer_dag.model.requests import Proposal, ProposalRequest, SampledCall, select_positions, uniforms
from toolformer_dag.settings.model_settings import SamplingSettings
from toolformer_dag.texts.call_places import without_other_tokens

SampleKeys = list[tuple[int, int]]
"""Pairs of a position and the number of a sample there, from 0."""


@dataclass(frozen=True, slots=True)
class Selection:
    """Which positions get how many samples, and how samples are drawn.

    - `tau_s`: positions with p_i > tau_s may have samples.
    - `k`: at most so many positions of a text, the most probable ones.
    - `m`: the number of samples per position.
    """

    tau_s: float
    k: int
    m: int
    sampling: SamplingSettings

    def missing_samples(
        self, request: ProposalRequest, offsets: NDArray[np.int32], probabilities: NDArray[np.float32]
    ) -> SampleKeys:
        """Return which samples of a text have to be drawn: pairs of a position and a sample number, in order.

        These are m samples at each of the k most probable positions with p_i > tau_s, without those that the request
        has stored.

        - offsets: the character at which the token after each position begins, [n].
        - probabilities: p_i of each position, [n].
        """
        if not request.calls:  # else the next call of a chain is sampled, which stands right after the earlier ones
            # Set p_i to 0 before tokens where no call may stand, such as white space.
            probabilities = without_other_tokens(request.text, offsets, probabilities, self.tau_s)
        missing = []
        for position in select_positions(probabilities, self.tau_s, self.k):
            for sample in range(self.m):
                if (position, sample) not in request.stored:
                    missing.append((position, sample))
        return missing


@dataclass(slots=True, eq=False)
class PendingProposal:
    """A text on its way to a `Proposal`. It changes, and its state is one of these:

    1. Refused: `reason` is set, and the model never runs for it.
    2. Without p_i: `probabilities` is None.
    3. With p_i: `probabilities` are set and `missing` lists the samples to draw, which may be none.
    4. Complete: `samples` has the tokens of each missing sample.

    The backend leads from 2 to 3 while it runs, by calling `choose_points`. Requests whose p_i are stored begin in 3.
    `Engine.propose` sets `samples`.

    - `text`: the tokens before which a call may stand, [n]; all of x, or for a chain the single token after its calls.
    - `lead`: the tokens between the prompt's head and the first token of `text`: x, "Output:", and for a chain the
      text up to its calls, and these.
    """

    request: ProposalRequest
    selection: Selection
    text: TextTokens
    lead: list[int]
    probabilities: NDArray[np.float32] | None = None
    missing: SampleKeys = field(default_factory=list)
    samples: Sequence[Sequence[int]] = ()
    reason: str | None = None

    @property
    def needs_model(self) -> bool:
        """Return whether p_i or samples have to be computed."""
        if self.reason is not None:
            return False
        return self.probabilities is None or bool(self.missing)

    def token_text(self) -> TokenText:
        """Return what the backend, which runs the model, is to do for this text.

        Where p_i is not known, it computes it at all positions, before every token, and the samples follow from it.
        Else it only draws the missing samples. It gets no tokens after the last position that it needs.
        """
        n = len(self.text.ids)
        if self.probabilities is None:
            place_count = n
            last_position = n - 1
        else:
            place_count = 0
            last_position = max(position for position, _ in self.missing)
        return TokenText(
            ids=self.lead + self.text.ids[:last_position],
            first_place=len(self.lead),
            place_count=place_count,
            most_samples=self.selection.k * self.selection.m,
            choose=self.choose_points,
        )

    def choose_points(self, probabilities: NDArray[np.float32]) -> list[SamplePoint]:
        """Take p_i from the backend, decide which samples are missing, and return the points at which to draw them.

        probabilities: p_i, [n]; empty where they were stored. A position inside a character (between two tokens of an
        emoji) gets 0: no call can stand there. There are no points where some p_i is not finite. The backend may call
        this again, with the same effect.
        """
        if len(probabilities):
            self.probabilities = np.where(self.text.inside, np.float32(0), probabilities)
            self.missing = []
            if np.isfinite(self.probabilities).all():
                self.missing = self.selection.missing_samples(self.request, self.text.offsets, self.probabilities)
        return self._points()

    def _points(self) -> list[SamplePoint]:
        """Return a point for each position at which samples are missing, in order.

        A point has the number of tokens before the call, and for each sample there a stream: the uniform numbers by
        which its tokens are drawn.
        """
        sampling = self.selection.sampling
        streams_by_position: dict[int, list[NDArray[np.float64]]] = {}
        for position, sample in self.missing:
            stream = uniforms(sampling.seed, self.request.digest, position, sample, sampling.max_call_tokens)
            streams_by_position.setdefault(position, []).append(stream)
        points = []
        for position, streams in streams_by_position.items():
            points.append(SamplePoint(kept=len(self.lead) + position, streams=np.stack(streams)))
        return points

    def proposal(self, ends: Encoding) -> Proposal:
        """Return the finished proposal: p_i and the calls in the drawn samples, or the reason why there are none.

        A sample without an end, "]", has the reason "no_end" in place of its call. `ends`: decodes the samples by the
        ends under which they were drawn.
        """
        if self.reason is not None:
            return Proposal(reason=self.reason)
        if self.probabilities is None or not np.isfinite(self.probabilities).all():
            return Proposal(reason="not_finite")
        calls = []
        for (position, sample), tokens in zip(self.missing, self.samples, strict=True):
            body = ends.body(tokens)
            calls.append(SampledCall(position, sample, body=body, reason="no_end" if body is None else None))
        return Proposal(self.probabilities, self.text.offsets, tuple(calls))
