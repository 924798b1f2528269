"""Format, parse and clean calls c = (tool name, input), and splice them into texts (paper, section 2).

The input is text, as in the paper, or named arguments: `city="Rome", days=3`, JSON values. Where a call ends follows
from its quotes then, so that a string may hold `]`, `->` and `)`.
"""

import json
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple
from unicodedata import category

from toolformer_dag.settings.call_markers import PAPER_MARKERS, CallMarkers
from toolformer_dag.texts.arguments import Schema, build_argument_rules
from toolformer_dag.texts.input_ends import NAME, input_end, input_ends

API_START = PAPER_MARKERS.begin
"""What opens a call in the paper's form: a space and "["."""
RESULT_ARROW = PAPER_MARKERS.arrow.strip()
"""What stands between a call and its result in the paper's form: "->", without the spaces around it."""

CALL_BEGINNING = re.compile(rf"\[\s*{NAME}\(")
"""Matches the beginning of a call inside of an input: "[Calculator("."""
CALL_BODY = re.compile(rf"\s*({NAME})\((.*)\)\s*", re.DOTALL)
"""Matches a call without its markers, such as "Calculator(1 + 2)"; the groups are name and input."""
NAMED_STRING_ARGUMENT = r'\s*[^\W\d]\w*\s*=(?s:.*)"(?s:.*)'
"""A pattern for an input that would be read as named arguments with a string: 'city="Rome"'."""
STRING = re.compile(r'"(?:[^"\\]|\\.)*+(?:"|\\?\Z)', re.DOTALL)
"""Matches a string of JSON, and a string that is still open at the end of the text."""
LINE_ENDS = r"\n\r\x0B\x0C\x1C-\x1E\x{85}\x{2028}\x{2029}"
"""The characters at which `str.splitlines` ends a line, to stand between [ and ] in a pattern of Rust."""
LONGEST_NAME = 256
"""Characters of the longest tool's name that `build_opening_pattern` finds when it looks for calls to any tool."""
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

    - body: the text, without markers
    - reason: why, in a word that is the same for equal mistakes, so that reasons can be counted
    """

    def __init__(self, reason: str, body: str) -> None:
        super().__init__(f"{body[:80]!r} is not a call: {reason}; expected Name(input)")
        self.reason = reason


def format_call(call: Call, result: str | None = None, markers: CallMarkers = PAPER_MARKERS) -> str:
    """Write a call as it appears in a text (paper, section 2).

    Input and result are not checked here (see `fault` and `clean_result`).

    Returns:
        e(c), such as " [Calculator(400 / 1400)]", or with a result e(c, r), such as
        " [Calculator(400 / 1400) -> 0.29]".
    """
    written = f"{markers.begin}{call.tool}({call.input})"
    if result is not None:
        written += f"{markers.arrow}{result}"
    return f"{written}{markers.end}"


def parse_call(body: str) -> Call:
    """Parse what a model wrote between " [" and "]", such as `Calculator(400 / 1400)`.

    Raises:
        MalformedCall: The text is not a call. The reason is "not_a_call", "call_in_input" or a reason of `fault`.
    """
    match = CALL_BODY.fullmatch(body)
    if match is None:
        raise MalformedCall("not_a_call", body)

    call = Call(tool=match[1], input=match[2])

    reason = fault(call)
    if reason is not None:
        raise MalformedCall(reason, body)

    if _has_call_in_input(body, call.input):  # the model omitted a "]" and continued the text
        raise MalformedCall("call_in_input", body)
    return call


def _has_call_in_input(body: str, input: str) -> bool:
    """Return whether another call begins in the input of the call `body`; strings of named arguments do not count."""
    has_named_arguments = input_end(body) != 0  # 0 stands for a call without named arguments
    return not has_named_arguments and CALL_BEGINNING.search(input) is not None


def fault(call: Call, markers: CallMarkers = PAPER_MARKERS) -> str | None:
    """Find out why a call could not be read back from a text after it was written there.

    Returns:
        "bad_name", "open_quote", "bracket_in_input", "arrow_in_input" or "newline_in_input", or None if it
        could be read back.
    """
    if not re.fullmatch(NAME, call.tool) or RESULT_ARROW in call.tool:
        return "bad_name"

    written = f"{call.tool}({call.input})"
    end = input_end(written)  # after the ")" of named arguments; 0 for any other input
    if end is None:  # a string of named arguments does not end
        return "open_quote"

    has_named_arguments = end == len(written)
    if has_named_arguments:  # their strings may hold anything
        outside_strings = STRING.sub('""', call.input)
        return _find_line_fault(outside_strings)

    return _find_text_fault(call.input, markers)


def _find_text_fault(text: str, markers: CallMarkers) -> str | None:
    """Return why a text cannot be an input without named arguments, or a result; None if it can."""
    if markers.end in text:
        return "bracket_in_input"
    if markers.arrow.strip() in text:
        return "arrow_in_input"
    return _find_line_fault(text)


def _find_line_fault(text: str) -> str | None:
    """Return "newline_in_input" for a text with an end of line, else None."""
    has_no_line_end = text.splitlines() in ([], [text])
    return None if has_no_line_end else "newline_in_input"


def build_call_grammar(
    tools: Collection[str],
    schemas: Mapping[str, Schema] = MappingProxyType({}),
    markers: CallMarkers = PAPER_MARKERS,
    arrow_token: int | None = None,
) -> str:
    r"""Build a grammar of the calls that a model may write after " [", in the form `Name(input) ->`.

    It is written for llguidance, the library of constrained decoding. For a tool Weather with the named argument
    `city`, and a tool QA whose input is free text, it is (shortened)

        start: t0 | call
        t0: "Weather(" a0 ") ->"
        a0: a0_0
        a0_0: "city=" a0_0v
        a0_0v: %json {"type": "string"}
        call: CALL
        CALL: /(QA)\(/ INPUT /\) ->/
        INPUT: /[^\]\n]*/

    Args:
        tools: The names of the tools that may be called.
        schemas: The schema of the arguments for each tool that has named arguments. Other tools are ignored.
        markers: The texts around a call and before its result.
        arrow_token: The token ID of the arrow if the tokenizer has a special token for it. The grammar then
            has `<[32000]>` in place of "->".
    """
    with_named_arguments = sorted(set(tools) & set(schemas))
    with_text_input = sorted(set(tools) - set(schemas))
    arrow = _build_grammar_arrow(markers, arrow_token)

    alternatives = []
    rules = []
    for number, name in enumerate(with_named_arguments):
        alternatives.append(f"t{number}")
        rules += _build_named_call_rules(number, name, schemas[name], arrow)
    if with_text_input:
        alternatives.append("call")
        rules.append(f"call: CALL {arrow.token_rule}")  # CALL ends in the arrow, unless the arrow is a token
        rules += _build_text_call_rules(with_text_input, arrow.text, markers)

    options = '%llguidance { "no_forcing": true }'
    start = f"start: {' | '.join(alternatives)}"
    return "\n".join([options, start, *rules])


def _build_named_call_rules(number: int, name: str, schema: Schema, arrow: "_GrammarArrow") -> list[str]:
    """Build the grammar rules for a tool with named arguments, such as `t0: "Weather(" a0 ") ->"` and the rules of a0.

    Args:
        number: The number of the tool, from which its rules t0 and a0 are named.
        name: The name of the tool.
        schema: The schema of its arguments.
        arrow: The arrow that follows the input.
    """
    before_arguments = json.dumps(f"{name}(")
    after_arguments = json.dumps(f"){arrow.space}{arrow.text}")
    call_rule = f"t{number}: {before_arguments} a{number} {after_arguments} {arrow.token_rule}"
    return [call_rule, *build_argument_rules(schema, f"a{number}")]


class _GrammarArrow(NamedTuple):
    """The arrow after a call's input, as a grammar has it: as text or as a token."""

    space: str  # the white space before it
    text: str  # "->", or "" where it is a token
    token_rule: str  # "<[32000]>" for the token 32000, or "" where it is text


