"""Objectives of finetuning: the loss of a run, its training sequences, and the metric that chooses the checkpoint.

Plain language modelling is the paper's (section 2). With `training.keep_base`, which the paper lacks, text outside
calls is also learned from the base model, since a small C* would be learned by heart.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, ClassVar

import torch
from torch import Tensor
from transformers.loss.loss_utils import ForCausalLMLoss

from toolformer_dag.model.encoding import Encoding
from toolformer_dag.model.requests import WINDOW_WEIGHTS
from toolformer_dag.settings.training_settings import TrainingSettings
from toolformer_dag.training.sequences import IGNORED, Examples, examples


class Objective(ABC):
    """What a run minimizes, and the figure by which its checkpoints are compared.

    Another objective is a subclass, and a line of `objective_of` in recipe.py.

    - `described`: a sentence of the model card that says what it is.
    - `metric`: the name of the figure that chooses the checkpoint.
    - `greater_is_better`: which of two figures is better.
    - `sequences_per_item`: how many sequences a pass holds for each item of its batch: two for a pair.
    - `without_base`: the setting under which no frozen base model is needed beside the trained model, as in
      `training.keep_base = 0`; None for an objective that never needs one.
    - `base`: the frozen base model. It is None until `prepare` of trainer.py sets it, before the first step, where
      `without_base` says that the objective needs it.
    """

    described: ClassVar[str]
    metric: ClassVar[str]
    greater_is_better: ClassVar[bool]
    sequences_per_item: ClassVar[int] = 1
    without_base: ClassVar[str | None] = None

    def __init__(self, encoding: Encoding, settings: TrainingSettings) -> None:
        self.encoding = encoding
        self.settings = settings
        self.base: Any = None

    @abstractmethod
    def examples(self, rows: Sequence[Any], length: int, packing: bool) -> Examples:
        """Tokenize rows to sequences of at most `length` tokens; packed, a sequence may hold several rows."""

    @abstractmethod
    def collate(self, sequences: Sequence[Sequence[list[int]]]) -> dict[str, Tensor]:
        """Return the batch of a forward pass over some sequences, as tensors by name."""

    @abstractmethod
    def items(self, batch: Mapping[str, Tensor]) -> int:
        """Count in a batch what the loss of a step is the mean over: predicted tokens, or pairs."""

    @abstractmethod
    def loss(self, model: Any, batch: Mapping[str, Tensor]) -> Tensor:
        """Run the trained model and return the loss of a batch, summed over its items; a scalar with gradients."""

    @abstractmethod
    def figures(self, model: Any, batch: Mapping[str, Tensor]) -> Tensor:
        """Run the model on held-out sequences and return their figures, [sequences, any number].

        The figures of all held-out sequences are kept until `compared` gets them, so they have to be few.
        """

    @abstractmethod
    def compared(self, figures: Any) -> float:
        """Compute the metric from the figures of all held-out sequences, a NumPy array [sequences, any number]."""


class LanguageModeling(Objective):
    """Minimize the mean loss per predicted token and compare by perplexity; a row is a text."""

    described = 'Plain language modelling (section 2, "Model Finetuning", of *Toolformer*, Schick et al. 2023).'
    metric = "perplexity"
    greater_is_better = False

    def examples(self, rows: Sequence[str], length: int, packing: bool) -> Examples:
        """Tokenize texts to sequences; packed, a sequence holds several texts."""
        return examples(self.encoding, rows, length, packing)

    @staticmethod
    def collate(sequences: Sequence[Sequence[list[int]]]) -> dict[str, Tensor]:
        """Turn sequences into a batch of tensors of the shape [sequences, longest], padded on the right.

        Args:
            sequences: Each is a list of texts, and each text is a list of token ids. There are several texts in a
                sequence only with packing.

        Example:
            The texts [5, 6, 7] and [8, 9] in one sequence give

                input_ids 5 6 7 8 9, labels IGNORED 6 7 IGNORED 9, position_ids 0 1 2 0 1
        """
        batch = {
            "input_ids": pad_sequences(sequences, 0),
            "labels": pad_sequences(map(_build_labels, sequences), IGNORED),
        }

        is_packed = any(len(texts) > 1 for texts in sequences)
        if is_packed:  # transformers tells texts apart by their positions, which begin at 0 again
            batch["position_ids"] = pad_sequences(map(_build_positions, sequences), 0)
        else:
            batch["attention_mask"] = pad_sequences(map(_build_attention_mask, sequences), 0)
        return batch

    def items(self, batch: Mapping[str, Tensor]) -> int:
        """Count the predicted tokens."""
        return int((batch["labels"] != IGNORED).sum())

    def loss(self, model: Any, batch: Mapping[str, Tensor]) -> Tensor:
        """Return the summed loss of the predicted tokens, in nats.

        Some models (Gemma 3) compute the mean of each pass instead, so that it depends on how a batch is spread.
        """
        logits = model(**without_labels(batch)).logits
        loss: Tensor = ForCausalLMLoss(logits, batch["labels"], logits.shape[-1], num_items_in_batch=1)
        return loss

    def figures(self, model: Any, batch: Mapping[str, Tensor]) -> Tensor:
        """Return [sequences, 2]: the summed loss in nats and the number of predicted tokens of each sequence."""
        return compute_row_losses(model(**without_labels(batch)).logits, batch["labels"])

    def compared(self, figures: Any) -> float:
        """Compute the perplexity over all held-out tokens.

        Args:
            figures: The loss and the number of tokens of each sequence, as `figures` returns them, [sequences, 2].

        Returns:
            The perplexity. If it is too large for a float, it is infinite, so that it is never the best.
        """
        loss, tokens = figures.sum(0, dtype="float64")
        try:
            return math.exp(loss / tokens)
        except OverflowError:
            return math.inf


def _build_labels(texts: Sequence[list[int]]) -> list[list[int]]:
    """Return the tokens of each text with IGNORED in place of the first one, which is not predicted."""
    return [[IGNORED, *text[1:]] for text in texts]


def _build_positions(texts: Sequence[list[int]]) -> list[range]:
    """Return the positions of each text's tokens, from 0."""
    return [range(len(text)) for text in texts]


