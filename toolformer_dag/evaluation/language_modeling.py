"""Compute perplexity and bits per byte of plain text (paper, section 4.3)."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from toolformer_dag.evaluation.outcomes import Z_95
from toolformer_dag.model.backend import Backend, TokenQuery
from toolformer_dag.model.engine import backend_of
from toolformer_dag.model.loading import LanguageModel
from toolformer_dag.training.sequences import windows

PASS_TOKENS = 2_048
"""The most tokens of a window."""
BATCH_WINDOWS = 256
"""Windows that the backend gets together."""


@dataclass(frozen=True, slots=True)
class Perplexity:
    """The perplexity of texts.

    - `nats`: the summed loss
    - `tokens`: the number of predicted tokens
    - `utf8_bytes`: the length of the texts
    - `error`: the standard error of the nats per token with texts as the sample; None for fewer than two texts
    """

    nats: float
    tokens: int
    utf8_bytes: int
    error: float | None = None

    @property
    def perplexity(self) -> float:
        """The perplexity per token, which depends on the tokenizer."""
        return math.exp(self.nats / self.tokens)

    @property
    def bits_per_byte(self) -> float:
        """The bits per byte, which are comparable between tokenizers."""
        return self.nats / math.log(2) / self.utf8_bytes

    @property
    def interval(self) -> tuple[float | None, float | None]:
        """The ends of the perplexity's 95 % interval over texts like these; (None, None) for fewer than two."""
        if self.error is None:
            return None, None
        nats_per_token = self.nats / self.tokens
        half_width = Z_95 * self.error
        return math.exp(nats_per_token - half_width), math.exp(nats_per_token + half_width)


class _Window(NamedTuple):
    """Token ids that the model reads at once, and the index of the text that they belong to."""

    ids: list[int]
    text: int


def perplexity(
    language_model: LanguageModel, texts: Sequence[str], *, disabled: bool = True, backend: Backend | None = None
) -> Perplexity:
    """Measure the perplexity of texts, each on its own, with BOS if the tokenizer adds it, and without EOS.

    A long text is cut into windows of at most the model's context and `PASS_TOKENS` tokens. Each begins with
    the last token of the window before. The first token of a text without BOS is not predicted.

    Args:
        disabled: Whether the model may write no tool call. Then the probability of ` [`, with which calls
            begin, is 0 (of its last token after the others), and a ` [` of a text is left out. Compare only
            perplexities with the same `disabled`.
        backend: Runs the model. By default, the model's own (`backend_of`).

    Raises:
        ValueError: There is nothing to predict.
    """
    runner = backend_of(language_model) if backend is None else backend
    call_start = language_model.encoding.start if disabled else []  # the tokens of ` [`
    length = min(runner.context_length, PASS_TOKENS)

    sums = _LossSums(len(texts))
    for batch in _iter_batches(_split_texts_into_windows(language_model, texts, length)):
        losses_of_windows = _compute_batch_losses(runner, batch, call_start)
        for window, losses in zip(batch, losses_of_windows, strict=True):
            sums.add(window.text, losses)
    return sums.perplexity(utf8_bytes=_count_utf8_bytes(texts))


def _compute_batch_losses(
    runner: Backend, batch: Sequence[_Window], call_start: Sequence[int]
) -> list[NDArray[np.float64]]:
    """Return the losses of each window, with the start of a call disabled. call_start: see `_compute_losses`."""
    answers = runner.log_probabilities([_build_query(window.ids, call_start) for window in batch])
    losses = []
    for window, log_p in zip(batch, answers, strict=True):
        losses.append(_compute_losses(window.ids, log_p.astype(np.float64), call_start))
    return losses


def _count_utf8_bytes(texts: Sequence[str]) -> int:
    """Return how many bytes the texts take together in UTF-8."""
    return len("".join(texts).encode())


def _split_texts_into_windows(language_model: LanguageModel, texts: Sequence[str], length: int) -> list[_Window]:
    """Return the windows of all texts, of at most `length` tokens, the shortest first: less padding in a batch."""
    encoding = language_model.encoding
    text_windows: list[_Window] = []
    for text, tokens in enumerate(encoding.with_calls(texts)):
        for ids in windows(encoding.bos + tokens.ids, length):
            text_windows.append(_Window(ids, text))
    text_windows.sort(key=lambda window: len(window.ids))
    return text_windows


def _iter_batches(text_windows: Sequence[_Window]) -> Iterator[Sequence[_Window]]:
    """Yield the windows in order, BATCH_WINDOWS at a time."""
    for start in range(0, len(text_windows), BATCH_WINDOWS):
        yield text_windows[start : start + BATCH_WINDOWS]


