"""Positions and samples of texts: what is stored, what is missing, and paying for the difference in chunks.

p_i is stored for every position of a text, samples under (text, position, sample). So a larger k or m, or a lower
tau_s, asks for exactly the samples that are not there, and the other way for none.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import polars as pl

from toolformer_dag.lane import Lane
from toolformer_dag.model.requests import Proposal, ProposalRequest, Sampling, select_positions
from toolformer_dag.storage.lake import Lake
from toolformer_dag.storage.rows import RowStore

if TYPE_CHECKING:
    from toolformer_dag.model.engine import Engine

METHOD = 3
"""Raised by hand when the same model would give other positions or samples."""
POSITIONS = pl.Schema(
    [("text_digest", pl.String), ("probabilities", pl.List(pl.Float32)), ("offsets", pl.List(pl.Int32))]
)
SAMPLES = pl.Schema(
    {"text_digest": pl.String, "position": pl.Int32, "sample": pl.Int32, "body": pl.String, "reason": pl.String}
)
SAMPLE_KEY = ("text_digest", "position", "sample")
CHOSEN = pl.Schema({"text_digest": pl.String, "position": pl.Int32, "p_api": pl.Float32, "char": pl.Int64})
REFUSED = -1
"""Position of the row that says why a text has no samples at all."""


def positions_identity(lane: Lane, model: Mapping[str, object]) -> dict[str, Any]:
    """What determines p_i."""
    return {"method": METHOD, "model": dict(model), "prompt": lane.tool.prompt}


def samples_identity(lane: Lane, model: Mapping[str, object], sampling: Sampling) -> dict[str, Any]:
    """What determines a sample; k, m and tau_s only say which samples are wanted."""
    return {**positions_identity(lane, model), "sampling": asdict(sampling)}


Answers = Sequence[tuple[ProposalRequest, Proposal]]


@dataclass(frozen=True, slots=True)
class Wanted:
    """`chosen`: positions of the texts whose p_i are known. `keys`: their samples. `unknown`: texts without p_i."""

    chosen: pl.DataFrame
    keys: pl.DataFrame
    unknown: pl.DataFrame


class SampleStore:
    """The stored positions and samples of one lane under one model, prompt and sampling."""

    def __init__(self, lake: Lake, lane: Lane, model: Mapping[str, object], sampling: Sampling) -> None:
        folder = lane.key
        self._lane, self._sampling = lane, sampling
        self._positions = lake.rows(f"{folder}/positions", positions_identity(lane, model), ("text_digest",), POSITIONS)
        self._samples = lake.rows(f"{folder}/samples", samples_identity(lane, model, sampling), SAMPLE_KEY, SAMPLES)

    @property
    def stores(self) -> tuple[RowStore, RowStore]:
        """Where the rows come from."""
        return self._positions, self._samples

    def wanted(self, texts: pl.DataFrame) -> Wanted:
        """What the thresholds ask for, of `texts` (text_digest, text)."""
        known = self._positions.stored(texts)
        chosen = pl.DataFrame(list(self._chosen(known)), schema=CHOSEN, orient="row")
        unknown = texts.join(known, on="text_digest", how="anti", maintain_order="left")
        unknown = unknown.join(self.refused(texts), on="text_digest", how="anti", maintain_order="left")
        samples = pl.DataFrame({"sample": range(self._lane.m)}, schema={"sample": pl.Int32})
        return Wanted(chosen, chosen.select("text_digest", "position").join(samples, how="cross"), unknown)

    def missing(self, keys: pl.DataFrame) -> pl.DataFrame:
        """Those samples that are not stored."""
        return self._samples.missing(keys)

    def samples(self, keys: pl.DataFrame) -> pl.DataFrame:
        """The stored samples of `keys`."""
        return self._samples.stored(keys)

    def refused(self, texts: pl.DataFrame) -> pl.DataFrame:
        """(text_digest, reason) of texts that the engine could not take."""
        place = (pl.lit(REFUSED, pl.Int32).alias("position"), pl.lit(0, pl.Int32).alias("sample"))
        return self._samples.stored(texts.select("text_digest", *place)).select("text_digest", "reason")

    def pay(self, engine: "Engine", texts: pl.DataFrame, stored: Mapping[str, frozenset[tuple[int, int]]]) -> None:
        """Computes and commits what is missing for `texts`; `stored`: (position, sample) pairs that are there."""
        known = self._positions.stored(texts)
        paid = dict(zip(known["text_digest"], known["probabilities"], strict=True))
        requests = [
            ProposalRequest(
                text, digest, paid[digest].to_numpy() if digest in paid else None, stored.get(digest, frozenset())
            )
            for digest, text in texts.select("text_digest", "text").iter_rows()
        ]
        lane, sampling = self._lane, self._sampling
        proposals = engine.propose(lane.tool.prompt, requests, tau_s=lane.tau_s, k=lane.k, m=lane.m, sampling=sampling)
        answers = list(zip(requests, proposals, strict=True))
        self._samples.append(_sample_rows(answers))
        self._positions.append(_position_rows(answers))  # last: a text whose p_i are stored has its samples stored

    def _chosen(self, known: pl.DataFrame) -> Iterator[tuple[str, int, float, int]]:
        for digest, probabilities, offsets in zip(*known.select(POSITIONS.names()), strict=True):
            for i in select_positions(probabilities.to_numpy(), self._lane.tau_s, self._lane.k):
                yield digest, i, probabilities[i], offsets[i]


def _position_rows(answers: Answers) -> pl.DataFrame:
    rows = [
        (request.digest, proposal.probabilities, proposal.offsets)
        for request, proposal in answers
        if request.probabilities is None and proposal.reason is None
    ]
    return pl.DataFrame(rows, schema=POSITIONS, orient="row")


def _sample_rows(answers: Answers) -> pl.DataFrame:
    sampled = [
        (request.digest, sample.position, sample.sample, sample.body, sample.reason)
        for request, proposal in answers
        for sample in proposal.samples
    ]
    refused = [(request.digest, REFUSED, 0, None, p.reason) for request, p in answers if p.reason is not None]
    return pl.DataFrame([*sampled, *refused], schema=SAMPLES, orient="row")
