"""Calls in other markers than the paper's: written, read, taken out, and the markers that cannot work."""

import re

import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st
from pydantic import ValidationError

from tests.texts.test_call import CALLS, TEXTS, TOOLS
from toolformer_dag.settings.call_markers import PAPER_MARKERS, CallMarkers
from toolformer_dag.texts.calls import (
    Call,
    MalformedCall,
    PlacedCall,
    SpliceError,
    find_call_fault,
    format_call,
    has_call_to_tools,
    iter_marker_offsets,
    parse_call,
    parse_placed_calls,
    remove_calls,
    replace_paper_markers,
    restore_paper_markers,
    splice,
)
from toolformer_dag.texts.input_ends import find_text_after_input
from toolformer_dag.tools.registry import load_tool

SPECIAL = CallMarkers(begin="<tool_call>", arrow="<tool_response>", end="</tool_call>")
FORMS = (
    PAPER_MARKERS,
    SPECIAL,
    CallMarkers(begin=" {{", arrow=" => ", end="}}"),
    CallMarkers(begin="[[", arrow="=>", end="]]"),
    CallMarkers(begin=" <<", arrow=" → ", end=">>"),
    CallMarkers(begin="@", arrow=" gives ", end="."),
    CallMarkers(begin="<call>"),
)
MARKERS = st.sampled_from(FORMS)
SIGNS = [sign for form in FORMS for _, marker in form for sign in (marker, marker.strip(), marker[:1], marker[-1:])]
HOSTILE = st.lists(st.sampled_from([*SIGNS, "QA(", ")", "x", " ", '"', "city="]), max_size=8).map("".join)
HOSTILE_CALLS = st.builds(
    PlacedCall,
    st.integers(0, 9),
    st.builds(Call, st.sampled_from(TOOLS), HOSTILE | HOSTILE.map('city="{}"'.format)),
    HOSTILE,
)


@given(TEXTS | HOSTILE, st.lists(CALLS | HOSTILE_CALLS, max_size=4, unique_by=lambda one: one.offset), MARKERS)
@example("a", [PlacedCall(1, Call("QA", 'city="</tool_call>"'), "x")], SPECIAL)
@example("<tool_call>QA", [PlacedCall(11, Call("QA", "(1) -> 2]"), "]")], SPECIAL)
def test_calls_that_are_taken_out_whole_are_read_as_they_were(
    text: str, calls: list[PlacedCall], markers: CallMarkers
) -> None:
    assume(not has_call_to_tools(text, TOOLS, markers))
    calls = sorted((one for one in calls if one.offset <= len(text)), key=lambda one: one.offset)
    try:
        spliced = splice(text, calls, markers)
    except SpliceError:
        return
    if remove_calls(spliced, TOOLS, markers) == text:  # what C* asks of each of its texts
        assert parse_placed_calls(spliced, TOOLS, markers) == calls


@given(TEXTS, st.lists(CALLS, max_size=4, unique_by=lambda one: one.offset))
def test_calls_without_the_signs_of_markers_are_always_taken_out_whole(text: str, calls: list[PlacedCall]) -> None:
    assume(not has_call_to_tools(text, TOOLS, SPECIAL))
    calls = [one for one in calls if one.offset <= len(text)]
    assert remove_calls(splice(text, calls, SPECIAL), TOOLS, SPECIAL) == text


@given(st.lists(CALLS, min_size=1, max_size=3), MARKERS)
def test_the_paper_s_form_becomes_another_one(calls: list[PlacedCall], markers: CallMarkers) -> None:
    chain = "".join(format_call(one.call, one.result) for one in calls)
    assert replace_paper_markers(chain, markers) == "".join(format_call(one.call, one.result, markers) for one in calls)
    asked = format_call(calls[0].call)
    assert replace_paper_markers(asked, markers) == format_call(calls[0].call, None, markers)


@given(TEXTS | HOSTILE)
def test_in_the_paper_s_markers_nothing_changes(text: str) -> None:
    assert replace_paper_markers(text, PAPER_MARKERS) == text == restore_paper_markers(text, PAPER_MARKERS)


