"""One run from shards to measurements."""


def test_everything_is_fresh_after_a_run_and_the_tables_are_there(world):
    assert world.stale() == []
    assert world.sql("select count(*) from documents") == [(12,)]
    assert world.sql("select count(*) from filtered_calls where delta < tau_f") == [(0,)]
    scored = dict(world.sql("select tool, count(*) from loss_deltas group by tool"))
    assert scored["calculator"] > 10 and scored["sums"] > 3
    assert {name for (name,) in world.sql("select distinct tool from funnel")} == {"calculator", "sums"}
    assert (world.folder / "lake/training/finetuned_checkpoint/model/model.safetensors").exists()
    assert world.run(training=True).assets == []
