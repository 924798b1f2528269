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

from toolformer_dag.model.attention import (
    AttentionLayer,
    Visibility,
    compute_masked_attention,
    create_tensor,
    pad_sequences,
)
from toolformer_dag.model.backbone import Backbone
from toolformer_dag.model.memory import iter_batches

MAX_TREE_NODES = 128
"""Nodes of a full tree: attention within a tree is quadratic, but a beginning shared by two trees runs twice."""


@dataclass(eq=False)
class PrefixTree:
    """Sequences as a tree of tokens, in which a common beginning is stored only once.

    The tree grows with `add_sequence`. Nodes are numbered in the order in which they were added.

    Attributes:
        token_ids: The token of each node.
        ancestors_by_node: The nodes on the way to each node, from the root.
    """

    token_ids: list[int] = field(default_factory=list)
    ancestors_by_node: list[list[int]] = field(default_factory=list)

    def add_sequence(self, sequence_ids: Sequence[int], shared_nodes: Sequence[int]) -> list[int]:
        """Add a sequence of tokens to the tree.

        Example:
            After [5, 6], whose nodes are 0 and 1, `add_sequence([5, 7], [0])` adds node 2 and returns [0, 2].

        Args:
            sequence_ids: The tokens.
            shared_nodes: The nodes of its first tokens, which the tree already has.

        Returns:
            The nodes of all its tokens.
        """
        path = list(shared_nodes)
        for token_id in sequence_ids[len(shared_nodes) :]:
            new_node = len(self.token_ids)
            self.token_ids.append(token_id)
            self.ancestors_by_node.append(path.copy())
            path.append(new_node)
        return path

    @property
    def node_depths(self) -> list[int]:
        """Return the number of nodes above each node, which is the position of its token in the sequence."""
        return [len(ancestors) for ancestors in self.ancestors_by_node]

    def build_attention_mask(self, node_count: int) -> NDArray[np.bool_]:
        """Build the attention mask of the tree: which nodes each node attends to, namely itself and the nodes above it.

        Args:
            node_count: The number of rows and columns. Those beyond the last node are padding.

        Returns:
            True at row r and column c if node r attends to node c, [node_count, node_count].
        """
        attends = np.eye(node_count, dtype=np.bool_)
        for node, ancestors in enumerate(self.ancestors_by_node):
            attends[node, ancestors] = True
        return attends


class TreePath(NamedTuple):
    """The place of a sequence in a forest.

    Attributes:
        tree_index: The index of the sequence's tree.
        nodes: For each token of the sequence, its node in the tree.
    """

    tree_index: int
    nodes: list[int]


