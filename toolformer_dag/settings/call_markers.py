"""Declare the markers of a call: the texts before, in and after e(c, r), a call c with its result r."""

import re
from itertools import permutations
from typing import Self

from pydantic import Field, model_validator

from toolformer_dag.settings.setting_types import SettingsTable

FORBIDDEN_CHARACTERS_PATTERN = re.compile(r'["()\x00-\x1f\x7f\x85\u2028\u2029]')
"""Characters that no marker may hold: quotes and parentheses, which end the input of a call, and ends of lines."""


class CallMarkers(SettingsTable):
    """Write a call for the model: `begin`, Name(input), `arrow`, result, `end`; the defaults are the paper's."""

    begin: str = Field(
        " [",
        description="What opens a call. p of its tokens is what `tau_s`, `decoding.k` and `min_probability` look at.",
    )
    arrow: str = Field(" -> ", description="What stands between the call and its result.")
    end: str = Field("]", description="What closes a call.")

    @model_validator(mode="after")
    def _require_readable_markers(self) -> Self:
        """Check that a call between these markers could be found again in a text.

        Raises:
            ValueError: A marker is blank, has a forbidden character, has white space in the wrong place, or is a part
                of another marker.
        """
        for name, marker in self:
            if not marker.strip() or FORBIDDEN_CHARACTERS_PATTERN.search(marker):
                raise ValueError(f"{name} = {marker!r} must be visible, in one line, without quotes and parentheses")
        if self.begin != self.begin.rstrip() or self.end != self.end.strip():
            raise ValueError("white space may only stand before `begin` and around `arrow`; remove it elsewhere")
        self._refuse_nested_markers()
        return self

    def _refuse_nested_markers(self) -> None:
        """Check that no marker is a part of another one.

        Raises:
            ValueError: A marker is a part of another one.
        """
        # The model yields its fields as pairs: ("begin", " ["), ("arrow", " -> "), ("end", "]").
        for (name, marker), (other_name, other_marker) in permutations(self, 2):
            if marker.strip() in other_marker:  # also if they differ in white space at the ends
                raise ValueError(
                    f"{name} = {marker!r} stands in {other_name} = {other_marker!r}; take markers that hold no other"
                )


PAPER_MARKERS = CallMarkers()
"""The paper's markers. Tables and pages show calls with them, whatever the markers of the model are."""
