"""A text on its way to a proposal: what a backend computes for it, and what becomes of the results."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from toolformer_dag.model.backend import SamplePoint, TokenText
from toolformer_dag.model.encoding import Encoding, TextTokens
from toolformer_dag.model.requests import Proposal, ProposalRequest, SampledCall, generate_uniforms, select_positions
from toolformer_dag.settings.model_settings import SamplingSettings
from toolformer_dag.texts.call_places import zero_disallowed_probabilities

SampleKeys = list[tuple[int, int]]
"""Pairs of a position and the number of a sample there, from 0."""


@dataclass(frozen=True, slots=True)
class Selection:
    """Decides which positions of a text get how many samples, and how these are drawn.

    Attributes:
        tau_s: Positions with p_i > tau_s may have samples.
        k: The maximum number of positions of a text. The most probable ones are chosen.
        m: The number of samples per position.
        sampling: How the samples are drawn.
    """

    tau_s: float
    k: int
    m: int
    sampling: SamplingSettings

    def list_missing_samples(
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
        # (`request.earlier_calls` come before it) has only one place, right after these, which needs no check.
        if not request.earlier_calls:
            probabilities = zero_disallowed_probabilities(request.text, offsets, probabilities, self.tau_s)

        missing_samples = []
        for position in select_positions(probabilities, self.tau_s, self.k):
            for sample_number in range(self.m):
                if (position, sample_number) not in request.stored_samples:
                    missing_samples.append((position, sample_number))
        return missing_samples


@dataclass(slots=True, eq=False)
class PendingProposal:
    """A text on its way to a `Proposal`.

    The object changes while the model runs. Its state is one of these:

    1. Refused: `reason` is set, and the model never runs for it.
    2. Without p_i: `probabilities` is None.
    3. With p_i: `probabilities` are set and `missing_samples` lists the samples to draw, which may be none.
    4. Complete: `sampled_ids` has the tokens of each missing sample.

    The backend leads from 2 to 3 while it runs, by calling `choose_points`. Requests whose p_i are stored begin in 3.
    `Engine.propose` sets `sampled_ids` in the end.

    Positions are numbered by the tokens of `candidate_tokens`: a call at position i stands before token i. p_i is the
    probability that a call begins there.

    Attributes:
        request: The text, and what is stored of its proposal.
        selection: Which positions get how many samples.
        candidate_tokens: The tokens before which a call may stand, [n]. They are all of x, or for a chain the single
            token after its calls.
        ids_before_candidates: The tokens between the prompt and the first of `candidate_tokens`: x, "Output:", and for
            a chain the text up to its calls, and these.
        probabilities: p_i of each position, [n].
        missing_samples: The samples to draw, as pairs of a position and a sample number.
        sampled_ids: The tokens of each of these samples, in the same order.
    """

    request: ProposalRequest
    selection: Selection
    candidate_tokens: TextTokens
    ids_before_candidates: list[int]
    probabilities: NDArray[np.float32] | None = None
    missing_samples: SampleKeys = field(default_factory=list)
    sampled_ids: Sequence[Sequence[int]] = ()
    reason: str | None = None

    @property
    def needs_model(self) -> bool:
        """Return whether p_i or samples have to be computed."""
        if self.reason is not None:
            return False
        return self.probabilities is None or bool(self.missing_samples)

    def build_token_text(self) -> TokenText:
        """Build the text in the form in which it is passed to the backend, which runs the model.

        The backend computes the probability of a call at each position, and passes them to `choose_points`, which
        returns where to draw samples. If an earlier run has stored the probabilities, none are computed
        (`place_count` is 0), and `choose_points` gets an empty array.
        """
        needs_probabilities = self.probabilities is None
        return TokenText(
            # The model predicts what comes at a position from the tokens before it. So it reads no further than to the
            # last position at which something is wanted, without the token there.
            token_ids=self.ids_before_candidates + self.candidate_tokens.token_ids[: self._last_position],
            first_place=len(self.ids_before_candidates),
            place_count=len(self.candidate_tokens.token_ids) if needs_probabilities else 0,
            max_samples=self.selection.k * self.selection.m,
            choose_points=self.choose_points,
        )

    @property
    def _last_position(self) -> int:
        """Return the last position that the model has to reach. Position i is before the token i.

        It is the last of all positions, or if their p_i are stored, the last one that has a missing sample.
        """
        if self.probabilities is None:
            return len(self.candidate_tokens.token_ids) - 1
        return max(position for position, _ in self.missing_samples)

    def choose_points(self, probabilities: NDArray[np.float32]) -> list[SamplePoint]:
        """Choose the points of the text at which samples of calls are to be drawn.

        The backend calls this as soon as the model has computed the probabilities, and again if memory runs out. The
        second call has the same effect. `probabilities` and `missing_samples` of this object are set.

        Args:
            probabilities: The probability of a call before each of the n tokens of `candidate_tokens`, [n]. Empty if an
                earlier run stored them. Then nothing is set, because both attributes were set from the stored ones.

        Returns:
            A point for each position with missing samples.
        """
        if len(probabilities):
            self._store_probabilities(probabilities)
        return self._build_points()

    def _store_probabilities(self, probabilities: NDArray[np.float32]) -> None:
        """Set `probabilities`, and set `missing_samples` to the samples that have to be drawn.

        A position inside a character (such as between two tokens of an emoji) gets 0, because no call can stand there.
        If any probability is not finite, no samples are drawn.
        """
        self.probabilities = np.where(self.candidate_tokens.starts_inside_character, np.float32(0), probabilities)
        self.missing_samples = []
        if np.isfinite(self.probabilities).all():
            self.missing_samples = self.selection.list_missing_samples(
                self.request, self.candidate_tokens.offsets, self.probabilities
            )

    def _build_points(self) -> list[SamplePoint]:
        """Build a point for each position with missing samples, in order, with the random numbers of each sample."""
        points = []
        for position, uniforms_by_sample in self._group_uniforms_by_position().items():
            token_count_before = len(self.ids_before_candidates) + position
            points.append(SamplePoint(token_count_before, uniforms=np.stack(uniforms_by_sample)))
        return points

    def _group_uniforms_by_position(self) -> dict[int, list[NDArray[np.float64]]]:
        """Compute the random numbers of each missing sample, and group them by the position of the sample."""
        uniforms_by_position: dict[int, list[NDArray[np.float64]]] = defaultdict(list)
        for position, sample_number in self.missing_samples:
            uniforms = self._compute_uniforms(position, sample_number)
            uniforms_by_position[position].append(uniforms)
        return uniforms_by_position

    def _compute_uniforms(self, position: int, sample_number: int) -> NDArray[np.float64]:
        """Compute the random numbers of a sample, one for each token that it may draw."""
        sampling = self.selection.sampling
        return generate_uniforms(sampling.seed, self.request.digest, position, sample_number, sampling.max_call_tokens)

    def build_proposal(self, encoding: Encoding) -> Proposal:
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
        return Proposal(self.probabilities, self.candidate_tokens.offsets, sampled_calls)

    def _decode_sampled_calls(self, encoding: Encoding) -> list[SampledCall]:
        """Decode each drawn sample to the text of its call. Without "]" it has no text, but the reason "no_end"."""
        calls = []
        for (position, sample_number), token_ids in zip(self.missing_samples, self.sampled_ids, strict=True):
            body = encoding.decode_call_body(token_ids)  # the text before "]", or None without "]"
            reason = "no_end" if body is None else None
            calls.append(SampledCall(position, sample_number, body, reason))
        return calls
