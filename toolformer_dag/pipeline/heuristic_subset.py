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
    RejectionCounts,
    Stage,
    TableOutput,
    count_rejected_rows,
)
from toolformer_dag.computing.worker import Worker
from toolformer_dag.files import UserError
from toolformer_dag.pipeline import raw_shards, removed_documents
from toolformer_dag.pipeline.document_cuts import DocumentCuts, DocumentTexts, collect_cutting_settings
from toolformer_dag.settings.setting_types import select_determining_settings
from toolformer_dag.texts.calls import has_call_to_tools
from toolformer_dag.texts.document import Document
from toolformer_dag.texts.segments import Segment, TokenCounter, compute_text_digest, split_into_paragraphs
from toolformer_dag.tools.language_identifier import Identifier
from toolformer_dag.tools.routing import Router
from toolformer_dag.tools.tool import OverBudget, wrap_tool_errors

MIN_TEXT_TOKENS = 16
"""The least tokens that a text must be allowed to have: shorter ones hold too little context for a call."""
MAX_CALL_BRACKET_TOKENS = 4
"""The most tokens that a tokenizer has for " [", which begins a call."""


def settings(plan: Plan, lane: Lane) -> Mapping[str, Any]:
    """Collect what determines which texts a tool gets, apart from the documents: settings, versions and the prompt.

    If one of the values changes, the table is out of date. What matters only to some tools has an entry only for them.
    """
    tool = lane.tool
    entries = {
        **collect_cutting_settings(plan),  # how documents are cut into texts
        "tool": tool.name,
        "version": tool.version,
        "identity": lane.compute_selection_identity(),  # what determines which texts the tool wants
        "prompt": tool.prompt,
        "max_call_tokens": plan.settings.sampling.max_call_tokens,
        **select_determining_settings(plan.settings.corpus, "texts_per_shard", "documents_per_shard"),
    }

    if tool.asks_language:
        entries["language"] = Identifier(None).compute_file_hash()  # the default model that identifies languages
    if tool.by_paragraph:
        entries["by_paragraph"] = True
    if tool.is_routed and plan.routed_tools:
        entries |= _collect_routing_settings(plan)
    return entries


def _collect_routing_settings(plan: Plan) -> Mapping[str, Any]:
    """Return what the routing depends on: which texts each of the tools without a rule gets."""
    return {"routed": plan.tool_ranking_identity, **select_determining_settings(plan.settings.corpus, "tools_per_text")}


def compute_text_budget(*, segment_tokens: int, context_length: int, prompt_tokens: int, max_call_tokens: int) -> int:
    """Compute how many tokens a text may have, so that the model's context is large enough to sample calls in it.

    The context has to hold the prompt, the text twice (as input, and again with a call in it) and the call.

    Args:
        segment_tokens: The largest number that the settings allow.
        context_length: The number of tokens in the model's context.
        prompt_tokens: The tokens of the prompt without the text.
        max_call_tokens: The largest number of tokens between the brackets of a call.

    Raises:
        UserError: Fewer than MIN_TEXT_TOKENS are left for the text.
    """
    call_tokens = max_call_tokens + MAX_CALL_BRACKET_TOKENS
    room = (context_length - prompt_tokens - call_tokens) // 2
    if room < MIN_TEXT_TOKENS:
        raise UserError(
            f"the prompt takes {prompt_tokens} and a call {call_tokens} of the model's {context_length} tokens, which "
            f"leaves {room} for the text; shorten the prompt, lower sampling.max_call_tokens or take another model"
        )
    return min(segment_tokens, room)


def rows(worker: Worker, output: TableOutput, shard: str) -> PartRows:
    """Select the texts of a shard in which it is worth sampling calls of a tool.

    Returns:
        A row per selected text. Texts and documents that are left out are counted in `rejection_counts`.

    Raises:
        UserError: The prompt leaves too few tokens for a text.
        ToolDown: The tool's rule for selecting texts fails, once the rows are read.
    """
    count_tokens = worker.get_encoding().count_tokens  # texts -> the number of tokens of each
    cuts = DocumentCuts(worker, _compute_max_text_tokens(worker, output.lane), count_tokens)
    selection = _TextSelection(output, cuts, count_tokens)

    # All three steps are lazy: they do their work, and count in `rejected`, only while `sampled_texts` is read.
    documents = _sample_documents(worker.plan, shard, selection.rejected)
    texts = selection.iter_frames(documents)
    sampled_texts = _sample_texts(worker.plan, texts, selection.rejected)
    return PartRows(sampled_texts, rejection_counts=selection.rejected, store_names=[cuts.store_name])


