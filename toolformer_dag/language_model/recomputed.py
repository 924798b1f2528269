"""The same sequences as in `cached.py` without shared keys: everything is run again at every step.

For models whose attention cannot be taken over (soft caps, ALiBi, recurrent layers). Right, and slow.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from toolformer_dag.language_model.backbone import Backbone, on_device, padded


class RecomputedHead:
    """The beginning that all texts share, as tokens."""

    def __init__(self, backbone: Backbone, ids: Sequence[int]) -> None:
        self.backbone = backbone
        self.ids = list(ids)

    def texts(self, sequences: Sequence[Sequence[int]]) -> "RecomputedTexts":
        """Texts behind this head."""
        return RecomputedTexts(self.backbone, [[*self.ids, *sequence] for sequence in sequences], len(self.ids))


class RecomputedTexts:
    """Whole sequences of head and text."""

    def __init__(self, backbone: Backbone, sequences: list[list[int]], head: int) -> None:
        self.backbone = backbone
        self.sequences = sequences
        self.head = head

    def features(self, chosen: Sequence[int]) -> Tensor:
        """[len(chosen), T, features] at the tokens behind the head."""
        ids = padded([self.sequences[text] for text in chosen], self.backbone.device)
        return self.backbone.features(ids)[:, self.head :]

    def branches(self, texts: Sequence[int], kept: Sequence[int], room: int, capacity: int) -> "RecomputedBranches":
        """A branch for every pair of a text and how many of its tokens it keeps."""
        starts = zip(texts, kept, strict=True)
        return RecomputedBranches(self.backbone, [self.sequences[text][: self.head + n] for text, n in starts])


class RecomputedBranches:
    """Continuations of texts, one token at a time."""

    def __init__(self, backbone: Backbone, sequences: list[list[int]]) -> None:
        self.backbone = backbone
        self.sequences = sequences

    def step(self, tokens: Tensor) -> Tensor:
        """Appends one token to each branch: [B] -> features [B, features] at that token."""
        self.sequences = [[*ids, token] for ids, token in zip(self.sequences, tokens.tolist(), strict=True)]
        features = self.backbone.features(padded(self.sequences, self.backbone.device))
        return features[torch.arange(len(features)), [len(ids) - 1 for ids in self.sequences]]

    def select(self, rows: Sequence[int]) -> None:
        """Goes on with these branches, in this order; one named twice is doubled."""
        self.sequences = [self.sequences[row] for row in rows]


class RecomputedPrefixes:
    """Texts behind prefixes of their own, as in `cached_prefixes.py`: every sequence is run whole."""

    passes = 0

    def __init__(self, backbone: Backbone, prefixes: Sequence[Sequence[int]], budget: int) -> None:
        self.backbone = backbone
        self.prefixes = prefixes
        self.fresh = [len(prefix) for prefix in prefixes]

    def features(self, chosen: Sequence[int], texts: Sequence[Sequence[int]]) -> Tensor:
        """[len(chosen), 1 + T, features]: at the last token of each chosen prefix, then at the tokens of its text."""
        prefixes = [self.prefixes[number] for number in chosen]
        whole = [[*prefix, *text] for prefix, text in zip(prefixes, texts, strict=True)]
        features = self.backbone.features(padded(whole, self.backbone.device))
        starts = on_device([len(prefix) for prefix in prefixes], features.device)[:, None]
        columns = starts + torch.arange(max(map(len, texts)) + 1, device=features.device) - 1
        rows = torch.arange(len(whole), device=features.device)[:, None]
        return features[rows, columns.clamp(0, features.shape[1] - 1)]
