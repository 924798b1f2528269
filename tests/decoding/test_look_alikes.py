"""What reads like a call, found in linear time as the plain pattern finds it."""

import re

from hypothesis import given
from hypothesis import strategies as st

from toolformer_dag.decoding.look_alikes import find_look_alike_start, find_partial_look_alike

OPENED = r"(?:[(\[{<]\s*)+"
BEGUN = re.compile(rf"{OPENED}[^\s()\[\]]*\Z")
LOOK_ALIKE = re.compile(rf"{OPENED}(?:Cal|b|ab)\(")


@given(st.text("( [{<)ab]\n", max_size=14))
def test_the_end_that_may_become_a_look_alike_is_that_of_the_pattern(text: str) -> None:
    match = BEGUN.search(text)
    assert find_partial_look_alike(text) == (match.start() if match else len(text))


@given(st.lists(st.sampled_from(["(", "[ ", "{", "<", " ", "Cal(", "b(", "ab(", "x", "\n"]), max_size=10))
def test_a_look_alike_begins_where_the_pattern_begins(parts: list[str]) -> None:
    text = "".join(parts)
    match = LOOK_ALIKE.search(text)
    assert find_look_alike_start(text, ["Cal", "b", "ab"]) == (match.start() if match else None)


def test_brackets_without_a_name_take_linear_time() -> None:
    for text in ("(" * 200_000, "{ " * 100_000 + ")", "a<" * 100_000 + "\n"):
        assert find_look_alike_start(text, ["Cal"]) is None
        assert 0 <= find_partial_look_alike(text) <= len(text)