def _compute_max_text_tokens(worker: Worker, lane: Lane) -> int:
    """Compute how many tokens a text may have, so that it fits the model's context together with the tool's prompt.

    Raises:
        UserError: The prompt leaves too few tokens for a text.
    """
    from toolformer_dag.model.loading import load_config, read_context_length

    settings = worker.plan.settings
    encoding = worker.get_encoding()

    # The prompt is written around the text. The output label ("Output:") is between the text and its copy with calls.
    prompt_tokens = len(encoding.encode_prompt(lane.tool.prompt)) + len(encoding.output_label_ids)

    return compute_text_budget(
        segment_tokens=settings.corpus.segment_tokens,  # the result is never larger
        context_length=read_context_length(load_config(settings.model)),
        prompt_tokens=prompt_tokens,
        max_call_tokens=settings.sampling.max_call_tokens,
    )


class _PlacedDocument(NamedTuple):
    """A document and its place, under which its cuts are stored (see `raw_shards.iter_documents`)."""

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


class _TextSelection:
    """The selection of a tool's texts from the documents of a shard.

    A tool with a rule (`Tool.wants`) gets the texts that the rule accepts. Tools without a rule share the texts: each
    text goes to the few tools whose descriptions it fits best (BM25).

    Attributes:
        rejected: How many documents and texts the tool does not get, by (shard, reason). It is complete after the last
            frame of `iter_frames`. The reasons are:
            - document_not_wanted, text_not_wanted: the tool's rule refuses it
            - fits_other_tools: the text was routed to other tools
            - holds_call: the text holds a call of this tool
            - word_too_long: a piece that cannot be cut to fit
            - over_budget: a document or text that costs the tool's rule too much work
    """

    def __init__(self, output: TableOutput, document_cuts: DocumentCuts, count_tokens: TokenCounter) -> None:
        """Prepare the selection of texts for one tool. No document is read yet.

        Args:
            output: The table to build. Its lane names the tool.
            document_cuts: Cuts documents into texts, or looks up how they were cut before.
            count_tokens: Takes texts and returns the number of tokens of each.
        """
        self.rejected: RejectionCounts = Counter()
        self._schema = output.stage.schema
        self._tool = output.lane.tool
        self._document_cuts = document_cuts
        self._count_tokens = count_tokens
        self._language_identifier = Identifier(None)  # with the default model
        self._tools_per_text = output.plan.settings.corpus.tools_per_text
        self._router = _build_router(output)

    def iter_frames(self, documents: Iterator[pl.DataFrame]) -> Iterator[pl.DataFrame]:
        """Yield the rows of the table, in the order of the documents."""
        for frame in documents:
            for batch in frame.iter_slices(raw_shards.DOCUMENTS_PER_PLACE):
                yield self._select_texts(batch)

    def _select_texts(self, documents: pl.DataFrame) -> pl.DataFrame:
        """Cut the documents that the tool wants into texts, and select those texts that it wants.

        Args:
            documents: The documents, in the columns of raw_shards and `place`. A place, such as "head_0.gz/1", is a
                group of documents. How a document was cut is stored under it.

        Returns:
            A row per selected text, in the columns of STAGE.
        """
        if self._tool.asks_language:
            documents = self._with_identified_languages(documents)

        wanted_documents = self._select_wanted_documents(documents)
        cut_documents = self._cut_documents(wanted_documents)  # the texts of each wanted document, in the same order

        selected_texts: list[_SelectedText] = []
        for placed_document, cut_document in zip(wanted_documents, cut_documents, strict=True):
            selected_texts += self._iter_selected_texts(placed_document.document, cut_document)
        return self._build_selected_table(selected_texts)

    def _cut_documents(self, documents: Sequence[_PlacedDocument]) -> Iterator[DocumentTexts]:
        """Cut documents into texts, or look up how they were cut before."""
        placed_texts = [(place, document.text) for place, document in documents]
        return self._document_cuts.iter_document_texts(placed_texts)

    def _build_selected_table(self, selected_texts: Sequence[_SelectedText]) -> pl.DataFrame:
        """Return selected texts as rows of the table, with their lengths in tokens."""
        token_counts = self._count_tokens([selected_text.text for selected_text in selected_texts])

        schema_without_tokens = {name: self._schema[name] for name in _SelectedText._fields}
        text_rows = pl.DataFrame(selected_texts, schema=schema_without_tokens, orient="row")
        return text_rows.with_columns(tokens=pl.Series(token_counts, dtype=self._schema["tokens"]))

    def _with_identified_languages(self, documents: pl.DataFrame) -> pl.DataFrame:
        """Identify the language of the documents for which the corpus has none."""
        has_no_language = documents["language"].is_null()
        texts = documents["text"].filter(has_no_language).to_list()

        languages = self._language_identifier.identify_languages(texts)
        labels = pl.Series([language.label for language in languages], dtype=pl.String)
        return documents.with_columns(language=documents["language"].scatter(has_no_language.arg_true(), labels))

    def _select_wanted_documents(self, documents: pl.DataFrame) -> list[_PlacedDocument]:
        """Select the documents that the tool wants, and count the others in `rejected`.

        Args:
            documents: The documents, with a column per field of Document and the column `place`.
        """
        wanted_documents = []
        for row in documents.iter_rows(named=True):
            place = row.pop("place")  # leaves the fields of Document
            document = Document(**row)

            # The tool's reason. None if it refuses the document, which is counted in `rejected` by that call.
            why_wanted = self._ask_tool_whether_wanted(
                "wants_document", document, shard=document.shard, refusal_reason="document_not_wanted"
            )
            if why_wanted:
                wanted_documents.append(_PlacedDocument(place, document))
        return wanted_documents

    def _iter_selected_texts(self, document: Document, cut_document: DocumentTexts) -> Iterator[_SelectedText]:
        """Select the texts of a document that the tool gets, and count the others in `rejected`.

        Args:
            cut_document: The texts that it was cut into. They are cut further if the tool works by paragraph.

        Yields:
            A row per selected text.
        """
        self.rejected[document.shard, "word_too_long"] += cut_document.unfit_word_count

        # The context is what the tool's results depend on besides the input, such as the date for the calendar.
        context = self._call_tool_method("context", document) or ""

        texts = cut_document.texts
        if self._tool.by_paragraph:
            texts = split_into_paragraphs(texts)

        for text in texts:
            # Counts the text in `rejected` if it returns None.
            why_wanted = self._explain_why_wanted(document, text.text)
            if why_wanted:
                yield self._build_selected_text(document, text, why_wanted, context)

    def _build_selected_text(self, document: Document, text: Segment, why_wanted: str, context: str) -> _SelectedText:
        """Build the row of a text that the tool gets.

        Args:
            why_wanted: Why the tool wants the text, for people.
            context: What the tool's results depend on besides the input, such as the date for the calendar.
        """
        return _SelectedText(
            tool=self._tool.key,
            shard=document.shard,
            digest=document.digest,
            segment=text.index,
            offset=text.offset,
            text=text.text,
            text_digest=compute_text_digest(text.text),
            wanted=why_wanted,
            context=context,
        )

    def _explain_why_wanted(self, document: Document, text: str) -> str | None:
        """Decide whether the tool gets a text. If it does not, the text is counted in `rejected`.

        Returns:
            Why the tool gets the text, such as "a number after 'total'". None if it does not get it.
        """
        if has_call_to_tools(text, [self._tool.name]):
            self.rejected[document.shard, "holds_call"] += 1
            return None

        if self._router is None:
            # Calls the tool's method `wants`. If the tool refuses the text, this counts it.
            return self._ask_tool_whether_wanted(
                "wants", text, document, shard=document.shard, refusal_reason="text_not_wanted"
            )
        return self._explain_why_routed(self._router, text, document.shard)

    def _explain_why_routed(self, router: Router, text: str, shard: str) -> str | None:
        """Return how well a text fits the description of the tool, such as "fits 12.3".

        None if it fits other tools better. Then the text is counted in `rejected`.
        """
        # Only the tools that get the text have a score.
        score_by_tool_key = router.rank_tools(text, self._tools_per_text)
        if self._tool.key not in score_by_tool_key:
            self.rejected[shard, "fits_other_tools"] += 1
            return None
        return f"fits {score_by_tool_key[self._tool.key]:.1f}"

    def _ask_tool_whether_wanted(
        self, method_name: str, *arguments: object, shard: str, refusal_reason: str
    ) -> str | None:
        """Ask the tool whether it wants a document or a text. If it does not, this is counted in `rejected`.

        Args:
            method_name: The name of the tool's method to call, such as "wants".
            arguments: The arguments of this method.
            shard: The shard for which a refusal is counted.
            refusal_reason: The reason under which it is counted.

        Returns:
            Why the tool wants the document or text, None if it does not.
        """
        try:
            why_wanted = self._call_tool_method(method_name, *arguments)
        except OverBudget:  # deciding would cost the tool too much work
            self.rejected[shard, "over_budget"] += 1
            return None

        if not why_wanted:
            self.rejected[shard, refusal_reason] += 1
            return None
        return why_wanted

    def _call_tool_method(self, method_name: str, *arguments: object) -> str | None:
        """Call a method of the tool, which may be code of a user, and return its answer: a text or None.

        Raises:
            ToolDown: The method fails, or returns anything else.
            OverBudget: The method gives up, because it would take too much work.
        """
        with wrap_tool_errors(self._tool, method_name):  # turns other exceptions of this block into ToolDown
            answer = getattr(self._tool, method_name)(*arguments)
            if answer is None:
                return None
            if not isinstance(answer, str):
                raise TypeError(f"it returned a {type(answer).__name__}, neither a text nor None")

            # An instance of a subclass of str becomes a plain str. A lone half of a surrogate pair is an error here,
            # because no file can hold it.
            return str(answer.encode(), "utf-8")


