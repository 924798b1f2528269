"""Compute perplexity and bits per byte of plain text (paper, section 4.3)."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from toolformer_dag.model.attention import ROWS, target_log_probabilities
from toolformer_dag.model.loading import LanguageModel
from toolformer_dag.model.memory import batches
from toolformer_dag.training.sequences import IGNORED, collate, windows

PASS_TOKENS = 2_048
"""The most tokens of a window and of a pass: with Gemma's 256,000 tokens, the logits take 2 GB in float32."""


@dataclass(frozen=True, slots=True)
class Perplexity:
    """The summed loss `nats` of `tokens` predicted tokens in texts of `utf8_bytes` bytes.

    `left_out`: the number of tokens that a disabled model cannot write (` [`); they are not predicted.
    """

    nats: float
    tokens: int
    utf8_bytes: int
    left_out: int

    @property
    def perplexity(self) -> float:
        """Return the perplexity per token; it depends on the tokenizer."""
        return math.exp(self.nats / self.tokens)

    @property
    def bits_per_byte(self) -> float:
        """Return the bits per byte, which are comparable between tokenizers."""
        return self.nats / math.log(2) / self.utf8_bytes


def perplexity(
    language_model: LanguageModel,
    texts: Sequence[str],
    *,
    disabled: bool = True,
) -> Perplexity:
    """Compute the perplexity of texts, each on its own, with BOS where the tokenizer adds it, without EOS.

    - A long text is cut into windows of at most the model's positions and `PASS_TOKENS` tokens. Windows share a token
      with the window before.
    - The first token of a text without BOS is not predicted.
    - `disabled` sets the probability of ` [` to 0 (of its last token after the others). Where a text holds ` [`, this
      token is left out and counted. Compare only models with the same `disabled`.

    Raises ValueError where nothing can be predicted.
    """
    encoding = language_model.encoding
    rows = [encoding.bos + text.ids for text in encoding.texts(texts)]
    length = min(language_model.positions, PASS_TOKENS)
    pieces = sorted((piece for ids in rows for piece in windows(ids, length)), key=len)
    start = encoding.start if disabled else None
    nats, tokens, left_out = 0.0, 0, 0
    for batch in batches(range(len(pieces)), [len(piece) for piece in pieces], PASS_TOKENS):
        loss, predicted, skipped = _losses(language_model, [pieces[number] for number in batch], start)
        nats, tokens, left_out = nats + loss, tokens + predicted, left_out + skipped
    if not tokens:
        raise ValueError("no text has two tokens: there is nothing to predict")
    return Perplexity(nats, tokens, sum(len(text.encode()) for text in texts), left_out)


@torch.inference_mode()
def _losses(
    language_model: LanguageModel, batch: Sequence[list[int]], start: Sequence[int] | None
) -> tuple[float, int, int]:
    """Return the summed loss in nats, the number of tokens predicted, and the number left out."""
    inputs = {
        name: tensor.to(language_model.device) for name, tensor in collate([{"input_ids": b} for b in batch]).items()
    }
    labels = inputs.pop("labels")
    targets = torch.nn.functional.pad(labels[:, 1:], (0, 1), value=IGNORED).flatten()
    logits = language_model.model(**inputs, use_cache=False).logits.flatten(0, 1)
    disabled = _follows(labels, start[:-1]).flatten() if start else torch.zeros_like(targets, dtype=torch.bool)
    token = start[-1] if start else 0
    left_out = disabled & (targets == token)
    kept = (targets >= 0) & ~left_out
    losses = _log_probabilities(logits, targets.clamp(min=0), disabled, token)[kept]
    return -float(losses.double().sum()), int(kept.sum()), int(left_out.sum())


def _log_probabilities(logits: torch.Tensor, targets: torch.Tensor, disabled: torch.Tensor, token: int) -> torch.Tensor:
    """Compute log p of `targets` [N] in float32 with the probability of `token` set to 0 where `disabled` [N].

    Only `ROWS` rows of `logits` [N, V] are copied at a time.
    """
    found = []
    for part in (slice(first, first + ROWS) for first in range(0, len(logits), ROWS)):
        scores = logits[part].float()
        scores[disabled[part], token] = -torch.inf
        found.append(target_log_probabilities(scores, targets[part]))
    return torch.cat(found)


def _follows(labels: torch.Tensor, begun: Sequence[int]) -> torch.Tensor:
    """Return a mask [rows, length]: whether the tokens up to this position end in `begun`."""
    found = torch.ones_like(labels, dtype=torch.bool)
    for back, token in enumerate(reversed(begun)):
        found &= labels.roll(back, 1) == token
        found[:, :back] = False
    return found
