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
    """Collect the settings that the sampled calls depend on. If one of them changes, the table is out of date."""
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
    """Plan what the model has to compute to sample calls in the texts of a shard.

    This is what is not stored yet: the probabilities p_i of a call at each position i of a text, or samples. A sample
    is what the model writes as a call at one of the most probable positions.

    Args:
        store: Holds the values that are computed already.
        texts: The distinct texts, in the columns text_digest and text. For a ChainedSampleStore they are places after
            earlier calls, in the columns PLACES.
        claimed: The texts that earlier shards of this run plan already, which are left out here. The newly planned ones
            are added to it.

    Returns:
        The texts to compute, in chunks, and how many texts and samples are computed and reused.
    """
    requested = store.requested(texts)  # the samples that there should be, stored or not
    missing = _claim_missing(store, requested, claimed)  # adds its texts to `claimed`

    limits = choose_chunk_limits(worker.plan, "proposer")
    texts_with_tokens = texts.with_columns(tokens=store.estimate_tokens())
    batches = split_texts_into_chunks(texts_with_tokens, missing.texts, size=limits.texts, tokens=limits.tokens)

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
        """Count the work: the texts that are computed from scratch, and the texts and samples that are reused.

        Args:
            text_count: The number of all texts, whether something of them is missing or not.
        """
        computed_texts = self.texts.filter("whole").height  # `whole`: nothing of the text is stored
        reused_texts = text_count - computed_texts
        return Work(
            computed=Counter(texts=computed_texts),
            reused=Counter(texts=reused_texts, samples=self.stored_samples.height),
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
    """Build a chunk of work for the model.

    Args:
        texts: The texts of the chunk, with the estimated number of their tokens in the column `tokens`.
        stored_samples: The keys of the samples that are already stored, which may include those of other texts.
    """
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
    """Sample calls in the texts of a chunk with the model, and store what is new.

    New are probabilities p_i (of a call at position i of a text) and the samples at the chosen positions.

    Returns:
        The number of tokens that the model read, the number of new samples, and the backend that the model ran on.
    """
    engine = worker.engine("proposer")
    meter = EngineMeter(engine)  # counts the tokens from now on

    requests = _build_requests(chunk)
    proposals = engine.propose(
        store.prompt,
        requests,
        tau_s=lane.tau_s,  # only positions with a higher p_i are chosen
        k=lane.k,  # positions per text
        m=lane.m,  # samples per position
        sampling=worker.plan.settings.sampling,
        finetuned=worker.plan.start is not None,  # a later round, which starts from a finetuned model
    )

    sample_count = store.append(requests, proposals)
    return meter.work(samples=sample_count)


def _build_requests(chunk: TextChunk) -> list[ProposalRequest]:
    """Build the requests to the model for the texts of a chunk, one per text, with what is stored of the text."""
    # The probabilities of a call at each position. A text for which they are not stored has no entry.
    probabilities_by_text = dict(zip(chunk.measured["text_digest"], chunk.measured["probabilities"], strict=True))
    sample_keys_by_text = chunk.stored_samples.rows_by_key("text_digest")  # text_digest -> [(position, sample), ...]

    requests = []
    for row in chunk.texts.iter_rows(named=True):
        digest = row["text_digest"]
        stored_samples = frozenset(sample_keys_by_text.get(digest, ()))
        request = _build_request(row, probabilities_by_text.get(digest), stored_samples)
        requests.append(request)
    return requests


def _build_request(
    row: Mapping[str, Any], probabilities: pl.Series | None, stored_samples: frozenset[tuple[int, int]]
) -> ProposalRequest:
    """Build the request to sample calls in a text, or to sample a further call after earlier calls.

    Args:
        row: `text` and `text_digest`. For a further call it also has `before`, the earlier calls as JSON, and
            `position`, the index of the token of the text before which they stand.
        probabilities: The stored probability of a call at each position, None if it has to be computed.
        stored_samples: The samples that need not be drawn again, each as (position, number of the sample).
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
    """Read the stored samples of a shard's texts, and parse them as calls of the tool.

    Returns:
        A row per text and sample: a call, or the reason why the sample is discarded. The discarded samples are counted
        by reason in `rejected`, as are the texts without a position at which a call could be sampled.

    Raises:
        StorageError: Stored samples were damaged.
    """
    texts = output.lane_table("heuristic_subset").read(shard)
    store = SampleStore(worker, output.lane)
    stored = samples_of_texts(output, store, _select_distinct_texts(texts))
    sample_rows = _build_rows(output.lane, texts, stored)

    # The losses are computed by the judge, which may be another model with other tokens.
    placed = _move_to_judge_tokens(worker, sample_rows)

    discarded_samples = count_by_reason(placed.rows)
    texts_without_position = _count_without_position(texts, stored)
    rejected = discarded_samples + texts_without_position + placed.rejected  # the last have no row
    return PartRows([output.stage.shaped(placed.rows).sort(CALL_KEY)], rejected=rejected, stores=store.names)


class SamplesOfTexts(NamedTuple):
    """What a SampleStore holds of some texts, or of places after calls (PLACES)."""

    positions: pl.DataFrame  # CHOSEN_POSITIONS: where calls were sampled
    samples: pl.DataFrame  # SAMPLES
    refused: pl.DataFrame  # (text_digest, reason) of the texts that the engine refused


def samples_of_texts(output: TableOutput, store: SampleStore, texts: pl.DataFrame) -> SamplesOfTexts:
    """Read what is stored of some texts: the positions at which calls were sampled, and the samples.

    A sample is what the model wrote as a call at a position.

    Args:
        store: Holds the positions and samples.
        texts: The distinct texts, in the columns text_digest and text. For a ChainedSampleStore they are places after
            earlier calls, in the columns PLACES.

    Returns:
        The positions and samples, and the texts that the model could not take, with the reason.

    Raises:
        StorageError: A sample or the positions of a text are missing, because they were damaged after they had been
            computed.
    """
    requested = store.requested(texts)  # the positions and samples that there should be
    samples = store.samples.stored(requested.keys)

    # An unmeasured text is one whose probabilities of calls are missing, so that its positions are unknown.
    missing_samples = requested.keys.height - samples.height
    missing_count = missing_samples + requested.unmeasured_texts.height
    require_whole(output, "samples", missing_count)  # raises StorageError unless it is 0

    return SamplesOfTexts(positions=requested.positions, samples=samples, refused=store.refused(texts))


def _build_rows(lane: Lane, texts: pl.DataFrame, stored: SamplesOfTexts) -> pl.DataFrame:
    """Combine the texts of a shard with the calls that were sampled in them.

    Args:
        texts: One row per text and document, from the table heuristic_subset. Equal texts have the same `text_digest`.
        stored: The positions at which calls were sampled, and the samples.

    Returns:
        One row per text and sample. A text that occurs in several documents has its samples in each.
    """
    # Adds the columns `input` and `malformed`: why the sample is not a valid call, null if it is one.
    samples = _with_calls(lane, stored.samples)

    texts_with_positions = texts.join(stored.positions, on="text_digest")
    table = texts_with_positions.join(samples, on=("text_digest", "position"))
    return table.with_columns(
        # Where the call stands in the document: the start of the text plus the character within the text.
        char_offset=pl.col("offset") + pl.col("char"),
        # Why the sample was discarded, or else why it is not a valid call.
        reason=pl.coalesce("reason", "malformed"),
        # From here on `position` is the token from which the loss is computed, not the token sampled before.
        position="judged_position",
        source=pl.lit(MODEL),
        words=pl.lit(None, pl.String),  # only calls that a rule proposed have words
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
    """Parse the text between the brackets of a call, such as "Calculator(1 + 2)", as a call of the lane's tool.

    Returns:
        The call's input, or the reason why this is no call of the tool. It has both if the arguments can be parsed, but
        no text can hold the call: it could not be read back from the text.
    """
    try:
        call = parse_call(body)
        if call.tool != lane.tool.name:
            return ParsedCall(body, input=None, reason="other_tool")
        return _parse_arguments(lane, body, call)
    except (MalformedCall, BadArguments) as error:
        return ParsedCall(body, input=None, reason=error.reason)


def _parse_arguments(lane: Lane, body: str, call: Call) -> ParsedCall:
    """Write the named arguments of a call in a uniform way, so that equal calls have equal inputs.

    If the lane's tool has no named arguments, the input stays as it is.

    Raises:
        BadArguments: The arguments cannot be parsed.
    """
    schema = lane.tool.schema
    if schema is None:
        return ParsedCall(body, input=call.input, reason=None)

    arguments = parse_arguments(call.input, schema)
    uniform_input = format_arguments(arguments, schema)

    why_unwritable = fault(Call(call.tool, uniform_input))  # why no text can hold the call, None for most
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
    """Move samples to the token positions of the model that computes losses, which is called the judge.

    The samples stay as they are if the judge has sampled them itself. Otherwise a sample is dropped, with the reason
    inside_a_token, if no token of the judge begins at its character, or if an earlier sample with the same number was
    moved to the same position.

    Args:
        table: The samples, in the columns of STAGE and `text`, `offset` (the start of the text in its document) and
            `char` (the start of the call in the text).

    Returns:
        The moved samples, and the number of dropped ones.
    """
    if not worker.plan.has_own_proposer:
        return _PlacedSamples(table, rejected=Counter())

    moved = _with_places_of_judge(worker, table)
    has_place = pl.col("position").is_not_null()
    is_first = pl.struct(CALL_KEY).is_first_distinct()  # CALL_KEY: text, the new position, and number of the sample

    kept = moved.filter(has_place & is_first)
    dropped = moved.filter(~(has_place & is_first)).with_columns(reason=pl.lit("inside_a_token"))
    return _PlacedSamples(kept, count_by_reason(dropped))


def _with_places_of_judge(worker: Worker, table: pl.DataFrame) -> pl.DataFrame:
    """Compute where samples stand among the tokens of the judge, the model that computes losses.

    Returns:
        The table with new values in `position` and `char_offset`. They are null for a sample if no token of the judge
        begins at its character.
    """
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
