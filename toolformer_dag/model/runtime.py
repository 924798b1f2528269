"""A model ready to run: whether its keys can be shared between sequences, and token counts."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from toolformer_dag.model.attention import Backbone, padded
from toolformer_dag.model.encoding import Encoding
from toolformer_dag.model.heads import CachedHead, CachedTexts, RecomputedHead, RecomputedPrefixes, RecomputedTexts
from toolformer_dag.model.loading import (
    CHECK_TOKENS,
    SAME_ORDER_TOLERANCES,
    TOLERANCES,
    agrees,
    logits_or_none,
    own_logits,
)
from toolformer_dag.model.memory import TokenBudget
from toolformer_dag.model.prefixes import CachedPrefixes

Head = CachedHead | RecomputedHead
Texts = CachedTexts | RecomputedTexts
Prefixes = CachedPrefixes | RecomputedPrefixes


def choose_head(backbone: Backbone) -> type[CachedHead] | type[RecomputedHead]:
    """Return CachedHead where shared keys reproduce the model's own logits of a short sequence, else RecomputedHead.

    The backbone is switched to whole passes where body and head alone do not reproduce the logits.
    """
    expected = own_logits(backbone.model, CHECK_TOKENS)
    split, tolerance = SAME_ORDER_TOLERANCES[backbone.model.dtype], TOLERANCES[backbone.model.dtype]
    supported, backbone.uses_custom_attention = backbone.uses_custom_attention, False
    if _caps_logits(backbone) or not agrees(expected, logits_or_none(lambda: _plain(backbone)), split):
        backbone.run_whole_model()
        return RecomputedHead
    backbone.uses_custom_attention = supported
    backbone.uses_custom_attention &= agrees(expected, logits_or_none(lambda: _plain(backbone)), tolerance)
    if not backbone.uses_custom_attention:
        return RecomputedHead
    shares = agrees(expected[-1:], logits_or_none(lambda: _shared(backbone)), tolerance)
    return CachedHead if shares else RecomputedHead


def _caps_logits(backbone: Backbone) -> bool:
    """Return whether the config names a soft cap: it hardly changes the small logits of the check."""
    return getattr(backbone.model.config.get_text_config(), "final_logit_softcapping", None) is not None


def _plain(backbone: Backbone) -> Tensor:
    return backbone.logits(backbone.features(padded([CHECK_TOKENS], backbone.device))[0])


def _shared(backbone: Backbone) -> Tensor:
    """Compute the last token's logits from a head of 3 tokens, 4 kept tokens of a text of 5, and 2 own tokens."""
    texts = CachedHead(backbone, CHECK_TOKENS[:3]).texts([[*CHECK_TOKENS[3:7], 0]])
    texts.features([0], first=0)
    branches = texts.branches([0], [4], room=2, capacity=1)
    features = [branches.step(torch.tensor([token], device=backbone.device)) for token in CHECK_TOKENS[7:]]
    return backbone.logits(features[-1])


@dataclass(slots=True)
class TokenCounts:
    """Tokens that went through the model by kind, without padding, and the number of passes.

    prompt: heads of P(x); positions: texts behind the head; samples: decoded tokens; loss_*: the three losses.
    Decoding steps are not counted as passes.
    """

    prompt: int = 0
    positions: int = 0
    samples: int = 0
    loss_empty: int = 0
    loss_call: int = 0
    loss_result: int = 0
    passes: int = 0
    decoding_steps: int = 0

    def add(self, kind: str, tokens: int) -> None:
        """Add `tokens` to the field `kind`."""
        setattr(self, kind, getattr(self, kind) + tokens)

    def as_dict(self) -> dict[str, int]:
        """Return the counts by field."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Runtime:
    """A model ready to run, with its encoding, limits and counts."""

    backbone: Backbone
    encoding: Encoding
    context_length: int
    budget: TokenBudget
    counts: TokenCounts
    head_type: type[CachedHead] | type[RecomputedHead]

    def head(self, ids: Sequence[int]) -> Head:
        """Run the prompt head that texts share."""
        self.counts.add("prompt", len(ids))
        self.counts.passes += 1
        if self.head_type is CachedHead:
            return CachedHead(self.backbone, ids)
        return RecomputedHead(self.backbone, ids, self.budget)

    def prefixes(self, prefixes: Sequence[Sequence[int]]) -> Prefixes:
        """Run prefixes in lexicographic order; texts are appended by `features`."""
        kind = CachedPrefixes if self.head_type is CachedHead else RecomputedPrefixes
        result = kind(self.backbone, prefixes, self.budget.tokens)
        self.counts.passes += result.passes
        return result
