"""The synthetic world, once for all tests of this folder."""

import pytest

from toolformer_dag.synthetic.world import World, get_world


@pytest.fixture(scope="session")
def world() -> World:
    return get_world()
