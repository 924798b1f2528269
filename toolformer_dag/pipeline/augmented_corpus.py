"""augmented_corpus: C*, the texts with the calls of all tools in them (paper, section 2, "Model Finetuning").

With the setting `training.plain_texts` it also has texts in which no call helped. The table has a part per shard.
`scan_corpus_rows` reads it as a whole, ordered by the hashes of the documents' texts, so the order does not depend on
how documents are spread over shards.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, NamedTuple

import polars as pl

from toolformer_dag.computing.plan import Lane, Plan
from toolformer_dag.computing.shown import Shown
from toolformer_dag.computing.stage import (
    CALL_KEY,
    DIGEST,
    SCORED_COLUMNS,
    SEGMENT,
    SHARD,
    TEXT_KEY,
    ByPart,
    Check,
    Column,
    InputsFinder,
    InWarehouse,
    PartRows,
    RejectionCounts,
    Stage,
    StageAsset,
    StaleInput,
    TableOutput,
    build_versions_finder,
)
from toolformer_dag.computing.worker import Worker
from toolformer_dag.lake.table import WHOLE_TABLE_PART, Lake, MissingPart
from toolformer_dag.method.decided_calls import DECIDED_CALLS_TABLE, LIMIT_PREFIX
from toolformer_dag.pipeline import raw_shards
from toolformer_dag.pipeline.document_cuts import DocumentCuts, collect_cutting_settings, open_corpus_cuts
from toolformer_dag.pipeline.merging import (
    HELDOUT_SHARE,
    MERGING,
    AugmentedText,
    DroppedCalls,
    KeptCall,
    choose_split,
    compute_order_hash,
    iter_augmented_texts,
    iter_plain_texts,
)
from toolformer_dag.settings.setting_types import select_determining_settings
from toolformer_dag.texts.calls import remove_calls
from toolformer_dag.texts.chains import ChainLink, parse_chain
from toolformer_dag.texts.segments import Segment

TABLE_NAME = "training/augmented_corpus"
DOCUMENT_KEY_COLUMNS = ("shard", "digest")
"""The key of a document."""
CALL_PLACE_COLUMNS = ("digest", "char_offset", "tool")
"""The columns of a call that say where in a document it stands, and of which lane it is."""
CORPUS_SORT_COLUMNS = ("document_hash", "digest", "segment")
"""The order of C*."""


class _CorpusRow(NamedTuple):
    """A row of the table; STAGE describes the columns."""

    document_hash: int
    digest: str
    segment: int
    shard: str
    offset: int
    text: str
    text_with_calls: str
    tools: list[str]
    calls: int
    split: str


class _PlacedDocument(NamedTuple):
    """A document of a shard. Its cuts are stored under its place (see `raw_shards.documents`)."""

    shard: str
    digest: str
    place: str
    text: str


def settings(plan: Plan, lane: None) -> Mapping[str, Any]:
    """List the settings and code versions that determine C*, the corpus with the kept calls written into its texts.

    The kept calls and the documents determine it too and are not listed here.

    Args:
        plan: All settings.
        lane: None, because C* holds the calls of all tools.
    """
    return {
        **collect_cutting_settings(plan),  # how documents are cut into texts
        "tools": plan.tool_name_by_lane_key,
        "merging": MERGING,  # the version of the code that puts calls into texts
        "heldout_share": HELDOUT_SHARE,
        **select_determining_settings(plan.settings.training, "plain_texts"),  # name -> value
        **select_determining_settings(plan.settings.model, "markers"),
    }


def reads(plan: Plan, lane: None) -> tuple[str, ...]:
    """Return the names of the tables that are read: documents, kept calls, and selected texts if they are needed."""
    tables = [raw_shards.TABLE_NAME, *_list_kept_calls_table_names(plan)]
    if plan.settings.training.plain_texts:
        tables += [_get_wanted_texts_table_name(plan, lane) for lane in plan.lanes]
    return tuple(tables)


def _list_kept_calls_table_names(plan: Plan) -> list[str]:
    """Return the names of the tables of kept calls, one per lane (a tool with its settings)."""
    return [f"{lane.key}/filtered_calls" for lane in plan.lanes_of_all_rounds]


def _get_wanted_texts_table_name(plan: Plan, lane: Lane) -> str:
    """Return the name of the table of all texts that were selected for a lane's tool.

    Only the first project selects all: later ones take the texts that have no kept call so far.
    """
    first_plan = plan.plans_by_round[0]
    first_lane = first_plan.get_lane_of_tool(lane.tool)
    return f"{first_lane.key}/heuristic_subset"


def inputs(output: TableOutput) -> InputsFinder:
    """Return a function from a shard to the versions of the tables that its rows are made from."""
    table_names = list(output.depends_on)
    if output.plan.settings.training.plain_texts:
        # A lane's decided calls are published together with its kept calls.
        table_names += [f"{lane.key}/{DECIDED_CALLS_TABLE}" for lane in output.plan.lanes_of_all_rounds]

    lake = output.plan.lake
    return build_versions_finder({table_name: lake.get_table(table_name) for table_name in table_names})


def rows(worker: Worker, output: TableOutput, part: str) -> PartRows:
    """Build a shard's rows of C*: the texts of its documents with the kept calls of all tools in them.

    Args:
        worker: Opens the stored cuts of documents.
        output: The table to be computed.
        part: The name of the shard.

    Returns:
        The rows, and how many calls could not be used, by reason.

    Raises:
        StaleInput: A document with a kept call is gone.
    """
    merge = _ShardMerge.from_shard(output.plan, part)
    cuts = open_corpus_cuts(worker)  # cuts documents into texts, or looks up how they were cut before

    documents = _iter_documents(output.plan, merge.document_keys)
    for document, texts in _iter_documents_with_texts(documents, cuts):
        # Adds rows, and counts calls that cannot be used in `merge.rejected`.
        merge.add_document(document, texts)

    corpus_rows = merge.build_table(output.stage.schema)
    return PartRows([corpus_rows], rejection_counts=merge.rejected, store_names=[cuts.store_name])


def _read_kept_calls(plan: Plan, shard: str) -> pl.DataFrame:
    """Return the kept calls of all tools in a shard."""
    tables = [plan.lake.get_table(table_name) for table_name in _list_kept_calls_table_names(plan)]
    return pl.concat([table.read_part(shard) for table in tables])


def _iter_documents_with_texts(
    documents: Iterator[_PlacedDocument], document_cuts: DocumentCuts
) -> Iterator[tuple[_PlacedDocument, Sequence[Segment]]]:
    """Yield each document together with the texts that it is cut into."""
    for batch in _iter_document_batches(documents):
        placed_texts = [(document.place, document.text) for document in batch]
        cut_documents = document_cuts.iter_document_texts(placed_texts)
        for document, cut_document in zip(batch, cut_documents, strict=True):
            yield document, cut_document.texts


def _iter_document_batches(documents: Iterator[_PlacedDocument]) -> Iterator[list[_PlacedDocument]]:
    """Yield documents in batches of a size for which stored cuts are read together."""
    batch = list(islice(documents, raw_shards.DOCUMENTS_PER_PLACE))
    while batch:
        yield batch
        batch = list(islice(documents, raw_shards.DOCUMENTS_PER_PLACE))


def choose_plain_texts(plan: Plan, shard: str, kept_calls: pl.DataFrame) -> pl.DataFrame:
    """Choose texts of a shard in which no call helped, so that the model is also trained on texts without calls.

    With the setting `training.plain_texts` = 0.5, about one such text is chosen for every two texts with a
    call of a tool. With 0, none is chosen.

    Args:
        plan: The settings and the tables.
        shard: The name of the shard.
        kept_calls: The calls of the shard that passed the filter, of all tools.

    Returns:
        The columns shard, digest (of the document) and offset (the character of the document at which the text
        begins).
    """
    chosen_texts = pl.DataFrame(schema={"shard": pl.String, "digest": pl.String, "offset": pl.Int64})
    if not plan.settings.training.plain_texts:
        return chosen_texts

    # Calls that helped too, and were only dropped because a tool had enough texts: their texts are not chosen here.
    calls_beyond_limits = _read_calls_beyond_limits(plan, shard)
    helpful_calls = pl.concat([kept_calls.select(CALL_PLACE_COLUMNS), calls_beyond_limits])

    for lane in plan.lanes:  # a lane is a tool with its settings
        # Texts that were chosen for earlier tools are not chosen again.
        texts_of_tool = _choose_plain_texts_of_tool(plan, lane, shard, kept_calls, helpful_calls, chosen_texts)
        chosen_texts = pl.concat([chosen_texts, texts_of_tool])
    return chosen_texts


def _read_calls_beyond_limits(plan: Plan, shard: str) -> pl.DataFrame:
    """Read the calls of a shard that helped and were left out only because a limit was reached.

    Such a limit is the number of texts per tool. Texts with these calls must not be taken for texts in which no call
    helped.

    Returns:
        The columns CALL_PLACE_COLUMNS, for the calls of all tools.
    """
    place_schema = {"digest": pl.String(), "char_offset": SCORED_COLUMNS["char_offset"].dtype, "tool": pl.String()}
    frames = [pl.DataFrame(schema=place_schema)]  # so that there is a frame even without such calls

    for lane in plan.lanes_of_all_rounds:
        decided_calls = plan.lake.get_table(f"{lane.key}/{DECIDED_CALLS_TABLE}").read_part(shard)
        calls_beyond_limit = decided_calls.filter(pl.col("reason").str.starts_with(LIMIT_PREFIX))
        if calls_beyond_limit.is_empty():
            continue

        # The tables of scored calls say where these calls stand.
        for table_name in lane.scored_table_names:
            scored_calls = plan.lake.get_table(f"{lane.key}/{table_name}").read_part(shard)
            placed_calls = scored_calls.join(calls_beyond_limit, on=CALL_KEY, how="semi")
            frames.append(placed_calls.select(CALL_PLACE_COLUMNS))

    return pl.concat(frames)


def _choose_plain_texts_of_tool(
    plan: Plan,
    lane: Lane,
    shard: str,
    kept_calls: pl.DataFrame,
    helpful_calls: pl.DataFrame,
    chosen_texts: pl.DataFrame,
) -> pl.DataFrame:
    """Choose texts of a shard in which no call helped, for one tool.

    The first texts in the order of their hashes are chosen. Their number is a fixed ratio of the number of texts
    with calls (the setting `training.plain_texts`).

    Args:
        plan: The settings and the tables.
        lane: The tool with its settings.
        shard: The name of the shard.
        kept_calls: The kept calls of the shard, of all tools.
        helpful_calls: These calls and the calls that were left out only because a limit was reached.
        chosen_texts: The texts that were chosen for other tools: shard, digest, offset.

    Returns:
        The columns of `chosen_texts`, for the texts chosen for this tool.
    """
    texts = _read_wanted_texts(plan, lane, shard)

    helped_texts = _join_texts_with_calls(texts, helpful_calls)
    texts_without_help = texts.join(helped_texts, on=TEXT_KEY, how="anti")  # TEXT_KEY identifies a text

    not_yet_chosen = texts_without_help.join(chosen_texts, on=chosen_texts.columns, how="anti")
    candidates = _select_distinct_texts_by_hash(not_yet_chosen)

    texts_with_calls = _join_texts_with_calls(texts, kept_calls)
    count = _compute_plain_text_count(plan, lane, shard, texts_with_calls)
    return candidates.head(count).select(chosen_texts.columns)


def _select_distinct_texts_by_hash(texts: pl.DataFrame) -> pl.DataFrame:
    """Return texts in the order of their hashes, equal ones once."""
    in_order = texts.sort("text_digest", *TEXT_KEY)
    return in_order.unique("text_digest", keep="first", maintain_order=True)


def _compute_plain_text_count(plan: Plan, lane: Lane, shard: str, texts_with_calls: pl.DataFrame) -> int:
    """Compute how many texts without a call are to be chosen for a tool, from the ratio `training.plain_texts`."""
    count_with_calls = _count_texts_of_tool(plan, lane, texts_with_calls)
    wanted_count = plan.settings.training.plain_texts * count_with_calls
    return _round_by_hash(wanted_count, hashed_name=f"{lane.tool.key} {shard}")


def _read_wanted_texts(plan: Plan, lane: Lane, shard: str) -> pl.DataFrame:
    """Return the texts of a shard that were selected for a tool, each with its `length` instead of its characters."""
    length = pl.col("text").str.len_chars().alias("length")
    wanted_texts_table = plan.lake.get_table(_get_wanted_texts_table_name(plan, lane))
    return wanted_texts_table.scan_parts([shard]).select(*TEXT_KEY, "offset", "text_digest", length).collect()


def _join_texts_with_calls(texts: pl.DataFrame, calls: pl.DataFrame) -> pl.DataFrame:
    """Combine texts with the calls inside them, whatever their tool.

    Returns:
        One row per text and call, with the columns of both. Texts without calls are left out.
    """
    text_end = pl.col("offset") + pl.col("length")
    is_inside_text = pl.col("char_offset").is_between("offset", text_end, closed="left")
    return texts.join(calls.select(CALL_PLACE_COLUMNS), on="digest").filter(is_inside_text)


def _count_texts_of_tool(plan: Plan, lane: Lane, texts_with_calls: pl.DataFrame) -> int:
    """Count the distinct texts with calls of a tool, which this project or an earlier one made."""
    lane_keys_of_tool = {other.key for other in plan.lanes_of_all_rounds if other.tool.key == lane.tool.key}
    is_call_of_tool = pl.col("tool").is_in(lane_keys_of_tool)
    return texts_with_calls.filter(is_call_of_tool).select(TEXT_KEY).n_unique()


def _round_by_hash(number: float, hashed_name: str) -> int:
    """Round a number up or down, depending on the hash of a name.

    The same name always rounds in the same way. Over many names, 0.3 becomes 1 for 30 % of them, so that small
    shards get texts too.
    """
    hash_between_0_and_1 = int.from_bytes(compute_order_hash(hashed_name), "big") / 2**64
    return int(number + hash_between_0_and_1)


def scan_corpus_rows(lake: Lake, columns: Sequence[str]) -> pl.LazyFrame:
    """Return some columns of C* (the corpus with kept calls) as a lazy frame, ordered by the hashes of its documents.

    Raises:
        MissingPart: No part of C* was made yet.
        DamagedPart: A part cannot be read.
    """
    corpus_table = lake.get_table(TABLE_NAME)
    if not corpus_table.list_part_names():
        raise MissingPart(TABLE_NAME, WHOLE_TABLE_PART)
    return corpus_table.scan_parts().sort(CORPUS_SORT_COLUMNS).select(columns)


def iter_corpus_batches(lake: Lake) -> Iterator[pl.DataFrame]:
    """Yield the rows of C* (the corpus with kept calls) shard by shard, a frame per file. Empty shards are skipped.

    Raises:
        MissingPart: A part was removed meanwhile.
        DamagedPart: A part cannot be read.
    """
    corpus_table = lake.get_table(TABLE_NAME)
    for part_name in corpus_table.list_part_names():
        if corpus_table.read_pointer(part_name).row_count:
            yield from corpus_table.iter_frames(part_name)


def count_texts_not_restored(corpus_rows: pl.DataFrame, output: TableOutput) -> int:
    """Count the rows in which removing the calls does not give back the text without calls. It should be 0."""
    tool_names = output.plan.tool_name_by_lane_key.values()
    markers = output.plan.settings.model.markers

    count = 0
    for text_with_calls, text in corpus_rows.select("text_with_calls", "text").iter_rows():
        if remove_calls(text_with_calls, tool_names, markers) != text:
            count += 1
    return count


def count_texts_by_lane(output: TableOutput) -> Shown:
    """Count the texts of C* (the corpus with kept calls) for Dagster's page.

    Returns:
        Three kinds of counts by their label: the texts with calls of each lane (a tool with its settings), as in
        the paper's Table 2, all texts with calls, and the texts without calls, if there are any. A text with
        calls of two lanes counts for both.
    """
    counts = _TextCounts()
    for batch in iter_corpus_batches(output.plan.lake):
        counts.add_batch(batch)

    shown = {
        f"texts with {lane_key}": counts.count_by_lane_key[lane_key] for lane_key in output.plan.tool_name_by_lane_key
    }
    shown["texts with all"] = counts.with_calls
    if counts.without_calls:
        shown["texts without calls"] = counts.without_calls
    return shown


@dataclass(slots=True)
class _TextCounts:
    """How many of the added texts have calls.

    - `with_calls`, `without_calls`: texts with any call, and texts with none
    - `count_by_lane_key`: texts with calls of a lane (a tool with its settings), by the key of the lane
    """

    with_calls: int = 0
    without_calls: int = 0
    count_by_lane_key: Counter[str] = field(default_factory=Counter)

    def add_batch(self, corpus_rows: pl.DataFrame) -> None:
        """Count the texts of some rows of C*."""
        batch_with_calls = corpus_rows.filter(pl.col("calls") > 0).height
        self.with_calls += batch_with_calls
        self.without_calls += corpus_rows.height - batch_with_calls
        lanes = corpus_rows["tools"].explode().drop_nulls()
        self.count_by_lane_key.update(lanes.to_list())


def _iter_documents(plan: Plan, document_keys: pl.DataFrame) -> Iterator[_PlacedDocument]:
    """Yield the documents with the given keys, shard by shard and each once.

    Args:
        plan: Gives access to the stored documents.
        document_keys: The columns shard and digest. Keys may repeat.

    Raises:
        StaleInput: Some documents are gone, because the corpus changed after their calls were kept. This is
            raised after all other documents were yielded.
    """
    wanted_keys = document_keys.unique()

    yielded_count = 0
    for document in _iter_stored_documents(plan, wanted_keys):
        yielded_count += 1
        yield document

    gone_count = wanted_keys.height - yielded_count
    if gone_count > 0:
        raise StaleInput(
            table_name=TABLE_NAME,
            part=WHOLE_TABLE_PART,
            mismatch=f"calls of {gone_count} documents that are gone",
            asset_name="every tool's filtered_calls",
        )


def _iter_stored_documents(plan: Plan, wanted_keys: pl.DataFrame) -> Iterator[_PlacedDocument]:
    """Yield the documents of the corpus that have one of the wanted keys (shard, digest), shard by shard."""
    wanted_shards = set(wanted_keys["shard"])
    for shard in plan.lake.get_table(raw_shards.TABLE_NAME).list_part_names():
        if shard in wanted_shards:
            yield from _iter_documents_of_shard(plan, shard, wanted_keys)


def _iter_documents_of_shard(plan: Plan, shard: str, wanted_keys: pl.DataFrame) -> Iterator[_PlacedDocument]:
    """Yield the documents of a shard that have one of the wanted keys (shard, digest), in their order."""
    for batch in raw_shards.iter_documents(plan, shard):
        wanted_documents = batch.join(wanted_keys, on=DOCUMENT_KEY_COLUMNS, how="semi", maintain_order="left")
        for document_fields in wanted_documents.select(_PlacedDocument._fields).iter_rows():
            yield _PlacedDocument(*document_fields)


class _ShardMerge:
    """Merges the kept calls of a shard into its documents.

    Each document is added by `add_document`; then `build_table` and `rejected` have the results. Tools may have cut a
    document differently, so each call is placed by its character in the document.

    Attributes:
        document_keys: The documents to add, in the columns shard and digest. Some may stand there twice.
        rejected: How many calls could not be used, by (shard, reason).
    """

    def __init__(self, plan: Plan, kept_calls: pl.DataFrame, plain_texts: pl.DataFrame) -> None:
        """Group what will be merged by document: the kept calls of a shard, and the texts that stay without calls.

        Args:
            plan: The settings.
            kept_calls: The kept calls of all documents of the shard.
            plain_texts: Texts without calls that become rows too: shard, digest, offset (the text's first character).
        """
        self.document_keys = _collect_document_keys(kept_calls, plain_texts)
        self.rejected: RejectionCounts = Counter()

        self._corpus_rows: list[_CorpusRow] = []  # grows with every document that is added
        self._tool_name_by_lane = plan.tool_name_by_lane_key  # key of the lane -> its tool's name in texts
        self._tool_names = list(plan.tool_name_by_lane_key.values())
        self._markers = plan.settings.model.markers

        # (shard, digest) of a document -> its calls, and its texts without calls
        self._kept_calls_by_document = kept_calls.partition_by(DOCUMENT_KEY_COLUMNS, as_dict=True)
        self._plain_texts_by_document = plain_texts.partition_by(DOCUMENT_KEY_COLUMNS, as_dict=True)

    @classmethod
    def from_shard(cls, plan: Plan, shard: str) -> "_ShardMerge":
        """Read the kept calls of a shard and choose its texts without calls."""
        kept_calls = _read_kept_calls(plan, shard)
        plain_texts = choose_plain_texts(plan, shard, kept_calls)
        return cls(plan, kept_calls, plain_texts)

    def build_table(self, schema: pl.Schema) -> pl.DataFrame:
        """Return the rows of the documents that were added, in the order of C*."""
        return pl.DataFrame(self._corpus_rows, schema=schema, orient="row").sort(CORPUS_SORT_COLUMNS)

    def add_document(self, document: _PlacedDocument, texts: Sequence[Segment]) -> None:
        """Add the rows of a document: one for each text with calls, and for each chosen text without calls.

        Args:
            document: The document.
            texts: The texts that the document is cut into.
        """
        document_key = (document.shard, document.digest)
        kept_calls = self._build_kept_calls(document_key)
        self._add_texts_with_calls(document, texts, kept_calls)

        if document_key not in self._plain_texts_by_document:
            return
        plain_text_offsets = set(self._plain_texts_by_document[document_key]["offset"])
        for plain_text in iter_plain_texts(texts, plain_text_offsets, kept_calls, self._tool_names, self._markers):
            self._corpus_rows.append(_build_corpus_row(document, plain_text))

    def _add_texts_with_calls(
        self, document: _PlacedDocument, texts: Sequence[Segment], kept_calls: Sequence[KeptCall]
    ) -> None:
        """Add a row for each text of a document that gets calls, and count the calls that cannot be used."""
        for text_or_dropped in iter_augmented_texts(texts, kept_calls, self._tool_names, self._markers):
            if isinstance(text_or_dropped, DroppedCalls):
                self.rejected[document.shard, text_or_dropped.reason] += text_or_dropped.call_count
            else:
                self._corpus_rows.append(_build_corpus_row(document, text_or_dropped))

    def _build_kept_calls(self, document_key: tuple[str, str]) -> list[KeptCall]:
        """Return the kept calls of a document. A chain of calls at one position is one kept call.

        Args:
            document_key: The shard and the digest of the document.
        """
        if document_key not in self._kept_calls_by_document:
            return []
        rows_of_document = self._kept_calls_by_document[document_key].iter_rows(named=True)
        return [self._build_kept_call(row) for row in rows_of_document]

    def _build_kept_call(self, row: Mapping[str, Any]) -> KeptCall:
        """Return the call, or the chain of calls, of a row of filtered_calls."""
        links = parse_chain(row["chain"])
        if not links:  # a single call
            links = [ChainLink(self._tool_name_by_lane[row["tool"]], row["input"], row["result"])]
        return KeptCall(lane_key=row["tool"], char_offset=row["char_offset"], delta=row["delta"], links=tuple(links))


def _collect_document_keys(kept_calls: pl.DataFrame, plain_texts: pl.DataFrame) -> pl.DataFrame:
    """Return (shard, digest) of the document of each call and of each text without calls."""
    return pl.concat([kept_calls.select(DOCUMENT_KEY_COLUMNS), plain_texts.select(DOCUMENT_KEY_COLUMNS)])


def _build_corpus_row(document: _PlacedDocument, augmented_text: AugmentedText) -> _CorpusRow:
    """Build the row of C* (the corpus with kept calls) for a text of a document.

    Args:
        document: The document.
        augmented_text: The text with its calls. It may have none.
    """
    segment = augmented_text.segment  # the text without calls, and where in the document it stands
    lane_keys = {call.lane_key for call in augmented_text.calls}
    call_count = sum(len(call.links) for call in augmented_text.calls)  # every call of a chain counts
    return _CorpusRow(
        document_hash=int.from_bytes(compute_order_hash(document.text), "big"),  # C* is read in this order
        digest=document.digest,
        segment=segment.index,
        shard=document.shard,
        offset=segment.offset,
        text=segment.text,
        text_with_calls=augmented_text.text_with_calls,
        tools=sorted(lane_keys),
        calls=call_count,
        split=choose_split(document.text),
    )


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
    key_columns=("digest", "segment"),
    collect_settings=settings,
    reads=reads,
    inputs=inputs,
    group="training",
    kinds=frozenset({"polars", "parquet"}),
    checks={
        "gives_text_back": Check(
            "A text of C* without its calls is the document's text, byte for byte.",
            count_broken_rows=count_texts_not_restored,
        )
    },
    row_maker=ByPart(rows),
    warehouse_form=InWarehouse(hidden_columns=("document_hash",)),
    asset=StageAsset(collect_shown_values=count_texts_by_lane),
)
