"""Choose how a model shares the work on a common beginning: by a trial against its own logits."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from toolformer_dag.model.attention import padded
from toolformer_dag.model.backbone import Backbone
from toolformer_dag.model.heads import CachedBranches, CachedHead, CachedTexts
from toolformer_dag.model.own_cache import CacheUse, ModelCache, OwnBranches, OwnTexts
from toolformer_dag.model.trials import (
    SAME_ORDER_TOLERANCES,
    TOLERANCES,
    TRIAL,
    agrees,
    exact_products,
    logits_or_none,
    own_logits,
)

_log = logging.getLogger(__name__)

SHARED, OWN_CACHE, RECOMPUTED = "shared keys", "own cache", "recomputed"
GREEDY_ROOM = 32
"""Own tokens of a greedy row before its room is doubled."""


@dataclass(frozen=True, slots=True)
class Sharing:
    """What sequences with a common beginning share.

    - `shared keys`: the keys of the beginning are computed and stored once.
    - `own cache`: they are computed once and copied for each sequence, in the model's own cache.
    - `recomputed`: nothing; every sequence runs in full at each token.
    """

    way: str
    cache: CacheUse | None = None

    def head(self, backbone: Backbone, ids: Sequence[int]) -> "Head":
        """Run the common beginning of texts."""
        if self.cache is None:
            return CachedHead(backbone, ids)
        head = ModelCache(backbone, self.cache, 1)
        head.run([ids])
        return head

    def rows(self, backbone: Backbone) -> "Branches":
        """Return no branches yet; `add` runs sequences from their beginning and starts branches after them."""
        if self.cache is not None:
            return OwnBranches(OwnTexts(ModelCache(backbone, self.cache, 1)))
        return CachedHead(backbone, []).texts(0, 0).branches(0, GREEDY_ROOM)


OWN_CACHES = [
    Sharing(OWN_CACHE, CacheUse(chunks, company)) for chunks in (True, False) for company in ("any", "equal", "none")
]
"""From the fastest to the slowest."""
Head = CachedHead | ModelCache
Texts = CachedTexts | OwnTexts
Branches = CachedBranches | OwnBranches


def choose_sharing(backbone: Backbone, name: str, tokens: Sequence[int]) -> Sharing:
    """Return the first way that reproduces the model's own logits of short sequences, and log it with its cost.

    `tokens`: as `trial_tokens` returns them. The backbone is switched to whole passes where body and head apart do not
    reproduce the logits.
    """
    sharing = _choose_sharing(backbone, tokens[:TRIAL])
    kind = f"{name!r} ({type(backbone.model).__name__})"
    if sharing.way == SHARED:
        _log.info("%s: the keys of prompt and text are computed and stored once for all samples", kind)
    elif sharing.cache is not None and sharing.way == OWN_CACHE:
        apart = "" if sharing.cache.company == "any" else ", and few samples run together"
        slow = "" if sharing.cache.chunks else ", and a text runs one token at a time"
        _log.warning(
            "%s: its attention cannot be replaced, so its own cache serves: no token is computed twice, but every "
            "sample holds a copy of the keys of prompt and text%s%s",
            *(kind, apart, slow),
        )
    else:
        _log.warning(
            "%s: its cache changes its logits, so prompt and text are recomputed for every token of every sample, "
            "which is slow; use another model where you can",
            kind,
        )
    return sharing


@exact_products()
def _choose_sharing(backbone: Backbone, tokens: Sequence[int]) -> Sharing:
    expected = own_logits(backbone.model, tokens)
    split, tolerance = SAME_ORDER_TOLERANCES[backbone.model.dtype], TOLERANCES[backbone.model.dtype]
    backbone.uses_custom_attention = False
    if not _splits(backbone, tokens, expected, split):
        backbone.run_whole_model()
    elif _replaces_attention(backbone, tokens, expected, tolerance):
        return Sharing(SHARED)
    backbone.uses_custom_attention = False
    expected = _branched(backbone.model, tokens, expected)
    for sharing in OWN_CACHES:
        if agrees(expected, logits_or_none(partial(_continued, sharing.head, backbone, tokens)), tolerance):
            return sharing
    return Sharing(RECOMPUTED, CacheUse(chunks=True, company="equal", whole=True))


def _splits(backbone: Backbone, tokens: Sequence[int], expected: Tensor, tolerance: float) -> bool:
    for body in backbone.bodies():
        backbone.body = body
        if agrees(expected, logits_or_none(partial(_plain, backbone, tokens)), tolerance):
            return True
    return False


def _replaces_attention(backbone: Backbone, tokens: Sequence[int], expected: Tensor, tolerance: float) -> bool:
    backbone.uses_custom_attention = True
    if not agrees(expected, logits_or_none(partial(_plain, backbone, tokens)), tolerance):
        return False
    logits = logits_or_none(partial(_continued, CachedHead, backbone, tokens))
    return agrees(_branched(backbone.model, tokens, expected), logits, tolerance)


def _plain(backbone: Backbone, tokens: Sequence[int]) -> Tensor:
    return backbone.logits(backbone.features(padded([tokens], backbone.device))[0])


HEAD, TEXT, SHORT = 6, 8, 3
"""Tokens of the trial that are its head and its text, and of the text for a branch that begins early."""


def _continued(start: Callable[[Backbone, Sequence[int]], Head], backbone: Backbone, tokens: Sequence[int]) -> Tensor:
    """Compute what `_branched` expects from a head, texts behind it, and branches with 2 own tokens.

    Two branches keep `TEXT` tokens of their text and one `SHORT`; the texts have further tokens, which no branch may
    see.
    """
    text, own = tokens[HEAD : HEAD + TEXT], tokens[HEAD + TEXT :]
    sequences = [[*text, tokens[0]], [*text[: SHORT + 1]]]
    texts = start(backbone, tokens[:HEAD]).texts(slots=2, width=TEXT + 1)
    features = texts.features([0, 1], sequences, first=0)[0, :TEXT]
    branches = texts.branches(capacity=3, room=len(own))
    branches.admit([0, 1, 0], [TEXT, SHORT, TEXT])
    steps = [branches.step(torch.tensor([token] * 3, device=backbone.device)) for token in own]
    return backbone.logits(torch.cat([features, *steps]))


def _branched(model: Any, tokens: Sequence[int], whole: Tensor) -> Tensor:
    """Return the model's own logits: after the head, those of the text; then two tokens of each of 3 branches."""
    long, early = HEAD + TEXT, HEAD + SHORT
    short = own_logits(model, [*tokens[:early], *tokens[long:]])
    steps = [row for at in (0, 1) for row in (whole[long + at], short[early + at], whole[long + at])]
    return torch.stack([*whole[HEAD:long], *steps])
