"""The prompt of `sql`, with keys as a person presses them."""

import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path

import duckdb
import pytest
from prompt_toolkit.application import create_app_session
from prompt_toolkit.completion import CompleteEvent
from prompt_toolkit.document import Document
from prompt_toolkit.input import create_pipe_input
from prompt_toolkit.output import DummyOutput

from toolformer_dag.cli.sql_prompt import MAX_SHOWN_ROWS, build_name_completer, print_query_rows, run_query_prompt
from toolformer_dag.lake.warehouse import WarehouseError

CTRL_C = "\x03"
CTRL_D = "\x04"
UP = "\x1b[A"


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the history is kept."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return tmp_path / "state"


@pytest.fixture
def database(tmp_path: Path) -> Path:
    """A file with a table, a view and a macro."""
    with duckdb.connect(tmp_path / "lake.duckdb") as connection:
        connection.execute("create table numbers as select range as distance from range(1000)")
        connection.execute("create view largest as select max(distance) as distance from numbers")
        connection.execute("create macro doubled_at(n) as 2 * n")
    return tmp_path / "lake.duckdb"


@pytest.fixture
def typed(database: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[list[str], str]]:
    """Return what is printed below the greeting, and what of mistakes, for the keys that were pressed."""

    def press(*keys: str) -> tuple[list[str], str]:
        with create_pipe_input() as pipe, create_app_session(input=pipe, output=DummyOutput()):
            pipe.send_text("".join(keys))
            run_query_prompt(database, "csv")
        told = capsys.readouterr()
        return told.out.splitlines()[2:], told.err

    return press


def test_a_query_goes_on_over_lines_until_its_semicolon(typed: Callable[..., tuple[list[str], str]]) -> None:
    out, mistakes = typed("select 1 as one,\r", "2 as two\r", ";\r", "from largest;\r", "exit\r")
    assert (out, mistakes) == (["one,two", "1,2", "distance", "999"], "")


def test_ctrl_c_ends_a_query_and_not_the_prompt(typed: Callable[..., tuple[list[str], str]]) -> None:
    pressing = threading.Timer(1.5, os.kill, (os.getpid(), signal.SIGINT))
    pressing.start()
    endless = "select sum(a.range * b.range) from range(10000000) a, range(10000000) b;\r"
    assert typed(endless, "from largest;\r", "exit\r") == (["distance", "999"], "")


def test_a_mistake_and_a_dropped_line_do_not_end_the_prompt(typed: Callable[..., tuple[list[str], str]]) -> None:
    out, mistakes = typed("from nowhere;\r", "drop table numbers;\r", "from num", CTRL_C, "from largest;\r", CTRL_D)
    assert out == ["distance", "999"]
    assert "nowhere" in mistakes and "only one read-only query" in mistakes and "Traceback" not in mistakes


def test_the_history_is_kept_for_the_next_prompt(typed: Callable[..., tuple[list[str], str]], state: Path) -> None:
    typed("select 1 as one;\r", CTRL_D)
    [history] = (path for path in state.rglob("sql_history"))
    assert history.stat().st_mode & 0o077 == 0
    assert typed(UP, "\r", CTRL_D)[0] == ["one", "1"]


def test_a_history_that_cannot_be_written_is_done_without(
    typed: Callable[..., tuple[list[str], str]], state: Path
) -> None:
    state.write_text("a file in place of the folder")
    assert typed("select 1 as one;\r", CTRL_D) == (["one", "1"], "")


def test_a_table_says_how_many_rows_there_are(database: Path, capsys: pytest.CaptureFixture[str]) -> None:
    print_query_rows(database, "from numbers", "table")
    out = capsys.readouterr().out
    assert (
        f"1,000 rows, the first {MAX_SHOWN_ROWS} shown" in out and str(MAX_SHOWN_ROWS - 1) in out and "999" not in out
    )


def offered(database: Path, text: str) -> dict[str, str]:
    found = build_name_completer(database).get_completions(Document(text), CompleteEvent())
    return {one.text: one.display_meta_text for one in found}


def test_names_of_the_file_and_saved_queries_are_completed(database: Path, tmp_path: Path) -> None:
    assert offered(database, "select dis") == {"distance": "column of largest, numbers", "distinct": ""}
    assert offered(database, "from LARG") == {"largest": "view"}
    assert offered(database, "select doub") == {"doubled_at(": "macro"}
    assert offered(database, "most") == {"most_helpful": "saved query"}
    with duckdb.connect(tmp_path / "new.duckdb") as connection:
        connection.execute("create table larger (n int)")
    (tmp_path / "new.duckdb").replace(database)
    assert offered(database, "from larg") == {"larger": "table"}


def test_a_prompt_without_a_warehouse_says_what_makes_one(tmp_path: Path) -> None:
    with pytest.raises(WarehouseError, match="toolformer-dag run"):
        run_query_prompt(tmp_path / "gone.duckdb", "table")
