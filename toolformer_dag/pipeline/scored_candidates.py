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
    CALL_ID_COLUMNS,
    CALL_KEY,
    CHAR_OFFSET,
    P_API,
    SAMPLED_INPUT,
    SOURCE,
    WORDS,
    ByChunk,
    Chunk,
    ClaimedKeys,
    Column,
    InWarehouse,
    PartRows,
    Planned,
    RejectionCounts,
    Stage,
    TableOutput,
    Work,
    count_rejected_rows,
)
from toolformer_dag.computing.stored_rows import (
    choose_chunk_limits,
    claim_keys,
    require_no_lost_rows,
    split_texts_into_chunks,
)
from toolformer_dag.computing.worker import Worker
from toolformer_dag.identity import fingerprint
from toolformer_dag.model.requests import ProposalRequest
from toolformer_dag.pipeline.sample_store import (
    SAMPLE_KEY_COLUMNS,
    RequestedSamples,
    SampleStore,
    collect_samples_identity,
)
from toolformer_dag.pipeline.work_counts import EngineMeter
from toolformer_dag.settings.tool_settings import MODEL_SOURCE
from toolformer_dag.texts import call_places
from toolformer_dag.texts.arguments import BadArguments, format_arguments, parse_arguments
from toolformer_dag.texts.call_places import CallPlace
from toolformer_dag.texts.calls import Call, MalformedCall, find_call_fault, parse_call
from toolformer_dag.texts.chains import format_chain_text, parse_chain

PARSING = 4
"""Raised when `parse_call_body` parses the same bodies differently; no sample is computed again."""
PARSED_BODY_SCHEMA = pl.Schema({"body": pl.String(), "input": pl.String(), "malformed": pl.String()})
"""A body that was sampled, as `ParsedCall` describes it."""


def settings(plan: Plan, lane: Lane) -> Mapping[str, Any]:
    """Collect the settings that the sampled calls depend on. If one of them changes, the table is out of date."""
    schema = lane.tool.arguments_schema
    named_arguments = {} if schema is None else {"arguments": fingerprint(schema)}
    return {
        **collect_samples_identity(plan, lane.tool.prompt),
        "tau_s": lane.tau_s,  # the least p_i of a position
        "k": lane.k,  # positions per text
        "m": lane.m,  # samples per position
        **named_arguments,
        "tool": lane.tool.name,
        "parsing": PARSING,  # versions of the code
        "places": call_places.CALL_PLACES_VERSION,
    }


@dataclass(frozen=True, slots=True)
class TextChunk:
    """Texts that lack samples or p_i (the probability of a call at position i), and what is stored of them.

    Attributes:
        texts: The texts, in the columns text_digest and text; or places after calls (PLACE_SCHEMA).
        measured_texts: The p_i of the texts that have some, in the columns POSITION_SCHEMA.
        stored_sample_keys: The requested samples that need not be drawn again, in the columns SAMPLE_KEY_COLUMNS.
    """

    texts: pl.DataFrame
    measured_texts: pl.DataFrame
    stored_sample_keys: pl.DataFrame


def chunks(worker: Worker, output: TableOutput, shard: str, claimed_keys: ClaimedKeys) -> Planned:
    """Plan what the model has to compute for the texts of a shard: p_i, or samples (see `plan_samples`)."""
    texts = _select_distinct_texts(output.get_lane_table("heuristic_subset").read_part(shard))
    return plan_samples(worker, SampleStore(worker, output.lane), texts, claimed_keys)


