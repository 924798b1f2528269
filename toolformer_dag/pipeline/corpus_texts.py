"""The texts of C* with their calls and losses, and the pairs that these give: what training data is written from.

They are read from a database with the tables of the warehouse.
"""

from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import duckdb

from toolformer_dag.files import StorageError
from toolformer_dag.lake.queries import run_sql, sql_text
from toolformer_dag.settings.call_markers import PAPER_MARKERS, CallMarkers
from toolformer_dag.texts.calls import Call, PlacedCall, format_call, placed_calls, take_out
from toolformer_dag.texts.chains import Link, read_chain

SQL = sql_text(__package__, "corpus_texts.sql")
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
    """A scored call in a text. `tool`, `shard`, `segment`, `position` and `sample`, with the text's digest: its key.

    Each call of a chain is one, with the losses and the delta of the chain. `name`: the tool's name in the text;
    `offset`: the character of the text without calls before which it stands.
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

    def written(self, markers: CallMarkers) -> str:
        """Return e(c, r)."""
        return format_call(Call(self.name, self.input), self.result, markers)


@dataclass(frozen=True, slots=True)
class CorpusText:
    """A text of C*: x* (`text`), x (`plain`), its calls in order. `segment`: its number in the document.

    `least_helpful`: of each tool and position the scored call with the smallest delta, kept or not; empty unless asked.
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
    names: Mapping[str, str],
    preferences: bool = False,
    markers: CallMarkers = PAPER_MARKERS,
) -> Iterator[CorpusText]:
    """Yield the texts of C* by digest and segment; memory holds a batch, and DuckDB what its sorting takes.

    `connection`: a database with the tables of the warehouse. `names`: lane -> the tool's name in the text; `markers`:
    those of C*. `preferences`: also read what preference pairs need. Raises duckdb.Error, and StorageError where the
    texts and the kept calls do not belong together.
    """
    run_sql(connection, SQL, {"preferences": preferences})
    for batch in connection.sql(TEXTS).to_arrow_reader(BATCH):
        yield from (_text(row, names, markers) for row in batch.to_pylist())


def _text(row: Mapping[str, Any], names: Mapping[str, str], markers: CallMarkers) -> CorpusText:
    scored = _calls(row["kept"], row["offset"], names)
    kept = {PlacedCall(call.offset, Call(call.name, call.input), call.result): call for call in scored}
    text = row["text_with_calls"]
    try:
        calls = tuple(kept[placed] for placed in placed_calls(text, names.values(), markers))
        if len(calls) != row["calls"] or take_out(text, names.values(), markers) != row["text"]:
            raise ValueError(f"it has {row['calls']}, of which {len(calls)} are calls to tools in the settings")
    except (KeyError, ValueError) as error:
        raise StorageError(
            f"text {row['segment']} of document {row['digest']} in augmented_corpus has other calls than "
            f"filtered_calls ({error}); run `toolformer-dag run`, then this again"
        ) from error
    origin = (row["digest"], row["segment"], row["shard"], row["url"], row["split"])
    rivals = tuple(_calls(row["least_helpful"], row["offset"], names))
    return CorpusText(*origin, text, row["text"], calls, rivals)


def _calls(rows: Collection[Mapping[str, Any]] | None, offset: int, names: Mapping[str, str]) -> Iterator[ScoredCall]:
    for row in rows or ():
        if row["tool"] in names:
            fields = {name: value for name, value in row.items() if name not in ("char_offset", "chain")}
            at, alone = row["char_offset"] - offset, Link(names[row["tool"]], row["input"], row["result"])
            for link in read_chain(row["chain"]) or [alone]:
                fields |= {"input": link.input, "result": link.result}
                yield ScoredCall(name=link.tool, offset=at, **fields)


def preference_pairs(
    text: CorpusText, tau_f: Mapping[str, float], markers: CallMarkers = PAPER_MARKERS
) -> Iterator[dict[str, Any]]:
    """Yield pairs for DPO and its like: the same text goes on in two ways, of which one was measured to be better.

    - rejected_call: a kept call of x* against the scored call of the same tool at the same position that helps least,
      where that one was rejected (delta < tau_f) and is not the same call.
    - no_call: no call against the scored call that helps least, where no call was kept, and where this call raises the
      loss over no call by tau_f or more (loss_result - loss_empty).

    Places where a chain was kept give none. Both ways end with the rest of x, without other calls, as the losses
    were measured. A pair has `prompt`, `chosen`, `rejected`, `kind`, `margin` (nats), `chosen_call` (None for no_call)
    and `rejected_call`. `tau_f`: of each lane.
    """
    counts = Counter(call.offset for call in text.calls)
    kept = {call.offset: call for call in text.calls if counts[call.offset] == 1}
    chains = counts.keys() - kept.keys()
    for rival in text.least_helpful:
        chosen = kept.get(rival.offset)
        if rival.offset not in chains and _is_worse(rival, chosen, tau_f[rival.tool]):
            yield _pair(text.plain, rival, chosen, markers)


def _is_worse(rival: ScoredCall, chosen: ScoredCall | None, tau_f: float) -> bool:
    """Return whether a call was rejected beside the kept call at its place, or hurts where none was kept."""
    if chosen is None:
        harm = rival.loss_result - rival.loss_empty
        return harm > 0 and harm >= tau_f
    same_call = (rival.input, rival.result) == (chosen.input, chosen.result)
    return rival.tool == chosen.tool and rival.delta < tau_f and not same_call


def _pair(plain: str, rival: ScoredCall, chosen: ScoredCall | None, markers: CallMarkers) -> dict[str, Any]:
    prompt, rest = plain[: rival.offset], plain[rival.offset :]
    pair = {"kind": "no_call", "chosen": rest, "margin": rival.loss_result - rival.loss_empty, "chosen_call": None}
    if chosen is not None:
        pair = {
            "kind": "rejected_call",
            "chosen": chosen.written(markers) + rest,
            "margin": rival.loss_result - chosen.loss_result,
            "chosen_call": asdict(chosen),
        }
    return {"prompt": prompt, "rejected": rival.written(markers) + rest, "rejected_call": asdict(rival), **pair}
