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
    """Yield the texts of C* with their calls, in the order of (digest, segment).

    connection: a database with the tables of the warehouse.
    tool_names: key of the lane (a tool with its settings) -> the tool's name in texts, such as
        {"calculator": "Calculator"}. Calls of other lanes are left out.
    preferences: also read what preference pairs need (`least_helpful`).
    markers: what calls begin and end with in C*, the corpus to finetune on.

    Raises duckdb.Error, and StorageError if the texts hold other calls than the filter kept.
    """
    run_sql(connection, SQL, {"preferences": preferences})  # makes the temporary tables that TEXTS reads
    for batch in connection.sql(TEXTS).to_arrow_reader(BATCH):
        for row in batch.to_pylist():
            yield _build_corpus_text(row, tool_names, markers)  # raises StorageError


def _build_corpus_text(row: Mapping[str, Any], tool_names: Mapping[str, str], markers: CallMarkers) -> CorpusText:
    """Return the text of a row of the query TEXTS, a text of the corpus to finetune on, with its calls.

    It also has, for each tool and position, the single call that lowers the loss least, for preference pairs. Raises
    StorageError if the text holds other calls than the filter kept: one of the tables is older.
    """
    try:
        calls = _parse_calls_in_text(row, tool_names, markers)
    except (KeyError, ValueError) as error:
        raise _build_other_calls_error(row, error) from error
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
    """Parse the calls out of a text, and return them with their losses, in the order of the text.

    row: of the query TEXTS, with the text with and without calls, the kept calls and their number. Raises KeyError for
    a call that was not kept; ValueError if another number of calls is found, or if the text without them differs from
    the row's text without calls.
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
    """Yield the calls of a list of structs, as corpus_texts.sql makes them; each call of a chain by itself.

    structs: a struct per scored call or chain (calls that follow each other at one place); None if the text has none.
    tool_names: key of the lane (a tool with its settings) -> the tool's name in texts; structs of other lanes are left
    out. text_offset: the character of the document at which the text begins.
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
    """Return one call of a scored call or chain, with the losses of the whole."""
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
    """Yield preference pairs, as DPO trains on: two continuations of a text, of which one was measured to be better.

    A pair has `prompt`, `chosen`, `rejected`, `kind`, `margin` (nats), `chosen_call` and `rejected_call`. Kinds:
    - rejected_call: after "It is", " [Calculator(84 / 7) -> 12] 12 weeks" is chosen over
      " [Calculator(84 - 7) -> 77] 12 weeks". The kept call is better than a rejected one.
    - no_call: after "It is", " late" is chosen over " [Calculator(1 + 1) -> 2] late". No call was kept, and this one
      hurts; `chosen_call` is None.
    The rejected call is the least helpful one at its position. Positions with a kept chain, several kept calls at one
    place, give no pair.

    tau_f: key of the lane (a tool with its settings) -> the least delta (by how many nats a call lowers the loss) of a
        kept call.
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
    """Return whether a call is worse than what was kept at its position, so that the two make a preference pair.

    - If a call was kept: whether `least_helpful` is another call of the same tool, and was rejected: its delta, by how
      many nats it lowers the loss, is below the threshold tau_f.
    - If none was kept: whether `least_helpful` raises the loss over no call, by tau_f or more.
    """
    if kept_call is None:
        harm = least_helpful.loss_result - least_helpful.loss_empty
        return harm > 0 and harm >= tau_f  # tau_f may be 0
    is_same_call = (least_helpful.input, least_helpful.result) == (kept_call.input, kept_call.result)
    return least_helpful.tool == kept_call.tool and least_helpful.delta < tau_f and not is_same_call


def _build_preference_pair(
    plain: str, rejected: ScoredCall, kept_call: ScoredCall | None, markers: CallMarkers
) -> dict[str, Any]:
    """Return a preference pair: a text that goes on with a better and with a worse call at the same place.

    plain: the text without calls. rejected: the worse call. kept_call: the better call; None to go on without a call.

    `margin` is by how many nats the loss after the rejected continuation is higher.
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
