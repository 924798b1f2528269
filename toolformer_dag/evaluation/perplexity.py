"""Perplexity and bits per byte of plain text (paper, section 4.3)."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from toolformer_dag.language_model.load import LanguageModel
from toolformer_dag.training.collate import collate
from toolformer_dag.training.examples import windows

BATCH_TOKENS = 8_192


@dataclass(frozen=True, slots=True)
class Perplexity:
    """`nats`: the summed loss of `tokens` predicted tokens of texts of `utf8_bytes` bytes.

    `left_out`: tokens that a disabled model cannot write (` [` itself) and that are not predicted.
    """

    nats: float
    tokens: int
    utf8_bytes: int
    left_out: int

    @property
    def perplexity(self) -> float:
        """Per token: depends on the tokenizer."""
        return math.exp(self.nats / self.tokens)

    @property
    def bits_per_byte(self) -> float:
        """Can be compared between tokenizers."""
        return self.nats / math.log(2) / self.utf8_bytes


def perplexity(
    language_model: LanguageModel,
    texts: Sequence[str],
    *,
    disabled: bool = True,
    progress: Callable[[int, int], None] | None = None,
) -> Perplexity:
    """Each text on its own, BOS first where the tokenizer adds one; no EOS. Long texts in windows of the context.

    `disabled` sets the probability of ` [` to 0 (of its last token, behind the others). A text that holds ` [` then has
    probability 0: that token is left out and counted. Compare models with the same `disabled`. The first token of a
    window without BOS is not predicted. `progress` counts windows. Raises ValueError where nothing can be predicted.
    """
    encoding = language_model.encoding
    rows = [encoding.bos + text.ids for text in encoding.texts(texts)]
    pieces = sorted((one for ids in rows for one in windows(ids, language_model.context_length)), key=len)
    start = encoding.start if disabled else None
    nats, tokens, left_out, done = 0.0, 0, 0, 0
    for batch in _batches(pieces):
        loss, predicted, barred = _losses(language_model, batch, start)
        nats, tokens, left_out, done = nats + loss, tokens + predicted, left_out + barred, done + len(batch)
        if progress:
            progress(done, len(pieces))
    if not tokens:
        raise ValueError("no text has two tokens: there is nothing to predict")
    return Perplexity(nats, tokens, sum(len(text.encode()) for text in texts), left_out)


def _batches(pieces: Sequence[list[int]]) -> Iterator[list[list[int]]]:
    batch: list[list[int]] = []
    for ids in pieces:
        if batch and (len(batch) + 1) * len(ids) > BATCH_TOKENS:
            yield batch
            batch = []
        batch.append(ids)
    if batch:
        yield batch


@torch.inference_mode()
def _losses(
    language_model: LanguageModel, batch: Sequence[list[int]], start: Sequence[int] | None
) -> tuple[float, int, int]:
    """Summed loss in nats, tokens predicted, tokens left out."""
    inputs = {
        name: tensor.to(language_model.device) for name, tensor in collate([{"input_ids": b} for b in batch]).items()
    }
    labels = inputs.pop("labels")
    scores = language_model.model(**inputs, use_cache=False).logits[:, :-1].float()
    predicted = labels[:, 1:] >= 0
    barred = torch.zeros_like(predicted)
    if start:
        follows = _follows(labels, start[:-1])
        scores[..., start[-1]] = scores[..., start[-1]].masked_fill(follows, -torch.inf)
        barred = follows & (labels[:, 1:] == start[-1]) & predicted
    losses = scores.log_softmax(-1).gather(-1, labels[:, 1:].clamp(min=0)[..., None])[..., 0]
    kept = predicted & ~barred
    return -float(losses[kept].double().sum()), int(kept.sum()), int(barred.sum())


def _follows(labels: torch.Tensor, begun: Sequence[int]) -> torch.Tensor:
    """[rows, length - 1]: where the tokens up to and including this one end in `begun`."""
    found = torch.ones_like(labels[:, :-1], dtype=torch.bool)
    for back, token in enumerate(reversed(begun)):
        found &= labels.roll(back, 1)[:, :-1] == token
        found[:, :back] = False
    return found
