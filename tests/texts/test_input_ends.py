"""Where the inputs of many calls end is found in linear time, and as for each call alone. Steps are counted."""

import re

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tests.steps import lines_run
from toolformer_dag.settings.call_markers import PAPER_MARKERS
from toolformer_dag.texts.calls import build_call_opening_pattern, iter_marker_offsets, remove_calls
from toolformer_dag.texts.input_ends import find_input_end, find_input_ends, find_text_after_input

PIECES = st.sampled_from([" [A(b=", " [A(1", "[", "]", "(", ")", '"', "\\", '\\"', " -> r", ", c=3", "b", " "])
TEXTS = st.lists(PIECES, max_size=40).map("".join)
OPEN_STRINGS = ' [A(b=\\" '
"""Of many such calls, each begins a string that does not end before the text."""


@given(TEXTS)
@example(OPEN_STRINGS * 3 + "]")
def test_the_ends_of_many_inputs_are_those_of_each_alone(text: str) -> None:
    starts = [match.end() for match in re.finditer(r"[ \[]", text)]
    assert find_input_ends(text, starts) == {start: find_input_end(text, start) for start in starts}


def slowly_taken_out(text: str) -> str:
    """Return a text without its calls to A, each of which is read alone."""
    pieces = []
    position = 0
    for match in build_call_opening_pattern(["A"]).finditer(text):
        if match.start() < position:
            continue
        close = find_text_after_input("]", text, match.end())
        if close >= 0:
            pieces.append(text[position : match.start()])
            position = close + 1
    return "".join(pieces) + text[position:]


@given(TEXTS)
@example(OPEN_STRINGS * 3 + "]")
@example(' [A(b="]") -> 1] [A(b="]')
def test_calls_are_taken_out_as_each_alone(text: str) -> None:
    assert remove_calls(text, ["A"]) == slowly_taken_out(text)


@pytest.mark.parametrize(
    "unit",
    [
        OPEN_STRINGS,
        ' [A(b=[\\" ',
        ' [A(b="" ',
        ' [A(b="]") -> 1]',
        " [A(b=[",
        " [A(1",
    ],
)
def test_a_text_of_twice_the_length_takes_twice_the_steps(unit: str) -> None:
    def text(count: int) -> str:
        return unit * count + '" ' + '"" ' * count + " ]"

    def steps(count: int) -> int:
        return lines_run(lambda: list(iter_marker_offsets(text(count), PAPER_MARKERS)))

    assert steps(200) < 2.2 * steps(100)


def test_a_marker_is_followed_by_a_name_of_bounded_length() -> None:
    opening = build_call_opening_pattern(
        None, "<call>"
    )  # a name may hold the marker: of many markers each could read to the end
    assert opening.search(f"<call>{'n' * 256}(1)</call>") is not None
    assert opening.search(f"<call>{'n' * 257}(1)</call>") is None
