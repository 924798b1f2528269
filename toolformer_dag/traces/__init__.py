"""Recorded tool calls of other people's conversations, judged by what their results tell of what follows."""

from typing import Literal

Dropped = Literal["nothing", "calls", "conversations"]
"""What is left out where a call does not help: nothing, the call with its result, the whole conversation."""
