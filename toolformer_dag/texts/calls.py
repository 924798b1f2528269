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
from toolformer_dag.texts.arguments import Schema, build_argument_grammar_rules
from toolformer_dag.texts.input_ends import TOOL_NAME_PATTERN, find_input_end, find_input_ends

PAPER_BEGIN_MARKER = PAPER_MARKERS.begin
"""What opens a call in the paper's form: a space and "["."""
RESULT_ARROW = PAPER_MARKERS.arrow.strip()
"""What stands between a call and its result in the paper's form: "->", without the spaces around it."""

CALL_BEGINNING_PATTERN = re.compile(rf"\[\s*{TOOL_NAME_PATTERN}\(")
"""Matches the beginning of a call inside of an input: "[Calculator("."""
CALL_BODY_PATTERN = re.compile(rf"\s*({TOOL_NAME_PATTERN})\((.*)\)\s*", re.DOTALL)
"""Matches a call without its markers, such as "Calculator(1 + 2)"; the groups are name and input."""
NAMED_STRING_ARGUMENT_PATTERN = r'\s*[^\W\d]\w*\s*=(?s:.*)"(?s:.*)'
"""A pattern for an input that would be read as named arguments with a string: 'city="Rome"'."""
JSON_STRING_PATTERN = re.compile(r'"(?:[^"\\]|\\.)*+(?:"|\\?\Z)', re.DOTALL)
"""Matches a string of JSON, and a string that is still open at the end of the text."""
LINE_END_CHARACTERS = r"\n\r\x0B\x0C\x1C-\x1E\x{85}\x{2028}\x{2029}"
"""The characters at which `str.splitlines` ends a line, to stand between [ and ] in a pattern of Rust."""
MAX_TOOL_NAME_CHARACTERS = 256
"""Characters of the longest tool's name that `build_call_opening_pattern` finds when it looks for calls to any tool."""
INVISIBLE_CATEGORIES = frozenset({"Cc", "Cf", "Cs"})
"""Unicode's categories of control characters, invisible marks and halves of surrogate pairs."""
JOINER_CHARACTERS = "\u200c\u200d"
"""Marks that are kept although they are of category Cf: Persian, Hindi and some emoji need them."""


@dataclass(frozen=True, slots=True)
class Call:
    """A call c as written in a text, without its result."""

    tool: str  # the tool's name in the text, such as "Calculator"
    input: str  # the text between the parentheses


class MalformedCall(ValueError):
    """A text that is not a call.

    Attributes:
        reason: Why it is not a call, in a word that is the same for equal mistakes, so that reasons can be counted.
    """

    def __init__(self, reason: str, call_body: str) -> None:
        super().__init__(f"{call_body[:80]!r} is not a call: {reason}; expected Name(input)")
        self.reason = reason


def format_call(call: Call, result: str | None = None, markers: CallMarkers = PAPER_MARKERS) -> str:
    """Write a call as it appears in a text (paper, section 2).

    Input and result are not checked here (see `find_call_fault` and `clean_result`).

    Returns:
        e(c), such as " [Calculator(400 / 1400)]", or with a result e(c, r), such as
        " [Calculator(400 / 1400) -> 0.29]".
    """
    written_call = f"{markers.begin}{call.tool}({call.input})"
    if result is not None:
        written_call += f"{markers.arrow}{result}"
    return f"{written_call}{markers.end}"


def parse_call(call_body: str) -> Call:
    """Parse what a model wrote between " [" and "]", such as `Calculator(400 / 1400)`.

    Raises:
        MalformedCall: The text is not a call. The reason is "not_a_call", "call_in_input", or one of those of
            `find_call_fault`.
    """
    match = CALL_BODY_PATTERN.fullmatch(call_body)
    if match is None:
        raise MalformedCall("not_a_call", call_body)

    call = Call(tool=match[1], input=match[2])

    reason = find_call_fault(call)
    if reason is not None:
        raise MalformedCall(reason, call_body)

    if _has_call_in_input(call_body, call.input):  # the model omitted a "]" and continued the text
        raise MalformedCall("call_in_input", call_body)
    return call


def _has_call_in_input(call_body: str, input: str) -> bool:
    """Check whether another call begins in the input of a call.

    Named arguments are not looked at, because their strings may hold anything.

    Args:
        call_body: The call without markers, such as "QA(Who?)".
        input: Its input, such as "Who?".
    """
    has_named_arguments = find_input_end(call_body) != 0  # 0 stands for a call without named arguments
    return not has_named_arguments and CALL_BEGINNING_PATTERN.search(input) is not None


