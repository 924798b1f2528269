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
from toolformer_dag.texts.input_ends import NAME, input_end, input_ends

API_START = PAPER_MARKERS.begin
"""What opens a call in the paper's form: a space and "["."""
RESULT_ARROW = PAPER_MARKERS.arrow.strip()
"""What stands between a call and its result in the paper's form: "->", without the spaces around it."""

OPENING = re.compile(rf"\[\s*{NAME}\(")
"""Matches the beginning of a call inside of an input: "[Calculator("."""
BODY = re.compile(rf"\s*({NAME})\((.*)\)\s*", re.DOTALL)
"""Matches a call without its markers, such as "Calculator(1 + 2)"; the groups are name and input."""
QUOTED = r'\s*[^\W\d]\w*\s*=(?s:.*)"(?s:.*)'
"""A pattern for an input that would be read as named arguments with a string: 'city="Rome"'."""
STRING = re.compile(r'"(?:[^"\\]|\\.)*+(?:"|\\?\Z)', re.DOTALL)
"""Matches a string of JSON, and a string that is still open at the end of the text."""
LINE_ENDS = r"\n\r\x0B\x0C\x1C-\x1E\x{85}\x{2028}\x{2029}"
"""The characters at which `str.splitlines` ends a line, to stand between [ and ] in a pattern of Rust."""
LONGEST_NAME = 256
"""Characters of the longest tool's name that `call_opening` finds when it looks for calls to any tool."""
INVISIBLE = frozenset({"Cc", "Cf", "Cs"})
"""Unicode's categories of control characters, invisible marks and halves of surrogate pairs."""
JOINERS = "\u200c\u200d"
"""Marks that are kept although they are of category Cf: Persian, Hindi and some emoji need them."""


@dataclass(frozen=True, slots=True)
class Call:
    """A call c as written in a text, without its result."""

    tool: str  # the tool's name in the text, such as "Calculator"
    input: str  # the text between the parentheses


class MalformedCall(ValueError):
    """A text that is not a call.

    body: the text, without markers. reason: why, in a word that is the same for equal mistakes, to be counted.
    """

    def __init__(self, reason: str, body: str) -> None:
        super().__init__(f"{body[:80]!r} is not a call: {reason}; expected Name(input)")
        self.reason = reason


def format_call(call: Call, result: str | None = None, markers: CallMarkers = PAPER_MARKERS) -> str:
    """Write a call as it stands in a text (paper, section 2): e(c) without a result, e(c, r) with one.

    e(c) = " [Calculator(400 / 1400)]", e(c, r) = " [Calculator(400 / 1400) -> 0.29]".

    Input and result are inserted as they are. The call can be read back if they come from `parse_call` and
    `clean_result`.
    """
    answer = "" if result is None else f"{markers.arrow}{result}"
    return f"{markers.begin}{call.tool}({call.input}){answer}{markers.end}"


def parse_call(body: str) -> Call:
    """Parse what a model wrote between " [" and "]", such as `Calculator(400 / 1400)`.

    Raises MalformedCall with a reason of `fault`, "not_a_call" where the form is not Name(input), or "call_in_input"
    where another call begins in the input.
    """
    match = BODY.fullmatch(body)
    if match is None:
        raise MalformedCall("not_a_call", body)
    call = Call(tool=match[1], input=match[2])
    reason = fault(call)
    if reason is not None:
        raise MalformedCall(reason, body)
    has_named_arguments = input_end(body) != 0  # 0 stands for a call without named arguments
    if not has_named_arguments and OPENING.search(call.input):  # the model omitted a "]" and continued the text
        raise MalformedCall("call_in_input", body)
    return call