class Forest:
    """Trees of tokens over sequences in lexicographic order, in which neighbors share the longest beginnings.

    Attributes:
        trees: The trees. Sequences are added to the last one.
        tree_paths: The tree and the nodes of each sequence.
        new_token_counts: The number of nodes that each sequence added. It shares its other nodes with the sequence
            before it.
    """

    def __init__(self, token_sequences: Sequence[Sequence[int]]) -> None:
        """Merge sequences of tokens into trees, in which they share the nodes of their common beginnings.

        Example:
            [5, 6] and [5, 7] become a tree of three nodes with the tokens 5, 6 and 7.

        Args:
            token_sequences: The sequences in lexicographic order. Each is compared only with the one before, which
                shares the longest beginning with it.
        """
        self.trees = [PrefixTree()]
        self.tree_paths: list[TreePath] = []  # for each sequence, its tree and its nodes there
        self.new_token_counts: list[int] = []  # for each sequence, the number of nodes that it added

        previous_sequence: list[int] = []
        for sequence in map(list, token_sequences):
            shared_token_count = _count_common_tokens(previous_sequence, sequence)
            self._add_sequence(sequence, shared_token_count)
            previous_sequence = sequence

    def _add_sequence(self, sequence_ids: list[int], shared_token_count: int) -> None:
        """Add a sequence to the last tree, or to a new tree if that one is full.

        In a tree each token is a node, and sequences share the nodes of their common beginning.

        Args:
            sequence_ids: The tokens.
            shared_token_count: How many tokens it has in common with the sequence before it, from the beginning. In a
                new tree it cannot share their nodes.
        """
        if self._is_last_tree_full(new_token_count=len(sequence_ids) - shared_token_count):
            self.trees.append(PrefixTree())
            shared_token_count = 0  # an empty tree has no nodes to share

        shared_nodes = self._last_nodes[:shared_token_count]  # the first nodes of the sequence before
        nodes = self.trees[-1].add_sequence(sequence_ids, shared_nodes=shared_nodes)  # the shared nodes and new ones
        self.tree_paths.append(TreePath(tree_index=len(self.trees) - 1, nodes=nodes))
        self.new_token_counts.append(len(sequence_ids) - shared_token_count)

    @property
    def _last_nodes(self) -> list[int]:
        """Return the nodes of the sequence that was added last, or none before the first one."""
        return self.tree_paths[-1].nodes if self.tree_paths else []

    def _is_last_tree_full(self, new_token_count: int) -> bool:
        """Return whether so many new nodes need another tree. An empty tree takes any number."""
        node_count = len(self.trees[-1].token_ids)
        if node_count == 0 or new_token_count == 0:
            return False
        return node_count + new_token_count > MAX_TREE_NODES

    def sort_trees_by_size(self) -> list[int]:
        """Return the indices of the trees with tokens, the smallest tree first."""
        node_counts = self._count_nodes_by_tree()
        trees_with_tokens = [tree for tree in range(len(node_counts)) if node_counts[tree] > 0]
        return sorted(trees_with_tokens, key=node_counts.__getitem__)

    def iter_tree_batches(self, tree_order: Sequence[int], max_tokens: int) -> Iterator[list[PrefixTree]]:
        """Yield batches of trees for a pass of at most `max_tokens` tokens, in the order of these indices of trees."""
        for batch in iter_batches(tree_order, self._count_nodes_by_tree(), max_tokens):
            yield [self.trees[tree] for tree in batch]

    def _count_nodes_by_tree(self) -> list[int]:
        """Count the nodes of each tree."""
        return [len(tree.token_ids) for tree in self.trees]


def _count_common_tokens(first: Sequence[int], second: Sequence[int]) -> int:
    """Count the tokens that two sequences have in common from their beginning."""
    common_count = 0
    for first_token, second_token in zip(first, second, strict=False):
        if first_token != second_token:
            break
        common_count += 1
    return common_count


class KeysAndValues(NamedTuple):
    """The keys and values of nodes in a layer, [nodes, H_kv, D] each."""

    keys: Tensor
    values: Tensor


PassesByLayer = dict[int, list[KeysAndValues]]
"""By layer, what each pass computed, in order."""


