"""What a lake in an object store costs in requests: it follows what changed, not how many shards there are."""

import re
from collections.abc import Callable

import pytest

from tests.object_store import S3, s3, s3_running
from tests.pipeline.conftest import NewLine
from tests.worlds import write_shard
from toolformer_dag.cli.forecast import FIXED as FORECAST_FIXED
from toolformer_dag.cli.forecast import PER_CHUNK, PER_SHARD, forecast

__all__ = ["s3", "s3_running"]  # fixtures

FIXED = 40
"""Requests of a run with nothing to do, at most, whatever the number of shards."""
OWN = 70
"""Requests of a first update of all tables, without Dagster's steps, whatever the number of shards."""


@pytest.mark.parametrize("shards", [2, pytest.param(64, marks=pytest.mark.long)])
def test_requests_follow_what_changed(new_line: NewLine, s3: S3, shards: int) -> None:
    line = new_line(*(f"s{number}" for number in range(shards)))
    line.set(paths__lake=f"'{s3.new_place()}'", paths__cache=f"'{line.folder / 'copies'}'")

    def requests(act: Callable[[], object]) -> int:
        s3.requests.clear()
        act()
        return len(s3.requests)

    assert requests(line.update) <= FIXED + 60 * shards
    assert requests(line.update) <= FIXED
    line.set(tau_f=0.1)
    assert requests(line.update) <= FIXED + 4 * shards
    write_shard(line.web, "t")
    assert requests(line.update) <= min(400, FIXED + 120)
    assert requests(line.update) <= FIXED


def test_a_forecast_over_a_store_tells_its_requests_and_what_waiting_for_them_takes(new_line: NewLine, s3: S3) -> None:
    line, other = (new_line(*(f"s{number}" for number in range(2))) for _ in range(2))
    for one in (line, other):
        one.set(paths__lake=f"'{s3.new_place()}'", paths__cache=f"'{one.folder / 'copies'}'")
    told = next(row for row in forecast(line.plan()).splitlines() if row.startswith("Object store: "))
    found = re.fullmatch(
        rf"Object store: (\d+) requests \({PER_SHARD} per shard and lane, {PER_CHUNK} per further chunk of texts\), "
        r"\d:\d\d:\d\d at \d+ ms one by one",
        told,
    )
    assert found is not None, told
    s3.requests.clear()
    other.update()
    assert int(found[1]) - FORECAST_FIXED == pytest.approx(len(s3.requests) - OWN, rel=0.2)