def _build_grammar_arrow(markers: CallMarkers, arrow_token: int | None) -> _GrammarArrow:
    """Describe the arrow after a call as the grammar needs it.

    Args:
        markers: The texts around a call and before its result.
        arrow_token: The ID of the arrow's token, or None if the arrow is text.
    """
    text = markers.arrow.strip()
    space = markers.arrow.rstrip().removesuffix(text)
    if arrow_token is None:
        return _GrammarArrow(space, text, token_rule="")
    return _GrammarArrow(space, text="", token_rule=f"<[{arrow_token}]>")


def _build_text_call_rules(tools: Sequence[str], arrow_text: str, markers: CallMarkers) -> list[str]:
    """Build the grammar rules CALL and INPUT for tools whose input is free text, as in `QA(Who wrote it?) ->`.

    Args:
        tools: The names of these tools.
        arrow_text: The arrow, or "" if the arrow is a token.
        markers: The texts around a call and before its result.
    """
    names = "|".join(_escape_for_pattern(tool) for tool in tools)
    arrow = rf"[^\S{LINE_ENDS}]*{_escape_for_pattern(arrow_text)}"  # after white space on the same line
    call_rule = rf"CALL: /({names})\(/ INPUT /\){arrow}/"
    return [call_rule, _build_input_rule(markers)]