def fault(call: Call, markers: CallMarkers = PAPER_MARKERS) -> str | None:
    """Return why a call, once it is written into a text, could not be found there or parsed again; None if it can.

    The reasons: bad_name, open_quote, bracket_in_input, arrow_in_input, newline_in_input. As "bracket_in_input" for
    Call("QA", "a]b"), but None for Call("QA", 'question="a]b"'): in a string of named arguments anything may stand.
    """
    if not re.fullmatch(NAME, call.tool) or RESULT_ARROW in call.tool:
        return "bad_name"
    written = f"{call.tool}({call.input})"
    end = input_end(written)  # None for a string that does not end, 0 for an input without named arguments
    if end is None:
        return "open_quote"
    has_named_arguments = end == len(written)
    if has_named_arguments:
        return _line_fault(STRING.sub('""', call.input))
    return _text_fault(call.input, markers)


def _text_fault(text: str, markers: CallMarkers) -> str | None:
    """Return why a text cannot be the input or the result of a call: it holds "]", "->" or a newline. None if it can.

    Not for named arguments, whose strings may hold all that.
    """
    if markers.end in text:
        return "bracket_in_input"
    if markers.arrow.strip() in text:
        return "arrow_in_input"
    return _line_fault(text)


def _line_fault(text: str) -> str | None:
    """Return "newline_in_input" for a text with an end of line, else None."""
    has_no_line_end = text.splitlines() in ([], [text])
    return None if has_no_line_end else "newline_in_input"


def call_grammar(
    tools: Collection[str],
    schemas: Mapping[str, Schema] = MappingProxyType({}),
    markers: CallMarkers = PAPER_MARKERS,
    arrow_token: int | None = None,
) -> str:
    """Return a grammar of what a model may write after " [": `Name(input) ->` with a name in `tools`.

    The grammar is for llguidance, the library of constrained decoding. `parse_call` accepts every text before `->` that
    the grammar admits.

    schemas: tool name -> its schema, for tools with named arguments. Names that are not in `tools` are ignored.
    arrow_token: the id of the arrow's token, if the tokenizer has a special one. No text is encoded to it.

    For a tool Weather with named arguments and others without, its rules are

        start: t0 | call
        t0: "Weather(" a0 ") ->"
        a0: ... (`argument_rules`)
        call: CALL
        CALL and INPUT: ... (`_text_call_rules`)
    """
    with_schema = sorted(set(tools) & set(schemas))
    without_schema = sorted(set(tools) - set(schemas))
    # Every call ends in `)` and the arrow: as text, `) ->`, or as a token that has no text.
    arrow_sign = markers.arrow.strip()
    arrow_text = arrow_sign if arrow_token is None else ""
    token_rule = "" if arrow_token is None else f"<[{arrow_token}]>"
    closed = ")" + markers.arrow.rstrip().removesuffix(arrow_sign) + arrow_text

    calls = [f"t{number}" for number in range(len(with_schema))]
    if without_schema:
        calls.append("call")
    lines = ['%llguidance { "no_forcing": true }', f"start: {' | '.join(calls)}"]
    for number, name in enumerate(with_schema):
        lines.append(f"t{number}: {json.dumps(f'{name}(')} a{number} {json.dumps(closed)} {token_rule}")
        lines += argument_rules(schemas[name], f"a{number}")
    if without_schema:
        lines.append(f"call: CALL {token_rule}")
        lines += _text_call_rules(without_schema, arrow_text, markers)
    return "\n".join(lines)


def _text_call_rules(tools: Sequence[str], arrow_text: str, markers: CallMarkers) -> list[str]:
    """Return the grammar's rules CALL and INPUT, for tools whose input is a text: `QA(Who wrote it?) ->`.

    CALL is a name in `tools`, an input in parentheses and the arrow.

    arrow_text: the arrow, "->", or "" where it is a token.
    """
    names = "|".join(_in_pattern(tool) for tool in tools)
    arrow = rf"[^\S{LINE_ENDS}]*{_in_pattern(arrow_text)}"  # after white space on the same line
    return [rf"CALL: /({names})\(/ INPUT /\){arrow}/", _input_rule(markers)]


