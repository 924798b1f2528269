"""A finished line of the pipeline, for what asks the model, and a warehouse of calls that a test made up."""

from pathlib import Path

import pytest

from tests.conftest import Once
from tests.explorer.hand_made_calls import made_up_warehouse
from tests.pipeline.conftest import finished, new_line

__all__ = ["database", "finished", "new_line"]


@pytest.fixture(scope="session")
def database(once: Once) -> Path:
    """Read by all, changed by none."""
    return once("hand_made", made_up_warehouse) / "warehouse.duckdb"
