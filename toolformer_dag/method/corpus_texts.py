"""Read the texts of C* with their calls and losses from a warehouse, and form preference pairs of the calls."""

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import duckdb

from toolformer_dag.files import StorageError
from toolformer_dag.lake.queries import read_sql_file, run_sql
from toolformer_dag.settings.call_markers import PAPER_MARKERS, CallMarkers
from toolformer_dag.texts.calls import Call, PlacedCall, format_call, parse_placed_calls, remove_calls
from toolformer_dag.texts.chains import ChainLink, parse_chain

TEMPORARY_TABLES_SQL = read_sql_file(__package__, "corpus_texts.sql")
"""Makes the temporary tables that TEXTS_QUERY reads."""
TEXTS_QUERY = """
SELECT c.digest, c.segment, c.shard, c."offset", c.text, c.text_with_calls, c.calls, c.split, d.url, kept, least_helpful
FROM augmented_corpus AS c
LEFT JOIN (SELECT shard, digest, url FROM documents) AS d USING (shard, digest)
LEFT JOIN kept_in_text USING (digest, segment)
LEFT JOIN least_helpful_in_text USING (digest, segment)
ORDER BY c.digest, c.segment
"""
TEXTS_PER_BATCH = 1000
"""Texts that are read at once."""


@dataclass(frozen=True, slots=True)
class ScoredCall:
    """A scored call in a text. Each call of a chain is one, with the losses and the delta of the chain.

    Its key is `tool`, `shard`, the digest of its document, `segment`, `position` and `sample`.

    Attributes:
        tool: The key of its lane (a tool with its settings).
        name: The tool's name in the text.
        segment: The number of the text in its document.
        position: The index of the token before which the call was scored.
        sample: The number of the call among those at its position.
        offset: The character of the text without calls before which the call stands.
        delta: By how many nats the call lowers the loss: the smaller of `loss_empty` and `loss_call`, less
            `loss_result`.
        loss_empty: The loss without the call.
        loss_call: The loss after the call without its result.
        loss_result: The loss after the call with its result.
    """

    tool: str
    name: str
    shard: str
    segment: int
    position: int
    sample: int
    offset: int
    input: str
    result: str
    delta: float
    loss_empty: float
    loss_call: float
    loss_result: float

    def format_with_result(self, markers: CallMarkers) -> str:
        """Return the call with its result as it stands in a text, such as " [Calculator(84 / 7) -> 12]"."""
        return format_call(Call(self.name, self.input), self.result, markers)


@dataclass(frozen=True, slots=True)
class CorpusText:
    """A text of C* (the corpus to finetune on) with its calls.

    Attributes:
        digest: The digest of its document.
        segment: Its number in the document.
        text_with_calls: The text with calls (x*).
        text_without_calls: The text without calls (x).
        calls: The calls in x*, in order.
        least_helpful_calls: For each tool and position the scored call with the smallest delta, kept or not. They are
            only read for preference pairs, and empty otherwise.
    """

    digest: str
    segment: int
    shard: str
    url: str | None
    split: str
    text_with_calls: str
    text_without_calls: str
    calls: tuple[ScoredCall, ...]
    least_helpful_calls: tuple[ScoredCall, ...] = ()


def iter_corpus_texts(
    connection: duckdb.DuckDBPyConnection,
    tool_name_by_lane: Mapping[str, str],
    with_least_helpful: bool = False,
    markers: CallMarkers = PAPER_MARKERS,
) -> Iterator[CorpusText]:
    """Read the texts of C* (the corpus to finetune on) with their calls.

    Args:
        connection: A database with the tables of the warehouse.
        tool_name_by_lane: For each lane (a tool with its settings) the name of its tool in texts, such as
            {"calculator": "Calculator"}. A text with calls of other lanes is an error.
        with_least_helpful: Whether to fill `least_helpful_calls` too, which only preference pairs need.
        markers: The strings with which calls begin and end in C*.

    Yields:
        The texts, sorted by the digest of their document and their number in it (`segment`).

    Raises:
        duckdb.Error: A query fails.
        StorageError: A text holds other calls than the filter kept, because one of the tables is older.
    """
    # Makes the temporary tables that TEXTS_QUERY reads.
    run_sql(connection, TEMPORARY_TABLES_SQL, {"preferences": with_least_helpful})

    for batch in connection.sql(TEXTS_QUERY).to_arrow_reader(TEXTS_PER_BATCH):
        for row in batch.to_pylist():
            yield _build_corpus_text(row, tool_name_by_lane, markers)  # raises StorageError