def plan_samples(worker: Worker, sample_store: SampleStore, texts: pl.DataFrame, claimed_keys: ClaimedKeys) -> Planned:
    """Plan what the model has to compute to sample calls in the texts of a shard, without what is stored already.

    The model computes the probability p_i that a call begins at each position i of a text, and samples: what it writes
    as a call at the likeliest positions.

    Args:
        sample_store: Holds what is computed already.
        texts: The distinct texts, in the columns text_digest and text. For a ChainedSampleStore they are places after
            earlier calls, in the columns PLACE_SCHEMA.
        claimed_keys: The texts that earlier shards of this run plan to compute. They are left out here, and those
            planned here are added.

    Returns:
        The texts to compute, in chunks, and how many texts and samples are computed and reused.
    """
    requested = sample_store.choose_requested_samples(texts)  # the samples that there should be, stored or not
    # The texts that lack something, which are added to `claimed_keys`, and the samples that are stored already.
    missing_work = _claim_missing_samples(sample_store, requested, claimed_keys)

    limits = choose_chunk_limits(worker.plan, "proposer")
    texts_with_tokens = texts.with_columns(tokens=sample_store.estimate_max_tokens())
    batches = split_texts_into_chunks(
        texts_with_tokens, missing_work.incomplete_texts, max_texts=limits.max_texts, max_tokens=limits.max_tokens
    )

    chunks = [_build_chunk(sample_store, batch, missing_work.stored_sample_keys) for batch in batches]
    return Planned(chunks, missing_work.count_work(text_count=texts.height))


class _MissingSamples(NamedTuple):
    """What is missing of the requested samples, and what is stored.

    Attributes:
        incomplete_texts: The texts that lack something, in the columns text_digest and `whole`: whether nothing of the
            text is stored, not even its p_i.
        stored_sample_keys: The keys of the requested samples that are stored.
    """

    incomplete_texts: pl.DataFrame
    stored_sample_keys: pl.DataFrame

    def count_work(self, text_count: int) -> Work:
        """Count the work: the texts that are computed from scratch, and the texts and samples that are reused.

        Args:
            text_count: The number of all texts, whether something of them is missing or not.
        """
        computed_texts = self.incomplete_texts.filter("whole").height  # `whole`: nothing of the text is stored
        reused_texts = text_count - computed_texts
        return Work(
            computed_rows_by_kind=Counter(texts=computed_texts),
            reused_rows_by_kind=Counter(texts=reused_texts, samples=self.stored_sample_keys.height),
        )


def _claim_missing_samples(
    sample_store: SampleStore, requested_samples: RequestedSamples, claimed_keys: ClaimedKeys
) -> _MissingSamples:
    """Find the texts that lack samples or p_i (the probability that a call begins at position i), and claim them.

    Later shards of this run leave the claimed texts out, although they may contain them too.

    Args:
        sample_store: Holds what is computed already.
        requested_samples: The samples that there should be.
        claimed_keys: The texts that earlier shards compute, which are left out. The others are added to it.

    Returns:
        The texts that are claimed here, and the keys of the requested samples that are stored.
    """
    row_store = sample_store.sample_store
    missing_samples = row_store.find_missing_keys(requested_samples.sample_keys)
    stored_samples = requested_samples.sample_keys.join(missing_samples, on=SAMPLE_KEY_COLUMNS, how="anti")

    incomplete_texts = _select_incomplete_texts(requested_samples, missing_samples)
    claimed_texts = claim_keys(claimed_keys, row_store.name, incomplete_texts)

    # `whole` says whether nothing of a text is stored.
    texts_with_whole = _with_whole_column(claimed_texts, requested_samples)
    return _MissingSamples(texts_with_whole, stored_samples)


def _with_whole_column(incomplete_texts: pl.DataFrame, requested_samples: RequestedSamples) -> pl.DataFrame:
    """Add the column `whole`, which `split_texts_into_chunks` reads: nothing of the text is stored, not even p_i."""
    unmeasured = requested_samples.unmeasured_texts["text_digest"]
    return incomplete_texts.with_columns(whole=pl.col("text_digest").is_in(unmeasured.implode()))


def _select_incomplete_texts(requested_samples: RequestedSamples, missing_sample_keys: pl.DataFrame) -> pl.DataFrame:
    """Return the distinct text_digest of the texts that lack their p_i or one of the missing samples.

    Args:
        missing_sample_keys: The samples that are not stored, in the columns SAMPLE_KEY_COLUMNS.
    """
    without_probabilities = requested_samples.unmeasured_texts.select("text_digest")
    without_samples = missing_sample_keys.select("text_digest")
    return pl.concat([without_probabilities, without_samples]).unique(maintain_order=True)


