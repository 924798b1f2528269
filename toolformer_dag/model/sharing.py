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
    """How sequences with a common beginning share the work on it. `way` is one of these:

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
RECOMPUTING = Sharing(RECOMPUTED, CacheUse(chunks=True, company="equal", whole=True))
"""Nothing is shared: every sequence runs in full at each token."""
Head = CachedHead | ModelCache
"""The common beginning of some texts, after it ran."""
Texts = CachedTexts | OwnTexts
"""Texts after a head, with their keys cached."""
Branches = CachedBranches | OwnBranches
"""Continuations of texts, which grow token by token."""


def choose_sharing(backbone: Backbone, name: str, tokens: Sequence[int]) -> Sharing:
    """Return the fastest way to share the work on a common beginning under which the model's logits stay the same.

    Tried in this order: the keys are stored once for all sequences; the model's own cache, with a copy for each
    sequence; nothing is shared. Each is tried on a short sequence, and its logits are compared with those of the model
    alone. The choice and what it costs are logged.

    Changes `backbone`, so that it runs the model as the chosen way needs.

    - name: the model's name, for the log.
    - tokens: tokens of ordinary text, as `trial_tokens` returns them.
    """
    sharing = _choose_sharing(backbone, tokens[:TRIAL])
    kind = f"{name!r} ({type(backbone.model).__name__})"
    if sharing.way == SHARED:
        _log.info("%s: the keys of prompt and text are computed and stored once for all samples", kind)
    elif sharing.cache is not None and sharing.way == OWN_CACHE:
        # `company`: which rows may share a pass of the model; "any" is the fastest.
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

    Changes `backbone`: whether body and head of the model run apart, and whether its attention is replaced.
    """
    expected = own_logits(backbone.model, tokens)  # [T, V]
    backbone.uses_custom_attention = False
    if _can_be_split(backbone, tokens, expected):
        if _attention_can_be_replaced(backbone, tokens, expected):
            return Sharing(SHARED)
        backbone.uses_custom_attention = False
    else:
        backbone.run_whole_model()
    return _own_cache_that_agrees(backbone, tokens, expected) or RECOMPUTING


def _own_cache_that_agrees(backbone: Backbone, tokens: Sequence[int], expected: Tensor) -> Sharing | None:
    """Return the fastest way to use the model's own cache that reproduces its logits; None where none does.

    expected: the model's logits of `tokens` without a cache, [T, V].
    """
    expected_of_branches = _expected_of_branches(backbone.model, tokens, expected)
    for sharing in OWN_CACHES:
        logits = logits_or_none(partial(_run_branches, sharing.head, backbone, tokens))
        if agrees(expected_of_branches, logits, TOLERANCES[backbone.model.dtype]):
            return sharing
    return None


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

    Two trials: a whole sequence in one pass, and sequences that share the cached keys of a beginning. False too where
    the model raises an error with our attention.

    expected: the model's own logits of `tokens`, [T, V]. The backbone keeps our attention, also where this is False.
    """
    tolerance = TOLERANCES[backbone.model.dtype]
    backbone.uses_custom_attention = True
    # `logits_or_none` returns None where the model raises an error; None agrees with nothing.
    whole_logits = logits_or_none(partial(_run_whole, backbone, tokens))
    if not agrees(expected, whole_logits, tolerance):
        return False
    branch_logits = logits_or_none(partial(_run_branches, CachedHead, backbone, tokens))
    return agrees(_expected_of_branches(backbone.model, tokens, expected), branch_logits, tolerance)


def _run_whole(backbone: Backbone, tokens: Sequence[int]) -> Tensor:
    """Compute the logits of a sequence in one pass, [T, V]."""
    return backbone.logits(backbone.features(padded([tokens], backbone.device))[0])


# A trial has 16 tokens. Sequences share its head, and some of them its text, as in real use:
#
#     head           0 1 2 3 4 5
#     text                       6 7 8 9 10 11 12 13
#     continuation                                   14 15
#     long branch    0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15
#     short branch   0 1 2 3 4 5 6 7 8               14 15
HEAD = 6
"""Tokens of the head."""
TEXT = 8
"""Tokens of the text."""
SHORT = 3
"""Tokens of the text that the short branch continues."""


def _run_branches(
    start: Callable[[Backbone, Sequence[int]], Head], backbone: Backbone, tokens: Sequence[int]
) -> Tensor:
    """Compute the logits of the trial's text and of three branches after it with a cached beginning, [TEXT + 6, V].

    The head is cached once, then the text (slot 0) and a short text (slot 1). Three branches continue them by two
    tokens: a long one, the short one, and a long one again. The layout of the tokens is above.

    Returns the logits of the text's TEXT tokens, then those of the three branches at each of the two tokens.
    `_expected_of_branches` computes the same without a cache.

    start: runs a head in the way that is tried.
    """
    text = tokens[HEAD : HEAD + TEXT]
    continuation = tokens[HEAD + TEXT :]

    # 1. Cache head and texts. Each text has a further token, which no branch may see.
    texts = start(backbone, tokens[:HEAD]).texts(slots=2, width=TEXT + 1)
    text_with_another = [*text, tokens[0]]
    short_with_another = [*text[: SHORT + 1]]
    features_of_texts = texts.features([0, 1], [text_with_another, short_with_another], first=0)  # [2, TEXT + 1, F]

    # 2. Continue the texts' first `kept` tokens by a token of all branches at a time.
    branches = texts.branches(capacity=3, room=len(continuation))
    branches.admit(slots=[0, 1, 0], kept=[TEXT, SHORT, TEXT])
    features_of_steps = []
    for token in continuation:
        token_of_branches = torch.tensor([token] * 3, device=backbone.device)
        features_of_steps.append(branches.step(token_of_branches))  # [3, F]
    return backbone.logits(torch.cat([features_of_texts[0, :TEXT], *features_of_steps]))


def _expected_of_branches(model: Any, tokens: Sequence[int], whole: Tensor) -> Tensor:
    """Return the logits that `_run_branches` should compute, by the model itself without a cache, [TEXT + 6, V].

    whole: the model's logits of `tokens`, which are the long branch, in one pass, [T, V]. The rows of the result:

        0 to 7    the text's tokens, 6 to 13
        8 to 10   token 14 of a long branch, of the short one, and of a long one
        11 to 13  token 15 of the same
    """
    text_end = HEAD + TEXT
    short_end = HEAD + SHORT
    short_branch = own_logits(model, [*tokens[:short_end], *tokens[text_end:]])
    rows = list(whole[HEAD:text_end])
    for step in (0, 1):  # the two tokens of the continuation
        long_row = whole[text_end + step]
        short_row = short_branch[short_end + step]
        rows += [long_row, short_row, long_row]
    return torch.stack(rows)
