"""Run prefixes as trees, so that common beginnings are computed once, and the texts after them.

A tree's nodes are tokens; the path from its root to a node is a sequence. All its nodes run in one pass, in which each
attends to the nodes above it.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

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
    """Sequences as a tree of tokens, which grows with `add`. Nodes are numbered in the order in which they were added.

    - `tokens`: the token of each node.
    - `above`: the nodes on the way to each node, from the root.
    """

    tokens: list[int] = field(default_factory=list)
    above: list[list[int]] = field(default_factory=list)

    def add(self, sequence: Sequence[int], shared: Sequence[int]) -> list[int]:
        """Add a sequence that begins with the tokens of the nodes `shared`; return the nodes of all its tokens."""
        path = list(shared)
        for token in sequence[len(shared) :]:
            self.tokens.append(token)
            self.above.append(path.copy())
            path.append(len(self.tokens) - 1)
        return path

    def visible(self, width: int) -> NDArray[np.bool_]:
        """Return the attention mask of the tree's nodes, [width, width]: row r may attend to column c where it is True.

        A node attends to itself and to the nodes above it. Rows beyond the last node are padding.
        """
        mask = np.eye(width, dtype=np.bool_)
        for node, above in enumerate(self.above):
            mask[node, above] = True
        return mask


class TreePath(NamedTuple):
    """Where a sequence is in a forest: the number of its tree, and a node per token."""

    tree: int
    nodes: list[int]


class Forest:
    """Trees over sequences in lexicographic order: neighbours then share the longest beginnings.

    - `paths`: where each sequence is.
    - `new_tokens`: how many nodes each sequence added; the others it shares with the one before it.
    """

    def __init__(self, sequences: Sequence[Sequence[int]]) -> None:
        """Add the sequences one by one: each shares the nodes of the tokens that it has in common with the one before.

        A sequence begins another tree, and shares nothing, where the last tree is full.
        """
        self.trees = [PrefixTree()]
        self.paths: list[TreePath] = []
        self.new_tokens: list[int] = []
        previous: list[int] = []
        previous_nodes: list[int] = []
        for sequence in map(list, sequences):
            shared_count = _common_length(previous, sequence)
            if self._is_full(new_tokens=len(sequence) - shared_count):
                self.trees.append(PrefixTree())
                shared_count = 0
            nodes = self.trees[-1].add(sequence, previous_nodes[:shared_count])
            self.paths.append(TreePath(len(self.trees) - 1, nodes))
            self.new_tokens.append(len(sequence) - shared_count)
            previous = sequence
            previous_nodes = nodes

    def _is_full(self, new_tokens: int) -> bool:
        """Return whether so many new nodes need another tree. An empty tree takes any number."""
        nodes = len(self.trees[-1].tokens)
        return nodes > 0 and new_tokens > 0 and nodes + new_tokens > TREE_NODES


def _common_length(first: Sequence[int], second: Sequence[int]) -> int:
    """Return how many tokens two sequences have in common from their beginning."""
    length = 0
    for token, other in zip(first, second, strict=False):
        if token != other:
            break
        length += 1
    return length


class KeysAndValues(NamedTuple):
    """Keys and values of nodes in a layer, [nodes, H_kv, D] each."""

    keys: Tensor
    values: Tensor


PassesByLayer = dict[int, list[KeysAndValues]]
"""By layer, what each pass computed, in order."""


class CachedPrefixes:
    """The prefixes of some texts after they ran: cached keys and values, and features, of all nodes of their trees.

    Nodes are numbered through all trees, in the order in which these ran.

    - `new_tokens`: how many tokens each prefix added to the trees.
    - `passes`: the number of model passes that the prefixes took.
    - `paths`: the nodes of each prefix.
    - `node_features`: the features of each node, [nodes, F]; None where all prefixes are empty.
    - `layers`: by layer, the keys and values of all nodes.
    """

    def __init__(self, backbone: Backbone, prefixes: Sequence[Sequence[int]], budget: int) -> None:
        """Merge prefixes into trees of tokens, and run all trees through the model.

        prefixes: sorted, so that neighbours share the longest beginnings. budget: the most tokens of a pass.
        """
        self.backbone = backbone
        forest = Forest(prefixes)
        self.new_tokens = forest.new_tokens

        # 1. Number the nodes of all trees, in the order in which the trees run.
        sizes = [len(tree.tokens) for tree in forest.trees]
        trees_with_tokens = [tree for tree in range(len(sizes)) if sizes[tree]]
        order = sorted(trees_with_tokens, key=sizes.__getitem__)  # similar sizes run together, with little padding
        first_nodes: dict[int, int] = {}  # by tree, the number of its first node
        node_count = 0
        for tree in order:
            first_nodes[tree] = node_count
            node_count += sizes[tree]
        self.paths: list[list[int]] = []
        for path in forest.paths:
            self.paths.append([first_nodes[path.tree] + node for node in path.nodes])

        # 2. Run the trees; each pass appends its keys and values to `passes`.
        passes: PassesByLayer = defaultdict(list)
        features = []
        for batch in batches(order, sizes, budget):
            features.append(self._run_trees([forest.trees[tree] for tree in batch], passes))

        # 3. Join what the passes computed.
        self.passes = len(features)
        self.node_features = torch.cat(features) if features else None
        self.layers: dict[int, KeysAndValues] = {}
        for layer in list(passes):
            keys, values = zip(*passes.pop(layer), strict=True)  # `pop` frees a layer's parts before the next is joined
            self.layers[layer] = KeysAndValues(torch.cat(keys), torch.cat(values))

    def features(self, batch: Sequence[int], texts: Sequence[Sequence[int]]) -> Tensor:
        """Run B texts, each after a cached prefix; return their last hidden states, [B, 1 + T, F].

        - batch: for each text, the index of its prefix.
        - texts: their tokens; T is the length of the longest.

        Column 0 belongs to the last token of the prefix, from which the first token of the text is predicted, column j
        to the text's token j - 1. Column 0 after an empty prefix is undefined.
        """
        ids = padded(texts, self.backbone.device)  # [B, T]
        paths = [self.paths[index] for index in batch]
        if self.node_features is None:
            return F.pad(self._run_texts(ids, texts, paths), (0, 0, 1, 0))
        last_nodes = on_device([path[-1] if path else 0 for path in paths], ids.device)
        ends = self.node_features[last_nodes][:, None]  # [B, 1, F]
        if not ids.shape[1]:
            return ends
        return torch.cat([ends, self._run_texts(ids, texts, paths)], 1)

    def _run_trees(self, trees: Sequence[PrefixTree], passes: PassesByLayer) -> Tensor:
        """Run trees of tokens in one pass, a tree per row; return the features of all nodes, tree by tree, [nodes, F].

        A node attends to the nodes above it, and its position is their number. `passes`: for each layer, the keys and
        values of the nodes are appended.
        """
        ids = padded([tree.tokens for tree in trees], self.backbone.device)  # [trees, width]
        cells = []  # where each node is in `ids`: pairs of row and column
        for row, tree in enumerate(trees):
            cells += [(row, node) for node in range(len(tree.tokens))]
        rows, columns = on_device(cells, ids.device).T  # [nodes] each
        masks = np.stack([tree.visible(ids.shape[1]) for tree in trees])
        depths = [[len(above) for above in tree.above] for tree in trees]  # a node's position in its sequence
        positions = padded(depths, ids.device)  # [trees, width]
        visibility = Visibility(
            queries=positions,
            keys=positions,
            longest=1 + max(map(max, depths)),
            dtype=self.backbone.model.dtype,
            seen=on_device(masks, ids.device, torch.bool),
        )
        attend = _TreeAttention(rows, columns, visibility, passes)
        return self.backbone.features(ids, positions, attend)[rows, columns]

    def _run_texts(self, ids: Tensor, texts: Sequence[Sequence[int]], paths: Sequence[Sequence[int]]) -> Tensor:
        """Run B texts, each after a cached prefix; return their features, [B, T, F].

        - ids: the tokens of `texts`, padded to the longest, [B, T].
        - paths: for each text, the cached nodes that are its prefix, a node per token.
        """
        device = ids.device
        nodes = padded(paths, device)  # [B, N], N: the tokens of the longest prefix
        if not nodes.shape[1]:
            return self.backbone.features(ids)
        prefix_lengths = on_device([len(path) for path in paths], device)[:, None]  # [B, 1]
        steps = torch.arange(ids.shape[1], device=device)  # [T], the tokens of the texts
        node_steps = torch.arange(nodes.shape[1], device=device)  # [N]

        # A token attends to the nodes of its prefix, without their padding, and to its text's tokens up to itself.
        sees_nodes = node_steps < prefix_lengths  # [B, N]
        sees_text = steps[:, None] >= steps  # [T, T]
        shape = (len(ids), len(steps), -1)
        seen = torch.cat([sees_nodes[:, None].expand(shape), sees_text.expand(shape)], -1)  # [B, T, N + T]

        # Padding stays at the position of the last token: later ones may lie beyond the model's last position.
        last_steps = on_device([max(0, len(text) - 1) for text in texts], device)[:, None]
        positions = prefix_lengths + torch.minimum(steps, last_steps)  # [B, T]
        key_positions = torch.cat([node_steps.expand(len(ids), -1), positions], 1)  # [B, N + T]
        visibility = Visibility(
            queries=positions,
            keys=key_positions,
            longest=max(len(path) + len(text) for path, text in zip(paths, texts, strict=True)),
            dtype=self.backbone.model.dtype,
            seen=seen,
        )
        return self.backbone.features(ids, positions, _TextAttention(self.layers, nodes, visibility))


@dataclass(frozen=True, eq=False)
class _TreeAttention:
    """Attention within trees, which also stores the keys and values of their nodes.

    - `rows`, `columns` [nodes]: where each node is in the pass.
    - `passes`: gets the keys and values of each layer.
    """

    rows: Tensor
    columns: Tensor
    visibility: Visibility
    passes: PassesByLayer

    def __call__(self, layer: AttentionLayer, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """Attend from each node to those above it; all are [trees, heads, width, D]."""
        of_nodes = KeysAndValues(keys[self.rows, :, self.columns], values[self.rows, :, self.columns])
        self.passes[layer.number].append(of_nodes)
        return attention(layer, queries, keys, values, self.visibility.bias(layer))


@dataclass(frozen=True, eq=False)
class _TextAttention:
    """Attention of texts to the cached nodes of their prefixes, and then to their own tokens.

    `nodes` [B, N]: the nodes of each text's prefix, padded.
    """

    layers: dict[int, KeysAndValues]
    nodes: Tensor
    visibility: Visibility

    def __call__(self, layer: AttentionLayer, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """Attend to prefix and text; queries are [B, H, T, D], keys and values of the texts [B, H_kv, T, D]."""
        cached = self.layers[layer.number]
        node_keys = cached.keys[self.nodes].transpose(1, 2)  # [B, H_kv, N, D]
        node_values = cached.values[self.nodes].transpose(1, 2)
        all_keys = torch.cat([node_keys, keys], 2)  # [B, H_kv, N + T, D]
        all_values = torch.cat([node_values, values], 2)
        return attention(layer, queries, all_keys, all_values, self.visibility.bias(layer))
