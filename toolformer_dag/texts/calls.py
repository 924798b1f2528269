"""Format, parse and clean calls c = (tool name, input), and splice them into texts (paper, section 2)."""

import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from unicodedata import category

API_START = " ["
RESULT_ARROW = "->"
API_END = "]"

NAME = r"[^\s\[\]()]+"
OPENING = re.compile(rf"\[\s*{NAME}\(")
BODY = re.compile(rf"\s*({NAME})\((.*)\)\s*", re.DOTALL)
LINE_ENDS = r"\n\r\x0B\x0C\x1C-\x1E\x{85}\x{2028}\x{2029}"
INVISIBLE = frozenset({"Cc", "Cf", "Cs"})
# Of category Cf too, but Persian, Hindi and some emoji need them.
JOINERS = "\u200c\u200d"


@dataclass(frozen=True, slots=True)
class Call:
    """A call: `tool` is its name in the text ("Calculator"), `input` the text between the parentheses."""

    tool: str
    input: str


class MalformedCall(ValueError):
    """A text that is not a call. `reason` is short and stable, for counting."""

    def __init__(self, reason: str, body: str) -> None:
        super().__init__(f"{body[:80]!r} is not a call: {reason}; expected Name(input)")
        self.reason = reason


def format_call(call: Call, result: str | None = None) -> str:
    """Format e(c) = " [Calculator(400 / 1400)]" or e(c, r) = " [Calculator(400 / 1400) -> 0.29]".

    Values are inserted verbatim. `parse_call` and `clean_result` return values that are safe.
    """
    answer = "" if result is None else f" {RESULT_ARROW} {result}"
    return f"{API_START}{call.tool}({call.input}){answer}{API_END}"


def parse_call(body: str) -> Call:
    """Parse the text generated between " [" and "]".

    Raises MalformedCall with a reason of `fault`, "not_a_call" where the form is not Name(input), or "call_in_input"
    where another call begins in the input.
    """
    match = BODY.fullmatch(body)
    if match is None:
        raise MalformedCall("not_a_call", body)
    call = Call(match[1], match[2])
    if reason := fault(call):
        raise MalformedCall(reason, body)
    if OPENING.search(call.input):  # the model omitted a "]" and continued the text
        raise MalformedCall("call_in_input", body)
    return call


def fault(call: Call) -> str | None:
    """Return why a call cannot be spliced into a text and removed or parsed again; None where it can."""
    if not re.fullmatch(NAME, call.tool):
        return "bad_name"
    if API_END in call.input:
        return "bracket_in_input"
    if RESULT_ARROW in call.input:
        return "arrow_in_input"
    if call.input.splitlines() not in ([], [call.input]):
        return "newline_in_input"
    return None


def call_grammar(tools: Collection[str]) -> str:
    """Return llguidance's grammar of what may stand after " [": `Name(input) ->` with a name in `tools`, and anything.

    `parse_call` accepts every text before `->` that it admits.
    """
    names = "|".join(re.escape(name).replace("/", "\\/") for name in sorted(tools))
    return rf"""%llguidance {{ "no_forcing": true }}
start: CALL
CALL: /({names})\(/ INPUT /\)[^\S{LINE_ENDS}]*->(?s:.*)/
INPUT: /[^\]{LINE_ENDS}]*/ & ~/(?s:.*)->(?s:.*)/ & ~/(?s:.*)\[\s*{NAME}\((?s:.*)/
"""


def clean_result(result: str, max_characters: int) -> str:
    """Clean a tool's result to a single line that e(c, r) can hold; "" where nothing visible is left.

    - White space is collapsed.
    - Control characters, invisible marks (also bidirectional) and lone surrogates are removed.
    - Square brackets become round; `->` becomes `→`.
    - The line is cut to `max_characters`.

    The operation is idempotent.
    """
    visible = "".join(sign for sign in result if sign.isspace() or sign in JOINERS or category(sign) not in INVISIBLE)
    line = " ".join(visible.split()).replace("[", "(").replace("]", ")").replace(RESULT_ARROW, "→")
    kept = line[:max_characters].rstrip()
    return kept if kept.strip(JOINERS + " ") else ""


def call_opening(tools: Collection[str]) -> re.Pattern[str]:
    """Return a pattern for " [Name(" with the names in `tools`; without names it matches nothing."""
    names = "|".join(map(re.escape, sorted(tools)))
    return re.compile(rf"{re.escape(API_START)}(?:{names})\(" if names else r"(?!)")


def holds_call(text: str, tools: Collection[str]) -> bool:
    """Return whether a call to one of `tools` begins in `text`, closed or not.

    Such a text is rejected as input: `take_out` would remove the call after splicing.
    """
    return call_opening(tools).search(text) is not None


@dataclass(frozen=True, slots=True)
class PlacedCall:
    """A call with its result; `offset` is the character at which x_i, the token after it, begins."""

    offset: int
    call: Call
    result: str


class SpliceError(ValueError):
    """The calls cannot be spliced into the text so that `take_out` restores it."""


def splice(text: str, calls: Sequence[PlacedCall]) -> str:
    """Return x*: the text with e(c, r) inserted at each call's offset; calls may come in any order.

    `take_out(splice(x, calls), tools) == x` byte for byte for every x for which `holds_call(x, tools)` is false. Raises
    SpliceError for two calls at the same offset, an offset outside the text, and a call or result that holds `]`, `->`
    or a newline (see `fault`, `clean_result`).
    """
    pieces: list[str] = []
    at = 0
    for each in sorted(calls, key=lambda call: call.offset):
        if not 0 <= each.offset <= len(text):
            raise SpliceError(f"offset {each.offset} is outside the text of {len(text)} characters")
        if reason := fault(each.call) or fault(Call(each.call.tool, each.result)):
            raise SpliceError(f"{each.call} at {each.offset} cannot be spliced: {reason}; clean the result first")
        if pieces and each.offset == at:
            raise SpliceError(f"two calls at offset {at}: keep the call with the largest delta")
        pieces += [text[at : each.offset], format_call(each.call, each.result)]
        at = each.offset
    return "".join(pieces) + text[at:]


def take_out(text: str, tools: Collection[str]) -> str:
    """Remove all closed calls to `tools` from a text, with and without results."""
    kept, at = [], 0
    for start, end in _closed_calls(text, tools):
        kept.append(text[at:start])
        at = end
    return "".join(kept) + text[at:]


def placed_calls(text: str, tools: Collection[str]) -> list[PlacedCall]:
    """Return the calls with results that `splice` put into a text: `splice(take_out(text), found) == text`.

    Raises MalformedCall for a closed call to one of `tools` that has no result.
    """
    found, inserted = [], 0
    for start, end in _closed_calls(text, tools):
        body = text[start + len(API_START) : end - len(API_END)]
        called, arrow, result = body.partition(f") {RESULT_ARROW} ")
        if not arrow:
            raise MalformedCall("no_result", body)
        name, _, given = called.partition("(")
        found.append(PlacedCall(start - inserted, Call(name, given), result))
        inserted += end - start
    return found


def _closed_calls(text: str, tools: Collection[str]) -> Iterator[tuple[int, int]]:
    """Where calls begin, with the leading space, and end."""
    at = 0
    for opening in call_opening(tools).finditer(text):
        if opening.start() < at:  # inside the input or result of the previous call
            continue
        end = text.find(API_END, opening.end())
        if end < 0:
            return
        at = end + len(API_END)
        yield opening.start(), at
