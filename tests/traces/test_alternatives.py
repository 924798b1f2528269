"""What a recorded call is held against, and in which order."""

from tests.traces.pools import string_pools
from toolformer_dag.conversations.messages import RecordedCall
from toolformer_dag.traces.alternatives import (
    EXCHANGED_VALUES,
    NO_ALTERNATIVES,
    OTHER_RESULTS,
    OTHER_TOOLS,
    Alternatives,
    build_exchanged_alternatives,
    select_alternatives,
)

POOLS = string_pools([("weather", '{"sky": "light rain"}'), ("weather", '{"sky": "heavy snow"}')])


def test_a_result_with_the_same_values_is_no_other_result() -> None:
    call = RecordedCall("distance", {}, result='{"distance": 2448.2}')
    others = ['{"distance": 2448.2, "unit": "miles"}', '{"distance": 12}', "2448.2", '{"distance": 12}', "13"]
    assert select_alternatives(OTHER_RESULTS, call, others, max_count=2) == Alternatives(
        OTHER_RESULTS, ('{"distance": 12}', "13")
    )
    assert select_alternatives(OTHER_RESULTS, call, others[:3], max_count=2) == NO_ALTERNATIVES


def test_a_result_is_written_with_other_values_as_often_as_it_can_be() -> None:
    degrees = RecordedCall("weather", {}, result='{"degrees": 17}')
    means, versions = build_exchanged_alternatives(degrees, "a call", text_before="", string_pools=POOLS, max_count=3)
    assert means == EXCHANGED_VALUES
    assert len(set(versions)) == 3
    even = RecordedCall("is_even", {}, result='{"even": true}')
    assert build_exchanged_alternatives(even, "a call", "", POOLS, max_count=2).results == ('{"even": false}',)


def test_neither_an_error_nor_a_confirmation_has_other_values() -> None:
    error = RecordedCall("weather", {}, result="Error 404", failed=True)
    confirmed = RecordedCall("book", {}, result='{"status": "success"}')
    for call in (error, confirmed, RecordedCall("book", {})):
        assert build_exchanged_alternatives(call, "a call", "", POOLS, max_count=2) == NO_ALTERNATIVES


def test_results_of_other_tools_are_the_last_means() -> None:
    call = RecordedCall("book", {}, result='{"status": "success"}')
    assert select_alternatives(OTHER_TOOLS, call, ["17", "ok", "18", "19"], max_count=2) == Alternatives(
        OTHER_TOOLS, ("17", "18")
    )
    assert select_alternatives(OTHER_TOOLS, call, ["17"], max_count=2) == NO_ALTERNATIVES
