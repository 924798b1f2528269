"""Same meaning, same fingerprint; any change, another one; unknown types refused; hashes of files remembered."""

import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from datetime import date, datetime
from enum import StrEnum
from hashlib import sha256
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

import numpy as np
import pytest
import time_machine
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel

from toolformer_dag.identity import (
    CLOCK_TICK_NS,
    REMEMBERED_MIN_BYTES,
    Hashes,
    file_hash,
    fingerprint,
    has_settled_times,
    remember_hashes,
)
from toolformer_dag.settings.sections import PathSettings

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
class Thresholds:
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
        (Thresholds(1.0, 2), Other(1.0, 2)), (Thresholds(1.0, 2), Thresholds(1.0, 3)),
        (Thresholds(1.0, 2), {"tau": 1.0, "k": 2}),
        (Model(tau=1), Model(tau=2)), (Model(tau=1, names=["a"]), Model(tau=1)), ({"a": 1}, {"a": 1, "b": None}),
    ],
)  # fmt: skip
def test_what_differs(one: object, other: object) -> None:
    assert fingerprint(one) != fingerprint(other)


def test_what_is_the_same() -> None:
    assert fingerprint({3, 1, 2}) == fingerprint(frozenset([2, 3, 1]))
    assert fingerprint(Thresholds(0.5, 5)) == fingerprint(Thresholds(tau=0.5, k=5))
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
        Thresholds,
        len,
        iter([1]),
        1j,
    ],
    ids=lambda value: type(value).__name__,  # a repr may hold an address
)
def test_unknown_types_are_refused_at_any_depth(value: object) -> None:
    for nested in (value, [value], {"a": {"b": value}}, Thresholds(value, 1)):
        with pytest.raises(TypeError, match="no fingerprint for"):
            fingerprint(nested)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Point the user's cache at an empty folder; return where hashes are remembered."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache/toolformer-dag/hashes"


def hash_elsewhere(file: Path) -> str:
    """Hash a file in another process."""
    script = "import sys; from pathlib import Path; from toolformer_dag.identity import file_hash as h; "
    command = [sys.executable, "-c", f"{script}print(h(Path(sys.argv[1])))", str(file)]
    return subprocess.run(command, capture_output=True, check=True, text=True).stdout.strip()


def remembered(cache: Path) -> list[dict[str, object]]:
    return [json.loads(file.read_text()) for file in cache.glob("*.json")]


def test_one_variable_moves_everything_that_is_cached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOOLFORMER_CACHE", str(tmp_path / "cache"))
    large = tmp_path / "large"
    large.write_bytes(b"a" * REMEMBERED_MIN_BYTES)
    time.sleep(2 * CLOCK_TICK_NS / 1e9)
    file_hash(large)
    assert len(remembered(tmp_path / "cache" / "hashes")) == 1
    copies = PathSettings(lake="s3://bucket/prefix").local_folder
    assert copies == tmp_path / "cache" / "lakes" / "s3" / "bucket" / "prefix"


@pytest.mark.parametrize("size", [10, REMEMBERED_MIN_BYTES])
def test_a_file_has_another_hash_exactly_when_its_content_changes(tmp_path: Path, cache: Path, size: int) -> None:
    one = tmp_path / "one"
    copy = tmp_path / "copy"
    one.write_bytes(b"a" * size)
    copy.write_bytes(b"a" * size)
    first = file_hash(one)
    assert len(first) == 16 and file_hash(copy) == first
    os.utime(one, (0, 0))
    assert file_hash(one) == first
    for number in range(30):  # faster than the clock of the file system
        one.write_bytes(bytes([number]) * size)
        assert file_hash(one) == sha256(one.read_bytes()).hexdigest()[:16]


def test_a_file_is_settled_once_a_later_write_must_change_its_times(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    status = file.stat()
    with time_machine.travel((status.st_ctime_ns + CLOCK_TICK_NS // 2) / 1e9, tick=False):
        assert not has_settled_times(status)
    with time_machine.travel((status.st_ctime_ns + 2 * CLOCK_TICK_NS) / 1e9, tick=False):
        assert has_settled_times(status)


def test_a_large_file_s_hash_is_remembered_for_other_processes_and_a_small_one_s_is_not(
    tmp_path: Path, cache: Path
) -> None:
    small = tmp_path / "small"
    large = tmp_path / "large"
    small.write_bytes(b"a" * (REMEMBERED_MIN_BYTES - 1))
    large.write_bytes(b"a" * REMEMBERED_MIN_BYTES)
    time.sleep(2 * CLOCK_TICK_NS / 1e9)
    file_hash(small)
    assert remembered(cache) == []
    known = file_hash(large)
    [entry] = remembered(cache)
    assert (entry["file"], entry["hash"]) == (str(large), known)
    [place] = cache.glob("*.json")
    place.write_text(json.dumps({**entry, "hash": "0123456789abcdef"}))
    assert hash_elsewhere(large) == known  # a flipped bit in the cache is no other file
    remember_hashes(large, Hashes("0123456789abcdef", entry["content"]))
    assert hash_elsewhere(large) == "0123456789abcdef"  # read from the cache, not from the file
    large.write_bytes(b"b" * REMEMBERED_MIN_BYTES)
    time.sleep(2 * CLOCK_TICK_NS / 1e9)
    assert hash_elsewhere(large) == file_hash(large) not in (known, "0123456789abcdef")


@pytest.mark.parametrize("content", ["", "{", "[]", "{}", '{"stamp": 1}'])
def test_a_damaged_cache_costs_time_alone(tmp_path: Path, cache: Path, content: str) -> None:
    large = tmp_path / "large"
    large.write_bytes(content.encode() + b"a" * REMEMBERED_MIN_BYTES)
    known = hash_elsewhere(large)
    [place] = cache.glob("*.json")
    place.write_text(content)
    assert file_hash(large) == known == remembered(cache)[0]["hash"]


def test_a_cache_that_cannot_be_written_costs_time_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "cache").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    large = tmp_path / "large"
    large.write_bytes(b"a" * REMEMBERED_MIN_BYTES)
    assert len(file_hash(large)) == 16
