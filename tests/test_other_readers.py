"""Other programs read the warehouse as docs/howto/ask-in-sql.md says."""

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pandas as pd
import polars as pl
import pyarrow as pa
import pytest

from tests.test_docs import FENCE, ROOT, generator

PAGE = (ROOT / "docs" / "howto" / "ask-in-sql.md").read_text("utf-8")
[PYTHON] = (block for language, block in FENCE.findall(PAGE) if language == "python")
[DUCKDB] = re.findall(r"^\.venv/bin/duckdb (.*) \"(.*)\"$", PAGE, re.MULTILINE)


@pytest.fixture(autouse=True)
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stand in a folder with a warehouse of no rows in lake/."""
    generator().empty_warehouse(tmp_path)
    monkeypatch.chdir(tmp_path)


def test_pandas_polars_and_arrow_read_the_file() -> None:
    found: dict[str, Any] = {}
    exec(PYTHON, found)
    kinds = {"frame": pd.DataFrame, "polars": pl.DataFrame, "arrow": pa.Table}
    for name, kind in kinds.items():
        assert isinstance(found[name], kind)
        columns = found[name].column_names if kind is pa.Table else list(found[name].columns)
        assert columns == ["tool", "input", "result", "delta"]


def test_the_command_line_of_duckdb_reads_the_file() -> None:
    duckdb = Path(sys.executable).with_name("duckdb")  # of another version than the module
    options, query = DUCKDB
    done = subprocess.run([duckdb, *options.split(), query], capture_output=True, text=True)
    assert done.returncode == 0 and "examples" in done.stdout, done.stderr
