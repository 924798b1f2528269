"""heuristic_subset: the texts that a tool wants, cut so that the prompt and two copies fit the model's context."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

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
    counted,
)
from toolformer_dag.computing.worker import Worker
from toolformer_dag.files import UserError
from toolformer_dag.pipeline import raw_shards, removed_documents
from toolformer_dag.pipeline.document_cuts import DocumentCuts, cutting
from toolformer_dag.settings.setting_types import determining
from toolformer_dag.texts.calls import holds_call
from toolformer_dag.texts.document import Document
from toolformer_dag.texts.segments import Segment, TokenCounter, paragraphs, text_digest
from toolformer_dag.tools.language_identifier import Identifier
from toolformer_dag.tools.routing import Router
from toolformer_dag.tools.tool import OverBudget, blamed

SMALLEST = 16
"""Texts of fewer tokens hold no context worth a call."""
Row = tuple[str, str, str, int, int, str, str, str, str]


def settings(plan: Plan, lane: Lane) -> Mapping[str, Any]:
    """Return what determines the rows beside the documents."""
    return {
        **cutting(plan),
        "tool": lane.tool.name,
        "version": lane.tool.version,
        "identity": lane.selection(),
        "prompt": lane.tool.prompt,
        "max_call_tokens": plan.settings.sampling.max_call_tokens,
        **determining(plan.settings.corpus, "texts_per_shard", "documents_per_shard"),
        **({"language": Identifier(None).identity()} if lane.tool.asks_language else {}),
        **({"by_paragraph": True} if lane.tool.by_paragraph else {}),
        **_routing(plan, lane),
    }


def _routing(plan: Plan, lane: Lane) -> Mapping[str, Any]:
    """Return what determines which texts are the tool's among those of others; nothing where it gets all."""
    if not lane.tool.routed or not plan.routed:
        return {}
    return {"routed": plan.routing, **determining(plan.settings.corpus, "tools_per_text")}


def text_budget(*, segment_tokens: int, context_length: int, prompt_tokens: int, max_call_tokens: int) -> int:
    """Return the most tokens n of a text: |P| + 2n and a call fit the context, and n is at most `segment_tokens`.

    `prompt_tokens`: everything of P(x) but the text itself. Raises UserError where fewer than 16 would be left.
    """
    call_tokens = max_call_tokens + 4  # the tokens of " [", of which there are up to four
    room = (context_length - prompt_tokens - call_tokens) // 2
    if room < SMALLEST:
        raise UserError(
            f"the prompt takes {prompt_tokens} and a call {call_tokens} of the model's {context_length} tokens, which "
            f"leaves {room} for the text; shorten the prompt, lower sampling.max_call_tokens or take another model"
        )
    return min(segment_tokens, room)


def rows(worker: Worker, output: TableOutput, shard: str) -> PartRows:
    """Choose the texts of a shard that hold no call of this tool yet.

    Of more than `texts_per_shard` distinct texts, those with the smallest hashes are taken: equal texts are treated
    alike, a larger number adds texts and drops none; so it is with `documents_per_shard`, before anything is cut.
    Rejected, with reasons: document_not_sampled, document_not_wanted, text_not_wanted, fits_other_tools, holds_call,
    word_too_long (a piece that cannot be cut to fit), over_budget (a document or text that costs the tool's rule too
    much work), not_sampled.
    Calls of other tools are refused where lanes meet, in C*. Raises ToolDown where a rule fails,
    UserError where too little room is left.
    """
    from toolformer_dag.model.loading import context_length, load_config

    plan, encoding = worker.plan, worker.encoding()
    corpus = plan.settings.corpus
    budget = text_budget(
        segment_tokens=corpus.segment_tokens,
        context_length=context_length(load_config(plan.settings.model)),
        prompt_tokens=len(encoding.head(output.lane.tool.prompt)) + len(encoding.output),
        max_call_tokens=plan.settings.sampling.max_call_tokens,
    )
    cuts = DocumentCuts(worker, budget, encoding.lengths)
    choice = _Choice(output, cuts, encoding.lengths)
    documents = removed_documents.documents(plan, shard)
    if corpus.documents_per_shard is not None:
        hashed = (
            batch.with_columns(text_digest=pl.Series(map(text_digest, batch["text"]), dtype=pl.String))
            for batch in documents
        )
        sampled = _smallest(hashed, corpus.documents_per_shard, "document_not_sampled", choice.rejected)
        documents = (batch.drop("text_digest") for batch in sampled)
    batches = (batch for rows in documents for batch in rows.iter_slices(raw_shards.BATCH))
    frames: Iterator[pl.DataFrame] = (choice.texts(batch) for batch in batches)
    if corpus.texts_per_shard is not None:
        frames = _smallest(frames, corpus.texts_per_shard, "not_sampled", choice.rejected)
    return PartRows(frames, choice.rejected, [cuts.name])


