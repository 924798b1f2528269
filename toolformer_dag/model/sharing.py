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

SHARED = "shared keys"
OWN_CACHE = "own cache"
RECOMPUTED = "recomputed"
GREEDY_ROOM = 32
"""Tokens that a greedy row may be continued by before its room is doubled."""


@dataclass(frozen=True, slots=True)
class Sharing:
    """What sequences with a common beginning share. `way` is one of these:

    - `shared keys`: the keys of the beginning are computed and stored once.
    - `own cache`: they are computed once and copied for each sequence, in the model's own cache.
    - `recomputed`: nothing; every sequence runs in full at each token.

    `cache`: how the model's own cache is used; None for `shared keys`.
    """

    way: str
    cache: CacheUse | None = None

    def head(self, backbone: Backbone, ids: Sequence[int]) -> "Head":
        """Run the common beginning of some texts, and return it with its keys cached."""
        if self.cache is None:
            return CachedHead(backbone, ids)
        head = ModelCache(backbone, self.cache, rows=1)
        head.run([ids])
        return head

    def rows(self, backbone: Backbone) -> "Branches":
        """Return branches, none at first; their `add` runs sequences from the beginning and starts one after each."""
        if self.cache is not None:
            return OwnBranches(OwnTexts(ModelCache(backbone, self.cache, rows=1)))
        return CachedHead(backbone, []).texts(slots=0, width=0).branches(capacity=0, room=GREEDY_ROOM)


OWN_CACHES = [
    Sharing(OWN_CACHE, CacheUse(chunks=True, company="any")),
    Sharing(OWN_CACHE, CacheUse(chunks=True, company="equal")),
    Sharing(OWN_CACHE, CacheUse(chunks=True, company="none")),
    Sharing(OWN_CACHE, CacheUse(chunks=False, company="any")),
    Sharing(OWN_CACHE, CacheUse(chunks=False, company="equal")),
    Sharing(OWN_CACHE, CacheUse(chunks=False, company="none")),
]
"""The ways to use a model's own cache, from the fastest to the slowest."""
Head = CachedHead | ModelCache
"""The common beginning of some texts, after it ran."""
Texts = CachedTexts | OwnTexts
"""Texts after a head, with their keys cached."""
Branches = CachedBranches | OwnBranches
"""Continuations of texts, which grow token by token."""


def choose_sharing(backbone: Backbone, name: str, tokens: Sequence[int]) -> Sharing:
    """Find the fastest way to compute a common beginning once that leaves the model's logits as they are; log its cost.

    Each way is tried on a short sequence, and its logits are compared with those of the model alone. Changes the
    backbone: from here on it runs the model whole, or with its own attention, where the trial says so.

    name: the model's, for the log. tokens: ordinary ones, as `trial_tokens` returns them.
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
            kind,
            apart,
            slow,
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
    """Return the first way that reproduces the model's own logits of `tokens`; see `choose_sharing`.

    1. Shared keys: the model's attention is replaced, and keys are computed and stored once.
    2. The model's own cache, in several ways, with a copy of the keys for each sequence.
    3. Nothing is shared: every sequence runs in full at each token.

    Sets how the backbone runs the model to what the chosen way needs.
    """
    expected = own_logits(backbone.model, tokens)  # [T, V]
    tolerance = TOLERANCES[backbone.model.dtype]
    backbone.uses_custom_attention = False
    if not _can_be_split(backbone, tokens, expected):
        backbone.run_whole_model()
    elif _attention_can_be_replaced(backbone, tokens, expected):
        return Sharing(SHARED)
    backbone.uses_custom_attention = False
    expected_of_branches = _expected_of_branches(backbone.model, tokens, expected)
    for sharing in OWN_CACHES:
        logits = logits_or_none(partial(_run_branches, sharing.head, backbone, tokens))
        if agrees(expected_of_branches, logits, tolerance):
            return sharing
    return Sharing(RECOMPUTED, CacheUse(chunks=True, company="equal", whole=True))


def _can_be_split(backbone: Backbone, tokens: Sequence[int], expected: Tensor) -> bool:
    """Return whether body and head apart give the model's logits; sets the first body of the backbone that does."""
    tolerance = SAME_ORDER_TOLERANCES[backbone.model.dtype]
    for body in backbone.bodies():
        backbone.body = body
        if agrees(expected, logits_or_none(partial(_run_whole, backbone, tokens)), tolerance):
            return True
    return False


