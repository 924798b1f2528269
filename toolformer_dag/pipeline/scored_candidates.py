"""scored_candidates: where the model would call the tool, and what it would ask (paper, section 2, "Sampling").

p_i is stored for every position of a text, samples under (text, position, sample). So a larger k or m, or a lower
tau_s, asks for exactly the samples that are missing, and a smaller one for none.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import polars as pl

from toolformer_dag.computing.plan import Lane, Plan
from toolformer_dag.computing.stage import (
    CALL,
    CALL_KEY,
    CHAR_OFFSET,
    P_API,
    SAMPLED_INPUT,
    SOURCE,
    WORDS,
    ByChunk,
    Chunk,
    Claimed,
    Column,
    InWarehouse,
    PartRows,
    Planned,
    Rejected,
    Stage,
    TableOutput,
    Work,
    counted,
)
from toolformer_dag.computing.stored_rows import TOKEN_BYTES, chunk_limits, claim, require_whole, text_chunks
from toolformer_dag.computing.worker import Worker
from toolformer_dag.identity import fingerprint
from toolformer_dag.model.requests import Proposal, ProposalRequest, select_positions
from toolformer_dag.settings.setting_types import determining
from toolformer_dag.settings.tool_settings import MODEL
from toolformer_dag.texts import call_places
from toolformer_dag.texts.arguments import BadArguments, read_arguments, write_arguments
from toolformer_dag.texts.call_places import CallPlace, place_of_token, without_other_tokens
from toolformer_dag.texts.calls import Call, MalformedCall, fault, parse_call
from toolformer_dag.texts.chains import chain_text, read_chain

METHOD = 3
"""Raised when the same model would give other positions or samples; a golden test notices where it was not."""
PARSING = 4
"""Raised when `parsed_call` takes the same bodies otherwise; no sample is computed again."""
POSITIONS = pl.Schema(
    [("text_digest", pl.String()), ("probabilities", pl.List(pl.Float32())), ("offsets", pl.List(pl.Int32()))]
)
SAMPLES = pl.Schema(
    {
        "text_digest": pl.String(),
        "position": pl.Int32(),
        "sample": pl.Int32(),
        "body": pl.String(),
        "reason": pl.String(),
    }
)
SAMPLE_KEY = ("text_digest", "position", "sample")
CHOSEN = pl.Schema(
    {
        "text_digest": pl.String(),
        "position": pl.Int32(),
        "p_api": pl.Float32(),
        "char": pl.Int64(),
        "judged_position": pl.Int32(),
    }
)
"""Positions before which calls are sampled. `char`: the character of the text before which they are written;
`judged_position`: the position with which the window of their losses begins (see `texts/call_places.py`)."""
BODIES = pl.Schema({"body": pl.String(), "input": pl.String(), "malformed": pl.String()})
REFUSED = -1
"""Position of the row that says why a text has no samples at all."""


def positions_identity(plan: Plan, prompt: str) -> dict[str, Any]:
    """Return what determines p_i."""
    return {"method": METHOD, "model": plan.identity_of("proposer"), "prompt": prompt}


def samples_identity(plan: Plan, prompt: str) -> dict[str, Any]:
    """Return what determines a sample; k, m and tau_s only say which samples are asked for."""
    ends = {"ends": "before results"} if plan.start else {}
    return {**positions_identity(plan, prompt), **ends, "sampling": determining(plan.settings.sampling)}


def settings(plan: Plan, lane: Lane) -> Mapping[str, Any]:
    """Return what determines the rows beside the texts."""
    thresholds = {"tau_s": lane.tau_s, "k": lane.k, "m": lane.m}
    schema = lane.tool.schema
    named = {} if schema is None else {"arguments": fingerprint(schema)}
    return {
        **samples_identity(plan, lane.tool.prompt),
        **thresholds,
        **named,
        "tool": lane.tool.name,
        "parsing": PARSING,
        "places": call_places.VERSION,
    }


@dataclass(frozen=True, slots=True)
class Asked:
    """`chosen`: positions of the texts whose p_i are known. `keys`: their samples. `unknown`: texts without p_i."""

    chosen: pl.DataFrame
    keys: pl.DataFrame
    unknown: pl.DataFrame


@dataclass(frozen=True, slots=True)
class TextChunk:
    """Texts (text_digest, text) that lack p_i or samples. `known`: POSITIONS rows; `stored`: SAMPLE_KEY rows.

    A place after calls is a text too, with `position` and the calls `before`.
    """

    texts: pl.DataFrame
    known: pl.DataFrame
    stored: pl.DataFrame


class SampleStore:
    """The stored positions and samples of one lane under one model, prompt and sampling.

    `prefix` begins the names of the stores of places after calls, whose `prompt` may be another.
    """

    def __init__(self, worker: Worker, lane: Lane, prefix: str = "", prompt: str | None = None) -> None:
        plan, self._lane, self.prompt = worker.plan, lane, lane.tool.prompt if prompt is None else prompt
        self._longest = plan.settings.sampling.max_call_tokens
        of_positions, of_samples = positions_identity(plan, self.prompt), samples_identity(plan, self.prompt)
        self.positions = worker.rows(f"{lane.tool.key}/{prefix}positions", of_positions, ("text_digest",), POSITIONS)
        self.samples = worker.rows(f"{lane.tool.key}/{prefix}samples", of_samples, SAMPLE_KEY, SAMPLES)

    def asked(self, texts: pl.DataFrame) -> Asked:
        """Return what the thresholds ask for, of `texts` (text_digest, text)."""
        known = self.positions.stored(texts)
        chosen = self._chosen_after_calls(known) if "before" in texts.columns else self._chosen(known, texts)
        unknown = texts.join(known, on="text_digest", how="anti", maintain_order="left")
        unknown = unknown.join(self.refused(texts), on="text_digest", how="anti", maintain_order="left")
        samples = pl.DataFrame({"sample": range(self._lane.m)}, schema={"sample": pl.Int32()})
        return Asked(chosen, chosen.select("text_digest", "position").join(samples, how="cross"), unknown)

    def refused(self, texts: pl.DataFrame) -> pl.DataFrame:
        """Return (text_digest, reason) of texts that the engine could not take."""
        place = (pl.lit(REFUSED, pl.Int32()).alias("position"), pl.lit(0, pl.Int32()).alias("sample"))
        return self.samples.stored(texts.select("text_digest", *place)).select("text_digest", "reason")

    def estimated_tokens(self, one_place: bool) -> pl.Expr:
        """Return what a text runs at most, or `one_place` of it: x, "Output:" and x again, and samples to their end."""
        places = 1 if one_place else self._lane.k
        return 2 * pl.col("text").str.len_bytes() / TOKEN_BYTES + places * self._lane.m * self._longest

    def _chosen(self, known: pl.DataFrame, texts: pl.DataFrame) -> pl.DataFrame:
        """Return the k most probable positions of each text (CHOSEN). `known`: POSITIONS rows of the texts."""
        text_of = dict(texts.select("text_digest", "text").iter_rows())
        chosen = []
        for digest, stored_probabilities, stored_offsets in zip(*known.select(POSITIONS.names()), strict=True):
            text = text_of[digest]
            offsets = stored_offsets.to_numpy()
            probabilities = without_other_tokens(text, offsets, stored_probabilities.to_numpy(), self._lane.tau_s)
            for i in select_positions(probabilities, self._lane.tau_s, self._lane.k):
                place = place_of_token(text, offsets, i)
                assert place is not None  # without_other_tokens leaves out the other tokens
                chosen.append((digest, i, float(probabilities[i]), place.offset, place.position))
        return pl.DataFrame(chosen, schema=CHOSEN, orient="row")

    def _chosen_after_calls(self, known: pl.DataFrame) -> pl.DataFrame:
        """Return the places after calls whose p is above tau_s (CHOSEN); each has one position, number 0."""
        chosen = [
            (digest, 0, probabilities[0], offsets[0], 0)
            for digest, probabilities, offsets in zip(*known.select(POSITIONS.names()), strict=True)
            if select_positions(probabilities.to_numpy(), self._lane.tau_s, self._lane.k)
        ]
        return pl.DataFrame(chosen, schema=CHOSEN, orient="row")


def chunks(worker: Worker, output: TableOutput, shard: str, claimed: Claimed) -> Planned:
    """Plan the texts of a shard that lack p_i or samples. Counts texts (p_i) and samples."""
    _, texts = _texts(output, shard)
    return planned(worker, SampleStore(worker, output.lane), texts, claimed)


def planned(worker: Worker, store: SampleStore, texts: pl.DataFrame, claimed: Claimed) -> Planned:
    """Plan what texts, or places after calls, lack in a store."""
    asked = store.asked(texts)
    missing = store.samples.missing(asked.keys)
    present = asked.keys.join(missing, on=SAMPLE_KEY, how="anti")
    lacking = pl.concat([asked.unknown.select("text_digest"), missing.select("text_digest")])
    free = claim(claimed, store.samples.name, lacking.unique(maintain_order=True))
    free = free.with_columns(whole=pl.col("text_digest").is_in(asked.unknown["text_digest"].implode()))
    unknown = free.filter("whole").height
    estimated = texts.with_columns(tokens=store.estimated_tokens("position" in texts.columns))
    chunks = [
        Chunk(
            batch.height,
            TextChunk(
                batch.drop("tokens"),
                store.positions.stored(batch.select("text_digest")),
                present.join(batch, on="text_digest", how="semi").select(SAMPLE_KEY),
            ),
            float(batch["tokens"].sum()),
        )
        for batch in text_chunks(estimated, free, *chunk_limits(worker.plan, "proposer"))
    ]
    reused = Counter(texts=texts.height - unknown, samples=present.height)
    work = Work(computed=Counter(texts=unknown), reused=reused)
    return Planned(chunks, work)


def compute(worker: Worker, output: TableOutput, chunk: TextChunk) -> Work:
    """Compute and commit what the texts of a chunk lack."""
    return computed(worker, output.lane, SampleStore(worker, output.lane), chunk)


def computed(worker: Worker, lane: Lane, store: SampleStore, chunk: TextChunk) -> Work:
    """Compute what the texts of a chunk lack, or its places after calls, and commit it to a store."""
    engine = worker.engine("proposer")
    known = dict(zip(chunk.known["text_digest"], chunk.known["probabilities"], strict=True))
    stored = chunk.stored.rows_by_key("text_digest")
    requests = [
        ProposalRequest(
            row["text"],
            row["text_digest"],
            known[row["text_digest"]].to_numpy() if row["text_digest"] in known else None,
            frozenset(stored.get(row["text_digest"], ())),
            chain_text(read_chain(row.get("before"))),
            row.get("position", 0),
        )
        for row in chunk.texts.iter_rows(named=True)
    ]
    before = Counter(engine.counts.as_dict())
    sampling, later = worker.plan.settings.sampling, worker.plan.start is not None
    proposals = engine.propose(
        store.prompt, requests, tau_s=lane.tau_s, k=lane.k, m=lane.m, sampling=sampling, finetuned=later
    )
    answers = list(zip(requests, proposals, strict=True))
    samples = _sample_rows(answers)
    store.samples.append(samples)
    store.positions.append(_position_rows(answers))  # last: a text whose p_i are stored has its samples stored
    tokens = Counter(engine.counts.as_dict()) - before
    drawn = Counter(samples=samples.filter(pl.col("position") != REFUSED).height)
    return Work(tokens, drawn, backends=frozenset({engine.backend.identity}))


def rows(worker: Worker, output: TableOutput, shard: str) -> PartRows:
    """Read the samples of a shard's texts. Raises StorageError where some were damaged meanwhile.

    A row is a sampled call, or a discarded sample with its reason: no_end, those of `parse_call` and `read_arguments`,
    other_tool. Texts without a row are counted as no_position, does_not_fit, not_finite or empty.
    """
    placed, texts = _texts(output, shard)
    store = SampleStore(worker, output.lane)
    asked = store.asked(texts)
    samples = stored_samples(output, store, asked)
    parsed = pl.DataFrame(
        [parsed_call(output.lane, body) for body in samples["body"].drop_nulls().unique()], schema=BODIES, orient="row"
    )
    samples = samples.join(parsed, on="body", how="left")
    table = (
        placed.join(asked.chosen, on="text_digest")
        .join(samples, on=("text_digest", "position"))
        .with_columns(
            (pl.col("offset") + pl.col("char")).alias("char_offset"),
            pl.coalesce("reason", "malformed").alias("reason"),
            position="judged_position",
            source=pl.lit(MODEL),
            words=pl.lit(None, pl.String),
        )
    )
    moved: Rejected = Counter()
    if output.plan.has_own_proposer:
        table, moved = _at_tokens(worker, table)
    table = table.select(output.stage.schema.names()).sort(CALL_KEY)
    rejected = counted(table) + _without_rows(placed, asked, store.refused(texts)) + moved
    return PartRows([table], rejected, [store.positions.name, store.samples.name])


def judged_places(worker: Worker, text: str) -> Callable[[int], CallPlace | None]:
    """Return a function from a character of the text to the place there among the judge's tokens; None without one."""
    [tokens] = worker.encoding().texts([text])
    return partial(tokens.place_at, text)