class CachedPrefixes:
    """The prefixes of some texts after they ran: cached keys and values, and features, of all nodes of their trees.

    Nodes are numbered through all trees, in the order in which these ran.

    Attributes:
        backbone: The model.
        new_token_counts: How many tokens each prefix added to the trees.
        pass_count: The number of model passes that the prefixes took.
        node_paths: The nodes of each prefix.
        node_features: The features of each node, [nodes, F], or None if all prefixes are empty.
        keys_and_values_by_layer: By layer, the keys and values of all nodes.
    """

    def __init__(self, backbone: Backbone, prefix_sequences: Sequence[Sequence[int]], max_tokens_per_pass: int) -> None:
        """Run prefixes through the model, with each common beginning computed only once, and cache the results.

        For that the prefixes are merged into trees. A node of a tree is a token, and the way from the root of its
        tree to a node is the beginning of a prefix.

        Args:
            backbone: The model.
            prefix_sequences: The tokens of each prefix, sorted, so that neighbors share the longest beginnings.
            max_tokens_per_pass: The most tokens in one pass of the model.
        """
        self.backbone = backbone
        forest = Forest(prefix_sequences)
        self.new_token_counts = forest.new_token_counts  # how many nodes each prefix does not share with the one before
        tree_order = forest.sort_trees_by_size()  # trees of similar size run together, with little padding
        self.node_paths = _renumber_paths(forest, tree_order)  # the nodes of each prefix, in the order they run in

        passes_by_layer: PassesByLayer = defaultdict(list)  # filled by each pass
        features_of_passes = []  # [nodes of the pass, F] each
        for trees in forest.iter_tree_batches(tree_order, max_tokens_per_pass):
            features_of_passes.append(TreePass(trees, backbone.device).run_trees(backbone, passes_by_layer))

        self.pass_count = len(features_of_passes)
        self.node_features = torch.cat(features_of_passes) if features_of_passes else None  # [nodes, F]
        self.keys_and_values_by_layer = _join_passes(passes_by_layer)  # the keys and values of all nodes, by layer

    def run_texts(self, prefix_indices: Sequence[int], text_sequences: Sequence[Sequence[int]]) -> Tensor:
        """Run B texts through the model, each after one of the cached prefixes.

        Args:
            prefix_indices: The index of the prefix of each text.
            text_sequences: The tokens of each text.

        Returns:
            The last hidden states, [B, 1 + T, F], where T is the length of the longest text. Column 0 is for the last
            token of the prefix, and predicts the first token of the text. After an empty prefix it has no meaning.
            Column 1 is for the first token of the text, and predicts the second one, and so on.
        """
        # For each text, the numbers of the cached tokens of its prefix.
        paths = [self.node_paths[index] for index in prefix_indices]

        if self.node_features is None:  # all prefixes are empty, so that no tokens are cached
            text_features = self._compute_text_features(text_sequences, paths)  # [B, T, F]
            return F.pad(text_features, (0, 0, 1, 0))  # adds zeros as column 0

        prefix_features = _select_last_features(self.node_features, paths)  # [B, 1, F]
        all_texts_are_empty = not any(text_sequences)
        if all_texts_are_empty:
            return prefix_features

        text_features = self._compute_text_features(text_sequences, paths)  # [B, T, F]
        return torch.cat([prefix_features, text_features], 1)

    def _compute_text_features(
        self, text_sequences: Sequence[Sequence[int]], node_paths: Sequence[Sequence[int]]
    ) -> Tensor:
        """Run B texts through the model, each after its cached prefix.

        Args:
            text_sequences: The tokens of each text.
            node_paths: The prefix of each text, as the numbers of its tokens in the cache.

        Returns:
            The last hidden states, [B, T, F], where T is the length of the longest text.
        """
        input_ids = pad_sequences(text_sequences, self.backbone.device)  # [B, T]
        prefix_nodes = pad_sequences(node_paths, input_ids.device)  # [B, N], where N is the longest prefix's length
        all_prefixes_are_empty = prefix_nodes.shape[1] == 0
        if all_prefixes_are_empty:
            return self.backbone.compute_features(input_ids)

        visibility = self._build_text_visibility(text_sequences, node_paths)  # decides which keys each token sees
        text_attention = _TextAttention(self.keys_and_values_by_layer, prefix_nodes, visibility)
        positions = visibility.query_positions  # [B, T], counted from the beginning of the prefix
        return self.backbone.compute_features(input_ids, positions, text_attention)

    def _build_text_visibility(
        self, text_sequences: Sequence[Sequence[int]], node_paths: Sequence[Sequence[int]]
    ) -> Visibility:
        """Describe which keys the tokens of B texts attend to: their prefix, and their text up to the token itself.

        The keys have N columns for the tokens of the longest prefix, and then T columns for those of the longest text.

        Args:
            text_sequences: The tokens of each text.
            node_paths: The prefix of each text, as the numbers of its tokens in the cache. Only their count matters
                here.
        """
        device = self.backbone.device
        lengths = [len(path) for path in node_paths]
        prefix_lengths = create_tensor(lengths, device)[:, None]  # [B, 1]
        prefix_positions = torch.arange(max(lengths), device=device)  # [N]
        text_positions = _compute_text_positions(text_sequences, prefix_lengths)  # [B, T]
        key_positions = torch.cat([prefix_positions.expand(len(text_sequences), -1), text_positions], 1)  # [B, N + T]

        # The mask also hides the padding of shorter prefixes.
        text_width = text_positions.shape[1]
        attention_mask = _build_attention_mask(prefix_lengths, prefix_positions, text_width=text_width)  # [B, T, N + T]
        return Visibility(
            query_positions=text_positions,
            key_positions=key_positions,
            longest_sequence_length=_measure_longest_sequence(node_paths, text_sequences),
            dtype=self.backbone.model.dtype,
            attention_mask=attention_mask,
        )


def _measure_longest_sequence(
    prefix_sequences: Sequence[Sequence[int]], text_sequences: Sequence[Sequence[int]]
) -> int:
    """Return the number of tokens of the longest pair of a prefix and its text."""
    return max(len(prefix) + len(text) for prefix, text in zip(prefix_sequences, text_sequences, strict=True))


