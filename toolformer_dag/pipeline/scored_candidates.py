"""scored_candidates: sample calls of the tool where the model would make them (paper, section 2, "Sampling").

p_i is the probability that the model starts a call at position i of a text. Sampling takes the up to k positions with
the highest p_i above the threshold tau_s, and lets the model write m calls at each of them.

p_i is stored for every position of a text, samples under (text, position, sample); see sample_store.py. So a larger k
or m, or a lower tau_s, computes exactly the samples that are missing, and a smaller one none. The missing values are
planned (`chunks`), computed into the row stores (`compute`) and then read into the table (`rows`).
"""

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

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
    count_by_reason,
)
from toolformer_dag.computing.stored_rows import choose_chunk_limits, claim, require_whole, split_texts_into_chunks
from toolformer_dag.computing.worker import Worker
from toolformer_dag.identity import fingerprint
from toolformer_dag.model.requests import ProposalRequest
from toolformer_dag.pipeline.sample_store import (
    SAMPLE_KEY,
    RequestedSamples,
    SampleStore,
    samples_identity,
)
from toolformer_dag.pipeline.work_counts import EngineMeter
from toolformer_dag.settings.tool_settings import MODEL
from toolformer_dag.texts import call_places
from toolformer_dag.texts.arguments import BadArguments, format_arguments, parse_arguments
from toolformer_dag.texts.call_places import CallPlace
from toolformer_dag.texts.calls import Call, MalformedCall, fault, parse_call
from toolformer_dag.texts.chains import chain_text, parse_chain

PARSING = 4
"""Raised when `parsed_call` parses the same bodies differently; no sample is computed again."""
PARSED_BODIES = pl.Schema({"body": pl.String(), "input": pl.String(), "malformed": pl.String()})
"""A body that was sampled, as `ParsedCall` describes it."""


def settings(plan: Plan, lane: Lane) -> Mapping[str, Any]:
    """Return what the sampled calls depend on, apart from the texts; a change makes the table out of date."""
    schema = lane.tool.schema
    named_arguments = {} if schema is None else {"arguments": fingerprint(schema)}
    return {
        **samples_identity(plan, lane.tool.prompt),
        "tau_s": lane.tau_s,  # the least p_i of a position
        "k": lane.k,  # positions per text
        "m": lane.m,  # samples per position
        **named_arguments,
        "tool": lane.tool.name,
        "parsing": PARSING,  # versions of the code
        "places": call_places.VERSION,
    }


@dataclass(frozen=True, slots=True)
class TextChunk:
    """Texts that lack p_i or samples, and what is stored of them.

    - `texts`: text_digest and text; or places after calls (PLACES)
    - `measured` (POSITIONS): the p_i of the texts that have some
    - `stored_samples` (SAMPLE_KEY): the requested samples that need not be drawn again
    """

    texts: pl.DataFrame
    measured: pl.DataFrame
    stored_samples: pl.DataFrame


def chunks(worker: Worker, output: TableOutput, shard: str, claimed: Claimed) -> Planned:
    """Plan what the model has to compute for the texts of a shard: p_i, or samples (see `plan_samples`)."""
    texts = _select_distinct_texts(output.lane_table("heuristic_subset").read(shard))
    return plan_samples(worker, SampleStore(worker, output.lane), texts, claimed)


def plan_samples(worker: Worker, store: SampleStore, texts: pl.DataFrame, claimed: Claimed) -> Planned:
    """Plan what the model has to compute for a shard's texts, in chunks: what `store` lacks to sample calls in them.

    That is p_i, the probability of a call at each position i of a text, or samples: what the model writes as calls at
    the most probable positions.

    texts: (text_digest, text) of distinct texts; of a ChainedSampleStore places after earlier calls (PLACES), which
        count as texts.
    claimed: texts that earlier shards of this run plan already; the texts that are planned here are added.
    """
    limits = choose_chunk_limits(worker.plan, "proposer")
    requested = store.requested(texts)  # the samples that there should be, stored or not
    missing = _claim_missing(store, requested, claimed)  # adds its texts to `claimed`
    with_tokens = texts.with_columns(tokens=store.estimate_tokens())
    batches = split_texts_into_chunks(with_tokens, missing.texts, size=limits.texts, tokens=limits.tokens)
    chunks = [_build_chunk(store, batch, missing.stored_samples) for batch in batches]
    return Planned(chunks, missing.work(text_count=texts.height))


