"""Trials of a model on ordinary text: whether other ways of computing, or another beginning, change its numbers."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import cycle, islice
from typing import Any

import torch
from torch import Tensor

from toolformer_dag.model.encoding import Encoding
from toolformer_dag.model.memory import is_out_of_memory
from toolformer_dag.model.weights import ModelError

ORDINARY_TEXT = (
    "The harbour of the town was built in 1912, and more than 30 ships could lie in it at the same time. When the war "
    "was over, most of them were sold to people from the other side of the river, who needed boats to bring fish and "
    "wood to the market on Monday morning."
)
"""English without names or markup, on which a model behaves as it does in use."""
TRIAL = 16
"""Tokens of a trial."""
TRIAL_ENDS = 8
"""Tokens of another end for it, in place of those after its first `TRIAL_ENDS`."""
SAME_ORDER_TOLERANCES = {torch.float32: 1e-4, torch.float16: 1e-3, torch.bfloat16: 1e-2}
"""Differences, in shares of the largest logit, that rounding explains between passes of the same operations."""
TOLERANCES = {torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 1e-1}
"""Differences, in shares of the largest logit, that another order of summation explains; less than a missing token."""


@contextmanager
def exact_products() -> Iterator[None]:
    """Multiply float32 in full within the block: TF32 on a GPU rounds more than the trials of a model allow."""
    precision = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(precision)


@exact_products()
@torch.no_grad()  # no inference_mode: a model may cache tensors in a pass, such as rotary tables, and train with them
def check_causal(model: Any, tokens: Sequence[int]) -> None:
    """Check that a model's tokens do not see later tokens. BERT's do, for example, and it loads as a causal model too.

    The check compares two sequences of 16 tokens with the same first 8 tokens and different ends. A causal model
    gives the first 8 tokens the same logits in both.

    Args:
        model: The model.
        tokens: 24 tokens of ordinary text, from `list_trial_tokens`.

    Raises:
        ModelError: The model is not causal.
    """
    begin = tokens[:TRIAL_ENDS]
    end = tokens[TRIAL_ENDS:TRIAL]
    # Equally long, because another length rounds differently, and a mixture of experts may then choose other experts.
    other_end = tokens[TRIAL:]

    logits = compute_model_logits(model, [*begin, *end])[: len(begin)]  # [8, V]
    other_logits = compute_model_logits(model, [*begin, *other_end])[: len(begin)]
    if _differ(logits, other_logits, SAME_ORDER_TOLERANCES[model.dtype]):
        raise ModelError(
            f"{type(model).__name__} attends to later tokens; use a causal model (some models need "
            "is_decoder = true in config.json)"
        )


def _differ(logits: Tensor, other_logits: Tensor, tolerance: float) -> bool:
    """Return whether logits differ by more than `tolerance` times the largest of `logits`; False where one is NaN."""
    largest_difference = (logits - other_logits).abs().max()
    return bool(largest_difference > tolerance * logits.abs().max())


def list_trial_tokens(encoding: Encoding) -> list[int]:
    """List TRIAL + TRIAL_ENDS tokens of ordinary text to try a model with. BOS comes first if the tokenizer adds it.

    The tokens repeat if text and vocabulary have too few.
    """
    count = TRIAL + TRIAL_ENDS
    tokens = [*encoding.bos, *islice(cycle(_list_ordinary_tokens(encoding, count)), count)]
    return tokens[:count]


def _list_ordinary_tokens(encoding: Encoding, count: int) -> list[int]:
    """List the tokens of ORDINARY_TEXT, without special ones: a trained model's logits are chaotic after these.

    If they are fewer than `count`, all other tokens of the vocabulary follow, except special ones.
    So the list may have another length.
    """
    tokenizer = encoding.tokenizer
    special = {*tokenizer.all_special_ids, *tokenizer.added_tokens_decoder}
    tokens = [token for token in encoding.texts([ORDINARY_TEXT])[0].ids if token not in special]
    if len(tokens) < count:
        tokens += sorted({*tokenizer.get_vocab().values()} - {*tokens, *special})
    return tokens


def compute_model_logits(model: Any, tokens: Sequence[int]) -> Tensor:
    """Compute the model's own logits [tokens, V] in float32, with its own attention and without a cache."""
    logits: Tensor = model(torch.tensor([tokens], device=model.device)).logits[0].float()
    return logits


def compute_logits_or_none(compute: Callable[[], Tensor]) -> Tensor | None:
    """Call `compute` and return its logits, or None if it raises an error other than out of memory."""
    try:
        return compute()
    except (AttributeError, TypeError, KeyError, IndexError, ValueError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and is_out_of_memory(error):
            raise
        return None


def agrees(expected: Tensor, actual: Tensor | None, tolerance: float) -> bool:
    """Return whether logits differ by at most `tolerance` times the largest expected one; False for None and NaN."""
    if actual is None:
        return False
    difference = (expected - actual).abs().max()
    return bool(difference <= tolerance * expected.abs().max())


MIN_STANDARD_ERRORS = 3.0
"""How many standard errors BOS has to lower the loss by."""
MIN_GAIN = 0.1
"""How many nats per token BOS has to lower the loss by, too."""


@torch.no_grad()
def bos_gain(model: Any, encoding: Encoding, context: int) -> float:
    """Measure by how many nats per token the model's loss on ordinary text falls if BOS is put before it.

    BOS is the tokenizer's token for the beginning of a text.

    Args:
        model: The model.
        encoding: Its tokenizer.
        context: The maximum length of a sequence, in tokens.

    Returns:
        The gain, or 0 if BOS cannot be added, or if the gain is too small or uncertain (MIN_GAIN, MIN_STANDARD_ERRORS).
    """
    bos = _find_bos_to_add(model, encoding)
    if bos is None:
        return 0.0

    ids = encoding.texts([ORDINARY_TEXT])[0].ids[: context - 1]  # one less, to leave room for BOS
    losses = _compute_token_losses(model, ids)
    losses_after_bos = _compute_token_losses(model, [bos, *ids])[1:]  # the first text token has no loss without BOS
    return _compute_clear_mean(losses - losses_after_bos)


def _find_bos_to_add(model: Any, encoding: Encoding) -> int | None:
    """Return the tokenizer's BOS; None where it has none or adds it already, or where the model has no row for it."""
    bos: int | None = encoding.tokenizer.bos_token_id
    is_added_already = bool(encoding.bos)
    if bos is None or is_added_already:
        return None
    has_embedding = bos < model.config.get_text_config().vocab_size
    return bos if has_embedding else None


def _compute_clear_mean(gains: Tensor) -> float:
    """Return the mean of gains where it is above MIN_GAIN and MIN_STANDARD_ERRORS standard errors; else 0."""
    gain = float(gains.mean())
    standard_error = float(gains.std()) / len(gains) ** 0.5
    is_clear = gain > max(MIN_GAIN, MIN_STANDARD_ERRORS * standard_error)
    return gain if is_clear else 0.0


def _compute_token_losses(model: Any, ids: Sequence[int]) -> Tensor:
    """Return the loss of each token after the first, in nats, [tokens - 1]."""
    targets = torch.tensor(ids[1:], device=model.device)
    return torch.nn.functional.cross_entropy(compute_model_logits(model, ids)[:-1], targets, reduction="none")
