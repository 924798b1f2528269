"""Same meaning, same fingerprint; any change, another one; unknown types refused."""

from dataclasses import dataclass
from datetime import date, datetime
from enum import StrEnum
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel

from toolformer_dag.fingerprint import fingerprint

SCALARS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text()
    | st.binary()
    | st.dates()
    | st.datetimes()
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text() | st.integers(), inner, max_size=4),
    max_leaves=12,
)


@dataclass(frozen=True)
class Settings:
    tau: float
    k: int


@dataclass(frozen=True)
class Other:
    tau: float
    k: int


@dataclass
class Mutable:
    tau: float


class Model(BaseModel):
    tau: float
    names: list[str] = []


class Colour(StrEnum):
    RED = "red"


class Pair(NamedTuple):
    a: int
    b: int


def spelled(value: object) -> object:
    """A slow injective spelling to compare with: types by name, mappings as sorted pairs."""
    if isinstance(value, list):
        return ["sequence", *map(spelled, value)]
    if isinstance(value, dict):
        return ["mapping", *sorted(repr((spelled(k), spelled(v))) for k, v in value.items())]
    return [type(value).__name__, repr(value)]


@given(VALUES, VALUES)
def test_two_values_share_a_fingerprint_exactly_when_they_are_spelled_alike(one: object, other: object) -> None:
    assert (fingerprint(one) == fingerprint(other)) == (repr(spelled(one)) == repr(spelled(other)))


@given(st.dictionaries(st.text(), VALUES, max_size=5), st.randoms())
def test_the_order_of_keys_does_not_count(value: dict[str, object], random) -> None:
    items = list(value.items())
    random.shuffle(items)
    assert fingerprint(dict(items)) == fingerprint(value) == fingerprint(MappingProxyType(value))


@given(st.lists(VALUES, max_size=4))
def test_lists_and_tuples_mean_the_same(items: list[object]) -> None:
    assert fingerprint(items) == fingerprint(tuple(items))


@given(st.dictionaries(st.text(min_size=1), VALUES, min_size=1), st.data())
def test_any_change_at_any_depth_changes_it(value: dict[str, object], data) -> None:
    key = data.draw(st.sampled_from(sorted(value)))
    changed = data.draw(VALUES.filter(lambda new: repr(spelled(new)) != repr(spelled(value[key]))))
    assert fingerprint({"outer": [value]}) != fingerprint({"outer": [{**value, key: changed}]})
    assert fingerprint(value) != fingerprint({k: v for k, v in value.items() if k != key})


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (1, 1.0), (1, True), (0, False), (1, "1"), ("a", b"a"), (None, "None"), (None, False), (0.1 + 0.2, 0.3),
        (["ab", "c"], ["a", "bc"]), ([1, [2]], [[1], 2]), ([], {}), ([], set()), (["a", "b"], ["b", "a"]),
        (date(2020, 1, 1), datetime(2020, 1, 1)), (date(2020, 1, 1), "2020-01-01"),
        (Settings(1.0, 2), Other(1.0, 2)), (Settings(1.0, 2), Settings(1.0, 3)),
        (Settings(1.0, 2), {"tau": 1.0, "k": 2}),
        (Model(tau=1), Model(tau=2)), (Model(tau=1, names=["a"]), Model(tau=1)), ({"a": 1}, {"a": 1, "b": None}),
    ],
)  # fmt: skip
def test_what_differs(one: object, other: object) -> None:
    assert fingerprint(one) != fingerprint(other)


def test_what_is_the_same() -> None:
    assert fingerprint({3, 1, 2}) == fingerprint(frozenset([2, 3, 1]))
    assert fingerprint(Settings(0.5, 5)) == fingerprint(Settings(tau=0.5, k=5))
    assert fingerprint(Model(tau=1)) == fingerprint(Model(tau=1.0, names=[]))


def test_it_is_sixteen_hexadecimal_characters_and_the_same_in_every_process() -> None:
    assert fingerprint({"tau_s": 0.05, "k": 5}) == "ac380a4204480f53"


@pytest.mark.parametrize(
    "value",
    [
        Path("x"),
        object(),
        np.float32(1),
        np.int64(1),
        Colour.RED,
        Pair(1, 2),
        Mutable(1.0),
        Settings,
        len,
        iter([1]),
        1j,
    ],
    ids=lambda value: type(value).__name__,  # a repr may hold an address
)
def test_unknown_types_are_refused_at_any_depth(value: object) -> None:
    for nested in (value, [value], {"a": {"b": value}}, Settings(value, 1)):
        with pytest.raises(TypeError, match="no fingerprint for"):
            fingerprint(nested)