class _Missing(NamedTuple):
    """What is missing of the requested samples, and what is stored.

    - `texts`: (text_digest, whole) of the texts that lack something; `whole`: nothing is stored, not even their p_i
    - `stored_samples`: the keys of the requested samples that are stored
    """

    texts: pl.DataFrame
    stored_samples: pl.DataFrame

    def work(self, text_count: int) -> Work:
        """Count the texts to compute from scratch, and the texts and samples of which stored values are reused.

        text_count: how many texts there are, missing or not.
        """
        computed_texts = self.texts.filter("whole").height  # `whole`: nothing of the text is stored
        return Work(
            computed=Counter(texts=computed_texts),
            reused=Counter(texts=text_count - computed_texts, samples=self.stored_samples.height),
        )


def _claim_missing(store: SampleStore, requested: RequestedSamples, claimed: Claimed) -> _Missing:
    """Return what a store lacks of the requested samples, without the texts that are claimed; claim the others."""
    missing_samples = store.samples.missing(requested.keys)
    stored_samples = requested.keys.join(missing_samples, on=SAMPLE_KEY, how="anti")
    incomplete = claim(claimed, store.samples.name, _select_incomplete_texts(requested, missing_samples))
    return _Missing(_with_whole(incomplete, requested), stored_samples)


def _with_whole(texts: pl.DataFrame, requested: RequestedSamples) -> pl.DataFrame:
    """Add the column `whole`, which `split_texts_into_chunks` reads: nothing of the text is stored, not even p_i."""
    unmeasured = requested.unmeasured_texts["text_digest"]
    return texts.with_columns(whole=pl.col("text_digest").is_in(unmeasured.implode()))


def _select_incomplete_texts(requested: RequestedSamples, missing_samples: pl.DataFrame) -> pl.DataFrame:
    """Return the distinct text_digest of the texts that lack p_i or one of the `missing_samples` (SAMPLE_KEY)."""
    without_probabilities = requested.unmeasured_texts.select("text_digest")
    without_samples = missing_samples.select("text_digest")
    return pl.concat([without_probabilities, without_samples]).unique(maintain_order=True)


def _build_chunk(store: SampleStore, texts: pl.DataFrame, stored_samples: pl.DataFrame) -> Chunk:
    """Return a chunk of work: `texts` (with their estimated `tokens`), and what is already stored of them."""
    payload = TextChunk(
        texts=texts.drop("tokens"),
        measured=store.positions.stored(texts.select("text_digest")),
        stored_samples=stored_samples.join(texts, on="text_digest", how="semi").select(SAMPLE_KEY),
    )
    return Chunk(units=texts.height, payload=payload, tokens=float(texts["tokens"].sum()))


def compute(worker: Worker, output: TableOutput, chunk: TextChunk) -> Work:
    """Compute the p_i or samples that the texts of a chunk lack, and store them."""
    return compute_samples(worker, output.lane, SampleStore(worker, output.lane), chunk)


def compute_samples(worker: Worker, lane: Lane, store: SampleStore, chunk: TextChunk) -> Work:
    """Sample calls in the texts of a chunk with the model, and append what is new to the row stores.

    Stored are p_i, the probability of a call at each position i of a text, and the samples at the chosen positions.
    Returns the tokens that went through the model, the number of new samples, and the backend that the model ran on.
    """
    engine = worker.engine("proposer")
    meter = EngineMeter(engine)
    requests = _build_requests(chunk)
    proposals = engine.propose(
        store.prompt,
        requests,
        tau_s=lane.tau_s,  # the least p_i of a position
        k=lane.k,  # positions per text
        m=lane.m,  # samples per position
        sampling=worker.plan.settings.sampling,
        finetuned=worker.plan.start is not None,  # a later round, which starts from a finetuned model
    )
    return meter.work(samples=store.append(requests, proposals))


def _build_requests(chunk: TextChunk) -> list[ProposalRequest]:
    """Return a request to the engine for each text of a chunk, with what is stored of the text."""
    # p_i: the probability of a call at each position of a text. Texts for which it was not computed have no entry.
    probabilities_of = dict(zip(chunk.measured["text_digest"], chunk.measured["probabilities"], strict=True))
    sample_keys_of = chunk.stored_samples.rows_by_key("text_digest")  # text_digest -> [(position, sample), ...]
    requests = []
    for row in chunk.texts.iter_rows(named=True):
        digest = row["text_digest"]
        stored_samples = frozenset(sample_keys_of.get(digest, ()))
        requests.append(_build_request(row, probabilities_of.get(digest), stored_samples))
    return requests