class _Choice:
    """The texts one tool wants; counts those it does not."""

    def __init__(self, output: TableOutput, cuts: DocumentCuts, count: TokenCounter) -> None:
        self.rejected: Rejected = Counter()
        self._schema, self._tool, self._cuts, self._count = output.stage.schema, output.lane.tool, cuts, count
        self._identifier = Identifier(None)
        routed = output.plan.routed if output.lane.tool.routed else ()
        self._router, self._most = Router(routed) if routed else None, output.plan.settings.corpus.tools_per_text

    def texts(self, documents: pl.DataFrame) -> pl.DataFrame:
        """Return the wanted texts of a batch of documents."""
        if self._tool.asks_language:
            documents = self._with_language(documents)
        read = [(row.pop("place"), Document(**row)) for row in documents.iter_rows(named=True)]
        wanted = [one for one in read if self._ruled("wants_document", one[1], "document_not_wanted", one[1])]
        cut = self._cuts.of([(place, document.text) for place, document in wanted])
        rows = [row for (_, document), texts in zip(wanted, cut, strict=True) for row in self._of(document, *texts)]
        counts = self._count([text for *_, text, _, _, _ in rows])
        table = [(*row, tokens) for row, tokens in zip(rows, counts, strict=True)]
        return pl.DataFrame(table, schema=self._schema, orient="row")

    def _with_language(self, documents: pl.DataFrame) -> pl.DataFrame:
        """Identify the language of the documents for which the corpus names none."""
        lacking = documents["language"].is_null()
        languages = self._identifier.identify(documents["text"].filter(lacking).to_list())
        labels = pl.Series([one.label for one in languages], dtype=pl.String)
        return documents.with_columns(language=documents["language"].scatter(lacking.arg_true(), labels))

    def _of(self, document: Document, pieces: Sequence[Segment], unfit: int) -> Iterator[Row]:
        self.rejected[document.shard, "word_too_long"] += unfit
        context = self._asked("context", document) or ""
        for piece in paragraphs(pieces) if self._tool.by_paragraph else pieces:
            if holds_call(piece.text, [self._tool.name]):
                self.rejected[document.shard, "holds_call"] += 1
            elif wanted := self._wanted(document, piece.text):
                place = (self._tool.key, document.shard, document.digest, piece.index, piece.offset)
                yield (*place, piece.text, text_digest(piece.text), wanted, context)

    def _wanted(self, document: Document, text: str) -> str | None:
        """Return why the tool wants the text: its rule, or how well it fits (BM25); count those it does not want."""
        if self._router is None:
            return self._ruled("wants", document, "text_not_wanted", text, document)
        score = self._router.top(text, self._most).get(self._tool.key)
        if score is None:
            self.rejected[document.shard, "fits_other_tools"] += 1
        return None if score is None else f"fits {score:.1f}"

    def _ruled(self, rule: str, document: Document, otherwise: str, *arguments: object) -> str | None:
        """Ask a rule of the tool; count `otherwise` where it says nothing, over_budget where it gives up."""
        try:
            wanted = self._asked(rule, *arguments)
        except OverBudget:
            wanted, otherwise = None, "over_budget"
        if not wanted:
            self.rejected[document.shard, otherwise] += 1
        return wanted

    def _asked(self, member: str, *arguments: object) -> str | None:
        """Call a member of the tool. Raises ToolDown where it fails or returns neither a text nor None, OverBudget."""
        with blamed(self._tool, member):
            answer = getattr(self._tool, member)(*arguments)
            if answer is not None and not isinstance(answer, str):
                raise TypeError(f"it returned a {type(answer).__name__}, neither a text nor None")
            return answer and str(answer.encode(), "utf-8")


def _smallest(frames: Iterator[pl.DataFrame], limit: int, reason: str, rejected: Rejected) -> Iterator[pl.DataFrame]:
    """The rows in their order; of more than `limit` distinct texts those with the smallest hashes, which it holds."""
    kept: list[pl.DataFrame] = []
    for frame in frames:
        ranked = pl.concat([*kept, frame]).with_columns(rank=pl.col("text_digest").rank("dense"))
        rejected.update(counted(ranked.filter(pl.col("rank") > limit).with_columns(reason=pl.lit(reason))))
        kept = [ranked.filter(pl.col("rank") <= limit).drop("rank")]
    yield from kept


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
