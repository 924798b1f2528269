"""Run prefixes as trees, so that common beginnings are computed once, and the texts after them.

A tree's nodes are tokens; the path from its root to a node is a sequence. All its nodes run in one pass, in which each
attends to the nodes above it.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from toolformer_dag.model.attention import AttentionLayer, Visibility, attention, on_device, pad_sequences
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
        """Add a sequence of tokens to the tree.

        Args:
            sequence: The tokens.
            shared: The nodes of its first tokens, which the tree already has.

        Returns:
            The nodes of all its tokens.
        """
        path = list(shared)
        for token in sequence[len(shared) :]:
            self.tokens.append(token)
            self.above.append(path.copy())
            path.append(len(self.tokens) - 1)
        return path

    @property
    def depths(self) -> list[int]:
        """Return how many nodes are above each node: its position in its sequence."""
        return [len(above) for above in self.above]

    def visible(self, width: int) -> NDArray[np.bool_]:
        """Build the attention mask of the tree: which nodes each node attends to, namely itself and the nodes above it.

        Args:
            width: The number of rows and columns. Those beyond the last node are padding.

        Returns:
            True at row r and column c if node r attends to node c, [width, width].
        """
        mask = np.eye(width, dtype=np.bool_)
        for node, above in enumerate(self.above):
            mask[node, above] = True
        return mask


class TreePath(NamedTuple):
    """Where a sequence is in a forest.

    - `tree`: the number of its tree.
    - `nodes`: a node of the tree per token.
    """

    tree: int
    nodes: list[int]


class Forest:
    """Trees over sequences in lexicographic order: neighbours then share the longest beginnings.

    - `trees`: the trees; sequences are added to the last one.
    - `paths`: where each sequence is.
    - `new_tokens`: how many nodes each sequence added; the others it shares with the one before it.
    """

    def __init__(self, sequences: Sequence[Sequence[int]]) -> None:
        self.trees = [PrefixTree()]
        self.paths: list[TreePath] = []
        self.new_tokens: list[int] = []
        previous: list[int] = []
        for sequence in map(list, sequences):
            self._add(sequence, shared_count=_count_common_tokens(previous, sequence))
            previous = sequence

    def _add(self, sequence: list[int], shared_count: int) -> None:
        """Add a sequence to the last tree, or to a new tree if that one is full.

        In a tree each token is a node, and sequences share the nodes of their common beginning.

        Args:
            sequence: The tokens.
            shared_count: How many tokens it has in common with the sequence before it, from the beginning. In a new
                tree it cannot share their nodes.
        """
        if self._is_full(new_tokens=len(sequence) - shared_count):
            self.trees.append(PrefixTree())
            shared_count = 0

        shared_nodes = self._last_nodes[:shared_count]  # the first nodes of the sequence before
        nodes = self.trees[-1].add(sequence, shared=shared_nodes)  # the shared nodes and the new ones
        self.paths.append(TreePath(tree=len(self.trees) - 1, nodes=nodes))
        self.new_tokens.append(len(sequence) - shared_count)

    @property
    def _last_nodes(self) -> list[int]:
        """Return the nodes of the sequence that was added last; none before the first."""
        return self.paths[-1].nodes if self.paths else []

    def _is_full(self, new_tokens: int) -> bool:
        """Return whether so many new nodes need another tree. An empty tree takes any number."""
        nodes = len(self.trees[-1].tokens)
        return nodes > 0 and new_tokens > 0 and nodes + new_tokens > TREE_NODES

    def sort_trees_by_size(self) -> list[int]:
        """Return the indices of the trees with tokens, the smallest first."""
        sizes = self._count_nodes()
        trees_with_tokens = [tree for tree in range(len(sizes)) if sizes[tree]]
        return sorted(trees_with_tokens, key=sizes.__getitem__)

    def batches(self, order: Sequence[int], budget: int) -> Iterator[list[PrefixTree]]:
        """Yield batches of trees for a pass of at most `budget` tokens, in the order of these indices of trees."""
        for batch in batches(order, self._count_nodes(), budget):
            yield [self.trees[tree] for tree in batch]

    def _count_nodes(self) -> list[int]:
        """Return the number of nodes of each tree."""
        return [len(tree.tokens) for tree in self.trees]


def _count_common_tokens(first: Sequence[int], second: Sequence[int]) -> int:
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

    - `backbone`: the model.
    - `new_tokens`: how many tokens each prefix added to the trees.
    - `passes`: the number of model passes that the prefixes took.
    - `paths`: the nodes of each prefix.
    - `node_features`: the features of each node, [nodes, F]; None where all prefixes are empty.
    - `layers`: by layer, the keys and values of all nodes.
    """

    def __init__(self, backbone: Backbone, prefixes: Sequence[Sequence[int]], budget: int) -> None:
        """Run prefixes through the model, with each common beginning computed only once, and cache the results.

        For that the prefixes are merged into trees. A node of a tree is a token, and the way from the root of its
        tree to a node is the beginning of a prefix.

        Args:
            backbone: The model.
            prefixes: The tokens of each prefix, sorted, so that neighbours share the longest beginnings.
            budget: The most tokens in one pass of the model.
        """
        self.backbone = backbone
        forest = Forest(prefixes)
        self.new_tokens = forest.new_tokens  # how many nodes each prefix does not share with the one before
        tree_order = forest.sort_trees_by_size()  # trees of similar size run together, with little padding
        self.paths = _number_paths(forest, tree_order)  # the nodes of each prefix, numbered in the order they run in

        passes_by_layer: PassesByLayer = defaultdict(list)  # filled by each pass
        features_of_passes = []  # [nodes of the pass, F] each
        for trees in forest.batches(tree_order, budget):
            features_of_passes.append(TreePass(trees, backbone.device).run(backbone, passes_by_layer))

        self.passes = len(features_of_passes)
        self.node_features = torch.cat(features_of_passes) if features_of_passes else None  # [nodes, F]
        self.layers = _join_passes(passes_by_layer)  # the keys and values of all nodes, by layer

    def features(self, batch: Sequence[int], texts: Sequence[Sequence[int]]) -> Tensor:
        """Run B texts through the model, each after one of the cached prefixes.

        Args:
            batch: The index of the prefix of each text.
            texts: The tokens of each text.

        Returns:
            The last hidden states, [B, 1 + T, F], where T is the length of the longest text. Column 0 is for the last
            token of the prefix, and predicts the first token of the text. After an empty prefix it has no meaning.
            Column 1 is for the first token of the text, and predicts the second one, and so on.
        """
        paths = [self.paths[index] for index in batch]  # the numbers of the cached tokens of each text's prefix
        if self.node_features is None:  # all prefixes are empty, so that no tokens are cached
            text_features = self._run_texts(texts, paths)  # [B, T, F]
            return F.pad(text_features, (0, 0, 1, 0))  # adds zeros as column 0

        prefix_features = _select_last_features(self.node_features, paths)  # [B, 1, F]
        if not any(texts):  # all texts are empty
            return prefix_features
        return torch.cat([prefix_features, self._run_texts(texts, paths)], 1)

    def _run_texts(self, texts: Sequence[Sequence[int]], paths: Sequence[Sequence[int]]) -> Tensor:
        """Run B texts through the model, each after its cached prefix.

        Args:
            texts: The tokens of each text.
            paths: The prefix of each text, as the numbers of its tokens in the cache (`layers`).

        Returns:
            The last hidden states, [B, T, F], where T is the length of the longest text.
        """
        ids = pad_sequences(texts, self.backbone.device)  # [B, T]
        prefix_nodes = pad_sequences(paths, ids.device)  # [B, N], where N is the length of the longest prefix
        all_prefixes_are_empty = prefix_nodes.shape[1] == 0
        if all_prefixes_are_empty:
            return self.backbone.features(ids)

        visibility = self._build_text_visibility(texts, paths)  # says which keys each token attends to
        attend = _TextAttention(self.layers, prefix_nodes, visibility)
        positions = visibility.queries  # [B, T], the position of each token, counted from the beginning of its prefix
        return self.backbone.features(ids, positions, attend)

    def _build_text_visibility(self, texts: Sequence[Sequence[int]], paths: Sequence[Sequence[int]]) -> Visibility:
        """Describe which keys the tokens of B texts attend to: their prefix, and their text up to the token itself.

        The keys have N columns for the tokens of the longest prefix, and then T columns for those of the longest text.

        Args:
            texts: The tokens of each text.
            paths: The prefix of each text, as the numbers of its tokens in the cache. Only their count matters here.
        """
        device = self.backbone.device
        lengths = [len(path) for path in paths]
        prefix_lengths = on_device(lengths, device)[:, None]  # [B, 1]
        prefix_positions = torch.arange(max(lengths), device=device)  # [N]
        text_positions = _compute_text_positions(texts, prefix_lengths)  # [B, T]
        key_positions = torch.cat([prefix_positions.expand(len(texts), -1), text_positions], 1)  # [B, N + T]

        # [B, T, N + T], hides the padding of shorter prefixes too
        mask = _build_attention_mask(prefix_lengths, prefix_positions, text_width=text_positions.shape[1])
        return Visibility(
            queries=text_positions,
            keys=key_positions,
            longest=_measure_longest_sequence(paths, texts),
            dtype=self.backbone.model.dtype,
            seen=mask,
        )


