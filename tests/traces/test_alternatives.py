"""What a recorded call is held against, and in which order."""

from tests.traces.pools import string_pools
from toolformer_dag.conversations.messages import RecordedCall
from toolformer_dag.traces.alternatives import (
    EXCHANGED_VALUES,
    NO_ALTERNATIVES,
    OTHER_RESULTS,
    OTHER_TOOLS,
    Alternatives,
    of_exchanged_values,
    of_other_results,
)

POOLS = string_pools([("weather", '{"sky": "light rain"}'), ("weather", '{"sky": "heavy snow"}')])


def test_a_result_with_the_same_values_is_no_other_result() -> None:
    call = RecordedCall("distance", {}, result='{"distance": 2448.2}')
    others = ['{"distance": 2448.2, "unit": "miles"}', '{"distance": 12}', "2448.2", '{"distance": 12}', "13"]
    assert of_other_results(OTHER_RESULTS, call, others, most=2) == Alternatives(
        OTHER_RESULTS, ('{"distance": 12}', "13")
    )
    assert of_other_results(OTHER_RESULTS, call, others[:3], most=2) == NO_ALTERNATIVES


def test_a_result_is_written_with_other_values_as_often_as_it_can_be() -> None:
    degrees = RecordedCall("weather", {}, result='{"degrees": 17}')
    means, versions = of_exchanged_values(degrees, "a call", before="", pools=POOLS, most=3)
    assert means == EXCHANGED_VALUES
    assert len(set(versions)) == 3
    even = RecordedCall("is_even", {}, result='{"even": true}')
    assert of_exchanged_values(even, "a call", "", POOLS, most=2).results == ('{"even": false}',)


def test_neither_an_error_nor_a_confirmation_has_other_values() -> None:
    error = RecordedCall("weather", {}, result="Error 404", failed=True)
    confirmed = RecordedCall("book", {}, result='{"status": "success"}')
    for call in (error, confirmed, RecordedCall("book", {})):
        assert of_exchanged_values(call, "a call", "", POOLS, most=2) == NO_ALTERNATIVES


def test_results_of_other_tools_are_the_last_means() -> None:
    call = RecordedCall("book", {}, result='{"status": "success"}')
    assert of_other_results(OTHER_TOOLS, call, ["17", "ok", "18", "19"], most=2) == Alternatives(
        OTHER_TOOLS, ("17", "18")
    )
    assert of_other_results(OTHER_TOOLS, call, ["17"], most=2) == NO_ALTERNATIVES
