"""Read the texts of C* with their calls and losses from a warehouse, and form preference pairs of the calls."""

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import duckdb

from toolformer_dag.files import StorageError
from toolformer_dag.lake.queries import read_sql_file, run_sql
from toolformer_dag.settings.call_markers import PAPER_MARKERS, CallMarkers
from toolformer_dag.texts.calls import Call, PlacedCall, format_call, placed_calls, take_out
from toolformer_dag.texts.chains import ChainLink, parse_chain

SQL = read_sql_file(__package__, "corpus_texts.sql")
"""Makes the temporary tables that TEXTS reads."""
TEXTS = """
SELECT c.digest, c.segment, c.shard, c."offset", c.text, c.text_with_calls, c.calls, c.split, d.url, kept, least_helpful
FROM augmented_corpus AS c
LEFT JOIN (SELECT shard, digest, url FROM documents) AS d USING (shard, digest)
LEFT JOIN kept_in_text USING (digest, segment)
LEFT JOIN least_helpful_in_text USING (digest, segment)
ORDER BY c.digest, c.segment
"""
BATCH = 1000
"""Texts that are read at once."""


@dataclass(frozen=True, slots=True)
class ScoredCall:
    """A scored call in a text. Each call of a chain is one, with the losses and the delta of the chain.

    Its key is `tool`, `shard`, the digest of its document, `segment`, `position` and `sample`. `delta` is by how many
    nats the call lowers the loss: the smaller of loss_empty (no call) and loss_call (the call without its result), less
    loss_result.
    """

    tool: str  # the key of its lane
    name: str  # the tool's name in the text
    shard: str
    segment: int
    position: int
    sample: int
    offset: int  # the character of the text without calls before which it stands
    input: str
    result: str
    delta: float
    loss_empty: float
    loss_call: float
    loss_result: float

    def written(self, markers: CallMarkers) -> str:
        """Return the call with its result as it stands in a text, such as " [Calculator(84 / 7) -> 12]"."""
        return format_call(Call(self.name, self.input), self.result, markers)


@dataclass(frozen=True, slots=True)
class CorpusText:
    """A text of C* with its calls.

    - `digest`, `segment`: its document, and its number in that
    - `text`: x*, the text with calls
    - `plain`: x, the text without calls
    - `calls`: those in x*, in order
    - `least_helpful`: for each tool and position the scored call with the smallest delta, kept or not; only read for
      preference pairs, else empty
    """

    digest: str
    segment: int
    shard: str
    url: str | None
    split: str
    text: str
    plain: str
    calls: tuple[ScoredCall, ...]
    least_helpful: tuple[ScoredCall, ...] = ()


def corpus_texts(
    connection: duckdb.DuckDBPyConnection,
    tool_names: Mapping[str, str],
    preferences: bool = False,
    markers: CallMarkers = PAPER_MARKERS,
) -> Iterator[CorpusText]:
    """Read the texts of C* (the corpus to finetune on) with their calls.

    Args:
        connection: A database with the tables of the warehouse.
        tool_names: For each lane (a tool with its settings) the name of its tool in texts, such as
            {"calculator": "Calculator"}. A text with calls of other lanes is an error.
        preferences: Whether to fill `least_helpful` too, which only preference pairs need.
        markers: The strings with which calls begin and end in C*.

    Yields:
        The texts, sorted by the digest of their document and their number in it (`segment`).

    Raises:
        duckdb.Error: A query fails.
        StorageError: A text holds other calls than the filter kept, because one of the tables is older.
    """
    run_sql(connection, SQL, {"preferences": preferences})  # makes the temporary tables that TEXTS reads
    for batch in connection.sql(TEXTS).to_arrow_reader(BATCH):
        for row in batch.to_pylist():
            yield _build_corpus_text(row, tool_names, markers)  # raises StorageError


