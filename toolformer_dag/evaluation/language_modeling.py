"""Perplexity and bits per byte of plain text (paper, section 4.3)."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from toolformer_dag.model.attention import ROWS
from toolformer_dag.model.loading import LanguageModel
from toolformer_dag.training.sequences import IGNORED, collate, windows

PASS_TOKENS = 2_048
"""The longest window, and all that one pass holds: its logits take 2 GB in float32 with Gemma's 256,000 tokens."""


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
) -> Perplexity:
    """Each text on its own, BOS first where the tokenizer adds one; no EOS.

    A longer text goes in windows of the model's positions, at most `PASS_TOKENS` tokens, that share one token.
    `disabled` sets the probability of ` [` to 0 (of its last token, behind the others). A text that holds ` [` then has
    probability 0: that token is left out and counted. Compare models with the same `disabled`. The first token of a
    window without BOS is not predicted. Raises ValueError where nothing can be predicted.
    """
    encoding = language_model.encoding
    rows = [encoding.bos + text.ids for text in encoding.texts(texts)]
    length = min(language_model.positions, PASS_TOKENS)
    pieces = sorted((one for ids in rows for one in windows(ids, length)), key=len)
    start = encoding.start if disabled else None
    nats, tokens, left_out = 0.0, 0, 0
    for batch in _batches(pieces):
        loss, predicted, barred = _losses(language_model, batch, start)
        nats, tokens, left_out = nats + loss, tokens + predicted, left_out + barred
    if not tokens:
        raise ValueError("no text has two tokens: there is nothing to predict")
    return Perplexity(nats, tokens, sum(len(text.encode()) for text in texts), left_out)


def _batches(pieces: Sequence[list[int]]) -> Iterator[list[list[int]]]:
    batch: list[list[int]] = []
    for ids in pieces:
        if batch and (len(batch) + 1) * len(ids) > PASS_TOKENS:
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
    targets = torch.nn.functional.pad(labels[:, 1:], (0, 1), value=IGNORED).flatten()
    logits = language_model.model(**inputs, use_cache=False).logits.flatten(0, 1)
    disabled = _follows(labels, start[:-1]).flatten() if start else torch.zeros_like(targets, dtype=torch.bool)
    token = start[-1] if start else 0
    barred = disabled & (targets == token)
    kept = (targets >= 0) & ~barred
    losses = _log_probabilities(logits, targets.clamp(min=0), disabled, token)[kept]
    return -float(losses.double().sum()), int(kept.sum()), int(barred.sum())


def _log_probabilities(logits: torch.Tensor, targets: torch.Tensor, disabled: torch.Tensor, token: int) -> torch.Tensor:
    """log p of `targets` [N] in float32, with the probability of `token` set to 0 where `disabled` [N].

    `ROWS` rows of `logits` [N, V] at a time, for only so many are copied.
    """
    found = []
    for part in (slice(first, first + ROWS) for first in range(0, len(logits), ROWS)):
        scores = logits[part].float()
        scores[disabled[part], token] = -torch.inf
        found.append(scores.gather(1, targets[part, None])[:, 0] - scores.logsumexp(1))
    return torch.cat(found)


def _follows(labels: torch.Tensor, begun: Sequence[int]) -> torch.Tensor:
    """[rows, length]: where the tokens up to and including this one end in `begun`."""
    found = torch.ones_like(labels, dtype=torch.bool)
    for back, token in enumerate(reversed(begun)):
        found &= labels.roll(back, 1) == token
        found[:, :back] = False
    return found
