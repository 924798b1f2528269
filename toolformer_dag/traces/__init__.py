"""Recorded tool calls of other people's conversations, judged by what their results tell of what follows."""

from typing import Literal

Dropped = Literal["nothing", "failed", "calls", "conversations"]
"""What is left out of conversations that are written again.

`failed`: calls whose result is an error; `calls`: calls that do not help; both with their results and with the answers
that rest on no other call. `conversations`: every conversation with a call that does not help.
"""
