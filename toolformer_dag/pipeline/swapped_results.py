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


def choose_results_of_other_documents(calls: pl.DataFrame, settings: ControlSettings) -> Sequence[Sequence[str]]:
    """Choose results of calls in other documents for the calls that get such results as a control.

    A result of another document cannot help. If a call passes the filter with it, it passes by chance.

    Args:
        calls: The distinct calls of a shard in the order of a hash. These columns are used:

            - digest: the hash of the document
            - result: the call's own result
            - p_api: the probability of a call at the position
            - sampled: whether the call gets other results
            - gives: whether others may get its result
        settings: Tells how many results a call gets at most (`swaps`).

    Returns:
        A list of results for each call that is `sampled`, in the order of `calls`. A list may be empty.
    """
    all_calls = _CallArrays.from_calls(calls)
    donors = all_calls.select_calls(calls["gives"].to_numpy())  # the calls that may give their results to others
    results = calls["result"].to_list()

    other_results: list[list[str]] = []
    for row in calls["sampled"].arg_true():
        donor_rows = _choose_donor_rows(row, all_calls, donors, settings.swaps)
        other_results.append([results[donor_row] for donor_row in donor_rows])
    return other_results


@dataclass(frozen=True, slots=True, eq=False)
class _CallArrays:
    """Calls as arrays with an entry per call: all distinct calls of a shard, or the donors, which may give results.

    Attributes:
        row_numbers: The number of the call's row among all calls, ascending.
        document_numbers: Equal numbers for calls of equal documents.
        result_numbers: Equal numbers for calls with equal results.
        probabilities: The probability of a call at this position of its text (p_api).
    """

    row_numbers: Array
    document_numbers: Array
    result_numbers: Array
    probabilities: Array

    @classmethod
    def from_calls(cls, calls: pl.DataFrame) -> "_CallArrays":
        """Return the arrays of a frame with the columns digest, result and p_api."""
        return cls(
            row_numbers=np.arange(calls.height),
            document_numbers=calls["digest"].rank("dense").to_numpy(),
            result_numbers=calls["result"].rank("dense").to_numpy(),
            probabilities=calls["p_api"].to_numpy(),
        )

    def select_calls(self, is_selected: Array) -> "_CallArrays":
        """Return the calls for which `is_selected` is true."""
        return _CallArrays(
            self.row_numbers[is_selected],
            self.document_numbers[is_selected],
            self.result_numbers[is_selected],
            self.probabilities[is_selected],
        )


def _choose_donor_rows(receiver_row: int, calls: _CallArrays, donors: _CallArrays, max_donors: int) -> list[int]:
    """Choose the calls (donors) whose results the call in a row gets in place of its own.

    A donor must be in another document, have another result, and stand at a position where a call is at least as
    probable. The search begins at the row, and goes on from the first row when it reaches the last.

    Args:
        receiver_row: The number of the row of the call that gets the results.
        calls: All calls.
        donors: The calls that may give their results to others.
        max_donors: How many donors are chosen at most.

    Returns:
        The row numbers of the donors, all of which have different results.
    """
    # All of these indices point into the arrays of `donors`.
    fitting_indices = _find_donor_indices(receiver_row, calls, donors)
    indices_in_search_order = _rotate_to_row(receiver_row, fitting_indices, donors)

    results_in_search_order = donors.result_numbers[indices_in_search_order]
    first_of_each_result = indices_in_search_order[_find_first_occurrences(results_in_search_order)]
    chosen_indices = first_of_each_result[:max_donors]

    donor_rows: list[int] = donors.row_numbers[chosen_indices].tolist()
    return donor_rows


def _find_donor_indices(receiver_row: int, calls: _CallArrays, donors: _CallArrays) -> Array:
    """Find the donors whose results a call may get: in other documents, with other results, and at least as probable.

    Probable means that a call is likely to begin at the donor's position (p_api). Only positions above a threshold,
    tau_s, have calls at all. If tau_s is raised and the receiving call is still there, so are its donors: it keeps its
    results.

    Args:
        receiver_row: The index in `calls` of the call that gets the results.
        calls: All calls.
        donors: The calls that may give their results to others.

    Returns:
        The indices of these donors in the arrays of `donors`, ascending.
    """
    is_as_probable = donors.probabilities >= calls.probabilities[receiver_row]
    is_in_other_document = donors.document_numbers != calls.document_numbers[receiver_row]
    has_other_result = donors.result_numbers != calls.result_numbers[receiver_row]
    return np.flatnonzero(is_as_probable & is_in_other_document & has_other_result)


def _rotate_to_row(start_row: int, donor_indices: Array, donors: _CallArrays) -> Array:
    """Reorder the indices of donors: first those at or after a row, then those before it.

    Example:
        If the donors are in the rows 2, 5 and 9, the row 4 turns the indices [0, 1, 2] into [1, 2, 0].

    Args:
        start_row: The row to begin with.
        donor_indices: Indices into the arrays of `donors`, ascending.
        donors: The calls that may give their results to others.
    """
    donor_rows = donors.row_numbers[donor_indices]
    split = np.searchsorted(donor_rows, start_row)  # how many donors stand before the row
    return np.concatenate([donor_indices[split:], donor_indices[:split]])


def _find_first_occurrences(values: Array) -> Array:
    """Return the indices at which each value stands for the first time: [0, 1, 3] for the values [7, 4, 7, 9]."""
    _, first_indices = np.unique(values, return_index=True)  # in the order of the values
    return np.sort(first_indices)
