"""Toolformer (Schick et al. 2023) as a typed library.

`definitions`, `assets`, `resources` and `cli` know Dagster, nothing else does.
"""

from typing import Any

COMPONENT = "ToolformerLine"
"""What `dg scaffold defs toolformer_dag.ToolformerLine` looks for here."""


def __getattr__(name: str) -> Any:
    """Import Dagster and the component when they are asked for: the library needs neither."""
    if name == COMPONENT:
        from toolformer_dag.definitions import ToolformerLine

        return ToolformerLine
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*globals(), COMPONENT]
