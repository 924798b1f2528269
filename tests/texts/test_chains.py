"""Chains: written and read, and what tells whether an earlier call was needed."""

from hypothesis import given
from hypothesis import strategies as st

from toolformer_dag.texts.calls import Call, PlacedCall, placed_calls, splice, take_out
from toolformer_dag.texts.chains import Link, chain_text, least_need, other_results, read_chain, written_chain

WORDS = st.text('ab 0"é', min_size=1, max_size=8)
LINKS = st.lists(st.builds(Link, st.sampled_from(["QA", "Calculator"]), WORDS, WORDS), min_size=1, max_size=3)
TOOLS = {"QA", "Calculator"}


@given(LINKS)
def test_a_chain_is_read_as_it_was_written(links: list[Link]) -> None:
    assert read_chain(written_chain(links)) == links
    assert read_chain(None) == []


@given(LINKS, st.integers(0, 4))
def test_a_chain_stands_at_one_place_and_can_be_taken_out(links: list[Link], offset: int) -> None:
    placed = [PlacedCall(offset, Call(link.tool, link.input), link.result) for link in links]
    spliced = splice("text", placed)
    assert spliced == "text"[:offset] + chain_text(links) + "text"[offset:]
    assert placed_calls(spliced, TOOLS) == placed and take_out(spliced, TOOLS) == "text"


def test_each_earlier_result_is_exchanged_before_each_later_call() -> None:
    links = [Link("QA", "a", "1"), Link("QA", "b", "2"), Link("Calculator", "1 + 2", "3")]
    asked = other_results(links, ["8", "9"])
    one, two = " [QA(a) -> 1]", " [QA(b) -> 2]"
    assert asked == [
        (one, " [QA(a) -> 8]", " [QA(b)]"),
        (one + two, " [QA(a) -> 8]" + two, " [Calculator(1 + 2)]"),
        (one + two, one + " [QA(b) -> 9]", " [Calculator(1 + 2)]"),
    ]


def test_the_result_that_is_needed_least_tells_the_need() -> None:
    """The first result helps the last call alone, by 5; the second one by 3."""
    assert least_need(3, [-0.5, 5.0, 3.0]) == 3.0
    assert least_need(3, [-0.5, -0.1, 3.0]) == -0.1
    assert least_need(2, [2.5]) == 2.5
