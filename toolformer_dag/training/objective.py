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
from toolformer_dag.training.sequences import IGNORED_LABEL, Examples, build_examples


class Objective(ABC):
    """What a run minimizes, and the figure by which its checkpoints are compared.

    Another objective is a subclass, and a line of `objective_of` in recipe.py.

    Attributes:
        description: A sentence of the model card that says what the objective is.
        metric_name: The name of the figure that chooses the checkpoint.
        greater_is_better: Whether the larger of two figures is the better one.
        sequences_per_item: How many sequences a pass holds for each item of its batch, such as two for a pair.
        setting_without_base_model: The setting with which no frozen base model is needed in addition to the trained
            one, such as "training.keep_base = 0". None for an objective that never needs one.
        base_model: The frozen base model. `prepare_run` of trainer.py sets it before the first step if the objective
            needs it. Otherwise it is None.
        encoding: The tokenizer.
        settings: The settings of the training.
    """

    description: ClassVar[str]
    metric_name: ClassVar[str]
    greater_is_better: ClassVar[bool]
    sequences_per_item: ClassVar[int] = 1
    setting_without_base_model: ClassVar[str | None] = None

    def __init__(self, encoding: Encoding, settings: TrainingSettings) -> None:
        self.encoding = encoding
        self.settings = settings
        self.base_model: Any = None

    @abstractmethod
    def build_examples(self, rows: Sequence[Any], sequence_length: int, packing: bool) -> Examples:
        """Tokenize rows to sequences of at most `sequence_length` tokens; packed, a sequence may hold several rows."""

    @abstractmethod
    def collate_sequences(self, sequences: Sequence[Sequence[list[int]]]) -> dict[str, Tensor]:
        """Return the batch of a forward pass over some sequences, as tensors by name."""

    @abstractmethod
    def count_items(self, batch: Mapping[str, Tensor]) -> int:
        """Count in a batch what the loss of a step is the mean over: predicted tokens, or pairs."""

    @abstractmethod
    def compute_loss(self, model: Any, batch: Mapping[str, Tensor]) -> Tensor:
        """Run the trained model and return the loss of a batch, summed over its items; a scalar with gradients."""

    @abstractmethod
    def compute_figures(self, model: Any, batch: Mapping[str, Tensor]) -> Tensor:
        """Run the model on held-out sequences and return their figures, [sequences, any number].

        The figures of all held-out sequences are kept until `compute_metric` gets them, so they have to be few.
        """

    @abstractmethod
    def compute_metric(self, figures: Any) -> float:
        """Compute the metric from the figures of all held-out sequences, a NumPy array [sequences, any number]."""


