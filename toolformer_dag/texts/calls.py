"""Format, parse and clean calls c = (tool name, input), and splice them into texts (paper, section 2).

The input is text, as in the paper, or named arguments: `city="Rome", days=3`, JSON values. Where a call ends follows
from its quotes then, so that a string may hold `]`, `->` and `)`.
"""

import json
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from unicodedata import category

from toolformer_dag.settings.call_markers import PAPER_MARKERS, CallMarkers
from toolformer_dag.texts.arguments import Schema, argument_rules

API_START, RESULT_ARROW, API_END = PAPER_MARKERS.begin, PAPER_MARKERS.arrow.strip(), PAPER_MARKERS.end

NAME = r"[^\s\[\]()]+"
OPENING = re.compile(rf"\[\s*{NAME}\(")
NAMED = re.compile(rf"\s*{NAME}\((?=\s*[^\W\d]\w*\s*=)")
"""What begins a call with named arguments."""
_SIGNS = re.compile(r'"(?:[^"\\]|\\.)*+"|["()\[\]]', re.DOTALL)
"""Strings, and what may end an input outside of them."""
BODY = re.compile(rf"\s*({NAME})\((.*)\)\s*", re.DOTALL)
QUOTED = r'\s*[^\W\d]\w*\s*=(?s:.*)"(?s:.*)'
"""An input that would be read as named arguments with a string."""
STRING = re.compile(r'"(?:[^"\\]|\\.)*"', re.DOTALL)
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


def format_call(call: Call, result: str | None = None, markers: CallMarkers = PAPER_MARKERS) -> str:
    """Format e(c) = " [Calculator(400 / 1400)]" or e(c, r) = " [Calculator(400 / 1400) -> 0.29]".

    Values are inserted verbatim. `parse_call` and `clean_result` return values that are safe.
    """
    answer = "" if result is None else f"{markers.arrow}{result}"
    return f"{markers.begin}{call.tool}({call.input}){answer}{markers.end}"


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
    if input_end(body) == 0 and OPENING.search(call.input):  # the model omitted a "]" and continued the text
        raise MalformedCall("call_in_input", body)
    return call


def fault(call: Call, markers: CallMarkers = PAPER_MARKERS) -> str | None:
    """Return why a call cannot be spliced into a text and removed or parsed again; None where it can."""
    written = f"{call.tool}({call.input})"
    end = input_end(written)
    if not re.fullmatch(NAME, call.tool) or RESULT_ARROW in call.tool:
        return "bad_name"
    if end is None:
        return "open_quote"
    if end == len(written):
        return _line_fault(STRING.sub('""', call.input))
    return _text_fault(call.input, markers)


def _text_fault(text: str, markers: CallMarkers) -> str | None:
    """Return why a text without quotes, an input or a result, cannot stand in a call."""
    if markers.end in text:
        return "bracket_in_input"
    if markers.arrow.strip() in text:
        return "arrow_in_input"
    return _line_fault(text)


def _line_fault(text: str) -> str | None:
    return None if text.splitlines() in ([], [text]) else "newline_in_input"


def input_end(text: str, start: int = 0) -> int | None:
    """Return where the input of the call ends whose name begins at `start`, as far as its form tells.

    After the `)` of named arguments, or at a `]` that nothing opened; None where they are still open. `start` for an
    input of any other form, in which quotes mean nothing.
    """
    opening = NAMED.match(text, start)
    if opening is None:
        return start
    depth = 0
    for sign in _SIGNS.finditer(text, opening.end()):
        match sign[0]:
            case "[":
                depth += 1
            case "]" if depth:
                depth -= 1
            case "]":
                return sign.start()
            case ")" if not depth:
                return sign.end()
            case '"':
                return None
            case "(" | ")":
                return start
    return None


def find_behind_input(sign: str, text: str, start: int = 0) -> int:
    """Return where `sign`, `]` or `->`, first stands after the call's input; -1 where it does not yet.

    `start`: where the call's name begins in `text`.
    """
    end = input_end(text, start)
    return -1 if end is None else text.find(sign, end)