def _measure_longest_sequence(prefixes: Sequence[Sequence[int]], texts: Sequence[Sequence[int]]) -> int:
    """Return the tokens of the longest prefix with its text."""
    return max(len(prefix) + len(text) for prefix, text in zip(prefixes, texts, strict=True))


def _compute_text_positions(texts: Sequence[Sequence[int]], prefix_lengths: Tensor) -> Tensor:
    """Compute the position of each token of B texts, counted from the beginning of the prefix before it.

    Args:
        texts: The tokens of each text.
        prefix_lengths: The number of tokens of each prefix, [B, 1].

    Returns:
        The positions, [B, T], where T is the length of the longest text. Padding has the position of the text's last
        token, because later positions may lie beyond the last one that the model knows.
    """
    tokens = torch.arange(max(map(len, texts)), device=prefix_lengths.device)  # [T]
    last_tokens = on_device([max(0, len(text) - 1) for text in texts], tokens.device)[:, None]  # [B, 1]
    return prefix_lengths + torch.minimum(tokens, last_tokens)


def _select_last_features(node_features: Tensor, paths: Sequence[Sequence[int]]) -> Tensor:
    """Select the features of the last token of each prefix.

    Args:
        node_features: The features of each cached token, [nodes, F].
        paths: The prefixes, each as the numbers of its tokens in the cache.

    Returns:
        The features, [B, 1, F]. For an empty prefix they belong to any token, and have no meaning.
    """
    any_node = 0
    last_nodes = [path[-1] if path else any_node for path in paths]
    return node_features[on_device(last_nodes, node_features.device)][:, None]


