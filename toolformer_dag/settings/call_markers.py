"""Declare the markers of a call: the texts before, in and after e(c, r), a call c with its result r."""

import re
from itertools import permutations
from typing import Self

from pydantic import Field, model_validator

from toolformer_dag.settings.setting_types import SettingsTable

BARRED = re.compile(r'["()\x00-\x1f\x7f\x85\u2028\u2029]')
"""Signs that no marker may hold: quotes and parentheses, which end the input of a call, and ends of lines."""


class CallMarkers(SettingsTable):
    """Write a call for the model: `begin`, Name(input), `arrow`, result, `end`; the defaults are the paper's."""

    begin: str = Field(
        " [",
        description="What opens a call. p of its tokens is what `tau_s`, `decoding.k` and `min_probability` look at.",
    )
    arrow: str = Field(" -> ", description="What stands between the call and its result.")
    end: str = Field("]", description="What closes a call.")

    @model_validator(mode="after")
    def _can_be_read(self) -> Self:
        """Refuse markers between which a call could not be found again in a text."""
        for name, marker in self:
            if not marker.strip() or BARRED.search(marker):
                raise ValueError(f"{name} = {marker!r} must be visible, in one line, without quotes and parentheses")
        if self.begin != self.begin.rstrip() or self.end != self.end.strip():
            raise ValueError("white space may only stand before `begin` and around `arrow`; remove it elsewhere")
        self._refuse_nested_markers()
        return self

    def _refuse_nested_markers(self) -> None:
        """Raise ValueError if a marker is a part of another one."""
        for (name, marker), (other_name, other) in permutations(self, 2):
            if marker.strip() in other:
                raise ValueError(
                    f"{name} = {marker!r} stands in {other_name} = {other!r}; take markers that hold no other"
                )


PAPER_MARKERS = CallMarkers()
"""The paper's markers. Tables and pages show calls with them, whatever the markers of the model are."""
