"""Draw tokens from logits by uniform numbers, without sums over the vocabulary per sample."""

import torch
import torch.nn.functional as F
from torch import Tensor

BLOCK = 128
"""Tokens whose weights are summed together."""


def draw(logits: Tensor, rows: Tensor, uniforms: Tensor, temperature: float, top_p: float) -> Tensor:
    """Draw the next token of each of S samples from its distribution; return tokens [S].

    - logits: of the next token, [B, V], float32.
    - rows: the row of each sample in `logits`, [S]; samples may share a row.
    - uniforms: a number in [0, 1) per sample, [S]. The sample gets the first token whose cumulative probability exceeds
      it: of probabilities [0.2, 0.5, 0.3] the number 0.6 draws token 1.

    The block of BLOCK tokens in which the sum exceeds the number is found first, then the token in it. So no sample
    needs the sums over the whole vocabulary.
    """
    if temperature != 1:
        logits = logits / temperature
    weights = logits.softmax(-1)  # [B, V]
    if top_p < 1:
        weights = nucleus(weights, top_p)
    blocks = _in_blocks(weights)  # [B, blocks, BLOCK]
    block_ends = blocks.sum(-1, dtype=torch.float64).cumsum(-1)  # [B, blocks], cumulative weight at each block's end
    goals = uniforms * block_ends[rows, -1]  # [S], the cumulative weight to be exceeded

    last_block = block_ends.shape[1] - 1
    block = _first_beyond(block_ends[rows], goals).clamp(max=last_block)  # [S], in which the goal is exceeded
    weight_before_block = F.pad(block_ends, (1, 0))[rows, block]  # [S]; 0 before the first block
    token = _token_in_block(blocks[rows, block].double(), goals - weight_before_block)
    return block * BLOCK + token


def _in_blocks(weights: Tensor) -> Tensor:
    """Return weights [B, V] as blocks of BLOCK tokens, [B, blocks, BLOCK], with zeros after the last token."""
    padding = -weights.shape[1] % BLOCK
    return F.pad(weights, (0, padding)).reshape(len(weights), -1, BLOCK)


def _token_in_block(weights: Tensor, goals: Tensor) -> Tensor:
    """Return for each row of weights [S, BLOCK] the first token whose cumulative weight exceeds the row's goal, [S].

    Where rounding leaves none, it is the last token with a weight.
    """
    token = _first_beyond(weights.cumsum(-1), goals)
    return torch.minimum(token, _last_positive(weights))


def _first_beyond(cumulative: Tensor, goals: Tensor) -> Tensor:
    """Return for each row of sums [S, N] the first column above the row's goal, [S]; N where there is none.

    Of [0.2, 0.7, 1.0] with the goal 0.6, it is column 1. The sums of a row ascend.
    """
    return (cumulative <= goals[:, None]).sum(-1)


def _last_positive(weights: Tensor) -> Tensor:
    """Return for each row of weights [S, N] the last column above zero, [S]: of [0.2, 0.8, 0.0], column 1."""
    columns_after = (weights > 0).flip(-1).int().argmax(-1)  # columns of zeros at the end of the row
    return weights.shape[1] - 1 - columns_after


def nucleus(weights: Tensor, top_p: float) -> Tensor:
    """Return weights [B, V] with zero for all tokens but the likeliest ones that together reach `top_p`.

    [0.2, 0.5, 0.3] with top_p 0.7 becomes [0, 0.5, 0.3]. They are not made to add up to 1 again.
    """
    ordered, order = weights.sort(-1, descending=True)
    weight_before = ordered.cumsum(-1) - ordered  # of all likelier tokens
    kept = ordered.masked_fill(weight_before >= top_p, 0)
    return torch.zeros_like(weights).scatter_(1, order, kept)
