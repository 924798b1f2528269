"""Run prefixes as trees, so that common beginnings are computed once, and the texts after them."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate, takewhile

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from toolformer_dag.model.attention import AttentionLayer, Visibility, attention, on_device, padded
from toolformer_dag.model.backbone import Backbone
from toolformer_dag.model.memory import batches

TREE_NODES = 128
"""Nodes of a full tree: attention within a tree is quadratic, but a beginning shared by two trees runs twice."""


@dataclass(eq=False)
class PrefixTree:
    """Sequences as a tree of tokens; `above`: the nodes on the way to each node, from the root."""

    tokens: list[int] = field(default_factory=list)
    above: list[list[int]] = field(default_factory=list)

    def add(self, sequence: Sequence[int], shared: Sequence[int]) -> list[int]:
        """Add a sequence whose first nodes are `shared`; return all its nodes."""
        path = list(shared)
        for token in sequence[len(shared) :]:
            self.tokens.append(token)
            self.above.append(path.copy())
            path.append(len(self.tokens) - 1)
        return path

    def visible(self, width: int) -> NDArray[np.bool_]:
        """Return a mask [width, width]: each node attends to those above it and itself, padding to itself."""
        mask = np.eye(width, dtype=np.bool_)
        for node, above in enumerate(self.above):
            mask[node, above] = True
        return mask


class Forest:
    """Trees over sequences in lexicographic order: neighbours then share the longest beginnings.

    By sequence: `paths`, the number of its tree and its nodes, and how many tokens it added.
    """

    def __init__(self, sequences: Sequence[Sequence[int]]) -> None:
        self.trees = [PrefixTree()]
        self.paths: list[tuple[int, list[int]]] = []
        self.new_tokens: list[int] = []
        before, path = list[int](), list[int]()
        for sequence in map(list, sequences):
            alike = takewhile(lambda pair: pair[0] == pair[1], zip(before, sequence, strict=False))
            common = len(list(alike))
            held = len(self.trees[-1].tokens)
            if held and common < len(sequence) and held + len(sequence) - common > TREE_NODES:
                self.trees.append(PrefixTree())
                common = 0
            before, path = sequence, self.trees[-1].add(sequence, path[:common])
            self.paths.append((len(self.trees) - 1, path))
            self.new_tokens.append(len(sequence) - common)


Nodes = dict[int, list[tuple[Tensor, Tensor]]]
"""Keys and values [nodes, H_kv, D] by layer, one pair per pass."""


class CachedPrefixes:
    """Cached keys, values and features of all nodes of the prefixes' trees.

    `new_tokens`: how many tokens each prefix added to the trees. `passes`: the number of model passes.
    """

    def __init__(self, backbone: Backbone, prefixes: Sequence[Sequence[int]], budget: int) -> None:
        """Run prefixes in lexicographic order with at most `budget` tokens per pass."""
        self.backbone = backbone
        built = Forest(prefixes)
        self.new_tokens = built.new_tokens
        sizes = [len(tree.tokens) for tree in built.trees]
        order = sorted(filter(sizes.__getitem__, range(len(sizes))), key=sizes.__getitem__)
        starts = dict(zip(order, accumulate((sizes[tree] for tree in order), initial=0), strict=False))
        self.paths = [[starts[tree] + node for node in path] for tree, path in built.paths]
        nodes: Nodes = defaultdict(list)
        cuts = list(batches(order, sizes, budget))
        ends = [self._run_trees([built.trees[tree] for tree in cut], nodes) for cut in cuts]
        self.passes = len(cuts)
        self.ends = torch.cat(ends) if ends else None
        self.layers = {layer: tuple(map(torch.cat, zip(*nodes.pop(layer), strict=True))) for layer in list(nodes)}

    def features(self, chosen: Sequence[int], texts: Sequence[Sequence[int]]) -> Tensor:
        """Compute features [len(chosen), 1 + T, F]: at the last token of each prefix, then at its text's tokens.

        The first column of an empty prefix is undefined.
        """
        ids = padded(texts, self.backbone.device)
        paths = [self.paths[number] for number in chosen]
        if self.ends is None:
            return F.pad(self._run_texts(ids, texts, paths), (0, 0, 1, 0))
        ends = self.ends[on_device([path[-1] if path else 0 for path in paths], ids.device)][:, None]
        return torch.cat([ends, self._run_texts(ids, texts, paths)], 1) if ids.shape[1] else ends

    def _run_trees(self, trees: Sequence[PrefixTree], nodes: Nodes) -> Tensor:
        """Run trees in one pass, append their keys to `nodes`, and return features [nodes, F]."""
        ids = padded([tree.tokens for tree in trees], self.backbone.device)
        places = [(row, node) for row, tree in enumerate(trees) for node in range(len(tree.tokens))]
        rows, columns = on_device(places, ids.device).T
        seen = on_device(np.stack([tree.visible(ids.shape[1]) for tree in trees]), ids.device, torch.bool)
        depths = [list(map(len, tree.above)) for tree in trees]
        positions = padded(depths, ids.device)
        visibility = Visibility(positions, positions, 1 + max(map(max, depths)), self.backbone.model.dtype, seen)

        def attend(layer: AttentionLayer, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
            nodes[layer.number].append((keys[rows, :, columns], values[rows, :, columns]))
            return attention(layer, queries, keys, values, visibility.bias(layer))

        return self.backbone.features(ids, positions, attend)[rows, columns]

    def _run_texts(self, ids: Tensor, texts: Sequence[Sequence[int]], paths: Sequence[Sequence[int]]) -> Tensor:
        """Run texts `ids` [B, T], each after the nodes of its path; return [B, T, F]."""
        nodes = padded(paths, ids.device)
        if not nodes.shape[1]:
            return self.backbone.features(ids)
        lengths = on_device([len(path) for path in paths], ids.device)[:, None]
        steps = torch.arange(ids.shape[1], device=ids.device)
        known = torch.arange(nodes.shape[1], device=ids.device) < lengths
        own = steps[:, None] >= steps
        shape = (len(ids), len(steps), -1)
        seen = torch.cat([known[:, None].expand(shape), own.expand(shape)], -1)
        last = on_device([max(0, len(text) - 1) for text in texts], ids.device)[:, None]
        positions = lengths + torch.minimum(steps, last)  # padding may lie beyond the model's last position
        places = torch.cat([torch.arange(nodes.shape[1], device=ids.device).expand(len(ids), -1), positions], 1)
        longest = max(len(path) + len(text) for path, text in zip(paths, texts, strict=True))
        visibility = Visibility(positions, places, longest, self.backbone.model.dtype, seen)

        def attend(layer: AttentionLayer, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
            before = (part[nodes].transpose(1, 2) for part in self.layers[layer.number])
            keys, values = (torch.cat(parts, 2) for parts in zip(before, (keys, values), strict=True))
            return attention(layer, queries, keys, values, visibility.bias(layer))

        return self.backbone.features(ids, positions, attend)
