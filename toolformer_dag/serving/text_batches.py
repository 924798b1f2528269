"""Batches that texts join and leave between two tokens, within a limit of memory for all batches together."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from toolformer_dag.decoding.greedy import MAX_BATCH_TOKENS
from toolformer_dag.decoding.token_choice import write_next_tokens
from toolformer_dag.decoding.written_text import WrittenText
from toolformer_dag.model.backend import Backend, GreedyRows
from toolformer_dag.serving.writings import Writing


class BatchSize(NamedTuple):
    """The size of a batch in the model's memory, as texts times tokens per text.

    Attributes:
        text_count: The largest number of texts that the batch had at once so far.
        max_text_tokens: How many tokens the longest of them may reach.
    """

    text_count: int = 0
    max_text_tokens: int = 0

    @property
    def token_count(self) -> int:
        """The number of tokens for which the batch holds keys and values in memory, padding included."""
        return self.text_count * self.max_text_tokens


@dataclass(eq=False, slots=True)
class TextBatch:
    """Texts that the model decodes together, each as one row.

    Attributes:
        rows: The texts as rows of the model's batch. None before the first step.
        writings: The clients' texts of these rows, in the same order.
        joining_writings: The texts that get a row with the next step.
        size: Its memory, which does not shrink when texts leave.
    """

    rows: GreedyRows | None = None
    writings: list[Writing] = field(default_factory=list)
    joining_writings: list[Writing] = field(default_factory=list)
    size: BatchSize = field(default_factory=BatchSize)

    def compute_size_with(self, written_text: WrittenText) -> BatchSize:
        """Return the size that the batch would have with one more text, which is never less than it has now."""
        text_count = len(self.writings) + len(self.joining_writings) + 1
        return BatchSize(
            text_count=max(self.size.text_count, text_count),
            max_text_tokens=max(self.size.max_text_tokens, written_text.max_tokens_until_prefill),
        )

    def can_take_text(self, written_text: WrittenText, backend: Backend, free_token_count: int) -> bool:
        """Return whether a text can join the batch: whether there is a free row, and room in context and memory.

        Args:
            written_text: The text.
            backend: The model, which limits the rows of a batch and the length of its texts.
            free_token_count: For how many more tokens there is room in memory.
        """
        new_size = self.compute_size_with(written_text)
        has_free_row = new_size.text_count <= backend.max_greedy_rows

        # All texts are padded to the longest one. If that outgrew the model's context, the others would too.
        fits_context = new_size.max_text_tokens <= backend.context_length

        added_token_count = new_size.token_count - self.size.token_count
        fits_memory = added_token_count <= free_token_count
        return has_free_row and fits_context and fits_memory

    def add_writing(self, writing: Writing) -> None:
        """Add a text, which gets its row with the next step."""
        self.size = self.compute_size_with(writing.written_text)
        self.joining_writings.append(writing)

    def write_next_tokens(self, backend: Backend) -> list[Writing]:
        """Write one more token of each text in the batch.

        The texts that join get their rows first.

        Returns:
            The texts that left the batch. They have ended, wait for a tool, or must be read by the model again.

        Raises:
            Exception: Any error of the model, such as too little memory.
        """
        # This also moves the joining texts to `writings`. Row i belongs to `writings[i]`.
        rows = self._prefill_joining_texts(backend)
        write_next_tokens(rows, [writing.written_text for writing in self.writings])

        remaining_writings = []
        writings_that_left = []
        for writing in self.writings:
            if writing.written_text.is_writing:
                remaining_writings.append(writing)
            else:
                writings_that_left.append(writing)

        self.writings = remaining_writings
        return writings_that_left

    def _prefill_joining_texts(self, backend: Backend) -> GreedyRows:
        """Let the model read the texts that join the batch (the prefill), so that their next tokens can be written.

        Changes `rows`, where the model keeps what it has read of each text, and moves the texts from
        `joining_writings` to `writings`.

        Returns:
            The rows of the batch. Row i belongs to `writings[i]`, because both grow at the end.
        """
        token_sequences = [writing.written_text.get_tokens_to_prefill() for writing in self.joining_writings]
        if self.rows is None:
            self.rows = backend.start_greedy_rows(token_sequences)
        elif token_sequences:
            self.rows.add_sequences(token_sequences)

        for writing in self.joining_writings:
            writing.written_text.start_writing()

        # They have rows now.
        self.writings = self.writings + self.joining_writings
        self.joining_writings = []
        return self.rows


def choose_batch(written_text: WrittenText, open_batches: Sequence[TextBatch], backend: Backend) -> TextBatch | None:
    """Choose a batch that a text can join.

    All batches together hold at most MAX_BATCH_TOKENS tokens in memory. Only a text that is alone may exceed this.

    Args:
        written_text: The text.
        open_batches: The batches that are being decoded.
        backend: The model.

    Returns:
        The first open batch that can take the text, or a new one, which the caller adds to the open ones. None if
        memory has no room for the text now.
    """
    held_token_count = sum(batch.size.token_count for batch in open_batches)
    free_token_count = MAX_BATCH_TOKENS - held_token_count

    for batch in open_batches:
        if batch.can_take_text(written_text, backend, free_token_count):
            return batch

    is_alone = not open_batches
    fits_memory = written_text.max_tokens_until_prefill <= free_token_count
    if is_alone or fits_memory:
        return TextBatch()
    return None
