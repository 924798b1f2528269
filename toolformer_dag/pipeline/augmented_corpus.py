"""augmented_corpus: C*, the texts with the calls of all tools in them (paper, section 2, "Model Finetuning").

Beside them, where `training.plain_texts` asks for it, texts in which no call helped. It has a part per shard. As a
whole it is read in the order of the hashes of its documents' texts, however these are spread over shards
(`corpus_rows`): the training texts are.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain, islice
from typing import Any

import polars as pl

from toolformer_dag.computing.plan import Lane, Plan
from toolformer_dag.computing.shown import Shown
from toolformer_dag.computing.stage import (
    DIGEST,
    SEGMENT,
    SHARD,
    TEXT_KEY,
    ByPart,
    Check,
    Column,
    InputsOf,
    InWarehouse,
    PartRows,
    Rejected,
    Stage,
    StageAsset,
    StaleInput,
    TableOutput,
    versions,
)
from toolformer_dag.computing.worker import Worker
from toolformer_dag.lake.table import WHOLE, Lake, MissingPart
from toolformer_dag.pipeline import raw_shards
from toolformer_dag.pipeline.document_cuts import DocumentCuts, cutting
from toolformer_dag.pipeline.merging import (
    HELDOUT_SHARE,
    MERGING,
    Dropped,
    Example,
    KeptCall,
    examples,
    plain_examples,
    split_of,
    text_order,
)
from toolformer_dag.settings.setting_types import determining
from toolformer_dag.texts.calls import take_out
from toolformer_dag.texts.chains import Link, read_chain

NAME = "training/augmented_corpus"
DOCUMENT = ("shard", "digest")
ORDER = ("document_hash", "digest", "segment")
Row = tuple[int, str, int, str, int, str, str, list[str], int, str]


def settings(plan: Plan, lane: None) -> Mapping[str, Any]:
    """Return what determines the rows beside the kept calls and the documents."""
    written = {**determining(plan.settings.training, "plain_texts"), **determining(plan.settings.model, "markers")}
    return {**cutting(plan), "tools": plan.lane_names, "merging": MERGING, "heldout_share": HELDOUT_SHARE, **written}


def reads(plan: Plan, lane: None) -> tuple[str, ...]:
    """Return the tables that are read: the texts that tools want too, where some of these stand in C* as they are."""
    wanted = [_wanted(plan, lane) for lane in plan.lanes if plan.settings.training.plain_texts]
    return (raw_shards.NAME, *_of_lanes(plan, "filtered_calls"), *wanted)


def _of_lanes(plan: Plan, table: str) -> list[str]:
    """Name a table of all lanes whose calls C* holds."""
    return [f"{lane.key}/{table}" for lane in plan.all_lanes]


def _wanted(plan: Plan, lane: Lane) -> str:
    """Name the table of all texts that a lane wants: later projects have those alone in which no call was kept."""
    return f"{plan.projects[0].lane_of(lane.tool).key}/heuristic_subset"


def inputs(output: TableOutput) -> InputsOf:
    """Return what tells the versions of a shard's documents and kept calls."""
    return versions({name: output.plan.lake.table(name) for name in output.depends_on})


def rows(worker: Worker, output: TableOutput, part: str) -> PartRows:
    """Merge the kept calls of all lanes into a shard's documents, cut these into texts, keep the texts with calls.

    With `training.plain_texts` texts without calls stand beside them (`plain_texts`).

    Lanes may have cut a document differently, so calls meet by their character in the document. Taking the calls out of
    `text_with_calls` gives `text` back: a text where it would not is rejected (see `examples`). Memory: kept calls and
    texts of the shard. Raises StaleInput where a document is gone.
    """
    rejected = Rejected()
    plan, tables = output.plan, _of_lanes(output.plan, "filtered_calls")
    calls = pl.concat([plan.lake.table(name).read(part) for name in tables])
    plain = plain_texts(plan, part, calls)
    cuts = DocumentCuts(worker, plan.settings.corpus.segment_tokens, worker.encoding().lengths)
    documents = _documents(plan, pl.concat([calls.select(DOCUMENT), plain.select(DOCUMENT)]))
    corpus = list(_rows(documents, calls, plain, plan, cuts, rejected))
    table = pl.DataFrame(corpus, schema=output.stage.schema, orient="row").sort(ORDER)
    return PartRows([table], rejected, [cuts.name])