def _build_chunk(sample_store: SampleStore, texts: pl.DataFrame, stored_sample_keys: pl.DataFrame) -> Chunk:
    """Build a chunk of work for the model: texts in which it is to sample calls, and what is stored of them already.

    `measured_texts` are the stored probabilities that a call begins at each position. They are not computed again.

    Args:
        texts: The texts of the chunk, with the estimated number of their tokens in the column `tokens`.
        stored_sample_keys: The keys of the samples that are already stored, which may include those of other texts.
    """
    payload = TextChunk(
        texts=texts.drop("tokens"),
        measured_texts=sample_store.position_store.read_stored_rows(texts.select("text_digest")),
        stored_sample_keys=stored_sample_keys.join(texts, on="text_digest", how="semi").select(SAMPLE_KEY_COLUMNS),
    )
    return Chunk(unit_count=texts.height, payload=payload, estimated_tokens=float(texts["tokens"].sum()))


def compute(worker: Worker, output: TableOutput, chunk: TextChunk) -> Work:
    """Compute the p_i or samples that the texts of a chunk lack, and store them."""
    return compute_samples(worker, output.lane, SampleStore(worker, output.lane), chunk)


def compute_samples(worker: Worker, lane: Lane, sample_store: SampleStore, chunk: TextChunk) -> Work:
    """Sample calls in the texts of a chunk with the model, and store what is new.

    New are probabilities p_i (of a call at position i of a text) and the samples at the chosen positions.

    Returns:
        The number of tokens that the model read, the number of new samples, and the backend that the model ran on.
    """
    engine = worker.get_engine("proposer")
    meter = EngineMeter(engine)  # counts the tokens from now on

    requests = _build_proposal_requests(chunk)
    proposals = engine.propose(
        sample_store.prompt,
        requests,
        tau_s=lane.tau_s,  # only positions with a higher p_i are chosen
        k=lane.k,  # positions per text
        m=lane.m,  # samples per position
        sampling=worker.plan.settings.sampling,
        finetuned=worker.plan.previous_plan is not None,  # a later round, which starts from a finetuned model
    )

    sample_count = sample_store.append_proposals(requests, proposals)
    return meter.measure_work(samples=sample_count)


def _build_proposal_requests(chunk: TextChunk) -> list[ProposalRequest]:
    """Build the requests to the model for the texts of a chunk, one per text, with what is stored of the text."""
    # The probabilities of a call at each position. A text for which they are not stored has no entry.
    probabilities_by_text = dict(
        zip(chunk.measured_texts["text_digest"], chunk.measured_texts["probabilities"], strict=True)
    )
    # text_digest -> [(position, sample), ...]
    sample_keys_by_text = chunk.stored_sample_keys.rows_by_key("text_digest")

    requests = []
    for row in chunk.texts.iter_rows(named=True):
        digest = row["text_digest"]
        stored_samples = frozenset(sample_keys_by_text.get(digest, ()))
        request = _build_proposal_request(row, probabilities_by_text.get(digest), stored_samples)
        requests.append(request)
    return requests


def _build_proposal_request(
    text_row: Mapping[str, Any], probabilities: pl.Series | None, stored_sample_keys: frozenset[tuple[int, int]]
) -> ProposalRequest:
    """Build the request to sample calls in a text, or to sample a further call after earlier calls.

    Args:
        text_row: `text` and `text_digest`. For a further call it also has `before`, the earlier calls as JSON, and
            `position`, the index of the token of the text before which they stand.
        probabilities: The stored probability of a call at each position, None if it has to be computed.
        stored_sample_keys: The samples that need not be drawn again, each as (position, number of the sample).
    """
    return ProposalRequest(
        text=text_row["text"],
        digest=text_row["text_digest"],
        probabilities=None if probabilities is None else probabilities.to_numpy(),
        stored_samples=stored_sample_keys,
        earlier_calls=format_chain_text(parse_chain(text_row.get("before"))),  # "" for a plain text
        earlier_calls_position=text_row.get("position", 0),
    )


