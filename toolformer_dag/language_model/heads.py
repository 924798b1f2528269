"""Choosing how sequences share a beginning, by trying it on the model at hand."""

import torch
from torch import Tensor

from toolformer_dag.language_model.attention import UnsupportedAttentionError
from toolformer_dag.language_model.backbone import Backbone, padded
from toolformer_dag.language_model.cached import CachedBranches, CachedHead, CachedTexts
from toolformer_dag.language_model.cached_prefixes import CachedPrefixes
from toolformer_dag.language_model.recomputed import (
    RecomputedBranches,
    RecomputedHead,
    RecomputedPrefixes,
    RecomputedTexts,
)

Head = CachedHead | RecomputedHead
Texts = CachedTexts | RecomputedTexts
Branches = CachedBranches | RecomputedBranches
Prefixes = CachedPrefixes | RecomputedPrefixes

TOLERANCES = {torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 1e-1}
"""Of the largest logit: what rounding explains. A missing part of a model is off by more."""
TRIAL = (7, 3, 5, 2, 9, 4, 8, 6, 1)
UNFIT = (UnsupportedAttentionError, AttributeError, TypeError, KeyError)


def choose_head(backbone: Backbone) -> type[CachedHead] | type[RecomputedHead]:
    """Shared keys where they reproduce the model's own logits for a short sequence, else no sharing.

    Also tells the backbone to run whole models where features and head alone do not reproduce them.
    """
    expected = backbone.model(padded([TRIAL], backbone.device)).logits[0].float()
    tolerance = float(TOLERANCES[backbone.model.dtype] * expected.abs().max())
    if not _agrees(expected, _plain(backbone), tolerance):
        backbone.takes_attention = False
        if not _agrees(expected, _plain(backbone), tolerance):
            backbone.without_split()
    shares = backbone.takes_attention and _agrees(expected[-1:], _shared(backbone), tolerance)
    return CachedHead if shares else RecomputedHead


def _plain(backbone: Backbone) -> Tensor | None:
    try:
        return backbone.logits(backbone.features(padded([TRIAL], backbone.device))[0])
    except UNFIT:
        return None


def _shared(backbone: Backbone) -> Tensor | None:
    """The last token's logits with a head of three tokens, a text of five of which four are kept, two of its own."""
    try:
        texts = CachedHead(backbone, TRIAL[:3]).texts([[*TRIAL[3:7], 0]])
        texts.features([0])
        branches = texts.branches([0], [4], room=2, capacity=1)
        features = [branches.step(torch.tensor([token], device=backbone.device)) for token in TRIAL[7:]]
        return backbone.logits(features[-1])
    except UNFIT:
        return None


def _agrees(expected: Tensor, found: Tensor | None, tolerance: float) -> bool:
    return found is not None and bool((expected - found).abs().max() <= tolerance)