def plain_texts(plan: Plan, shard: str, calls: pl.DataFrame) -> pl.DataFrame:
    """Choose texts of a shard in which no call of any lane stays: (shard, digest, offset).

    Each lane gives so many of the texts that it wanted as `training.plain_texts` says, in proportion to its texts with
    calls: those with the smallest hashes, and none that another lane gave. Parts of a text are rounded by a hash, so
    that shards with few calls give their share too. `calls`: the shard's kept calls. Memory: the places of the lanes'
    texts in the shard.
    """
    share, lake = plan.settings.training.plain_texts, plan.lake
    chosen = pl.DataFrame(schema={"shard": pl.String, "digest": pl.String, "offset": pl.Int64})
    if not share:
        return chosen
    inside = pl.col("char_offset").is_between("offset", pl.col("offset") + pl.col("length"), closed="left")
    for lane in plan.lanes:
        table = lake.table(_wanted(plan, lane)).scan([shard])
        columns = (*TEXT_KEY, "offset", "text_digest", pl.col("text").str.len_chars().alias("length"))
        texts = table.select(columns).collect()
        held = texts.join(calls.select("digest", "char_offset", "tool"), on="digest").filter(inside)
        own = {one.key for one in plan.all_lanes if one.tool.key == lane.tool.key}
        wanted = share * held.filter(pl.col("tool").is_in(own)).select(TEXT_KEY).n_unique()
        rounded = int(wanted + int.from_bytes(text_order(f"{lane.tool.key} {shard}"), "big") / 2**64)
        free = texts.join(held, on=TEXT_KEY, how="anti").join(chosen, on=chosen.columns, how="anti")
        distinct = free.sort("text_digest", *TEXT_KEY).unique("text_digest", keep="first", maintain_order=True)
        chosen = pl.concat([chosen, distinct.head(rounded).select(chosen.columns)])
    return chosen


def corpus_rows(lake: Lake, columns: Sequence[str]) -> pl.LazyFrame:
    """Scan columns of C*, in its order. Raises MissingPart, DamagedPart."""
    table = lake.table(NAME)
    if not table.parts():
        raise MissingPart(NAME, WHOLE)
    return table.scan().sort(ORDER).select(columns)


def corpus_batches(lake: Lake) -> Iterator[pl.DataFrame]:
    """Yield the rows of C*, a file at a time, shard by shard. Raises MissingPart, DamagedPart."""
    table = lake.table(NAME)
    for part in table.parts():
        if table.pointer(part).rows:
            yield from table.batches(part)


def not_given_back(rows: pl.DataFrame, output: TableOutput) -> int:
    """Count texts that taking the calls out of x* does not give back, byte for byte."""
    pairs, names = rows.select("text_with_calls", "text").iter_rows(), output.plan.lane_names.values()
    markers = output.plan.settings.model.markers
    return sum(take_out(augmented, names, markers) != text for augmented, text in pairs)


def texts_by_lane(output: TableOutput) -> Shown:
    """Count the texts of C* for its asset: by lane, as in Table 2, all with calls, and those without any."""
    texts = 0
    with_lane: Counter[str] = Counter()
    without_calls = 0
    for batch in corpus_batches(output.plan.lake):
        texts += batch.height
        without_calls += batch.filter(pl.col("tools").list.len() == 0).height
        with_lane.update(batch["tools"].explode().drop_nulls().to_list())
    shown = {f"texts with {lane}": with_lane[lane] for lane in output.plan.lane_names}
    shown["texts with all"] = texts - without_calls
    if without_calls:
        shown["texts without calls"] = without_calls
    return shown


