"""Draw tokens from logits by uniform numbers, without sums over the vocabulary per sample.

Shapes use these letters: B distributions, V tokens of the vocabulary, S samples. Several samples may draw from one
distribution.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

BLOCK = 128
"""Tokens whose weights are summed together."""


def draw(logits: Tensor, rows: Tensor, uniforms: Tensor, temperature: float, top_p: float) -> Tensor:
    """Draw the next token of each sample from its distribution; return tokens [S].

    - logits: of the next token, [B, V], float32.
    - rows: the row of each sample in `logits`, [S].
    - uniforms: a number in [0, 1) per sample, [S]. The sample gets the first token whose cumulative probability exceeds
      it: of probabilities [0.2, 0.5, 0.3] the number 0.6 draws token 1.
    """
    weights = _compute_token_weights(logits, temperature=temperature, top_p=top_p)  # [B, V]
    return _draw_tokens(weights, rows, uniforms)


def _draw_tokens(weights: Tensor, rows: Tensor, uniforms: Tensor) -> Tensor:
    """Return the token [S] that each sample draws by weights [B, V]: the block of the token first, then the token."""
    blocks = _split_into_blocks(weights)  # [B, blocks, BLOCK]
    block_ends = blocks.sum(-1, dtype=torch.float64).cumsum(-1)  # [B, blocks], cumulative weight at each block's end
    goals = uniforms * block_ends[rows, -1]  # [S], the cumulative weight to be exceeded
    block = _find_block_of_goal(block_ends[rows], goals)  # [S]
    goals_in_block = goals - _compute_weight_before(block_ends, rows, block)  # [S]
    token_in_block = _find_token_in_block(blocks[rows, block].double(), goals_in_block)  # [S]
    return block * BLOCK + token_in_block


def _compute_token_weights(logits: Tensor, *, temperature: float, top_p: float) -> Tensor:
    """Return the weights [B, V] by which tokens are drawn: their probabilities, zero outside the nucleus."""
    if temperature != 1:
        logits = logits / temperature
    weights = logits.softmax(-1)
    return keep_nucleus(weights, top_p) if top_p < 1 else weights


def _split_into_blocks(weights: Tensor) -> Tensor:
    """Return weights [B, V] as blocks of BLOCK tokens, [B, blocks, BLOCK], with zeros after the last token."""
    padding = -weights.shape[1] % BLOCK
    return F.pad(weights, (0, padding)).reshape(len(weights), -1, BLOCK)


def _find_block_of_goal(block_ends: Tensor, goals: Tensor) -> Tensor:
    """Return for each sample the first block whose end [S, blocks] exceeds its goal, [S]; the last where none does."""
    last_block = block_ends.shape[1] - 1
    return _find_first_beyond(block_ends, goals).clamp(max=last_block)


def _compute_weight_before(block_ends: Tensor, rows: Tensor, block: Tensor) -> Tensor:
    """Return the cumulative weight before each sample's block, [S]; 0 before the first block."""
    starts = F.pad(block_ends, (1, 0))  # [B, blocks + 1]
    return starts[rows, block]


def _find_token_in_block(weights: Tensor, goals: Tensor) -> Tensor:
    """Return for each row of weights [S, BLOCK] the first token whose cumulative weight exceeds the row's goal, [S].

    Where rounding leaves none, it is the last token with a weight.
    """
    token = _find_first_beyond(weights.cumsum(-1), goals)
    return torch.minimum(token, _find_last_positive(weights))


def _find_first_beyond(cumulative: Tensor, goals: Tensor) -> Tensor:
    """Return for each row of ascending sums [S, N] the first column above the row's goal, [S]; N where none is.

    In [0.2, 0.7, 1.0] with the goal 0.6, it is column 1.
    """
    return (cumulative <= goals[:, None]).sum(-1)


def _find_last_positive(weights: Tensor) -> Tensor:
    """Return for each row of weights [S, N] the last column above zero, [S]: of [0.2, 0.8, 0.0], column 1."""
    columns_after = (weights > 0).flip(-1).int().argmax(-1)  # columns of zeros at the end of the row
    return weights.shape[1] - 1 - columns_after


def keep_nucleus(weights: Tensor, top_p: float) -> Tensor:
    """Return weights [B, V] with zero for all tokens but the likeliest ones that together reach `top_p`.

    [0.2, 0.5, 0.3] with top_p 0.7 becomes [0, 0.5, 0.3]; the sum may be below 1.
    """
    sorted_weights, tokens = weights.sort(-1, descending=True)  # [B, V] each
    likelier_weight = sorted_weights.cumsum(-1) - sorted_weights  # [B, V], of all likelier tokens together
    nucleus_weights = sorted_weights.masked_fill(likelier_weight >= top_p, 0)
    return torch.zeros_like(weights).scatter_(1, tokens, nucleus_weights)
