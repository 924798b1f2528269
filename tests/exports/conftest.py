"""A world for exports: two lanes and enough sums that texts have calls of both."""

import shutil
from pathlib import Path

import pytest

from tests.conftest import Once
from tests.runs.conftest import World
from tests.worlds import lay_out, write_shard
from toolformer_dag.computing.plan import Plan


@pytest.fixture(scope="session")
def exported_world(once: Once, model: Path) -> World:
    """A world in which everything ran once, training and evaluation too. Not to be changed."""

    def run(folder: Path) -> None:
        world = World(lay_out(folder, model))
        world.edit("[training]", '[export]\nmodel_license = "apache-2.0"\n[training]')
        for number in range(2):
            write_shard(folder / "web", f"more_{number}")
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("DAGSTER_HOME", str(folder / ".dagster"))
            world.run(training=True)

    return World(once("made-exports", run))


@pytest.fixture(scope="session")
def plan(exported_world: World) -> Plan:
    return Plan.from_settings(exported_world.settings())


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