def find_call_fault(call: Call, markers: CallMarkers = PAPER_MARKERS) -> str | None:
    """Find out why a call could not be read back from a text after it was written there.

    Returns:
        "bad_name", "open_quote", "bracket_in_input", "arrow_in_input" or "newline_in_input", or None if it
        could be read back.
    """
    if not re.fullmatch(TOOL_NAME_PATTERN, call.tool) or RESULT_ARROW in call.tool:
        return "bad_name"

    call_body = f"{call.tool}({call.input})"
    arguments_end = find_input_end(call_body)  # after the ")" of named arguments, or 0 for any other input
    if arguments_end is None:  # a string of named arguments does not end
        return "open_quote"

    has_named_arguments = arguments_end == len(call_body)
    if has_named_arguments:  # their strings may hold anything
        input_without_strings = JSON_STRING_PATTERN.sub('""', call.input)
        return _find_line_end_fault(input_without_strings)

    return _find_text_fault(call.input, markers)


def _find_text_fault(text: str, markers: CallMarkers) -> str | None:
    """Find out why a text cannot be a result, or an input without named arguments.

    Returns:
        "bracket_in_input", "arrow_in_input" or "newline_in_input", or None if it can.
    """
    if markers.end in text:
        return "bracket_in_input"
    if markers.arrow.strip() in text:
        return "arrow_in_input"
    return _find_line_end_fault(text)


def _find_line_end_fault(text: str) -> str | None:
    """Return "newline_in_input" for a text with a line end, and None for a single line."""
    is_single_line = text.splitlines() in ([], [text])
    return None if is_single_line else "newline_in_input"


