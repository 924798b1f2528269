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
    LOGIT_TOLERANCES,
    SAME_ORDER_LOGIT_TOLERANCES,
    TRIAL_TOKEN_COUNT,
    are_logits_close,
    compute_logits_or_none,
    compute_model_logits,
    use_exact_products,
)

_log = logging.getLogger(__name__)

SHARED_KEYS = "shared keys"
OWN_CACHE = "own cache"
RECOMPUTED = "recomputed"
INITIAL_GREEDY_TOKENS = 32
"""Tokens of a greedy row for which the cache has space at first; it is doubled where they do not suffice."""


@dataclass(frozen=True, slots=True)
class Sharing:
    """How sequences with a common beginning share the work on it.

    Attributes:
        method: `shared keys`, where the keys of the beginning are computed and stored once; `own cache`, where they are
            computed once and copied for each sequence, in the model's own cache; or `recomputed`, where every sequence
            runs in full at each token.
        cache_use: How the model's own cache is used, or None for `shared keys`.
    """

    method: str
    cache_use: CacheUse | None = None

    def run_prompt(self, backbone: Backbone, prompt_ids: Sequence[int]) -> "Prompt":
        """Run the common beginning of some texts (the prompt), and keep it for the texts that follow.

        Its keys are cached, or only its tokens if nothing can be cached (`CacheUse.recomputes_rows`).

        Args:
            backbone: The model.
            prompt_ids: The tokens of the beginning.
        """
        if self.cache_use is None:  # our own attention reads keys that are stored once
            return CachedPrompt(backbone, prompt_ids)

        # The model's own cache, which may hold only the tokens (`recomputes_rows`).
        prompt = ModelCache(backbone, self.cache_use, row_count=1)
        prompt.run_sequences([prompt_ids])
        return prompt

    def create_branch_cache(self, backbone: Backbone) -> "Branches":
        """Prepare the greedy decoding of sequences that have no beginning in common.

        Returns:
            An object that holds no branch yet. A branch is a sequence that grows token by token: `add_sequences` runs
            sequences, and starts a branch at the end of each.
        """
        if self.cache_use is None:  # our own attention reads keys that are stored once
            # Nothing is shared, so the prompt has no tokens, and there is no text between it and the branches.
            empty_prompt = CachedPrompt(backbone, [])
            texts = empty_prompt.create_text_cache(slot_count=0, max_text_tokens=0)
            return texts.create_branch_cache(max_branches=0, max_tokens=INITIAL_GREEDY_TOKENS)

        # The model's own cache, which may hold only the tokens (`recomputes_rows`).
        prompt = ModelCache(backbone, self.cache_use, row_count=1)  # no tokens run in it
        return ModelCacheBranches(ModelCacheTexts(prompt))


OWN_CACHE_SHARINGS = [
    Sharing(OWN_CACHE, CacheUse(can_run_chunks=True, batching="any")),
    Sharing(OWN_CACHE, CacheUse(can_run_chunks=True, batching="equal_length")),
    Sharing(OWN_CACHE, CacheUse(can_run_chunks=True, batching="single")),
    Sharing(OWN_CACHE, CacheUse(can_run_chunks=False, batching="any")),
    Sharing(OWN_CACHE, CacheUse(can_run_chunks=False, batching="equal_length")),
    Sharing(OWN_CACHE, CacheUse(can_run_chunks=False, batching="single")),
]
"""How a model's own cache may be used, from the fastest to the slowest."""
RECOMPUTED_SHARING = Sharing(RECOMPUTED, CacheUse(can_run_chunks=True, batching="equal_length", recomputes_rows=True))
"""Nothing is shared: every sequence runs in full at each token."""
Prompt = CachedPrompt | ModelCache
"""The common beginning of some texts, after it ran."""
Texts = CachedTexts | ModelCacheTexts
"""Texts after a prompt, with their keys cached."""
Branches = CachedBranches | ModelCacheBranches
"""Continuations of texts, which grow token by token."""


