"""The texts of C* with their calls, read from the warehouse as a stream."""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from toolformer_dag.files import StorageError
from toolformer_dag.lake.queries import run_sql, sql_text
from toolformer_dag.lake.warehouse import opened
from toolformer_dag.texts.calls import Call, PlacedCall, format_call, placed_calls, take_out

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


class InconsistentCorpus(StorageError):
    """A text of C* whose calls are not those of the warehouse's other tables."""


@dataclass(frozen=True, slots=True)
class ScoredCall:
    """A scored call in a text. `tool`, `shard`, `segment`, `position` and `sample`, with the text's digest: its key.

    `name`: the tool's name in the text; `offset`: the character of the text without calls before which it stands.
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

    def written(self) -> str:
        """Return e(c, r)."""
        return format_call(Call(self.name, self.input), self.result)


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


def corpus_texts(database: Path, names: Mapping[str, str], preferences: bool = False) -> Iterator[CorpusText]:
    """Yield the texts of C* by digest and segment; memory holds a batch, and DuckDB what its sorting takes.

    `names`: lane -> the tool's name in the text. `preferences`: also read what preference pairs need. Raises
    WarehouseError, and InconsistentCorpus where the texts and the kept calls do not belong together.
    """
    with opened(database) as connection:
        run_sql(connection, SQL, {"preferences": preferences})
        for batch in connection.sql(TEXTS).to_arrow_reader(BATCH):
            yield from (_text(row, names) for row in batch.to_pylist())


def _text(row: Mapping[str, Any], names: Mapping[str, str]) -> CorpusText:
    scored = _calls(row["kept"], row["offset"], names)
    kept = {PlacedCall(call.offset, Call(call.name, call.input), call.result): call for call in scored}
    text = row["text_with_calls"]
    try:
        calls = tuple(kept[placed] for placed in placed_calls(text, names.values()))
        if len(calls) != row["calls"] or take_out(text, names.values()) != row["text"]:
            raise ValueError(f"it has {row['calls']}, of which {len(calls)} are calls to tools in the settings")
    except (KeyError, ValueError) as error:
        raise InconsistentCorpus(
            f"text {row['segment']} of document {row['digest']} in augmented_corpus has other calls than "
            f"filtered_calls ({error}); run `toolformer-dag run`, then export again"
        ) from error
    origin = (row["digest"], row["segment"], row["shard"], row["url"], row["split"])
    rivals = tuple(_calls(row["least_helpful"], row["offset"], names))
    return CorpusText(*origin, text, row["text"], calls, rivals)


def _calls(rows: Collection[Mapping[str, Any]] | None, offset: int, names: Mapping[str, str]) -> Iterator[ScoredCall]:
    for row in rows or ():
        if row["tool"] in names:
            fields = {name: value for name, value in row.items() if name != "char_offset"}
            yield ScoredCall(name=names[row["tool"]], offset=row["char_offset"] - offset, **fields)
