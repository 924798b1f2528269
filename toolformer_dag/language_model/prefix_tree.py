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