def _input_rule(markers: CallMarkers) -> str:
    """Return the grammar's rule INPUT: any text on one line in which the call can still be read.

    It holds no `]`, no marker, no beginning of a call and no string of named arguments. "f(x[1" is an input; "a -> b",
    "[QA(" and 'city="Rome"' are none.
    """
    excluded_markers = "|".join(_in_pattern(marker) for marker in _markers_excluded_from_input(markers))
    call_beginning = rf"\[\s*{NAME}\("
    # In llguidance's syntax, /.../ is a pattern, & means that both match, ~ that it does not match. A single pattern
    # excludes markers and beginnings of calls, because llguidance limits how much a rule excludes.
    one_line = rf"/[^\]{LINE_ENDS}]*/"
    holds_excluded = rf"/(?s:.*)({excluded_markers}|{call_beginning})(?s:.*)/"
    return f"INPUT: {one_line} & ~{holds_excluded} & ~/{QUOTED}/"


def _markers_excluded_from_input(markers: CallMarkers) -> list[str]:
    """Return the markers that an input may not hold, sorted: ["->", "</call>", "<call>"] with <call> and </call>.

    Not "[", which may stand in an input as long as no call follows it, and not "]", which INPUT excludes anyway.
    """
    excluded = {RESULT_ARROW, *(marker.strip() for _, marker in markers)}
    return sorted(excluded - {"[", "]"})


def _in_pattern(text: str) -> str:
    r"""Escape a text for a pattern between slashes in a grammar: "1\/2" for "1/2"."""
    return re.escape(text).replace("/", "\\/")


def clean_result(result: str, max_characters: int) -> str:
    """Return a tool's result as a single line that e(c, r) can hold; "" where nothing visible is left.

    - White space is collapsed.
    - Control characters, invisible marks (also bidirectional) and lone surrogates are removed.
    - Square brackets become round; `->` becomes `→`.
    - The line is cut to `max_characters`.

    A cleaned result stays as it is when it is cleaned again.
    """
    line = one_line(result).replace("[", "(").replace("]", ")").replace(RESULT_ARROW, "→")
    shortened = line[:max_characters].rstrip()
    is_visible = bool(shortened.strip(JOINERS + " "))
    return shortened if is_visible else ""


def one_line(text: str) -> str:
    """Return a text with white space collapsed, and without control characters, invisible marks, lone surrogates."""
    remaining = []
    for character in text:
        if character.isspace() or character in JOINERS or category(character) not in INVISIBLE:
            remaining.append(character)
    return " ".join("".join(remaining).split())


def call_opening(tools: Collection[str] | None, begin: str = API_START) -> re.Pattern[str]:
    """Return a pattern for the marker that opens a call to one of `tools`: " [" of " [Calculator(1)".

    A match is the marker alone, and ends where the tool's name begins.

    tools: None for any name of at most LONGEST_NAME characters. With an empty collection the pattern matches nothing.
    """
    if tools is None:
        # Not NAME, which is unlimited: in `<call><call>...` each marker would read the whole rest of the text.
        names = rf"[^\s\[\]()]{{1,{LONGEST_NAME}}}"
    elif tools:
        names = "|".join(re.escape(tool) for tool in sorted(tools))
    else:
        return re.compile(r"(?!)")
    return re.compile(rf"{re.escape(begin)}(?=(?:{names})\()")


def holds_call(text: str, tools: Collection[str], markers: CallMarkers = PAPER_MARKERS) -> bool:
    """Return whether a call to one of `tools` begins in a text, closed or not.

    A text with a call cannot be annotated: `take_out` would remove that call together with the spliced ones.
    """
    return call_opening(tools, markers.begin).search(text) is not None


@dataclass(frozen=True, slots=True)
class PlacedCall:
    """A call with its result and its place in a text."""

    offset: int  # the character at which x_i, the token after the call, begins in the text without calls
    call: Call
    result: str


class SpliceError(ValueError):
    """The calls cannot be spliced into the text so that `take_out` restores it."""


