"""A call c = (tool name, input), the texts e(c) and e(c, r), and splicing them into a text (paper, section 2)."""

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import pairwise
from unicodedata import category

API_START = " ["
RESULT_ARROW = "->"
API_END = "]"

NAME = r"[^\s\[\]()]+"
OPENING = re.compile(rf"\[\s*{NAME}\(")
BODY = re.compile(rf"\s*({NAME})\((.*)\)\s*", re.DOTALL)
INVISIBLE = frozenset({"Cc", "Cf", "Cs"})
# Of category Cf as well, but without them Persian, Hindi and some emoji read differently.
JOINERS = "\u200c\u200d"


@dataclass(frozen=True, slots=True)
class Call:
    """`tool` is the name as it stands in the text ("Calculator"), `input` what stands between the parentheses."""

    tool: str
    input: str


class MalformedCall(ValueError):
    """A text that is no call. `reason` is short and stable, for counting."""

    def __init__(self, reason: str, body: str) -> None:
        super().__init__(f"{body[:80]!r} is no call: {reason}; expected Name(input)")
        self.reason = reason


def format_call(call: Call, result: str | None = None) -> str:
    """e(c) = " [Calculator(400 / 1400)]" or, with a result, e(c, r) = " [Calculator(400 / 1400) -> 0.29]".

    Verbatim: nothing is cleaned or checked here. `clean_result` and `parse_call` make values that are safe.
    """
    answer = "" if result is None else f" {RESULT_ARROW} {result}"
    return f"{API_START}{call.tool}({call.input}){answer}{API_END}"


def parse_call(body: str) -> Call:
    """The call in what was generated between " [" and "]".

    Raises MalformedCall with one of the reasons `fault` names, "not_a_call" where the form is not Name(input), or
    "call_in_input" where another call begins in the input.
    """
    match = BODY.fullmatch(body)
    if match is None:
        raise MalformedCall("not_a_call", body)
    call = Call(match[1], match[2])
    if reason := fault(call):
        raise MalformedCall(reason, body)
    if OPENING.search(call.input):  # the model left out a "]" and went on with the text
        raise MalformedCall("call_in_input", body)
    return call


def fault(call: Call) -> str | None:
    """Why a call cannot stand in a text and be taken out or read again; None where it can."""
    if not re.fullmatch(NAME, call.tool):
        return "bad_name"
    if API_END in call.input:
        return "bracket_in_input"
    if RESULT_ARROW in call.input:
        return "arrow_in_input"
    if call.input.splitlines() not in ([], [call.input]):
        return "newline_in_input"
    return None


def clean_result(result: str, max_characters: int) -> str:
    """Whatever a tool returned as one line that e(c, r) can hold; "" where nothing visible is left.

    White space is collapsed; control characters, invisible marks (bidirectional ones too) and lone surrogates go;
    square brackets become round and `->` becomes `→`; the rest is cut to `max_characters`. Cleaning twice changes
    nothing more.
    """
    visible = result if result.isprintable() else "".join(filter(_stays, result))
    line = " ".join(visible.split()).replace("[", "(").replace("]", ")").replace(RESULT_ARROW, "→")
    kept = line[:max_characters].rstrip()
    return kept if kept.strip(JOINERS + " ") else ""


def _stays(character: str) -> bool:
    return character.isspace() or character in JOINERS or category(character) not in INVISIBLE


def call_opening(tools: Collection[str]) -> re.Pattern[str]:
    """Finds " [Name(" for the names in `tools`, and nothing at all where there are none."""
    names = "|".join(map(re.escape, sorted(tools)))
    return re.compile(rf"{re.escape(API_START)}(?:{names})\(" if names else r"(?!)")


def holds_call(text: str, tools: Collection[str]) -> bool:
    """Whether a call to one of `tools` begins in `text`, closed or not.

    Such a text is refused as input: after splicing, taking out would not give it back.
    """
    return call_opening(tools).search(text) is not None


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
