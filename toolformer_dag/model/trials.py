"""Trials of a model on ordinary text: whether other ways of computing, or another beginning, change its numbers."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import cycle, islice
from typing import Any

import torch
from torch import Tensor

from toolformer_dag.model.encoding import Encoding
from toolformer_dag.model.memory import is_out_of_memory_error
from toolformer_dag.model.weights import ModelError

ORDINARY_TEXT = (
    "The harbour of the town was built in 1912, and more than 30 ships could lie in it at the same time. When the war "
    "was over, most of them were sold to people from the other side of the river, who needed boats to bring fish and "
    "wood to the market on Monday morning."
)
"""English without names or markup, on which a model behaves as it does in use."""
TRIAL_TOKEN_COUNT = 16
"""Tokens of a trial."""
TRIAL_END_TOKEN_COUNT = 8
"""Tokens of another end for it, in place of as many of its last tokens."""
TRIAL_BEGINNING_TOKEN_COUNT = TRIAL_TOKEN_COUNT - TRIAL_END_TOKEN_COUNT
"""Tokens of a trial before its end."""
SAME_ORDER_LOGIT_TOLERANCES = {torch.float32: 1e-4, torch.float16: 1e-3, torch.bfloat16: 1e-2}
"""Differences, in shares of the largest logit, that rounding explains between passes of the same operations."""
LOGIT_TOLERANCES = {torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 1e-1}
"""Differences, in shares of the largest logit, that another order of summation explains; less than a missing token."""


@contextmanager
def use_exact_products() -> Iterator[None]:
    """Within the `with` block, multiply float32 exactly: TF32 on a GPU rounds more than the trials of a model allow."""
    precision = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(precision)


@use_exact_products()
@torch.no_grad()  # no inference_mode: a model may cache tensors in a pass, such as rotary tables, and train with them
def check_model_is_causal(model: Any, trial_token_ids: Sequence[int]) -> None:
    """Check that the tokens of a model do not see later tokens. BERT's do, although it loads as a causal model, too.

    The check compares two sequences of 16 tokens with the same first 8 tokens and different ends. A causal model
    gives the first 8 tokens the same logits in both.

    Args:
        model: The model.
        trial_token_ids: 24 tokens of ordinary text, from `list_trial_token_ids`.

    Raises:
        ModelError: The model is not causal.
    """
    beginning_ids = trial_token_ids[:TRIAL_BEGINNING_TOKEN_COUNT]
    # Both ends are equally long, because another length rounds differently, and a mixture of experts may then choose
    # other experts.
    end_ids = trial_token_ids[TRIAL_BEGINNING_TOKEN_COUNT:TRIAL_TOKEN_COUNT]
    other_end_ids = trial_token_ids[TRIAL_TOKEN_COUNT:]

    logits = compute_model_logits(model, [*beginning_ids, *end_ids])[: len(beginning_ids)]  # [8, V]
    other_logits = compute_model_logits(model, [*beginning_ids, *other_end_ids])[: len(beginning_ids)]
    if _are_logits_different(logits, other_logits, SAME_ORDER_LOGIT_TOLERANCES[model.dtype]):
        raise ModelError(
            f"{type(model).__name__} attends to later tokens; use a causal model (some models need "
            "is_decoder = true in config.json)"
        )


def _are_logits_different(logits: Tensor, other_logits: Tensor, tolerance: float) -> bool:
    """Return whether logits differ by more than `tolerance` times the largest of `logits`. It is False for NaN."""
    largest_difference = (logits - other_logits).abs().max()
    return bool(largest_difference > tolerance * logits.abs().max())


def list_trial_token_ids(encoding: Encoding) -> list[int]:
    """List tokens of ordinary text with which to try a model.

    BOS comes first if the tokenizer adds it. The tokens repeat if text and vocabulary have too few.

    Returns:
        TRIAL_TOKEN_COUNT + TRIAL_END_TOKEN_COUNT tokens.
    """
    count = TRIAL_TOKEN_COUNT + TRIAL_END_TOKEN_COUNT
    ordinary_ids = _list_ordinary_token_ids(encoding, count)
    token_ids = [*encoding.bos_ids, *islice(cycle(ordinary_ids), count)]
    return token_ids[:count]


def _list_ordinary_token_ids(encoding: Encoding, count: int) -> list[int]:
    """List tokens with which a model can be tried: those of ORDINARY_TEXT, without special ones.

    After special tokens a trained model's logits are chaotic. If the text has fewer than `count` tokens, all other
    tokens of the vocabulary follow, except special ones. So the list may be longer or shorter than `count`.
    """
    tokenizer = encoding.tokenizer
    special_ids = {*tokenizer.all_special_ids, *tokenizer.added_tokens_decoder}

    [text_tokens] = encoding.encode_texts([ORDINARY_TEXT])
    ordinary_ids = [token for token in text_tokens.token_ids if token not in special_ids]
    if len(ordinary_ids) < count:
        vocabulary = {*tokenizer.get_vocab().values()}
        ordinary_ids += sorted(vocabulary - {*ordinary_ids, *special_ids})
    return ordinary_ids


def compute_model_logits(model: Any, token_ids: Sequence[int]) -> Tensor:
    """Compute the model's own logits [tokens, V] in float32, with its own attention and without a cache."""
    logits: Tensor = model(torch.tensor([token_ids], device=model.device)).logits[0].float()
    return logits