def _build_request(
    row: Mapping[str, Any], probabilities: pl.Series | None, stored_samples: frozenset[tuple[int, int]]
) -> ProposalRequest:
    """Return the request to sample calls in a text, or one further call at a place after earlier calls.

    row: text_digest and text; a place also has `position`, the token of the text before which the earlier calls stand,
        and `before`, these calls as JSON.
    probabilities: the stored p_i, of a call at each position; None where they have to be computed.
    stored_samples: (position, sample) of the samples that need not be drawn again.
    """
    return ProposalRequest(
        text=row["text"],
        digest=row["text_digest"],
        probabilities=None if probabilities is None else probabilities.to_numpy(),
        stored=stored_samples,
        calls=chain_text(parse_chain(row.get("before"))),  # "" for a plain text
        behind=row.get("position", 0),
    )


def rows(worker: Worker, output: TableOutput, shard: str) -> PartRows:
    """Return a row per stored sample of each text of a shard: a call, or why the sample is discarded.

    `rejected` also counts texts without a sample, by reason. Raises StorageError if stored samples were damaged.
    """
    subset = output.lane_table("heuristic_subset").read(shard)
    store = SampleStore(worker, output.lane)
    stored = samples_of_texts(output, store, _select_distinct_texts(subset))
    rows_of_texts = _build_rows(output.lane, subset, stored)
    # The losses are computed by the judge, which may be another model with other tokens.
    placed = _move_to_judge_tokens(worker, rows_of_texts)
    discarded_samples = count_by_reason(placed.rows)
    texts_without_position = _count_without_position(subset, stored)
    rejected = discarded_samples + texts_without_position + placed.rejected  # the last are inside a token of the judge
    return PartRows([output.stage.shaped(placed.rows).sort(CALL_KEY)], rejected=rejected, stores=store.names)


class SamplesOfTexts(NamedTuple):
    """What a SampleStore holds of some texts, or of places after calls (PLACES)."""

    positions: pl.DataFrame  # CHOSEN_POSITIONS: where calls were sampled
    samples: pl.DataFrame  # SAMPLES
    refused: pl.DataFrame  # (text_digest, reason) of the texts that the engine refused


def samples_of_texts(output: TableOutput, store: SampleStore, texts: pl.DataFrame) -> SamplesOfTexts:
    """Read the samples (what the model wrote as calls) of texts, the positions they were drawn at, and refused texts.

    Raises StorageError if some were damaged since they were computed: then a sample is missing, or the probabilities of
    a text, without which its positions are not known.

    texts: (text_digest, text) of distinct texts; of a ChainedSampleStore places after earlier calls (PLACES).
    """
    requested = store.requested(texts)  # the positions and samples that there should be
    samples = store.samples.stored(requested.keys)
    missing_count = requested.keys.height - samples.height + requested.unmeasured_texts.height
    require_whole(output, "samples", missing_count)  # raises StorageError unless it is 0
    return SamplesOfTexts(positions=requested.positions, samples=samples, refused=store.refused(texts))


def _build_rows(lane: Lane, subset: pl.DataFrame, stored: SamplesOfTexts) -> pl.DataFrame:
    """Return a row per text and sample; a text that stands in several documents has its samples in each.

    subset: the texts of a shard (heuristic_subset).
    """
    samples = _with_calls(lane, stored.samples)  # adds `input`, and `malformed`, why the sample is no call
    texts_with_positions = subset.join(stored.positions, on="text_digest")
    table = texts_with_positions.join(samples, on=("text_digest", "position"))
    return table.with_columns(
        char_offset=pl.col("offset") + pl.col("char"),  # of the text in its document, and of the call in the text
        reason=pl.coalesce("reason", "malformed"),  # why the sample was discarded, else why its body is no call
        position="judged_position",  # the token from which on the loss is computed, not the one sampled before
        source=pl.lit(MODEL),
        words=pl.lit(None, pl.String),  # only a rule's calls have some
    )


def _select_distinct_texts(subset: pl.DataFrame) -> pl.DataFrame:
    """Return (text_digest, text) of the distinct texts among rows of heuristic_subset."""
    return subset.select("text_digest", "text").unique("text_digest", maintain_order=True)


def _with_calls(lane: Lane, samples: pl.DataFrame) -> pl.DataFrame:
    """Parse samples (SAMPLES); add the columns `input`, of the call, and `malformed`, why the body is no valid call."""
    bodies = samples["body"].drop_nulls().unique()
    parsed = pl.DataFrame([parsed_call(lane, body) for body in bodies], schema=PARSED_BODIES, orient="row")
    return samples.join(parsed, on="body", how="left")


