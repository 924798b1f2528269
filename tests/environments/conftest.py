"""What tests of other environments need."""

import sys
from pathlib import Path

import pytest

from tests.environments.environment import call


@pytest.fixture
def registry(tmp_path: Path) -> None:
    """Skip where packages cannot be installed."""
    asked = call(sys.executable, "-m", "pip", "download", "--no-deps", "--dest", str(tmp_path), "six", cwd=tmp_path)
    if asked.returncode != 0:
        pytest.skip("no package registry answers")
