"""A text on its way to a proposal: what a backend computes for it, and what becomes of the results."""

from collections import defaultdict
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
    """Says which positions of a text get how many samples, and how these are drawn.

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
        """List the samples of a text that still have to be drawn.

        There are m samples at each of the k positions at which a call is most probable, if its probability is above
        tau_s. The samples that the request has stored are left out.

        Args:
            request: The text, with its stored samples.
            offsets: For each position, the character at which the token after it begins, [n].
            probabilities: For each position, the probability that a call begins there, [n].

        Returns:
            Pairs of a position and the number of a sample there, in ascending order.
        """
        # No call may stand before some tokens, such as white space at the end. The next call of a chain
        # (`request.calls` are the earlier ones) has only one place, right after these, which needs no check.
        if not request.calls:
            probabilities = without_other_tokens(request.text, offsets, probabilities, self.tau_s)

        missing = []
        for position in select_positions(probabilities, self.tau_s, self.k):
            for sample_number in range(self.m):
                if (position, sample_number) not in request.stored:
                    missing.append((position, sample_number))
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

    Positions are numbered by the tokens of `text`: a call at position i stands before token i. p_i is the probability
    that a call begins there.

    - `request`: the text, and what is stored of its proposal.
    - `selection`: which positions get how many samples.
    - `text`: the tokens before which a call may stand, [n]; all of x, or for a chain the single token after its calls.
    - `lead`: the tokens between the prompt and the first token of `text`: x, "Output:", and for a chain the
      text up to its calls, and these.
    - `probabilities` [n]: p_i of each position.
    - `missing`: the samples to draw, as pairs of a position and a sample number.
    - `samples`: the tokens of each of these samples, in the same order.
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
        """Return the text in the form in which the backend, which runs the model, gets it.

        If the probabilities of a call at the positions are not stored, the backend computes them all and passes them to
        `choose_points`, which returns where to draw samples. If they are stored, `place_count` is 0. Then
        `choose_points` gets an empty array, and returns the points of the missing samples.
        """
        needs_probabilities = self.probabilities is None
        return TokenText(
            # The model predicts what comes at a position from the tokens before it, so no later ones are needed.
            ids=self.lead + self.text.ids[: self._last_position],
            first_place=len(self.lead),
            place_count=len(self.text.ids) if needs_probabilities else 0,
            most_samples=self.selection.k * self.selection.m,
            choose=self.choose_points,
        )

    @property
    def _last_position(self) -> int:
        """Return the last position that the model has to reach: of all, or of missing samples where p_i is stored."""
        if self.probabilities is None:
            return len(self.text.ids) - 1
        return max(position for position, _ in self.missing)

    def choose_points(self, probabilities: NDArray[np.float32]) -> list[SamplePoint]:
        """Choose the points of the text at which samples are to be drawn.

        The backend calls this while it runs the model.

        Args:
            probabilities: The probability of a call at each position, [n]. Empty if they were stored, because then the
                missing samples are already known.

        Returns:
            The points. A second call with the same probabilities has the same effect.
        """
        if len(probabilities):
            self._store_probabilities(probabilities)
        return self._build_points()

    def _store_probabilities(self, probabilities: NDArray[np.float32]) -> None:
        """Set `probabilities`, and set `missing` to the samples that have to be drawn.

        A position inside a character (such as between two tokens of an emoji) gets 0, because no call can stand there.
        If any probability is not finite, no samples are drawn.
        """
        self.probabilities = np.where(self.text.inside, np.float32(0), probabilities)
        self.missing = []
        if np.isfinite(self.probabilities).all():
            self.missing = self.selection.missing_samples(self.request, self.text.offsets, self.probabilities)

    def _build_points(self) -> list[SamplePoint]:
        """Build a point for each position with missing samples, in order, with the random numbers of each sample."""
        points = []
        for position, uniforms_of_samples in self._group_uniforms_by_position().items():
            tokens_before = len(self.lead) + position
            points.append(SamplePoint(tokens_before, uniforms=np.stack(uniforms_of_samples)))
        return points

    def _group_uniforms_by_position(self) -> dict[int, list[NDArray[np.float64]]]:
        """Return by position the random numbers of each missing sample there."""
        by_position: dict[int, list[NDArray[np.float64]]] = defaultdict(list)
        for position, sample in self.missing:
            by_position[position].append(self._compute_uniforms(position, sample))
        return by_position

    def _compute_uniforms(self, position: int, sample: int) -> NDArray[np.float64]:
        """Return the random numbers of a sample, one per token that it may draw."""
        sampling = self.selection.sampling
        return uniforms(sampling.seed, self.request.digest, position, sample, sampling.max_call_tokens)

    def proposal(self, encoding: Encoding) -> Proposal:
        """Return the finished proposal.

        Args:
            encoding: Turns the tokens of a sample into the text of its call.

        Returns:
            The probability of a call at each position, and the sampled calls. Or only a reason: "does_not_fit" or
            "empty" if the model never ran, and "not_finite" if a probability is NaN or infinite.
        """
        if self.reason is not None:
            return Proposal(reason=self.reason)

        # The probabilities are set by now. The check for None is only there for the type checker.
        if self.probabilities is None or not np.isfinite(self.probabilities).all():
            return Proposal(reason="not_finite")

        sampled_calls = tuple(self._decode_sampled_calls(encoding))
        return Proposal(self.probabilities, self.text.offsets, sampled_calls)

    def _decode_sampled_calls(self, encoding: Encoding) -> list[SampledCall]:
        """Decode each drawn sample to the text of its call. Without "]" it has no text, but the reason "no_end"."""
        calls = []
        for (position, sample), tokens in zip(self.missing, self.samples, strict=True):
            body = encoding.body(tokens)  # the text before "]"; None without "]"
            reason = "no_end" if body is None else None
            calls.append(SampledCall(position, sample, body, reason))
        return calls
