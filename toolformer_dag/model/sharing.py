"""Choose how a model shares the work on a common beginning: by a trial against its own logits."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from toolformer_dag.model.attention import pad_sequences
from toolformer_dag.model.backbone import Backbone
from toolformer_dag.model.model_cache import CacheUse, ModelCache, ModelCacheBranches, ModelCacheTexts
from toolformer_dag.model.shared_keys import CachedBranches, CachedPrompt, CachedTexts
from toolformer_dag.model.trials import (
    SAME_ORDER_TOLERANCES,
    TOLERANCES,
    TRIAL,
    agrees,
    compute_logits_or_none,
    compute_model_logits,
    exact_products,
)

_log = logging.getLogger(__name__)

SHARED = "shared keys"
OWN_CACHE = "own cache"
RECOMPUTED = "recomputed"
GREEDY_TOKENS = 32
"""Tokens of a greedy row for which the cache has space at first; it is doubled where they do not suffice."""


@dataclass(frozen=True, slots=True)
class Sharing:
    """How sequences with a common beginning share the work on it.

    - `method`: `shared keys`, where the keys of the beginning are computed and stored once; `own cache`, where they are
      computed once and copied for each sequence, in the model's own cache; or `recomputed`, where every sequence runs
      in full at each token.
    - `cache`: how the model's own cache is used; None for `shared keys`.
    """

    method: str
    cache: CacheUse | None = None

    def prompt(self, backbone: Backbone, ids: Sequence[int]) -> "Prompt":
        """Run the common beginning of some texts, and return it with its keys cached."""
        if self.cache is None:
            return CachedPrompt(backbone, ids)
        prompt = ModelCache(backbone, self.cache, rows=1)
        prompt.run([ids])
        return prompt

    def rows(self, backbone: Backbone) -> "Branches":
        """Return an object without branches yet; its `add` runs whole sequences and starts a branch after each."""
        if self.cache is not None:
            return ModelCacheBranches(ModelCacheTexts(ModelCache(backbone, self.cache, rows=1)))
        return CachedPrompt(backbone, []).texts(slots=0, width=0).branches(capacity=0, max_tokens=GREEDY_TOKENS)


OWN_CACHES = [
    Sharing(OWN_CACHE, CacheUse(chunks=True, batching="any")),
    Sharing(OWN_CACHE, CacheUse(chunks=True, batching="equal_length")),
    Sharing(OWN_CACHE, CacheUse(chunks=True, batching="single")),
    Sharing(OWN_CACHE, CacheUse(chunks=False, batching="any")),
    Sharing(OWN_CACHE, CacheUse(chunks=False, batching="equal_length")),
    Sharing(OWN_CACHE, CacheUse(chunks=False, batching="single")),
]
"""How a model's own cache may be used, from the fastest to the slowest."""
RECOMPUTING = Sharing(RECOMPUTED, CacheUse(chunks=True, batching="equal_length", recomputes=True))
"""Nothing is shared: every sequence runs in full at each token."""
Prompt = CachedPrompt | ModelCache
"""The common beginning of some texts, after it ran."""
Texts = CachedTexts | ModelCacheTexts
"""Texts after a prompt, with their keys cached."""
Branches = CachedBranches | ModelCacheBranches
"""Continuations of texts, which grow token by token."""


def choose_sharing(backbone: Backbone, name: str, tokens: Sequence[int]) -> Sharing:
    """Return the fastest way to run sequences with a common beginning that leaves the model's logits as they are.

    The keys of the beginning are stored once, or copied for each sequence, or recomputed. Each way is tried on a short
    sequence, and `backbone` is set to run as chosen. The choice and its costs are logged.

    - name: the model's name, for the log.
    - tokens: tokens of ordinary text, as `list_trial_tokens` returns them.
    """
    sharing = _choose_sharing(backbone, tokens[:TRIAL])  # sets `backbone`
    _log_choice(sharing, model=f"{name!r} ({type(backbone.model).__name__})")
    return sharing


