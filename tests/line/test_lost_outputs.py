"""What a power loss or a person took away is reported, and made again without being paid for."""

import shutil

from resources.spent import Spent


def test_files_cut_short_or_removed_are_found_and_mended(world):
    before = world.tables()
    lake = world.folder / "lake"
    [part] = (lake / "calculator/loss_deltas/parts/one").iterdir()
    part.write_bytes(part.read_bytes()[:-20])
    (lake / "sums/scored_candidates/two.json").write_text("{")
    (lake / "toolformer.duckdb").unlink()
    line = world.line()
    reasons = {str(asset): line.why(asset)[-1] for asset in line.stale()}
    assert reasons.keys() == {"calculator/loss_deltas[one]", "sums/scored_candidates[two]", "warehouse/loss_deltas"}
    assert part.name in reasons["calculator/loss_deltas[one]"]
    assert "is gone" in reasons["warehouse/loss_deltas"]
    ran = world.run()
    assert set(ran.assets) == reasons.keys()
    assert ran.spent == Spent(tokens=0, calls=0)
    assert all(table.equals(before[name]) for name, table in world.tables().items())


def test_rows_that_were_paid_for_and_cut_short_are_computed_again(world):
    before = world.tables()
    lake = world.folder / "lake"
    for part in (lake / "calculator/losses").glob("*/*.parquet"):
        part.write_bytes(part.read_bytes()[: part.stat().st_size // 2])
    shutil.rmtree(lake / "calculator/loss_deltas")
    assert world.run().spent.tokens > 0
    assert world.tables()["calculator/loss_deltas[one]"].equals(before["calculator/loss_deltas[one]"])
