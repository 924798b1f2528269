"""A line with other shards, while a run of the first one goes on."""

import pytest

from resources.held_partitions import ShardsInUse, held_partitions

ONE = "corpus.shards=['web/one*']"


def test_asking_changes_no_list_and_running_is_refused(world):
    line, other = world.line(), world.line(ONE)
    with held_partitions(line.instance, line.shards):
        assert list(map(str, other.stale())) == ["ccnet/shard_list"]
        with pytest.raises(ShardsInUse, match="a run over one, two is going on, this one wants one;"):
            other.bring_up_to_date(training=False)
        assert sorted(line.instance.get_dynamic_partitions("shards")) == ["one", "two"]
    assert line.stale() == []
    assert world.run(ONE).spent.tokens == 0
    assert world.sql("select distinct shard from loss_deltas") == [("one",)]
    back = world.run()
    assert (back.spent.tokens, back.spent.calls) == (0, 0)
    assert len(world.sql("select distinct shard from loss_deltas")) == 2