def rows(worker: Worker, output: TableOutput, shard: str) -> PartRows:
    """Read the samples of a shard's texts (what the model wrote as calls of the tool), and parse them.

    Returns:
        A row per text and sample: a call, or the reason why the sample is discarded. The discarded samples are counted
        by reason in `rejection_counts`, as are the texts without a position at which a call could be sampled.

    Raises:
        StorageError: Stored samples were damaged.
    """
    texts = output.get_lane_table("heuristic_subset").read_part(shard)
    store = SampleStore(worker, output.lane)
    stored_samples = read_stored_samples(output, store, _select_distinct_texts(texts))
    sample_rows = _build_sample_rows(output.lane, texts, stored_samples)

    # The losses are computed by the judge, which may be another model with other tokens.
    placed_samples = _move_samples_to_judge_tokens(worker, sample_rows)

    discarded_samples = count_rejected_rows(placed_samples.rows)
    texts_without_position = _count_texts_without_position(texts, stored_samples)
    # `placed_samples.rejected` counts samples that have no row.
    rejection_counts = discarded_samples + texts_without_position + placed_samples.rejected

    call_rows = output.stage.shape_frame(placed_samples.rows).sort(CALL_KEY)
    return PartRows([call_rows], rejection_counts=rejection_counts, store_names=store.store_names)


class SamplesOfTexts(NamedTuple):
    """The stored samples of some texts, or of places after calls (PLACE_SCHEMA).

    Attributes:
        positions: Where calls were sampled, in the columns CHOSEN_POSITION_SCHEMA.
        samples: What the model wrote there, in the columns SAMPLE_SCHEMA.
        refused_texts: The texts that the engine refused, in the columns text_digest and reason.
    """

    positions: pl.DataFrame
    samples: pl.DataFrame
    refused_texts: pl.DataFrame


def read_stored_samples(output: TableOutput, sample_store: SampleStore, texts: pl.DataFrame) -> SamplesOfTexts:
    """Read what is stored of some texts: the positions at which calls were sampled, and the samples.

    A sample is what the model wrote as a call at a position.

    Args:
        sample_store: Holds the positions and samples.
        texts: The distinct texts, in the columns text_digest and text. For a ChainedSampleStore they are places after
            earlier calls, in the columns PLACE_SCHEMA.

    Returns:
        The positions and samples, and the texts that the model could not take, with the reason.

    Raises:
        StorageError: A sample or the positions of a text are missing, because they were damaged after they had been
            computed.
    """
    requested = sample_store.choose_requested_samples(texts)  # the positions and samples that there should be
    samples = sample_store.sample_store.read_stored_rows(requested.sample_keys)

    # An unmeasured text is one whose probabilities of calls are missing, so that its positions are unknown.
    missing_samples = requested.sample_keys.height - samples.height
    missing_count = missing_samples + requested.unmeasured_texts.height
    require_no_lost_rows(output, "samples", missing_count)  # raises StorageError unless it is 0

    return SamplesOfTexts(
        positions=requested.positions, samples=samples, refused_texts=sample_store.read_refused_texts(texts)
    )


