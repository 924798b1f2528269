"""The world of `make soak`: it always holds texts out, and undisturbed it runs to its end, finetuning included."""

import gzip
import json
from pathlib import Path

import pytest

from benchmarks.soak import undisturbed
from benchmarks.worlds import World
from toolformer_dag.pipeline.merging import HELDOUT, split_of
from toolformer_dag.training.training_report import read_report


@pytest.mark.parametrize(("documents", "held"), [(1, 1), (14, 1), (100, 5)])
def test_a_world_of_any_size_holds_documents_out(documents: int, held: int, tmp_path: Path) -> None:
    world = World.make(tmp_path / "world", documents)
    shards = [gzip.decompress(shard.read_bytes()) for shard in world.files("shards, gzip")]
    pages = [json.loads(line) for shard in shards for line in shard.splitlines()]
    splits = [split_of(page["raw_content"]) for page in pages]
    assert (len(splits), splits.count(HELDOUT)) == (documents, held)


@pytest.mark.long
def test_the_undisturbed_run_of_the_soak_ends_with_a_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DAGSTER_HOME", "")  # restored afterwards: each world sets its own
    made, whole = undisturbed(tmp_path, documents=14)
    assert made.tokens > 0
    folders = {file.parent for file in whole.files("checkpoints")}
    assert folders and all(read_report(folder) for folder in folders)
