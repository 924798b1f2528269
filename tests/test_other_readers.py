"""Other programs read the warehouse as docs/howto/ask-in-sql.md says, while it is replaced."""

import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import nbclient
import nbformat
import pandas as pd
import polars as pl
import pyarrow as pa
import pytest

from tests.test_docs import FENCE, ROOT, generator
from toolformer_dag.lake.warehouse import build
from toolformer_dag.pipeline.plan import Plan
from toolformer_dag.pipeline.stages import table_outputs, warehouse_tables
from toolformer_dag.settings.settings_file import load_settings

PAGE = (ROOT / "docs" / "howto" / "ask-in-sql.md").read_text("utf-8")
[PYTHON] = (block for language, block in FENCE.findall(PAGE) if language == "python")
[DUCKDB] = re.findall(r"^\.venv/bin/duckdb (.*) \"(.*)\"$", PAGE, re.MULTILINE)


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a warehouse of no rows in lake/."""
    generator().empty_warehouse(tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@contextmanager
def rebuilt(project: Path) -> Iterator[list[int]]:
    """Build the warehouse again and again inside the block; the list grows with every build."""
    plan = Plan.of(load_settings(project / "toolformer.toml", environment={}))
    tables, lanes = warehouse_tables(table_outputs(plan)), plan.lane_names
    ended, built = threading.Event(), list[int]()

    def work() -> None:
        while not ended.is_set():
            build(plan.lake, tables, lanes, plan.settings.paths.warehouse)
            built.append(1)

    builder = threading.Thread(target=work)
    builder.start()
    try:
        yield built
    finally:
        ended.set()
        builder.join()


def test_pandas_polars_and_arrow_read_the_file_while_it_is_replaced(project: Path) -> None:
    with rebuilt(project) as built:
        reads = 0
        while len(built) < 3 or reads < 5:
            found: dict[str, Any] = {}
            exec(PYTHON, found)
            reads += 1
    kinds = {"frame": pd.DataFrame, "polars": pl.DataFrame, "arrow": pa.Table}
    for name, kind in kinds.items():
        assert isinstance(found[name], kind)
        columns = found[name].column_names if kind is pa.Table else list(found[name].columns)
        assert columns == ["tool", "input", "result", "delta"]


def test_the_command_line_of_duckdb_reads_the_file(project: Path) -> None:
    duckdb = Path(sys.executable).with_name("duckdb")  # of another version than the module
    options, query = DUCKDB
    with rebuilt(project) as built:
        while len(built) < 2:
            done = subprocess.run([duckdb, *options.split(), query], capture_output=True, text=True)
            assert done.returncode == 0 and "examples" in done.stdout, done.stderr


@pytest.mark.long
def test_a_notebook_runs_the_lines_of_the_page(project: Path) -> None:
    cells = [nbformat.v4.new_code_cell(f"{PYTHON}\nframe.columns.tolist()")]
    with rebuilt(project):
        notebook = nbclient.execute(nbformat.v4.new_notebook(cells=cells), cwd=str(project))
    assert "'delta'" in str(notebook.cells[0].outputs)