def _documents(plan: Plan, calls: pl.DataFrame) -> Iterator[tuple[str, str, str, str]]:
    """(shard, digest, place, text) of the documents that are named."""
    wanted, count, shards = calls.select(DOCUMENT).unique(), 0, set(calls["shard"])
    for shard in (one for one in plan.lake.table(raw_shards.NAME).parts() if one in shards):
        for batch in raw_shards.documents(plan, shard):
            documents = batch.join(wanted, on=DOCUMENT, how="semi", maintain_order="left")
            count += documents.height
            yield from documents.select(*DOCUMENT, "place", "text").iter_rows()
    if count < wanted.height:
        gone = f"calls of {wanted.height - count} documents that are gone"
        raise StaleInput(NAME, WHOLE, gone, "every tool's filtered_calls")


def _rows(
    documents: Iterator[tuple[str, str, str, str]],
    calls: pl.DataFrame,
    plain: pl.DataFrame,
    plan: Plan,
    cuts: DocumentCuts,
    rejected: Rejected,
) -> Iterator[Row]:
    """Rows of the corpus; counts in `rejected` the calls that are not used."""
    called, markers = list(plan.lane_names.values()), plan.settings.model.markers
    columns = ("tool", "char_offset", "delta", "input", "result", "chain")
    by_document = {key: kept.select(columns).rows() for key, kept in calls.partition_by(DOCUMENT, as_dict=True).items()}
    places = {key: set(offsets["offset"]) for key, offsets in plain.partition_by(DOCUMENT, as_dict=True).items()}
    while batch := list(islice(documents, raw_shards.BATCH)):
        cut = cuts.of([(place, text) for _, _, place, text in batch])
        for (shard, digest, _, text), (pieces, _) in zip(batch, cut, strict=True):
            kept_calls = [_kept_call(call, plan.lane_names) for call in by_document.get((shard, digest), ())]
            as_they_are = plain_examples(pieces, places.get((shard, digest), ()), kept_calls, called, markers)
            for example in chain(examples(pieces, kept_calls, called, markers), as_they_are):
                if isinstance(example, Dropped):
                    rejected[shard, example.reason] += example.calls
                else:
                    yield _row(shard, digest, text, example)


def _kept_call(call: tuple[str, int, float, str, str, str | None], names: Mapping[str, str]) -> KeptCall:
    tool, at, delta, asked, result, chain = call
    return KeptCall(tool, at, delta, tuple(read_chain(chain)) or (Link(names[tool], asked, result),))


def _row(shard: str, digest: str, text: str, example: Example) -> Row:
    piece, tools = example.segment, sorted({call.tool for call in example.calls})
    order = int.from_bytes(text_order(text), "big")
    texts = (piece.text, example.text_with_calls)
    calls = sum(len(call.links) for call in example.calls)
    return (order, digest, piece.index, shard, piece.offset, *texts, tools, calls, split_of(text))


STAGE = Stage(
    name="augmented_corpus",
    description="C*: texts with their calls in them (paper, section 2); without these they are C, byte for byte.",
    columns={
        "document_hash": Column(pl.UInt64(), "hash of the document's text, which orders C*"),
        "digest": DIGEST,
        "segment": SEGMENT,
        "shard": SHARD,
        "offset": Column(pl.Int64(), "character of the document at which the text begins"),
        "text": Column(pl.String(), "x: the text without calls (the baseline's corpus C)"),
        "text_with_calls": Column(pl.String(), "x*: the text with its calls (C*), in the model's markers"),
        "tools": Column(pl.List(pl.String()), "lanes whose calls it holds; none in a text that stands as it is"),
        "calls": Column(
            pl.Int32(),
            "number of calls, each of a chain counted; 0 in a text that stands as it is (training.plain_texts)",
        ),
        "split": Column(pl.String(), "train or heldout"),
    },
    key=("digest", "segment"),
    settings=settings,
    reads=reads,
    inputs=inputs,
    group="training",
    kinds=frozenset({"polars", "parquet"}),
    checks={
        "gives_text_back": Check(
            "A text of C* without its calls is the document's text, byte for byte.", broken=not_given_back
        )
    },
    make=ByPart(rows),
    in_warehouse=InWarehouse(hidden=("document_hash",)),
    asset=StageAsset(shows=texts_by_lane),
)