class ParsedCall(NamedTuple):
    """What was written between the brackets of a call, read as a call of a lane's tool."""

    body: str
    input: str | None  # named arguments in the form in which tables write them; None where it is no call
    reason: str | None  # why it is no call of the tool, or a call that a text cannot hold; else None


def parsed_call(lane: Lane, body: str) -> ParsedCall:
    """Parse the text between the brackets, such as `Calculator(1 + 2)`, as a call of the lane's tool.

    The result has an input, or the reason why it is no call of the tool. It has both for named arguments that can be
    read here, but not from a text that the call is written into.
    """
    try:
        call = parse_call(body)
        if call.tool != lane.tool.name:
            return ParsedCall(body, input=None, reason="other_tool")
        return _parse_arguments(lane, body, call)
    except (MalformedCall, BadArguments) as error:
        return ParsedCall(body, input=None, reason=error.reason)


def _parse_arguments(lane: Lane, body: str, call: Call) -> ParsedCall:
    """Return a call of the lane's tool with its named arguments in one form, so that equal calls have equal inputs.

    A tool without named arguments keeps the input. Raises BadArguments.
    """
    schema = lane.tool.schema
    if schema is None:
        return ParsedCall(body, input=call.input, reason=None)
    arguments = parse_arguments(call.input, schema)
    uniform_input = format_arguments(arguments, schema)
    why_unwritable = fault(Call(call.tool, uniform_input))  # why a text cannot hold the call; None for most
    return ParsedCall(body, input=uniform_input, reason=why_unwritable)


def _count_without_position(subset: pl.DataFrame, stored: SamplesOfTexts) -> Rejected:
    """Count the texts (heuristic_subset) without a position: by why the engine refused them, else as no_position."""
    without = subset.join(stored.positions, on="text_digest", how="anti")
    without = without.join(stored.refused, on="text_digest", how="left")
    return count_by_reason(without.with_columns(pl.col("reason").fill_null("no_position")))


def build_judge_place_finder(worker: Worker, text: str) -> Callable[[int], CallPlace | None]:
    """Return a function from a character of a text to the place of a call before it; None if no token begins there.

    The tokens are those of the judge, the model that computes the losses.
    """
    [tokens] = worker.encoding().texts([text])
    return partial(tokens.place_at, text)


class _PlacedSamples(NamedTuple):
    """Samples at token positions of the judge (the model that computes losses), and the dropped ones, counted."""

    rows: pl.DataFrame
    rejected: Rejected


def _move_to_judge_tokens(worker: Worker, table: pl.DataFrame) -> _PlacedSamples:
    """Move samples to the token positions of the judge (the model that computes losses), if another model sampled them.

    A sample is dropped as inside_a_token if no token of the judge begins at its character, or if an earlier sample of
    the same number has moved to the same position.

    table: text, offset (of the text in its document), char (of the call in its text), and the columns of STAGE.
    """
    if not worker.plan.has_own_proposer:
        return _PlacedSamples(table, rejected=Counter())
    table = _with_places_of_judge(worker, table)
    has_place = pl.col("position").is_not_null()
    is_first = pl.struct(CALL_KEY).is_first_distinct()  # CALL_KEY: text, the new position, and number of the sample
    placed = table.filter(has_place & is_first)
    dropped = table.filter(~(has_place & is_first)).with_columns(reason=pl.lit("inside_a_token"))
    return _PlacedSamples(placed, count_by_reason(dropped))


def _with_places_of_judge(worker: Worker, table: pl.DataFrame) -> pl.DataFrame:
    """Set `position` and `char_offset` of samples by the judge's tokens; null where none begins at their character."""
    places = _find_places_of_samples(worker, table)
    positions = [place.position if place else None for place in places]
    chars = [place.offset if place else None for place in places]
    return table.with_columns(
        position=pl.Series(positions, dtype=pl.Int32),
        char_offset=pl.col("offset") + pl.Series(chars, dtype=pl.Int64),
    )


def _find_places_of_samples(worker: Worker, table: pl.DataFrame) -> list[CallPlace | None]:
    """Return the place of each sample (text, char) among the judge's tokens; None where none begins there."""
    place_in = {text: build_judge_place_finder(worker, text) for text in table["text"].unique()}
    return [place_in[text](char) for text, char in table.select("text", "char").iter_rows()]


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