def _build_input_rule(markers: CallMarkers) -> str:
    r"""Return the grammar's rule INPUT, which admits a line without `]`, markers, other calls, and named arguments.

    "f(x[1" is admitted; "a -> b", "[QA(" and 'city="Rome"' are not. Shortened, the rule is

        INPUT: /[^\]\n]*/ & ~/.*(->|\[NAME\().*/ & ~/NAME=.*".*/

    In llguidance's syntax, /.../ is a pattern, & means that both match, ~ that it does not match.
    """
    excluded_markers = "|".join(_escape_for_pattern(marker) for marker in _list_markers_excluded_from_input(markers))
    call_beginning = rf"\[\s*{NAME}\("
    one_line = rf"/[^\]{LINE_ENDS}]*/"
    # A single pattern for markers and beginnings of calls, because llguidance limits how much a rule excludes.
    holds_marker_or_call = rf"/(?s:.*)({excluded_markers}|{call_beginning})(?s:.*)/"  # (?s:.*): any text
    is_named_argument = f"/{NAMED_STRING_ARGUMENT}/"
    return f"INPUT: {one_line} & ~{holds_marker_or_call} & ~{is_named_argument}"


def _list_markers_excluded_from_input(markers: CallMarkers) -> list[str]:
    """List the markers that an input may not hold, sorted: ["->", "</call>", "<call>"] for calls in <call> and </call>.

    "[" is allowed as long as no call follows it. "]" is not listed because the rule INPUT excludes it anyway.
    """
    excluded = {RESULT_ARROW, *(marker.strip() for _, marker in markers)}
    return sorted(excluded - {"[", "]"})


def _escape_for_pattern(text: str) -> str:
    r"""Escape a text for a pattern between slashes in a grammar: "1\/2" for "1/2"."""
    return re.escape(text).replace("/", "\\/")


def clean_result(result: str, max_characters: int) -> str:
    """Turn the result of a tool into a single line that can be written into a call.

    Square brackets become round, `->` becomes `→`, and the line is cut to `max_characters`. White space is
    collapsed, and invisible characters are removed.

    Returns:
        The line, or "" if nothing visible is left.
    """
    line = one_line(result).replace("[", "(").replace("]", ")").replace(RESULT_ARROW, "→")
    shortened = line[:max_characters].rstrip()
    is_visible = bool(shortened.strip(JOINERS + " "))
    return shortened if is_visible else ""


def one_line(text: str) -> str:
    """Return a text with white space collapsed, and without control characters, invisible marks, lone surrogates."""
    without_invisible = "".join(character for character in text if _is_kept(character))
    return " ".join(without_invisible.split())


def _is_kept(character: str) -> bool:
    """Return whether a character is white space, a joiner, or visible."""
    return character.isspace() or character in JOINERS or category(character) not in INVISIBLE


def build_opening_pattern(tools: Collection[str] | None, begin: str = API_START) -> re.Pattern[str]:
    """Build a pattern that finds the marker before a call, such as " [" in " [Calculator(1)".

    Args:
        tools: The tools whose calls are found. None stands for any name of at most LONGEST_NAME characters.
            If the collection is empty, the pattern matches nothing.
        begin: The marker that opens a call.
    """
    if tools is None:
        # Not NAME, which is unlimited: in `<call><call>...` each marker would read the whole rest of the text.
        names = rf"[^\s\[\]()]{{1,{LONGEST_NAME}}}"
    elif tools:
        names = "|".join(re.escape(tool) for tool in sorted(tools))
    else:
        return re.compile(r"(?!)")  # matches nowhere
    return re.compile(rf"{re.escape(begin)}(?=(?:{names})\()")  # (?=...): the name must follow, but is not matched


def holds_call(text: str, tools: Collection[str], markers: CallMarkers = PAPER_MARKERS) -> bool:
    """Return whether a call to one of `tools` begins in a text, closed or not; such a text cannot be annotated."""
    return build_opening_pattern(tools, markers.begin).search(text) is not None


@dataclass(frozen=True, slots=True)
class PlacedCall:
    """A call with its result and its place in a text."""

    offset: int  # the character at which x_i, the token after the call, begins in the text without calls
    call: Call
    result: str


class SpliceError(ValueError):
    """The calls cannot be spliced into the text so that `take_out` restores it."""


