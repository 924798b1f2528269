"""The command line as a person meets it: what is printed, where, and the exit code."""

import csv
import errno
import json
import os
import pty
import re
import resource
import shutil
import subprocess
import sys
import time
from contextlib import redirect_stdout, suppress
from html import escape
from pathlib import Path
from random import Random
from types import ModuleType

import duckdb
import markdown
import polars as pl
import pytest

from tests.command_line import cli
from tests.damage import flip
from toolformer_dag.assets.running import Step
from toolformer_dag.cli import app
from toolformer_dag.cli.query_results import format_rows_as_table
from toolformer_dag.cli.run_display import show_steps
from toolformer_dag.cli.terminal import add_config_option, load_command_settings
from toolformer_dag.computing.plan import Plan
from toolformer_dag.files import UserError, require_threads, seal_record
from toolformer_dag.settings.sections import Settings
from toolformer_dag.synthetic import SMALL_MODEL_FOLDER
from toolformer_dag.tools.built_in.calculator import Calculator
from toolformer_dag.tools.tool import ToolResult

SETTINGS = Path(__file__).parents[1] / "toolformer.toml"
COMMANDS = ("run", "demo", "stale", "sql", "export", "tool", "generate", "score", "clean", "verify", "ui")
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


@pytest.mark.parametrize("command", ["stale", "tables", "clean", "verify"])
def test_a_folder_without_a_project_is_told_once_with_what_to_do(tmp_path, monkeypatch, command):
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    told = cli(command).stderr.splitlines()
    assert (
        told[0].startswith(f"There is no toolformer.toml in {tmp_path / 'elsewhere'}: the demo's web")
        and told[0].count("`toolformer-dag init FOLDER`") == 1
    )
    assert sum("toolformer.toml" in line for line in told) == 1
    for options in (["--config", str(tmp_path / "toolformer.toml")], ["--profile", "embedded"]):
        assert "no toolformer.toml" not in cli(command, *options).stderr


def test_judge_which_needs_no_project_says_nothing_of_one(tmp_path, monkeypatch):
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    done = cli("judge", "talks.jsonl")
    assert done.returncode == 1 and "talks.jsonl" in done.stderr
    assert "no toolformer.toml" not in done.stderr


def test_a_command_in_a_message_names_the_settings_file_that_was_given(tmp_path):
    file = tmp_path / "my settings.toml"
    shutil.copy2(SETTINGS, file)
    question = ("sql", "select 1 from documents")
    assert "run `toolformer-dag run`, or" in cli(*question).stderr
    assert f"run `toolformer-dag run --config '{file}'`, or" in cli(*question, "--config", str(file)).stderr


@pytest.mark.parametrize(
    ("message", "told"),
    [
        ("run `toolformer-dag stale --run`", "run `toolformer-dag stale --config a.toml --run`"),
        ("`toolformer-dag sql --config b.toml x`; it ends", "`toolformer-dag sql --config b.toml x`; it ends"),
        ("`toolformer-dag init FOLDER`", "`toolformer-dag init FOLDER`"),
        ("make it by toolformer-dag run", "make it by toolformer-dag run --config a.toml"),
    ],
)
def test_of_the_commands_in_a_message_those_without_a_settings_file_get_one(message, told):
    load_command_settings(None, None, None)
    assert add_config_option(message) == message
    shutil.copy2(SETTINGS, "a.toml")
    load_command_settings(Path("a.toml"), None, None)
    assert add_config_option(message) == told


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["init", "~/mine"], "{home}/mine"),
        (["embedded", "web", "~/mine", "--documents", "2"], "{home}/mine"),
        (["sql", "--file=~/q.sql"], "--file {home}/q.sql: No such file"),
        (["sql", "select 1 as one", "--output=~/rows.csv"], "1 rows in {home}/rows.csv"),
        (["sql", "select 1 as one", "--output=~/rows.parquet"], "1 rows in {home}/rows.parquet"),
        (["score", "~/s.jsonl"], "{home}/s.jsonl: no such file"),
        (["generate", "~/s.jsonl"], "s.jsonl: no such file"),
        (["verify", "~/data"], "{home}/data holds none"),
        (["stale", "--config=~/t.toml"], "{home}/t.toml: no such file"),
        (["stale", "--shards", "~/*.jsonl"], "{home}/*.jsonl' matches no file"),
        (["init", "~nobody_of_that_name/x"], "~nobody_of_that_name/x: "),
        (["generate", "is", "--model", "~nobody_of_that_name/x"], "~nobody_of_that_name/x: "),
        (["judge", "~nobody_of_that_name/x", "--model", "embedded"], "~nobody_of_that_name/x: "),
        (["generate", "~/lines.txt", "--model", "embedded"], "line 1: not JSON"),
    ],
)
def test_a_tilde_is_the_home_folder_wherever_a_path_is_given(tmp_path, monkeypatch, database, arguments, told):
    home = tmp_path / "ada"
    home.mkdir()
    (home / "lines.txt").write_text("no JSON\n")
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setattr(sys, "path", list(sys.path))
    done = cli(*arguments)
    assert told.format(home=home) in done.stdout + done.stderr, done
    assert not list(tmp_path.glob("~*"))