class LanguageModeling(Objective):
    """Minimize the mean loss per predicted token and compare by perplexity; a row is a text."""

    description = 'Plain language modelling (section 2, "Model Finetuning", of *Toolformer*, Schick et al. 2023).'
    metric_name = "perplexity"
    greater_is_better = False

    def build_examples(self, rows: Sequence[str], sequence_length: int, packing: bool) -> Examples:
        """Tokenize texts to sequences; packed, a sequence holds several texts."""
        return build_examples(self.encoding, rows, sequence_length, packing)

    @staticmethod
    def collate_sequences(sequences: Sequence[Sequence[list[int]]]) -> dict[str, Tensor]:
        """Turn sequences into a batch of tensors of the shape [sequences, longest], padded on the right.

        Args:
            sequences: Each is a list of texts, and each text is a list of token ids. There are several texts in a
                sequence only with packing.

        Example:
            The texts [5, 6, 7] and [8, 9] in one sequence give

                input_ids 5 6 7 8 9, labels -100 6 7 -100 9, position_ids 0 1 2 0 1

            The first token of a text is not predicted, so its label is -100.
        """
        batch = {
            "input_ids": pad_sequences(sequences, padding_value=0),
            "labels": pad_sequences(map(_build_labels, sequences), padding_value=IGNORED_LABEL),
        }

        is_packed = any(len(texts) > 1 for texts in sequences)
        if is_packed:
            # transformers tells packed texts apart by their positions, which begin at 0 again.
            batch["position_ids"] = pad_sequences(map(_build_position_ids, sequences), padding_value=0)
        else:
            batch["attention_mask"] = pad_sequences(map(_build_attention_mask, sequences), padding_value=0)
        return batch

    def count_items(self, batch: Mapping[str, Tensor]) -> int:
        """Count the predicted tokens."""
        return int((batch["labels"] != IGNORED_LABEL).sum())

    def compute_loss(self, model: Any, batch: Mapping[str, Tensor]) -> Tensor:
        """Run the model, and return the summed loss of the predicted tokens, in nats.

        The loss is computed here, since some models (Gemma 3) compute the mean of each pass. It would depend on how a
        batch is spread over passes.
        """
        logits = model(**remove_labels(batch)).logits
        loss: Tensor = ForCausalLMLoss(logits, batch["labels"], logits.shape[-1], num_items_in_batch=1)
        return loss

    def compute_figures(self, model: Any, batch: Mapping[str, Tensor]) -> Tensor:
        """Return the summed loss in nats and the number of predicted tokens of each sequence, [sequences, 2]."""
        logits = model(**remove_labels(batch)).logits
        return compute_row_losses(logits, batch["labels"])

    def compute_metric(self, figures: Any) -> float:
        """Compute the perplexity over all held-out tokens.

        Args:
            figures: The loss and the number of tokens of each sequence, as `compute_figures` returns them,
                [sequences, 2].

        Returns:
            The perplexity. If it is too large for a float, it is infinite, so that it is never the best.
        """
        total_loss, token_count = figures.sum(0, dtype="float64")
        try:
            return math.exp(total_loss / token_count)
        except OverflowError:
            return math.inf


def _build_labels(texts: Sequence[list[int]]) -> list[list[int]]:
    """Return the tokens of each text with IGNORED_LABEL in place of the first one, which is not predicted."""
    return [[IGNORED_LABEL, *text[1:]] for text in texts]


def _build_position_ids(texts: Sequence[list[int]]) -> list[range]:
    """Return the positions of each text's tokens, which begin at 0 in every text."""
    return [range(len(text)) for text in texts]


def _build_attention_mask(texts: Sequence[list[int]]) -> list[list[int]]:
    """Return a 1 for each token of each text."""
    return [[1] * len(text) for text in texts]


def pad_sequences(sequences: Iterable[Iterable[Iterable[int]]], padding_value: int) -> Tensor:
    """Join the parts of each sequence, and return the sequences as the rows of a tensor.

    Args:
        sequences: The sequences, each with its parts. A part is a list of numbers, such as token ids.
        padding_value: The number with which shorter rows are filled up on the right.

    Returns:
        A tensor [sequences, longest].
    """
    rows = []
    for parts in sequences:
        joined_parts = list(chain.from_iterable(parts))
        rows.append(torch.tensor(joined_parts))
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=padding_value)


