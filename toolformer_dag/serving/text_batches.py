"""Batches that texts join and leave between two tokens, within the memory that all batches may take together."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from toolformer_dag.decoding.greedy import BATCH_TOKENS
from toolformer_dag.decoding.token_choice import write_tokens
from toolformer_dag.decoding.written_text import WrittenText
from toolformer_dag.model.backend import Backend, GreedyRows
from toolformer_dag.serving.writings import Writing


class BatchSize(NamedTuple):
    """The most texts that a batch had at once, and the most tokens that one of them may have."""

    texts: int = 0
    longest: int = 0

    @property
    def tokens(self) -> int:
        """Return the tokens whose keys and values the batch holds in memory, padding included."""
        return self.texts * self.longest


@dataclass(eq=False, slots=True)
class TextBatch:
    """Texts that are decoded together.

    - `rows`: their rows in the model; None before the first step.
    - `writings`: the texts of the rows, in their order. `joining`: those that get a row with the next step.
    - `size`: its memory; it does not shrink when texts leave.
    """

    rows: GreedyRows | None = None
    writings: list[Writing] = field(default_factory=list)
    joining: list[Writing] = field(default_factory=list)
    size: BatchSize = field(default_factory=BatchSize)

    def size_with(self, text: WrittenText) -> BatchSize:
        """Return the size with one more text."""
        texts = len(self.writings) + len(self.joining) + 1
        return BatchSize(max(self.size.texts, texts), max(self.size.longest, text.most_tokens))

    def join(self, writing: Writing) -> None:
        """Take a text, which gets its row with the next step."""
        self.size = self.size_with(writing.text)
        self.joining.append(writing)

    def step(self, backend: Backend) -> list[Writing]:
        """Prefill the texts that join, and write a token of each text; return the texts that left the batch.

        These are the first three phases of the walk in `toolformer_dag.decoding`. Raises what the model raises, such as
        for too little memory.
        """
        prefixes = [writing.text.tokens_to_prefill() for writing in self.joining]
        if self.rows is None:
            self.rows = backend.greedy(prefixes)
        elif prefixes:
            self.rows.add(prefixes)
        for writing in self.joining:
            writing.text.start_writing()
        self.writings = self.writings + self.joining
        self.joining = []
        write_tokens(self.rows, [writing.text for writing in self.writings])
        left = [writing for writing in self.writings if not writing.text.is_writing]
        self.writings = [writing for writing in self.writings if writing.text.is_writing]
        return left


def batch_for(text: WrittenText, open_batches: Sequence[TextBatch], backend: Backend) -> TextBatch | None:
    """Return the batch that a text joins: an open one, or a new one; None where memory has no room for it now.

    All batches together hold at most BATCH_TOKENS tokens, but a text may always be alone. A text that may reach the end
    of the context gets its own batch, as in `generate`: beside it, padding would exceed the context.
    """
    tokens = sum(batch.size.tokens for batch in open_batches)
    for batch in open_batches:
        size = batch.size_with(text)
        fits_batch = size.texts <= backend.greedy_rows and size.longest <= backend.context_length
        fits_memory = tokens - batch.size.tokens + size.tokens <= BATCH_TOKENS
        if fits_batch and fits_memory:
            return batch
    if open_batches and tokens + text.most_tokens > BATCH_TOKENS:
        return None
    return TextBatch()
