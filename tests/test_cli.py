"""The command line as a person meets it: what is printed, where, and the exit code."""

import csv
import json
import os
import shutil
import subprocess
import sys
from html import escape
from pathlib import Path

import duckdb
import markdown
import polars as pl
import pytest

from tests.command_line import cli
from toolformer_dag.synthetic import SMALL_MODEL

SETTINGS = Path(__file__).parents[1] / "toolformer.toml"
COMMANDS = ("run", "demo", "stale", "sql", "tool", "generate", "score", "clean", "ui")
LINE = {"text": "The total is 117 apples.", "offset": 12, "tool": "Calculator", "input": "94 + 23", "result": "117"}


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stand in a folder with the settings that come with the package."""
    shutil.copy2(SETTINGS, tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("TOOLFORMER_CONFIG", raising=False)
    monkeypatch.setenv("DAGSTER_HOME", str(tmp_path / "home"))


@pytest.mark.parametrize("command", COMMANDS)
def test_help_has_an_example(command):
    assert f"toolformer-dag {command}" in cli(command, "--help").stdout.split("Example:")[1]


def test_tool_prints_its_result():
    done = cli("tool", "calculator", "400 / 1400")
    assert (done.stdout, done.returncode) == ("0.29\n", 0)
    assert cli("tool", "Calculator", "27 + 4 * 2").stdout == "35\n"
    assert cli("tool", "calendar", "--context", "2023-01-30").stdout == "Today is Monday, January 30, 2023.\n"


def test_an_input_may_begin_with_a_minus():
    assert cli("tool", "calculator", "--", "-5 + 3").stdout == "-2\n"


def test_tool_without_a_result_says_why():
    done = cli("tool", "calculator", "1/0")
    assert done.returncode == 1
    assert "no result" in done.stderr
    assert done.stdout == ""


def test_tool_reads_a_line_per_input():
    done = cli("tool", "calculator", "-", stdin="1+1\nwords\n3*4\n")
    answers = [json.loads(line) for line in done.stdout.splitlines()]
    assert [answer["result"] for answer in answers] == ["2", None, "12"]
    assert answers[1]["reason"]


def test_unknown_tool_names_the_known_ones():
    done = cli("tool", "weather", "Rome")
    assert done.returncode == 1
    assert "'weather'" in done.stderr
    assert "calculator (Calculator)" in done.stderr
    assert "Traceback" not in done.stderr


def test_sql_without_a_warehouse_says_what_makes_one():
    done = cli("sql", "from funnel")
    assert done.returncode == 1
    assert "toolformer-dag run" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_file_in_place_of_a_folder_is_named(tmp_path, monkeypatch):
    (tmp_path / "taken").touch()
    monkeypatch.setenv("DAGSTER_HOME", str(tmp_path / "taken"))
    done = cli("stale")
    assert done.returncode == 1
    assert f"error: {tmp_path / 'taken'} is a file; set DAGSTER_HOME to a folder" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_disk_without_room_is_named_and_leaves_nothing_half(tmp_path, monkeypatch):
    monkeypatch.setenv("DAGSTER_HOME", str(tmp_path / "home"))
    limited = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0)); from toolformer_dag.cli import app"
    done = subprocess.run([sys.executable, "-c", f"{limited}; app()", "stale"], capture_output=True, text=True)
    assert done.returncode == 1
    assert "dagster.yaml: File too large; free space" in done.stderr and "Traceback" not in done.stderr
    assert [path.name for path in (tmp_path / "home").iterdir()] == ["instance.lock"]


def test_sql_writes_lists_and_structs_as_json_text_into_csv(tmp_path):
    duckdb.connect(tmp_path / "lake.duckdb").close()
    (tmp_path / "toolformer.toml").write_text("[paths]\nwarehouse = 'lake.duckdb'\n")
    query = "select 1 as n, ['é', null] as l, [{'d': date '2023-01-30'}] as s, null::int[] as e"
    done = cli("sql", query, "--format", "csv")
    assert list(csv.reader(done.stdout.splitlines())) == [
        ["n", "l", "s", "e"],
        ["1", '["é", null]', '[{"d": "2023-01-30"}]', ""],
    ]


@pytest.mark.parametrize("format", ["csv", "json"])
def test_sql_says_what_cannot_be_written_in_a_format(tmp_path, format):
    (tmp_path / "lake").mkdir()
    duckdb.connect(tmp_path / "lake" / "toolformer.duckdb").close()
    done = cli("sql", "select map {[1]: 2} as m", "--format", format)
    assert done.returncode == 1
    assert f"without a place in {format}" in done.stderr and "::VARCHAR" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.fixture
def database(tmp_path):
    """A warehouse without our tables."""
    duckdb.connect(tmp_path / "lake.duckdb").close()
    (tmp_path / "toolformer.toml").write_text("[paths]\nwarehouse = 'lake.duckdb'\n")


def test_sql_reads_its_query_from_a_file_or_the_standard_input(tmp_path, database):
    query = "-- with a comment\nselect 'é' as letter,\n       1 as n\n"
    (tmp_path / "q.sql").write_bytes(b"\xef\xbb\xbf" + query.encode())
    printed = "letter,n\né,1\n"
    assert cli("sql", "--file", "q.sql", "--format", "csv").stdout == printed
    assert cli("sql", "-", "--format", "csv", stdin=query).stdout == printed


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ((), "give one query"),
        (("select 1", "--file", "q.sql"), "give one query"),
        (("--file", "gone.sql"), "gone.sql: No such file"),
        (("--file", "latin.sql"), "latin.sql: is no text in UTF-8"),
        (("select 1", "--output", "rows.xlsx"), "rows.xlsx: the ending decides the format"),
        (("create table t (n int)", "--output", "rows.csv"), "only one read-only query"),
        (("select 1", "--output", "taken/rows.csv"), "taken"),
    ],
)
def test_sql_says_what_is_wrong_with_its_query_or_its_file(tmp_path, database, arguments, told):
    (tmp_path / "latin.sql").write_bytes("select 'é'".encode("latin-1"))
    (tmp_path / "taken").touch()
    done = cli("sql", *arguments)
    assert done.returncode == 1 and told in done.stderr and "Traceback" not in done.stderr
    assert not list(tmp_path.glob("rows.*")) and not list(tmp_path.glob(".tmp-*"))


def test_sql_writes_its_rows_to_a_file_whose_ending_is_the_format(tmp_path, database):
    hostile = "<img src=x> ![i](http://e.org) | `a` [b](c)\nd"
    query = f"select 1 as n, '{hostile}' as text, [1.5::double, null] as l, null as e from range(2)"
    for ending in ("csv", "json", "jsonl", "md", "parquet"):
        (tmp_path / f"rows.{ending}").write_text("what was there before")
        done = cli("sql", query, "--output", f"rows.{ending}")
        assert (done.returncode, done.stdout) == (0, "") and f"2 rows in rows.{ending}" in done.stderr
    row = {"n": 1, "text": hostile, "l": [1.5, None], "e": None}
    assert json.loads((tmp_path / "rows.json").read_text()) == [row, row]
    assert [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()] == [row, row]
    assert pl.read_parquet(tmp_path / "rows.parquet").to_dicts() == [row, row]
    with (tmp_path / "rows.csv").open(newline="") as stream:
        assert next(csv.DictReader(stream)) == {"n": "1", "text": hostile, "l": "[1.5, null]", "e": ""}
    head, rule, first, second = (tmp_path / "rows.md").read_text().splitlines()
    assert (head, rule, first) == ("| n | text | l | e |", "| ---: | --- | --- | --- |", second)
    shown = markdown.markdown("\n".join((head, rule, first)), extensions=["tables"])
    assert f"<td>{escape(hostile.replace(chr(10), ' '), quote=False)}</td>" in shown


def test_sql_and_clean_look_where_the_settings_of_the_command_line_point(tmp_path):
    (tmp_path / "mine").mkdir()
    duckdb.connect(tmp_path / "mine" / "toolformer.duckdb").close()
    (tmp_path / "toolformer.toml").write_text("[profiles.mine.paths]\nlake = 'mine'\n")
    for options in (("--set", "paths.lake='mine'"), ("--profile", "mine")):
        assert cli("sql", "select 1 as n", "--format", "csv", *options).stdout == "n\n1\n"
    left = f".tmp-{'0' * 32}"
    (tmp_path / "mine" / left).touch()
    done = cli("clean", "--grace-hours", "0", "--dry-run", "--profile", "mine")
    assert left in done.stdout


def test_a_warehouse_that_would_replace_another_file_is_refused_before_anything_runs(tmp_path):
    before = (tmp_path / "toolformer.toml").read_bytes()
    done = cli("stale", "--run", "--set", "paths.warehouse=toolformer.toml")
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert "paths.warehouse: " in done.stderr and "toolformer.toml is no DuckDB file" in done.stderr
    assert (tmp_path / "toolformer.toml").read_bytes() == before and not (tmp_path / "lake").exists()


@pytest.mark.parametrize("hours", ["nan", "-5", "inf", "1e20"])
def test_clean_refuses_hours_that_are_none(hours):
    done = cli("clean", "--grace-hours", hours)
    assert done.returncode == 1
    assert "--grace-hours" in done.stderr and "write hours from 0 to" in done.stderr
    assert "Traceback" not in done.stderr


def test_score_prints_the_losses_and_names_bad_lines():
    bad_offset = LINE | {"offset": 2}
    missing = {key: value for key, value in LINE.items() if key != "tool"}
    broken, empty = LINE | {"text": "half a \ud83d"}, LINE | {"text": "", "offset": 0}
    bad = [json.dumps(line) for line in (bad_offset, missing, broken, empty)]
    lines = "\n".join([json.dumps(LINE), *bad, "{", ""])
    done = cli("score", "-", "--model", str(SMALL_MODEL), "--dtype", "float32", stdin=lines)
    [scored] = [json.loads(line) for line in done.stdout.splitlines()]
    assert done.returncode == 1
    assert scored["loss_minus"] == min(scored["loss_empty"], scored["loss_call"])
    assert scored["delta"] == pytest.approx(scored["loss_minus"] - scored["loss_plus"])
    assert {key: scored[key] for key in LINE} == LINE
    assert "line 2: no token begins at character 2; the nearest token boundary is" in done.stderr
    assert "line 3: field 'tool'" in done.stderr
    assert "line 4: not JSON" in done.stderr
    assert "line 5: the text is empty" in done.stderr
    assert "line 6: not JSON" in done.stderr


def test_folder_that_is_no_model_is_named(tmp_path):
    done = cli("score", "-", "--model", str(tmp_path), stdin=json.dumps(LINE))
    assert done.returncode == 1
    assert str(tmp_path) in done.stderr
    assert "Traceback" not in done.stderr


def test_generate_goes_on_from_the_text():
    prompt = "Ada had 17 apples and got 25 more, so in total there were"
    done = cli("generate", prompt, "--model", str(SMALL_MODEL), "--max-new-tokens", "4", "--disabled")
    assert done.returncode == 0
    assert done.stdout.startswith(prompt)
    assert "[" not in done.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("is", "--k", "-1"), "'--k'"),
        (("is", "--max-new-tokens", "0"), "'--max-new-tokens'"),
        ((os.fsdecode(b"caf\xe9"),), "no valid UTF-8"),
    ],
)
def test_generate_refuses_what_cannot_be(arguments, message):
    done = cli("generate", *arguments)
    assert done.returncode != 0
    assert message in done.stderr and "Traceback" not in done.stderr


def test_generate_says_why_nothing_was_written_and_why_a_call_has_no_result():
    done = cli("generate", "word " * 3000, "--model", str(SMALL_MODEL))
    assert done.returncode == 1
    assert "does_not_fit: the text fills the model's context" in done.stderr and done.stdout == ""
    done = cli("generate", "The house is", "--k", "2048", "--model", str(SMALL_MODEL))
    assert done.returncode == 0
    assert done.stdout.startswith("The house is [") and "has no result: " in done.stderr


def test_unknown_setting_is_refused_with_the_remedy():
    done = cli("stale", "--set", "tools.calculator.tauf=0.8")
    assert done.returncode == 1
    assert "tau_f" in done.stderr
