"""A question of a benchmark. Imports no torch."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Question:
    """`prompt` is continued by the model; any of `answers` is right.

    `tool`: the key of the tool that it is made for, empty where none is; `context`: ISO date that the calendar gives,
    else empty; `wording`: what the prompt was made from.
    """

    prompt: str
    answers: tuple[str, ...]
    tool: str = ""
    context: str = ""
    wording: str = ""
