"""A finished line of the pipeline, for what asks the model, and a warehouse of calls that a test made up."""

from pathlib import Path

import pytest

from tests.conftest import Once
from tests.explorer.hand_made_calls import made_up_warehouse
from tests.explorer.judged_conversations import judged_conversations
from tests.pipeline.conftest import finished, new_line

__all__ = ["database", "finished", "new_line", "traces"]


@pytest.fixture(scope="session")
def database(once: Once) -> Path:
    """Read by all, changed by none."""
    return once("hand_made", made_up_warehouse) / "warehouse.duckdb"


@pytest.fixture(scope="session")
def traces(once: Once) -> Path:
    """What `judge` wrote of conversations; read by all, changed by none."""
    return once("judged", judged_conversations) / "lake" / "traces.duckdb"