def _build_router(output: TableOutput) -> Router | None:
    """Return the router, which chooses the tools of a text by their descriptions.

    None for a tool that chooses its texts by a rule of its own, and if no tools share texts.
    """
    routed_tools = output.plan.routed_tools
    if output.lane.tool.is_routed and routed_tools:
        return Router(routed_tools)
    return None


def _sample_documents(plan: Plan, shard: str, rejected: RejectionCounts) -> Iterator[pl.DataFrame]:
    """Read the documents of a shard, or a sample of them if the settings limit their number.

    The limit `corpus.documents_per_shard` is for distinct documents. Those with the smallest hashes are taken, so that
    a larger limit adds some documents and removes none.

    Args:
        rejected: The documents that are left out are counted here, with the reason document_not_sampled.

    Yields:
        The documents, in one or more frames.
    """
    documents = removed_documents.iter_kept_documents(plan, shard)
    limit = plan.settings.corpus.documents_per_shard
    if limit is None:
        yield from documents
        return

    documents_with_hashes = _iter_documents_with_digests(documents)
    samples = _iter_rows_with_smallest_hashes(
        documents_with_hashes, max_hashes=limit, reason="document_not_sampled", rejected=rejected
    )
    for sample in samples:
        yield sample.drop("text_digest")


def _sample_texts(plan: Plan, texts: Iterator[pl.DataFrame], rejected: RejectionCounts) -> Iterator[pl.DataFrame]:
    """Return rows of texts, or a sample of them if the setting `corpus.texts_per_shard` limits the distinct texts.

    As in `_sample_documents`, the texts with the smallest hashes are taken.

    Args:
        rejected: The texts that are left out are counted here, with the reason not_sampled.
    """
    limit = plan.settings.corpus.texts_per_shard
    if limit is None:
        return texts
    return _iter_rows_with_smallest_hashes(texts, max_hashes=limit, reason="not_sampled", rejected=rejected)


