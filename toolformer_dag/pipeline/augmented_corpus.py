"""augmented_corpus: C*, the texts with the calls of all tools in them (paper, section 2, "Model Finetuning")."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

import polars as pl

from toolformer_dag.identity import fingerprint
from toolformer_dag.lake.table import WHOLE, Table
from toolformer_dag.pipeline import raw_shards
from toolformer_dag.pipeline.document_cuts import BATCH, Cut, DocumentCuts, Pieces, cutting
from toolformer_dag.pipeline.merging import (
    HELDOUT_SHARE,
    MERGING,
    Dropped,
    Example,
    KeptCall,
    examples,
    split_of,
    text_order,
)
from toolformer_dag.pipeline.plan import Lane, Plan
from toolformer_dag.pipeline.stage import (
    DIGEST,
    SEGMENT,
    SHARD,
    Column,
    PartRows,
    Rejected,
    Stage,
    TableOutput,
    counted,
)
from toolformer_dag.pipeline.update import StaleInput
from toolformer_dag.pipeline.worker import Worker
from toolformer_dag.texts.segments import Segment

NAME = "training/augmented_corpus"
DOCUMENT = ("shard", "digest")
Row = tuple[str, int, str, int, str, str, list[str], int, str]


def settings(plan: Plan, lane: None) -> Mapping[str, Any]:
    """Return what determines the rows beside the kept calls and the documents."""
    tools = {lane.key: lane.tool.name for lane in plan.lanes}
    return {**cutting(plan), "tools": tools, "merging": MERGING, "heldout_share": HELDOUT_SHARE}


def rows(worker: Worker, output: TableOutput, part: str) -> PartRows:
    """Merge the kept calls of all lanes into their documents, cut these into texts, and keep the texts with calls.

    Lanes may have cut a document differently, so calls meet by their character in the document. Taking the calls out of
    `text_with_calls` gives `text` back: a text where it would not is rejected (see `examples`). The record holds
    `examples` per lane, as in Table 2. Raises StaleInput where a document is gone.
    """
    plan = output.plan
    raw = plan.lake.table(raw_shards.NAME)
    tables = [plan.lake.table(f"{lane.key}/filtered_calls") for lane in plan.lanes]
    kept = _brought_home(raw, pl.concat([table.read(WHOLE) for table in tables]))
    calls = kept.filter(_at_home())
    rejected = counted(kept.filter(~_at_home()).with_columns(reason=pl.lit("duplicate_document")))
    cuts = DocumentCuts(worker, Cut(plan.settings.corpus.segment_tokens, worker.tokens().count))
    found = sorted(_rows(_documents(raw, calls), calls, plan.lanes, cuts, rejected))
    table = pl.DataFrame([row for _, row in found], schema=output.stage.schema, orient="row")
    return PartRows([table], rejected, [cuts.name], facts=_table_2(plan.lanes, [row for _, row in found]))


def not_given_back(rows: pl.DataFrame, output: TableOutput) -> int:
    """Count texts that taking the calls out of x* does not give back, byte for byte."""
    from toolformer_dag.texts.calls import take_out

    pairs = rows.select("text_with_calls", "text").iter_rows()
    return sum(take_out(augmented, output.plan.tool_names) != text for augmented, text in pairs)


def _brought_home(raw: Table, kept: pl.DataFrame) -> pl.DataFrame:
    """Calls of a document that lanes met in different shards go to the first of these, where its text is the same."""
    several = kept.filter(pl.col("shard").n_unique().over("digest") > 1)
    if several.is_empty():
        return kept
    found = [(shard, digest, fingerprint(text)) for shard, digest, text in _documents(raw, several)]
    copies = pl.DataFrame(found, schema=[*DOCUMENT, "text"], orient="row").sort(DOCUMENT)
    first = copies.group_by("digest", maintain_order=True).first().rename({"shard": "home"})
    homes = copies.join(first, on=["digest", "text"]).select(*DOCUMENT, "home")
    joined = kept.join(homes, on=DOCUMENT, how="left", maintain_order="left")
    return joined.with_columns(shard=pl.coalesce("home", "shard")).drop("home")


def _at_home() -> pl.Expr:
    """Whether a call's document lies in the first shard that has it: another text under its digest is not used."""
    return pl.col("shard") == pl.col("shard").min().over("digest")


def _documents(raw: Table, calls: pl.DataFrame) -> Iterator[tuple[str, str, str]]:
    """(shard, digest, text) of the documents that have calls."""
    wanted, found = calls.select(DOCUMENT).unique(), 0
    for batch in (batch for shard in _shards(raw, calls) for batch in raw.batches(shard)):
        documents = batch.join(wanted, on=DOCUMENT, how="semi", maintain_order="left")
        found += documents.height
        yield from documents.select(*DOCUMENT, "text").iter_rows()
    if found < wanted.height:
        gone = f"calls of {wanted.height - found} documents that are gone"
        raise StaleInput(NAME, WHOLE, gone, "every tool's filtered_calls")


def _shards(raw: Table, calls: pl.DataFrame) -> list[str]:
    """The shards that hold a document with calls; the others are not read."""
    wanted = set(calls["shard"])
    return [shard for shard in raw.parts() if shard in wanted]


def _rows(
    documents: Iterable[tuple[str, str, str]],
    calls: pl.DataFrame,
    lanes: Sequence[Lane],
    cuts: DocumentCuts,
    rejected: Rejected,
) -> Iterator[tuple[bytes, Row]]:
    """Rows of the corpus with the hash that orders them; counts in `rejected` the calls that are not used."""
    names = {lane.key: lane.tool.name for lane in lanes}
    by_document = calls.partition_by(DOCUMENT, as_dict=True)
    for (shard, digest, text), cut in _with_cuts(documents, cuts):
        pieces = [piece for piece in cut if isinstance(piece, Segment)]
        found = [_kept(row, names) for row in by_document[shard, digest].iter_rows(named=True)]
        for example in examples(pieces, found, list(names.values())):
            if isinstance(example, Dropped):
                rejected[shard, example.reason] += example.calls
            else:
                yield text_order(text), _row(shard, digest, example, split_of(text))


def _with_cuts(
    documents: Iterable[tuple[str, str, str]], cuts: DocumentCuts
) -> Iterator[tuple[tuple[str, str, str], Pieces]]:
    """Each document with its pieces."""
    waiting = iter(documents)
    while some := list(islice(waiting, BATCH)):
        yield from zip(some, cuts.of([text for _, _, text in some]), strict=True)


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


STAGE = Stage(
    name="augmented_corpus",
    description="C*: texts with their calls in them (paper, section 2); without these they are C, byte for byte.",
    columns={
        "digest": DIGEST,
        "segment": SEGMENT,
        "shard": SHARD,
        "offset": Column(pl.Int64(), "character of the document at which the text begins"),
        "text": Column(pl.String(), "x: the text without calls (the baseline's corpus C)"),
        "text_with_calls": Column(pl.String(), "x*: the text with its calls (C*)"),
        "tools": Column(pl.List(pl.String()), "lanes whose calls it holds"),
        "calls": Column(pl.Int32(), "number of calls"),
        "split": Column(pl.String(), "train or heldout"),
    },
    key=("digest", "segment"),
    settings=settings,
    reads=(raw_shards.NAME, "*/filtered_calls"),
    group="training",
    sharded=False,
    kinds=frozenset({"polars", "parquet"}),
    checks={"gives_text_back": not_given_back},
    rows=rows,
)
