"""Store what the model computes to propose calls: p_i at every position of a text, and samples.

p_i is the probability that a call begins before token x_i (paper, section 2, "Sampling"). A sample is what the model
writes after ` [` there, up to the closing bracket. tau_s, k and m (lane settings) only choose among positions and say
how many samples there are, so that other values compute nothing that is stored.

A place after calls, where a chain may go on, is stored like a text that has one position, number 0.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import polars as pl
from numpy.typing import NDArray

from toolformer_dag.computing.plan import Lane, Plan
from toolformer_dag.computing.stored_rows import BYTES_PER_TOKEN
from toolformer_dag.computing.worker import Worker
from toolformer_dag.lake.row_store import RowStore
from toolformer_dag.model.requests import Proposal, ProposalRequest, select_positions
from toolformer_dag.settings.setting_types import select_determining_settings
from toolformer_dag.texts.call_places import find_call_place_at_token, zero_disallowed_probabilities

METHOD = 3
"""Raised when the same model would give other positions or samples; a golden test notices where it was not."""
POSITION_SCHEMA = pl.Schema(
    {
        "text_digest": pl.String(),
        "probabilities": pl.List(pl.Float32()),
        "offsets": pl.List(pl.Int32()),
    }
)
"""Columns of the stored positions; `MeasuredText` describes them."""
SAMPLE_SCHEMA = pl.Schema(
    {
        "text_digest": pl.String(),
        "position": pl.Int32(),
        "sample": pl.Int32(),
        "body": pl.String(),
        "reason": pl.String(),
    }
)
"""Columns of the stored samples; `StoredSample` describes them."""
POSITION_KEY_COLUMNS = ("text_digest",)
SAMPLE_KEY_COLUMNS = ("text_digest", "position", "sample")
REFUSED_POSITION = -1
"""The `position` of a stored row that holds no sample, but the reason why a text has none at all."""
CHOSEN_POSITION_SCHEMA = pl.Schema(
    {
        "text_digest": pl.String(),
        "position": pl.Int32(),
        "p_api": pl.Float32(),
        "char": pl.Int64(),
        "judged_position": pl.Int32(),
    }
)
"""Columns of the positions before which calls are sampled; `ChosenPosition` describes them."""
PLACE_SCHEMA = pl.Schema(
    {
        "text_digest": pl.String(),
        "text": pl.String(),
        "position": pl.Int32(),
        "before": pl.String(),
    }
)
"""Columns of places after calls: the chain `before` (JSON) stands in `text` before token x_i, i = `position`.