def _build_attention_mask(texts: Sequence[list[int]]) -> list[list[int]]:
    """Return a 1 for each token of each text."""
    return [[1] * len(text) for text in texts]


def pad_sequences(sequences: Iterable[Iterable[Iterable[int]]], value: int) -> Tensor:
    """Join the parts of each sequence and return them as [sequences, longest], filled up with `value` on the right."""
    rows = [torch.tensor(list(chain.from_iterable(parts))) for parts in sequences]
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=value)


def without_labels(batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return a batch as arguments of the model, without labels: with them the model would compute a loss too."""
    return {name: value for name, value in batch.items() if name != "labels"}


def compute_row_losses(logits: Tensor, labels: Tensor) -> Tensor:
    """Compute the loss of each row, and count its predicted tokens.

    Args:
        logits: [rows, tokens, vocabulary].
        labels: [rows, tokens]. A label that is IGNORED is not predicted.

    Returns:
        A tensor [rows, 2] with the summed loss in nats and the number of predicted tokens of each row.
    """
    scores = logits[:, :-1].float()  # the logits at a token predict the next one
    targets = labels[:, 1:]
    # This gives 0 for a label that is IGNORED.
    token_losses = torch.nn.functional.cross_entropy(
        scores.flatten(0, 1), targets.flatten(), ignore_index=IGNORED, reduction="none"
    )

    row_sums = token_losses.view_as(targets).sum(-1)
    predicted = (targets != IGNORED).sum(-1)
    return torch.stack([row_sums, predicted], -1)


LEARNED_AFTER = len(WINDOW_WEIGHTS)
"""How many tokens after a call are learned like the call: as many as the filter weighs (paper, section 4.1)."""


def mark_tokens_in_or_after_calls(
    row: Sequence[int], start: Sequence[int], may_end: Sequence[bool], is_whole_call: Callable[[Sequence[int]], bool]
) -> list[bool]:
    """Mark the tokens that belong to a tool call or closely follow one.

    In `It is [Add(1, 2) -> 3] 3.` the call is ` [Add(1, 2) -> 3]`. Any other text in brackets counts, too.

    Args:
        row: The tokens.
        start: The tokens of ` [`.
        may_end: For each token, whether it contains a `]`, so that a call may end there.
        is_whole_call: Takes the tokens after ` [` up to a possible end of the call. Returns False if this is not the
            end, because the `]` is inside the call, in a quoted argument.

    Returns:
        For each token, True if it is in a call or among the LEARNED_AFTER tokens after one.
    """
    tokens = list(row)
    is_learned = [False] * len(tokens)
    for call in _iter_calls(tokens, list(start), may_end, is_whole_call):  # the token indices of one call
        end = min(call.stop + LEARNED_AFTER, len(tokens))
        is_learned[call.start : end] = [True] * (end - call.start)
    return is_learned


def _iter_calls(
    tokens: list[int], opening: list[int], may_end: Sequence[bool], is_whole_call: Callable[[Sequence[int]], bool]
) -> Iterator[range]:
    """Find the calls in some tokens.

    Args:
        tokens: The tokens.
        opening: The tokens of ` [`.
        may_end: For each token, whether it contains a `]`, so that a call may end there.
        is_whole_call: Takes the tokens after ` [` up to a possible end. Returns whether they are the whole call.

    Yields:
        The token indices of each call, from its ` [` to its `]`. A call that is not closed ends with the tokens.
    """
    position = 0  # the end of the previous call
    while position < len(tokens):
        content_start = _find_content_start(tokens, opening, position)  # the index after the next ` [`
        if content_start is None:
            return
        end = _find_call_end(tokens, content_start, may_end, is_whole_call)
        yield range(content_start - len(opening), end)
        position = end


def _find_content_start(tokens: list[int], opening: list[int], position: int) -> int | None:
    """Return the index after the first ` [` whose last token is at `position` or later; None without one."""
    for end in range(position + 1, len(tokens) + 1):
        if tokens[end - len(opening) : end] == opening:
            return end
    return None


def _find_call_end(
    tokens: list[int], content_start: int, may_end: Sequence[bool], is_whole_call: Callable[[Sequence[int]], bool]
) -> int:
    """Find the end of a call.

    Args:
        tokens: The tokens.
        content_start: The index after the call's ` [`.
        may_end: For each token, whether it contains a `]`. This test comes first, because it is cheap.
        is_whole_call: Takes the tokens after ` [` up to a possible end, and decodes them. Returns whether they are the
            whole call.

    Returns:
        The index after the `]` that closes the call, or the number of tokens if it is not closed.
    """
    for position in range(content_start, len(tokens)):
        if may_end[position] and is_whole_call(tokens[content_start : position + 1]):
            return position + 1
    return len(tokens)


class KeepingBase(LanguageModeling):
    """Keep the base model's predictions outside calls (`training.keep_base`); learn calls like `LanguageModeling`."""

    without_base = "training.keep_base = 0"

    def loss(self, model: Any, batch: Mapping[str, Tensor]) -> Tensor:
        """Compute the cross entropy with mixed targets in nats, summed over the predicted tokens.

        The target of a token is (1 - share) * the token itself + share * the prediction of the frozen base model. The
        share is the setting `keep_base`. In tool calls and just after them it is 0, because the base model does
        not know calls.
        """
        inputs = without_labels(batch)
        # Nothing predicts the first token of a row, so these tensors are [rows, tokens - 1].
        targets = batch["labels"][:, 1:]
        log_p = _compute_next_logits(model, inputs).log_softmax(-1)  # [rows, tokens - 1, vocabulary]

        text_losses = _compute_token_losses(log_p, targets)
        base_losses = self._compute_base_losses(log_p, inputs)

        base_share = self._compute_base_share(inputs["input_ids"])[:, 1:]
        losses = (1 - base_share) * text_losses + base_share * base_losses
        summed: Tensor = losses[targets != IGNORED].sum()
        return summed

    def _compute_base_losses(self, log_p: Tensor, inputs: Mapping[str, Tensor]) -> Tensor:
        """Return the cross entropy of the base model's distribution and the trained one, [rows, tokens - 1].

        log_p: of the trained model, [rows, tokens - 1, vocabulary].
        """
        with torch.no_grad():
            base_p = _compute_next_logits(self.base, inputs).softmax(-1)
        return -(base_p * log_p).sum(-1)

    def _compute_base_share(self, ids: Tensor) -> Tensor:
        """Return for each token of `ids`, [rows, tokens], the share of the base model in its target."""
        return torch.where(self._mark_learned_tokens(ids), 0.0, self.settings.keep_base)

    def _mark_learned_tokens(self, ids: Tensor) -> Tensor:
        """Return for each token of `ids`, [rows, tokens], whether it is in a call or shortly after one."""
        rows = ids.cpu().numpy()
        learned = []
        for row, may_end in zip(rows.tolist(), self.encoding.may_end(rows).tolist(), strict=True):
            learned.append(mark_tokens_in_or_after_calls(row, self.encoding.start, may_end, self.encoding.has_ended))
        return torch.tensor(learned, device=ids.device)


def _compute_next_logits(model: Any, inputs: Mapping[str, Tensor]) -> Tensor:
    """Run a model and return the logits for all tokens but the first, [rows, tokens - 1, vocabulary], in float32."""
    logits: Tensor = model(**inputs).logits[:, :-1].float()  # the logits at a token predict the next one
    return logits


def _compute_token_losses(log_p: Tensor, targets: Tensor) -> Tensor:
    """Return the negative log probability of each target, [rows, tokens]; meaningless for a target that is IGNORED.

    log_p: [rows, tokens, vocabulary].
    """
    indices = targets.clamp(min=0)  # IGNORED is below 0 and cannot be an index
    return -log_p.gather(-1, indices[..., None])[..., 0]