def choose_sharing(backbone: Backbone, name: str, trial_token_ids: Sequence[int]) -> Sharing:
    """Choose the fastest way to run sequences with a common beginning that does not change the model's logits.

    The ways are tried on a short text, from the fastest to the slowest. `backbone` is changed to run as chosen. The
    choice is logged, with a warning if it costs time or memory.

    Args:
        backbone: The model.
        name: The name of the model, for the log.
        trial_token_ids: Tokens of ordinary text from `list_trial_token_ids`. Only the first TRIAL_TOKEN_COUNT are used.
    """
    sharing = _choose_by_trial(backbone, trial_token_ids[:TRIAL_TOKEN_COUNT])  # also changes `backbone`
    model_description = f"{name!r} ({type(backbone.model).__name__})"
    _log_choice(sharing, model_description)
    return sharing


def _log_choice(sharing: Sharing, model_description: str) -> None:
    """Log how sequences share the work on their common beginning, as a warning if it costs time or memory."""
    if sharing.method == SHARED_KEYS:
        _log.info("%s: the keys of prompt and text are computed and stored once for all samples", model_description)
    elif sharing.cache_use is not None and sharing.method == OWN_CACHE:
        _log.warning(
            "%s: its attention cannot be replaced, so its own cache serves: no token is computed twice, but every "
            "sample holds a copy of the keys of prompt and text%s",
            model_description,
            _describe_cache_costs(sharing.cache_use),
        )
    else:  # RECOMPUTED: nothing is shared
        _log.warning(
            "%s: its cache changes its logits, so prompt and text are recomputed for every token of every sample, "
            "which is slow; use another model where you can",
            model_description,
        )


def _describe_cache_costs(cache_use: CacheUse) -> str:
    """Describe the further costs of using a model's own cache, as the end of a sentence. Empty if there are none."""
    batching_cost = "" if cache_use.batching == "any" else ", and few samples run together"
    speed_cost = "" if cache_use.can_run_chunks else ", and a text runs one token at a time"
    return batching_cost + speed_cost


@use_exact_products()
def _choose_by_trial(backbone: Backbone, trial_token_ids: Sequence[int]) -> Sharing:
    """Try the ways to share work from the fastest to the slowest, until one reproduces the model's own logits.

    The last way, to share nothing, is taken without a trial.

    Args:
        backbone: The model. It is changed to run as chosen: whole or split into body and head, and with its own
            attention or with ours.
        trial_token_ids: The tokens of the trial.
    """
    expected = compute_model_logits(backbone.model, trial_token_ids)  # [T, V]
    backbone.uses_custom_attention = False

    # 1. Shared keys: our attention replaces the model's, so that keys are computed and stored once. For this the model
    # has to run as a body and a head, one after the other, with the same logits.
    if _split_into_working_body(backbone, trial_token_ids, expected):
        backbone.uses_custom_attention = True
        if _does_custom_attention_agree(backbone, trial_token_ids, expected):
            return Sharing(SHARED_KEYS)
        backbone.uses_custom_attention = False
    else:
        backbone.stop_splitting_model()

    # 2. The model's own cache, with a copy of the keys for each sequence.
    own_cache = _find_agreeing_cache(backbone, trial_token_ids, expected)
    if own_cache is not None:
        return own_cache

    # 3. Nothing is shared: every sequence runs in full at each token.
    return RECOMPUTED_SHARING


def _find_agreeing_cache(backbone: Backbone, trial_token_ids: Sequence[int], expected_logits: Tensor) -> Sharing | None:
    """Find the fastest use of the model's own cache that does not change the model's logits.

    In the trial, a text is continued after all of its tokens, and after some of them. The logits of these
    continuations (branches) are compared with those that the model computes without a cache.

    Args:
        backbone: The model.
        trial_token_ids: The tokens of the trial.
        expected_logits: The logits that the model computes for them without a cache, [T, V].

    Returns:
        The first of OWN_CACHE_SHARINGS that passes the trial. None if none does.
    """
    expected_branch_logits = _compute_expected_branch_logits(backbone.model, trial_token_ids, expected_logits)
    tolerance = LOGIT_TOLERANCES[backbone.model.dtype]

    for sharing in OWN_CACHE_SHARINGS:  # from the fastest to the slowest
        run_trial = partial(_compute_branch_logits, sharing.run_prompt, backbone, trial_token_ids)
        logits = compute_logits_or_none(run_trial)  # None after an error, which agrees with nothing
        if are_logits_close(expected_branch_logits, logits, tolerance):
            return sharing
    return None


