"""What an objective makes of a run's rows: sequences, a loss, the metric that chooses the checkpoint.

Plain language modelling (paper, section 2): every token of a text is predicted but the first, results too, and the
checkpoint with the lowest perplexity of the held-out texts is published.

Plain finetuning on a small C* also learns its texts by heart, at the cost of all other text. With `training.keep_base`,
the target of a token outside calls is that share times the base model's prediction plus the rest times the token of the
text. The paper has no such term; its C* has a hundred thousand texts.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
from typing import Any, ClassVar

import torch
from torch import Tensor
from transformers.loss.loss_utils import ForCausalLMLoss

from toolformer_dag.model.encoding import Encoding
from toolformer_dag.settings.training_settings import TrainingSettings
from toolformer_dag.training.sequences import IGNORED, Examples, examples


class Objective(ABC):
    """What a run minimizes and compares; another one is a subclass, and a line of `objective_of` in recipe.py.

    - `described`: what it is, in a sentence of the model card.
    - `metric`: the name of the figure that chooses the checkpoint; `greater_is_better`: which of two is better.
    - `sequences_per_item`: how many sequences a pass holds of each item of its batch: of a pair, two.
    - `without_base`: the setting under which no frozen base model is needed beside the trained one, as in
      `training.keep_base = 0`; None where it never is.
    - `base`: the frozen base model, set before the first step where it is needed.
    """

    described: ClassVar[str]
    metric: ClassVar[str]
    greater_is_better: ClassVar[bool]
    sequences_per_item: ClassVar[int] = 1
    without_base: ClassVar[str | None] = None

    def __init__(self, encoding: Encoding, settings: TrainingSettings) -> None:
        self.encoding, self.settings = encoding, settings
        self.base: Any = None

    @abstractmethod
    def examples(self, rows: Sequence[Any], length: int, packing: bool) -> Examples:
        """Tokenize rows to sequences of at most `length` tokens, each of one or several lists of token ids."""

    @abstractmethod
    def collate(self, sequences: Sequence[Sequence[list[int]]]) -> dict[str, Tensor]:
        """Return the batch of one pass over some sequences."""

    @abstractmethod
    def items(self, batch: Mapping[str, Tensor]) -> int:
        """Count in a batch what the loss of a step is the mean over: predicted tokens, or pairs."""

    @abstractmethod
    def loss(self, model: Any, batch: Mapping[str, Tensor]) -> Tensor:
        """Run the model that is trained, and return the summed loss of a batch's items."""

    @abstractmethod
    def figures(self, model: Any, batch: Mapping[str, Tensor]) -> Tensor:
        """Run the model on held-out sequences, and return [sequences, any] figures of each, small enough to keep."""

    @abstractmethod
    def compared(self, figures: Any) -> float:
        """Return the metric from the figures of all held-out sequences, a NumPy array."""


class LanguageModeling(Objective):
    """The mean loss per predicted token; a row is a text."""

    described = 'Plain language modelling (section 2, "Model Finetuning", of *Toolformer*, Schick et al. 2023).'
    metric, greater_is_better = "perplexity", False

    def examples(self, rows: Sequence[str], length: int, packing: bool) -> Examples:
        """Tokenize texts to sequences; packed, a sequence holds several texts."""
        return examples(self.encoding, rows, length, packing)

    @staticmethod
    def collate(sequences: Sequence[Sequence[list[int]]]) -> dict[str, Tensor]:
        """Return tensors [sequences, longest] of `input_ids`, `labels` and how texts are kept apart.

        Padding on the right and the first token of each text are not predicted. Sequences of one text get an
        `attention_mask`; packed ones get `position_ids` that begin at 0 with each text, from which transformers' masks
        follow: no token attends to another text.
        """
        labels = [[[IGNORED, *part[1:]] for part in parts] for parts in sequences]
        batch = {"input_ids": padded(sequences, 0), "labels": padded(labels, IGNORED)}
        if any(len(parts) > 1 for parts in sequences):
            positions = [[range(len(part)) for part in parts] for parts in sequences]
            return {**batch, "position_ids": padded(positions, 0)}
        ones = [[[1] * len(part) for part in parts] for parts in sequences]
        return {**batch, "attention_mask": padded(ones, 0)}

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
        """Return the summed loss and the number of predicted tokens; see `row_losses`."""
        return row_losses(model(**without_labels(batch)).logits, batch["labels"])

    def compared(self, figures: Any) -> float:
        """Compute the perplexity over all held-out tokens; infinite on overflow, so that it is never the best."""
        loss, tokens = figures.sum(0, dtype="float64")
        try:
            return math.exp(loss / tokens)
        except OverflowError:
            return math.inf