def _compute_text_positions(text_sequences: Sequence[Sequence[int]], prefix_lengths: Tensor) -> Tensor:
    """Compute the position of each token of B texts, counted from the beginning of the prefix before it.

    Args:
        text_sequences: The tokens of each text.
        prefix_lengths: The number of tokens of each prefix, [B, 1].

    Returns:
        The positions, [B, T], where T is the length of the longest text. Padding has the position of the text's last
        token, because later positions may lie beyond the last one that the model knows.
    """
    longest_length = max(map(len, text_sequences))
    token_indices = torch.arange(longest_length, device=prefix_lengths.device)  # [T]

    last_indices = [max(0, len(text) - 1) for text in text_sequences]
    last_index_column = create_tensor(last_indices, prefix_lengths.device)[:, None]  # [B, 1]
    return prefix_lengths + torch.minimum(token_indices, last_index_column)


def _select_last_features(node_features: Tensor, node_paths: Sequence[Sequence[int]]) -> Tensor:
    """Select the features of the last token of each prefix.

    Args:
        node_features: The features of each cached token, [nodes, F].
        node_paths: The prefixes, each as the numbers of its tokens in the cache.

    Returns:
        The features, [B, 1, F]. For an empty prefix they belong to any token, and have no meaning.
    """
    any_node = 0
    last_nodes = [path[-1] if path else any_node for path in node_paths]
    return node_features[create_tensor(last_nodes, node_features.device)][:, None]


class TreePass:
    """A pass over trees of tokens, a tree per row.

    A node attends to itself and the nodes above it, and its position is the number of nodes above it. The sequences
    [5, 6] and [5, 7] are a tree of three nodes with tokens [5, 6, 7] and positions [0, 1, 1]: node 2 attends to nodes 0
    and 2.

    Attributes:
        trees: The trees.
        input_ids: The tokens of their nodes, padded, [trees, width].
        node_rows: The row of each node in `input_ids`, tree by tree, [nodes].
        node_columns: The column of each node in `input_ids`, tree by tree, [nodes].
    """

    def __init__(self, trees: Sequence[PrefixTree], device: torch.device) -> None:
        self.trees = trees
        self.input_ids = pad_sequences([tree.token_ids for tree in trees], device)
        cells = []  # pairs of row and column
        for row, tree in enumerate(trees):
            cells += [(row, node) for node in range(len(tree.token_ids))]
        self.node_rows, self.node_columns = create_tensor(cells, device).T

    def run_trees(self, backbone: Backbone, passes_by_layer: PassesByLayer) -> Tensor:
        """Run the trees through the model in one pass. Each tree is a row, padded to the width of the largest one.

        Args:
            backbone: The model.
            passes_by_layer: By layer, a list to which this pass adds the keys and values of its nodes.

        Returns:
            The features (last hidden states) of all nodes without the padding, tree by tree, [nodes, F].
        """
        visibility = self._build_visibility(backbone.model.dtype)
        tree_attention = _TreeAttention(self.node_rows, self.node_columns, visibility, passes_by_layer)
        positions = visibility.query_positions  # [trees, width]
        features = backbone.compute_features(self.input_ids, positions, tree_attention)  # [trees, width, F]
        return features[self.node_rows, self.node_columns]

    def _build_visibility(self, dtype: torch.dtype) -> Visibility:
        """Describe which nodes each node of the trees attends to: itself and the nodes above it.

        A node is a token, and the way to it from the root of its tree is a sequence. So the position of the token in
        the sequence is the number of nodes above it.
        """
        width = self.input_ids.shape[1]  # the number of nodes of the largest tree, to which the others are padded
        masks = np.stack([tree.build_attention_mask(width) for tree in self.trees])  # [trees, width, width]

        depths = [tree.node_depths for tree in self.trees]  # how many nodes are above each node
        positions = pad_sequences(depths, self.input_ids.device)  # [trees, width]
        longest_sequence = 1 + max(map(max, depths))
        return Visibility(
            query_positions=positions,
            key_positions=positions,
            longest_sequence_length=longest_sequence,
            dtype=dtype,
            attention_mask=create_tensor(masks, self.input_ids.device, torch.bool),
        )


def _renumber_paths(forest: Forest, tree_order: Sequence[int]) -> list[list[int]]:
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
        next_number += len(forest.trees[tree].token_ids)

    paths = []
    for path in forest.tree_paths:
        paths.append([first_number_of_tree[path.tree_index] + node for node in path.nodes])
    return paths