@pytest.fixture
def database(tmp_path):
    """A warehouse without our tables."""
    duckdb.connect(tmp_path / "lake.duckdb").close()
    (tmp_path / "toolformer.toml").write_text("[paths]\nwarehouse = 'lake.duckdb'\n")


MODEL = ("--model", str(SMALL_MODEL_FOLDER))
REFUSED = [
    (("tool", "calculator", "1/0"), "", "no result"),
    (("tool", "weather", "Rome"), "", "'weather'.*calculator \\(Calculator\\)"),
    (("tool", "calculator", "-"), "1+1\n\udcff\n", "line 2: is no text in UTF-8"),
    (("sql", "from funnel", "--set", "paths.warehouse=gone.duckdb"), "", "toolformer-dag run"),
    (("sql",), "", "give one query"),
    (("sql", "select 1", "--file", "q.sql"), "", "give one query"),
    (("sql", "most_helpfull"), "", "no saved query 'most_helpfull'; there are "),
    (("sql", "--file", "gone.sql"), "", "gone.sql: No such file"),
    (("sql", "--file", "latin.sql"), "", "latin.sql: is no text in UTF-8"),
    (("sql", "select '\udce9'"), "", "the query: is no text in UTF-8"),
    (("sql", "select 1", "--output", "rows.xlsx"), "", "rows.xlsx: the ending decides the format"),
    (("sql", "create table t (n int)", "--output", "rows.csv"), "", "only one read-only query"),
    (("sql", "select 1", "--output", "taken/rows.csv"), "", "taken"),
    (("sql", "select map {[1]: 2} as m", "--format", "csv"), "", "without a place in csv.*::VARCHAR"),
    (("sql", "select map {[1]: 2} as m", "--format", "json"), "", "without a place in json.*::VARCHAR"),
    (("tables", "--format", "csv"), "", "every table has columns of its own; name one"),
    (("tables", "9", "--format", "parquet"), "", "--output FILE.parquet"),
    (("tables", "11"), "", "there is no table '11'"),
    *((("clean", "--grace-hours", hours), "", "write hours from 0 to") for hours in ("nan", "-5", "inf", "1e20")),
    (("score", "-", "--model", "."), json.dumps(LINE), "'\\.'"),
    (("generate", "is", "--k", "-1"), "", "'--k'"),
    (("generate", "is", "--max-new-tokens", "0"), "", "'--max-new-tokens'"),
    (("generate", os.fsdecode(b"caf\xe9")), "", "the text: is no text in UTF-8"),
    (("generate", "Today is", "--context", "30/1/2023"), "", "--context '30/1/2023' is no date; write year, month"),
    (("generate", "is", "--model", "/nowhere/model"), "", "model folder '/nowhere/model' does not exist"),
    (("generate", "word " * 3000, *MODEL), "", "does_not_fit: the text fills the model's context"),
    (("generate", "-", *MODEL), '{"text": "is", "context": "soon"}', "line 1: context 'soon' is no date"),
    (("generate", "gone.jsonl"), "", "gone.jsonl: no such file"),
    (("generate", "text", "--model", "Toolformer"), "", "no finished checkpoint; make it by toolformer-dag run"),
    (("generate", "text", "--model", "nosuch"), "", "no folder 'nosuch', and the hub does not give a model of that"),
]


