"""The shape of a story with a number to be worked out."""

from dataclasses import dataclass
from typing import Literal

Numbers = Literal["count", "money", "distance", "rate", "prices", "share"]


@dataclass(frozen=True, slots=True)
class Scheme:
    """Any setup goes with any ending and any question; `{a}` and `{b}` are the operands, the call is `{a} op {b}`,
    for + and * in the order in which the setup names them.

    Other slots: `{n}`, `{m}` first names, `{it}` things, `{box}` containers, `{day}`, `{other}` week days,
    `{t}`, `{u}`, `{w}` towns, `{event}`, `{gets}` and `{loses}` verbs.
    """

    name: str
    operation: Literal["+", "-", "*", "/"]
    numbers: Numbers
    unit: str
    setups: tuple[str, ...]
    endings: tuple[str, ...]
    questions: tuple[str, ...]