def _join_passes(passes_by_layer: PassesByLayer) -> dict[int, KeysAndValues]:
    """Join the keys and values of all passes, layer by layer.

    Args:
        passes_by_layer: The keys and values of each pass, by layer. It is emptied, so that memory is free early.
    """
    joined_by_layer = {}
    for layer in list(passes_by_layer):
        # `pop` frees the parts of a layer before the next layer is joined.
        keys, values = zip(*passes_by_layer.pop(layer), strict=True)
        joined_by_layer[layer] = KeysAndValues(torch.cat(keys), torch.cat(values))
    return joined_by_layer


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
    text_count = len(prefix_lengths)
    token_indices = torch.arange(text_width, device=prefix_positions.device)  # [T]

    is_in_prefix = prefix_positions < prefix_lengths  # [B, N], False for padding
    is_not_later = token_indices[:, None] >= token_indices  # [T, T]

    # The first is the same for all tokens of a text, the second for all texts.
    sees_prefix = is_in_prefix[:, None].expand(text_count, text_width, -1)  # [B, T, N]
    sees_text = is_not_later.expand(text_count, text_width, -1)  # [B, T, T]
    return torch.cat([sees_prefix, sees_text], -1)


@dataclass(frozen=True, eq=False)
class _TreeAttention:
    """Attention within trees, which also stores the keys and values of their nodes.

    Attributes:
        node_rows: The row of each node in the pass, [nodes].
        node_columns: The column of each node in the pass, [nodes].
        visibility: Which nodes each node attends to.
        passes_by_layer: The keys and values of each pass, by layer, to which those of this pass are appended.
    """

    node_rows: Tensor
    node_columns: Tensor
    visibility: Visibility
    passes_by_layer: PassesByLayer

    def __call__(self, layer: AttentionLayer, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """Compute the attention of each node to itself and the nodes above it, and store its key and value.

        They are stored in `passes_by_layer`, for the texts that run later after these prefixes. Queries, keys, values
        and the output are [trees, heads, width, D]: each tree of the pass is a row, padded to `width` nodes.
        """
        # Take out the nodes, without padding, by the row and the column of each.
        node_keys = keys[self.node_rows, :, self.node_columns]  # [nodes, H_kv, D]
        node_values = values[self.node_rows, :, self.node_columns]
        # A list for each layer, with an entry per pass.
        self.passes_by_layer[layer.index].append(KeysAndValues(node_keys, node_values))

        attention_bias = self.visibility.get_attention_bias(layer)
        return compute_masked_attention(layer, queries, keys, values, attention_bias)


@dataclass(frozen=True, eq=False)
class _TextAttention:
    """Attention of texts to the cached nodes of their prefixes, and then to their own tokens.

    Attributes:
        keys_and_values_by_layer: By layer, the keys and values of all nodes.
        prefix_nodes: The nodes of each text's prefix, padded, [B, N].
        visibility: Which nodes and tokens each token attends to.
    """

    keys_and_values_by_layer: dict[int, KeysAndValues]
    prefix_nodes: Tensor
    visibility: Visibility

    def __call__(self, layer: AttentionLayer, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """Compute the attention of B texts: each token sees the prefix of its text, and the text up to itself.

        The prefixes have run before, so their keys and values are taken from the cache and put before those of the
        texts.

        Args:
            layer: The layer that calls this.
            queries: The queries of the texts, [B, H, T, D].
            keys: The keys of the texts, [B, H_kv, T, D].
            values: The values of the texts, in the shape of the keys.

        Returns:
            The attended values, [B, H, T, D].
        """
        # `prefix_nodes`, [B, N], has the numbers of the cached tokens of each text's prefix.
        cached = self.keys_and_values_by_layer[layer.index]
        prefix_keys = cached.keys[self.prefix_nodes].transpose(1, 2)  # [B, H_kv, N, D]
        prefix_values = cached.values[self.prefix_nodes].transpose(1, 2)

        all_keys = torch.cat([prefix_keys, keys], 2)  # [B, H_kv, N + T, D]
        all_values = torch.cat([prefix_values, values], 2)
        attention_bias = self.visibility.get_attention_bias(layer)
        return compute_masked_attention(layer, queries, all_keys, all_values, attention_bias)
