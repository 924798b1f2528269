"""The control swapped_results: each call gets results of calls in other documents, which cannot help.

Calls that pass the filter with such a result pass by chance. The results do not depend on the sampling settings k
(positions per text), m (samples per position) and tau_s (the least probability of a call, p_api): more calls add rows,
and leave the other rows as they are.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import polars as pl
from numpy.typing import NDArray

from toolformer_dag.settings.sections import ControlSettings

Array = NDArray[Any]
METHOD = 3
"""Raised when other calls would be chosen or get other results; a golden test notices where it was not."""


def results_of_other_documents(calls: pl.DataFrame, settings: ControlSettings) -> Sequence[Sequence[str]]:
    """Return up to `settings.swaps` results of other documents for each call to swap, in the order of `calls`.

    A walk over the calls as over a circle begins at the call and takes the first results that fit (`_donors`).

    calls: the distinct calls of a shard in the order of a hash, see `OtherResults` in controls.py.
    """
    seats = _Seats.of(calls)
    giving = seats.where(calls["gives"].to_numpy())
    results = calls["result"].to_list()
    other_results: list[list[str]] = []
    for seat in calls["sampled"].arg_true():
        donors = _donors(seat, seats, giving, settings.swaps)
        other_results.append([results[donor] for donor in donors])
    return other_results


@dataclass(frozen=True, slots=True, eq=False)
class _Seats:
    """Calls in the circle by their seats (row numbers in it), or some of them: four arrays with an entry per seat.

    - number: the number of the seat in the circle, from 0, ascending
    - document: equal numbers for calls of equal documents
    - result: equal numbers for calls with equal results
    - probability: of a call at this position of its text (p_api)
    """

    number: Array
    document: Array
    result: Array
    probability: Array

    @classmethod
    def of(cls, circle: pl.DataFrame) -> "_Seats":
        """Return all seats. circle: (digest, result, p_api), a row per seat."""
        return cls(
            number=np.arange(circle.height),
            document=circle["digest"].rank("dense").to_numpy(),
            result=circle["result"].rank("dense").to_numpy(),
            probability=circle["p_api"].to_numpy(),
        )

    def where(self, mask: Array) -> "_Seats":
        """Return the seats for which `mask` is true."""
        return _Seats(self.number[mask], self.document[mask], self.result[mask], self.probability[mask])


def _donors(seat: int, circle: _Seats, giving: _Seats, most: int) -> list[int]:
    """Choose the calls whose results a call gets: the first that fit on a walk around the circle, from its seat on.

    seat: the number of the receiving call. circle: all seats. giving: the seats that may give a result.

    Returns the numbers of at most `most` seats, in walking order, all with different results.
    """
    in_order = _walked_from(seat, _fitting(seat, circle, giving), giving)
    chosen = in_order[_first_of_each(giving.result[in_order])[:most]]
    donors: list[int] = giving.number[chosen].tolist()
    return donors


def _fitting(seat: int, circle: _Seats, giving: _Seats) -> Array:
    """Return the indices into `giving` of calls of other documents with other results, at places as probable or more.

    A call at such a place exists for every tau_s for which the receiving call exists.
    """
    as_likely = giving.probability >= circle.probability[seat]
    other_document = giving.document != circle.document[seat]
    other_result = giving.result != circle.result[seat]
    return np.flatnonzero(as_likely & other_document & other_result)


def _walked_from(seat: int, indices: Array, giving: _Seats) -> Array:
    """Return `indices` into `giving`, ascending, in walking order: first those behind `seat`, then those before it.

    With the seats 2, 5, 9 at the indices [0, 1, 2], a walk from seat 4 takes them as [1, 2, 0].
    """
    start = np.searchsorted(giving.number[indices], seat)
    return np.concatenate([indices[start:], indices[:start]])


def _first_of_each(values: Array) -> Array:
    """Return where each value stands for the first time, ascending: [0, 1, 3] for the values [7, 4, 7, 9]."""
    _, first_indices = np.unique(values, return_index=True)  # in the order of the values
    return np.sort(first_indices)
