"""Draw tokens from logits by uniform numbers, without sums over the vocabulary per sample.

Shapes use these letters: B distributions, V tokens of the vocabulary, S samples. Several samples may draw from one
distribution.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

BLOCK_SIZE = 128
"""Tokens whose weights are summed together."""


def draw_next_tokens(logits: Tensor, sample_rows: Tensor, uniforms: Tensor, temperature: float, top_p: float) -> Tensor:
    """Draw the next token of each sample from its distribution.

    A sample gets the first token whose cumulative probability exceeds the sample's random number. For example, with
    probabilities [0.2, 0.5, 0.3] the number 0.6 draws token 1.

    Args:
        logits: The logits of the next token in each distribution, [B, V], float32.
        sample_rows: For each sample, the row of its distribution in `logits`, [S].
        uniforms: A random number in [0, 1) for each sample, [S].
        temperature: Divides the logits.
        top_p: The probability of the nucleus: the likeliest tokens that together reach it. No others are drawn.

    Returns:
        The token of each sample, [S].
    """
    weights = _compute_token_weights(logits, temperature=temperature, top_p=top_p)  # [B, V]
    return _draw_tokens_by_weight(weights, sample_rows, uniforms)


def _draw_tokens_by_weight(token_weights: Tensor, sample_rows: Tensor, uniforms: Tensor) -> Tensor:
    """Draw a token for each sample, with probabilities in proportion to the weights of the tokens.

    To avoid sums over the whole vocabulary for each sample, the block of the token is found first, then the token in
    this block.

    Args:
        token_weights: The weights of the tokens in each distribution, [B, V].
        sample_rows: For each sample, the row of its distribution, [S].
        uniforms: A random number in [0, 1) for each sample, [S].

    Returns:
        The token of each sample, [S].
    """
    weight_blocks = _split_into_blocks(token_weights)  # [B, blocks, BLOCK_SIZE]
    block_ends = weight_blocks.sum(-1, dtype=torch.float64).cumsum(-1)  # [B, blocks], cumulative weight at its end

    # A sample draws the first token whose cumulative weight exceeds the sample's target. The target is its random
    # number times the sum of all weights, which may be below 1.
    target_weights = uniforms * block_ends[sample_rows, -1]  # [S]
    block_indices = _find_target_blocks(block_ends[sample_rows], target_weights)  # [S]

    # The same again within the block.
    targets_in_block = target_weights - _compute_weight_before_blocks(block_ends, sample_rows, block_indices)  # [S]
    drawn_blocks = weight_blocks[sample_rows, block_indices].double()  # [S, BLOCK_SIZE]
    tokens_in_block = _find_tokens_in_blocks(drawn_blocks, targets_in_block)  # [S]
    return block_indices * BLOCK_SIZE + tokens_in_block


def _compute_token_weights(logits: Tensor, *, temperature: float, top_p: float) -> Tensor:
    """Compute the weights [B, V] by which tokens are drawn: their probabilities, but zero outside the nucleus."""
    if temperature != 1:
        logits = logits / temperature
    weights = logits.softmax(-1)
    return keep_nucleus(weights, top_p) if top_p < 1 else weights


def _split_into_blocks(token_weights: Tensor) -> Tensor:
    """Split weights [B, V] into blocks [B, blocks, BLOCK_SIZE], and fill the last block with zeros."""
    padding = -token_weights.shape[1] % BLOCK_SIZE
    return F.pad(token_weights, (0, padding)).reshape(len(token_weights), -1, BLOCK_SIZE)


def _find_target_blocks(cumulative_block_weights: Tensor, target_weights: Tensor) -> Tensor:
    """Find for each sample the first block at whose end the cumulative weight exceeds the sample's target.

    Args:
        cumulative_block_weights: For each sample, the cumulative weight at the end of each block, [S, blocks].
        target_weights: The target of each sample, [S].

    Returns:
        The index of each sample's block, [S]. If no block exceeds the target, it is the last one.
    """
    last_block = cumulative_block_weights.shape[1] - 1
    return _find_first_columns_above(cumulative_block_weights, target_weights).clamp(max=last_block)


def _compute_weight_before_blocks(
    cumulative_block_weights: Tensor, sample_rows: Tensor, block_indices: Tensor
) -> Tensor:
    """Return the cumulative weight before each sample's block, [S]. It is 0 before the first block."""
    block_starts = F.pad(cumulative_block_weights, (1, 0))  # [B, blocks + 1], with a zero in front
    return block_starts[sample_rows, block_indices]


def _find_tokens_in_blocks(token_weights: Tensor, target_weights: Tensor) -> Tensor:
    """Find in each row the first token whose cumulative weight exceeds the row's target.

    Args:
        token_weights: The weights of the tokens in each sample's block, [S, BLOCK_SIZE].
        target_weights: The target of each row, [S].

    Returns:
        The column of each row's token, [S]. If rounding leaves no such token, it is the last one with a weight.
    """
    columns = _find_first_columns_above(token_weights.cumsum(-1), target_weights)
    return torch.minimum(columns, _find_last_positive_columns(token_weights))


def _find_first_columns_above(cumulative_weights: Tensor, target_weights: Tensor) -> Tensor:
    """Find the first column above the target in each row of ascending sums.

    Example:
        In [0.2, 0.7, 1.0] with the target 0.6, it is column 1.

    Args:
        cumulative_weights: Ascending sums, [S, N].
        target_weights: The target of each row, [S].

    Returns:
        The index of the column, [S]. If no column is above the target, it is N.
    """
    # The sums ascend, so the number of columns up to the target is the index of the first one above it.
    return (cumulative_weights <= target_weights[:, None]).sum(-1)


def _find_last_positive_columns(weights: Tensor) -> Tensor:
    """Find for each row of weights [S, N] the last column above zero, [S]. In [0.2, 0.8, 0.0], it is column 1."""
    trailing_zero_counts = (weights > 0).flip(-1).int().argmax(-1)  # columns of zeros at the end of the row
    return weights.shape[1] - 1 - trailing_zero_counts


def keep_nucleus(weights: Tensor, top_p: float) -> Tensor:
    """Set the weights [B, V] of all tokens to zero but those of the nucleus, and return a copy.

    The nucleus is the likeliest tokens that together reach `top_p`. The remaining weights are not rescaled, so their
    sum may be below 1.

    Example:
        [0.2, 0.5, 0.3] with top_p 0.7 becomes [0, 0.5, 0.3].
    """
    sorted_weights, sorted_tokens = weights.sort(-1, descending=True)  # [B, V] each
    likelier_weights = sorted_weights.cumsum(-1) - sorted_weights  # [B, V], of all likelier tokens together
    nucleus_weights = sorted_weights.masked_fill(likelier_weights >= top_p, 0)

    # Put the weights back in the order of the vocabulary.
    return torch.zeros_like(weights).scatter_(1, sorted_tokens, nucleus_weights)