`text_digest` is the hash of all three, which names the place (`texts.chains.hash_chain_place`).
"""


class MeasuredText(NamedTuple):
    """A text with the probability of a call at each position.

    Attributes:
        text_digest: The hash of the text.
        probabilities: The probability p_i of a call before each of the n tokens, of shape (n,).
        offsets: The character of the text at which each token begins, of shape (n,).
    """

    text_digest: str
    probabilities: NDArray[np.float32]
    offsets: NDArray[np.int32]


class StoredSample(NamedTuple):
    """A sample, or the reason why a text has none.

    Attributes:
        text_digest: The hash of the text.
        position: The index of the token before which the sample stands. REFUSED_POSITION for a text without samples.
        sample: The number of the sample at its position, from 0.
        body: The text between the brackets of the call. None if they were not closed.
        reason: Why there is no body. None if there is one.
    """

    text_digest: str
    position: int
    sample: int
    body: str | None
    reason: str | None


class ChosenPosition(NamedTuple):
    """A position of a text before which calls are sampled: one of the k most probable with p_i > tau_s.

    Attributes:
        text_digest: The hash of the text.
        position: The index of the token before which calls are sampled.
        p_api: The probability of a call there (p_i).
        char: The character of the text before which the calls are written.
        judged_position: The token at which the window of their losses begins (texts/call_places.py).
    """

    text_digest: str
    position: int
    p_api: float
    char: int
    judged_position: int


@dataclass(frozen=True, slots=True)
class RequestedSamples:
    """The samples that a lane's tau_s, k and m request of some texts.

    p_i is the probability of a call at position i of a text.

    Attributes:
        positions: Where calls are sampled in the texts whose p_i are stored, in the columns CHOSEN_POSITION_SCHEMA.
        sample_keys: The keys of m samples at each of these positions, in the columns SAMPLE_KEY_COLUMNS.
        unmeasured_texts: The texts whose p_i are not stored, so that their positions are not known yet.
    """

    positions: pl.DataFrame
    sample_keys: pl.DataFrame
    unmeasured_texts: pl.DataFrame


def collect_positions_identity(plan: Plan, prompt: str) -> dict[str, Any]:
    """Return what p_i (the probability of a call at position i) depends on, apart from the text."""
    return {"method": METHOD, "model": plan.get_model_identity("proposer"), "prompt": prompt}


def collect_samples_identity(plan: Plan, prompt: str) -> dict[str, Any]:
    """Return what a sample depends on, apart from its text, position and number."""
    ends = {"ends": "before results"} if plan.previous_plan else {}  # a finetuned model would write results too
    return {
        **collect_positions_identity(plan, prompt),
        **ends,
        "sampling": select_determining_settings(plan.settings.sampling),
    }


def _open_position_store(worker: Worker, store_name: str, prompt: str) -> RowStore:
    """Open the row store of the positions that are measured with a prompt."""
    identity = collect_positions_identity(worker.plan, prompt)
    return worker.open_row_store(store_name, identity, POSITION_KEY_COLUMNS, POSITION_SCHEMA)


def _open_sample_store(worker: Worker, store_name: str, prompt: str) -> RowStore:
    """Open the row store of the samples that are drawn with a prompt."""
    identity = collect_samples_identity(worker.plan, prompt)
    return worker.open_row_store(store_name, identity, SAMPLE_KEY_COLUMNS, SAMPLE_SCHEMA)


class SampleStore:
    """The row stores of positions and samples of one lane, under one model, prompt and sampling.

    Attributes:
        prompt: The prompt for sampling.
        position_store: The probability of a call at each position of a text.
        sample_store: What the model wrote as calls at the chosen positions.
    """

    def __init__(self, worker: Worker, lane: Lane, *, prompt: str | None = None, name_prefix: str = "") -> None:
        """Open the two row stores of a lane (a tool with its settings).

        Args:
            prompt: The prompt for sampling calls. By default it is the prompt of the lane's tool.
            name_prefix: Comes before the names of the stores: "chained_" opens chained_positions and chained_samples.
        """
        self.prompt = lane.tool.prompt if prompt is None else prompt

        store_name = f"{lane.tool.key}/{name_prefix}"
        self.position_store = _open_position_store(worker, f"{store_name}positions", self.prompt)
        self.sample_store = _open_sample_store(worker, f"{store_name}samples", self.prompt)

        self._lane = lane
        self._max_call_tokens = worker.plan.settings.sampling.max_call_tokens
        self._positions_per_text = lane.k

    @property
    def store_names(self) -> list[str]:
        """The names of the two row stores."""
        return [self.position_store.name, self.sample_store.name]

    def choose_requested_samples(self, texts: pl.DataFrame) -> RequestedSamples:
        """Choose where in some texts calls are sampled.

        p_i is the probability that a call begins before token i of a text. Each text gets up to k positions: those with
        the highest p_i above the threshold tau_s. At each position, m calls are sampled.

        Args:
            texts: The texts, in the columns text_digest, text and others.

        Returns:
            The positions, the keys of the samples there (whether the samples are stored or not), and the texts whose
            p_i have to be computed first.
        """
        measured = self.position_store.read_stored_rows(texts)  # the texts whose p_i are stored
        chosen_positions = list(self._choose_positions(measured, texts))
        positions = pl.DataFrame(chosen_positions, schema=CHOSEN_POSITION_SCHEMA, orient="row")

        return RequestedSamples(
            positions=positions,
            sample_keys=self._build_sample_keys(positions),
            unmeasured_texts=self._select_unmeasured_texts(texts, measured),
        )

    def _build_sample_keys(self, positions: pl.DataFrame) -> pl.DataFrame:
        """Return the keys (SAMPLE_KEY_COLUMNS) of m samples at each of the positions (CHOSEN_POSITION_SCHEMA)."""
        numbers = pl.DataFrame({"sample": range(self._lane.m)}, schema={"sample": pl.Int32()})
        return positions.select("text_digest", "position").join(numbers, how="cross")

    def _select_unmeasured_texts(self, texts: pl.DataFrame, measured_texts: pl.DataFrame) -> pl.DataFrame:
        """Return the texts whose p_i have to be computed: not `measured_texts`, and not refused by the engine."""
        without = texts.join(measured_texts, on="text_digest", how="anti", maintain_order="left")
        return without.join(self.read_refused_texts(texts), on="text_digest", how="anti", maintain_order="left")

    def read_refused_texts(self, texts: pl.DataFrame) -> pl.DataFrame:
        """Find the texts that the model could not take, for example because they do not fit into its context.

        Returns:
            The columns text_digest and reason (such as "does_not_fit"), with a row for each of these texts.
        """
        # Such a text has a single row among the samples, under these keys.
        keys = texts.select(
            "text_digest",
            position=pl.lit(REFUSED_POSITION, pl.Int32()),
            sample=pl.lit(0, pl.Int32()),
        )
        return self.sample_store.read_stored_rows(keys).select("text_digest", "reason")

    def estimate_max_tokens(self) -> pl.Expr:
        """Return how many tokens a text (column `text`) runs at most: x, "Output:" and x again, and all its samples."""
        text_tokens = pl.col("text").str.len_bytes() / BYTES_PER_TOKEN
        return 2 * text_tokens + self._positions_per_text * self._lane.m * self._max_call_tokens

    def append_proposals(self, requests: Sequence[ProposalRequest], proposals: Sequence[Proposal]) -> int:
        """Store what the model has computed.

        Args:
            requests: What the model was asked.
            proposals: Its answer to each request, in the same order.

        Returns:
            The number of new samples.
        """
        samples = _build_stored_samples(requests, proposals)
        refusals = _build_refusal_rows(requests, proposals)
        self.sample_store.append_rows(pl.DataFrame([*samples, *refusals], schema=SAMPLE_SCHEMA, orient="row"))

        # Positions come last. So if a run is interrupted, the samples of all stored positions are stored as well.
        measured_texts = _select_newly_measured_texts(requests, proposals)
        self.position_store.append_rows(pl.DataFrame(measured_texts, schema=POSITION_SCHEMA, orient="row"))
        return len(samples)

    def _choose_positions(self, measured_texts: pl.DataFrame, texts: pl.DataFrame) -> Iterator[ChosenPosition]:
        """Choose the positions at which calls are sampled: in each text the k with the highest p_i above tau_s.

        Args:
            measured_texts: The stored p_i, in the columns POSITION_SCHEMA.
            texts: At least the same texts, in the columns text_digest and text.
        """
        text_by_digest = dict(texts.select("text_digest", "text").iter_rows())
        for measured_text in _iter_measured_texts(measured_texts):
            yield from self._choose_positions_in_text(text_by_digest[measured_text.text_digest], measured_text)

    def _choose_positions_in_text(self, text: str, measured_text: MeasuredText) -> Iterator[ChosenPosition]:
        """Choose the tokens of a text before which calls are sampled.

        Args:
            measured_text: The probability of a call before each of its tokens, and the character at which each begins.

        Yields:
            The up to k tokens with the highest probabilities above the threshold tau_s, in the order of the text.
        """
        tau_s = self._lane.tau_s

        # Sets the probability to 0 where no call may stand before the token.
        probabilities = zero_disallowed_probabilities(text, measured_text.offsets, measured_text.probabilities, tau_s)

        for token_index in select_positions(probabilities, tau_s, self._lane.k):
            call_place = find_call_place_at_token(text, measured_text.offsets, token_index)
            assert call_place is not None  # tokens without a place have the probability 0

            yield ChosenPosition(
                text_digest=measured_text.text_digest,
                position=token_index,
                p_api=float(probabilities[token_index]),
                char=call_place.char_offset,
                judged_position=call_place.position,  # the first token after the call that is not only white space
            )


class ChainedSampleStore(SampleStore):
    """The row stores for calls that are made after other calls.

    Its `choose_requested_samples` takes places (PLACE_SCHEMA) instead of texts.
    """

    def __init__(self, worker: Worker, lane: Lane) -> None:
        super().__init__(worker, lane, prompt=lane.chain_prompt, name_prefix="chained_")
        self._positions_per_text = 1

    def _choose_positions(self, measured_texts: pl.DataFrame, texts: pl.DataFrame) -> Iterator[ChosenPosition]:
        """Choose the places at which a further call is sampled. A place is right after earlier calls in a text.

        A place is chosen if the probability of a further call there is above the threshold tau_s. Places are stored
        as if each were a text with a single position, which is 0.

        Args:
            measured_texts: The probabilities, in the columns POSITION_SCHEMA. `text_digest` is the hash of a place.
            texts: Not used, because a place after a call needs no check of the text around it.
        """
        for measured_place in _iter_measured_texts(measured_texts):
            is_chosen = bool(select_positions(measured_place.probabilities, self._lane.tau_s, self._lane.k))
            if is_chosen:
                yield ChosenPosition(
                    text_digest=measured_place.text_digest,
                    position=0,
                    p_api=float(measured_place.probabilities[0]),
                    char=int(measured_place.offsets[0]),
                    judged_position=0,
                )


def _build_stored_samples(requests: Sequence[ProposalRequest], proposals: Sequence[Proposal]) -> list[StoredSample]:
    """Return the samples of all proposals as they are stored."""
    samples: list[StoredSample] = []
    for request, proposal in zip(requests, proposals, strict=True):
        samples += _build_stored_samples_of_text(request.digest, proposal)
    return samples


def _build_stored_samples_of_text(text_digest: str, proposal: Proposal) -> list[StoredSample]:
    """Convert the samples of one text to the form in which they are stored."""
    stored_samples = []
    for sample in proposal.samples:
        stored_sample = StoredSample(
            text_digest=text_digest,
            position=sample.position,
            sample=sample.sample_number,
            body=sample.body,
            reason=sample.reason,
        )
        stored_samples.append(stored_sample)
    return stored_samples


def _select_newly_measured_texts(
    requests: Sequence[ProposalRequest], proposals: Sequence[Proposal]
) -> list[MeasuredText]:
    """Return the p_i of the texts for which the engine computed them."""
    measured = []
    for request, proposal in zip(requests, proposals, strict=True):
        if proposal.reason is None and request.probabilities is None:
            measured.append(MeasuredText(request.digest, proposal.probabilities, proposal.offsets))
    return measured


def _build_refusal_rows(requests: Sequence[ProposalRequest], proposals: Sequence[Proposal]) -> list[StoredSample]:
    """Build a row for each text that the model could not take. It holds the reason instead of a sample."""
    refusals = []
    for request, proposal in zip(requests, proposals, strict=True):
        if proposal.reason is not None:
            refusal = StoredSample(
                request.digest, position=REFUSED_POSITION, sample=0, body=None, reason=proposal.reason
            )
            refusals.append(refusal)
    return refusals


def _iter_measured_texts(measured_rows: pl.DataFrame) -> Iterator[MeasuredText]:
    """Convert the rows of a table with the columns POSITION_SCHEMA to objects."""
    columns = (measured_rows[name] for name in POSITION_SCHEMA.names())
    for digest, probabilities, offsets in zip(*columns, strict=True):
        yield MeasuredText(
            text_digest=digest,
            probabilities=probabilities.to_numpy(),
            offsets=offsets.to_numpy(),
        )
