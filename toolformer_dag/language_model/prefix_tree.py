"""Sequences of which equal beginnings stand once: a tree of tokens, written down as one sequence with a mask."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

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
    """Trees over some sequences; `paths` has the nodes of each, counted through all trees, `fresh` how many are new."""

    trees: list[PrefixTree]
    paths: list[list[int]]
    fresh: list[int]


def forest(sequences: Sequence[Sequence[int]]) -> Forest:
    """Trees over sequences in lexicographic order, in which a sequence shares most with the one before it."""
    trees: list[PrefixTree] = []
    paths: list[list[int]] = []
    fresh: list[int] = []
    first, before, path = 0, list[int](), list[int]()
    for sequence in map(list, sequences):
        common = _common(before, sequence)
        added = len(sequence) - common
        if not trees or (added and trees[-1].tokens and len(trees[-1].tokens) + added > NODES):
            first += len(trees[-1].tokens) if trees else 0
            trees.append(PrefixTree())
            common, added, path = 0, len(sequence), []
        path = trees[-1].add(sequence, path[:common])
        paths.append([first + node for node in path])
        fresh.append(added)
        before = sequence
    return Forest(trees, paths, fresh)


def _common(one: Sequence[int], other: Sequence[int]) -> int:
    pairs = enumerate(zip(one, other, strict=False))
    return next((at for at, (a, b) in pairs if a != b), min(len(one), len(other)))
