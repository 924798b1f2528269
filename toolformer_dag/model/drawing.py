"""Draw tokens from logits by uniform numbers, without sums over the vocabulary per sample."""

import torch
import torch.nn.functional as F
from torch import Tensor

BLOCK = 128


def draw(logits: Tensor, rows: Tensor, uniforms: Tensor, temperature: float, top_p: float) -> Tensor:
    """Draw a token for each of S samples; return [S].

    `logits` [B, V] float32; `rows` [S] is the row of each sample; `uniforms` [S] are numbers in [0, 1). The search
    runs over sums of 128-token blocks, then within a block, so no sample sums over the whole vocabulary.
    """
    weights = (logits if temperature == 1 else logits / temperature).softmax(-1)
    if top_p < 1:
        weights = nucleus(weights, top_p)
    blocks = F.pad(weights, (0, -weights.shape[1] % BLOCK)).reshape(len(weights), -1, BLOCK)
    sums = blocks.sum(-1, dtype=torch.float64).cumsum(-1)
    goal = uniforms * sums[rows, -1]
    block = (sums[rows] <= goal[:, None]).sum(-1).clamp(max=sums.shape[1] - 1)
    before = torch.where(block > 0, sums[rows, (block - 1).clamp(min=0)], 0.0)
    values = blocks[rows, block].double()
    reached = (values.cumsum(-1) <= (goal - before)[:, None]).sum(-1)
    last = BLOCK - 1 - (values > 0).flip(-1).int().argmax(-1)
    return block * BLOCK + torch.minimum(reached, last)


def nucleus(weights: Tensor, top_p: float) -> Tensor:
    """Set all weights [B, V] to zero but the smallest set of tokens whose probability reaches `top_p`."""
    ordered, order = weights.sort(-1, descending=True)
    beyond = ordered.cumsum(-1) - ordered >= top_p
    return torch.zeros_like(weights).scatter_(1, order, ordered.masked_fill(beyond, 0))