def _build_corpus_text(
    row: Mapping[str, Any], tool_name_by_lane: Mapping[str, str], markers: CallMarkers
) -> CorpusText:
    """Convert a row of TEXTS_QUERY to a text with its calls.

    Args:
        row: A row of TEXTS_QUERY.
        tool_name_by_lane: For each lane (a tool with its settings) the tool's name in texts.
        markers: The strings with which calls begin and end.

    Raises:
        StorageError: The text holds other calls than the filter kept, because one of the tables is older.
    """
    try:
        calls = _parse_calls_in_text(row, tool_name_by_lane, markers)
    except (KeyError, ValueError) as error:
        raise _build_stale_text_error(row, error) from error

    # For preference pairs: the call that lowers the loss least, for each tool and position.
    least_helpful = _iter_scored_calls(row["least_helpful"], row["offset"], tool_name_by_lane)

    return CorpusText(
        digest=row["digest"],
        segment=row["segment"],
        shard=row["shard"],
        url=row["url"],
        split=row["split"],
        text_with_calls=row["text_with_calls"],
        text_without_calls=row["text"],
        calls=tuple(calls),
        least_helpful_calls=tuple(least_helpful),
    )


def _build_stale_text_error(row: Mapping[str, Any], reason: Exception) -> StorageError:
    """Return the error for a row of TEXTS_QUERY whose text holds other calls than the filter kept.

    Args:
        reason: The error that showed it.
    """
    return StorageError(
        f"text {row['segment']} of document {row['digest']} in augmented_corpus has other calls than "
        f"filtered_calls ({reason}); run `toolformer-dag run`, then this again"
    )


def _parse_calls_in_text(
    row: Mapping[str, Any], tool_name_by_lane: Mapping[str, str], markers: CallMarkers
) -> list[ScoredCall]:
    """Find the calls in a text, and look up their losses.

    Args:
        row: A row of TEXTS_QUERY. It has the text with and without calls, the kept calls and their number.

    Returns:
        The calls in the order of the text.

    Raises:
        KeyError: The text holds a call that was not kept.
        ValueError: The number of calls is another, or the text without them is not the row's text without calls.
    """
    text_with_calls = row["text_with_calls"]
    tool_names = tool_name_by_lane.values()

    kept_calls = _iter_scored_calls(row["kept"], row["offset"], tool_name_by_lane)
    kept_call_by_placed_call = _map_placed_call_to_scored_call(kept_calls)

    placed_calls = parse_placed_calls(text_with_calls, tool_names, markers)
    calls = [kept_call_by_placed_call[placed_call] for placed_call in placed_calls]

    # The message names the likely cause: calls to tools that are no longer in the settings are not found in the text.
    has_all_calls = len(calls) == row["calls"]
    if not has_all_calls or remove_calls(text_with_calls, tool_names, markers) != row["text"]:
        raise ValueError(f"it has {row['calls']}, of which {len(calls)} are calls to tools in the settings")
    return calls


def _map_placed_call_to_scored_call(scored_calls: Iterable[ScoredCall]) -> dict[PlacedCall, ScoredCall]:
    """Return the scored calls, by the call as a text shows it: its character, tool, input and result."""
    return {PlacedCall(call.offset, Call(call.name, call.input), call.result): call for call in scored_calls}


def _iter_scored_calls(
    call_structs: Collection[Mapping[str, Any]] | None, text_offset: int, tool_name_by_lane: Mapping[str, str]
) -> Iterator[ScoredCall]:
    """Yield the calls that the query collected for a text.

    A struct stands for a single call or for a chain (several calls in a row at one place). Each call of a chain is
    yielded by itself.

    Args:
        call_structs: The structs, as corpus_texts.sql builds them. None if the text has no calls.
        text_offset: The character of the document at which the text begins.
        tool_name_by_lane: For each lane (a tool with its settings) the tool's name in texts. Other lanes are skipped.
    """
    for struct in call_structs or ():
        lane = struct["tool"]
        if lane not in tool_name_by_lane:
            continue

        links = parse_chain(struct["chain"])
        if not links:  # a single call
            links = [ChainLink(tool_name_by_lane[lane], struct["input"], struct["result"])]

        for link in links:
            yield _build_scored_call(struct, link, text_offset)