def _split_into_working_body(backbone: Backbone, trial_token_ids: Sequence[int], expected_logits: Tensor) -> bool:
    """Find out which module of a model is its body: all layers but the head, which turns features into logits.

    The body is right if the head, run on its output, gives the same logits as the whole model.

    Args:
        backbone: The model. Its `body` is set to the first module that works.
        trial_token_ids: The tokens of the trial.
        expected_logits: The logits that the whole model computes for them, [T, V].

    Returns:
        Whether such a body was found.
    """
    tolerance = SAME_ORDER_LOGIT_TOLERANCES[backbone.model.dtype]
    for body in backbone.list_possible_bodies():
        backbone.body = body
        run_trial = partial(_compute_sequence_logits, backbone, trial_token_ids)
        logits = compute_logits_or_none(run_trial)  # None after an error, which agrees with nothing
        if are_logits_close(expected_logits, logits, tolerance):
            return True
    return False


def _does_custom_attention_agree(backbone: Backbone, trial_token_ids: Sequence[int], expected_logits: Tensor) -> bool:
    """Return whether the model gives the same logits with our attention, with and without cached keys.

    Args:
        backbone: The model, which uses our attention already.
        trial_token_ids: The tokens of the trial.
        expected_logits: The logits that the model computes for them with its own attention, [T, V].

    Returns:
        Whether it does. False also if the model raises an error with our attention.
    """
    tolerance = LOGIT_TOLERANCES[backbone.model.dtype]

    # Without cached keys. The logits are None after an error, and None agrees with nothing.
    logits = compute_logits_or_none(partial(_compute_sequence_logits, backbone, trial_token_ids))
    if not are_logits_close(expected_logits, logits, tolerance):
        return False

    # With cached keys.
    branch_logits = compute_logits_or_none(partial(_compute_branch_logits, CachedPrompt, backbone, trial_token_ids))
    expected_branch_logits = _compute_expected_branch_logits(backbone.model, trial_token_ids, expected_logits)
    return are_logits_close(expected_branch_logits, branch_logits, tolerance)


def _compute_sequence_logits(backbone: Backbone, token_ids: Sequence[int]) -> Tensor:
    """Compute the logits of a sequence in one pass, [T, V]."""
    input_ids = pad_sequences([token_ids], backbone.device)  # [1, T]
    features = backbone.compute_features(input_ids)  # [1, T, F]
    return backbone.compute_logits(features[0])


# A trial has 16 tokens. Sequences share its prompt, and some of them its text, as in real use:
#
#     prompt         0 1 2 3 4 5
#     text                       6 7 8 9 10 11 12 13
#     continuation                                   14 15
#     long branch    0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15
#     short branch   0 1 2 3 4 5 6 7 8               14 15
PROMPT_TOKEN_COUNT = 6
"""Tokens of the prompt."""
TEXT_TOKEN_COUNT = 8
"""Tokens of the text."""
SHORT_TEXT_TOKEN_COUNT = 3
"""Tokens of the text that the short branch continues."""


def _compute_branch_logits(
    run_prompt: Callable[[Backbone, Sequence[int]], Prompt], backbone: Backbone, trial_token_ids: Sequence[int]
) -> Tensor:
    """Compute the logits of the trial with a cache, to be compared with those that the model computes without one.

    The same two tokens continue the text three times, in branches: after all of it (long), after its first
    SHORT_TEXT_TOKEN_COUNT tokens (short), and after all of it again. The picture above shows both lengths. The long
    branches share a cached text, as samples do in use.

    Args:
        run_prompt: Runs a prompt and caches its keys, in the way that is on trial.
        backbone: The model.
        trial_token_ids: The TRIAL_TOKEN_COUNT tokens: those of the prompt, of the text, and of the continuation.

    Returns:
        The logits of the text's tokens, then of the first token of each branch, then of the second token of each
        branch, [TEXT_TOKEN_COUNT + 6, V].
    """
    text_end = PROMPT_TOKEN_COUNT + TEXT_TOKEN_COUNT
    prompt_tokens = trial_token_ids[:PROMPT_TOKEN_COUNT]
    text = trial_token_ids[PROMPT_TOKEN_COUNT:text_end]
    continuation = trial_token_ids[text_end:]

    prompt = run_prompt(backbone, prompt_tokens)
    # One slot is for the text, the other for its beginning. After each runs a token more, which no branch may see.
    texts = prompt.create_text_cache(slot_count=2, max_text_tokens=TEXT_TOKEN_COUNT + 1)

    features_of_text = _run_text(texts, text_ids=text, other_token_id=prompt_tokens[0])
    features_of_steps = _run_continuation(texts, continuation)  # [3, F] for each of the two tokens
    return backbone.compute_logits(torch.cat([features_of_text, *features_of_steps]))


