"""Learn calls, and keep what the base model predicts elsewhere (setting `training.keep_base`).

Plain finetuning on a small C* also learns its texts by heart, at the cost of all other text. Here the target of a token
outside calls is `share` times the base model's prediction plus `1 - share` times the token of the text. The paper has
no such term; its C* has a hundred thousand texts.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from toolformer_dag.model.encoding import Encoding
from toolformer_dag.training.sequences import IGNORED

LEARNED_AFTER = 5
"""Tokens behind a call that are learned as it is: as many as the filter weighs (paper, section 4.1)."""


def in_or_after_calls(
    row: Sequence[int], start: Sequence[int], may_end: Sequence[bool], has_ended: Callable[[Sequence[int]], bool]
) -> list[bool]:
    """Return for each token whether it stands in a call or up to LEARNED_AFTER tokens behind one.

    A call is what stands between ` [` (the tokens `start`) and the `]` that closes it; any text in brackets counts.
    `may_end`: which tokens hold a `]`; `has_ended`: whether the tokens behind ` [`, up to such a one, are a whole call.
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