def _log_choice(sharing: Sharing, model: str) -> None:
    """Log how sequences share the keys of their common beginning, with a warning where it costs time or memory."""
    if sharing.method == SHARED:
        _log.info("%s: the keys of prompt and text are computed and stored once for all samples", model)
    elif sharing.cache is not None and sharing.method == OWN_CACHE:
        _log.warning(
            "%s: its attention cannot be replaced, so its own cache serves: no token is computed twice, but every "
            "sample holds a copy of the keys of prompt and text%s",
            model,
            _describe_cache_costs(sharing.cache),
        )
    else:  # RECOMPUTED: nothing is shared
        _log.warning(
            "%s: its cache changes its logits, so prompt and text are recomputed for every token of every sample, "
            "which is slow; use another model where you can",
            model,
        )


def _describe_cache_costs(cache: CacheUse) -> str:
    """Return what else using a model's own cache costs, for the end of a sentence; "" where it costs no more."""
    few_together = "" if cache.batching == "any" else ", and few samples run together"
    slow = "" if cache.chunks else ", and a text runs one token at a time"
    return few_together + slow


@exact_products()
def _choose_sharing(backbone: Backbone, tokens: Sequence[int]) -> Sharing:
    """Return the first way to share work that reproduces the model's own logits of `tokens`.

    1. Shared keys: the model's attention is replaced, and keys are computed and stored once.
    2. The model's own cache, used in several ways, with a copy of the keys for each sequence.
    3. Nothing is shared: every sequence runs in full at each token.

    Changes `backbone`: whether body and head of the model run apart, and whether its attention is replaced.
    """
    expected = compute_model_logits(backbone.model, tokens)  # [T, V]
    backbone.uses_custom_attention = False
    if _can_be_split(backbone, tokens, expected):  # sets the body
        backbone.uses_custom_attention = True
        if _custom_attention_agrees(backbone, tokens, expected):
            return Sharing(SHARED)
        backbone.uses_custom_attention = False
    else:
        backbone.run_whole_model()
    return _find_agreeing_cache(backbone, tokens, expected) or RECOMPUTING


def _find_agreeing_cache(backbone: Backbone, tokens: Sequence[int], expected: Tensor) -> Sharing | None:
    """Return the fastest use of the model's own cache that reproduces its logits; None if no use does.

    It is tried on a text with several continuations (branches), which have to copy the text's cached keys.

    expected: the model's logits of `tokens` without a cache, [T, V].
    """
    expected_of_branches = _compute_expected_logits(backbone.model, tokens, expected)
    for sharing in OWN_CACHES:  # from the fastest to the slowest
        logits = compute_logits_or_none(partial(_run_branches, sharing.prompt, backbone, tokens))  # None after an error
        if agrees(expected_of_branches, logits, TOLERANCES[backbone.model.dtype]):
            return sharing
    return None


def _can_be_split(backbone: Backbone, tokens: Sequence[int], expected: Tensor) -> bool:
    """Return whether body and head apart give the model's logits; sets the first body of the backbone that does."""
    tolerance = SAME_ORDER_TOLERANCES[backbone.model.dtype]
    for body in backbone.bodies():
        backbone.body = body
        if agrees(expected, compute_logits_or_none(partial(_run_sequence, backbone, tokens)), tolerance):
            return True
    return False


def _custom_attention_agrees(backbone: Backbone, tokens: Sequence[int], expected: Tensor) -> bool:
    """Return whether our attention, which the backbone now uses, leaves the model's logits as they are.

    Tried with and without cached keys. False too where the model raises an error with our attention.

    expected: the model's logits of `tokens` with its unchanged attention, [T, V].
    """
    tolerance = TOLERANCES[backbone.model.dtype]
    # `compute_logits_or_none` returns None where the model raises an error; None agrees with nothing.
    whole_logits = compute_logits_or_none(partial(_run_sequence, backbone, tokens))
    if not agrees(expected, whole_logits, tolerance):
        return False
    branch_logits = compute_logits_or_none(partial(_run_branches, CachedPrompt, backbone, tokens))
    return agrees(_compute_expected_logits(backbone.model, tokens, expected), branch_logits, tolerance)