def splice(text: str, calls: Sequence[PlacedCall], markers: CallMarkers = PAPER_MARKERS) -> str:
    """Return x*: the text x with e(c, r) inserted at the offset of each call (paper, section 2).

    calls: in any order of their offsets. Calls at the same offset, a chain, are written in the order of `calls`.

    `take_out(splice(x, calls), tools) == x`, byte for byte, for every x for which `holds_call(x, tools)` is false.

    Raises SpliceError for an offset outside the text, and for a call or result that holds a marker or a newline.
    """
    pieces: list[str] = []
    position = 0
    for placed in sorted(calls, key=lambda call: call.offset):
        _check_placed(placed, text, markers)
        pieces.append(text[position : placed.offset])
        pieces.append(format_call(placed.call, placed.result, markers))
        position = placed.offset
    return "".join(pieces) + text[position:]


def _check_placed(placed: PlacedCall, text: str, markers: CallMarkers) -> None:
    """Raise SpliceError if a call stands outside of the text, or could not be read again after it was inserted."""
    if not 0 <= placed.offset <= len(text):
        raise SpliceError(f"offset {placed.offset} is outside the text of {len(text)} characters")
    reason = fault(placed.call, markers) or _text_fault(placed.result, markers)
    if reason is not None:
        raise SpliceError(f"{placed.call} at {placed.offset} cannot be spliced: {reason}; clean the result first")


def take_out(text: str, tools: Collection[str], markers: CallMarkers = PAPER_MARKERS) -> str:
    """Return a text without its closed calls to `tools`, with results or without; this undoes `splice`."""
    pieces: list[str] = []
    position = 0
    for call in _closed_calls(text, call_opening(tools, markers.begin), markers):
        pieces.append(text[position : call.start])
        position = call.end
    return "".join(pieces) + text[position:]


def written_calls(text: str, tools: Collection[str]) -> list[tuple[int, str]]:
    """Return the offset and the input of each closed call to `tools` in a text in the paper's form.

    [(1, "Who?"), (2, "1 + 1")] for "a [QA(Who?) -> She]b [Add(1 + 1)]". The offset is the character in
    `take_out(text)`, here "ab", at which the call stands.
    """
    calls = []
    characters_taken_out = 0
    for written in _closed_calls(text, call_opening(tools), PAPER_MARKERS):
        offset = written.start - characters_taken_out
        calls.append((offset, written.call.input))
        characters_taken_out += written.end - written.start
    return calls


def placed_calls(text: str, tools: Collection[str], markers: CallMarkers = PAPER_MARKERS) -> list[PlacedCall]:
    """Return the calls with results that `splice` put into a text: `splice(take_out(text), calls) == text`.

    [PlacedCall(offset=1, call=Call("QA", "Who?"), result="She")] for "a [QA(Who?) -> She] b". Offsets count characters
    of `take_out(text)`.

    Raises MalformedCall for a closed call to one of `tools` that has no result.
    """
    calls = []
    characters_taken_out = 0
    for written in _closed_calls(text, call_opening(tools, markers.begin), markers):
        if written.result is None:
            raise MalformedCall("no_result", written.body)
        offset = written.start - characters_taken_out
        calls.append(PlacedCall(offset, written.call, written.result))
        characters_taken_out += written.end - written.start
    return calls


def in_markers(text: str, markers: CallMarkers) -> str:
    """Rewrite the calls of a text from the paper's markers, ` [` `->` `]`, to others.

    "It is [Add(1, 2) -> 3] three." becomes "It is <call>Add(1, 2) = 3</call> three." with begin " <call>", arrow " = "
    and end "</call>". Where no space stands before "[", as in instructions, none is written before the new marker.

    text: a prompt, or a call e(c) or e(c, r).
    """
    pieces: list[str] = []
    position = 0
    for written in _closed_calls(text, re.compile(rf" ?\[(?={NAME}\()"), PAPER_MARKERS):
        pieces.append(text[position : written.start])
        has_space = text[written.start] == " "
        pieces.append(markers.begin if has_space else markers.begin.lstrip())
        pieces.append(written.body)
        if written.result is not None:
            pieces.append(markers.arrow + written.result)
        pieces.append(markers.end)
        position = written.end
    return "".join(pieces) + text[position:]


