"""Putting calls into a text and taking them out again: x to x* and back (paper, section 2, "Model Finetuning")."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import pairwise

from toolformer_dag.texts.call import API_END, Call, call_opening, fault, format_call


@dataclass(frozen=True, slots=True)
class PlacedCall:
    """A call with its result; `offset` is the character at which x_i, the token after the call, begins."""

    offset: int
    call: Call
    result: str


class SpliceError(ValueError):
    """Calls that cannot be put into this text so that taking them out gives it back."""


def splice(text: str, calls: Sequence[PlacedCall]) -> str:
    """x*: the text with e(c, r) inserted at each call's offset, in any order given.

    Raises SpliceError for two calls at one offset, an offset outside the text, and a call or result that holds `]`,
    `->` or a newline (see `fault`, `clean_result`). `take_out(splice(x, calls), tools) == x` byte for byte for every x
    for which `holds_call(x, tools)` is false.
    """
    placed = sorted(calls, key=lambda call: call.offset)
    _check(placed, len(text))
    starts = [0, *(call.offset for call in placed)]
    ends = [*(call.offset for call in placed), len(text)]
    inserted = ["", *(format_call(one.call, one.result) for one in placed)]
    return "".join(e + text[start:end] for e, start, end in zip(inserted, starts, ends, strict=True))


def _check(placed: Sequence[PlacedCall], length: int) -> None:
    for one in placed:
        if not 0 <= one.offset <= length:
            raise SpliceError(f"offset {one.offset} is outside the text of {length} characters")
        if reason := fault(one.call) or fault(Call(one.call.tool, one.result)):
            raise SpliceError(f"{one.call} at {one.offset} cannot be spliced: {reason}; clean the result first")
    for one, other in pairwise(placed):
        if one.offset == other.offset:
            raise SpliceError(f"two calls at offset {one.offset}: keep the one with the largest delta")


def take_out(text: str, tools: Collection[str]) -> str:
    """The text without the calls to `tools` in it, those without results too; one that is never closed stays."""
    kept, at = [], 0
    for opening in call_opening(tools).finditer(text):
        if opening.start() < at:  # it stands in the input or result of the call before
            continue
        end = text.find(API_END, opening.end())
        if end < 0:
            break
        kept.append(text[at : opening.start()])
        at = end + len(API_END)
    return "".join(kept) + text[at:]