def padded(sequences: Iterable[Iterable[Iterable[int]]], value: int) -> Tensor:
    """Return a tensor [sequences, longest] of the joined parts of each, filled up with `value` on the right."""
    rows = [torch.tensor(list(chain.from_iterable(parts))) for parts in sequences]
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=value)


def without_labels(batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return what the model is given of a batch: with labels it would compute a loss of its own."""
    return {name: value for name, value in batch.items() if name != "labels"}


def row_losses(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the summed loss in nats and the number of predicted tokens, [rows, 2], to discard the logits."""
    scores = logits[:, :-1].float()
    targets = labels[:, 1:]
    losses = torch.nn.functional.cross_entropy(scores.flatten(0, 1), targets.flatten(), reduction="none")
    return torch.stack([losses.view_as(targets).sum(-1), (targets != IGNORED).sum(-1)], -1)


LEARNED_AFTER = 5
"""Tokens after a call that are learned as it is: as many as the filter weighs (paper, section 4.1)."""


def in_or_after_calls(
    row: Sequence[int], start: Sequence[int], may_end: Sequence[bool], has_ended: Callable[[Sequence[int]], bool]
) -> list[bool]:
    """Return for each token whether it stands in a call or up to LEARNED_AFTER tokens after one.

    A call is what stands between ` [` (the tokens `start`) and the `]` that closes it; any text in brackets counts.
    `may_end`: which tokens hold a `]`; `has_ended`: whether the tokens after ` [`, up to such a one, are a whole call.
    """
    inside, begin, left = [False] * len(row), None, 0
    for at in range(len(row)):
        if begin is None and list(row[at - len(start) + 1 : at + 1]) == list(start):
            inside[at - len(start) + 1 : at] = [True] * (len(start) - 1)
            begin = at + 1
        inside[at] = begin is not None or left > 0
        left -= 1
        if begin is not None and begin <= at and may_end[at] and has_ended(row[begin : at + 1]):
            begin, left = None, LEARNED_AFTER
    return inside


class KeepingBase(LanguageModeling):
    """Language modelling whose loss keeps the base model's predictions outside calls (`training.keep_base`)."""

    without_base = "training.keep_base = 0"

    def loss(self, model: Any, batch: Mapping[str, Tensor]) -> Tensor:
        """Return the summed loss of the predicted tokens by their mixed targets, in nats."""
        inputs, targets = without_labels(batch), batch["labels"][:, 1:]
        scores = model(**inputs).logits[:, :-1].float().log_softmax(-1)
        with torch.no_grad():
            base = self.base(**inputs).logits[:, :-1].float().softmax(-1)
        given = -scores.gather(-1, targets.clamp(min=0)[..., None])[..., 0]
        share = torch.where(self._learned(inputs["input_ids"])[:, 1:], 0.0, self.settings.keep_base)
        losses = (1 - share) * given - share * (base * scores).sum(-1)
        summed: Tensor = losses[targets != IGNORED].sum()
        return summed

    def _learned(self, ids: Tensor) -> Tensor:
        rows = ids.cpu().numpy()
        pairs = zip(rows.tolist(), self.encoding.may_end(rows).tolist(), strict=True)
        learned = [in_or_after_calls(row, self.encoding.start, ends, self.encoding.has_ended) for row, ends in pairs]
        return torch.tensor(learned, device=ids.device)
