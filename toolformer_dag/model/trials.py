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
TRIAL, TRIAL_ENDS = 16, 8
"""Tokens of a trial, and those of another end of it that begins after the first `TRIAL_ENDS`."""
SAME_ORDER_TOLERANCES = {torch.float32: 1e-4, torch.float16: 1e-3, torch.bfloat16: 1e-2}
"""Shares of the largest logit that rounding explains between passes of the model's own operations."""
TOLERANCES = {torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 1e-1}
"""Shares of the largest logit that another order of summation explains. Missing attention differs by more."""


@contextmanager
def exact_products() -> Iterator[None]:
    """Multiply float32 in full inside the block: TF32 on a GPU rounds more than the trials of a model allow."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


@exact_products()
@torch.no_grad()  # tables that a model caches in a pass (rotary) must serve training too
def check_causal(model: Any, tokens: Sequence[int]) -> None:
    """Raise ModelError for a model that attends to later tokens (BERT loads as a causal model too).

    `tokens`: as `trial_tokens` returns them.
    """
    # same length: another length rounds differently, which may change the choice of an expert
    begin, end, other_end = tokens[:TRIAL_ENDS], tokens[TRIAL_ENDS:TRIAL], tokens[TRIAL:]
    expected, actual = (own_logits(model, [*begin, *tail])[: len(begin)] for tail in (end, other_end))
    tolerance = SAME_ORDER_TOLERANCES[model.dtype] * expected.abs().max()
    if bool((expected - actual).abs().max() > tolerance):  # false for NaN
        raise ModelError(
            f"{type(model).__name__} attends to later tokens; use a causal model (some models need "
            "is_decoder = true in config.json)"
        )


def trial_tokens(encoding: Encoding) -> list[int]:
    """Return `TRIAL` + `TRIAL_ENDS` tokens of `ORDINARY_TEXT` as texts begin in use: after BOS where that is added.

    On control tokens, which some vocabularies begin with, the logits of a trained model are chaotic. A vocabulary that
    lacks the text's words gives its other ordinary tokens, and repeats them where they are few.
    """
    tokenizer, wanted = encoding.tokenizer, TRIAL + TRIAL_ENDS
    special = {*tokenizer.all_special_ids, *tokenizer.added_tokens_decoder}
    ordinary = [token for token in encoding.texts([ORDINARY_TEXT])[0].ids if token not in special]
    if len(ordinary) < wanted:
        ordinary += sorted({*tokenizer.get_vocab().values()} - {*ordinary, *special})
    return [*encoding.bos, *islice(cycle(ordinary), wanted)][:wanted]


def own_logits(model: Any, tokens: Sequence[int]) -> Tensor:
    """Compute the model's own logits [tokens, V] in float32, with its own attention and without a cache."""
    logits: Tensor = model(torch.tensor([tokens], device=model.device)).logits[0].float()
    return logits


def logits_or_none(way: Callable[[], Tensor]) -> Tensor | None:
    """Return the logits of `way`, or None where the model is incompatible with it. Raises out-of-memory errors."""
    try:
        return way()
    except (AttributeError, TypeError, KeyError, IndexError, ValueError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and is_out_of_memory(error):
            raise
        return None


def agrees(expected: Tensor, actual: Tensor | None, tolerance: float) -> bool:
    """Return whether two tables of logits differ by at most `tolerance` times the largest expected logit."""
    return actual is not None and bool((expected - actual).abs().max() <= tolerance * expected.abs().max())


CLEARLY = 3.0
"""Standard errors by which BOS has to lower the loss, and `LOWER` nats per token."""
LOWER = 0.1


@torch.no_grad()
def bos_gain(model: Any, encoding: Encoding, context: int) -> float:
    """Return how many nats per token `ORDINARY_TEXT` costs less after BOS; 0 where that is not clear.

    `context`: the most tokens of a sequence. 0 too where the tokenizer has no BOS, or adds it itself.
    """
    bos, ids = encoding.tokenizer.bos_token_id, encoding.texts([ORDINARY_TEXT])[0].ids[: context - 1]
    if encoding.bos or bos is None or bos >= model.config.get_text_config().vocab_size:
        return 0.0
    gains = _losses(model, ids) - _losses(model, [bos, *ids])[1:]
    gain = float(gains.mean())
    return gain if gain > max(LOWER, CLEARLY * float(gains.std()) / len(gains) ** 0.5) else 0.0


def _losses(model: Any, ids: Sequence[int]) -> Tensor:
    targets = torch.tensor(ids[1:], device=model.device)
    return torch.nn.functional.cross_entropy(own_logits(model, ids)[:-1], targets, reduction="none")