def in_paper_form(body: str, markers: CallMarkers) -> str:
    """Return what a model wrote after the opening marker of a call, with the paper's markers in place of `markers`.

    "QA(Who?) ->" for "QA(Who?) =" with the arrow " = ". Named arguments stay as they are, because their strings may
    hold anything. If they have no end yet, as in 'QA(question="Wh', `body` comes back unchanged.
    """
    arguments_end = input_end(body)  # 0 without named arguments
    if arguments_end is None:
        return body
    rest = body[arguments_end:]
    rest = rest.replace(markers.arrow.strip(), RESULT_ARROW)
    rest = rest.replace(markers.begin.strip(), API_START.strip())
    return body[:arguments_end] + rest


def marker_places(text: str, markers: CallMarkers) -> Iterator[tuple[str, int]]:
    """Yield each marker of the closed calls in a text with the offset at which it begins, whatever the tool.

    (" [", 1), (" -> ", 11), ("]", 18) for "a [QA(Who?) -> She] b".
    """
    for written in _closed_calls(text, call_opening(None, markers.begin), markers):
        yield markers.begin, written.start
        if written.arrow is not None:
            yield markers.arrow, written.arrow
        yield markers.end, written.close


@dataclass(frozen=True, slots=True)
class _WrittenCall:
    """A closed call in a text. Of `a [QA(Who?) -> She] b`: start 1, name 3, arrow 11, close 18, end 19.

    - text, markers: what the call stands in, and what it is written with
    - start: the character at which its opening marker begins
    - name: the same of its tool's name
    - arrow: the same of its arrow, right after the `)` of its input; None for a call without a result
    - close: the same of its closing marker
    - end: the character after its closing marker
    """

    text: str
    markers: CallMarkers
    start: int
    name: int
    arrow: int | None
    close: int
    end: int

    @property
    def body(self) -> str:
        """The tool's name and the input in parentheses: "QA(Who?)"."""
        body_end = self.close if self.arrow is None else self.arrow
        return self.text[self.name : body_end]

    @property
    def call(self) -> Call:
        """The call, without its result: Call("QA", "Who?")."""
        tool, _, after_name = self.body.rstrip().partition("(")
        return Call(tool, after_name.removesuffix(")"))

    @property
    def result(self) -> str | None:
        """The text between the arrow and the closing marker; None for a call without an arrow."""
        if self.arrow is None:
            return None
        return self.text[self.arrow + len(self.markers.arrow) : self.close]


def _closed_calls(text: str, opening: re.Pattern[str], markers: CallMarkers) -> Iterator[_WrittenCall]:
    """Yield the closed calls of a text, such as ` [Calculator(1 + 2) -> 3]`, in order, in linear time.

    Left out are calls without `markers.end` after them, and calls inside the input or result of another call.

    opening: matches the marker before the name of a call (see `call_opening`).
    """
    openings = list(opening.finditer(text))
    ends = input_ends(text, [match.end() for match in openings])
    last_close = text.rfind(markers.end)
    previous_end = 0  # of the last closed call
    for match in openings:
        name_start = match.end()
        if name_start > last_close:  # neither this call nor a later one is closed
            return
        if match.start() < previous_end:  # inside the previous call
            continue
        search_start = ends[name_start]  # the closing marker follows; None if named arguments do not end
        if search_start is None or search_start > last_close:
            continue
        close = text.find(markers.end, search_start)
        end = close + len(markers.end)
        arrow = _arrow(text, name_start, search_start, end, markers)
        yield _WrittenCall(text, markers, match.start(), name_start, arrow, close, end)
        previous_end = end


def _arrow(text: str, name_start: int, search_start: int, end: int, markers: CallMarkers) -> int | None:
    """Return where the arrow of a call begins, right after the `)` of its input; None for a call without a result.

    - name_start: where the name of the call begins.
    - search_start: from where the closing marker is searched (see `input_ends`).
    - end: the character after the call.
    """
    # `search_start` is right after the `)` of named arguments; for any other input it is where the name begins.
    parenthesis = text.find(f"){markers.arrow}", max(search_start - 1, name_start), end)
    return None if parenthesis < 0 else parenthesis + 1
