"""A world for exports: two lanes and enough sums that texts have calls of both."""

import shutil
from pathlib import Path

import pytest

from tests.runs.conftest import World, new_world
from tests.worlds import make_model, write_shard
from toolformer_dag.pipeline.plan import Plan

SHARDS = 2


@pytest.fixture(scope="session")
def exported_world(tmp_path_factory: pytest.TempPathFactory) -> World:
    """A world in which everything but training ran once. Not to be changed."""
    world = new_world(tmp_path_factory.mktemp("exports"), make_model(tmp_path_factory.mktemp("model") / "a"))
    for number in range(SHARDS):
        write_shard(world.folder / "web", f"more_{number}")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DAGSTER_HOME", str(world.folder / ".dagster"))
        world.run()
    return world


@pytest.fixture(scope="session")
def plan(exported_world: World) -> Plan:
    return Plan.of(exported_world.settings())


@pytest.fixture
def own_world(exported_world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    """A copy, to be changed."""
    shutil.copytree(exported_world.folder, tmp_path / "world")
    monkeypatch.setenv("DAGSTER_HOME", str(tmp_path / "world" / ".dagster"))
    return World(tmp_path / "world")


@pytest.fixture(autouse=True)
def offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`datasets` neither asks the hub nor keeps anything in the home folder."""
    import datasets

    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "datasets")