def _build_sample_rows(lane: Lane, text_rows: pl.DataFrame, stored_samples: SamplesOfTexts) -> pl.DataFrame:
    """Combine the texts of a shard with the calls that were sampled in them.

    Args:
        text_rows: One row per text and document, from the table heuristic_subset. Equal texts have the same
            `text_digest`.
        stored_samples: The positions at which calls were sampled, and the samples.

    Returns:
        One row per text and sample. A text that occurs in several documents has its samples in each.
    """
    # Adds the columns `input` and `malformed`: why the sample is not a valid call, null if it is one.
    samples = _with_parsed_calls(lane, stored_samples.samples)

    texts_with_positions = text_rows.join(stored_samples.positions, on="text_digest")
    sample_rows = texts_with_positions.join(samples, on=("text_digest", "position"))
    return sample_rows.with_columns(
        # Where the call stands in the document: the start of the text plus the character within the text.
        char_offset=pl.col("offset") + pl.col("char"),
        # Why the sample was discarded, or else why it is not a valid call.
        reason=pl.coalesce("reason", "malformed"),
        # From here on `position` is the token from which the loss is computed, not the token sampled before.
        position="judged_position",
        source=pl.lit(MODEL_SOURCE),
        words=pl.lit(None, pl.String),  # only calls that a rule proposed have words
    )


def _select_distinct_texts(text_rows: pl.DataFrame) -> pl.DataFrame:
    """Return the distinct texts among rows of heuristic_subset, in the columns text_digest and text."""
    return text_rows.select("text_digest", "text").unique("text_digest", maintain_order=True)


def _with_parsed_calls(lane: Lane, samples: pl.DataFrame) -> pl.DataFrame:
    """Parse samples (SAMPLE_SCHEMA), and add the columns `input` and `malformed`, why the body is no valid call."""
    distinct_bodies = samples["body"].drop_nulls().unique()
    parsed_calls = [parse_call_body(lane, body) for body in distinct_bodies]
    parsed_bodies = pl.DataFrame(parsed_calls, schema=PARSED_BODY_SCHEMA, orient="row")
    return samples.join(parsed_bodies, on="body", how="left")


class ParsedCall(NamedTuple):
    """The text between the brackets of a call, read as a call of a lane's tool.

    Attributes:
        body: The text between the brackets.
        input: The input of the call, with named arguments in the form in which tables write them. None if it is no
            call.
        reason: Why it is no call of the tool, or a call that no text can hold. Else None.
    """

    body: str
    input: str | None
    reason: str | None


def parse_call_body(lane: Lane, body: str) -> ParsedCall:
    """Parse the text between the brackets of a call, such as "Calculator(1 + 2)", as a call of the lane's tool.

    Returns:
        The call's input, or the reason why this is no call of the tool. It has both if the arguments can be parsed, but
        no text can hold the call: it could not be read back from the text.
    """
    try:
        call = parse_call(body)
        if call.tool != lane.tool.name:
            return ParsedCall(body, input=None, reason="other_tool")
        return _parse_named_arguments(lane, body, call)
    except (MalformedCall, BadArguments) as error:
        return ParsedCall(body, input=None, reason=error.reason)


def _parse_named_arguments(lane: Lane, body: str, call: Call) -> ParsedCall:
    """Write the named arguments of a call in a uniform way, so that equal calls have equal inputs.

    If the lane's tool has no named arguments, the input stays as it is.

    Raises:
        BadArguments: The arguments cannot be parsed.
    """
    schema = lane.tool.arguments_schema
    if schema is None:
        return ParsedCall(body, input=call.input, reason=None)

    arguments = parse_arguments(call.input, schema)
    uniform_input = format_arguments(arguments, schema)

    why_unwritable = find_call_fault(Call(call.tool, uniform_input))  # why no text can hold the call, None for most
    return ParsedCall(body, input=uniform_input, reason=why_unwritable)


def _count_texts_without_position(text_rows: pl.DataFrame, stored_samples: SamplesOfTexts) -> RejectionCounts:
    """Count the texts (heuristic_subset) without a position: by why the engine refused them, else as no_position."""
    without = text_rows.join(stored_samples.positions, on="text_digest", how="anti")
    without = without.join(stored_samples.refused_texts, on="text_digest", how="left")
    return count_rejected_rows(without.with_columns(pl.col("reason").fill_null("no_position")))


