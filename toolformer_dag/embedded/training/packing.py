"""Rows of equal length from documents of all lengths; every row begins with the beginning of a document."""

from collections.abc import Iterable, Iterator

import numpy as np
from numpy.typing import NDArray

Rows = NDArray[np.int64]
LOOK_AHEAD = 24


class NoDocuments(ValueError):
    """The documents ended before the rows were full."""


def pack(documents: Iterable[list[int]], rows: int, length: int, short: int) -> Rows:
    """`rows` rows of `length` tokens, cut at the end of each row.

    A row longer than `short` begins with a document longer than `short`, where one comes in the next LOOK_AHEAD; others
    leave such documents out. Raises NoDocuments where the documents end too soon.
    """
    source = iter(documents)
    made = [_row(source, length, short) for _ in range(rows)]
    return np.array(made, dtype=np.int64).reshape(rows, length)


def _row(source: Iterator[list[int]], length: int, short: int) -> list[int]:
    waiting = [_next(source) for _ in range(LOOK_AHEAD)] if length > short else []
    long = [document for document in waiting if len(document) > short]
    waiting = [document for document in waiting if len(document) <= short]
    row = list(long[0]) if long else []
    while len(row) < length:
        document = waiting.pop() if waiting else _next(source)
        row += document if len(document) <= short else []
    return row[:length]


def _next(source: Iterator[list[int]]) -> list[int]:
    document = next(source, None)
    if document is None:
        raise NoDocuments("the documents ended before the rows were full; give more of them")
    return document
