"""Judge tool calls of recorded conversations: whether the messages that follow a call rest on its result."""

from typing import Literal

DropChoice = Literal["nothing", "failed", "calls", "conversations"]
"""What is left out of conversations that are written again:

- "nothing"
- "failed": calls whose result is an error
- "calls": calls that do not help
- "conversations": every conversation with a call that does not help

With a call its result is left out, and the answer if it rests on no other call.
"""
