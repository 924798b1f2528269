"""Compute perplexity and bits per byte of plain text (paper, section 4.3)."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from toolformer_dag.evaluation.scores import Z_95
from toolformer_dag.model.backend import Backend, TokenQuery
from toolformer_dag.model.engine import backend_of
from toolformer_dag.model.loading import LanguageModel
from toolformer_dag.training.sequences import windows

PASS_TOKENS = 2_048
"""The most tokens of a window."""
PIECES = 256
"""Windows that are asked for together."""


@dataclass(frozen=True, slots=True)
class Perplexity:
    """The summed loss `nats` of `tokens` predicted tokens in texts of `utf8_bytes` bytes.

    `error`: the standard error of the nats per token with texts as the sample; None for fewer than two texts.
    """

    nats: float
    tokens: int
    utf8_bytes: int
    error: float | None = None

    @property
    def perplexity(self) -> float:
        """Return the perplexity per token; it depends on the tokenizer."""
        return math.exp(self.nats / self.tokens)

    @property
    def bits_per_byte(self) -> float:
        """Return the bits per byte, which are comparable between tokenizers."""
        return self.nats / math.log(2) / self.utf8_bytes

    @property
    def interval(self) -> tuple[float | None, float | None]:
        """Return the 95 % interval of the perplexity over texts like these; (None, None) for fewer than two."""
        if self.error is None:
            return None, None
        mean = self.nats / self.tokens
        return math.exp(mean - Z_95 * self.error), math.exp(mean + Z_95 * self.error)


def perplexity(
    language_model: LanguageModel, texts: Sequence[str], *, disabled: bool = True, backend: Backend | None = None
) -> Perplexity:
    """Compute the perplexity of texts, each on its own, with BOS where the tokenizer adds it, without EOS.

    - A long text is cut into windows of at most the model's context and `PASS_TOKENS` tokens. Windows share a token
      with the window before.
    - The first token of a text without BOS is not predicted.
    - `disabled` sets the probability of ` [` to 0 (of its last token after the others). Where a text holds ` [`, this
      token is left out. Compare only models with the same `disabled`.
    - `backend` runs the model; by default its own (`backend_of`).

    Raises ValueError where nothing can be predicted.
    """
    backend = backend or backend_of(language_model)
    encoding = language_model.encoding
    rows = [encoding.bos + text.ids for text in encoding.with_calls(texts)]
    length = min(backend.context_length, PASS_TOKENS)
    pieces = [(piece, text) for text, ids in enumerate(rows) for piece in windows(ids, length)]
    pieces.sort(key=lambda one: len(one[0]))
    start = encoding.start if disabled else []
    nats, tokens = np.zeros(len(texts)), np.zeros(len(texts), np.int64)
    for first in range(0, len(pieces), PIECES):
        batch = pieces[first : first + PIECES]
        answers = backend.log_probabilities([_query(piece, start) for piece, _ in batch])
        for (piece, text), log_p in zip(batch, answers, strict=True):
            losses = _losses(piece, log_p.astype(np.float64), start)
            nats[text] += losses.sum()
            tokens[text] += len(losses)
    predicted = int(tokens.sum())
    if not predicted:
        raise ValueError("no text has two tokens: there is nothing to predict")
    return Perplexity(float(nats.sum()), predicted, len("".join(texts).encode()), _error(nats, tokens))


def _error(nats: NDArray[np.float64], tokens: NDArray[np.int64]) -> float | None:
    """Return the standard error of sum(nats) / sum(tokens), a ratio estimate (Cochran 1977, equation 6.13)."""
    n = int((tokens > 0).sum())
    if n < 2:
        return None
    residuals = nats - nats.sum() / tokens.sum() * tokens
    return float(np.sqrt(n / (n - 1) * (residuals**2).sum()) / tokens.sum())


def _query(piece: list[int], start: Sequence[int]) -> TokenQuery:
    """Ask for every token of a piece but the first, and for the last token of ` [` beside it."""
    places = range(1, len(piece))
    return TokenQuery("perplexity", [], piece, places, [[piece[at], *start[-1:]] for at in places])


def _losses(piece: list[int], log_p: NDArray[np.float64], start: Sequence[int]) -> NDArray[np.float64]:
    """Return the losses in nats of the predicted tokens, from log p of each and of the last token of ` [`."""
    if not start:
        return -log_p[:, 0]
    begun = list(start[:-1])
    disabled = np.array([piece[:at][at - len(begun) :] == begun for at in range(1, len(piece))], np.bool_)
    predicted = ~(disabled & (np.array(piece[1:], np.int64) == start[-1]))
    rest = np.where(disabled, np.log1p(-np.exp(log_p[:, 1])), 0)  # log p of everything but the disabled token
    losses: NDArray[np.float64] = (rest - log_p[:, 0])[predicted]
    return losses
