"""Draw tokens from logits by uniform numbers, without sums over the vocabulary per sample."""

import torch
import torch.nn.functional as F
from torch import Tensor

BLOCK = 128
"""Tokens whose weights are summed together."""


def draw(logits: Tensor, rows: Tensor, uniforms: Tensor, temperature: float, top_p: float) -> Tensor:
    """Draw a token for each of S samples; return [S].

    - logits: [B, V], float32.
    - rows: the row of each sample in `logits`, [S].
    - uniforms: numbers in [0, 1), [S]. A sample gets the first token whose cumulative probability exceeds its number.

    The search runs over sums of BLOCK tokens, then within a block, so no sample sums over the whole vocabulary.
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

    # The first block at whose end the goal is exceeded, and the weight before it, [S] each.
    block = (sums[rows] <= goal[:, None]).sum(-1).clamp(max=sums.shape[1] - 1)
    before = torch.where(block > 0, sums[rows, (block - 1).clamp(min=0)], 0.0)

    # The first token within it that exceeds what is left; rounding may leave none, then the last one with a weight.
    values = blocks[rows, block].double()  # [S, BLOCK]
    reached = (values.cumsum(-1) <= (goal - before)[:, None]).sum(-1)
    last = BLOCK - 1 - (values > 0).flip(-1).int().argmax(-1)
    return block * BLOCK + torch.minimum(reached, last)


def nucleus(weights: Tensor, top_p: float) -> Tensor:
    """Return weights [B, V] with zero for all tokens but the smallest set whose probability reaches `top_p`."""
    ordered, order = weights.sort(-1, descending=True)
    weight_before = ordered.cumsum(-1) - ordered  # of all likelier tokens
    kept = ordered.masked_fill(weight_before >= top_p, 0)
    return torch.zeros_like(weights).scatter_(1, order, kept)