def _at_tokens(worker: Worker, table: pl.DataFrame) -> tuple[pl.DataFrame, Rejected]:
    """Move the samples of another model to the judge's tokens; those where none begins are counted."""
    place_in = {text: judged_places(worker, text) for text in table["text"].unique()}
    places = [place_in[text](char) for text, char in table.select("text", "char").iter_rows()]
    written = [None if place is None else place.offset for place in places]
    positions = [None if place is None else place.position for place in places]
    table = table.with_columns(
        position=pl.Series(positions, dtype=pl.Int32),
        char_offset=pl.col("offset") + pl.Series(written, dtype=pl.Int64),
    )
    fit = pl.col("position").is_not_null() & pl.struct(CALL_KEY).is_first_distinct()
    outside = table.filter(~fit).with_columns(reason=pl.lit("inside_a_token"))
    return table.filter(fit), counted(outside)


def stored_samples(output: TableOutput, store: SampleStore, asked: Asked) -> pl.DataFrame:
    """Return the samples that are asked for. Raises StorageError where some were damaged meanwhile."""
    samples = store.samples.stored(asked.keys)
    require_whole(output, "samples", asked.keys.height - samples.height + asked.unknown.height)
    return samples


def _texts(output: TableOutput, shard: str) -> tuple[pl.DataFrame, pl.DataFrame]:
    """The rows of heuristic_subset, and its distinct texts (text_digest, text)."""
    subset = output.lane_table("heuristic_subset").read(shard)
    return subset, subset.select("text_digest", "text").unique("text_digest", maintain_order=True)


