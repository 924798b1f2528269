"""Texts behind a prompt head for models that keep nothing between passes: every sequence is run in full."""

from collections.abc import Sequence

import torch
from torch import Tensor

from toolformer_dag.model.attention import on_device, padded
from toolformer_dag.model.backbone import Backbone
from toolformer_dag.model.memory import TokenBudget


class RecomputedHead:
    """The shared prompt head as tokens; passes keep within `budget`."""

    def __init__(self, backbone: Backbone, ids: Sequence[int], budget: TokenBudget) -> None:
        self.backbone = backbone
        self.ids = list(ids)
        self.budget = budget

    def texts(self, slots: int, width: int) -> "RecomputedTexts":
        """Return texts behind this head, to be filled by `RecomputedTexts.features`; nothing is allocated."""
        return RecomputedTexts(self)


class RecomputedTexts:
    """Whole sequences of head and text by slot."""

    def __init__(self, head: RecomputedHead) -> None:
        self.head = head
        self.sequences: dict[int, list[int]] = {}

    def tokens_run(self, sequence: Sequence[int]) -> int:
        """Return how many tokens `features` runs for a text: those of the head too."""
        return len(self.head.ids) + len(sequence)

    def features(self, slots: Sequence[int], sequences: Sequence[Sequence[int]], first: int) -> Tensor:
        """Run texts in full, stored in `slots`; return [len(slots), T - first, F] at text tokens from `first` on."""
        backbone = self.head.backbone
        whole = [[*self.head.ids, *sequence] for sequence in sequences]
        self.sequences.update(zip(slots, whole, strict=True))
        return backbone.features(padded(whole, backbone.device))[:, len(self.head.ids) + first :]

    def branches(self, capacity: int, room: int) -> "RecomputedBranches":
        """Return no branches yet; `RecomputedBranches.admit` starts them."""
        return RecomputedBranches(self)


class RecomputedBranches:
    """Continuations of texts, one token at a time, recomputed in full at each step.

    `tokens_run`: the number of tokens that the last step ran.
    """

    def __init__(self, texts: RecomputedTexts) -> None:
        self.texts = texts
        self.head = texts.head
        self.sequences: list[list[int]] = []
        self.tokens_run = 0

    def admit(self, slots: Sequence[int], kept: Sequence[int]) -> None:
        """Add a branch per slot behind those there are; branch b keeps the first `kept[b]` tokens of its text."""
        head = len(self.head.ids)
        self.sequences += [self.texts.sequences[slot][: head + n] for slot, n in zip(slots, kept, strict=True)]

    def step(self, tokens: Tensor) -> Tensor:
        """Append one token [B] to each branch; return its features [B, F]. Raises ModelError."""
        self.sequences = [[*ids, token] for ids, token in zip(self.sequences, tokens.tolist(), strict=True)]
        found: dict[int, Tensor] = {}

        def work(batch: list[int]) -> None:
            found.update(zip(batch, self._at_the_end(batch), strict=True))

        lengths = [len(ids) for ids in self.sequences]
        self.tokens_run = sum(lengths)
        self.head.budget.run(lengths, work, lower="segment_tokens or max_call_tokens")
        return torch.stack([found[row] for row in range(len(lengths))])

    def select(self, rows: Sequence[int]) -> None:
        """Continue with these branches in this order; a row that is named twice is duplicated."""
        self.sequences = [self.sequences[row] for row in rows]

    def _at_the_end(self, rows: Sequence[int]) -> Tensor:
        """Compute features [len(rows), F] at the last token of each sequence.

        A row that is not finite is run again alone: the padding behind it may overflow where it does not.
        """
        backbone = self.head.backbone
        ends = [len(self.sequences[row]) - 1 for row in rows]
        ids = padded([self.sequences[row] for row in rows], backbone.device)
        features = backbone.features(ids)[torch.arange(len(rows), device=ids.device), on_device(ends, ids.device)]
        if len(rows) > 1:
            for at in (~features.isfinite().all(-1)).nonzero()[:, 0].tolist():
                features[at] = self._at_the_end([rows[at]])[0]
        return features


class RecomputedPrefixes:
    """Texts behind prefixes, with the interface of CachedPrefixes; every sequence is run in full."""

    passes = 0

    def __init__(self, backbone: Backbone, prefixes: Sequence[Sequence[int]], budget: int) -> None:
        self.backbone = backbone
        self.prefixes = prefixes
        self.new_tokens = [len(prefix) for prefix in prefixes]

    def features(self, chosen: Sequence[int], texts: Sequence[Sequence[int]]) -> Tensor:
        """Compute features [len(chosen), 1 + T, F]: at the last token of each prefix, then at its text's tokens."""
        prefixes = [self.prefixes[number] for number in chosen]
        whole = [[*prefix, *text] for prefix, text in zip(prefixes, texts, strict=True)]
        features = self.backbone.features(padded(whole, self.backbone.device))
        starts = on_device([len(prefix) for prefix in prefixes], features.device)[:, None]
        columns = starts + torch.arange(max(map(len, texts)) + 1, device=features.device) - 1
        rows = torch.arange(len(whole), device=features.device)[:, None]
        return features[rows, columns.clamp(0, features.shape[1] - 1)]
