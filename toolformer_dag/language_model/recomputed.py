"""The same sequences as in `cached.py` without shared keys: everything is run again at every step.

For models whose attention cannot be taken over (soft caps, ALiBi, recurrent layers). Right, and slow.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from toolformer_dag.language_model.backbone import Backbone, on_device, padded
from toolformer_dag.language_model.memory import TokenBudget


class RecomputedHead:
    """The beginning that all texts share, as tokens; passes keep to `budget`."""

    def __init__(self, backbone: Backbone, ids: Sequence[int], budget: TokenBudget) -> None:
        self.backbone = backbone
        self.ids = list(ids)
        self.budget = budget

    def texts(self, sequences: Sequence[Sequence[int]]) -> "RecomputedTexts":
        """Texts behind this head."""
        return RecomputedTexts(self, [[*self.ids, *sequence] for sequence in sequences])


class RecomputedTexts:
    """Whole sequences of head and text, of these `lengths`."""

    def __init__(self, head: RecomputedHead, sequences: list[list[int]]) -> None:
        self.head = head
        self.sequences = sequences
        self.lengths = [len(sequence) for sequence in sequences]

    def features(self, chosen: Sequence[int], first: int) -> Tensor:
        """[len(chosen), T - first, features] at the tokens of the texts, those before `first` left out."""
        backbone = self.head.backbone
        ids = padded([self.sequences[text] for text in chosen], backbone.device)
        columns = torch.arange(len(self.head.ids) + first, ids.shape[1], device=ids.device)
        return backbone.features(ids, columns=columns)

    def branches(self, texts: Sequence[int], kept: Sequence[int], room: int, capacity: int) -> "RecomputedBranches":
        """A branch for every pair of a text and how many of its tokens it keeps."""
        starts = zip(texts, kept, strict=True)
        head = len(self.head.ids)
        return RecomputedBranches(self.head, [self.sequences[text][: head + n] for text, n in starts])


class RecomputedBranches:
    """Continuations of texts, one token at a time."""

    def __init__(self, head: RecomputedHead, sequences: list[list[int]]) -> None:
        self.head = head
        self.sequences = sequences

    def step(self, tokens: Tensor) -> Tensor:
        """Appends one token to each branch: [B] -> features [B, features] at that token. Raises ModelError."""
        self.sequences = [[*ids, token] for ids, token in zip(self.sequences, tokens.tolist(), strict=True)]
        found: dict[int, Tensor] = {}

        def work(batch: list[int]) -> None:
            found.update(zip(batch, self._at_the_end(batch), strict=True))

        lengths = [len(ids) for ids in self.sequences]
        self.head.budget.run(lengths, work, lower="segment_tokens or max_call_tokens")
        return torch.stack([found[row] for row in range(len(lengths))])

    def select(self, rows: Sequence[int]) -> None:
        """Goes on with these branches, in this order; one named twice is doubled."""
        self.sequences = [self.sequences[row] for row in rows]

    def _at_the_end(self, rows: Sequence[int]) -> Tensor:
        """[len(rows), features] at the last token of each."""
        backbone = self.head.backbone
        ends = [len(self.sequences[row]) - 1 for row in rows]
        columns = sorted(set(ends))
        ids = padded([self.sequences[row] for row in rows], backbone.device)
        features = backbone.features(ids, columns=on_device(columns, ids.device))
        places = on_device([(row, columns.index(end)) for row, end in enumerate(ends)], ids.device)
        return features[places[:, 0], places[:, 1]]


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