def splice(text: str, calls: Sequence[PlacedCall], markers: CallMarkers = PAPER_MARKERS) -> str:
    """Insert calls with their results into a text (paper, section 2: x becomes x*).

    Calls with the same offset form a chain and keep the order of `calls`. `take_out` gives back the original
    text, unless that already holds a call to one of the tools.

    Args:
        text: The text without calls.
        calls: The calls with results, and their offsets in this text.
        markers: The texts around a call and before its result.

    Raises:
        SpliceError: An offset is outside the text, or a call or result could not be read back because it holds,
            for example, a marker or a newline.
    """
    replacements = []
    for placed in sorted(calls, key=lambda call: call.offset):
        _check_placed_call(placed, text, markers)
        written = format_call(placed.call, placed.result, markers)
        replacements.append(_Replacement(placed.offset, placed.offset, written))
    return _replace_parts(text, replacements)


class _Replacement(NamedTuple):
    """Characters `start` to `end` of a text, and what is written there instead."""

    start: int
    end: int
    written: str


def _replace_parts(text: str, replacements: Iterable[_Replacement]) -> str:
    """Replace parts of a text.

    Args:
        replacements: The parts with their new text, in the order of the text.
    """
    pieces: list[str] = []

    position = 0
    for replacement in replacements:
        pieces.append(text[position : replacement.start])
        pieces.append(replacement.written)
        position = replacement.end
    return "".join(pieces) + text[position:]


def _check_placed_call(placed: PlacedCall, text: str, markers: CallMarkers) -> None:
    """Check that a call can be inserted into a text and be read back from it.

    Raises:
        SpliceError: The offset is outside the text, or the call or its result holds something not allowed there.
    """
    if not 0 <= placed.offset <= len(text):
        raise SpliceError(f"offset {placed.offset} is outside the text of {len(text)} characters")

    reason = fault(placed.call, markers) or _find_text_fault(placed.result, markers)
    if reason is not None:
        raise SpliceError(f"{placed.call} at {placed.offset} cannot be spliced: {reason}; clean the result first")


def take_out(text: str, tools: Collection[str], markers: CallMarkers = PAPER_MARKERS) -> str:
    """Return a text without its closed calls to `tools`, with results or without; this undoes `splice`."""
    calls = _iter_closed_calls(text, build_opening_pattern(tools, markers.begin), markers)
    return _replace_parts(text, (_Replacement(call.start, call.end, written="") for call in calls))


def written_calls(text: str, tools: Collection[str]) -> list[tuple[int, str]]:
    """List the closed calls to `tools` in a text that is in the paper's form.

    Returns:
        For each call its offset, counted in the text without these calls, and its input. For
        "a [QA(Who?) -> She]b [Add(1 + 1)]" this is [(1, "Who?"), (2, "1 + 1")].
    """
    calls = list(_iter_closed_calls(text, build_opening_pattern(tools), PAPER_MARKERS))
    inputs = [call.call.input for call in calls]
    return list(zip(_compute_offsets_without_calls(calls), inputs, strict=True))


def _compute_offsets_without_calls(calls: Iterable["_WrittenCall"]) -> list[int]:
    """Compute where each call of a text was before any call was inserted.

    Returns:
        An offset per call. For "a [Add(1)]b [Add(2)]" this is [1, 2].
    """
    offsets = []
    characters_taken_out = 0
    for call in calls:
        offsets.append(call.start - characters_taken_out)
        characters_taken_out += call.end - call.start
    return offsets


def placed_calls(text: str, tools: Collection[str], markers: CallMarkers = PAPER_MARKERS) -> list[PlacedCall]:
    """List the calls in a text with their results and places, the inverse of `splice`.

    `splice(take_out(text, tools), calls)` gives the text again.

    Returns:
        The calls, with offsets in the text without them. For "a [QA(Who?) -> She] b" this is
        [PlacedCall(offset=1, call=Call("QA", "Who?"), result="She")].

    Raises:
        MalformedCall: A call to one of `tools` is closed but has no result.
    """
    written_calls = list(_iter_closed_calls(text, build_opening_pattern(tools, markers.begin), markers))
    offsets = _compute_offsets_without_calls(written_calls)

    placed = []
    for offset, written in zip(offsets, written_calls, strict=True):
        if written.result is None:
            raise MalformedCall("no_result", written.body)
        placed.append(PlacedCall(offset, written.call, written.result))
    return placed


def rewrite_markers(text: str, markers: CallMarkers) -> str:
    """Replace the paper's markers around calls in a text, such as a prompt, by other markers.

    Example:
        With the markers " <call>", " = " and "</call>", "It is [Add(1, 2) -> 3] three." becomes
        "It is <call>Add(1, 2) = 3</call> three."
    """
    opening = re.compile(rf" ?\[(?={NAME}\()")  # the "[" of a call, and one space before it if there is one

    replacements = []
    for call in _iter_closed_calls(text, opening, PAPER_MARKERS):
        rewritten = _rewrite_call(call, markers)
        replacements.append(_Replacement(call.start, call.end, rewritten))
    return _replace_parts(text, replacements)