def build_judge_place_finder(worker: Worker, text: str) -> Callable[[int], CallPlace | None]:
    """Return a function that finds the place of a call before a character of a text.

    It returns None if no token begins there. The tokens are those of the judge, the model that computes the losses.
    """
    [tokens] = worker.get_encoding().encode_texts([text])
    return partial(tokens.find_call_place, text)


class _PlacedSamples(NamedTuple):
    """Samples at token positions of the judge, the model that computes losses.

    Attributes:
        rows: The samples.
        rejected: How many samples were dropped, by (shard, reason).
    """

    rows: pl.DataFrame
    rejected: RejectionCounts


def _move_samples_to_judge_tokens(worker: Worker, samples: pl.DataFrame) -> _PlacedSamples:
    """Move samples to the token positions of the judge, the model that computes losses.

    The model that sampled them may split texts into other tokens. If it is the judge itself, they stay as they are.
    Otherwise a sample is dropped, with the reason inside_a_token, if no token of the judge begins at its character, or
    if an earlier sample with the same number was moved to the same position.

    Args:
        samples: The samples, in the columns of STAGE and `text`, `offset` (the start of the text in its document) and
            `char` (the start of the call in the text).

    Returns:
        The moved samples, and the number of dropped ones.
    """
    if not worker.plan.has_separate_proposer:
        return _PlacedSamples(samples, rejected=Counter())

    moved_samples = _with_judge_places(worker, samples)
    has_place = pl.col("position").is_not_null()
    is_first = pl.struct(CALL_KEY).is_first_distinct()  # CALL_KEY: text, the new position, and number of the sample

    kept_samples = moved_samples.filter(has_place & is_first)
    dropped_samples = moved_samples.filter(~(has_place & is_first)).with_columns(reason=pl.lit("inside_a_token"))
    return _PlacedSamples(kept_samples, count_rejected_rows(dropped_samples))


def _with_judge_places(worker: Worker, samples: pl.DataFrame) -> pl.DataFrame:
    """Compute where samples stand among the tokens of the judge, the model that computes losses.

    Args:
        worker: Gives the tokens of the judge.
        samples: The samples. `offset` is where their text begins in its document.

    Returns:
        The table with new values in `position` and `char_offset` (the character of the document). They are null for a
        sample if no token of the judge begins at its character.
    """
    places = _find_places_of_samples(worker, samples)
    positions = [place.position if place else None for place in places]
    offsets_in_text = [place.char_offset if place else None for place in places]
    return samples.with_columns(
        position=pl.Series(positions, dtype=pl.Int32),
        char_offset=pl.col("offset") + pl.Series(offsets_in_text, dtype=pl.Int64),
    )


def _find_places_of_samples(worker: Worker, samples: pl.DataFrame) -> list[CallPlace | None]:
    """Return the place of each sample among the judge's tokens. None if no token begins at its character.

    Args:
        samples: The samples, with the columns `text` and `char`, the character of the text before which they stand.
    """
    place_finder_by_text = {text: build_judge_place_finder(worker, text) for text in samples["text"].unique()}

    places = []
    for text, char_offset in samples.select("text", "char").iter_rows():
        find_place = place_finder_by_text[text]
        places.append(find_place(char_offset))
    return places


STAGE = Stage(
    name="scored_candidates",
    description="Up to k positions with p_i > tau_s per text, m sampled calls each; discarded ones have a reason.",
    columns={
        **CALL_ID_COLUMNS,
        "source": SOURCE,
        "char_offset": CHAR_OFFSET,
        "p_api": P_API,
        "body": Column(pl.String(), "what was sampled between the brackets; null where they were not closed"),
        "input": SAMPLED_INPUT,
        "words": WORDS,
        "reason": Column(pl.String(), "why the sample was discarded; null for a call"),
    },
    key_columns=CALL_KEY,
    collect_settings=settings,
    reads=("heuristic_subset",),
    pool="gpu",
    kinds=frozenset({"pytorch", "parquet"}),
    row_maker=ByChunk(chunks, compute, rows),
    warehouse_form=InWarehouse("candidates"),
)
