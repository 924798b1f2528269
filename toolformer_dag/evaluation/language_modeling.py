"""Compute perplexity and bits per byte of plain text (paper, section 4.3)."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from toolformer_dag.evaluation.outcomes import Z_95
from toolformer_dag.model.backend import Backend, TokenQuery
from toolformer_dag.model.engine import get_backend
from toolformer_dag.model.loading import LanguageModel
from toolformer_dag.training.sequences import iter_windows

MAX_WINDOW_TOKENS = 2_048
"""The most tokens of a window."""
WINDOWS_PER_BATCH = 256
"""Windows that the backend gets together."""


@dataclass(frozen=True, slots=True)
class Perplexity:
    """How well a model predicts some texts.

    Attributes:
        total_nats: The summed loss of all predicted tokens, in nats.
        token_count: The number of predicted tokens.
        utf8_bytes: The length of the texts in bytes.
        standard_error: The standard error of the nats per token, with texts as the sample. None for fewer than two
            texts.
    """

    total_nats: float
    token_count: int
    utf8_bytes: int
    standard_error: float | None = None

    @property
    def perplexity(self) -> float:
        """The perplexity per token, which depends on the tokenizer."""
        return math.exp(self.total_nats / self.token_count)

    @property
    def bits_per_byte(self) -> float:
        """The bits per byte, which are comparable between tokenizers."""
        return self.total_nats / math.log(2) / self.utf8_bytes

    @property
    def confidence_interval(self) -> tuple[float | None, float | None]:
        """The ends of the perplexity's 95 % interval over texts like these. Both are None for fewer than two texts."""
        if self.standard_error is None:
            return None, None

        nats_per_token = self.total_nats / self.token_count
        half_width = Z_95 * self.standard_error
        return math.exp(nats_per_token - half_width), math.exp(nats_per_token + half_width)


class _Window(NamedTuple):
    """Token ids that the model reads at once, and the index of the text that they belong to."""

    token_ids: list[int]
    text_index: int


def compute_perplexity(
    language_model: LanguageModel, texts: Sequence[str], *, disable_calls: bool = True, backend: Backend | None = None
) -> Perplexity:
    """Measure the perplexity of texts, each on its own, with BOS if the tokenizer adds it, and without EOS.

    A long text is cut into windows of at most the model's context and MAX_WINDOW_TOKENS tokens. Each begins with
    the last token of the window before. The first token of a text without BOS is not predicted.

    Args:
        language_model: The model.
        texts: The texts.
        disable_calls: Whether the model may write no tool call. Then the probability of ` [`, with which calls begin,
            is set to 0 (of its last token, where the others come before it), and this token of a ` [` in a text is
            not counted. Compare only perplexities with the same `disable_calls`.
        backend: Runs the model. By default, the model's own (`get_backend`).

    Raises:
        ValueError: There is nothing to predict.
    """
    if backend is None:
        backend = get_backend(language_model)
    call_start_ids = language_model.encoding.call_start_ids if disable_calls else []  # the tokens of ` [`

    max_window_tokens = min(backend.context_length, MAX_WINDOW_TOKENS)
    windows = _split_texts_into_windows(language_model, texts, max_window_tokens)

    loss_sums = _LossSums(len(texts))
    for window_batch in _iter_batches(windows):
        losses_by_window = _compute_batch_losses(backend, window_batch, call_start_ids)
        for window, losses in zip(window_batch, losses_by_window, strict=True):
            loss_sums.add_losses(window.text_index, losses)
    return loss_sums.build_perplexity(utf8_bytes=_count_utf8_bytes(texts))


def _compute_batch_losses(
    backend: Backend, window_batch: Sequence[_Window], call_start_ids: Sequence[int]
) -> list[NDArray[np.float64]]:
    """Run the model on some windows, and return the losses of the tokens of each, in nats.

    Args:
        backend: Runs the model.
        window_batch: The windows.
        call_start_ids: The tokens of ` [`, if calls are disabled. Otherwise empty.

    Returns:
        An array per window, with the losses of its tokens after the first. A ` [` has none if calls are disabled.
    """
    queries = [_build_token_query(window.token_ids, call_start_ids) for window in window_batch]
    log_p_by_window = backend.compute_log_probabilities(queries)

    losses_by_window = []
    for window, log_p in zip(window_batch, log_p_by_window, strict=True):
        losses = _compute_losses(window.token_ids, log_p.astype(np.float64), call_start_ids)
        losses_by_window.append(losses)
    return losses_by_window


def _count_utf8_bytes(texts: Sequence[str]) -> int:
    """Return how many bytes the texts take together in UTF-8."""
    return len("".join(texts).encode())


def _split_texts_into_windows(
    language_model: LanguageModel, texts: Sequence[str], max_window_tokens: int
) -> list[_Window]:
    """Return the windows of all texts, the shortest first, so that a batch needs less padding.

    Args:
        language_model: The model, whose tokenizer is used.
        texts: The texts.
        max_window_tokens: The most tokens of a window.
    """
    encoding = language_model.encoding
    windows: list[_Window] = []
    for text_index, tokens in enumerate(encoding.encode_texts_with_calls(texts)):
        text_token_ids = encoding.bos_ids + tokens.token_ids
        for window_token_ids in iter_windows(text_token_ids, max_window_tokens):
            windows.append(_Window(window_token_ids, text_index))

    windows.sort(key=lambda window: len(window.token_ids))
    return windows


def _iter_batches(windows: Sequence[_Window]) -> Iterator[Sequence[_Window]]:
    """Yield the windows in order, WINDOWS_PER_BATCH at a time."""
    for start in range(0, len(windows), WINDOWS_PER_BATCH):
        yield windows[start : start + WINDOWS_PER_BATCH]


