"""Which results hold the same values, and what a result looks like with other ones."""

import json

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tests.traces.pools import string_pools
from toolformer_dag.traces.exchanged_values import exchange_values, redraw_digits
from toolformer_dag.traces.result_values import find_result_values, have_same_values, normalize_words

SCALARS = st.one_of(
    st.none(), st.booleans(), st.integers(-(10**9), 10**9), st.floats(-1e6, 1e6, allow_nan=False), st.text(max_size=20)
)
JSON_RESULTS = st.recursive(
    st.dictionaries(st.text(max_size=8), SCALARS, max_size=4),
    lambda inner: st.dictionaries(st.text(max_size=8), st.one_of(inner, st.lists(inner, max_size=3)), max_size=3),
    max_leaves=8,
)
RESULTS = st.one_of(JSON_RESULTS.map(lambda value: json.dumps(value, ensure_ascii=False)), st.text(max_size=60))
POOLS = string_pools(
    [
        ("weather", '{"city": "Lyon", "sky": "light rain"}'),
        ("weather", '{"city": "Oslo", "sky": "heavy snow"}'),
        ("search", '{"title": "A long history of the small towns by the sea", "author": "Mara Ilves"}'),
        ("search", "The library opens its doors in the morning and closes late"),
    ]
)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ('{"distance": 2448.2}', '{"distance": 2448.2, "unit": "miles"}'),
        ('{"distance": 2448.2}', '{"distance": "2,448.20 miles"}'),
        ("$150.75", "150.75"),
        ("$150.75", '"150.75 USD"'),
        ('{"a": 1, "b": 2}', "{'b': 2.0, 'a': '1'}"),
        ('{"status": "success", "tip": "$5"}', '{"tip": 5.00}'),
        ('{"name": "Mara  Ilves."}', '{"name": "mara ilves"}'),
        ("It is 20°C.", "it is 20"),
    ],
)
def test_the_spelling_of_a_value_does_not_matter(first: str, second: str) -> None:
    assert have_same_values(first, second)
    assert have_same_values(second, first)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ('{"low": 1, "high": 2}', '{"low": 2, "high": 1}'),
        ('{"id": "007"}', '{"id": "7"}'),
        ('{"change": -5}', '{"change": 5}'),
        ('{"even": true}', '{"even": false}'),
        ('{"status": "success"}', '{"status": "failed"}'),
        ("2023-05-01", "2023-05-02"),
        ("light rain", "heavy rain"),
        ("[1, 2]", "[1, 2, 2]"),
    ],
)
def test_other_values_are_told_apart(first: str, second: str) -> None:
    assert not have_same_values(first, second)


@given(JSON_RESULTS)
def test_the_order_of_keys_and_the_form_of_json_do_not_matter(value: dict[str, object]) -> None:
    spread = json.dumps(value, ensure_ascii=True, indent=2, sort_keys=True)
    assert have_same_values(json.dumps(value, ensure_ascii=False), spread)


@given(RESULTS)
def test_values_stand_where_they_are_said_to_stand(result: str) -> None:
    end = 0
    for value in find_result_values(result):
        assert end <= value.start <= value.end <= len(result)
        end = value.end
        if not value.quotation_mark:
            assert result[value.start : value.end] == value.text


@example("{N", "")
@given(RESULTS, st.text(max_size=20))
def test_an_exchanged_result_has_other_values_in_the_same_structure(result: str, identity: str) -> None:
    exchanged = exchange_values(result, tool="weather", seed=identity, text_before="", string_pools=POOLS)
    if exchanged is None:
        return
    assert not have_same_values(result, exchanged)
    assert exchanged == exchange_values(result, tool="weather", seed=identity, text_before="", string_pools=POOLS)
    assert [value.key for value in find_result_values(exchanged)] == [value.key for value in find_result_values(result)]


@given(JSON_RESULTS, st.text(max_size=20))
def test_exchanged_json_is_json_with_values_of_the_same_types(value: dict[str, object], identity: str) -> None:
    exchanged = exchange_values(json.dumps(value), tool="weather", seed=identity, text_before="", string_pools=POOLS)
    if exchanged is not None:
        assert _types(json.loads(exchanged)) == _types(value)


