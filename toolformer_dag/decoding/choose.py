"""Choosing how rows are written, by trying it on the model at hand."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from weakref import WeakKeyDictionary

import torch

from toolformer_dag.decoding.batch import Batch
from toolformer_dag.decoding.cached_batch import CachedBatch
from toolformer_dag.decoding.recomputed_batch import RecomputedBatch
from toolformer_dag.language_model.load import LanguageModel
from toolformer_dag.language_model.trial import TOLERANCES, TRIAL, agrees, tried

_log = logging.getLogger(__name__)
BATCH_ROWS = 64
UNLIKE = (TRIAL[:7], TRIAL[2:5])
"""Two sequences of unlike length: the shorter one is padded where they are run together."""


@dataclass(frozen=True, slots=True)
class Way:
    """How rows are written, and how many of them at once."""

    kind: type[Batch]
    rows: int


_WAYS: WeakKeyDictionary[LanguageModel, Way] = WeakKeyDictionary()


def choose_way(language_model: LanguageModel) -> Way:
    """Rows of unlike length together where that gives the model's own logits, else each alone, else without a cache.

    A model is tried once.
    """
    if language_model not in _WAYS:
        _WAYS[language_model] = _way(language_model)
    return _WAYS[language_model]


@torch.inference_mode()
def _way(language_model: LanguageModel) -> Way:
    if _right(language_model, UNLIKE):
        return Way(CachedBatch, BATCH_ROWS)
    if all(_right(language_model, [sequence]) for sequence in UNLIKE):
        return Way(CachedBatch, 1)
    name = language_model.name
    _log.warning("a cache does not give the numbers of %r; it is run whole for every token, which is slow", name)
    return Way(RecomputedBatch, BATCH_ROWS)


def _right(language_model: LanguageModel, sequences: Sequence[Sequence[int]]) -> bool:
    expected = _written(RecomputedBatch, language_model, sequences)
    found = tried(partial(_written, CachedBatch, language_model, sequences))
    return agrees(expected, found, TOLERANCES[language_model.model.dtype])


def _written(kind: type[Batch], language_model: LanguageModel, sequences: Sequence[Sequence[int]]) -> torch.Tensor:
    """[steps, vocabulary]: the last row's logits while it is written, first beside the others and then alone."""
    batch = kind(language_model, sequences)
    scores = [batch.scores]
    batch.branch(0).step(TRIAL[:1])  # which some models note in themselves and not in the cache
    batch.step([TRIAL[7]] * len(sequences))
    scores.append(batch.scores)
    batch.keep([len(sequences) - 1])
    batch.step([TRIAL[8]])
    return torch.cat([*scores, batch.scores])