Answers = Sequence[tuple[ProposalRequest, Proposal]]


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


def parsed_call(lane: Lane, body: str) -> tuple[str, str | None, str | None]:
    """Return the body, its input or None, and why it is no call of this tool; named arguments written in one way."""
    try:
        call = parse_call(body)
        if call.tool != lane.tool.name:
            return body, None, "other_tool"
        schema = lane.tool.schema
        if schema is None:
            return body, call.input, None
        written = write_arguments(read_arguments(call.input, schema), schema)
        return body, written, fault(Call(call.tool, written))
    except (MalformedCall, BadArguments) as error:
        return body, None, error.reason


def _without_rows(placed: pl.DataFrame, asked: Asked, refused: pl.DataFrame) -> Rejected:
    """Texts that gave no row, by shard and reason."""
    without = placed.join(asked.chosen, on="text_digest", how="anti").join(refused, on="text_digest", how="left")
    return counted(without.with_columns(pl.col("reason").fill_null("no_position")))


STAGE = Stage(
    name="scored_candidates",
    description="Up to k positions with p_i > tau_s per text, m sampled calls each; discarded ones have a reason.",
    columns={
        **CALL,
        "source": SOURCE,
        "char_offset": CHAR_OFFSET,
        "p_api": P_API,
        "body": Column(pl.String(), "what was sampled between the brackets; null where they were not closed"),
        "input": SAMPLED_INPUT,
        "words": WORDS,
        "reason": Column(pl.String(), "why the sample was discarded; null for a call"),
    },
    key=CALL_KEY,
    settings=settings,
    reads=("heuristic_subset",),
    pool="gpu",
    kinds=frozenset({"pytorch", "parquet"}),
    make=ByChunk(chunks, compute, rows),
    in_warehouse=InWarehouse("candidates"),
)