def build_call_grammar(
    tool_names: Collection[str],
    schemas_by_tool: Mapping[str, Schema] = MappingProxyType({}),
    markers: CallMarkers = PAPER_MARKERS,
    arrow_token_id: int | None = None,
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
        tool_names: The names of the tools that may be called.
        schemas_by_tool: The schema of the arguments for each tool that has named arguments. Other tools are ignored.
        markers: The texts around a call and before its result.
        arrow_token_id: The token ID of the arrow if the tokenizer has a special token for it. The grammar then
            has `<[32000]>` in place of "->".
    """
    tools_with_arguments = sorted(set(tool_names) & set(schemas_by_tool))
    tools_with_text_input = sorted(set(tool_names) - set(schemas_by_tool))
    arrow = _build_grammar_arrow(markers, arrow_token_id)

    alternatives = []
    rules = []
    for number, tool_name in enumerate(tools_with_arguments):
        alternatives.append(f"t{number}")
        rules += _build_named_call_rules(number, tool_name, schemas_by_tool[tool_name], arrow)

    if tools_with_text_input:
        alternatives.append("call")
        rules.append(f"call: CALL {arrow.token_rule}")  # CALL ends in the arrow, unless the arrow is a token
        rules += _build_text_call_rules(tools_with_text_input, arrow.text, markers)

    options = '%llguidance { "no_forcing": true }'
    start = f"start: {' | '.join(alternatives)}"
    return "\n".join([options, start, *rules])


def _build_named_call_rules(
    tool_number: int, tool_name: str, argument_schema: Schema, arrow: "_GrammarArrow"
) -> list[str]:
    """Build the grammar rules for calls to a tool with named arguments.

    The first rule is, for example, `t0: "Weather(" a0 ") ->"`. Those of the arguments, a0 and so on, follow.

    Args:
        tool_number: The number of the tool, from which its rules t0 and a0 are named.
        tool_name: The name of the tool.
        argument_schema: The schema of its arguments.
        arrow: The arrow that follows the input: its `text`, as in the example, or its `token_rule`. The other is "".
    """
    before_arguments = json.dumps(f"{tool_name}(")
    after_arguments = json.dumps(f"){arrow.space_before}{arrow.text}")
    call_rule = f"t{tool_number}: {before_arguments} a{tool_number} {after_arguments} {arrow.token_rule}"
    return [call_rule, *build_argument_grammar_rules(argument_schema, f"a{tool_number}")]


class _GrammarArrow(NamedTuple):
    """The arrow after a call's input, as a grammar has it: as text or as a token."""

    space_before: str  # the white space before it
    text: str  # "->", or "" where it is a token
    token_rule: str  # "<[32000]>" for the token 32000, or "" where it is text


def _build_grammar_arrow(markers: CallMarkers, arrow_token_id: int | None) -> _GrammarArrow:
    """Describe the arrow after a call as the grammar needs it.

    For the arrow " -> " the space before it is " " and the text "->". White space behind the arrow is left out.

    Args:
        markers: The texts around a call and before its result.
        arrow_token_id: The ID of the arrow's token, or None if the arrow is text.
    """
    text = markers.arrow.strip()
    space = markers.arrow.rstrip().removesuffix(text)
    if arrow_token_id is None:
        return _GrammarArrow(space, text, token_rule="")
    return _GrammarArrow(space, text="", token_rule=f"<[{arrow_token_id}]>")


def _build_text_call_rules(tool_names: Sequence[str], arrow_text: str, markers: CallMarkers) -> list[str]:
    """Build the grammar rules CALL and INPUT for tools whose input is free text, as in `QA(Who wrote it?) ->`.

    Args:
        tool_names: The names of these tools.
        arrow_text: The arrow, or "" if the arrow is a token.
        markers: The texts around a call and before its result.
    """
    names = "|".join(_escape_for_pattern(tool) for tool in tool_names)
    arrow = rf"[^\S{LINE_END_CHARACTERS}]*{_escape_for_pattern(arrow_text)}"  # after white space on the same line
    call_rule = rf"CALL: /({names})\(/ INPUT /\){arrow}/"
    return [call_rule, _build_input_rule(markers)]


def _build_input_rule(markers: CallMarkers) -> str:
    r"""Build the grammar's rule INPUT, which admits a line without `]`, markers, other calls, and named arguments.

    "f(x[1" is admitted; "a -> b", "[QA(" and 'city="Rome"' are not. Shortened, the rule is

        INPUT: /[^\]\n]*/ & ~/.*(->|\[NAME\().*/ & ~/NAME=.*".*/

    In llguidance's syntax, /.../ is a pattern, & means that both match, ~ that it does not match.
    """
    excluded_markers = "|".join(_escape_for_pattern(marker) for marker in _list_markers_excluded_from_input(markers))
    call_beginning = rf"\[\s*{TOOL_NAME_PATTERN}\("
    one_line = rf"/[^\]{LINE_END_CHARACTERS}]*/"
    # A single pattern for markers and beginnings of calls, because llguidance limits how much a rule excludes.
    holds_marker_or_call = rf"/(?s:.*)({excluded_markers}|{call_beginning})(?s:.*)/"  # (?s:.*): any text
    is_named_argument = f"/{NAMED_STRING_ARGUMENT_PATTERN}/"
    return f"INPUT: {one_line} & ~{holds_marker_or_call} & ~{is_named_argument}"


def _list_markers_excluded_from_input(markers: CallMarkers) -> list[str]:
    """List the markers that an input may not hold, sorted.

    For calls between <call> and </call> they are ["->", "</call>", "<call>"].

    "[" is allowed as long as no call follows it. "]" is not listed because the rule INPUT excludes it anyway.
    """
    excluded_markers = {RESULT_ARROW}
    for _, marker in markers:  # pairs of a field and its marker
        excluded_markers.add(marker.strip())
    return sorted(excluded_markers - {"[", "]"})


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
    line = to_single_line(result)
    without_markers = line.replace("[", "(").replace("]", ")").replace(RESULT_ARROW, "→")
    shortened = without_markers[:max_characters].rstrip()

    visible_part = shortened.strip(JOINER_CHARACTERS + " ")
    return shortened if visible_part else ""


def to_single_line(text: str) -> str:
    """Return a text with each run of white space as one space, and without characters that nobody can see.

    These are control characters, invisible marks, and halves of surrogate pairs.
    """
    without_invisible = "".join(character for character in text if _is_allowed_character(character))
    return " ".join(without_invisible.split())


def _is_allowed_character(character: str) -> bool:
    """Check whether a character is white space, a joiner (which some scripts need), or visible."""
    if character.isspace() or character in JOINER_CHARACTERS:
        return True
    return category(character) not in INVISIBLE_CATEGORIES


def build_call_opening_pattern(
    tool_names: Collection[str] | None, begin_marker: str = PAPER_BEGIN_MARKER
) -> re.Pattern[str]:
    """Build a pattern that finds the marker before a call, such as " [" in " [Calculator(1)".

    Args:
        tool_names: The tools whose calls are found. None stands for any name of at most MAX_TOOL_NAME_CHARACTERS.
            If the collection is empty, the pattern matches nothing.
        begin_marker: The marker that opens a call.
    """
    if tool_names is None:
        # Not TOOL_NAME_PATTERN, which has no limit: in `<call><call>...` each marker would read the text to its end.
        names = rf"[^\s\[\]()]{{1,{MAX_TOOL_NAME_CHARACTERS}}}"
    elif tool_names:
        names = "|".join(re.escape(tool) for tool in sorted(tool_names))
    else:
        return re.compile(r"(?!)")  # matches nowhere
    # With (?=...), a name must follow the marker, but is not part of the match.
    return re.compile(rf"{re.escape(begin_marker)}(?=(?:{names})\()")


def has_call_to_tools(text: str, tool_names: Collection[str], markers: CallMarkers = PAPER_MARKERS) -> bool:
    """Check whether a call to one of some tools begins in a text, closed or not. Such a text cannot be annotated."""
    opening_pattern = build_call_opening_pattern(tool_names, markers.begin)
    return opening_pattern.search(text) is not None


@dataclass(frozen=True, slots=True)
class PlacedCall:
    """A call with its result and its place in a text."""

    offset: int  # the character at which x_i, the token after the call, begins in the text without calls
    call: Call
    result: str


class SpliceError(ValueError):
    """A call cannot be inserted into a text so that `remove_calls` restores the text."""


def splice(text: str, calls: Sequence[PlacedCall], markers: CallMarkers = PAPER_MARKERS) -> str:
    """Insert calls with their results into a text (paper, section 2: x becomes x*).

    Calls with the same offset form a chain and keep the order of `calls`. `remove_calls` gives back the
    original text, unless that already holds a call to one of the tools.

    Args:
        text: The text without calls.
        calls: The calls with results, and their offsets in this text.
        markers: The texts around a call and before its result.

    Raises:
        SpliceError: An offset is outside the text, or a call or result could not be read back because it holds,
            for example, a marker or a newline.
    """
    calls_in_order = sorted(calls, key=lambda placed_call: placed_call.offset)

    insertions = []
    for placed_call in calls_in_order:
        _check_placed_call(placed_call, text, markers)
        written_call = format_call(placed_call.call, placed_call.result, markers)
        insertions.append(_Replacement(placed_call.offset, placed_call.offset, written_call))
    return _replace_parts(text, insertions)


class _Replacement(NamedTuple):
    """Characters `start` to `end` of a text, and what is written there instead."""

    start: int
    end: int
    new_text: str


def _replace_parts(text: str, replacements: Iterable[_Replacement]) -> str:
    """Replace parts of a text.

    Args:
        text: The text.
        replacements: The parts with their new text, in the order of the text.
    """
    pieces: list[str] = []
    previous_end = 0  # the end of the part that was replaced last

    for replacement in replacements:
        pieces.append(text[previous_end : replacement.start])
        pieces.append(replacement.new_text)
        previous_end = replacement.end

    pieces.append(text[previous_end:])
    return "".join(pieces)


def _check_placed_call(placed_call: PlacedCall, text: str, markers: CallMarkers) -> None:
    """Check that a call can be inserted into a text and be read back from it.

    Raises:
        SpliceError: The offset is outside the text, or the call or its result holds something not allowed there.
    """
    if not 0 <= placed_call.offset <= len(text):
        raise SpliceError(f"offset {placed_call.offset} is outside the text of {len(text)} characters")

    reason = find_call_fault(placed_call.call, markers) or _find_text_fault(placed_call.result, markers)
    if reason is not None:
        raise SpliceError(
            f"{placed_call.call} at {placed_call.offset} cannot be spliced: {reason}; clean the result first"
        )


def remove_calls(text: str, tool_names: Collection[str], markers: CallMarkers = PAPER_MARKERS) -> str:
    """Return a text without its closed calls to some tools, with results or without. This undoes `splice`."""
    opening_pattern = build_call_opening_pattern(tool_names, markers.begin)
    calls = _iter_closed_calls(text, opening_pattern, markers)
    deletions = [_Replacement(call.start, call.end, new_text="") for call in calls]
    return _replace_parts(text, deletions)


def list_call_offsets_and_inputs(text: str, tool_names: Collection[str]) -> list[tuple[int, str]]:
    """List the closed calls to `tool_names` in a text that is in the paper's form.

    Returns:
        For each call its offset, counted in the text without these calls, and its input. For
        "a [QA(Who?) -> She]b [Add(1 + 1)]" this is [(1, "Who?"), (2, "1 + 1")].
    """
    opening_pattern = build_call_opening_pattern(tool_names)
    written_calls = list(_iter_closed_calls(text, opening_pattern, PAPER_MARKERS))

    offsets = _compute_offsets_without_calls(written_calls)
    inputs = [written_call.call.input for written_call in written_calls]
    return list(zip(offsets, inputs, strict=True))


def _compute_offsets_without_calls(calls: Iterable["_WrittenCall"]) -> list[int]:
    """Compute the offset of each call in the text without any of the calls.

    Args:
        calls: The calls in the order of the text.

    Returns:
        An offset per call. For "a [Add(1)]b [Add(2)]" this is [1, 2].
    """
    offsets = []
    earlier_call_characters = 0  # the length of the calls so far
    for call in calls:
        offsets.append(call.start - earlier_call_characters)
        earlier_call_characters += call.end - call.start
    return offsets


def parse_placed_calls(
    text: str, tool_names: Collection[str], markers: CallMarkers = PAPER_MARKERS
) -> list[PlacedCall]:
    """List the calls in a text with their results and places, the inverse of `splice`.

    `splice(remove_calls(text, tool_names), calls)` gives the text again.

    Returns:
        The calls, with offsets in the text without them. For "a [QA(Who?) -> She] b" this is
        [PlacedCall(offset=1, call=Call("QA", "Who?"), result="She")].

    Raises:
        MalformedCall: A call to one of `tool_names` is closed but has no result.
    """
    opening_pattern = build_call_opening_pattern(tool_names, markers.begin)
    written_calls = list(_iter_closed_calls(text, opening_pattern, markers))
    offsets = _compute_offsets_without_calls(written_calls)

    placed_calls = []
    for offset, written_call in zip(offsets, written_calls, strict=True):
        if written_call.result is None:
            raise MalformedCall("no_result", written_call.body)
        placed_calls.append(PlacedCall(offset, written_call.call, written_call.result))
    return placed_calls


def replace_paper_markers(text: str, markers: CallMarkers) -> str:
    """Replace the paper's markers around calls in a text, such as a prompt, by other markers.

    Example:
        With the markers " <call>", " = " and "</call>", "It is [Add(1, 2) -> 3] three." becomes
        "It is <call>Add(1, 2) = 3</call> three."
    """
    # Matches the "[" of a call, and one space before it if there is one.
    opening_pattern = re.compile(rf" ?\[(?={TOOL_NAME_PATTERN}\()")

    replacements = []
    for call in _iter_closed_calls(text, opening_pattern, PAPER_MARKERS):
        rewritten = _format_call_with_markers(call, markers)
        replacements.append(_Replacement(call.start, call.end, rewritten))
    return _replace_parts(text, replacements)


def _format_call_with_markers(written_call: "_WrittenCall", markers: CallMarkers) -> str:
    """Return a call of a text, written with other markers: " [QA(Who?) -> She]" may become " <QA(Who?) = She>".

    If there is no space before the call, as in the instructions of a prompt, none is added.
    """
    has_space_before = written_call.text[written_call.start] == " "
    begin_marker = markers.begin if has_space_before else markers.begin.lstrip()

    with_new_markers = f"{begin_marker}{written_call.body}"
    if written_call.result is not None:
        with_new_markers += f"{markers.arrow}{written_call.result}"
    return f"{with_new_markers}{markers.end}"


def restore_paper_markers(call_body: str, markers: CallMarkers) -> str:
    """Replace the markers in a call by the paper's markers, so that calls of every model are read in the same way.

    Args:
        call_body: What a model wrote after the opening marker, such as "QA(Who?) =".
        markers: The markers that the model writes.

    Returns:
        For the arrow " = " in the example: "QA(Who?) ->". Named arguments come back unchanged, because their
        strings may hold anything.
    """
    arguments_end = find_input_end(call_body)  # 0 without named arguments
    if arguments_end is None:  # they have no end yet: 'QA(question="Wh'
        return call_body

    named_arguments = call_body[:arguments_end]
    after_arguments = call_body[arguments_end:]

    # Markers are stripped, so that the white space around them stays as the model wrote it.
    after_arguments = after_arguments.replace(markers.arrow.strip(), RESULT_ARROW)
    # Another call may begin inside this one.
    after_arguments = after_arguments.replace(markers.begin.strip(), PAPER_BEGIN_MARKER.strip())
    return named_arguments + after_arguments


def iter_marker_offsets(text: str, markers: CallMarkers) -> Iterator[tuple[str, int]]:
    """Find the markers of all closed calls in a text, whatever their tools.

    Yields:
        Each marker and its offset. For "a [QA(Who?) -> She] b": (" [", 1), (" -> ", 11), ("]", 18).
    """
    opening_pattern = build_call_opening_pattern(None, markers.begin)
    for written_call in _iter_closed_calls(text, opening_pattern, markers):
        yield markers.begin, written_call.start
        if written_call.arrow_start is not None:
            yield markers.arrow, written_call.arrow_start
        yield markers.end, written_call.close_start


@dataclass(frozen=True, slots=True)
class _WrittenCall:
    """A closed call in a text, with the offsets of its parts. The numbers are for `a [QA(Who?) -> She] b`."""

    text: str  # the whole text
    markers: CallMarkers
    start: int  # 1, where its opening marker begins
    name_start: int  # 3, where its tool's name begins
    arrow_start: int | None  # 11, where its arrow begins; None for a call without a result
    close_start: int  # 18, where its closing marker begins
    end: int  # 19, the character after its closing marker

    @property
    def body(self) -> str:
        """The tool's name and the input in parentheses: "QA(Who?)"."""
        body_end = self.close_start if self.arrow_start is None else self.arrow_start
        return self.text[self.name_start : body_end]

    @property
    def call(self) -> Call:
        """The call, without its result: Call("QA", "Who?")."""
        tool, _, after_name = self.body.rstrip().partition("(")
        return Call(tool, after_name.removesuffix(")"))

    @property
    def result(self) -> str | None:
        """The text between the arrow and the closing marker, or None for a call without an arrow."""
        if self.arrow_start is None:
            return None
        return self.text[self.arrow_start + len(self.markers.arrow) : self.close_start]


def _iter_closed_calls(text: str, opening_pattern: re.Pattern[str], markers: CallMarkers) -> Iterator[_WrittenCall]:
    """Find the calls in a text that have a closing marker, in linear time.

    Calls inside other calls are left out.

    Args:
        text: The text.
        opening_pattern: A pattern that matches the marker before a call's name (see `build_call_opening_pattern`).
        markers: The texts around a call and before its result.

    Yields:
        The calls in order. For "a [Add(1)] [QA(b" this is only " [Add(1)]", because the other call is not closed.
    """
    openings = list(opening_pattern.finditer(text))
    name_starts = [match.end() for match in openings]
    search_starts = find_input_ends(text, name_starts)  # by name start, where the search for the closing marker begins

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


def _parse_closed_call(
    text: str, opening_match: re.Match[str], marker_search_start: int, markers: CallMarkers
) -> _WrittenCall:
    """Find the parts of a call whose closing marker is known to follow.

    In "a [QA(Who?) -> She] b" the call starts at 1, its name at 3, its arrow at 11 and its closing marker at 18.

    Args:
        text: The text that contains the call.
        opening_match: The match of the marker before the call's name.
        marker_search_start: The offset after the `)` of named arguments. For any other input, the offset of the
            call's name.
        markers: The texts around a call and before its result.
    """
    name_start = opening_match.end()
    close_start = text.find(markers.end, marker_search_start)  # named arguments are skipped: they may hold markers
    close_end = close_start + len(markers.end)

    # The ")" before the arrow may be the one that closes named arguments, at marker_search_start - 1.
    earliest_parenthesis = max(marker_search_start - 1, name_start)
    parenthesis = text.find(f"){markers.arrow}", earliest_parenthesis, close_end)
    arrow_start = None if parenthesis < 0 else parenthesis + 1  # a call without a result has no arrow

    return _WrittenCall(
        text=text,
        markers=markers,
        start=opening_match.start(),
        name_start=name_start,
        arrow_start=arrow_start,
        close_start=close_start,
        end=close_end,
    )
