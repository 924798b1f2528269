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
    """Return a list for each call to swap, in the order of `calls`: up to `settings.swaps` results of other documents.

    calls: the distinct calls of a shard in the order of a hash: digest (of the document), result, p_api (the
        probability of a call at the position), sampled (whether the call gets other results) and gives (whether others
        may get its result).
    """
    all_calls = _CallArrays.of(calls)
    donors = all_calls.where(calls["gives"].to_numpy())  # the calls that may give their results to others
    results = calls["result"].to_list()
    other_results: list[list[str]] = []
    for row in calls["sampled"].arg_true():
        donor_rows = _choose_donors(row, all_calls, donors, settings.swaps)
        other_results.append([results[donor_row] for donor_row in donor_rows])
    return other_results


@dataclass(frozen=True, slots=True, eq=False)
class _CallArrays:
    """Calls as arrays with an entry per call: all distinct calls of a shard, or the donors, which may give results.

    - row: the number of its row among all calls, ascending
    - document: equal numbers for calls of equal documents
    - result: equal numbers for calls with equal results
    - probability: of a call at this position of its text (p_api)
    """

    row: Array
    document: Array
    result: Array
    probability: Array

    @classmethod
    def of(cls, calls: pl.DataFrame) -> "_CallArrays":
        """Return the arrays of a frame with the columns digest, result and p_api."""
        return cls(
            row=np.arange(calls.height),
            document=calls["digest"].rank("dense").to_numpy(),
            result=calls["result"].rank("dense").to_numpy(),
            probability=calls["p_api"].to_numpy(),
        )

    def where(self, mask: Array) -> "_CallArrays":
        """Return the calls for which `mask` is true."""
        return _CallArrays(self.row[mask], self.document[mask], self.result[mask], self.probability[mask])


def _choose_donors(row: int, calls: _CallArrays, donors: _CallArrays, most: int) -> list[int]:
    """Return the rows of at most `most` donors whose results the call in a row gets, all with different results.

    A donor fits if it is in another document and has another result, at a position where a call is as probable. The
    search goes on from the row to the last one, and then from the first row to this one.
    """
    fitting = _find_fitting_donors(row, calls, donors)  # indices into `donors`, as the next three
    in_order = _rotate_to_row(row, fitting, donors)
    first_of_each_result = in_order[_find_first_occurrences(donors.result[in_order])]
    chosen = first_of_each_result[:most]
    rows: list[int] = donors.row[chosen].tolist()
    return rows


def _find_fitting_donors(row: int, calls: _CallArrays, donors: _CallArrays) -> Array:
    """Return the indices of donors of other documents with other results, at positions as probable or more.

    A call at such a position exists for every tau_s for which the receiving call exists.
    """
    as_likely = donors.probability >= calls.probability[row]
    other_document = donors.document != calls.document[row]
    other_result = donors.result != calls.result[row]
    return np.flatnonzero(as_likely & other_document & other_result)


def _rotate_to_row(row: int, indices: Array, donors: _CallArrays) -> Array:
    """Return ascending `indices` of donors, those behind a row first, then those before it.

    With donors in the rows 2, 5 and 9, the indices [0, 1, 2] become [1, 2, 0] for the row 4.
    """
    start = np.searchsorted(donors.row[indices], row)
    return np.concatenate([indices[start:], indices[:start]])


def _find_first_occurrences(values: Array) -> Array:
    """Return the indices at which each value stands for the first time: [0, 1, 3] for the values [7, 4, 7, 9]."""
    _, first_indices = np.unique(values, return_index=True)  # in the order of the values
    return np.sort(first_indices)
