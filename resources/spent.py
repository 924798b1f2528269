"""What runs cost: tokens through the model and calls of tools, as their materializations tell it."""

from collections.abc import Mapping
from dataclasses import dataclass

import dagster as dg

TOKENS, CALLS = "tokens through the model", "tool calls"
"""Names of the two figures in an asset's metadata."""


@dataclass(frozen=True, slots=True)
class Spent:
    """What is paid for by the token and by the call; finetuning and evaluation are not counted."""

    tokens: int = 0
    calls: int = 0

    @staticmethod
    def of(metadata: Mapping[str, dg.MetadataValue]) -> "Spent":
        """What one materialization cost; nothing where it does not tell."""
        return Spent(_number(metadata.get(TOKENS)), _number(metadata.get(CALLS)))

    def __add__(self, other: "Spent") -> "Spent":
        return Spent(self.tokens + other.tokens, self.calls + other.calls)


def _number(value: dg.MetadataValue | None) -> int:
    return value.value or 0 if isinstance(value, dg.IntMetadataValue) else 0
