"""Drawing tokens with given random numbers, by inversion of the cumulative distribution.

The token is a function of the distribution and of the sample's own number. Logits of one sequence differ by rounding
between batches of different shape; a number that falls within that rounding of a border (about one in a million tokens
in float32, one in a hundred in bfloat16) then draws another token.
"""

import torch
from torch import Tensor

BLOCK = 128


def draw(logits: Tensor, rows: Tensor, uniforms: Tensor, temperature: float, top_p: float) -> Tensor:
    """One token for each of S samples: logits [B, V] float32, the sample's row [S], its number in [0, 1) [S] -> [S].

    Two levels, sums over blocks of 128 tokens and then the tokens of one block, so that no sum over the whole
    vocabulary is needed for each sample.
    """
    weights = (logits if temperature == 1 else logits / temperature).softmax(-1)
    if top_p < 1:
        weights = nucleus(weights, top_p)
    sums = _block_sums(weights).cumsum(-1)
    goal = uniforms * sums[rows, -1]
    block = (sums[rows] <= goal[:, None]).sum(-1).clamp(max=sums.shape[1] - 1)
    before = torch.where(block > 0, sums[rows, (block - 1).clamp(min=0)], 0.0)
    return _in_block(weights, rows, block, goal - before)


def nucleus(weights: Tensor, top_p: float) -> Tensor:
    """Zero for all but the smallest set of tokens whose probability reaches `top_p`; [B, V] in and out."""
    ordered, order = weights.sort(-1, descending=True)
    beyond = ordered.cumsum(-1) - ordered >= top_p
    return torch.zeros_like(weights).scatter_(1, order, ordered.masked_fill(beyond, 0))


def _block_sums(weights: Tensor) -> Tensor:
    """[B, V] -> [B, blocks] in float64; the last block may be short."""
    whole = weights.shape[1] // BLOCK * BLOCK
    sums = weights[:, :whole].reshape(len(weights), -1, BLOCK).sum(-1, dtype=torch.float64)
    rest = weights[:, whole:].sum(-1, keepdim=True, dtype=torch.float64)
    return torch.cat([sums, rest], 1) if whole < weights.shape[1] else sums


def _in_block(weights: Tensor, rows: Tensor, block: Tensor, goal: Tensor) -> Tensor:
    tokens = block[:, None] * BLOCK + torch.arange(BLOCK, device=block.device)
    inside = tokens < weights.shape[1]
    values = weights[rows[:, None], tokens.clamp(max=weights.shape[1] - 1)].double() * inside
    reached = (values.cumsum(-1) <= goal[:, None]).sum(-1)
    last = BLOCK - 1 - (values > 0).flip(-1).int().argmax(-1)
    return block * BLOCK + torch.minimum(reached, last)
