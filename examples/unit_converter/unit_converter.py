"""Example of a user's tool: `5 miles to km` gives `8.047 km`."""

import re
from collections.abc import Sequence

import pint

from toolformer_dag.texts.document import Document
from toolformer_dag.tools.tool import Tool, ToolCall, ToolDefaults, ToolResult

UNITS: pint.UnitRegistry[float] = pint.UnitRegistry()
CALL = re.compile(r"\s*(-?[\d,]{0,15}\.?\d{1,15})\s*([a-zA-Z ]{1,40}?)\s+to\s+([a-zA-Z ]{1,40}?)\s*")
QUANTITY = re.compile(r"\d\s*(?:km|kg|lbs?|feet|inches|miles|pounds|metres|meters|kilomet\w+|kilogram\w*)\b")


class UnitConverter(Tool):
    """Converts all units that pint knows; results have four significant digits."""

    name = "UnitConverter"
    version = "1"
    defaults = ToolDefaults(tau_s=0.05, k=5, m=5, tau_f=1.0)

    def wants(self, text: str, document: Document) -> str | None:
        return "quantity" if QUANTITY.search(text) else None

    def run(self, calls: Sequence[ToolCall]) -> list[ToolResult]:
        return [convert(call.input) for call in calls]


def convert(text: str) -> ToolResult:
    """Convert `QUANTITY UNIT to UNIT`. Reasons: `not_a_conversion`, `unknown_unit`, `cannot_convert`."""
    match = CALL.fullmatch(text)
    if match is None:
        return ToolResult(None, "not_a_conversion")
    number, unit, target = match.groups()
    try:
        value = UNITS.Quantity(float(number.replace(",", "")), unit).to(target).magnitude
    except pint.UndefinedUnitError:
        return ToolResult(None, "unknown_unit")
    except pint.PintError:
        return ToolResult(None, "cannot_convert")
    return ToolResult(f"{float(f'{value:.4g}'):,.10g} {target}")
