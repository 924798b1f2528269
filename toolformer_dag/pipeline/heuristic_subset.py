"""heuristic_subset: select the texts that a tool wants, short enough for the model's context (paper, appendix A)."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import polars as pl

from toolformer_dag.computing.plan import Lane, Plan
from toolformer_dag.computing.stage import (
    CHARACTERS,
    DIGEST,
    SEGMENT,
    SHARD,
    TEXT_KEY,
    TOOL,
    ByShard,
    Column,
    InWarehouse,
    PartRows,
    Rejected,
    Stage,
    TableOutput,
    count_by_reason,
)
from toolformer_dag.computing.worker import Worker
from toolformer_dag.files import UserError
from toolformer_dag.pipeline import raw_shards, removed_documents
from toolformer_dag.pipeline.document_cuts import DocumentCuts, DocumentTexts, cutting_settings
from toolformer_dag.settings.setting_types import determining
from toolformer_dag.texts.calls import holds_call
from toolformer_dag.texts.document import Document
from toolformer_dag.texts.segments import Segment, TokenCounter, paragraphs, text_digest
from toolformer_dag.tools.language_identifier import Identifier
from toolformer_dag.tools.routing import Router
from toolformer_dag.tools.tool import OverBudget, blame_tool

FEWEST_TEXT_TOKENS = 16
"""The least tokens that a text must be allowed to have: shorter ones hold too little context for a call."""
CALL_BRACKET_TOKENS = 4
"""The most tokens that a tokenizer has for " [", which begins a call."""


def settings(plan: Plan, lane: Lane) -> Mapping[str, Any]:
    """Return what the texts of a tool depend on, apart from the documents; a change makes the table out of date.

    An option has an entry only for the tools to which it matters.
    """
    tool = lane.tool
    entries = {
        **cutting_settings(plan),  # how documents are cut into texts
        "tool": tool.name,
        "version": tool.version,
        "identity": lane.selection(),  # what determines which texts the tool wants
        "prompt": tool.prompt,
        "max_call_tokens": plan.settings.sampling.max_call_tokens,
        **determining(plan.settings.corpus, "texts_per_shard", "documents_per_shard"),
    }
    if tool.asks_language:
        entries["language"] = Identifier(None).identity()  # the default model that identifies languages
    if tool.by_paragraph:
        entries["by_paragraph"] = True
    if tool.routed and plan.routed:
        entries |= _collect_routing_settings(plan)
    return entries


def _collect_routing_settings(plan: Plan) -> Mapping[str, Any]:
    """Return what the routing depends on: which texts each of the tools without a rule gets."""
    return {"routed": plan.routing, **determining(plan.settings.corpus, "tools_per_text")}


def compute_text_budget(*, segment_tokens: int, context_length: int, prompt_tokens: int, max_call_tokens: int) -> int:
    """Return the most tokens that a text may have so that sampling calls in it fits the model's context.

    The context holds the prompt, the text twice (as input, and again with a call in it) and the call.

    segment_tokens: the setting; the result is never larger.
    prompt_tokens: the tokens of the prompt P(x) without the text x.
    max_call_tokens: the most tokens between the brackets of a call.

    Raises UserError if fewer than FEWEST_TEXT_TOKENS are left.
    """
    call_tokens = max_call_tokens + CALL_BRACKET_TOKENS
    room = (context_length - prompt_tokens - call_tokens) // 2
    if room < FEWEST_TEXT_TOKENS:
        raise UserError(
            f"the prompt takes {prompt_tokens} and a call {call_tokens} of the model's {context_length} tokens, which "
            f"leaves {room} for the text; shorten the prompt, lower sampling.max_call_tokens or take another model"
        )
    return min(segment_tokens, room)


def rows(worker: Worker, output: TableOutput, shard: str) -> PartRows:
    """Select the texts of a shard in which calls of a tool are worth proposing; return a row per text.

    Raises ToolDown if a tool's rule fails, UserError if the prompt leaves too few tokens for a text.
    """
    count_tokens = worker.encoding().lengths  # texts -> the number of tokens of each
    cuts = DocumentCuts(worker, _compute_most_tokens(worker, output.lane), count_tokens)
    selection = _Selection(output, cuts, count_tokens)
    # All three steps are lazy, and count in `rejected` what they leave out while `texts` is read.
    documents = _sample_documents(worker.plan, shard, selection.rejected)
    texts = _sample_texts(worker.plan, selection.frames(documents), selection.rejected)
    return PartRows(texts, rejected=selection.rejected, stores=[cuts.name])


def _compute_most_tokens(worker: Worker, lane: Lane) -> int:
    """Return the most tokens of a text with which the tool's prompt fits the model's context.

    Raises UserError if the prompt leaves too few.
    """
    from toolformer_dag.model.loading import context_length, load_config

    settings = worker.plan.settings
    encoding = worker.encoding()
    return compute_text_budget(
        segment_tokens=settings.corpus.segment_tokens,  # the result is never larger
        context_length=context_length(load_config(settings.model)),
        # The prompt is written around the text; `output` stands between it and the text with calls.
        prompt_tokens=len(encoding.prompt_tokens(lane.tool.prompt)) + len(encoding.output),
        max_call_tokens=settings.sampling.max_call_tokens,
    )


class _PlacedDocument(NamedTuple):
    """A document and its place, under which its cuts are stored (see `raw_shards.documents`)."""

    place: str
    document: Document


class _SelectedText(NamedTuple):
    """A row of the table without its `tokens`; STAGE describes the columns."""

    tool: str
    shard: str
    digest: str
    segment: int
    offset: int
    text: str
    text_digest: str
    wanted: str
    context: str


class _Selection:
    """The selection of a tool's texts from the documents of a shard.

    A tool with a rule (`Tool.wants`) gets the texts that the rule accepts. Tools without a rule share the texts: each
    text goes to the few tools whose descriptions it fits best (BM25).

    `rejected` counts documents and texts that the tool does not get, by (shard, reason). It is complete after the last
    frame of `frames`. Reasons:
    - document_not_wanted, text_not_wanted: the tool's rule refuses it
    - fits_other_tools: the text was routed to other tools
    - holds_call: the text holds a call of this tool
    - word_too_long: a piece that cannot be cut to fit
    - over_budget: a document or text that costs the tool's rule too much work
    """

    def __init__(self, output: TableOutput, cuts: DocumentCuts, count_tokens: TokenCounter) -> None:
        """Prepare the selection for the tool of `output`.

        cuts: cuts documents into texts, or looks up how they were cut before.
        count_tokens: texts -> the number of tokens of each.
        """
        self.rejected: Rejected = Counter()
        self._schema = output.stage.schema
        self._tool = output.lane.tool
        self._cuts = cuts
        self._count_tokens = count_tokens
        self._identifier = Identifier(None)  # identifies languages with the default model
        self._tools_per_text = output.plan.settings.corpus.tools_per_text
        self._router = _router(output)

    def frames(self, documents: Iterator[pl.DataFrame]) -> Iterator[pl.DataFrame]:
        """Yield the rows of the table, in the order of the documents."""
        for frame in documents:
            for batch in frame.iter_slices(raw_shards.DOCUMENTS_PER_PLACE):
                yield self._select_texts(batch)

    def _select_texts(self, documents: pl.DataFrame) -> pl.DataFrame:
        """Return the rows (STAGE.columns) of the texts that the tool gets from a batch of documents.

        documents: columns of raw_shards, and `place`, the key under which it is stored where a document is cut.
        """
        if self._tool.asks_language:
            documents = self._with_language(documents)
        wanted_documents = self._select_wanted_documents(documents)
        cut_documents = self._cut_documents(wanted_documents)  # the texts of each, in the same order
        rows: list[_SelectedText] = []
        for placed, cut_document in zip(wanted_documents, cut_documents, strict=True):
            rows += self._iter_selected_texts(placed.document, cut_document)
        return self._build_table(rows)

    def _cut_documents(self, documents: Sequence[_PlacedDocument]) -> Iterator[DocumentTexts]:
        """Cut documents into texts, or look up how they were cut before."""
        return self._cuts.texts_of([(place, document.text) for place, document in documents])

    def _build_table(self, rows: Sequence[_SelectedText]) -> pl.DataFrame:
        """Return selected texts as rows of the table, with their lengths in tokens."""
        token_counts = self._count_tokens([row.text for row in rows])
        row_schema = {name: self._schema[name] for name in _SelectedText._fields}
        frame = pl.DataFrame(rows, schema=row_schema, orient="row")
        return frame.with_columns(tokens=pl.Series(token_counts, dtype=self._schema["tokens"]))

    def _with_language(self, documents: pl.DataFrame) -> pl.DataFrame:
        """Identify the language of the documents for which the corpus has none."""
        is_unnamed = documents["language"].is_null()
        identified = self._identifier.identify(documents["text"].filter(is_unnamed).to_list())
        labels = pl.Series([language.label for language in identified], dtype=pl.String)
        return documents.with_columns(language=documents["language"].scatter(is_unnamed.arg_true(), labels))

    def _select_wanted_documents(self, documents: pl.DataFrame) -> list[_PlacedDocument]:
        """Return the documents that the tool's rule for whole documents accepts; count the others in `rejected`.

        documents: the fields of Document as columns, and `place`.
        """
        wanted = []
        for row in documents.iter_rows(named=True):
            place = row.pop("place")
            document = Document(**row)
            # A refusal is counted in `rejected` under document_not_wanted.
            why_wanted = self._ask_rule("wants_document", document, shard=document.shard, refusal="document_not_wanted")
            if why_wanted:
                wanted.append(_PlacedDocument(place, document))
        return wanted

    def _iter_selected_texts(self, document: Document, cut_document: DocumentTexts) -> Iterator[_SelectedText]:
        """Yield a row for each text of a document that the tool gets; count the others in `rejected`.

        For a tool that works by paragraph the texts are cut further.
        """
        self.rejected[document.shard, "word_too_long"] += cut_document.unfit_words
        context = self._ask_tool("context", document) or ""  # what its results depend on beside the input, as a date
        texts = paragraphs(cut_document.texts) if self._tool.by_paragraph else cut_document.texts
        for text in texts:
            why_wanted = self._explain_wanted(document, text.text)  # None for a text that it has counted in `rejected`
            if why_wanted:
                yield self._build_row(document, text, why_wanted, context)

    def _build_row(self, document: Document, text: Segment, why: str, context: str) -> _SelectedText:
        """Return the row of a text that the tool gets.

        why: why the tool wants it. context: what its results depend on beside the input.
        """
        return _SelectedText(
            tool=self._tool.key,
            shard=document.shard,
            digest=document.digest,
            segment=text.index,
            offset=text.offset,
            text=text.text,
            text_digest=text_digest(text.text),
            wanted=why,
            context=context,
        )

    def _explain_wanted(self, document: Document, text: str) -> str | None:
        """Return why the tool gets a text, such as "a number after 'total'"; None if it does not.

        A text that it does not get is counted in `rejected`.
        """
        if holds_call(text, [self._tool.name]):
            self.rejected[document.shard, "holds_call"] += 1
            return None
        if self._router is None:
            return self._ask_rule("wants", text, document, shard=document.shard, refusal="text_not_wanted")
        return self._route_by_description(self._router, text, document.shard)

    def _route_by_description(self, router: Router, text: str, shard: str) -> str | None:
        """Return how well a text fits the description of the tool ("fits 12.3"); None if it fits other tools better."""
        scores = router.top(text, self._tools_per_text)  # of the tools that get the text
        if self._tool.key not in scores:
            self.rejected[shard, "fits_other_tools"] += 1
            return None
        return f"fits {scores[self._tool.key]:.1f}"

    def _ask_rule(self, method: str, *arguments: object, shard: str, refusal: str) -> str | None:
        """Call a method of the tool that accepts or refuses a document or text; return why it is accepted, else None.

        method: its name, such as "wants". refusal: the reason under which a refusal is counted in `rejected`.
        """
        try:
            why = self._ask_tool(method, *arguments)
        except OverBudget:
            self.rejected[shard, "over_budget"] += 1
            return None
        if not why:
            self.rejected[shard, refusal] += 1
            return None
        return why

    def _ask_tool(self, method: str, *arguments: object) -> str | None:
        """Call a method of the tool, which may be a user's code, and return its answer: a text or None.

        Raises ToolDown if it fails or returns anything else, OverBudget if it gives up.
        """
        with blame_tool(self._tool, method):  # raises exceptions as ToolDown, also those of the lines below
            answer = getattr(self._tool, method)(*arguments)
            if answer is None:
                return None
            if not isinstance(answer, str):
                raise TypeError(f"it returned a {type(answer).__name__}, neither a text nor None")
            # A subclass of str becomes a plain str. Half of a surrogate pair, which no file can hold, is an error.
            return str(answer.encode(), "utf-8")


def _router(output: TableOutput) -> Router | None:
    """Return what chooses the tools of a text; None for a tool with a rule, and where no tool shares texts."""
    if output.lane.tool.routed and output.plan.routed:
        return Router(output.plan.routed)
    return None


def _sample_documents(plan: Plan, shard: str, rejected: Rejected) -> Iterator[pl.DataFrame]:
    """Yield the documents of a shard, of which `corpus.documents_per_shard` limits the distinct ones.

    Documents with the smallest hashes are taken, so a larger limit adds some and drops none. The others are counted in
    `rejected` as document_not_sampled.
    """
    documents = removed_documents.documents(plan, shard)
    limit = plan.settings.corpus.documents_per_shard
    if limit is None:
        yield from documents
        return
    hashed = _with_digests(documents)
    for sample in _select_smallest_hashes(hashed, limit=limit, reason="document_not_sampled", rejected=rejected):
        yield sample.drop("text_digest")


def _sample_texts(plan: Plan, texts: Iterator[pl.DataFrame], rejected: Rejected) -> Iterator[pl.DataFrame]:
    """Yield rows of texts, of which `corpus.texts_per_shard` limits the distinct ones, as in `_sample_documents`."""
    limit = plan.settings.corpus.texts_per_shard
    if limit is None:
        return texts
    return _select_smallest_hashes(texts, limit=limit, reason="not_sampled", rejected=rejected)


def _with_digests(documents: Iterator[pl.DataFrame]) -> Iterator[pl.DataFrame]:
    """Yield batches of documents with the hashes of their texts in the column `text_digest`."""
    for batch in documents:
        digests = [text_digest(text) for text in batch["text"]]
        yield batch.with_columns(text_digest=pl.Series(digests, dtype=pl.String))


def _select_smallest_hashes(
    frames: Iterator[pl.DataFrame], *, limit: int, reason: str, rejected: Rejected
) -> Iterator[pl.DataFrame]:
    """Yield one frame with the rows that have the `limit` smallest distinct values of `text_digest`, in their order.

    The other rows are counted in `rejected` under `reason`.

    frames: rows with the columns text_digest and shard. Without any frame nothing is yielded.
    """
    smallest: pl.DataFrame | None = None  # of the frames so far
    for frame in frames:
        candidates = frame if smallest is None else pl.concat([smallest, frame])
        is_smallest = candidates["text_digest"].rank("dense") <= limit  # equal hashes have the same rank
        rejected.update(_count_as(reason, candidates.filter(~is_smallest)))
        smallest = candidates.filter(is_smallest)
    if smallest is not None:
        yield smallest


def _count_as(reason: str, rows: pl.DataFrame) -> Rejected:
    """Count rows with the column `shard` as rejected for a reason."""
    return count_by_reason(rows.with_columns(reason=pl.lit(reason)))


STAGE = Stage(
    name="heuristic_subset",
    description="The texts that a tool wants, cut so that P(x) and x fit the model, and why (paper, appendix A).",
    columns={
        "tool": TOOL,
        "shard": SHARD,
        "digest": DIGEST,
        "segment": SEGMENT,
        "offset": Column(pl.Int64(), "character of the document at which the text begins"),
        "text": Column(pl.String(), "x: what is annotated"),
        "text_digest": Column(pl.String(), "hash of the text: what was computed for it is found under this"),
        "wanted": Column(pl.String(), "why the tool wants it"),
        "context": Column(pl.String(), "what results depend on beside the input: the date, for the calendar"),
        "tokens": Column(pl.Int32(), "length of the text in tokens of the model"),
    },
    key=TEXT_KEY,
    settings=settings,
    reads=removed_documents.READS,
    inputs=removed_documents.inputs,
    kinds=frozenset({"python", "polars"}),
    volatile=("tokens",),
    make=ByShard(rows),
    in_warehouse=InWarehouse("texts", hidden=("text",), added={"characters": CHARACTERS}),
)
