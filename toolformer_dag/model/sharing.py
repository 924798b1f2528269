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
        """Run the common beginning of some texts, and cache its keys.

        Args:
            backbone: The model.
            ids: The tokens of the beginning.
        """
        if self.cache is None:
            return CachedPrompt(backbone, ids)

        prompt = ModelCache(backbone, self.cache, rows=1)
        prompt.run([ids])
        return prompt

    def rows(self, backbone: Backbone) -> "Branches":
        """Prepare to run whole sequences, which share no prompt.

        Returns:
            An object without branches. Its `add` runs sequences and starts a branch at the end of each.
        """
        if self.cache is None:
            empty_prompt = CachedPrompt(backbone, [])
            texts = empty_prompt.texts(slots=0, width=0)
            return texts.branches(capacity=0, max_tokens=GREEDY_TOKENS)

        prompt = ModelCache(backbone, self.cache, rows=1)  # no tokens run in it
        return ModelCacheBranches(ModelCacheTexts(prompt))


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
    """Choose the fastest way to run sequences with a common beginning that does not change the model's logits.

    The ways are tried on a short text, from the fastest to the slowest. `backbone` is changed to run as chosen. The
    choice is logged, with a warning if it costs time or memory.

    Args:
        backbone: The model.
        name: The name of the model, for the log.
        tokens: Tokens of ordinary text from `list_trial_tokens`. The first TRIAL of them are used.
    """
    sharing = _choose_by_trial(backbone, tokens[:TRIAL])  # also changes `backbone`
    model_description = f"{name!r} ({type(backbone.model).__name__})"
    _log_choice(sharing, model_description)
    return sharing


def _log_choice(sharing: Sharing, model: str) -> None:
    """Log how sequences share the work on their common beginning, as a warning if it costs time or memory."""
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
    """Describe the further costs of using a model's own cache, as the end of a sentence. Empty if there are none."""
    batching_cost = "" if cache.batching == "any" else ", and few samples run together"
    speed_cost = "" if cache.chunks else ", and a text runs one token at a time"
    return batching_cost + speed_cost


@exact_products()
def _choose_by_trial(backbone: Backbone, tokens: Sequence[int]) -> Sharing:
    """Try the ways to share work from the fastest to the slowest, until one reproduces the model's own logits.

    The last way, to share nothing, is taken without a trial.

    Args:
        backbone: The model. It is changed to run as chosen: whole or split into body and head, and with its own
            attention or with ours.
        tokens: The tokens of the trial.
    """
    expected = compute_model_logits(backbone.model, tokens)  # [T, V]
    backbone.uses_custom_attention = False

    # 1. Shared keys: our attention replaces the model's, so that keys are computed and stored once.
    if _set_working_body(backbone, tokens, expected):
        backbone.uses_custom_attention = True
        if _custom_attention_agrees(backbone, tokens, expected):
            return Sharing(SHARED)
        backbone.uses_custom_attention = False
    else:
        backbone.run_whole_model()

    # 2. The model's own cache, with a copy of the keys for each sequence.
    own_cache = _find_agreeing_cache(backbone, tokens, expected)
    if own_cache is not None:
        return own_cache

    # 3. Nothing is shared: every sequence runs in full at each token.
    return RECOMPUTING


def _find_agreeing_cache(backbone: Backbone, tokens: Sequence[int], expected: Tensor) -> Sharing | None:
    """Find the fastest use of the model's own cache that does not change the model's logits.

    Args:
        backbone: The model.
        tokens: The tokens of the trial.
        expected: The logits that the model computes for them without a cache, [T, V].

    Returns:
        The first of OWN_CACHES that passes the trial. None if none does.
    """
    expected_of_branches = _compute_expected_logits(backbone.model, tokens, expected)
    tolerance = TOLERANCES[backbone.model.dtype]

    for sharing in OWN_CACHES:  # from the fastest to the slowest
        run_trial = partial(_run_branches, sharing.prompt, backbone, tokens)
        logits = compute_logits_or_none(run_trial)  # None after an error, which agrees with nothing
        if agrees(expected_of_branches, logits, tolerance):
            return sharing
    return None


def _set_working_body(backbone: Backbone, tokens: Sequence[int], expected: Tensor) -> bool:
    """Look for a body of the model that, run apart from the head, gives the same logits as the whole model.

    Args:
        backbone: The model. Its `body` is set to the first module that works.
        tokens: The tokens of the trial.
        expected: The logits that the whole model computes for them, [T, V].

    Returns:
        Whether such a body was found.
    """
    tolerance = SAME_ORDER_TOLERANCES[backbone.model.dtype]
    for body in backbone.bodies():
        backbone.body = body
        logits = compute_logits_or_none(partial(_run_sequence, backbone, tokens))  # None after an error
        if agrees(expected, logits, tolerance):
            return True
    return False