@pytest.mark.parametrize(("arguments", "stdin", "told"), REFUSED)
def test_what_cannot_be_is_refused_with_its_reason(tmp_path, monkeypatch, database, arguments, stdin, told):
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")  # nothing listens there
    (tmp_path / "latin.sql").write_bytes("select 'é'".encode("latin-1"))
    (tmp_path / "taken").touch()
    done = cli(*arguments, stdin=stdin)
    assert done.returncode != 0 and done.stdout == ""
    assert re.search(told, done.stderr, re.DOTALL) and not re.search("Traceback|Retrying", done.stderr)
    assert not list(tmp_path.glob("rows.*")) and not list(tmp_path.glob(".tmp-*"))


def test_a_disk_without_room_is_named_and_leaves_nothing_half(tmp_path, monkeypatch):
    monkeypatch.setenv("DAGSTER_HOME", str(tmp_path / "home"))
    limited = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0)); from toolformer_dag.cli import app"
    done = subprocess.run([sys.executable, "-c", f"{limited}; app()", "stale", "--run"], capture_output=True, text=True)
    assert done.returncode == 1
    assert "dagster.yaml: File too large; free space" in done.stderr and "Traceback" not in done.stderr
    assert [path.name for path in (tmp_path / "home").iterdir()] == ["instance.lock"]


def test_sql_that_is_terminated_leaves_nothing_on_the_disk(tmp_path, database):
    command = ["sql", "select * from range(100000000) order by hash(range)", "--set", "execution.query_gib=0.2"]
    with subprocess.Popen([sys.executable, "-m", "toolformer_dag.cli", *command]) as process:
        while not list(tmp_path.glob(".tmp-*/*")):
            assert process.poll() is None
            time.sleep(0.01)
        process.terminate()
    assert process.returncode == 130
    assert not list(tmp_path.glob(".tmp-*"))


def test_sql_reads_its_query_from_a_file_or_the_standard_input(tmp_path, database):
    query = "-- with a comment\nselect 'é' as letter,\n       1 as n\n"
    (tmp_path / "q.sql").write_bytes(b"\xef\xbb\xbf" + query.encode())
    printed = "letter,n\né,1\n"
    assert cli("sql", "describe", "--format", "csv").stdout.startswith("name,kind,comment\n")
    assert cli("sql", "--file", "q.sql", "--format", "csv").stdout == printed
    assert cli("sql", "-", "--format", "csv", stdin=query).stdout == printed


@pytest.mark.parametrize("query", ["-- kept calls\nselect 1 as n", "--kept\nselect 1 as n", "--\nselect 1 as n"])
def test_a_query_may_begin_with_a_comment(tmp_path, database, query):
    for arguments in ((query, "--format", "csv"), ("--format", "csv", query), ("--format", "csv", "--", query)):
        assert cli("sql", *arguments).stdout == "n\n1\n"
    assert "No such option: --formt" in cli("sql", "select 1", "--formt", "csv").stderr


def test_json_has_numbers_for_sums_and_decimals(tmp_path, database):
    query = "select sum(94) as count, 1.50::decimal(9, 2) as price, [sum(2), null] as l, {'s': sum(3)} as t"
    row = {"count": 94, "price": 1.5, "l": [2, None], "t": {"s": 3}}
    assert json.loads(cli("sql", query, "--format", "json").stdout) == row
    assert cli("sql", query, "--output", "rows.json").returncode == 0
    assert json.loads((tmp_path / "rows.json").read_text()) == [row]
    large = json.loads(cli("sql", "select 170141183460469231731687303715884105727 as n", "--format", "json").stdout)
    assert large == {"n": pytest.approx(1.7014118346046923e38)}


def test_sql_reads_files_of_a_folder_that_is_named_and_no_others(tmp_path, database):
    for name in ("mine", "other"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "rows.csv").write_text("n\n7\n")
    (tmp_path / "linked").symlink_to("mine")
    csv_of = ("--format", "csv")
    assert cli("sql", "from 'mine/rows.csv'", "--read", "mine", *csv_of).stdout == "n\n7\n"
    assert cli("sql", "from 'linked/rows.csv'", "--read", "linked", *csv_of).stdout == "n\n7\n"
    both = "from 'mine/rows.csv' union all from 'other/rows.csv'"
    assert cli("sql", both, "--read", "mine", "--read", "other", *csv_of).stdout == "n\n7\n7\n"
    for query in ("from 'other/rows.csv'", "from 'mine/../other/rows.csv'", "from read_text('/etc/hosts')"):
        for options in ((), ("--read", "mine")):
            assert re.search("disabled by configuration.*sql --read FOLDER", cli("sql", query, *options).stderr, re.S)
    assert "there is no such folder" in cli("sql", "select 1", "--read", "gone").stderr
    for query in ("copy (select 1) to 'mine/new.csv'", "explain analyze copy (select 1) to 'mine/new.csv'"):
        assert "only one read-only query" in cli("sql", query, "--read", "mine").stderr
    assert not (tmp_path / "mine" / "new.csv").exists()