def _build_corpus_text(row: Mapping[str, Any], tool_names: Mapping[str, str], markers: CallMarkers) -> CorpusText:
    """Convert a row of the query TEXTS to a text with its calls.

    Raises:
        StorageError: The text holds other calls than the filter kept, because one of the tables is older.
    """
    try:
        calls = _parse_calls_in_text(row, tool_names, markers)
    except (KeyError, ValueError) as error:
        raise _build_other_calls_error(row, error) from error

    # For preference pairs: the call that lowers the loss least, for each tool and position.
    least_helpful = _iter_scored_calls(row["least_helpful"], row["offset"], tool_names)

    return CorpusText(
        digest=row["digest"],
        segment=row["segment"],
        shard=row["shard"],
        url=row["url"],
        split=row["split"],
        text=row["text_with_calls"],
        plain=row["text"],
        calls=tuple(calls),
        least_helpful=tuple(least_helpful),
    )


def _build_other_calls_error(row: Mapping[str, Any], reason: Exception) -> StorageError:
    """Return the error for a row of TEXTS whose text holds other calls than the filter kept."""
    return StorageError(
        f"text {row['segment']} of document {row['digest']} in augmented_corpus has other calls than "
        f"filtered_calls ({reason}); run `toolformer-dag run`, then this again"
    )


def _parse_calls_in_text(
    row: Mapping[str, Any], tool_names: Mapping[str, str], markers: CallMarkers
) -> list[ScoredCall]:
    """Find the calls in a text, and look up their losses.

    Args:
        row: A row of the query TEXTS. It has the text with and without calls, the kept calls and their number.

    Returns:
        The calls in the order of the text.

    Raises:
        KeyError: The text holds a call that was not kept.
        ValueError: The number of calls is another, or the text without them is not the row's text without calls.
    """
    text_with_calls = row["text_with_calls"]
    names = tool_names.values()
    kept_call_at = _map_places_to_calls(_iter_scored_calls(row["kept"], row["offset"], tool_names))
    calls = [kept_call_at[placed_call] for placed_call in placed_calls(text_with_calls, names, markers)]

    has_all_calls = len(calls) == row["calls"]
    if not has_all_calls or take_out(text_with_calls, names, markers) != row["text"]:
        raise ValueError(f"it has {row['calls']}, of which {len(calls)} are calls to tools in the settings")
    return calls


def _map_places_to_calls(calls: Iterable[ScoredCall]) -> dict[PlacedCall, ScoredCall]:
    """Map each call with its result and its character offset to its losses."""
    return {PlacedCall(call.offset, Call(call.name, call.input), call.result): call for call in calls}


def _iter_scored_calls(
    structs: Collection[Mapping[str, Any]] | None, text_offset: int, tool_names: Mapping[str, str]
) -> Iterator[ScoredCall]:
    """Convert the calls that the query collected for a text.

    A struct stands for a single call or for a chain (several calls in a row at one place). Each call of a
    chain is yielded by itself.

    Args:
        structs: The structs, as corpus_texts.sql builds them. None if the text has no calls.
        text_offset: The character of the document at which the text begins.
        tool_names: For each lane (a tool with its settings) the tool's name in texts. Other lanes are skipped.
    """
    for struct in structs or ():
        lane = struct["tool"]
        if lane not in tool_names:
            continue

        links = parse_chain(struct["chain"])
        if not links:  # a single call
            links = [ChainLink(tool_names[lane], struct["input"], struct["result"])]

        for link in links:
            yield _build_scored_call(struct, link, text_offset)


def _build_scored_call(struct: Mapping[str, Any], link: ChainLink, text_offset: int) -> ScoredCall:
    """Build one call of a struct. Each call of a chain gets the losses that were measured for the whole chain."""
    return ScoredCall(
        tool=struct["tool"],
        name=link.tool,
        shard=struct["shard"],
        segment=struct["segment"],
        position=struct["position"],
        sample=struct["sample"],
        offset=struct["char_offset"] - text_offset,
        input=link.input,
        result=link.result,
        delta=struct["delta"],
        loss_empty=struct["loss_empty"],
        loss_call=struct["loss_call"],
        loss_result=struct["loss_result"],
    )


