"""What a call is held against: results of its tool in other documents, whatever the order of the conversations is."""

import random
from hashlib import blake2b

from hypothesis import given
from hypothesis import strategies as st

from toolformer_dag.conversations.messages import RecordedCall, RecordedMessage
from toolformer_dag.traces.other_results import (
    MAX_DONOR_CHARACTERS,
    Circle,
    Donors,
    choose_other_results,
    choose_other_results_of_calls,
    compute_document_hash,
    has_too_few_donors,
    hash_beginnings,
    hash_call,
    hash_text,
)

CALL = st.builds(
    RecordedCall,
    tool=st.sampled_from("xy"),
    arguments=st.fixed_dictionaries({"n": st.integers(0, 3)}),
    result=st.none() | st.sampled_from(["1", "2", "3", " 3", "4", "5", ""]),
    failed=st.booleans(),
)
PLACED_CALLS = st.lists(st.tuples(st.sampled_from(["a", "b", "c"]), CALL), max_size=12)
Placed = list[tuple[str, RecordedCall]]


def plainly(calls: Placed, document: str, call: RecordedCall, swaps: int) -> tuple[str, ...]:
    """The results for a call, by the words of the documentation and plain loops."""
    documents: dict[str, str] = {}
    for other_document, other in calls:
        if other.tool == call.tool and other.result is not None and not other.failed:
            documents[other.result] = min(other_document, documents.get(other.result, other_document))
    in_order = sorted(documents, key=hash_text)
    behind = [result for result in in_order if hash_text(result) >= hash_call(document, call)]
    before = [result for result in in_order if result not in behind]
    others = [
        result
        for result in (*behind, *before)
        if documents[result] != document and result.strip() != (call.result or "").strip()
    ]
    return tuple(others[:swaps])


@given(PLACED_CALLS, st.integers(1, 4), st.randoms())
def test_each_call_gets_the_next_results_of_the_circle(calls: Placed, swaps: int, chance: random.Random) -> None:
    assert choose_other_results_of_calls(calls, swaps) == [
        plainly(calls, document, call, swaps) for document, call in calls
    ]
    shuffled = list(range(len(calls)))
    chance.shuffle(shuffled)
    results = choose_other_results_of_calls([calls[number] for number in shuffled], swaps)
    assert results == [choose_other_results_of_calls(calls, swaps)[number] for number in shuffled]


@given(PLACED_CALLS, st.integers(1, 4))
def test_where_donors_suffice_nobody_borrows(calls: Placed, swaps: int) -> None:
    donors = Donors()
    for document, call in calls:
        donors.add_call_result(document, call)
    lacking = {
        tool for tool, donors_of_tool in donors.iter_donors_by_tool() if has_too_few_donors(donors_of_tool, swaps)
    }
    circles = donors.build_circle_by_tool()
    for document, call in calls:
        if call.tool in circles and call.tool not in lacking and call.result not in ("3", " 3"):  # these two are alike
            assert len(choose_other_results([circles[call.tool]], document, call, swaps)) == swaps


@given(st.lists(st.tuples(st.sampled_from("ab"), st.integers(0, 60)), max_size=80))
def test_a_sample_is_that_of_the_smallest_hashes_in_whatever_order_calls_come(given: list[tuple[str, int]]) -> None:
    everything = Donors(max_donors_per_tool=1000)
    sample = Donors(max_donors_per_tool=4)
    for document, number in given:
        everything.add_call_result(document, RecordedCall("x", {}, result=str(number)))
        sample.add_call_result(document, RecordedCall("x", {}, result=str(number)))
    smallest = {tool: donors[:4] for tool, donors in everything.iter_donors_by_tool()}
    assert [(one.hash, one.result) for _, some in sample.iter_donors_by_tool() for one in some] == [
        (one.hash, one.result) for some in smallest.values() for one in some
    ]


def test_a_call_takes_results_of_its_shard_before_borrowed_ones() -> None:
    call = RecordedCall("x", {}, result="own")
    donors = Donors()
    donors.add_call_result("other", RecordedCall("x", {}, result="near"))
    borrowed = Donors()
    for result in ("far", "near", "own"):
        borrowed.add_call_result("another", RecordedCall("x", {}, result=result))
    circles: list[Circle] = [donors.build_circle_by_tool()["x"], borrowed.build_circle_by_tool()["x"]]
    assert choose_other_results(circles, "document", call, 1) == ("near",)
    assert choose_other_results(circles, "document", call, 5) == ("near", "far")


def test_of_a_long_result_the_beginning_is_kept_and_it_is_not_exchanged_with_itself() -> None:
    long = "7" * (2 * MAX_DONOR_CHARACTERS)
    calls = [(document, RecordedCall("x", {}, result=result)) for document, result in (("a", long), ("b", "8"))]
    assert choose_other_results_of_calls(calls, 2) == [("8",), (long[:MAX_DONOR_CHARACTERS],)]
    assert choose_other_results_of_calls([calls[0], ("b", calls[0][1])], 2) == [(), ()]


def test_the_hash_of_a_beginning_is_that_of_the_messages_in_it() -> None:
    call = RecordedCall("x", {"n": 1}, id="one", place=(3, 1), result="7")
    messages = (RecordedMessage("user", "?"), RecordedMessage("assistant", "", (call,)), RecordedMessage("user", "!"))
    said = [(one.role, one.content, [(c.tool, c.arguments, c.result) for c in one.calls]) for one in messages]
    expected = [blake2b(repr(said[:end]).encode(), digest_size=8).hexdigest() for end in range(4)]
    assert hash_beginnings(messages) == expected
    assert compute_document_hash(messages) == expected[1]