def _run_sequence(backbone: Backbone, tokens: Sequence[int]) -> Tensor:
    """Compute the logits of a sequence in one pass, [T, V]."""
    return backbone.logits(backbone.features(pad_sequences([tokens], backbone.device))[0])


# A trial has 16 tokens. Sequences share its prompt, and some of them its text, as in real use:
#
#     prompt         0 1 2 3 4 5
#     text                       6 7 8 9 10 11 12 13
#     continuation                                   14 15
#     long branch    0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15
#     short branch   0 1 2 3 4 5 6 7 8               14 15
PROMPT = 6
"""Tokens of the prompt."""
TEXT = 8
"""Tokens of the text."""
SHORT = 3
"""Tokens of the text that the short branch continues."""


def _run_branches(
    run_prompt: Callable[[Backbone, Sequence[int]], Prompt], backbone: Backbone, tokens: Sequence[int]
) -> Tensor:
    """Compute the trial's logits with cached keys, [TEXT + 6, V]: of a text's tokens, then of two tokens in 3 branches.

    The branches continue the text by the same tokens: one after all of it, one after its first SHORT tokens, and one
    after all of it again.

    - run_prompt: runs a prompt and caches its keys; the cache is on trial.
    - tokens: of the prompt, of the text, and 2 of the continuation.
    """
    prompt = tokens[:PROMPT]
    text = tokens[PROMPT : PROMPT + TEXT]
    continuation = tokens[PROMPT + TEXT :]
    texts = run_prompt(backbone, prompt).texts(slots=2, width=TEXT + 1)  # a cache for two texts
    features_of_text = _run_text(texts, text=text, other_token=prompt[0])  # the other token follows: no branch sees it
    features_of_steps = _run_continuation(texts, continuation)  # [3, F] for each of the two tokens
    return backbone.logits(torch.cat([features_of_text, *features_of_steps]))


def _run_text(texts: Texts, *, text: Sequence[int], other_token: int) -> Tensor:
    """Run the trial's text in slot 0 and its beginning in slot 1; return the features of the text, [TEXT, F].

    Each has a further token after it, which no branch may see.
    """
    short_text = text[: SHORT + 1]
    features_of_texts = texts.features([0, 1], [[*text, other_token], [*short_text]], first=0)  # [2, TEXT + 1, F]
    return features_of_texts[0, :TEXT]


def _run_continuation(texts: Texts, continuation: Sequence[int]) -> list[Tensor]:
    """Run a long branch, the short one, and a long one again, a token at a time; return their features, [3, F] each."""
    branches = texts.branches(capacity=3, max_tokens=len(continuation))
    branches.admit(slots=[0, 1, 0], tokens_before=[TEXT, SHORT, TEXT])
    features_of_steps = []
    for token in continuation:
        token_of_branches = torch.tensor([token] * 3, device=branches.device)
        features_of_steps.append(branches.step(token_of_branches))
    return features_of_steps


def _compute_expected_logits(model: Any, tokens: Sequence[int], whole: Tensor) -> Tensor:
    """Return the logits that a trial with cached keys should give, computed by the model without a cache.

    The long sequence is prompt, text and continuation: all of `tokens`. The short one has only the first SHORT tokens
    of the text. The rows of the result, [TEXT + 6, V]:

        0 to 7    the text's tokens
        8 to 10   the continuation's first token: in the long sequence, in the short one, and in the long one again
        11 to 13  its second token, in the same sequences

    whole: the model's logits of the long sequence, a row per token, [T, V].
    """
    text_end = PROMPT + TEXT
    short_text_end = PROMPT + SHORT
    continuation = tokens[text_end:]
    short = compute_model_logits(model, [*tokens[:short_text_end], *continuation])  # a row per token
    rows = list(whole[PROMPT:text_end])
    for long_row, short_row in zip(whole[text_end:], short[short_text_end:], strict=True):
        rows += [long_row, short_row, long_row]
    return torch.stack(rows)