def _custom_attention_agrees(backbone: Backbone, tokens: Sequence[int], expected: Tensor) -> bool:
    """Return whether the model gives the same logits with our attention, with and without cached keys.

    Args:
        backbone: The model, which uses our attention already.
        tokens: The tokens of the trial.
        expected: The logits that the model computes for them with its own attention, [T, V].

    Returns:
        Whether it does. False also if the model raises an error with our attention.
    """
    tolerance = TOLERANCES[backbone.model.dtype]

    # Without cached keys. The logits are None after an error, and None agrees with nothing.
    logits = compute_logits_or_none(partial(_run_sequence, backbone, tokens))
    if not agrees(expected, logits, tolerance):
        return False

    # With cached keys.
    branch_logits = compute_logits_or_none(partial(_run_branches, CachedPrompt, backbone, tokens))
    expected_of_branches = _compute_expected_logits(backbone.model, tokens, expected)
    return agrees(expected_of_branches, branch_logits, tolerance)


def _run_sequence(backbone: Backbone, tokens: Sequence[int]) -> Tensor:
    """Compute the logits of a sequence in one pass, [T, V]."""
    ids = pad_sequences([tokens], backbone.device)  # [1, T]
    features = backbone.features(ids)  # [1, T, F]
    return backbone.logits(features[0])


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
    """Compute the logits of the trial with a cache.

    The same two tokens continue the text three times: after all of it, after its first SHORT tokens, and after all of
    it again. These continuations are called branches.

    Args:
        run_prompt: Runs a prompt and caches its keys, in the way that is on trial.
        backbone: The model.
        tokens: The TRIAL tokens: those of the prompt, of the text, and of the continuation.

    Returns:
        The logits of the text's tokens, then of the first token of each branch, then of the second token of each
        branch, [TEXT + 6, V].
    """
    text_end = PROMPT + TEXT
    prompt_tokens = tokens[:PROMPT]
    text = tokens[PROMPT:text_end]
    continuation = tokens[text_end:]

    prompt = run_prompt(backbone, prompt_tokens)
    texts = prompt.texts(slots=2, width=TEXT + 1)

    features_of_text = _run_text(texts, text=text, other_token=prompt_tokens[0])
    features_of_steps = _run_continuation(texts, continuation)  # [3, F] for each of the two tokens
    return backbone.logits(torch.cat([features_of_text, *features_of_steps]))


def _run_text(texts: Texts, *, text: Sequence[int], other_token: int) -> Tensor:
    """Run the text of the trial in slot 0, and the beginning of it in slot 1.

    One more token runs after the last that a branch continues, in both slots. No branch may see it.

    Args:
        texts: The cache that is on trial.
        text: The tokens of the text.
        other_token: The token to run after the whole text.

    Returns:
        The features of the text, without the other token, [TEXT, F].
    """
    text_and_more = [*text, other_token]
    beginning_and_more = list(text[: SHORT + 1])
    features = texts.features([0, 1], [text_and_more, beginning_and_more], first=0)  # [2, TEXT + 1, F]
    return features[0, :TEXT]


def _run_continuation(texts: Texts, continuation: Sequence[int]) -> list[Tensor]:
    """Run a long branch, the short one, and a long one again, one token per step.

    Args:
        texts: The cache that is on trial, with the texts that the branches continue.
        continuation: The tokens of every branch.

    Returns:
        The features of the three branches for each step, [3, F] each.
    """
    branches = texts.branches(capacity=3, max_tokens=len(continuation))
    branches.admit(slots=[0, 1, 0], tokens_before=[TEXT, SHORT, TEXT])

    features_of_steps = []
    for token in continuation:
        same_token_for_each = torch.tensor([token] * 3, device=branches.device)
        features_of_steps.append(branches.step(same_token_for_each))
    return features_of_steps


def _compute_expected_logits(model: Any, tokens: Sequence[int], whole: Tensor) -> Tensor:
    """Compute the logits that a trial with a cache should give, by the model without a cache.

    The long sequence is all of `tokens`: prompt, text and continuation. In the short sequence, the text is cut after
    its first SHORT tokens.

    Args:
        model: The model.
        tokens: The TRIAL tokens.
        whole: The logits of the long sequence, [T, V].

    Returns:
        Logits in the order of `_run_branches`, [TEXT + 6, V]:

            0 to 7    the tokens of the text
            8 to 10   the first token of the continuation in the long sequence, the short one, and the long one again
            11 to 13  the second token of the continuation, in the same sequences
    """
    text_end = PROMPT + TEXT
    short_text_end = PROMPT + SHORT
    continuation = tokens[text_end:]

    short_sequence = [*tokens[:short_text_end], *continuation]
    short_logits = compute_model_logits(model, short_sequence)  # a row per token

    rows = list(whole[PROMPT:text_end])
    for long_row, short_row in zip(whole[text_end:], short_logits[short_text_end:], strict=True):
        rows += [long_row, short_row, long_row]
    return torch.stack(rows)