def test_sql_writes_its_rows_to_a_file_whose_ending_is_the_format(tmp_path, database):
    hostile = "<img src=x> ![i](http://e.org) | `a` [b](c)\nd"
    query = f"select 1 as n, '{hostile}' as text, [1.5::double, null] as l, null as e from range(2)"
    for ending in ("csv", "json", "jsonl", "md", "parquet"):
        (tmp_path / f"rows.{ending}").write_text("what was there before")
        done = cli("sql", query, "--output", f"rows.{ending}", "--force")
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


def test_sql_prints_rows_in_every_format_and_writes_them_whatever_the_ending(tmp_path, database, monkeypatch):
    nested = cli("sql", "select ['é', null] as l, [{'d': date '2023-01-30'}] as s", "--format", "csv").stdout
    assert list(csv.reader(nested.splitlines()))[1] == ['["é", null]', '[{"d": "2023-01-30"}]']
    query = "select 1 as n, 'a|b' as text"
    assert cli("sql", query, "--format", "md").stdout == "| n | text |\n| ---: | --- |\n| 1 | a\\|b |\n"
    assert json.loads(cli("sql", query, "--format", "json").stdout) == {"n": 1, "text": "a|b"}
    for format in ("csv", "json", "md", "table"):
        assert cli("sql", query, "--format", format, "--output", "rows.txt", "--force").returncode == 0
        assert (tmp_path / "rows.txt").read_text() == cli("sql", query, "--format", format).stdout
    piped = subprocess.run(
        [sys.executable, "-m", "toolformer_dag.cli", "sql", query, "--format", "parquet"],
        capture_output=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert pl.read_parquet(piped.stdout).to_dicts() == [{"n": 1, "text": "a|b"}]


def test_a_table_for_people_has_dashes_for_nulls_and_no_bar_of_a_text_ends_a_cell():
    rows = pl.DataFrame(
        {"a|b": ["|a - b|", None], "n": [None, 0.5], "k": [1, 2], "yes": pl.Series([None, None], dtype=pl.Boolean)}
    )
    head, _, first, second = format_rows_as_table(rows).splitlines()
    assert [cell.strip() for cell in head.split(" | ")] == ["| a\\|b", "n", "k", "yes |"]
    assert first.split() == ["|", "\\|a", "-", "b\\|", "|", "–", "|", "1", "|", "–", "|"]
    assert second.split() == ["|", "–", "|", "0.5", "|", "2", "|", "–", "|"]
    assert "null" in format_rows_as_table(rows, shows_types=True) and "|a - b|" in format_rows_as_table(
        rows, shows_types=True
    )


def test_sql_lists_the_saved_queries_with_their_descriptions():
    listed = dict(line.split(maxsplit=1) for line in cli("sql", "--list").stdout.splitlines())
    assert {"table_2", "sweep", "kept_by_domain", "most_helpful", "near_misses", "rejections"} <= listed.keys()
    assert all(len(told) > 20 and not told.startswith("-") for told in listed.values())


def test_the_shell_completes_commands_saved_queries_lanes_profiles_and_settings(tmp_path, monkeypatch):
    monkeypatch.setattr("sys.argv", ["toolformer-dag"])
    monkeypatch.setenv("_TOOLFORMER_DAG_COMPLETE", "complete_bash")

    def completed(*words):
        """Return what the shell offers for the last word."""
        monkeypatch.setenv("COMP_WORDS", " ".join(("toolformer-dag", *words)))
        monkeypatch.setenv("COMP_CWORD", str(len(words)))
        return cli().stdout.split()

    assert completed("sta") == ["stale"]
    assert completed("sql", "most") == ["most_helpful"]
    (tmp_path / "toolformer.toml").write_text("[tools.calculator]\n[tools.sums]\nuse = 'a:B'\n[profiles.mine]\n")
    assert completed("tool", "s") == ["sums"]
    assert completed("run", "--profile", "m") == ["mine"]
    assert completed("run", "--set", "tools.sums.m") == ["tools.sums.m=", "tools.sums.min_probability="]
    assert "training.max_steps=" in completed("run", "--set", "training.")
    (tmp_path / "toolformer.toml").write_text("broken [")
    assert completed("tool", "calc") == ["calculator"]


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


def test_what_sql_writes_replaces_a_file_only_by_force_and_goes_through_what_is_none(tmp_path, database):
    (tmp_path / "rows.csv").write_text("mine")
    link = tmp_path / "link.csv"
    link.symlink_to("rows.csv")
    write = ("sql", "select 1 as n", "--output")
    for name in ("rows.csv", "link.csv"):
        done = cli(*write, name)
        assert done.returncode == 1 and f"--output {name}: there is such a file" in done.stderr
    assert (tmp_path / "rows.csv").read_text() == "mine"
    assert cli(*write, "link.csv", "--force").returncode == 0
    assert link.is_symlink() and (tmp_path / "rows.csv").read_text() == "n\n1\n"
    (tmp_path / "null.csv").symlink_to(os.devnull)
    assert cli(*write, "null.csv").returncode == 0 and (tmp_path / "null.csv").is_char_device()


def test_what_is_stale_is_told_where_dagster_s_home_cannot_be_made(tmp_path):
    (tmp_path / ".dagster").write_text("mine")
    done = cli("stale")
    assert done.returncode == 0 and "ccnet/raw_shards" in done.stdout.splitlines()
    assert (tmp_path / ".dagster").read_text() == "mine"


def test_the_answers_before_a_tool_went_down_are_printed(monkeypatch):
    def run(tool, calls):
        if [call.input for call in calls] == ["1+1"]:
            return [ToolResult("2")]
        raise OSError("gone")

    monkeypatch.setattr(Calculator, "run", run)
    done = cli("tool", "calculator", "-", stdin="1+1\n" + "".join(f"{n}+2\n" for n in range(12)))
    assert done.returncode == 1 and "10 calls in a row" in done.stderr
    answers = [json.loads(line) for line in done.stdout.splitlines()]
    assert [answer["result"] for answer in answers] == ["2", *[None] * 10]


OWN_MODULE = '\n[tools.strange]\nuse = "strange:Tool"\nprompt = "strange.txt"\n'


def test_commands_that_only_read_do_not_import_the_module_that_a_settings_file_names(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setitem(sys.modules, "strange", ModuleType("strange"))
    monkeypatch.delitem(sys.modules, "strange")  # undone in turn, neither module stays
    (tmp_path / "strange.py").write_text("from pathlib import Path\nPath('imported').touch()\n")
    with (tmp_path / "toolformer.toml").open("a") as settings:
        settings.write(OWN_MODULE)
    (tmp_path / "lake").mkdir()
    duckdb.connect(tmp_path / "lake" / "toolformer.duckdb").close()  # without a seal and without tables
    options = {"sql": ["select 1"], "explore": ["--export", str(tmp_path / "page.html")]}
    for command, code in {"verify": 1, "clean": 0, "tables": 1, "sql": 0, "explore": 1}.items():
        done = cli(command, *options.get(command, ()))
        assert done.returncode == code, (command, done.stderr)
        assert "Traceback" not in done.stderr and "strange" not in done.stderr, command
    assert not (tmp_path / "imported").exists()
    assert cli("stale").returncode == 1 and (tmp_path / "imported").exists()


def test_verify_names_a_damaged_record_of_the_commit_of_a_data_set(tmp_path):
    pin = tmp_path / "lake/hub/0123456789abcdef.json"
    pin.parent.mkdir(parents=True)
    pin.write_bytes(seal_record("corpus.hub", {"resolved": {"revision": "main"}}))
    assert cli("verify").returncode == 0
    flip(pin, Random(0))
    done = cli("verify")
    assert done.returncode == 1 and f"{pin}: " in done.stdout


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (OSError(errno.EMFILE, "Too many open files"), r"not enough open files \(ulimit -n: \d+\)"),
        (RuntimeError("can't start new thread"), r"not enough processes and threads \(ulimit -u: \w+\)"),
        (RuntimeError("Os { code: 11, Resource temporarily unavailable }"), r"not enough processes and threads"),
        (MemoryError(), r"not enough memory \(ulimit -v: \w+\)"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory"), r"not enough memory \(ulimit -v: \w+\)"),
    ],
)
def test_a_limit_of_the_shell_is_named(error, told, monkeypatch):
    def reached(_: Settings) -> Plan:
        raise error

    monkeypatch.setattr(Plan, "from_settings_for_reading", reached)
    done = cli("verify")
    assert done.returncode == 1 and done.stderr.count("\n") == 1 and re.search(told, done.stderr)


def test_too_few_threads_are_refused_before_a_library_needs_them():
    told, tell = os.pipe()
    if not (child := os.fork()):
        try:
            resource.setrlimit(resource.RLIMIT_NPROC, (1, resource.getrlimit(resource.RLIMIT_NPROC)[1]))
            if not os.geteuid():
                os.setuid(65534)  # root has no such limit
            require_threads()
        except UserError as error:
            os.write(tell, str(error).encode())
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    os.close(tell)
    assert re.search(r"threads: .*\(ulimit -u: 1\); raise that limit", os.read(told, 1000).decode())
    os.close(told)


def test_score_prints_the_losses_and_names_bad_lines():
    bad_offset = LINE | {"offset": 2}
    missing = {key: value for key, value in LINE.items() if key != "tool"}
    broken = LINE | {"text": "half a \ud83d"}
    empty = LINE | {"text": "", "offset": 0}
    bad = [json.dumps(line) for line in (bad_offset, missing, broken, empty)]
    lines = "\n".join([json.dumps(LINE), *bad, "{", ""])
    done = cli("score", "-", "--model", str(SMALL_MODEL_FOLDER), "--dtype", "float32", stdin=lines)
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


def test_score_prints_the_losses_of_single_tokens_whose_weighted_sums_are_those_of_the_call():
    done = cli(
        "score", "-", "--model", str(SMALL_MODEL_FOLDER), "--dtype", "float32", "--tokens", "8", stdin=json.dumps(LINE)
    )
    scored = json.loads(done.stdout)
    assert (
        "".join(one["token"] for one in scored["tokens"])
        == LINE["text"][LINE["offset"] :][: sum(len(one["token"]) for one in scored["tokens"])]
    )
    for kind in ("loss_empty", "loss_call", "loss_result"):
        weighted = sum(one["weight"] * one[kind] for one in scored["tokens"])
        assert weighted == pytest.approx(scored[kind], abs=1e-5)


ANSWERED = '{"text": "The house is", "id": 7, "line": 9, "model": "another"}'
LINES = f'{ANSWERED}\nnope\n\n{{"text": "Today is", "context": "2023-01-30"}}\n{{"text": 3}}\n'


@pytest.mark.parametrize("name", ["-", "questions.jsonl", "questions"])
def test_generate_reads_and_writes_lines_and_names_the_bad_ones(tmp_path, name):
    (tmp_path / name).write_text(LINES)
    done = cli("generate", name, *MODEL, stdin=LINES if name == "-" else "")
    assert done.returncode == 1
    assert "line 2: not JSON" in done.stderr and "line 5: field 'text' must be a str" in done.stderr
    answers = [json.loads(line) for line in done.stdout.splitlines()]
    told = [(answer["line"], answer["model"], answer.get("id")) for answer in answers]
    assert told == [
        (1, str(SMALL_MODEL_FOLDER), 7),
        (4, str(SMALL_MODEL_FOLDER), None),
    ]  # also where a line was an answer of before
    for answer, text in zip(answers, ("The house is", "Today is"), strict=True):
        assert answer["text"].startswith(text) and answer["plain"].startswith(text)
        assert all(set(call) == {"tool", "input", "result", "reason"} for call in answer["calls"])
        assert answer["text"] + "\n" == cli("generate", text, "--context", answer.get("context", ""), *MODEL).stdout


def test_generate_shows_several_models_one_after_another(tmp_path):
    models = ("--model", "base", "--model", "embedded")
    done = cli("generate", "The house is", *models)
    assert [line for line in done.stdout.splitlines() if line.startswith("== ")] == [
        "== base ==",
        "== embedded ==",
    ]
    done = cli("generate", "-", *models, stdin=LINES)
    answers = [json.loads(line) for line in done.stdout.splitlines()]
    assert [(answer["model"], answer["line"]) for answer in answers] == [
        (name, line) for name in ("base", "embedded") for line in (1, 4)
    ]
    assert done.stderr.count("line 2") == 1  # named once, not by each model
    assert all(not answer["calls"] for answer in answers[:2])  # the condition "base" calls nothing


def test_generate_says_that_the_base_model_writes_where_no_checkpoint_is():
    told = cli("generate", "The house is", "--set", f"model.name={SMALL_MODEL_FOLDER}", "--max-new-tokens", "2").stderr
    assert f"{SMALL_MODEL_FOLDER}, not finetuned: no checkpoint is here; make it by toolformer-dag run" in told


def test_generate_traces_the_chance_of_a_call():
    done = cli("generate", "The house is", "--trace", "--k", "3", "--model", str(SMALL_MODEL_FOLDER))
    text, head, *rows = done.stdout.splitlines()
    assert text.startswith("The house is") and head.split() == ["p", "of", "[", "rank", "k", "=", "3"]
    assert rows and all(0 <= float(row.split()[0]) <= 1 for row in rows)
    assert all(("<" in row.split()[2:3]) == (int(row.split()[1]) < 3) for row in rows)
    done = cli("generate", "-", "--trace", "--model", str(SMALL_MODEL_FOLDER), stdin='{"text": "The house is"}')
    assert set(json.loads(done.stdout)["trace"][0]) == {"text", "probability", "rank"}


def test_generate_ends_with_the_sentence_unless_a_number_of_tokens_is_asked():
    one = cli("generate", "The house is", "--disabled", *MODEL).stdout
    more = cli("generate", "The house is", "--disabled", *MODEL, "--max-new-tokens", "60").stdout
    assert more.startswith(one.rstrip("\n")) and len(more) > len(one)


@pytest.mark.parametrize("colours", [True, False])
def test_generate_shows_a_call_as_it_happens_on_a_terminal_and_what_was_written_elsewhere(monkeypatch, colours):
    """A real terminal shows a call and its end too, where it is taken back."""
    main, terminal = pty.openpty()
    asked = ("generate", "The house is", "--k", "2048", *MODEL)
    for name, value in {"TERM": "xterm-256color", "COLUMNS": "80", **({} if colours else {"NO_COLOR": "1"})}.items():
        monkeypatch.setenv(name, value)
    with os.fdopen(terminal, "w") as shown, redirect_stdout(shown), pytest.raises(SystemExit, match="0"):
        app(list(asked))
    printed = b""
    with suppress(OSError):  # the terminal is closed
        while chunk := os.read(main, 2**16):
            printed += chunk
    os.close(main)
    assert b"\xe2\x9c\x97 " in printed or b"->" in printed
    assert (b"\x1b[3" in printed) == colours
    plain = cli(*asked)
    assert plain.stdout.startswith("The house is") and "[" not in plain.stdout
    key = "calculator|calendar|wiki_search|question_answering|machine_translation|a call"
    assert re.fullmatch(rf"(({key}): [a-z]+(_[a-z]+)+\n)+", plain.stderr)


@pytest.mark.parametrize(
    ("asked", "mistake"),
    [
        *((asked, "[tool.calculator]") for asked in (["sql", "from lanes"], ["explore"], ["tables"])),
        *((asked, "[tools.calculator]\ntau_ff = 1.0") for asked in (["run"], ["stale"], ["tool", "calculator"])),
        (["export", "data"], "[tools.calculator]\ntau_ff = 1.0"),
    ],
)
def test_a_mistake_in_the_settings_is_told_before_anything_heavy_is_imported(tmp_path, asked, mistake):
    (tmp_path / "toolformer.toml").write_text(mistake)
    code = (
        "import sys\nfrom toolformer_dag.cli import app\ntry:\n"
        f"    app({asked!r})\nexcept SystemExit as end:\n    assert end.code == 1\n"
        "print([name for name in ('dagster', 'torch', 'duckdb', 'polars', 'pyarrow', 'httpx') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n" and "unknown key; did you mean" in done.stderr


def test_a_long_step_has_a_line_every_half_minute_where_no_terminal_is(capsys: pytest.CaptureFixture[str]) -> None:
    began = time.monotonic()
    with show_steps() as watch:
        for seconds, done in ((20, 5), (31, 6), (45, 8), (62, 36)):
            watch(Step("evaluation/accuracy", "questions", done, total=40, began=began - seconds))
    lines = capsys.readouterr().err.splitlines()
    assert [line.partition(",")[0] for line in lines] == [
        f"evaluation/accuracy: {done} of 40 questions" for done in (6, 36)
    ]
    assert lines[1].endswith(", 0:00:07 left")