def call_grammar(
    tools: Collection[str],
    schemas: Mapping[str, Schema] = MappingProxyType({}),
    markers: CallMarkers = PAPER_MARKERS,
    arrow_token: int | None = None,
) -> str:
    """Return llguidance's grammar of what may stand after " [": `Name(input) ->` with a name in `tools`.

    `parse_call` accepts every text before `->` that it admits. `schemas`: those of tools with named arguments.
    `arrow_token`: that of an arrow that the tokenizer was given as a token, which no text writes.
    """
    named, others = sorted(set(tools) & set(schemas)), sorted(set(tools) - set(schemas))
    begun = [f"t{number}" for number in range(len(named))] + (["call"] if others else [])
    lines = ['%llguidance { "no_forcing": true }', f"start: {' | '.join(begun)}"]
    arrow, sign = markers.arrow.rstrip(), markers.arrow.strip()
    closed, signs, answered = json.dumps(f"){arrow}"), _in_pattern(sign), ""
    if arrow_token is not None:
        closed, signs, answered = json.dumps(f"){arrow.removesuffix(sign)}"), "", f"<[{arrow_token}]>"
    for number, name in enumerate(named):
        lines.append(f"t{number}: {json.dumps(f'{name}(')} a{number} {closed} {answered}")
        lines += argument_rules(schemas[name], f"a{number}")
    if others:
        held = {RESULT_ARROW, *(marker.strip() for _, marker in markers)} - {"[", "]"}
        barred = "|".join(map(_in_pattern, sorted(held)))  # one pattern: llguidance limits how much it is to exclude
        lines += [
            f"call: CALL {answered}",
            rf"CALL: /({'|'.join(map(_in_pattern, others))})\(/ INPUT /\)[^\S{LINE_ENDS}]*{signs}/",
            rf"INPUT: /[^\]{LINE_ENDS}]*/ & ~/(?s:.*)({barred}|\[\s*{NAME}\()(?s:.*)/ & ~/{QUOTED}/",
        ]
    return "\n".join(lines)


def _in_pattern(text: str) -> str:
    return re.escape(text).replace("/", "\\/")


def clean_result(result: str, max_characters: int) -> str:
    """Clean a tool's result to a single line that e(c, r) can hold; "" where nothing visible is left.

    - White space is collapsed.
    - Control characters, invisible marks (also bidirectional) and lone surrogates are removed.
    - Square brackets become round; `->` becomes `→`.
    - The line is cut to `max_characters`.

    The operation is idempotent.
    """
    line = one_line(result).replace("[", "(").replace("]", ")").replace(RESULT_ARROW, "→")
    kept = line[:max_characters].rstrip()
    return kept if kept.strip(JOINERS + " ") else ""


def one_line(text: str) -> str:
    """Collapse white space; remove control characters, invisible marks and lone surrogates."""
    visible = "".join(sign for sign in text if sign.isspace() or sign in JOINERS or category(sign) not in INVISIBLE)
    return " ".join(visible.split())


def call_opening(tools: Collection[str] | None, begin: str = API_START) -> re.Pattern[str]:
    """Return a pattern for " [" before a name in `tools`, or any name, and "("; without names it matches nothing."""
    names = NAME if tools is None else "|".join(map(re.escape, sorted(tools)))
    return re.compile(rf"{re.escape(begin)}(?=(?:{names})\()" if names else r"(?!)")


def holds_call(text: str, tools: Collection[str], markers: CallMarkers = PAPER_MARKERS) -> bool:
    """Return whether a call to one of `tools` begins in `text`, closed or not.

    Such a text is rejected as input: `take_out` would remove the call after splicing.
    """
    return call_opening(tools, markers.begin).search(text) is not None


@dataclass(frozen=True, slots=True)
class PlacedCall:
    """A call with its result; `offset` is the character at which x_i, the token after it, begins."""

    offset: int
    call: Call
    result: str


class SpliceError(ValueError):
    """The calls cannot be spliced into the text so that `take_out` restores it."""


def splice(text: str, calls: Sequence[PlacedCall], markers: CallMarkers = PAPER_MARKERS) -> str:
    """Return x*: the text with e(c, r) inserted at each call's offset; calls may come in any order.

    Those of the same offset, a chain, follow each other in the order in which they come.

    `take_out(splice(x, calls), tools) == x` byte for byte for every x for which `holds_call(x, tools)` is false. Raises
    SpliceError for an offset outside the text, and for a call or result that holds `]`, `->` or a newline (see `fault`,
    `clean_result`). With other `markers` all of this goes for these.
    """
    pieces: list[str] = []
    at = 0
    for each in sorted(calls, key=lambda call: call.offset):
        if not 0 <= each.offset <= len(text):
            raise SpliceError(f"offset {each.offset} is outside the text of {len(text)} characters")
        if reason := fault(each.call, markers) or _text_fault(each.result, markers):
            raise SpliceError(f"{each.call} at {each.offset} cannot be spliced: {reason}; clean the result first")
        pieces += [text[at : each.offset], format_call(each.call, each.result, markers)]
        at = each.offset
    return "".join(pieces) + text[at:]