def _run_text(cached_texts: Texts, *, text_ids: Sequence[int], other_token_id: int) -> Tensor:
    """Run the text of the trial in slot 0 (a row of the cache), and the beginning of it in slot 1.

    Each slot gets one token more than its branches continue: `other_token_id` in slot 0, and the text's own next token
    in slot 1. A branch that sees this token has other logits, and so the trial fails.

    Args:
        cached_texts: The cache that is on trial.
        text_ids: The tokens of the text.
        other_token_id: The token to run after the whole text.

    Returns:
        The features of the text, without the other token, [TEXT_TOKEN_COUNT, F].
    """
    extended_text = [*text_ids, other_token_id]
    extended_beginning = list(text_ids[: SHORT_TEXT_TOKEN_COUNT + 1])
    token_sequences = [extended_text, extended_beginning]
    features = cached_texts.run_texts([0, 1], token_sequences, first_token_index=0)  # [2, TEXT_TOKEN_COUNT + 1, F]
    return features[0, :TEXT_TOKEN_COUNT]


def _run_continuation(cached_texts: Texts, continuation_ids: Sequence[int]) -> list[Tensor]:
    """Continue the texts of the trial: a long branch, the short one, and a long one again, one token per step.

    The long branches continue the whole text in slot 0, the short one a part of the text in slot 1.

    Args:
        cached_texts: The cache that is on trial, with the texts that the branches continue.
        continuation_ids: The tokens of every branch.

    Returns:
        The features of the three branches for each step, [3, F] each.
    """
    branches = cached_texts.create_branch_cache(max_branches=3, max_tokens=len(continuation_ids))
    branches.start_branches(
        slots=[0, 1, 0], token_counts_before=[TEXT_TOKEN_COUNT, SHORT_TEXT_TOKEN_COUNT, TEXT_TOKEN_COUNT]
    )

    features_of_steps = []
    for token in continuation_ids:
        same_token_for_each = torch.tensor([token] * 3, device=branches.device)
        features_of_steps.append(branches.run_next_tokens(same_token_for_each))
    return features_of_steps


def _compute_expected_branch_logits(model: Any, trial_token_ids: Sequence[int], long_sequence_logits: Tensor) -> Tensor:
    """Compute the logits that a trial with a cache should give, by the model without a cache.

    The long sequence is all of `trial_token_ids`: prompt, text and continuation. In the short sequence, the text is cut
    after its first SHORT_TEXT_TOKEN_COUNT tokens.

    Args:
        model: The model.
        trial_token_ids: The TRIAL_TOKEN_COUNT tokens.
        long_sequence_logits: The logits of the long sequence, [T, V].

    Returns:
        Logits in the order of `_compute_branch_logits`, [TEXT_TOKEN_COUNT + 6, V]:

            0 to 7    the tokens of the text
            8 to 10   the first token of the continuation in the long sequence, the short one, and the long one again
            11 to 13  the second token of the continuation, in the same sequences
    """
    text_end = PROMPT_TOKEN_COUNT + TEXT_TOKEN_COUNT
    short_text_end = PROMPT_TOKEN_COUNT + SHORT_TEXT_TOKEN_COUNT
    continuation = trial_token_ids[text_end:]

    short_sequence = [*trial_token_ids[:short_text_end], *continuation]
    short_logits = compute_model_logits(model, short_sequence)  # a row per token

    rows = list(long_sequence_logits[PROMPT_TOKEN_COUNT:text_end])
    for long_row, short_row in zip(long_sequence_logits[text_end:], short_logits[short_text_end:], strict=True):
        rows += [long_row, short_row, long_row]
    return torch.stack(rows)
