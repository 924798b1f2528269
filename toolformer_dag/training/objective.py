"""What finetuning trains on and compares: labels, losses, and the figure that chooses the checkpoint.

Plain language modelling (paper, section 2): every token of a text is predicted but the first, results too, and the
checkpoint with the lowest perplexity of the held-out texts is published.

Plain finetuning on a small C* also learns its texts by heart, at the cost of all other text. With `training.keep_base`,
the target of a token outside calls is that share times the base model's prediction plus the rest times the token of the
text. The paper has no such term; its C* has a hundred thousand texts.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from transformers.loss.loss_utils import ForCausalLMLoss

from toolformer_dag.model.encoding import Encoding
from toolformer_dag.settings.training_settings import TrainingSettings
from toolformer_dag.training.sequences import IGNORED, Examples, examples

METRIC, GREATER_IS_BETTER = "perplexity", False
"""What is measured on the held-out texts: its best value chooses the checkpoint."""
StepLoss = Callable[[Any, Mapping[str, Tensor], Tensor, Tensor | int | None], Tensor]
"""(outputs, inputs without labels, labels [rows, length], items in the batch) -> the mean loss of a step."""


@dataclass(frozen=True, slots=True)
class Objective:
    """What a run trains on and compares; another one is one more value and a line of `objective_of`.

    Texts are strings, and what is compared is a perplexity: pairs, as DPO takes them, would widen both.

    - `examples`: (encoding, texts, tokens of a sequence, packing) -> training sequences; `collate`: rows -> a batch.
    - `reduced`: (logits, labels) -> figures per row of a held-out pass; `compared`: these of all passes -> METRIC.
    - `beside_base`: (frozen base model, encoding, settings) -> the loss in training; None where the base model is not
      needed: then the loss is `mean_loss`.
    """

    examples: Callable[[Encoding, Sequence[str], int, bool], Examples]
    collate: Callable[[Sequence[Mapping[str, Any]]], dict[str, Tensor]]
    reduced: Callable[[Any, Tensor], Tensor]
    compared: Callable[[Any], dict[str, float]]
    beside_base: Callable[[Any, Encoding, TrainingSettings], StepLoss] | None = None


def collate(rows: Sequence[Mapping[str, list[list[int]]]]) -> dict[str, Tensor]:
    """Return tensors [rows, longest] of `input_ids`, `labels` and how texts are kept apart.

    Padding on the right and the first token of each text are not predicted. Rows of one text get an
    `attention_mask`; packed rows get `position_ids` that begin at 0 with each text, from which transformers' masks
    follow: no token attends to another text.
    """
    sequences = [row["input_ids"] for row in rows]
    labels = [[[IGNORED, *part[1:]] for part in parts] for parts in sequences]
    batch = {"input_ids": _padded(sequences, 0), "labels": _padded(labels, IGNORED)}
    if any(len(parts) > 1 for parts in sequences):
        positions = [[range(len(part)) for part in parts] for parts in sequences]
        return {**batch, "position_ids": _padded(positions, 0)}
    ones = [[[1] * len(part) for part in parts] for parts in sequences]
    return {**batch, "attention_mask": _padded(ones, 0)}


def _padded(sequences: Iterable[Iterable[Iterable[int]]], value: int) -> Tensor:
    rows = [torch.tensor(list(chain.from_iterable(parts))) for parts in sequences]
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=value)


def row_losses(logits: Any, labels: Tensor) -> Tensor:
    """Return the summed loss in nats and the number of predicted tokens, [rows, 2], to discard the logits."""
    scores = (logits[0] if isinstance(logits, tuple) else logits)[:, :-1].float()
    targets = labels[:, 1:]
    losses = torch.nn.functional.cross_entropy(scores.flatten(0, 1), targets.flatten(), reduction="none")
    return torch.stack([losses.view_as(targets).sum(-1), (targets != IGNORED).sum(-1)], -1)


def mean_loss(outputs: Any, labels: Tensor, num_items_in_batch: Tensor | int | None = None) -> Tensor:
    """Return the mean loss per predicted token of a step, over all passes and processes.

    Some models (Gemma 3) compute the mean of each pass instead, so that it depends on how a batch is spread.
    """
    logits = outputs["logits"]
    loss: Tensor = ForCausalLMLoss(logits, labels, logits.shape[-1], num_items_in_batch)
    return loss


def token_perplexity(evaluated: Any) -> dict[str, float]:
    """Compute the perplexity over all held-out tokens; infinite on overflow, so that it is never the best."""
    loss, tokens = evaluated.predictions.sum(0, dtype="float64")
    try:
        return {METRIC: math.exp(loss / tokens)}
    except OverflowError:
        return {METRIC: math.inf}


LEARNED_AFTER = 5
"""Tokens after a call that are learned as it is: as many as the filter weighs (paper, section 4.1)."""


def in_or_after_calls(
    row: Sequence[int], start: Sequence[int], may_end: Sequence[bool], has_ended: Callable[[Sequence[int]], bool]
) -> list[bool]:
    """Return for each token whether it stands in a call or up to LEARNED_AFTER tokens after one.

    A call is what stands between ` [` (the tokens `start`) and the `]` that closes it; any text in brackets counts.
    `may_end`: which tokens hold a `]`; `has_ended`: whether the tokens after ` [`, up to such a one, are a whole call.
    """
    found, begin, left = [False] * len(row), None, 0
    for at in range(len(row)):
        if begin is None and list(row[at - len(start) + 1 : at + 1]) == list(start):
            found[at - len(start) + 1 : at] = [True] * (len(start) - 1)
            begin = at + 1
        found[at] = begin is not None or left > 0
        left -= 1
        if begin is not None and begin <= at and may_end[at] and has_ended(row[begin : at + 1]):
            begin, left = None, LEARNED_AFTER
    return found


class KeptBase:
    """The frozen base model, and the loss that keeps its predictions outside calls."""

    def __init__(self, model: Any, encoding: Encoding, share: float) -> None:
        self._model, self._encoding, self._share = model.eval().requires_grad_(False), encoding, share

    def loss(
        self, outputs: Any, inputs: Mapping[str, Tensor], labels: Tensor, num_items_in_batch: Tensor | int | None
    ) -> Tensor:
        """Return the mean loss in nats per predicted token of a step. `labels`: [rows, length], as of `collate`."""
        with torch.no_grad():
            base = self._model(**inputs).logits[:, :-1].float().softmax(-1)
        scores = outputs["logits"][:, :-1].float().log_softmax(-1)
        targets = labels[:, 1:]
        predicted = targets != IGNORED
        given = -scores.gather(-1, targets.clamp(min=0)[..., None])[..., 0]
        share = torch.where(self._learned(inputs["input_ids"])[:, 1:], 0.0, self._share)
        losses = (1 - share) * given - share * (base * scores).sum(-1)
        count = predicted.sum() if num_items_in_batch is None else num_items_in_batch
        mean: Tensor = losses[predicted].sum() / count
        return mean

    def _learned(self, ids: Tensor) -> Tensor:
        rows = ids.cpu().numpy()
        pairs = zip(rows.tolist(), self._encoding.may_end(rows).tolist(), strict=True)
        found = [in_or_after_calls(row, self._encoding.start, ends, self._encoding.has_ended) for row, ends in pairs]
        return torch.tensor(found, device=ids.device)


LANGUAGE_MODELING = Objective(examples, collate, row_losses, token_perplexity)
KEEPING_BASE = replace(
    LANGUAGE_MODELING, beside_base=lambda base, encoding, settings: KeptBase(base, encoding, settings.keep_base).loss
)


def objective_of(settings: TrainingSettings) -> Objective:
    """Return the objective that the settings name."""
    return KEEPING_BASE if settings.keep_base else LANGUAGE_MODELING