class TreePass:
    """A pass over trees of tokens, a tree per row.

    A node attends to itself and the nodes above it, and its position is the number of nodes above it. The sequences
    [5, 6] and [5, 7] are a tree of three nodes with tokens [5, 6, 7] and positions [0, 1, 1]: node 2 attends to nodes 0
    and 2.

    - `trees`: the trees.
    - `ids` [trees, width]: the tokens of their nodes, padded.
    - `rows`, `columns` [nodes]: where each node is in `ids`, tree by tree.
    """

    def __init__(self, trees: Sequence[PrefixTree], device: torch.device) -> None:
        self.trees = trees
        self.ids = pad_sequences([tree.tokens for tree in trees], device)
        cells = []  # pairs of row and column
        for row, tree in enumerate(trees):
            cells += [(row, node) for node in range(len(tree.tokens))]
        self.rows, self.columns = on_device(cells, device).T

    def run(self, backbone: Backbone, passes: PassesByLayer) -> Tensor:
        """Run the trees through the model.

        Args:
            backbone: The model.
            passes: Gets the keys and values of the nodes appended, for each layer.

        Returns:
            The features of all nodes, tree by tree, [nodes, F].
        """
        visibility = self._build_visibility(backbone.model.dtype)
        attend = _TreeAttention(self.rows, self.columns, visibility, passes)
        features = backbone.features(self.ids, visibility.queries, attend)  # [trees, width, F]
        return features[self.rows, self.columns]

    def _build_visibility(self, dtype: torch.dtype) -> Visibility:
        """Describe which nodes each node of the trees attends to: itself and the nodes above it.

        A node is a token, and the way to it from the root of its tree is a sequence. So the position of the token in
        the sequence is the number of nodes above it.
        """
        width = self.ids.shape[1]  # the number of nodes of the largest tree, to which the others are padded
        masks = np.stack([tree.visible(width) for tree in self.trees])  # [trees, width, width]

        depths = [tree.depths for tree in self.trees]  # how many nodes are above each node
        positions = pad_sequences(depths, self.ids.device)  # [trees, width]
        longest_sequence = 1 + max(map(max, depths))
        return Visibility(
            queries=positions,
            keys=positions,
            longest=longest_sequence,
            dtype=dtype,
            seen=on_device(masks, self.ids.device, torch.bool),
        )


