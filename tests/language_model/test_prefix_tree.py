"""Trees of sequences that begin alike."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from toolformer_dag.model.prefixes import TREE_NODES, Forest

SEQUENCES = st.lists(st.lists(st.integers(0, 3), max_size=12), max_size=80)


def planted(sequences: list[list[int]]) -> tuple[list[list[int]], Forest]:
    ordered = sorted(sequences)
    return ordered, Forest(ordered)


@settings(deadline=None)
@given(SEQUENCES)
def test_a_path_spells_its_sequence_and_its_end_sees_the_path_alone(sequences: list[list[int]]) -> None:
    ordered, grown = planted(sequences)
    for sequence, (home, path) in zip(ordered, grown.paths, strict=True):
        tree = grown.trees[home]
        assert [tree.tokens[node] for node in path] == sequence
        assert [tree.above[node] for node in path] == [path[:depth] for depth in range(len(path))]
        if path:
            seen = tree.visible(len(tree.tokens) + 2)
            assert np.flatnonzero(seen[path[-1]]).tolist() == path
            assert seen.any(1).all() and seen[-1].sum() == 1


@settings(deadline=None)
@given(SEQUENCES)
def test_within_a_tree_equal_beginnings_stand_once(sequences: list[list[int]]) -> None:
    ordered, grown = planted(sequences)
    beginnings = {tuple(each[: end + 1]) for each in ordered for end in range(len(each))}
    assert sum(grown.new_tokens) == sum(len(tree.tokens) for tree in grown.trees) >= len(beginnings)
    if len(beginnings) <= TREE_NODES:
        assert sum(grown.new_tokens) == len(beginnings)


def test_a_full_tree_is_closed_and_a_long_sequence_has_its_own() -> None:
    long = [[1] + [k] * 50 for k in range(5)] + [[7] * (3 * TREE_NODES)] * 2
    grown = Forest(long)
    sizes = [len(tree.tokens) for tree in grown.trees]
    assert sizes == [101, 101, 51, 3 * TREE_NODES]
    assert [len(path) for _, path in grown.paths] == [51] * 5 + [3 * TREE_NODES] * 2
