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
@torch.no_grad()  # tables that a model caches in a pass (rotary) must serve training too
def check_causal(model: Any, tokens: Sequence[int]) -> None:
    """Raise ModelError for a model whose tokens attend to later ones (BERT loads as a causal model too).

    Two sequences with the same first tokens and different last ones must have the same logits at the first tokens.

    tokens: 24 tokens of ordinary text, as `trial_tokens` returns them. The sequences are tokens 0 to 15, and tokens
    0 to 7 with 16 to 23 after them. Both are equally long, because another length rounds differently, which may change
    the choice of an expert.
    """
    begin = tokens[:TRIAL_ENDS]
    end = tokens[TRIAL_ENDS:TRIAL]
    other_end = tokens[TRIAL:]
    logits = own_logits(model, [*begin, *end])[: len(begin)]
    other_logits = own_logits(model, [*begin, *other_end])[: len(begin)]
    tolerance = SAME_ORDER_TOLERANCES[model.dtype] * logits.abs().max()
    if bool((logits - other_logits).abs().max() > tolerance):  # false for NaN
        raise ModelError(
            f"{type(model).__name__} attends to later tokens; use a causal model (some models need "
            "is_decoder = true in config.json)"
        )


def trial_tokens(encoding: Encoding) -> list[int]:
    """Return TRIAL + TRIAL_ENDS tokens to try a model with: those of ORDINARY_TEXT.

    The first is BOS (the token at the beginning of a text) where the tokenizer adds it; it counts. Special tokens are
    left out: after them the logits of a trained model are chaotic. Where these are too few, the other tokens of the
    vocabulary follow, and then all of them again.
    """
    tokenizer = encoding.tokenizer
    count = TRIAL + TRIAL_ENDS
    special = {*tokenizer.all_special_ids, *tokenizer.added_tokens_decoder}
    ordinary = [token for token in encoding.texts([ORDINARY_TEXT])[0].ids if token not in special]
    if len(ordinary) < count:
        ordinary += sorted({*tokenizer.get_vocab().values()} - {*ordinary, *special})
    tokens = [*encoding.bos, *islice(cycle(ordinary), count)]
    return tokens[:count]


def own_logits(model: Any, tokens: Sequence[int]) -> Tensor:
    """Compute the model's own logits [tokens, V] in float32, with its own attention and without a cache."""
    logits: Tensor = model(torch.tensor([tokens], device=model.device)).logits[0].float()
    return logits


def logits_or_none(compute: Callable[[], Tensor]) -> Tensor | None:
    """Return the logits that `compute` returns; None where the model refuses that way. Raises out-of-memory errors."""
    try:
        return compute()
    except (AttributeError, TypeError, KeyError, IndexError, ValueError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and is_out_of_memory(error):
            raise
        return None


def agrees(expected: Tensor, actual: Tensor | None, tolerance: float) -> bool:
    """Return whether two tables of logits differ by at most `tolerance` times the largest expected logit.

    False where the actual ones are None or NaN.
    """
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
    """Return by how many nats per token a BOS before ordinary text lowers the model's loss; 0 where that is not clear.

    BOS is the tokenizer's token for the beginning of a text. A gain is clear above MIN_GAIN and above
    MIN_STANDARD_ERRORS standard errors. Returns 0 too where the tokenizer has no BOS or adds it already, and where the
    model has no embedding for it.

    context: the most tokens of a sequence.
    """
    bos = encoding.tokenizer.bos_token_id
    if bos is None:
        return 0.0
    is_added_already = bool(encoding.bos)
    has_embedding = bos < model.config.get_text_config().vocab_size
    if is_added_already or not has_embedding:
        return 0.0
    ids = encoding.texts([ORDINARY_TEXT])[0].ids[: context - 1]
    losses = _token_losses(model, ids)
    losses_after_bos = _token_losses(model, [bos, *ids])[1:]  # the first text token has no loss without BOS
    return _clear_mean(losses - losses_after_bos)


def _clear_mean(gains: Tensor) -> float:
    """Return the mean of gains if it is clear: above MIN_GAIN and MIN_STANDARD_ERRORS standard errors; else 0."""
    gain = float(gains.mean())
    standard_error = float(gains.std()) / len(gains) ** 0.5
    is_clear = gain > max(MIN_GAIN, MIN_STANDARD_ERRORS * standard_error)
    return gain if is_clear else 0.0


def _token_losses(model: Any, ids: Sequence[int]) -> Tensor:
    """Return the loss of each token after the first, in nats, [tokens - 1]."""
    targets = torch.tensor(ids[1:], device=model.device)
    return torch.nn.functional.cross_entropy(own_logits(model, ids)[:-1], targets, reduction="none")
