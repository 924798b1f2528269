"""Prefixes that begin alike, run once as a tree, and the texts behind them."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from toolformer_dag.model.attention import Backbone, on_device, padded
from toolformer_dag.model.memory import batches

NODES = 128
"""Where a tree is closed and the next begins: its attention is quadratic, and what two trees share is done twice."""


@dataclass(eq=False)
class PrefixTree:
    """Tokens, each after the one that stands before it in its sequences.

    `parents` holds the node before each node (-1 for none), `depths` how many stand before it.
    """

    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    depths: list[int] = field(default_factory=list)

    def add(self, sequence: Sequence[int], shared: Sequence[int]) -> list[int]:
        """The nodes of a sequence, of which those in `shared` are there already; makes the others."""
        path = list(shared)
        for token in sequence[len(shared) :]:
            self.tokens.append(token)
            self.parents.append(path[-1] if path else -1)
            self.depths.append(len(path))
            path.append(len(self.tokens) - 1)
        return path

    def visible(self, width: int) -> NDArray[np.bool_]:
        """[width, width]: which nodes each may attend to, those of its own sequence; padding sees itself."""
        mask = np.eye(width, dtype=np.bool_)
        for node, parent in enumerate(self.parents):
            if parent >= 0:
                mask[node] |= mask[parent]
        return mask


@dataclass(frozen=True, slots=True)
class Forest:
    """Trees over some sequences: by sequence the number of its tree, its nodes there, and how many of them are new."""

    trees: list[PrefixTree]
    homes: list[int]
    paths: list[list[int]]
    fresh: list[int]


def forest(sequences: Sequence[Sequence[int]]) -> Forest:
    """Trees over sequences in lexicographic order, in which a sequence shares most with the one before it."""
    grown = Forest([PrefixTree()], [], [], [])
    before, path = list[int](), list[int]()
    for sequence in map(list, sequences):
        common = _common(before, sequence)
        held = len(grown.trees[-1].tokens)
        if held and common < len(sequence) and held + len(sequence) - common > NODES:
            grown.trees.append(PrefixTree())
            common = 0
        before, path = sequence, grown.trees[-1].add(sequence, path[:common])
        grown.homes.append(len(grown.trees) - 1)
        grown.paths.append(path)
        grown.fresh.append(len(sequence) - common)
    return grown


def _common(one: Sequence[int], other: Sequence[int]) -> int:
    pairs = enumerate(zip(one, other, strict=False))
    return next((at for at, (a, b) in pairs if a != b), min(len(one), len(other)))


Nodes = dict[int, list[tuple[Tensor, Tensor]]]
"""Keys and values [nodes, H_kv, D] by layer, a pair for each pass."""


class CachedPrefixes:
    """Keys, values and features of all nodes of the prefixes' trees.

    `fresh` says how many tokens each prefix added to those before it, `passes` how many passes it took.
    """

    def __init__(self, backbone: Backbone, prefixes: Sequence[Sequence[int]], budget: int) -> None:
        """Runs the prefixes, which stand in lexicographic order, at most `budget` tokens a pass."""
        self.backbone = backbone
        planted = forest(prefixes)
        self.fresh = planted.fresh
        sizes = [len(tree.tokens) for tree in planted.trees]
        order = sorted(filter(sizes.__getitem__, range(len(sizes))), key=sizes.__getitem__)
        starts = dict(zip(order, accumulate((sizes[tree] for tree in order), initial=0), strict=False))
        homes = zip(planted.homes, planted.paths, strict=True)
        self.paths = [[starts[home] + node for node in path] for home, path in homes]
        found: Nodes = defaultdict(list)
        cuts = list(batches(order, sizes, budget))
        ends = [self._grow([planted.trees[tree] for tree in cut], found) for cut in cuts]
        self.passes = len(cuts)
        self.ends = torch.cat(ends) if ends else None
        self.layers = {layer: tuple(map(torch.cat, zip(*found.pop(layer), strict=True))) for layer in list(found)}

    def features(self, chosen: Sequence[int], texts: Sequence[Sequence[int]]) -> Tensor:
        """[len(chosen), 1 + T, features]: at the last token of each chosen prefix, then at the tokens of its text.

        What stands before the text of an empty prefix means nothing.
        """
        ids = padded(texts, self.backbone.device)
        paths = [self.paths[number] for number in chosen]
        found = self._behind(ids, texts, paths) if ids.shape[1] else None
        if self.ends is None:
            return F.pad(found, (0, 0, 1, 0)) if found is not None else ids
        ends = self.ends[on_device([path[-1] if path else 0 for path in paths], ids.device)][:, None]
        return ends if found is None else torch.cat([ends, found], 1)

    def _grow(self, trees: Sequence[PrefixTree], found: Nodes) -> Tensor:
        """Runs trees side by side and adds their nodes' keys to what was found; [nodes, features]."""
        ids = padded([tree.tokens for tree in trees], self.backbone.device)
        places = [(row, node) for row, tree in enumerate(trees) for node in range(len(tree.tokens))]
        rows, columns = on_device(places, ids.device).T
        seen = on_device(np.stack([tree.visible(ids.shape[1]) for tree in trees]), ids.device, torch.bool)
        bias = self._bias(seen[:, None])

        def attend(layer: int, queries: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
            found[layer].append((keys[rows, :, columns], values[rows, :, columns]))
            return biased(queries, keys, values, bias, scale)

        depths = padded([tree.depths for tree in trees], ids.device)
        return self.backbone.features(ids, depths, attend)[rows, columns]

    def _behind(self, ids: Tensor, texts: Sequence[Sequence[int]], paths: Sequence[Sequence[int]]) -> Tensor:
        """`ids` [B, T] of the texts, each behind the nodes of its path -> [B, T, features]."""
        nodes = padded(paths, ids.device)
        if not nodes.shape[1]:
            return self.backbone.features(ids)
        lengths = on_device([len(path) for path in paths], ids.device)[:, None]
        steps = torch.arange(ids.shape[1], device=ids.device)
        known = torch.arange(nodes.shape[1], device=ids.device) < lengths
        own = steps[:, None] >= steps
        shape = (len(ids), 1, len(steps), -1)
        bias = self._bias(torch.cat([known[:, None, None].expand(shape), own.expand(shape)], -1))

        def attend(layer: int, queries: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
            before = (part[nodes].transpose(1, 2) for part in self.layers[layer])
            keys, values = (torch.cat(parts, 2) for parts in zip(before, (keys, values), strict=True))
            return biased(queries, keys, values, bias, scale)

        last = on_device([max(0, len(text) - 1) for text in texts], ids.device)[:, None]
        positions = lengths + torch.minimum(steps, last)  # what pads a text may be beyond the model's last position
        return self.backbone.features(ids, positions, attend)

    def _bias(self, seen: Tensor) -> Tensor:
        """Zero where `seen` is true, else minus infinity, in the model's dtype: made once for all layers."""
        return torch.zeros(seen.shape, dtype=self.backbone.model.dtype, device=seen.device).masked_fill_(
            ~seen, -torch.inf
        )


def biased(queries: Tensor, keys: Tensor, values: Tensor, bias: Tensor, scale: float) -> Tensor:
    """Attention of [B, H, T, D] with `bias` [B, 1, T, S] on the scores.

    Grouped keys are repeated: with a bias, the fused kernels of a GPU take none.
    """
    repeats = queries.shape[1] // keys.shape[1]
    if repeats > 1:
        keys, values = (part.repeat_interleave(repeats, 1) for part in (keys, values))
    return F.scaled_dot_product_attention(queries, keys, values, attn_mask=bias, scale=scale)