class _LossSums:
    """The summed loss and the number of predicted tokens of each text."""

    def __init__(self, texts: int) -> None:
        self._nats = np.zeros(texts)
        self._tokens = np.zeros(texts, np.int64)

    def add(self, text: int, losses: NDArray[np.float64]) -> None:
        """Add the losses of a window to the sums of its text, which is an index."""
        self._nats[text] += losses.sum()
        self._tokens[text] += len(losses)

    def perplexity(self, utf8_bytes: int) -> Perplexity:
        """Return the perplexity of all texts. Raises ValueError if no token was predicted."""
        predicted_tokens = int(self._tokens.sum())
        if not predicted_tokens:
            raise ValueError("no text has two tokens: there is nothing to predict")
        return Perplexity(
            nats=float(self._nats.sum()),
            tokens=predicted_tokens,
            utf8_bytes=utf8_bytes,
            error=_compute_standard_error(self._nats, self._tokens),
        )


def _compute_standard_error(nats: NDArray[np.float64], tokens: NDArray[np.int64]) -> float | None:
    """Compute the standard error of the mean loss per token (a ratio of sums; Cochran 1977, 6.13).

    Args:
        nats: The summed loss of each text.
        tokens: The number of predicted tokens of each text.

    Returns:
        The error, or None if fewer than two texts have predicted tokens.
    """
    text_count = int((tokens > 0).sum())
    if text_count < 2:
        return None

    total_tokens = tokens.sum()
    nats_per_token = nats.sum() / total_tokens

    # The error is sqrt(n / (n - 1) * sum of residual squares) / sum(tokens), with n texts. The residual of a text: its
    # loss, less the loss of so many average tokens.
    residuals = nats - nats_per_token * tokens

    variance_of_sum = text_count / (text_count - 1) * (residuals**2).sum()
    return float(np.sqrt(variance_of_sum) / total_tokens)


def _build_query(ids: list[int], call_start: Sequence[int]) -> TokenQuery:
    """Build a query for the log probability of each token of a window after its first.

    Args:
        ids: The tokens of the window.
        call_start: The tokens of ` [`, if calls are disabled. Then the probability of the last of them is
            queried at every place too, because `_compute_losses` sets it to 0.
    """
    positions = range(1, len(ids))
    last_of_call_start = call_start[-1:]  # a list of one token, or empty
    return TokenQuery(
        kind="perplexity",
        prefix=[],
        text=ids,
        places=positions,
        tokens=[[ids[position], *last_of_call_start] for position in positions],
    )


def _compute_losses(ids: list[int], log_p: NDArray[np.float64], call_start: Sequence[int]) -> NDArray[np.float64]:
    """Compute the losses, in nats, of the tokens of a window after its first, as if no call could begin.

    If ` [` is the tokens 5, 7, the probability of 7 is 0 after each 5. Where the window itself has this 7, it gets
    no loss.

    Args:
        ids: The tokens of the window.
        log_p: The log probability of each token after the first. If calls are disabled, the second column is
            that of the last token of `call_start`.
        call_start: The tokens of ` [`. Empty if calls are not disabled.
    """
    token_log_p = log_p[:, 0]
    if not call_start:
        return -token_log_p

    *opening, disabled_token = call_start  # 5 and 7
    could_begin_call = _is_after_tokens(ids, opening)  # after each 5
    begins_call = could_begin_call & _is_token(ids, disabled_token)

    # Without the disabled token, of probability q, the others have p / (1 - q): their loss is log(1 - q) - log p.
    log_of_rest = np.where(could_begin_call, _compute_log_of_rest(log_p[:, 1]), 0)
    losses: NDArray[np.float64] = (log_of_rest - token_log_p)[~begins_call]
    return losses


def _is_token(ids: list[int], token: int) -> NDArray[np.bool_]:
    """Return for each token after the first whether it is `token`."""
    is_token: NDArray[np.bool_] = np.array(ids[1:], np.int64) == token
    return is_token


def _compute_log_of_rest(disabled_log_p: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return log(1 - q) for a token of probability q; without it, every other token has p / (1 - q)."""
    rest: NDArray[np.float64] = np.log1p(-np.exp(disabled_log_p))
    return rest


def _is_after_tokens(ids: list[int], opening: list[int]) -> NDArray[np.bool_]:
    """Return for each token after the first whether the tokens `opening` are right before it; all True for none."""
    follows = []
    for position in range(1, len(ids)):
        start = position - len(opening)
        follows.append(start >= 0 and ids[start:position] == opening)
    return np.array(follows, np.bool_)
