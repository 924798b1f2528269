"""augmented_corpus: C*, the texts with the calls of all tools in them (paper, section 2, "Model Finetuning")."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import polars as pl

from toolformer_dag.fingerprint import fingerprint
from toolformer_dag.lane import Lane
from toolformer_dag.stages.cut import Cut
from toolformer_dag.stages.errors import StaleInput
from toolformer_dag.stages.examples import Dropped, Example, KeptCall, examples
from toolformer_dag.stages.publish import Output
from toolformer_dag.stages.rejections import Rejected, counted
from toolformer_dag.stages.report import Clock, StageReport
from toolformer_dag.stages.schema import columns
from toolformer_dag.stages.split import HELDOUT_SHARE, split_of
from toolformer_dag.storage.lake import Lake
from toolformer_dag.storage.partition import WHOLE
from toolformer_dag.storage.table import Table
from toolformer_dag.texts.segments import CUTTING, Segment, segments

STAGE = "augmented_corpus"
GROUP = "training"
RAW = "ccnet/raw_shards"
DOCUMENT = ("shard", "digest")
MERGING = 2  # raised by hand when the same calls and documents would give other texts

Row = tuple[str, int, str, int, str, str, list[str], int, str]


def settings(lanes: Sequence[Lane], cut: Cut) -> dict[str, Any]:
    """What determines the rows beside the kept calls and the documents."""
    return {
        "tools": {lane.key: lane.tool.name for lane in lanes},
        "cutting": CUTTING,
        "merging": MERGING,
        "max_tokens": cut.max_tokens,
        "tokenizer": dict(cut.tokenizer),
        "heldout_share": HELDOUT_SHARE,
    }


def augmented_corpus(lake: Lake, lanes: Sequence[Lane], partitions: Sequence[str], *, cut: Cut) -> StageReport:
    """Merges the kept calls of all lanes into their documents, cuts these into texts, and keeps the texts with calls.

    Lanes may have cut a document differently, so calls meet by their character in the document. Taking the calls out of
    `text_with_calls` gives `text` back: a text where it would not is rejected (see `examples`). The record holds
    `examples` per lane, as in Table 2. Raises StaleInput where a document is gone.
    """
    clock = Clock()
    tables = {lane.key: lake.table(f"{lane.key}/filtered_calls") for lane in lanes}
    raw = lake.table(RAW)
    versions: dict[str, Any] = {table.name: table.pointer(WHOLE).data_version for table in tables.values()}
    versions[RAW] = {partition: raw.pointer(partition).data_version for partition in partitions}
    kept = _brought_home(raw, partitions, pl.concat([table.read(WHOLE) for table in tables.values()]))
    calls = kept.filter(_at_home())
    rejected = counted(kept.filter(~_at_home()).with_columns(reason=pl.lit("duplicate_document")))
    rows = list(_rows(_documents(raw, partitions, calls), calls, lanes, cut, rejected))
    table = pl.DataFrame(rows, schema=columns(STAGE), orient="row").sort("digest", "segment")
    output = Output(lake, STAGE, GROUP, WHOLE)
    made = settings(lanes, cut)
    return output.publish([table], made, versions, rejected, clock, facts=_table_2(lanes, rows))


def _brought_home(raw: Table, partitions: Sequence[str], kept: pl.DataFrame) -> pl.DataFrame:
    """Calls of a document that lanes met in different shards go to the first of these, where its text is the same."""
    several = kept.filter(pl.col("shard").n_unique().over("digest") > 1)
    if several.is_empty():
        return kept
    found = [(shard, digest, fingerprint(text)) for shard, digest, text in _documents(raw, partitions, several)]
    copies = pl.DataFrame(found, schema=[*DOCUMENT, "text"], orient="row").sort(DOCUMENT)
    first = copies.group_by("digest", maintain_order=True).first().rename({"shard": "home"})
    homes = copies.join(first, on=["digest", "text"]).select(*DOCUMENT, "home")
    joined = kept.join(homes, on=DOCUMENT, how="left", maintain_order="left")
    return joined.with_columns(shard=pl.coalesce("home", "shard")).drop("home")


def _at_home() -> pl.Expr:
    """Whether a call's document lies in the first shard that has it: another text under its digest is not used."""
    return pl.col("shard") == pl.col("shard").min().over("digest")


def _documents(raw: Table, partitions: Sequence[str], calls: pl.DataFrame) -> Iterator[tuple[str, str, str]]:
    """(shard, digest, text) of the documents that have calls."""
    wanted, found = calls.select(DOCUMENT).unique(), 0
    for batch in (batch for partition in partitions for batch in raw.batches(partition)):
        documents = batch.join(wanted, on=DOCUMENT, how="semi", maintain_order="left")
        found += documents.height
        yield from documents.select(*DOCUMENT, "text").iter_rows()
    if found < wanted.height:
        gone = f"calls of {wanted.height - found} documents that are gone"
        raise StaleInput(STAGE, WHOLE, gone, "every tool's filtered_calls")


def _rows(
    documents: Iterable[tuple[str, str, str]],
    calls: pl.DataFrame,
    lanes: Sequence[Lane],
    cut: Cut,
    rejected: Rejected,
) -> Iterator[Row]:
    """Rows of the corpus; counts in `rejected` the calls that are not used."""
    names = {lane.key: lane.tool.name for lane in lanes}
    by_document = calls.partition_by(DOCUMENT, as_dict=True)
    for shard, digest, text in documents:
        pieces = [piece for piece in segments(text, cut.max_tokens, cut.count_tokens) if isinstance(piece, Segment)]
        found = [_kept(row, names) for row in by_document[shard, digest].iter_rows(named=True)]
        for example in examples(pieces, found, list(names.values())):
            if isinstance(example, Dropped):
                rejected[shard, example.reason] += example.calls
            else:
                yield _row(shard, digest, example, split_of(digest))


def _kept(row: Mapping[str, Any], names: Mapping[str, str]) -> KeptCall:
    return KeptCall(row["tool"], names[row["tool"]], row["char_offset"], row["input"], row["result"], row["delta"])


def _row(shard: str, digest: str, example: Example, split: str) -> Row:
    piece, tools = example.segment, sorted({call.tool for call in example.calls})
    texts = (piece.text, example.text_with_calls)
    return (digest, piece.index, shard, piece.offset, *texts, tools, len(example.calls), split)


def _table_2(lanes: Sequence[Lane], rows: Sequence[Row]) -> dict[str, dict[str, int]]:
    """Examples per lane, and texts in all."""
    counts = Counter(tool for row in rows for tool in row[6])
    return {"examples": {**{lane.key: counts[lane.key] for lane in lanes}, "all": len(rows)}}
