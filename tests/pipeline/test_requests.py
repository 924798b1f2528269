"""What a lake in an object store costs in requests: it follows what changed, not how many shards there are."""

from collections.abc import Callable

import pytest

from tests.object_store import S3, s3, s3_running
from tests.pipeline.conftest import NewLine
from tests.worlds import write_shard

__all__ = ["s3", "s3_running"]  # fixtures

FIXED = 40
"""Requests of a run with nothing to do, at most, whatever the number of shards."""
PER_SHARD = 17
"""Requests of a first run for each shard of a lane (docs/costs.md)."""
PER_CHUNK = 6
"""The same for each chunk of its texts beyond one."""


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


def test_a_further_shard_costs_a_first_run_the_requests_that_the_documents_say(new_line: NewLine, s3: S3) -> None:
    made = []
    for shards in (2, 4):
        line = new_line(*(f"s{number}" for number in range(shards)))
        line.set(paths__lake=f"'{s3.new_place()}'", paths__cache=f"'{line.folder / f'copies {shards}'}'")
        s3.requests.clear()
        line.update()
        made.append(len(s3.requests))
    chunks = 3  # of the texts of a shard
    assert (made[1] - made[0]) / 2 == pytest.approx(PER_SHARD + PER_CHUNK * (chunks - 1), rel=0.1)
