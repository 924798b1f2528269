"""Draw tokens from logits by uniform numbers, without sums over the vocabulary per sample."""

import torch
import torch.nn.functional as F
from torch import Tensor

BLOCK = 128
"""Tokens whose weights are summed together."""


def draw(logits: Tensor, rows: Tensor, uniforms: Tensor, temperature: float, top_p: float) -> Tensor:
    """Draw the next token of each of S samples by inverting the cumulative distribution; return tokens [S].

    - logits: of the next token, [B, V], float32. Several samples may draw from one row.
    - rows: the row of each sample in `logits`, [S].
    - uniforms: a number in [0, 1) per sample, [S]: it gets the first token whose cumulative probability exceeds it.

    The search runs over sums of BLOCK tokens and then within a block, so no sample sums over the whole vocabulary.
    """
    if temperature != 1:
        logits = logits / temperature
    weights = logits.softmax(-1)  # [B, V]
    if top_p < 1:
        weights = nucleus(weights, top_p)
    padding = -weights.shape[1] % BLOCK
    blocks = F.pad(weights, (0, padding)).reshape(len(weights), -1, BLOCK)  # [B, blocks, BLOCK]
    sums = blocks.sum(-1, dtype=torch.float64).cumsum(-1)  # [B, blocks], the weight up to the end of each block
    goal = uniforms * sums[rows, -1]  # [S], the cumulative weight to be exceeded

    # The first block at whose end the goal is exceeded, and the weight before that block, [S] each.
    block = (sums[rows] <= goal[:, None]).sum(-1).clamp(max=sums.shape[1] - 1)
    weight_before = torch.where(block > 0, sums[rows, (block - 1).clamp(min=0)], 0.0)

    # The first token of the block that exceeds what is left; where rounding leaves none, the last one with a weight.
    block_weights = blocks[rows, block].double()  # [S, BLOCK]
    first_beyond = (block_weights.cumsum(-1) <= (goal - weight_before)[:, None]).sum(-1)
    last_with_weight = BLOCK - 1 - (block_weights > 0).flip(-1).int().argmax(-1)
    return block * BLOCK + torch.minimum(first_beyond, last_with_weight)


def nucleus(weights: Tensor, top_p: float) -> Tensor:
    """Return weights [B, V] with zero for all tokens but the smallest set whose probability reaches `top_p`."""
    ordered, order = weights.sort(-1, descending=True)
    weight_before = ordered.cumsum(-1) - ordered  # of all likelier tokens
    kept = ordered.masked_fill(weight_before >= top_p, 0)
    return torch.zeros_like(weights).scatter_(1, order, kept)