class _LossSums:
    """The summed loss and the number of predicted tokens of each text."""

    def __init__(self, text_count: int) -> None:
        self._nats_by_text = np.zeros(text_count)
        self._token_counts_by_text = np.zeros(text_count, np.int64)

    def add_losses(self, text_index: int, losses: NDArray[np.float64]) -> None:
        """Add the losses of a window, in nats, to the sums of its text."""
        self._nats_by_text[text_index] += losses.sum()
        self._token_counts_by_text[text_index] += len(losses)

    def build_perplexity(self, utf8_bytes: int) -> Perplexity:
        """Return the perplexity of all texts, which have so many bytes together.

        Raises:
            ValueError: No token was predicted.
        """
        predicted_token_count = int(self._token_counts_by_text.sum())
        if not predicted_token_count:
            raise ValueError("no text has two tokens: there is nothing to predict")

        return Perplexity(
            total_nats=float(self._nats_by_text.sum()),
            token_count=predicted_token_count,
            utf8_bytes=utf8_bytes,
            standard_error=_compute_standard_error(self._nats_by_text, self._token_counts_by_text),
        )


def _compute_standard_error(nats_by_text: NDArray[np.float64], token_counts_by_text: NDArray[np.int64]) -> float | None:
    """Compute the standard error of the mean loss per token (a ratio of sums; Cochran 1977, 6.13).

    Args:
        nats_by_text: The summed loss of each text.
        token_counts_by_text: The number of predicted tokens of each text.

    Returns:
        The error, or None if fewer than two texts have predicted tokens.
    """
    text_count = int((token_counts_by_text > 0).sum())
    if text_count < 2:
        return None

    total_tokens = token_counts_by_text.sum()
    nats_per_token = nats_by_text.sum() / total_tokens

    # A text's residual is its loss, less the loss of so many average tokens.
    residuals = nats_by_text - nats_per_token * token_counts_by_text

    # With n texts, the error is sqrt(n / (n - 1) * sum of squared residuals) / sum of tokens.
    variance_of_sum = text_count / (text_count - 1) * (residuals**2).sum()
    return float(np.sqrt(variance_of_sum) / total_tokens)


def _build_token_query(token_ids: list[int], call_start_ids: Sequence[int]) -> TokenQuery:
    """Build a query for the log probability of each token of a window after its first.

    Args:
        token_ids: The tokens of the window.
        call_start_ids: The tokens of ` [`, if calls are disabled. Then the probability of the last of them is
            queried at every place too, because `_compute_losses` sets it to 0.
    """
    predicted_positions = range(1, len(token_ids))
    disabled_ids = call_start_ids[-1:]  # a list of one token, or empty
    target_ids_by_place = [[token_ids[position], *disabled_ids] for position in predicted_positions]
    return TokenQuery(
        count_field="perplexity",
        prefix_ids=[],
        text_ids=token_ids,
        query_positions=predicted_positions,
        target_ids_by_place=target_ids_by_place,
    )


def _compute_losses(
    token_ids: list[int], log_p: NDArray[np.float64], call_start_ids: Sequence[int]
) -> NDArray[np.float64]:
    """Compute the losses, in nats, of the tokens of a window after its first, as if no call could begin.

    If ` [` is the tokens 5, 7, the probability of 7 is 0 after each 5. Where the window itself has this 7, it gets
    no loss.

    Args:
        token_ids: The tokens of the window.
        log_p: The log probabilities at each token after the first, [tokens - 1, 1 or 2]. The first column is of the
            token itself. If calls are disabled, the second column is of the last token of `call_start_ids`.
        call_start_ids: The tokens of ` [`. Empty if calls are not disabled.

    Returns:
        The losses of the tokens after the first, without those that would begin a call.
    """
    token_log_p = log_p[:, 0]
    if not call_start_ids:
        return -token_log_p

    *preceding_ids, disabled_id = call_start_ids  # 5 and 7
    could_begin_call = _is_after_tokens(token_ids, preceding_ids)  # after each 5
    begins_call = could_begin_call & _is_token(token_ids, disabled_id)

    # Without the disabled token, of probability q, the others have p / (1 - q): their loss is log(1 - q) - log p.
    log_of_remaining = _compute_log_of_remaining_probability(log_p[:, 1])
    correction = np.where(could_begin_call, log_of_remaining, 0)
    all_losses = correction - token_log_p
    losses: NDArray[np.float64] = all_losses[~begins_call]
    return losses


def _is_token(token_ids: list[int], token_id: int) -> NDArray[np.bool_]:
    """Return for each token after the first whether it is `token_id`."""
    is_token: NDArray[np.bool_] = np.array(token_ids[1:], np.int64) == token_id
    return is_token


def _compute_log_of_remaining_probability(disabled_log_p: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return log(1 - q), the log probability of all tokens but a disabled one, from log q of the disabled one."""
    log_of_remaining: NDArray[np.float64] = np.log1p(-np.exp(disabled_log_p))
    return log_of_remaining


def _is_after_tokens(token_ids: list[int], preceding_ids: list[int]) -> NDArray[np.bool_]:
    """Return for each token after the first whether certain tokens stand right before it.

    Args:
        token_ids: The tokens of a window.
        preceding_ids: The tokens that have to stand before. If there are none, all tokens count.
    """
    is_after = []
    for position in range(1, len(token_ids)):
        start = position - len(preceding_ids)
        is_after.append(start >= 0 and token_ids[start:position] == preceding_ids)
    return np.array(is_after, np.bool_)