def compute_logits_or_none(compute_logits: Callable[[], Tensor]) -> Tensor | None:
    """Call `compute_logits` and return its logits, or None if the model cannot be run in this way.

    Raises:
        RuntimeError: Memory ran out.
    """
    try:
        return compute_logits()
    except (AttributeError, TypeError, KeyError, IndexError, ValueError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and is_out_of_memory_error(error):
            raise
        return None


def are_logits_close(expected_logits: Tensor, actual_logits: Tensor | None, tolerance: float) -> bool:
    """Return whether logits differ by at most `tolerance` times the largest expected one. None and NaN never do."""
    if actual_logits is None:
        return False
    largest_difference = (expected_logits - actual_logits).abs().max()
    return bool(largest_difference <= tolerance * expected_logits.abs().max())


MIN_STANDARD_ERRORS = 3.0
"""How many standard errors BOS has to lower the loss by."""
MIN_BOS_GAIN = 0.1
"""How many nats per token BOS has to lower the loss by, too."""


@torch.no_grad()
def measure_bos_gain(model: Any, encoding: Encoding, context_length: int) -> float:
    """Measure by how many nats per token the model's loss on ordinary text falls if BOS is put before it.

    BOS is the tokenizer's token for the beginning of a text.

    Args:
        model: The model.
        encoding: Its tokenizer.
        context_length: The maximum length of a sequence, in tokens.

    Returns:
        The gain, or 0 if BOS cannot be added, or if the gain is too small or uncertain (MIN_BOS_GAIN,
        MIN_STANDARD_ERRORS).
    """
    bos_id = _find_bos_to_add(model, encoding)
    if bos_id is None:
        return 0.0

    [text_tokens] = encoding.encode_texts([ORDINARY_TEXT])
    text_ids = text_tokens.token_ids[: context_length - 1]  # one less, to leave room for BOS

    losses = _compute_token_losses(model, text_ids)
    # Without BOS the first token of the text has no loss, so its loss after BOS is left out.
    losses_after_bos = _compute_token_losses(model, [bos_id, *text_ids])[1:]
    return _compute_clear_mean(losses - losses_after_bos)


def _find_bos_to_add(model: Any, encoding: Encoding) -> int | None:
    """Find the BOS token that could be put before texts.

    Returns:
        The token, or None if the tokenizer has no BOS or adds it already, or if the model has no embedding for it.
    """
    bos_id: int | None = encoding.tokenizer.bos_token_id
    is_added_already = bool(encoding.bos_ids)
    if bos_id is None or is_added_already:
        return None

    has_embedding = bos_id < model.config.get_text_config().vocab_size
    return bos_id if has_embedding else None


def _compute_clear_mean(gains: Tensor) -> float:
    """Compute the mean of gains, or 0 unless it is above MIN_BOS_GAIN and above MIN_STANDARD_ERRORS standard errors."""
    mean_gain = float(gains.mean())
    standard_error = float(gains.std()) / len(gains) ** 0.5
    is_clear = mean_gain > max(MIN_BOS_GAIN, MIN_STANDARD_ERRORS * standard_error)
    return mean_gain if is_clear else 0.0


def _compute_token_losses(model: Any, token_ids: Sequence[int]) -> Tensor:
    """Compute the loss of each token after the first, in nats, [tokens - 1]."""
    target_ids = torch.tensor(token_ids[1:], device=model.device)
    logits = compute_model_logits(model, token_ids)[:-1]  # each row predicts the token after it
    return torch.nn.functional.cross_entropy(logits, target_ids, reduction="none")
