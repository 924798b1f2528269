"""Choosing how sequences share a beginning, by trying it on the model at hand."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from toolformer_dag.language_model.attention import UnsupportedAttentionError
from toolformer_dag.language_model.backbone import Backbone, padded
from toolformer_dag.language_model.cached import CachedHead, CachedTexts
from toolformer_dag.language_model.cached_prefixes import CachedPrefixes
from toolformer_dag.language_model.errors import ModelError
from toolformer_dag.language_model.memory import is_out_of_memory
from toolformer_dag.language_model.recomputed import (
    RecomputedHead,
    RecomputedPrefixes,
    RecomputedTexts,
)

Head = CachedHead | RecomputedHead
Texts = CachedTexts | RecomputedTexts
Prefixes = CachedPrefixes | RecomputedPrefixes

SPLIT_TOLERANCES = {torch.float32: 1e-4, torch.float16: 1e-3, torch.bfloat16: 1e-2}
"""Of the largest logit: features and head are the model's own operations, and round nearly as it does."""
ATTENTION_TOLERANCES = {torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 1e-1}
"""Of the largest logit: what another order of summation explains. A missing part of attention is off by more."""
TRIAL = (7, 3, 5, 2, 9, 4, 8, 6, 1)
UNFIT = (UnsupportedAttentionError, AttributeError, TypeError, KeyError, RuntimeError)


def choose_head(backbone: Backbone) -> type[CachedHead] | type[RecomputedHead]:
    """Shared keys where they reproduce the model's own logits for a short sequence, else no sharing.

    Also tells the backbone to run whole models where features and head alone do not reproduce them. Raises ModelError
    for a model that looks ahead (BERT and its like, which load as causal ones).
    """
    expected = _whole(backbone, TRIAL)
    tolerance = ATTENTION_TOLERANCES[backbone.model.dtype]
    if _differs(expected[:4], _whole(backbone, TRIAL[:4]), tolerance):
        raise ModelError(
            f"{type(backbone.model).__name__} reads what comes after a token; take a causal model (some are with "
            "is_decoder = true in config.json)"
        )
    split = SPLIT_TOLERANCES[backbone.model.dtype]
    takes_attention, backbone.takes_attention = backbone.takes_attention, False
    if _caps_logits(backbone) or not _agrees(expected, _tried(_plain, backbone), split):
        backbone.without_split()
        return RecomputedHead
    backbone.takes_attention = takes_attention
    backbone.takes_attention &= _agrees(expected, _tried(_plain, backbone), tolerance)
    shares = backbone.takes_attention and _agrees(expected[-1:], _tried(_shared, backbone), tolerance)
    return CachedHead if shares else RecomputedHead


def _caps_logits(backbone: Backbone) -> bool:
    """By name, for a soft cap changes next to nothing where the logits of the trial are small."""
    return getattr(backbone.model.config.get_text_config(), "final_logit_softcapping", None) is not None


def _whole(backbone: Backbone, tokens: Sequence[int]) -> Tensor:
    """The model's own logits [tokens, vocabulary], nothing taken over."""
    logits: Tensor = backbone.model(padded([tokens], backbone.device)).logits[0].float()
    return logits


def _plain(backbone: Backbone) -> Tensor:
    return backbone.logits(backbone.features(padded([TRIAL], backbone.device))[0])


def _shared(backbone: Backbone) -> Tensor:
    """The last token's logits with a head of three tokens, a text of five of which four are kept, two of its own."""
    texts = CachedHead(backbone, TRIAL[:3]).texts([[*TRIAL[3:7], 0]])
    texts.features([0], first=0)
    branches = texts.branches([0], [4], room=2, capacity=1)
    features = [branches.step(torch.tensor([token], device=backbone.device)) for token in TRIAL[7:]]
    return backbone.logits(features[-1])


def _tried(way: Callable[[Backbone], Tensor], backbone: Backbone) -> Tensor | None:
    """None where the model does not fit this way; running out of memory says nothing about that, and is raised."""
    try:
        return way(backbone)
    except UNFIT as error:
        if isinstance(error, RuntimeError) and is_out_of_memory(error):
            raise
        return None


def _agrees(expected: Tensor, found: Tensor | None, tolerance: float) -> bool:
    """Of two tables of logits; `tolerance` is a share of the largest expected."""
    return found is not None and bool((expected - found).abs().max() <= tolerance * expected.abs().max())


def _differs(expected: Tensor, found: Tensor, tolerance: float) -> bool:
    """The opposite of `_agrees`, but for numbers that are not finite: those say nothing."""
    return bool((expected - found).abs().max() > tolerance * expected.abs().max())
