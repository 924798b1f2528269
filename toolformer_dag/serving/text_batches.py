"""Batches that texts join and leave between two tokens, within a limit of memory for all batches together."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from toolformer_dag.decoding.greedy import BATCH_TOKENS
from toolformer_dag.decoding.token_choice import write_tokens
from toolformer_dag.decoding.written_text import WrittenText
from toolformer_dag.model.backend import Backend, GreedyRows
from toolformer_dag.serving.writings import Writing


class BatchSize(NamedTuple):
    """The memory of a batch: the largest number of its texts so far, times the length that the longest may reach.

    - `texts`: the largest number of texts that it had at once.
    - `longest`: the maximum number of tokens of one of them.
    """

    texts: int = 0
    longest: int = 0

    @property
    def tokens(self) -> int:
        """The number of tokens, padding included, whose keys and values the batch holds in memory."""
        return self.texts * self.longest


@dataclass(eq=False, slots=True)
class TextBatch:
    """Texts that are decoded together.

    - `rows`: the texts as rows of the model's batch; None before the first step.
    - `writings`: the clients' texts of these rows, in the same order.
    - `joining`: the texts that get a row with the next step.
    - `size`: its memory, which does not shrink when texts leave.
    """

    rows: GreedyRows | None = None
    writings: list[Writing] = field(default_factory=list)
    joining: list[Writing] = field(default_factory=list)
    size: BatchSize = field(default_factory=BatchSize)

    def size_with(self, text: WrittenText) -> BatchSize:
        """Return the size that the batch would have with `text` in addition."""
        texts = len(self.writings) + len(self.joining) + 1
        return BatchSize(max(self.size.texts, texts), max(self.size.longest, text.most_tokens))

    def can_take(self, text: WrittenText, backend: Backend, free_tokens: int) -> bool:
        """Return whether a text can join. `free_tokens`: how many tokens memory still has room for."""
        size = self.size_with(text)
        has_free_row = size.texts <= backend.greedy_rows  # the largest number of rows of a batch
        # With padding to the longest text, other texts could exceed the model's context: that text gets its own batch.
        fits_context = size.longest <= backend.context_length
        fits_memory = size.tokens - self.size.tokens <= free_tokens
        return has_free_row and fits_context and fits_memory

    def join(self, writing: Writing) -> None:
        """Add a text, which gets its row with the next step."""
        self.size = self.size_with(writing.text)
        self.joining.append(writing)

    def step(self, backend: Backend) -> list[Writing]:
        """Write one token of each text, after starting the texts that join.

        Returns:
            The texts that left the batch: they ended, wait for a tool, or must be prefilled again.

        Raises:
            Exception: Any error of the model, such as too little memory.
        """
        rows = self._prefill_joining(backend)  # also moves the joining texts to `writings`
        write_tokens(rows, [writing.text for writing in self.writings])  # row i belongs to `writings[i]`

        left = [writing for writing in self.writings if not writing.text.is_writing]
        self.writings = [writing for writing in self.writings if writing.text.is_writing]
        return left

    def _prefill_joining(self, backend: Backend) -> GreedyRows:
        """Compute the prefixes of the joining texts, and add the texts to the batch.

        Returns:
            The rows of the batch. Row i belongs to `writings[i]`, because both grow at the end.
        """

        prefixes = [writing.text.get_tokens_to_prefill() for writing in self.joining]
        if self.rows is None:
            self.rows = backend.greedy(prefixes)
        elif prefixes:
            self.rows.add(prefixes)
        for writing in self.joining:
            writing.text.start_writing()
        self.writings = self.writings + self.joining
        self.joining = []  # they have rows now

        return self.rows


def choose_batch(text: WrittenText, open_batches: Sequence[TextBatch], backend: Backend) -> TextBatch | None:
    """Choose a batch that a text can join.

    All batches together hold at most BATCH_TOKENS tokens. Only a text that is alone may exceed this.

    Returns:
        An open batch, or a new one, which the caller adds to the open ones. None if memory has no room now.
    """

    held_tokens = sum(batch.size.tokens for batch in open_batches)
    free_tokens = BATCH_TOKENS - held_tokens
    for batch in open_batches:
        if batch.can_take(text, backend, free_tokens):
            return batch

    if open_batches and text.most_tokens > free_tokens:
        return None
    return TextBatch()
