"""The calendar."""

from toolformer_dag.tools.calendar.tool import Calendar

__all__ = ["Calendar"]