def remove_labels(batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return a batch without labels, as arguments of the model. With labels, the model would compute a loss too."""
    return {name: value for name, value in batch.items() if name != "labels"}


def compute_row_losses(logits: Tensor, labels: Tensor) -> Tensor:
    """Compute the loss of each row, and count its predicted tokens.

    Args:
        logits: [rows, tokens, vocabulary].
        labels: [rows, tokens]. A token whose label is IGNORED_LABEL is not predicted.

    Returns:
        A tensor [rows, 2] with the summed loss in nats and the number of predicted tokens of each row.
    """
    predicting_logits = logits[:, :-1].float()  # the logits at a token predict the next one
    targets = labels[:, 1:]

    # A token whose label is IGNORED_LABEL has the loss 0.
    token_losses = torch.nn.functional.cross_entropy(
        predicting_logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED_LABEL, reduction="none"
    )
    row_losses = token_losses.view_as(targets).sum(-1)

    predicted_counts = (targets != IGNORED_LABEL).sum(-1)
    return torch.stack([row_losses, predicted_counts], -1)


LEARNED_TOKENS_AFTER_CALL = len(WINDOW_WEIGHTS)
"""How many tokens after a call are learned like the call: as many as the filter weighs (paper, section 4.1)."""


def mark_tokens_in_or_after_calls(
    token_ids: Sequence[int],
    opening_token_ids: Sequence[int],
    can_end_call: Sequence[bool],
    is_whole_call: Callable[[Sequence[int]], bool],
) -> list[bool]:
    """Mark the tokens that belong to a tool call or closely follow one.

    These are learned from the text alone, the others in part from the base model's predictions (`keep_base`). In
    `It is [Add(1, 2) -> 3] 3.` the call is ` [Add(1, 2) -> 3]`. Any other text in brackets counts, too.

    Args:
        token_ids: The tokens.
        opening_token_ids: The tokens of ` [`.
        can_end_call: For each token, whether it contains a `]`, so that a call may end there.
        is_whole_call: Takes the tokens after ` [` up to a possible end of the call. Returns False if this is not the
            end, because the `]` is inside the call, in a quoted argument.

    Returns:
        For each token, True if it is in a call or among the LEARNED_TOKENS_AFTER_CALL tokens after one.
    """
    token_list = list(token_ids)
    call_ranges = _iter_call_ranges(token_list, list(opening_token_ids), can_end_call, is_whole_call)

    is_marked = [False] * len(token_list)
    for call_range in call_ranges:  # the token indices of a call
        end = min(call_range.stop + LEARNED_TOKENS_AFTER_CALL, len(token_list))
        is_marked[call_range.start : end] = [True] * (end - call_range.start)
    return is_marked


def _iter_call_ranges(
    token_ids: list[int],
    opening_token_ids: list[int],
    can_end_call: Sequence[bool],
    is_whole_call: Callable[[Sequence[int]], bool],
) -> Iterator[range]:
    """Find the calls in some tokens, as ranges of token indices.

    Args:
        token_ids: The tokens.
        opening_token_ids: The tokens of ` [`.
        can_end_call: For each token, whether it contains a `]`, so that a call may end there.
        is_whole_call: Takes the tokens after ` [` up to a possible end. Returns whether they are the whole call.

    Yields:
        The token indices of each call, from its ` [` to its `]`. A call that is not closed ends with the tokens.
    """
    previous_end = 0  # the end of the previous call
    while previous_end < len(token_ids):
        content_start = _find_call_content_start(token_ids, opening_token_ids, previous_end)  # after the next ` [`
        if content_start is None:
            return

        call_start = content_start - len(opening_token_ids)
        call_end = _find_call_end(token_ids, content_start, can_end_call, is_whole_call)
        yield range(call_start, call_end)
        previous_end = call_end


def _find_call_content_start(token_ids: list[int], opening_token_ids: list[int], first_position: int) -> int | None:
    """Return the index after the next ` [`, where the content of a call begins, or None if no ` [` follows.

    Args:
        token_ids: The tokens.
        opening_token_ids: The tokens of ` [`.
        first_position: The first index at which the last token of ` [` may be.
    """
    for opening_end in range(first_position + 1, len(token_ids) + 1):
        opening_start = opening_end - len(opening_token_ids)
        if token_ids[opening_start:opening_end] == opening_token_ids:
            return opening_end
    return None


def _find_call_end(
    token_ids: list[int],
    content_start: int,
    can_end_call: Sequence[bool],
    is_whole_call: Callable[[Sequence[int]], bool],
) -> int:
    """Find the end of a call.

    Args:
        token_ids: The tokens.
        content_start: The index after the call's ` [`.
        can_end_call: For each token, whether it contains a `]`. This test comes first, because it is cheap.
        is_whole_call: Takes the tokens after ` [` up to a possible end, and decodes them. Returns whether they are the
            whole call.

    Returns:
        The index after the `]` that closes the call, or the number of tokens if it is not closed.
    """
    for position in range(content_start, len(token_ids)):
        if can_end_call[position] and is_whole_call(token_ids[content_start : position + 1]):
            return position + 1
    return len(token_ids)


class KeepingBase(LanguageModeling):
    """Keep the base model's predictions outside calls (`training.keep_base`). Learn calls like `LanguageModeling`."""

    setting_without_base_model = "training.keep_base = 0"

    def compute_loss(self, model: Any, batch: Mapping[str, Tensor]) -> Tensor:
        """Compute the cross entropy with mixed targets in nats, summed over the predicted tokens.

        The target of a token is (1 - share) * the token itself + share * the prediction of the frozen base model. The
        share is the setting `keep_base`. In tool calls and just after them it is 0, because the base model does
        not know calls.
        """
        inputs = remove_labels(batch)
        # Nothing predicts the first token of a row, so these tensors are [rows, tokens - 1].
        targets = batch["labels"][:, 1:]
        log_probabilities = _compute_next_token_logits(model, inputs).log_softmax(-1)  # [rows, tokens - 1, vocabulary]

        text_losses = _compute_token_losses(log_probabilities, targets)
        base_losses = self._compute_base_model_losses(log_probabilities, inputs)

        base_share = self._compute_base_model_share(inputs["input_ids"])[:, 1:]
        mixed_losses = (1 - base_share) * text_losses + base_share * base_losses

        is_predicted = targets != IGNORED_LABEL
        summed_loss: Tensor = mixed_losses[is_predicted].sum()
        return summed_loss

    def _compute_base_model_losses(self, log_probabilities: Tensor, inputs: Mapping[str, Tensor]) -> Tensor:
        """Compute the loss of the trained model if the base model's predictions are the targets.

        Args:
            log_probabilities: Those of the trained model, [rows, tokens - 1, vocabulary].
            inputs: The batch without labels.

        Returns:
            The cross entropy of the two distributions for each token after the first, [rows, tokens - 1].
        """
        with torch.no_grad():
            base_probabilities = _compute_next_token_logits(self.base_model, inputs).softmax(-1)
        return -(base_probabilities * log_probabilities).sum(-1)

    def _compute_base_model_share(self, input_ids: Tensor) -> Tensor:
        """Return the base model's share in the target of each token of `input_ids`, both [rows, tokens]."""
        is_in_or_after_call = self._mark_tokens_in_or_after_calls(input_ids)
        return torch.where(is_in_or_after_call, 0.0, self.settings.keep_base)

    def _mark_tokens_in_or_after_calls(self, input_ids: Tensor) -> Tensor:
        """Return whether each token of `input_ids` is in a call or shortly after one, both [rows, tokens]."""
        rows = input_ids.cpu().numpy()
        can_end_call = self.encoding.can_end_sample(rows)  # whether each token contains a `]`

        marked_rows = []
        for row, can_end_call_in_row in zip(rows.tolist(), can_end_call.tolist(), strict=True):
            marked_row = mark_tokens_in_or_after_calls(
                row, self.encoding.call_start_ids, can_end_call_in_row, self.encoding.has_sample_ended
            )
            marked_rows.append(marked_row)
        return torch.tensor(marked_rows, device=input_ids.device)


def _compute_next_token_logits(model: Any, inputs: Mapping[str, Tensor]) -> Tensor:
    """Run a model and return the logits for all tokens but the first, [rows, tokens - 1, vocabulary], in float32."""
    logits: Tensor = model(**inputs).logits[:, :-1].float()  # the logits at a token predict the next one
    return logits


def _compute_token_losses(log_probabilities: Tensor, target_ids: Tensor) -> Tensor:
    """Return the negative log probability of each target.

    Args:
        log_probabilities: [rows, tokens, vocabulary].
        target_ids: [rows, tokens].

    Returns:
        The losses, [rows, tokens]. The loss of a target that is IGNORED_LABEL has no meaning.
    """
    vocabulary_indices = target_ids.clamp(min=0)  # IGNORED_LABEL is below 0 and cannot be an index
    target_log_probabilities = log_probabilities.gather(-1, vocabulary_indices[..., None])[..., 0]
    return -target_log_probabilities