def _number_paths(forest: Forest, tree_order: Sequence[int]) -> list[list[int]]:
    """Renumber the nodes of all sequences, so that each number occurs only once in the forest.

    In the forest's paths the nodes of every tree are numbered from 0. Here they are numbered through all trees.

    Example:
        With the order [1, 0] and two nodes in tree 1, these stay 0 and 1, and node 0 of tree 0 becomes node 2.

    Args:
        forest: The trees, and the path of each sequence: its tree and its nodes there.
        tree_order: The trees that have nodes, in the order in which they are numbered.

    Returns:
        For each sequence, the new numbers of its nodes.
    """
    first_number_of_tree: dict[int, int] = {}
    next_number = 0
    for tree in tree_order:
        first_number_of_tree[tree] = next_number
        next_number += len(forest.trees[tree].tokens)

    paths = []
    for path in forest.paths:
        paths.append([first_number_of_tree[path.tree] + node for node in path.nodes])
    return paths


def _join_passes(passes: PassesByLayer) -> dict[int, KeysAndValues]:
    """Join the keys and values of all passes, layer by layer. Empties `passes`, so that memory is free early."""
    layers = {}
    for layer in list(passes):
        keys, values = zip(*passes.pop(layer), strict=True)  # frees a layer's parts before the next layer is joined
        layers[layer] = KeysAndValues(torch.cat(keys), torch.cat(values))
    return layers


def _build_attention_mask(prefix_lengths: Tensor, prefix_positions: Tensor, *, text_width: int) -> Tensor:
    """Build the attention mask of B texts, each after its cached prefix.

    Args:
        prefix_lengths: The number of tokens of each prefix, [B, 1]. Shorter prefixes are padded to N tokens.
        prefix_positions: The numbers from 0 to N - 1, [N].
        text_width: The number of tokens of the longest text, T.

    Returns:
        For each token of a text and each token of prefix and text, True if the first attends to the second,
        [B, T, N + T]. A token attends to the whole prefix, and to the text up to itself.
    """
    batch = len(prefix_lengths)
    text_tokens = torch.arange(text_width, device=prefix_positions.device)  # [T]

    is_in_prefix = prefix_positions < prefix_lengths  # [B, N], False for padding
    is_not_later = text_tokens[:, None] >= text_tokens  # [T, T]

    sees_prefix = is_in_prefix[:, None].expand(batch, text_width, -1)  # [B, T, N], the same for all tokens of a text
    sees_text = is_not_later.expand(batch, text_width, -1)  # [B, T, T], the same for all texts
    return torch.cat([sees_prefix, sees_text], -1)


@dataclass(frozen=True, eq=False)
class _TreeAttention:
    """Attention within trees, which also stores the keys and values of their nodes.

    - `rows`, `columns` [nodes]: where each node is in the pass.
    - `visibility`: which nodes each node attends to.
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

    - `layers`: by layer, the keys and values of all nodes.
    - `nodes` [B, N]: the nodes of each text's prefix, padded.
    - `visibility`: which nodes and tokens each token attends to.
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
