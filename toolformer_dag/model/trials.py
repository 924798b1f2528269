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

    Two sequences with the same first tokens and different last ones must have the same logits at the first. tokens:
    TRIAL + TRIAL_ENDS ordinary ones, as `trial_tokens` returns them.
    """
    begin = tokens[:TRIAL_ENDS]
    end = tokens[TRIAL_ENDS:TRIAL]
    other_end = tokens[TRIAL:]  # as long: another length rounds differently, which may change the choice of an expert
    logits = own_logits(model, [*begin, *end])[: len(begin)]
    other_logits = own_logits(model, [*begin, *other_end])[: len(begin)]
    tolerance = SAME_ORDER_TOLERANCES[model.dtype] * logits.abs().max()
    if bool((logits - other_logits).abs().max() > tolerance):  # false for NaN
        raise ModelError(
            f"{type(model).__name__} attends to later tokens; use a causal model (some models need "
            "is_decoder = true in config.json)"
        )


def trial_tokens(encoding: Encoding) -> list[int]:
    """Return TRIAL + TRIAL_ENDS tokens of ordinary text to try a model with, after BOS where the tokenizer adds it.

    Special tokens are left out: after them the logits of a trained model are chaotic. Where a vocabulary has too few
    tokens of ORDINARY_TEXT, its other tokens follow, and are repeated if need be.
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


CLEARLY = 3.0
"""Standard errors by which BOS has to lower the loss."""
LOWER = 0.1
"""Nats per token by which BOS has to lower the loss too."""


@torch.no_grad()
def bos_gain(model: Any, encoding: Encoding, context: int) -> float:
    """Return by how many nats per token a BOS before ordinary text lowers the model's loss; 0 where that is not clear.

    Clear is a gain above LOWER and above CLEARLY standard errors. It is 0 too where the tokenizer has no BOS or adds it
    already, and where the model has no embedding for it.

    context: the most tokens of a sequence.
    """
    bos = encoding.tokenizer.bos_token_id
    if encoding.bos or bos is None or bos >= model.config.get_text_config().vocab_size:
        return 0.0
    ids = encoding.texts([ORDINARY_TEXT])[0].ids[: context - 1]
    losses = _token_losses(model, ids)
    losses_after_bos = _token_losses(model, [bos, *ids])[1:]  # the first text token has no loss without BOS
    gains = losses - losses_after_bos
    gain = float(gains.mean())
    standard_error = float(gains.std()) / len(gains) ** 0.5
    return gain if gain > max(LOWER, CLEARLY * standard_error) else 0.0


def _token_losses(model: Any, ids: Sequence[int]) -> Tensor:
    """Return the loss of each token after the first, in nats, [tokens - 1]."""
    targets = torch.tensor(ids[1:], device=model.device)
    return torch.nn.functional.cross_entropy(own_logits(model, ids)[:-1], targets, reduction="none")