@given(CALLS, MARKERS, st.booleans())
def test_what_is_sampled_is_read_in_the_paper_s_form(one: PlacedCall, markers: CallMarkers, answered: bool) -> None:
    written = format_call(one.call, one.result if answered else None, markers)
    assume(remove_calls(f"{written}", TOOLS, markers) == "")
    body = restore_paper_markers(written[len(markers.begin) : -len(markers.end)], markers)
    if not answered:
        assume(find_call_fault(one.call, markers) is None)
        assert body == f"{one.call.tool}({one.call.input})"
    else:
        asked = body[: find_text_after_input("->", body)].rstrip()
        assert asked == f"{one.call.tool}({one.call.input})" or find_call_fault(one.call, markers) is not None


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("QA(a <tool_response> b)", "arrow_in_input"),
        ("QA(<tool_call>MT(x)", "call_in_input"),
        ("QA(a -> b)", "arrow_in_input"),
        ("QA(a[0])", "bracket_in_input"),
        ("QA(a)<tool_response>b", "not_a_call"),
    ],
)
def test_a_sample_that_cannot_stand_in_a_table_has_the_paper_s_reasons(body: str, reason: str) -> None:
    with pytest.raises(MalformedCall) as caught:
        parse_call(restore_paper_markers(body, SPECIAL))
    assert caught.value.reason == reason


def test_strings_of_named_arguments_hold_any_marker() -> None:
    asked = 'Weather(city="<tool_call>QA(1)<tool_response></tool_call>")'
    assert parse_call(restore_paper_markers(asked, SPECIAL)).input == asked[8:-1]
    [placed] = parse_placed_calls(f"a<tool_call>{asked}<tool_response>5</tool_call> b", ["Weather", "QA"], SPECIAL)
    assert placed == PlacedCall(1, Call("Weather", asked[8:-1]), "5")


@given(CALLS, MARKERS)
def test_markers_are_found_where_they_stand(one: PlacedCall, markers: CallMarkers) -> None:
    written = format_call(one.call, one.result, markers)
    assume(remove_calls(written, TOOLS, markers) == "" and find_call_fault(one.call, markers) is None)
    inner = len(markers.begin) + len(f"{one.call.tool}({one.call.input})")
    expected = [(markers.begin, 0), (markers.arrow, inner), (markers.end, len(written) - len(markers.end))]
    assert list(iter_marker_offsets(written, markers)) == expected
    assert list(iter_marker_offsets(f"so {written[: len(markers.begin)]} b", markers)) == []


@pytest.mark.parametrize("key", ["calculator", "calendar", "wiki_search", "question_answering", "machine_translation"])
@pytest.mark.parametrize("markers", FORMS[1:])
def test_every_call_of_a_prompt_is_written_in_the_markers_and_nothing_else(key: str, markers: CallMarkers) -> None:
    prompt = load_tool(key, {}).prompt
    name = load_tool(key, {}).name
    written = replace_paper_markers(prompt, markers)
    calls = len(re.findall(rf"\[{name}\(", prompt))
    assert calls > 3 and written.count(f"{markers.begin.strip()}{name}(") == calls
    begun = re.sub(rf"{re.escape(markers.begin.strip())}(?={name}\()", "[", written)
    undone = re.sub(rf"(\[{name}\(.*?\)){re.escape(markers.end)}", r"\1]", begun)
    assert undone.replace(" [", "[") == prompt.replace(" [", "[")


@pytest.mark.parametrize(
    ("given_markers", "told"),
    [
        ({"begin": " "}, "begin = ' ' must be visible"),
        ({"end": ""}, "end = '' must be visible"),
        ({"arrow": "a\nb"}, "must be visible, in one line"),
        ({"begin": '"['}, "without quotes and parentheses"),
        ({"end": ")]"}, "without quotes and parentheses"),
        ({"begin": "[ "}, "white space may only stand before"),
        ({"end": " ]"}, "white space may only stand before"),
        ({"arrow": "]"}, "arrow = ']' stands in end = ']'; take markers that hold no other"),
        ({"begin": "->"}, "stands in arrow"),
        ({"begin": "[TOOL]"}, "end = ']' stands in begin"),
    ],
)
def test_markers_that_cannot_work_are_refused_in_a_sentence(given_markers: dict[str, str], told: str) -> None:
    with pytest.raises(ValidationError, match=re.escape(told)):
        CallMarkers(**given_markers)