def _build_scored_call(call_struct: Mapping[str, Any], chain_link: ChainLink, text_offset: int) -> ScoredCall:
    """Return one call of a struct. Each call of a chain gets the losses that were measured for the whole chain.

    Args:
        call_struct: A scored call or chain, with its key and losses, as corpus_texts.sql builds it.
        chain_link: The call itself, with its tool, input and result.
        text_offset: The character of the document at which the text begins.
    """
    return ScoredCall(
        tool=call_struct["tool"],  # the key of the lane (a tool with its settings) with which the chain begins
        name=chain_link.tool,  # the name of the called tool in the text: in a chain it may be another tool
        shard=call_struct["shard"],
        segment=call_struct["segment"],
        position=call_struct["position"],
        sample=call_struct["sample"],
        offset=call_struct["char_offset"] - text_offset,
        input=chain_link.input,
        result=chain_link.result,
        delta=call_struct["delta"],
        loss_empty=call_struct["loss_empty"],
        loss_call=call_struct["loss_call"],
        loss_result=call_struct["loss_result"],
    )


def iter_preference_pairs(
    text: CorpusText, tau_f_by_lane: Mapping[str, float], markers: CallMarkers = PAPER_MARKERS
) -> Iterator[dict[str, Any]]:
    """Yield pairs of a better and a worse continuation of a text, for training with DPO.

    The worse one has the least helpful call at its position. There are two kinds of pairs, such as these after "It is":
    - rejected_call: " [Calculator(84 / 7) -> 12] 12 weeks", with the kept call, is better than
      " [Calculator(84 - 7) -> 77] 12 weeks".
    - no_call: Where no call was kept, " late" is better than " [Calculator(1 + 1) -> 2] late".

    A position where several calls were kept gives no pair.

    Args:
        tau_f_by_lane: For each lane (a tool with its settings), the threshold of its filter: the least delta of a kept
            call. The delta of a call is by how many nats it lowers the loss.

    Yields:
        Mappings with `prompt`, `chosen`, `rejected`, `kind`, `margin` (in nats), `chosen_call` (None for no_call)
        and `rejected_call`.
    """
    call_count_by_offset = Counter(call.offset for call in text.calls)
    kept_call_by_offset = {call.offset: call for call in text.calls}

    for least_helpful_call in text.least_helpful_calls:
        offset = least_helpful_call.offset
        if call_count_by_offset[offset] > 1:  # a chain, or calls of two tools
            continue

        kept_call = kept_call_by_offset.get(offset)
        tau_f = tau_f_by_lane[least_helpful_call.tool]  # `tool` is the key of the lane
        if _is_worse_than_kept_call(least_helpful_call, kept_call, tau_f):
            yield _build_preference_pair(text.text_without_calls, least_helpful_call, kept_call, markers)


def _is_worse_than_kept_call(least_helpful_call: ScoredCall, kept_call: ScoredCall | None, tau_f: float) -> bool:
    """Return whether a call is so much worse than what was kept at its position that the two make a preference pair.

    - If a call was kept there, the other call must be a different call of the same tool, and must have been
      rejected: its delta (by how many nats it lowers the loss) is below the threshold.
    - If no call was kept there, the call must raise the loss, by at least the threshold.

    Args:
        least_helpful_call: The call that may be worse.
        kept_call: The call kept at its position, or None.
        tau_f: The threshold of the filter, in nats.
    """
    if kept_call is None:
        harm = least_helpful_call.loss_result - least_helpful_call.loss_empty
        return harm > 0 and harm >= tau_f  # tau_f may be 0

    is_same_tool = least_helpful_call.tool == kept_call.tool
    was_rejected = least_helpful_call.delta < tau_f
    is_same_call = (least_helpful_call.input, least_helpful_call.result) == (kept_call.input, kept_call.result)
    return is_same_tool and was_rejected and not is_same_call


def _build_preference_pair(
    text_without_calls: str, rejected_call: ScoredCall, kept_call: ScoredCall | None, markers: CallMarkers
) -> dict[str, Any]:
    """Return a preference pair: a text that goes on with a better and with a worse call at the same place.

    Args:
        rejected_call: The worse call.
        kept_call: The better call. None if it is better to go on without a call.

    Returns:
        The fields of the pair. `prompt` is the text before the call, `chosen` and `rejected` are the two continuations.
        `margin` is by how many nats the loss after the rejected call is higher.
    """
    text_before = text_without_calls[: rejected_call.offset]
    text_after = text_without_calls[rejected_call.offset :]

    if kept_call is None:
        kind = "no_call"
        chosen = text_after
        chosen_loss = rejected_call.loss_empty  # of the same place without a call
        chosen_call = None
    else:
        kind = "rejected_call"
        chosen = kept_call.format_with_result(markers) + text_after
        chosen_loss = kept_call.loss_result
        chosen_call = asdict(kept_call)

    return {
        "prompt": text_before,
        "rejected": rejected_call.format_with_result(markers) + text_after,
        "rejected_call": asdict(rejected_call),
        "kind": kind,
        "chosen": chosen,
        "margin": rejected_call.loss_result - chosen_loss,
        "chosen_call": chosen_call,
    }