def iter_preference_pairs(
    text: CorpusText, tau_f: Mapping[str, float], markers: CallMarkers = PAPER_MARKERS
) -> Iterator[dict[str, Any]]:
    """Form pairs of a better and a worse continuation of a text, for training with DPO.

    There are two kinds of pairs:
    - rejected_call: The kept call is better than a rejected one. After "It is",
      " [Calculator(84 / 7) -> 12] 12 weeks" is chosen over " [Calculator(84 - 7) -> 77] 12 weeks".
    - no_call: No call was kept, and the rejected one does harm. After "It is", " late" is chosen over
      " [Calculator(1 + 1) -> 2] late".

    The rejected call is the least helpful one at its position. A position where several calls were kept gives no pair.

    Args:
        tau_f: For each lane (a tool with its settings) the threshold of its filter: the least delta of a kept call,
            which is by how many nats the call lowers the loss.

    Yields:
        Mappings with `prompt`, `chosen`, `rejected`, `kind`, `margin` (in nats), `chosen_call` (None for no_call)
        and `rejected_call`.
    """
    kept_calls_at = Counter(call.offset for call in text.calls)
    kept_call_at = {call.offset: call for call in text.calls}

    for least_helpful in text.least_helpful:
        offset = least_helpful.offset
        if kept_calls_at[offset] > 1:  # a chain, or calls of two tools
            continue

        kept_call = kept_call_at.get(offset)
        if _is_worse(least_helpful, kept_call, tau_f[least_helpful.tool]):
            yield _build_preference_pair(text.plain, least_helpful, kept_call, markers)


def _is_worse(least_helpful: ScoredCall, kept_call: ScoredCall | None, tau_f: float) -> bool:
    """Check whether a call is so much worse than what was kept at its position that the two make a preference pair.

    - If a call was kept there, the other call must be a different call of the same tool, and must have been
      rejected: its delta (by how many nats it lowers the loss) is below the threshold.
    - If no call was kept there, the call must raise the loss by at least the threshold.

    Args:
        least_helpful: The call that may be worse.
        kept_call: The call kept at its position, or None.
        tau_f: The threshold of the filter, in nats.
    """
    if kept_call is None:
        harm = least_helpful.loss_result - least_helpful.loss_empty
        return harm > 0 and harm >= tau_f  # tau_f may be 0

    is_same_call = (least_helpful.input, least_helpful.result) == (kept_call.input, kept_call.result)
    return least_helpful.tool == kept_call.tool and least_helpful.delta < tau_f and not is_same_call


def _build_preference_pair(
    plain: str, rejected: ScoredCall, kept_call: ScoredCall | None, markers: CallMarkers
) -> dict[str, Any]:
    """Build a preference pair: a text that goes on with a better and with a worse call at the same place.

    Args:
        plain: The text without calls.
        rejected: The worse call.
        kept_call: The better call. None if it is better to go on without a call.

    Returns:
        The fields of the pair. `margin` is by how many nats the loss after the rejected call is higher.
    """
    rest = plain[rejected.offset :]
    if kept_call is None:
        kind = "no_call"
        chosen = rest
        chosen_loss = rejected.loss_empty  # of the same place without a call
        chosen_call = None
    else:
        kind = "rejected_call"
        chosen = kept_call.written(markers) + rest
        chosen_loss = kept_call.loss_result
        chosen_call = asdict(kept_call)

    return {
        "prompt": plain[: rejected.offset],
        "rejected": rejected.written(markers) + rest,
        "rejected_call": asdict(rejected),
        "kind": kind,
        "chosen": chosen,
        "margin": rejected.loss_result - chosen_loss,
        "chosen_call": chosen_call,
    }