def _types(value: object) -> object:
    if isinstance(value, dict):
        return {key: _types(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_types(inner) for inner in value]
    return type(value)


def test_values_that_were_said_before_the_call_stay() -> None:
    result = '{"city": "Porto", "degrees": 17, "sky": "clear"}'
    exchanged = exchange_values(result, "weather", "a call", text_before='{"city": "Porto"}', string_pools=POOLS)
    assert exchanged is not None
    read = json.loads(exchanged)
    assert read["city"] == "Porto"
    assert read["degrees"] != 17
    assert read["sky"] in ("light rain", "heavy snow")


def test_numbers_dates_and_times_in_a_message_that_were_said_before_stay() -> None:
    message = '{"message": "Dinner on 2023-05-01 at 10:00, table 14"}'
    exchanged = exchange_values(
        message, "book", "a call", text_before="Dinner, 2023-05-01, 10:00 please", string_pools=POOLS
    )
    assert exchanged is not None
    assert exchanged.startswith('{"message": "Dinner on 2023-05-01 at 10:00, table ')
    assert "14" not in exchanged


@pytest.mark.parametrize("result", ["", "success", '{"status": "success"}', '{"city": "Porto"}', '{"a": null}', "{}"])
def test_a_result_that_adds_no_value_cannot_be_exchanged(result: str) -> None:
    assert exchange_values(result, "weather", "a call", text_before="How is it in Porto?", string_pools=POOLS) is None


def test_a_value_that_occurs_twice_is_exchanged_for_the_same_one() -> None:
    exchanged = exchange_values(
        '{"id": "AB-129x", "of": ["AB-129x"]}', "weather", "a call", text_before="", string_pools=POOLS
    )
    assert exchanged is not None
    read = json.loads(exchanged)
    assert read["id"] == read["of"][0] != "AB-129x"


def test_a_truncated_result_is_exchanged_as_far_as_it_goes() -> None:
    exchanged = exchange_values('{"rows": [{"n": 41}, {"n": 5', "weather", "a call", text_before="", string_pools=POOLS)
    assert exchanged is not None
    assert exchanged.startswith('{"rows": [{"n": ')
    assert "41" not in exchanged


@given(st.from_regex(r"[A-Za-z0-9$.,:/ -]{1,30}", fullmatch=True), st.text(max_size=5))
def test_redrawn_texts_keep_their_length_and_their_marks(text: str, seed: str) -> None:
    changed = redraw_digits(text, seed)
    assert len(changed) == len(text)
    assert [c.isalnum() for c in changed] == [c.isalnum() for c in text]


def test_dates_and_times_stay_possible() -> None:
    for seed in map(str, range(50)):
        day, _, time = redraw_digits("2023-12-31 23:59", seed).partition(" ")
        year, month, number = map(int, day.split("-"))
        hour, minute = map(int, time.split(":"))
        assert year == 2023
        assert 1 <= month <= 12 and 1 <= number <= 28 and 1 <= hour <= 12 and 0 <= minute <= 59


@given(st.lists(st.sampled_from(["Lyon", "Oslo", "Graz", "Split", "Cork", "Leeds"]), min_size=3, unique=True))
def test_a_further_result_changes_an_exchange_only_to_its_own_string(cities: list[str]) -> None:
    def exchanged(some: list[str]) -> str | None:
        pools = string_pools(("weather", json.dumps({"city": city})) for city in some)
        return exchange_values('{"city": "Porto"}', "weather", "a call", text_before="", string_pools=pools)

    before = exchanged(cities[:-1])
    after = exchanged(cities)
    assert after in (before, json.dumps({"city": cities[-1]}))
    assert after == exchanged(cities[::-1])


def test_words_have_one_spelling() -> None:
    assert normalize_words("$1,150.50") == normalize_words("1150.5 USD") == ("1150.5",)
    assert normalize_words("72kg") == normalize_words("72 kg") == ("72",)
    assert normalize_words("A5 0123") == ("a5", "0123")