def _iter_documents_with_digests(documents: Iterator[pl.DataFrame]) -> Iterator[pl.DataFrame]:
    """Yield batches of documents with the hashes of their texts in the column `text_digest`."""
    for batch in documents:
        digests = [compute_text_digest(text) for text in batch["text"]]
        yield batch.with_columns(text_digest=pl.Series(digests, dtype=pl.String))


def _iter_rows_with_smallest_hashes(
    frames: Iterator[pl.DataFrame], *, max_hashes: int, reason: str, rejected: RejectionCounts
) -> Iterator[pl.DataFrame]:
    """Sample rows by hash: keep the rows with the smallest hashes.

    Args:
        frames: Rows with the columns text_digest (the hash) and shard.
        max_hashes: The number of distinct hashes to keep. Rows with equal hashes are kept or left out together.
        reason: The reason under which the other rows are counted.
        rejected: The other rows are counted here.

    Yields:
        One frame with the kept rows, in their order. Nothing if there are no frames.
    """
    kept_rows: pl.DataFrame | None = None  # from the frames so far
    for frame in frames:
        candidates = frame if kept_rows is None else pl.concat([kept_rows, frame])

        is_kept = candidates["text_digest"].rank("dense") <= max_hashes  # equal hashes have the same rank
        rejected.update(_count_rejected_rows(reason, candidates.filter(~is_kept)))
        kept_rows = candidates.filter(is_kept)

    if kept_rows is not None:
        yield kept_rows


def _count_rejected_rows(reason: str, rows: pl.DataFrame) -> RejectionCounts:
    """Count rows with the column `shard` as rejected for a reason."""
    return count_rejected_rows(rows.with_columns(reason=pl.lit(reason)))


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
    key_columns=TEXT_KEY,
    collect_settings=settings,
    reads=removed_documents.DOCUMENT_TABLES,
    inputs=removed_documents.inputs,
    kinds=frozenset({"python", "polars"}),
    volatile_columns=("tokens",),
    row_maker=ByShard(rows),
    warehouse_form=InWarehouse("texts", hidden_columns=("text",), added_columns={"characters": CHARACTERS}),
)
