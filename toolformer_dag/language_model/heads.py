"""Choosing how sequences share a beginning, by trying it on the model at hand."""

import torch
from torch import Tensor

from toolformer_dag.language_model.backbone import Backbone, padded
from toolformer_dag.language_model.cached import CachedHead, CachedTexts
from toolformer_dag.language_model.cached_prefixes import CachedPrefixes
from toolformer_dag.language_model.recomputed import (
    RecomputedHead,
    RecomputedPrefixes,
    RecomputedTexts,
)
from toolformer_dag.language_model.trial import OWN_TOLERANCES, TOLERANCES, TRIAL, agrees, own_logits, tried

Head = CachedHead | RecomputedHead
Texts = CachedTexts | RecomputedTexts
Prefixes = CachedPrefixes | RecomputedPrefixes


def choose_head(backbone: Backbone) -> type[CachedHead] | type[RecomputedHead]:
    """Shared keys where they reproduce the model's own logits for a short sequence, else no sharing.

    Also tells the backbone to run whole models where features and head alone do not reproduce them.
    """
    expected = own_logits(backbone.model, TRIAL)
    split, tolerance = OWN_TOLERANCES[backbone.model.dtype], TOLERANCES[backbone.model.dtype]
    takes_attention, backbone.takes_attention = backbone.takes_attention, False
    if _caps_logits(backbone) or not agrees(expected, tried(lambda: _plain(backbone)), split):
        backbone.without_split()
        return RecomputedHead
    backbone.takes_attention = takes_attention
    backbone.takes_attention &= agrees(expected, tried(lambda: _plain(backbone)), tolerance)
    shares = backbone.takes_attention and agrees(expected[-1:], tried(lambda: _shared(backbone)), tolerance)
    return CachedHead if shares else RecomputedHead


def _caps_logits(backbone: Backbone) -> bool:
    """By name, for a soft cap changes next to nothing where the logits of the trial are small."""
    return getattr(backbone.model.config.get_text_config(), "final_logit_softcapping", None) is not None


def _plain(backbone: Backbone) -> Tensor:
    return backbone.logits(backbone.features(padded([TRIAL], backbone.device))[0])


def _shared(backbone: Backbone) -> Tensor:
    """The last token's logits with a head of three tokens, a text of five of which four are kept, two of its own."""
    texts = CachedHead(backbone, TRIAL[:3]).texts([[*TRIAL[3:7], 0]])
    texts.features([0], first=0)
    branches = texts.branches([0], [4], room=2, capacity=1)
    features = [branches.step(torch.tensor([token], device=backbone.device)) for token in TRIAL[7:]]
    return backbone.logits(features[-1])