def _attention_can_be_replaced(backbone: Backbone, tokens: Sequence[int], expected: Tensor) -> bool:
    """Return whether the model's logits stay the same when its attention is replaced by ours.

    Tried on a whole sequence, and on sequences that share the cached keys of a beginning. `expected`: the model's own
    logits of `tokens`, [T, V]. Leaves the backbone with our attention, whatever the answer is.
    """
    tolerance = TOLERANCES[backbone.model.dtype]
    backbone.uses_custom_attention = True
    if not agrees(expected, logits_or_none(partial(_run_whole, backbone, tokens)), tolerance):
        return False
    logits = logits_or_none(partial(_run_branches, CachedHead, backbone, tokens))
    return agrees(_expected_of_branches(backbone.model, tokens, expected), logits, tolerance)


def _run_whole(backbone: Backbone, tokens: Sequence[int]) -> Tensor:
    """Compute the logits of a sequence in one pass, [T, V]."""
    return backbone.logits(backbone.features(padded([tokens], backbone.device))[0])


HEAD = 6
"""Tokens of the trial that are its head."""
TEXT = 8
"""Tokens after these that are its text; two more continue it."""
SHORT = 3
"""Tokens of the text that a branch keeps which begins early."""


def _run_branches(
    start: Callable[[Backbone, Sequence[int]], Head], backbone: Backbone, tokens: Sequence[int]
) -> Tensor:
    """Compute the trial's logits with a cached beginning: a head, texts after it, and branches that continue these.

    The head has HEAD tokens. Of the two texts after it, the first has TEXT tokens, the second its first SHORT, and each
    one more that no branch may see. Branches 0 and 2 continue the first text, branch 1 the second, by two tokens.

    start: runs a head in the way that is tried. Returns logits [TEXT + 6, V]: those of the first text, then those of
    the three branches at each of the two tokens, as `_expected_of_branches` does.
    """
    text = tokens[HEAD : HEAD + TEXT]
    continuation = tokens[HEAD + TEXT :]
    texts = start(backbone, tokens[:HEAD]).texts(slots=2, width=TEXT + 1)
    text_with_another = [*text, tokens[0]]
    short_with_another = [*text[: SHORT + 1]]
    features = texts.features([0, 1], [text_with_another, short_with_another], first=0)[0, :TEXT]
    branches = texts.branches(capacity=3, room=len(continuation))
    branches.admit(slots=[0, 1, 0], kept=[TEXT, SHORT, TEXT])
    steps = []
    for token in continuation:
        token_of_branches = torch.tensor([token] * 3, device=backbone.device)
        steps.append(branches.step(token_of_branches))
    return backbone.logits(torch.cat([features, *steps]))


def _expected_of_branches(model: Any, tokens: Sequence[int], whole: Tensor) -> Tensor:
    """Return the logits that `_run_branches` should compute, by the model itself without a cache, [TEXT + 6, V].

    They are those of the trial's text, and then, for each of two further tokens, those of three branches: the first
    and the last continue the whole text, the second only its first SHORT tokens.

    whole: the model's logits of `tokens` in one pass, [T, V].
    """
    text_end = HEAD + TEXT
    short_end = HEAD + SHORT
    short = own_logits(model, [*tokens[:short_end], *tokens[text_end:]])
    rows = list(whole[HEAD:text_end])
    for step in (0, 1):
        after_text = whole[text_end + step]
        rows += [after_text, short[short_end + step], after_text]
    return torch.stack(rows)