def take_out(text: str, tools: Collection[str], markers: CallMarkers = PAPER_MARKERS) -> str:
    """Remove all closed calls to `tools` from a text, with and without results."""
    kept, at = [], 0
    for start, _, end in _closed_calls(text, call_opening(tools, markers.begin), markers.end):
        kept.append(text[at:start])
        at = end
    return "".join(kept) + text[at:]


def written_calls(text: str, tools: Collection[str]) -> list[tuple[int, str]]:
    """Return the closed calls to `tools` in a text: where each stands in `take_out(text)`, and its input."""
    calls, inserted = [], 0
    for start, inner, end in _closed_calls(text, call_opening(tools), API_END):
        arrow = _arrow(text, inner, end, PAPER_MARKERS.arrow)
        body = text[inner : (end - len(API_END)) if arrow < 0 else arrow].rstrip()
        calls.append((start - inserted, body.partition("(")[2].removesuffix(")")))
        inserted += end - start
    return calls


def placed_calls(text: str, tools: Collection[str], markers: CallMarkers = PAPER_MARKERS) -> list[PlacedCall]:
    """Return the calls with results that `splice` put into a text: `splice(take_out(text), calls) == text`.

    Raises MalformedCall for a closed call to one of `tools` that has no result.
    """
    calls, inserted = [], 0
    for start, inner, end in _closed_calls(text, call_opening(tools, markers.begin), markers.end):
        arrow, last = _arrow(text, inner, end, markers.arrow), end - len(markers.end)
        if arrow < 0:
            raise MalformedCall("no_result", text[inner:last])
        (name, _, given), result = text[inner : arrow - 1].partition("("), text[arrow + len(markers.arrow) : last]
        calls.append(PlacedCall(start - inserted, Call(name, given), result))
        inserted += end - start
    return calls


def in_markers(text: str, markers: CallMarkers) -> str:
    """Write the calls in a prompt, or in e(c) or e(c, r), to whichever tools, with other markers than the paper's.

    A call without the space before it, as in an instruction, begins without that of `markers.begin`.
    """
    pieces, at = [], 0
    for start, inner, end in _closed_calls(text, re.compile(rf" ?\[(?={NAME}\()"), API_END):
        arrow, last = _arrow(text, inner, end, PAPER_MARKERS.arrow), end - len(API_END)
        begin = markers.begin if text[start] == " " else markers.begin.lstrip()
        pieces += [text[at:start], begin, text[inner : last if arrow < 0 else arrow]]
        pieces += [] if arrow < 0 else [markers.arrow, text[arrow + len(PAPER_MARKERS.arrow) : last]]
        pieces.append(markers.end)
        at = end
    return "".join(pieces) + text[at:]


def in_paper_form(body: str, markers: CallMarkers) -> str:
    """Return what stands after the marker that opens a call with the paper's signs in place of the other markers.

    The strings of named arguments stay as they are.
    """
    at = input_end(body)
    if at is None:
        return body
    read = body[at:].replace(markers.arrow.strip(), RESULT_ARROW).replace(markers.begin.strip(), API_START.strip())
    return body[:at] + read


def marker_places(text: str, markers: CallMarkers) -> Iterator[tuple[str, int]]:
    """Yield each marker of the closed calls in a text, to whichever tools, with the character at which it begins."""
    for start, inner, end in _closed_calls(text, call_opening(None, markers.begin), markers.end):
        arrow = _arrow(text, inner, end, markers.arrow)
        yield markers.begin, start
        if arrow >= 0:
            yield markers.arrow, arrow
        yield markers.end, end - len(markers.end)


def _arrow(text: str, inner: int, end: int, arrow: str) -> int:
    """Return where the arrow of the call begins whose name begins at `inner`; -1 where it has none."""
    bracket = text.find(f"){arrow}", max((input_end(text, inner) or 0) - 1, inner), end)
    return bracket + 1 if bracket >= 0 else -1


def _closed_calls(text: str, opening: re.Pattern[str], end: str) -> Iterator[tuple[int, int, int]]:
    """Where calls begin, with the leading space, where their names do, and where they end."""
    at = 0
    for match in opening.finditer(text):
        if match.start() < at:  # inside the input or result of the previous call
            continue
        last = find_behind_input(end, text, match.end())
        if last < 0 and text.find(end, match.end()) < 0:
            return
        if last < 0:
            continue
        at = last + len(end)
        yield match.start(), match.end(), at