def _rewrite_call(call: "_WrittenCall", markers: CallMarkers) -> str:
    """Write a call from a text with other markers."""
    has_space_before = call.text[call.start] == " "  # there is none before "[" in instructions
    begin = markers.begin if has_space_before else markers.begin.lstrip()

    written = f"{begin}{call.body}"
    if call.result is not None:
        written += f"{markers.arrow}{call.result}"
    return f"{written}{markers.end}"


def to_paper_form(body: str, markers: CallMarkers) -> str:
    """Replace the markers in a call by the paper's markers.

    Args:
        body: What a model wrote after the opening marker, such as "QA(Who?) =".
        markers: The markers that the model writes.

    Returns:
        For the arrow " = " in the example: "QA(Who?) ->". Named arguments come back unchanged, because their
        strings may hold anything.
    """
    arguments_end = input_end(body)  # 0 without named arguments
    if arguments_end is None:  # they have no end yet: 'QA(question="Wh'
        return body

    rest = body[arguments_end:]
    # Stripped, so that the white space around a marker stays as the model wrote it.
    rest = rest.replace(markers.arrow.strip(), RESULT_ARROW)
    rest = rest.replace(markers.begin.strip(), API_START.strip())  # of another call that begins inside this one
    return body[:arguments_end] + rest


def iter_marker_places(text: str, markers: CallMarkers) -> Iterator[tuple[str, int]]:
    """Find the markers of all closed calls in a text, whatever their tools.

    Yields:
        Each marker and its offset. For "a [QA(Who?) -> She] b": (" [", 1), (" -> ", 11), ("]", 18).
    """
    for written in _iter_closed_calls(text, build_opening_pattern(None, markers.begin), markers):
        yield markers.begin, written.start
        if written.arrow is not None:
            yield markers.arrow, written.arrow
        yield markers.end, written.close


@dataclass(frozen=True, slots=True)
class _WrittenCall:
    """A closed call in a text, with the offsets of its parts; the numbers are for `a [QA(Who?) -> She] b`."""

    text: str  # the whole text
    markers: CallMarkers
    start: int  # 1, where its opening marker begins
    name: int  # 3, where its tool's name begins
    arrow: int | None  # 11, where its arrow begins; None for a call without a result
    close: int  # 18, where its closing marker begins
    end: int  # 19, the character after its closing marker

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


def _iter_closed_calls(text: str, opening: re.Pattern[str], markers: CallMarkers) -> Iterator[_WrittenCall]:
    """Find the calls in a text that have a closing marker, in linear time.

    Calls inside other calls are left out.

    Args:
        opening: A pattern that matches the marker before a call's name (see `build_opening_pattern`).
        markers: The texts around a call and before its result.

    Yields:
        The calls in order. For "a [Add(1)] [QA(b" this is only " [Add(1)]", because the other call is not closed.
    """
    openings = list(opening.finditer(text))
    search_starts = input_ends(text, [match.end() for match in openings])  # start of a name -> end of the call's input
    last_closing_marker = text.rfind(markers.end)
    previous_call_end = 0

    for match in openings:
        is_in_previous_call = match.start() < previous_call_end
        if is_in_previous_call:
            continue

        search_start = search_starts[match.end()]
        if search_start is None or search_start > last_closing_marker:  # the call has no closing marker
            continue

        call = _parse_closed_call(text, match, search_start, markers)
        yield call
        previous_call_end = call.end


def _parse_closed_call(text: str, opening: re.Match[str], input_end: int, markers: CallMarkers) -> _WrittenCall:
    """Find the parts of a call whose closing marker is known to follow.

    Args:
        opening: The match of the marker before the call's name.
        input_end: The offset after the `)` of named arguments. For any other input, the offset of the call's name.
        markers: The texts around a call and before its result.
    """
    name_start = opening.end()
    close_start = text.find(markers.end, input_end)
    close_end = close_start + len(markers.end)

    earliest_parenthesis = max(input_end - 1, name_start)
    parenthesis = text.find(f"){markers.arrow}", earliest_parenthesis, close_end)
    arrow_start = None if parenthesis < 0 else parenthesis + 1  # a call without a result has no arrow

    return _WrittenCall(
        text=text,
        markers=markers,
        start=opening.start(),
        name=name_start,
        arrow=arrow_start,
        close=close_start,
        end=close_end,
    )
