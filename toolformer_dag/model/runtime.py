"""A model ready to run: which way of sharing beginnings fits it, and what it has computed."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from toolformer_dag.model.attention import Backbone, padded
from toolformer_dag.model.encoding import Encoding
from toolformer_dag.model.heads import CachedHead, CachedTexts, RecomputedHead, RecomputedPrefixes, RecomputedTexts
from toolformer_dag.model.loading import OWN_TOLERANCES, TOLERANCES, TRIAL, agrees, own_logits, tried
from toolformer_dag.model.memory import TokenBudget
from toolformer_dag.model.prefixes import CachedPrefixes

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


@dataclass(slots=True)
class TokenCounts:
    """Tokens through the model by kind (padding not counted) and passes; decoding steps are counted apart.

    prompt: heads of P(x); positions: texts behind the head; samples: decoded tokens; loss_*: the three losses.
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
        """Counts `tokens` of `kind`, one of the fields."""
        setattr(self, kind, getattr(self, kind) + tokens)

    def as_dict(self) -> dict[str, int]:
        """For metadata and reports."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Runtime:
    """A model ready to run, how it is fed, and what is counted."""

    backbone: Backbone
    encoding: Encoding
    context_length: int
    budget: TokenBudget
    counts: TokenCounts
    head_type: type[CachedHead] | type[RecomputedHead]

    def head(self, ids: Sequence[int]) -> Head:
        """Runs the beginning that texts share."""
        self.counts.add("prompt", len(ids))
        self.counts.passes += 1
        if self.head_type is CachedHead:
            return CachedHead(self.backbone, ids)
        return RecomputedHead(self.backbone, ids, self.budget)

    def prefixes(self, prefixes: Sequence[Sequence[int]]) -> Prefixes:
        """Runs prefixes, in lexicographic order, behind which texts are to stand."""
        kind = CachedPrefixes if self.head_type is CachedHead else RecomputedPrefixes
        made = kind(self.backbone, prefixes, self.budget.tokens)
        self.counts.passes += made.passes
        return made
